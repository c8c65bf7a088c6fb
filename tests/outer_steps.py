"""What outer steps look like in runs that go well or badly: the table of docs/explanation/outer-step.md.

    python -m tests.outer_steps              every row, about half a minute of one core each, the long ones a minute
    python -m tests.outer_steps "H = 6"      only this one

Four learners train the lab's smallest model in virtual time. A row has the medians over the second half of the merges
that take a full outer step, of all fragments.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from diloco.pipeline.bus.ports import START
from diloco.pipeline.messages.fragment import Committed, Contribution, Head
from diloco_studies.quality import decoupled
from diloco_studies.quality.decoupled import LabWorld
from diloco_studies.quality.engine import train
from diloco_studies.quality.learner import LabLearner
from diloco_studies.quality.settings import LabRun

COMMON = {"model": "nano", "batch": 4, "seq_len": 128, "steps": 200, "evaluations": 1, "eval_tokens": 16_384}
LONG = {"steps": 384, "first_interval": 0, "outer_warmup": 0}
ODD = "learner-0"


class Taped(LabWorld):
    """Its result has the merges on the tape."""

    async def _books(self, heads: Sequence[Head]) -> dict[str, Any]:
        tape = [entry.record for entry in await self._bus.read_tape({0: START}, limit=10**6)]
        return {"merges": [one for one in tape if isinstance(one, Committed) and one.contributions]}


class WrongSign(LabLearner):
    """One learner of the run climbs its loss."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.id == ODD:
            self._gradients = partial(self._negated, self._gradients)  # type: ignore[assignment]

    def _negated(self, gradients: Callable[..., torch.Tensor], batch: Any) -> torch.Tensor:
        loss = gradients(batch)
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad.neg_()
        return loss


class TenfoldRate(LabLearner):
    """One learner of the run has ten times the inner learning rate."""

    def _train(self, order: Iterator[tuple[int, int]], takes_s: float) -> None:
        run = self.world.run
        if self.id == ODD:
            self.world.run = run.model_copy(update={"lr": 10 * run.lr})
        try:
            super()._train(order, takes_s)
        finally:
            self.world.run = run


ROWS: dict[str, tuple[type[LabLearner], dict[str, Any]]] = {
    "defaults": (LabLearner, {}),
    "seed 1": (LabLearner, {"seed": 1}),
    "wrong sign": (WrongSign, {}),
    "tenfold rate": (TenfoldRate, {}),
    "outer rate 1.4": (LabLearner, {"outer_lr": 1.4}),
    "outer rate 2.8": (LabLearner, {"outer_lr": 2.8}),
    "outer rate 5.6": (LabLearner, {"outer_lr": 5.6}),
    "nesterov 1.0/0.5": (LabLearner, {"outer": "nesterov", "outer_momentum": 0.5}),
    "nesterov 1.0/0.7": (LabLearner, {"outer": "nesterov"}),
    "nesterov 2.8/0.7": (LabLearner, {"outer": "nesterov", "outer_lr": 2.8}),
    "H = 6": (LabLearner, {"sync_interval": 6} | LONG),
    "H = 24": (LabLearner, {"sync_interval": 24} | LONG),
    "H = 96": (LabLearner, {"sync_interval": 96} | LONG),
}


def measure(learner: type[LabLearner], given: dict[str, Any]) -> tuple[float, LabRun, list[Committed]]:
    """Train one run; its final loss, its settings, and its merges."""
    run = LabRun.model_validate(COMMON | given)
    with patch.object(decoupled, "LabLearner", learner), patch.object(decoupled, "LabWorld", Taped):
        result = train(run, "cpu")
    return result["final"]["value"], run, result["merges"]


def late(run: LabRun, merges: Sequence[Committed]) -> list[Committed]:
    """The second half of the merges whose outer step is not an average."""
    full = [
        one
        for one in merges
        if one.version > run.outer_warmup and 2 * max(part.steps for part in one.contributions) >= one.interval
    ]
    return full[len(full) // 2 :]


def figures(name: str) -> dict[str, float]:
    """The figures of one row, by the heads of their columns."""
    loss, run, merges = measure(*ROWS[name])
    found = late(run, merges)
    parts = [part for one in found for part in one.contributions]

    def of(odd: bool, value: Callable[[Contribution], float | None]) -> float:
        return median(told for part in parts if (part.learner == ODD) == odd and (told := value(part)) is not None)

    return {
        "loss": loss,
        "rho": median(one.rho for one in found if one.rho is not None),
        "rate": median(one.outer_rate for one in found if one.outer_rate is not None),
        f"cosine of {ODD}": of(True, lambda part: part.cosine),
        "of the others": of(False, lambda part: part.cosine),
        f"norm of {ODD}": of(True, lambda part: part.norm),
        "norm of the others": of(False, lambda part: part.norm),
        "merged norm": median(one.norm for one in found),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or ROWS:
        print(chosen, *(f"{head} {value:.3g}" for head, value in figures(chosen).items()), sep=" | ", flush=True)
