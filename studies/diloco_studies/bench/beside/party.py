"""A learner of `bench end-to-end`: the production one around random weights, moved by hand instead of trained.

Commands come line by line on stdin, answers leave as JSON lines on stdout:
`python -m diloco_studies.bench.beside.party '{"...": ...}'`.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process import logs
from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from diloco.workers.rounds import Base

WIDTHS = (768, 256, 64, 16)
"""Of matrices: the widest of which there are two for each fragment."""
PATIENCE_S = 120.0

MOVED = 1e-2
"""By this share of itself each weight is moved in a round: more than the step between two bf16 values."""


def shapes_of(elements: int, fragments: int) -> list[tuple[int, int]]:
    """(rows, width) of an embedding of a tenth, or of one fragment if that is less; of square matrices; of the rest."""
    width = next((one for one in WIDTHS if 0.9 * elements >= 2 * fragments * one**2), WIDTHS[-1])
    rows = max(1, elements // width)
    embedded = max(1, rows // max(10, fragments))
    square, left = divmod(rows - embedded, width)
    return [(embedded, width), *[(width, width)] * square, *([(left, width)] if left else [])]


class Weights(nn.Module):
    """Of the shapes that `shapes_of` tells."""

    def __init__(self, elements: int, fragments: int, dtype: torch.dtype) -> None:
        super().__init__()
        embedding, *matrices = shapes_of(elements, fragments)
        self.embedding = nn.Embedding(*embedding, dtype=dtype)
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in matrices)
        for number, tensor in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                tensor.normal_(0.0, 0.02, generator=generator)

    @torch.no_grad()
    def move(self, factor: float) -> None:
        """Stands for training."""
        for tensor in self.parameters():
            tensor.mul_(factor)


class Arrivals(dict[int, Base]):
    """Newest globals that are not adopted yet; waiting for them wakes nobody in between, as looking now and then would.

    With many learners on few cores that took more than their work.
    """

    def __init__(self, here: Mapping[int, Base]) -> None:
        super().__init__(here)
        self._more = threading.Event()

    def __setitem__(self, fragment: int, base: Base) -> None:
        super().__setitem__(fragment, base)
        self._more.set()

    def wait(self, count: int) -> None:
        """Until those of so many fragments are here.

        Raises:
            TimeoutError: nothing comes. Learners here do not train on, so a delta that was refused is not made again.
        """
        while len(self) < count:
            if not self._more.wait(PATIENCE_S):
                raise TimeoutError(
                    f"no merge for {PATIENCE_S:g} s: deltas were refused, which happens to late uploads on a busy "
                    "machine. Use fewer --learners, or --spread them"
                )
            self._more.clear()


class Party:
    """One learner and what it is told."""

    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.number: int = given["number"]
        self.delay_s: float = given["delay_s"]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given["dtype"]]
        self.weights = Weights(given["params"], given["sync"]["fragments"], dtype)
        self.learner = Learner(
            self.weights,
            run=given["run"],
            redis_url=given["url"],
            learner_id=f"bench-{self.number}",
            sync=SyncSettings(**given["sync"]),
            leave_s=1.0,
        )

    def join(self) -> None:
        """Once the learner is in its run."""
        shared = self.learner.joined.shared
        shared.adoptions = self.arrivals = Arrivals(shared.adoptions)

    def prepare(self) -> dict[str, Any]:
        """Move the weights, each learner by something else."""
        self.weights.move(1.0 - MOVED * (1 + self.number))
        return {}

    def round(self) -> dict[str, Any]:
        """Publish what is due, wait until all of it has come back as the next version, adopt it."""
        learner = self.learner
        rounds = learner.joined.training.rounds
        before = rounds.deltas
        time.sleep(self.delay_s)
        while True:
            began = time.monotonic()
            learner.step(tokens=1000)
            published = time.monotonic()
            if rounds.deltas > before:  # fragments that take turns are not due at every step
                break
        count = rounds.deltas - before
        self.arrivals.wait(count)
        arrived = time.monotonic()
        learner.step(tokens=1000)
        adopted = time.monotonic()
        return {
            "began": began,
            "publish_s": published - began,
            "arrived": arrived,
            "adopt_s": adopted - arrived,
            "adopted": adopted,
            "fragments": count,
        }


def main() -> None:
    """Join, answer until stdin ends."""
    logs.configure("warning")
    party = Party(json.loads(sys.argv[1]))
    with party.learner:
        party.join()
        print(dumps({"joined": True}), flush=True)
        for line in sys.stdin:
            print(dumps(getattr(party, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
