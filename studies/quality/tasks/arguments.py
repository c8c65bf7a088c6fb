"""A task for fine-tuning: from the beginning of a Python function's body to the names of its arguments.

Functions are those of the text that models are pre-trained on, read by `ast`. A held-out function is of a file that
is held out of that text too. Asked for are only names that the beginning has: all there is to find is there to see.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.studies.quality.settings import LabRun
from diloco.studies.quality.tasks.answers import Scored, loss_of_answers, rows_of
from diloco.workers.trainer.data.blocks import permuted
from diloco.workers.trainer.data.files import stdlib_files, stdlib_root, visible_files
from diloco.workers.trainer.data.tokens import is_held_out
from diloco.workers.trainer.models.gpt import build

ASKED = b"\n# "
"""Between a body and the names."""
LONGEST = 32
"""Bytes of an answer, its end included."""
MOST_LINES = 32
"""Of a body."""
EVALUATED_AT_ONCE = 32

Example = tuple[bytes, bytes]
"""(prompt, answer)"""


class ArgumentsTask:
    """An example is a function; it counts `seq_len` tokens. `eval_tokens` / `seq_len` functions are measured."""

    measure = "held-out loss (nats a byte)"
    higher_is_better = False

    def __init__(self, run: LabRun, device: torch.device) -> None:
        """Read the functions.

        Raises:
            UsageError: there are none, or none in files that are held out.
        """
        self._run, self._device = run, device
        self._train, held_out = functions(run.data, run.seq_len)
        wanted = max(1, run.eval_tokens // run.seq_len)
        self._held_out = held_out[:: -(-len(held_out) // wanted)]
        self.examples, self.example_tokens = len(self._train), run.seq_len

    def build(self) -> nn.Module:
        """A GPT for bytes."""
        return build(self._run.model, self._run.seed).to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]], learner: int = 0) -> tuple[torch.Tensor, ...]:
        """Inputs and targets (B, T)."""
        seed = self._run.seed
        ats = [permuted(index, self.examples, b"/%d/%d" % (seed, epoch)) for epoch, index in chosen]
        return self._tensors([self._train[at] for at in ats])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats a byte of the names."""
        inputs, targets = batch
        return loss_of_answers(model(inputs), targets)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nats a byte of held-out functions' names, and the share of functions whose names are exactly right."""
        scored = Scored()
        for start in range(0, len(self._held_out), EVALUATED_AT_ONCE):
            inputs, targets = self._tensors(self._held_out[start : start + EVALUATED_AT_ONCE])
            scored.add(model(inputs), targets)
        return scored.measures()

    def _tensors(self, examples: Sequence[Example]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(part).to(self._device) for part in rows_of(examples, self._run.seq_len))


@cache
def functions(data: str, length: int) -> tuple[list[Example], list[Example]]:
    """Those to train on and those held out, in the order of their files; prompt and answer have `length` bytes at most.

    Raises:
        UsageError: `data` is neither 'stdlib' nor a folder, or one of the two is empty.
    """
    folder = Path(data)
    root, files = (stdlib_root(), stdlib_files()) if data == "stdlib" else (folder, visible_files(folder))
    train: list[Example] = []
    held_out: list[Example] = []
    for path in files:
        if path.suffix == ".py":
            place = held_out if is_held_out(path.relative_to(root).as_posix()) else train
            place += examples_of(path.read_text("utf-8", "replace"), length)
    if not train or not held_out:
        raise UsageError(
            f"data={data!r}: {len(train)} functions to train on and {len(held_out)} held out; task='arguments' needs "
            "'stdlib', or a folder of many Python files"
        )
    return train, held_out


def examples_of(source: str, length: int) -> Iterator[Example]:
    """Of a file's functions; none where it is no Python of this version."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.split("\n")  # as `ast` counts them
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names, room = _names(node.args), length - LONGEST - len(ASKED)
            begin, answer = _body(node, lines).encode()[:room], ", ".join(names).encode()
            if names and len(answer) < LONGEST and set(names) <= set(re.findall(r"\w+", begin.decode(errors="ignore"))):
                yield begin + ASKED, answer


def _names(of: ast.arguments) -> list[str]:
    found = [*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg]
    return [one.arg for one in found if one is not None and one.arg not in ("self", "cls")]


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    """The first lines of it, without its docstring."""
    parts = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not parts or parts[0].lineno == node.lineno:
        return ""
    first = parts[0].lineno - 1
    return textwrap.dedent("\n".join(lines[first : min(first + MOST_LINES, node.end_lineno or first)]))
