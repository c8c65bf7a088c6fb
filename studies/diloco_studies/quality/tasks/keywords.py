"""A task for fine-tuning: which keyword was left out of a piece of Python, at the beginning of a statement?

Statements are those of the text that models are pre-trained on, found by `ast`. A held-out statement is of a file that
is held out of that text too.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from keyword import iskeyword
from pathlib import Path

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data.blocks import permuted
from diloco.workers.trainer.data.files import stdlib_files, stdlib_root, visible_files
from diloco.workers.trainer.data.tokens import balanced, is_held_out
from diloco.workers.trainer.models.gpt import build
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.answers import Scored, loss_of_answers, rows_of

BLANK, ASKED = b"?", b"\n# "
"""In the keyword's place, and between the piece and the answer."""
LONGEST = len(b"continue\n")
AROUND = len(BLANK + ASKED) + LONGEST
SHORTEST = AROUND + 2
"""Of sequences: a byte on either side of the keyword."""
EVALUATED_AT_ONCE = 32

Example = tuple[bytes, bytes]
"""(prompt, answer)"""


class KeywordTask:
    """An example is a statement; it counts `seq_len` tokens. `eval_tokens` / `seq_len` statements are measured."""

    measure = "held-out loss (nats a byte)"
    higher_is_better = False
    same_kernels = False

    def __init__(self, run: LabRun, device: torch.device) -> None:
        """Read the statements.

        Raises:
            UsageError: there are none, or none in files that are held out, or `seq_len` is too small for one.
        """
        self._run, self._device = run, device
        self._train, held_out = statements(run.data, run.seq_len)
        wanted = max(1, run.eval_tokens // run.seq_len)
        self._held_out = held_out[:: -(-len(held_out) // wanted)]
        self.examples, self.example_tokens = len(self._train), run.seq_len

    def build(self) -> nn.Module:
        """A GPT for bytes."""
        return build(self._run.model, self._run.seed).to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Inputs and targets (B, T)."""
        seed = self._run.seed
        ats = [permuted(index, self.examples, b"/%d/%d" % (seed, epoch)) for epoch, index in chosen]
        return self._tensors([self._train[at] for at in ats])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats a byte of the keywords."""
        inputs, targets = batch
        return loss_of_answers(model(inputs), targets)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nats a byte of held-out statements' keywords, and the share of keywords that are exactly right."""
        scored = Scored()
        for start in range(0, len(self._held_out), EVALUATED_AT_ONCE):
            inputs, targets = self._tensors(self._held_out[start : start + EVALUATED_AT_ONCE])
            scored.add(model(inputs), targets)
        return scored.measures()

    def _tensors(self, examples: Sequence[Example]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(part).to(self._device) for part in rows_of(examples, self._run.seq_len))


@cache
def statements(data: str, length: int) -> tuple[list[Example], list[Example]]:
    """Those to train on and those held out, in the order of their files; prompt and answer have `length` bytes at most.

    Raises:
        UsageError: `length` leaves no byte beside a keyword, `data` is neither 'stdlib' nor a folder, or one of the two
            is empty or too large a part.
    """
    if length < SHORTEST:
        raise UsageError(f"seq_len={length} has no room for a statement; task='keywords' needs {SHORTEST} or more")
    folder = Path(data)
    root, files = (stdlib_root(), stdlib_files()) if data == "stdlib" else (folder, visible_files(folder))
    train: list[Example] = []
    held_out: list[Example] = []
    sizes = [0, 0]
    for path in files:
        sizes[is_held_out(path.relative_to(root).as_posix())] += path.stat().st_size
        if path.suffix == ".py":
            place = held_out if is_held_out(path.relative_to(root).as_posix()) else train
            place += examples_of(path.read_text("utf-8", "replace"), length)
    if not train or not held_out:
        raise UsageError(
            f"data={data!r}: {len(train)} statements to train on and {len(held_out)} held out; task='keywords' needs "
            "'stdlib', or a folder of many Python files"
        )
    if not balanced(sizes[1], sum(sizes)):  # task='text' would train on files that are held out here
        raise UsageError(
            f"data={data!r}: {sizes[1]} of {sum(sizes)} bytes are in files that are held out; task='keywords' needs "
            "'stdlib', or a folder of more files"
        )
    return train, held_out


def examples_of(source: str, length: int) -> Iterator[Example]:
    """Of a file's statements that begin with a keyword; none where it is no Python of this version."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of what is nested too deep
        return
    text = source.encode()
    begins = [0, *accumulate(len(line) + 1 for line in text.split(b"\n"))]
    side = (length - AROUND) // 2
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            at = begins[node.lineno - 1] + node.col_offset
            word = re.match(rb"[a-z]+\b", text[at : at + LONGEST])
            if word is not None and iskeyword(word[0].decode()):
                before, after = text[max(0, at - side) : at], text[at + len(word[0]) :][:side]
                yield before + BLANK + after + ASKED, word[0]
