"""gradientmail: two learners and a dedicated syncer as threads of one process, since its in-memory mailbox is a dict.

Nothing leaves the process, which is the fastest that it can be. A round: both learners make the step that publishes;
they go on when their poll has found the commit, and have adopted it when the step after that returns.
"""

import ctypes
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gradientmail as gm
import torch
from gradientmail.adapters.torch import TorchBackend
from torch import nn

POLL_S = 0.01
"""How often learners and syncer look into the mailbox; its default is 1 s. 2 ms is no faster here, 50 ms slower."""
GAP = 64
"""Steps from one publication to the next: enough for those in which a commit is adopted."""
SERVER = "gm-server"
PR_SET_NAME = 15  # linux/prctl.h; threads that a thread starts inherit its name


class Model(nn.Module):
    """Random weights of the given shapes."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(seed)
            self.register_parameter(name, nn.Parameter(torch.empty(shape).normal_(0.0, 0.02, generator=generator)))


class Learner:
    """A session in a thread of its own; the commands of a round come through a queue."""

    def __init__(self, number: int, model: Model, how: dict[str, Any]) -> None:
        self.number, self.model = number, model
        self.commands: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()
        self._recorded, self._aligned, self._stepped = threading.Event(), False, 0.0
        self.fragment = 0
        """The one adopted last."""
        self._session = gm.Session(model, role="learner", node_id=f"learner-{number}", callbacks=(self._saw,), **how)

    def _saw(self, event: object) -> None:
        if isinstance(event, gm.events.RoundRecorded):
            self._recorded.set()
        elif isinstance(event, gm.events.FragmentAligned):
            self._aligned, self.fragment = True, event.fragment
        elif isinstance(event, (gm.events.PollFailed, gm.events.PublishFailed)):
            print(event, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Train until the commands end."""
        try:
            self._session.run(self._step, self._batches())
        except BaseException:
            self.answers.put({})
            raise

    def _step(self, _: None) -> int:
        self._stepped = time.monotonic()
        return 1000

    def _batches(self) -> Iterator[None]:
        """One item a step. The learner's own work is between a step's return and the next item being asked for."""
        since = 0
        while self.commands.get():
            for _ in range(GAP - 1 - since):
                yield
            self._recorded.clear()
            self._aligned, since = False, 0
            yield
            began, published = self._stepped, time.monotonic()
            self._recorded.wait()
            adopt_s = 0.0
            while not self._aligned:
                yield
                since += 1
                adopt_s = time.monotonic() - self._stepped
            adopted = time.monotonic()
            self.answers.put({"began": began, "blocked_s": published - began + adopt_s, "adopted": adopted})


class Run:
    """All of it."""

    def __init__(self, given: dict[str, Any]) -> None:
        fragments = given["fragments"]
        shapes = {name: shape for fragment in fragments for name, shape in fragment.items()}
        algorithm = gm.DiLoCo(
            sync_every=GAP * len(fragments),
            fragments=len(fragments),
            in_flight=1,
            follow=0,
            quorum_size=given["learners"],
            grace_seconds=0.0,
            outer_lr=given["outer_lr"],
            outer_momentum=given["momentum"],
        )
        how = {"algorithm": algorithm, "mailbox": gm.MemoryMailbox(), "poll_interval": POLL_S}
        self.learners = [Learner(number, Model(shapes), how) for number in range(given["learners"])]
        self.plan = algorithm.plan(TorchBackend().adapter(self.learners[0].model).schema())
        # A syncer looks at its model's names and shapes only.
        serving = gm.Session(self.learners[0].model, role="syncer", node_id="syncer", callbacks=(), **how)
        threading.Thread(target=self._serve, args=(serving,), daemon=True).start()
        for learner in self.learners:
            threading.Thread(target=learner.run, daemon=True).start()

    def _serve(self, session: gm.Session) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, SERVER.encode(), 0, 0, 0)
        session.run(lambda _: 0, ())

    def hello(self) -> dict[str, Any]:
        """What is measured."""
        return {
            "versions": {"gradientmail": version("gradientmail"), "torch": torch.__version__},
            "settings": f"in-memory mailbox, dedicated syncer, polls every {POLL_S * 1000:g} ms; deltas and state "
            "fp32, merge RDA; all in one process",
        }

    @torch.no_grad()
    def prepare(self) -> dict[str, Any]:
        """Move each learner's weights by something else."""
        for learner in self.learners:
            for tensor in learner.model.parameters():
                tensor.mul_(1.0 - 1e-3 * (1 + learner.number))
        return {}

    def round(self) -> dict[str, Any]:
        """One fragment, published by all and adopted by all."""
        before = server_cpu_s()
        for learner in self.learners:
            learner.commands.put(True)
        said = [learner.answers.get() for learner in self.learners]
        return {name: max(one[name] for one in said) for name in ("began", "blocked_s", "adopted")} | {
            "server_cpu_s": server_cpu_s() - before
        }

    def check(self) -> dict[str, Any]:
        """What the learners have adopted last."""
        return {
            "lengths": [
                length(learner.model.get_parameter(name) for name in self.plan[learner.fragment])
                for learner in self.learners
            ]
        }


@torch.no_grad()
def length(tensors: Iterable[torch.Tensor]) -> float:
    """Of all values together."""
    squares: list[float] = [float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors]
    return math.sqrt(sum(squares))


def server_cpu_s() -> float:
    """CPU time of the syncer's threads. Linux."""
    spent = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == SERVER:
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def main() -> None:
    """Say hello, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = Run(json.loads(sys.argv[1]))
    print(json.dumps(run.hello()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(run, line.strip())()), file=answers, flush=True)
    os._exit(0)  # its threads would wait for commits that nobody makes


if __name__ == "__main__":
    main()
