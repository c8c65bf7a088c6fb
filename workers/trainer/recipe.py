"""Device, text, batches and the inner step, shared by the trainer, the data-parallel baseline and the evaluator."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import nn

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.process.signals import AGAIN_STATUS, end_signals, exit_at_once, two_phases
from diloco.pipeline.settings import TrainerSettings
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.tokens import BYTES, TextData, Tokens
from diloco.workers.trainer.models.hf_config import HfModel

# Tokens in one forward pass of an evaluation. It bounds the memory that an evaluation takes.
EVAL_BATCH_TOKENS = 4096

TrainerSpec = dict[str, str | int | float | bool | None]


def choose_device(name: str) -> torch.device:
    """Return the device of this name; "auto" takes CUDA if there is any, otherwise the CPU.

    Raises:
        UsageError: the device is not on this machine, or is of a kind that the trainer does not know.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    try:
        device = torch.device(name)
    except RuntimeError:  # not the name of a device
        device = None
    if device is None or not here.get(device.type) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise UsageError(f"device={name!r} is not available on this machine; use 'auto' for whatever is available")
    return device


def use_threads(threads: int | None) -> None:
    """Set torch's threads; by default one for each core this process may use."""
    torch.set_num_threads(threads or usable_cores())


def forward_of(model: nn.Module, device: torch.device, compiled: bool, backend: str = "inductor") -> nn.Module:
    """Return the module to call in training: the model itself, or torch.compile's wrapper around the same parameters.

    Raises:
        UsageError: models cannot be compiled on this machine. A tiny one is compiled first, so that the error comes
            early.
    """
    if not compiled:
        return model
    try:
        trial = nn.Linear(8, 8, device=device)
        torch.autograd.backward(torch.compile(trial, backend=backend)(torch.ones(8, 8, device=device)).sum())
    except Exception as error:  # each backend raises its own kinds
        needs = "Triton (pip install triton)" if device.type == "cuda" else "a C++ compiler (g++, or set CXX to yours)"
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise UsageError(f"--compile needs {needs} on this machine: {first}") from error
    made: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]  # given a module it returns one
    return made


def trainer_spec(settings: TrainerSettings, text: TextData, named: HfModel | None = None) -> TrainerSpec:
    """Return what learners must agree on: the trainer's settings and the text's fingerprint.

    For a transformers model (`named`) its config takes the place of the path to it.
    """
    more: TrainerSpec = {} if text.vocab == BYTES else {"vocab": text.vocab}
    more |= {} if text.tokenizer is None else {"tokenizer": text.tokenizer}
    more |= {} if named is None else {"model": named.agreed}
    return settings.trainer_spec() | {"data_fingerprint": text.fingerprint} | more


def check_text(text: TextData, data: str, spec: TrainerSpec) -> None:
    """Refuse to train or measure on a text other than the run's.

    Raises:
        SpecMismatch: the fingerprints or the vocabularies differ, and the message shows both; or the run has no text.
    """
    if "data_fingerprint" not in spec:
        raise SpecMismatch(
            "this run was not started by the built-in trainer: to add a learner, start the run's own program"
        )
    if text.fingerprint != spec["data_fingerprint"]:
        hint = " (another Python version has a different standard library)" if data == "stdlib" else ""
        raise SpecMismatch(
            f"data={data!r} holds a different text here from the run's{hint}: fingerprint here {text.fingerprint}, "
            f"the run has {spec['data_fingerprint']}. Give this party a copy of the run's text (--data)"
        )
    if text.vocab != (run := spec.get("vocab", BYTES)):
        raise SpecMismatch(
            f"data={data!r} needs a model with a vocabulary of {text.vocab}, but the run's model has {run}. Give this "
            "party a copy of the run's text (--data)"
        )


def make_optimizers(parameters: Iterable[torch.Tensor], lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Make a fused AdamW that decays only parameters with two or more dimensions; none if all are frozen."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)] if groups else []


def read_batch(blocks: Blocks, order: Iterator[tuple[int, int]], size: int, device: torch.device) -> torch.Tensor:
    """Read the next `size` blocks of an order of (epoch, index); return (size, T + 1) int64 on the device."""
    rows = [blocks.block(epoch, index) for epoch, index in islice(order, size)]
    return to_device(np.stack(rows), device)


def to_device(tokens: Tokens, device: torch.device) -> torch.Tensor:
    """Copy blocks (B, T + 1) of any unsigned type to int64 on the device; the copy to a GPU is asynchronous."""
    batch = torch.from_numpy(tokens if tokens.dtype == np.uint8 else tokens.astype(np.int64))
    if device.type == "cuda":
        batch = batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device, torch.int64)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per token of blocks (B, T + 1); bf16 autocast on CUDA, float32 elsewhere."""
    logits = logits_of(model, batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V) of tokens (B, T); transformers' models return them inside an output object."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        found = model(tokens)
    logits: torch.Tensor = getattr(found, "logits", found)
    return logits


def add_gradients(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    count: int,
    begin: Callable[[bool], None] = lambda last: None,
) -> torch.Tensor:
    """Add the gradient of the mean loss over `count` micro-batches to `.grad`; return that loss, still on the device.

    begin: called before each micro-batch with True if it is the last one.
    """
    total = torch.zeros((), device="cpu")
    for number, batch in enumerate(batches):
        begin(number == count - 1)
        loss = loss_of(model, batch) / count
        torch.autograd.backward(loss)
        total = loss.detach() if number == 0 else total + loss.detach()
    return total


def update(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], lr: float, clip: float) -> None:
    """Clip the gradients (not if `clip` is infinity), step the inner optimizers, and clear the gradients."""
    if clip < math.inf:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.inference_mode()
def held_out_loss(model: nn.Module, validation: Tokens, device: torch.device) -> float:
    """Return the mean loss in nats per token of validation blocks (N, T + 1), without dropout."""
    training = model.training
    model.eval()
    rows = max(1, EVAL_BATCH_TOKENS // (validation.shape[1] - 1))
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for start in range(0, len(validation), rows):
        batch = to_device(validation[start : start + rows], device)
        total += loss_of(model, batch).cpu() * len(batch)
    model.train(training)
    return total.item() / len(validation)


class StopFlag:
    """A flag that the first signal to end sets and the loop reads between inner steps; a second one ends the process at
    once.

    Until `training` is set, the first signal ends the process too: a learner that still joins has nothing to save and
    only says goodbye.
    """

    def __init__(self) -> None:
        self.asked = False
        self.training = False
        handle = two_phases(self._ask, exit_at_once)
        for number in end_signals():
            signal.signal(number, lambda number, frame: handle(number))

    def _ask(self) -> None:
        if self.asked:
            return
        self.asked = True
        if not self.training:
            raise SystemExit(AGAIN_STATUS)
