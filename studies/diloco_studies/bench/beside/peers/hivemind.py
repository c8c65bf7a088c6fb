"""hivemind: a peer that averages its tensors with the others, in place; there is no outer step in that.

Matchmaking is done before a round begins (it takes seconds, and a training loop does it ahead of time). A round: from
the word that all-reduce may run to the average being in the tensors.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.p2p import P2P

MATCHMAKING_S = 2.0
LIMIT_S = 60.0


class Peer:
    """One of them."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.number = given["number"]
        (fragment,) = given["fragments"]
        self.tensors = []
        for seed, shape in enumerate(fragment.values()):
            generator = torch.Generator().manual_seed(seed)
            self.tensors.append(torch.empty(shape).normal_(0.0, 0.02, generator=generator))
        known = [given["address"]] if given["address"] else None
        P2P._UNIX_SOCKET_PREFIX = f"/unix{Path.cwd()}/"  # its sockets stay behind; this folder does not
        self.dht = hivemind.DHT(initial_peers=known, start=True, tls=False)
        self.averager = DecentralizedAverager(
            self.tensors,
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=given["learners"],
            min_group_size=given["learners"],
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            allow_state_sharing=False,
        )
        self.step: StepControl | None = None

    def hello(self) -> dict[str, Any]:
        """What is measured."""
        return {
            "versions": {"hivemind": version("hivemind"), "torch": torch.__version__},
            "settings": "averaging alone (no outer step), matchmaking not counted, no TLS, no compression; "
            "of several fragments one alone is held",
            "address": str(self.dht.get_visible_maddrs()[0]),
        }

    def prepare(self) -> dict[str, Any]:
        """Move the tensors, each peer by something else, and find the others."""
        with self.averager.get_tensors() as tensors, torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1.0 - 1e-3 * (1 + self.number))
        self.step = self.averager.step(wait=False, require_trigger=True, timeout=LIMIT_S)
        while self.step.stage != AveragingStage.AWAITING_TRIGGER:
            if self.step.done():
                self.step.result()
            time.sleep(0.01)
        return {}

    def round(self) -> dict[str, Any]:
        """All-reduce."""
        assert self.step is not None  # noqa: S101  # `prepare` comes first
        began = time.monotonic()
        self.step.allow_allreduce()
        self.step.result(timeout=LIMIT_S)
        return {"began": began, "adopted": time.monotonic()}

    def check(self) -> dict[str, Any]:
        """What the peer has come to."""
        with self.averager.get_tensors() as tensors:
            return {"lengths": [sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors) ** 0.5]}

    def end(self) -> None:
        """Its processes and sockets go."""
        self.averager.shutdown()
        self.dht.shutdown()


def main() -> None:
    """Say hello, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer(json.loads(sys.argv[1]))
    print(json.dumps(peer.hello()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(peer, line.strip())()), file=answers, flush=True)
    peer.end()


if __name__ == "__main__":
    main()
