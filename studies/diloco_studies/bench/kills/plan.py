"""What is compared, and when which machine is killed. Pure.

A machine is a process group: of the decoupled run a learner, of data-parallel training torchrun's agent with its rank.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_studies.strikes.schedule import Manner, Party, Strike

MODEL = "nano"
BATCH, SEQ_LEN = 8, 128
"""Of a machine and step: 1,024 tokens."""
JITTER = 0.15
"""Times between two kills differ by so much from their mean at most."""
EVAL_EVERY_S = 2.0
"""Time between two measurements of the held-out loss."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train on all machines."""

    name: str
    lr: float
    """Its best inner rate at this size (docs/results/quality.md)."""
    nodes: str = ""
    """torchrun's `--nnodes`; empty: decoupled."""
    killed: bool = True


METHODS = {
    one.name: one
    for one in (
        Method("decoupled", 16e-3),
        Method("elastic", 16e-3, "{fewer}:{all}"),
        Method("data-parallel", 16e-3, "{all}"),
        Method("undisturbed", 16e-3, "{all}", killed=False),
    )
}
"""In the order in which they are run and shown."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all methods have in common."""

    machines: int
    tokens: int
    """Budget: trained tokens of all machines together."""
    pace_s: float
    """Length of an inner step, of which computing is a small part."""
    every_s: float
    """Mean time between two kills."""
    away_s: float
    """A killed machine is started again after it."""
    within_s: float
    """A method that has not spent the budget by then is stopped."""
    seed: int

    @property
    def step_tokens(self) -> int:
        """Of one machine."""
        return BATCH * SEQ_LEN

    def written(self) -> dict[str, Any]:
        """As results keep it: two that agree in it can be shown together."""
        return {**asdict(self), "model": MODEL, "batch": BATCH, "seq_len": SEQ_LEN, "eval_every_s": EVAL_EVERY_S}


def kills(plan: Plan) -> list[Strike]:
    """Who is killed when, since all machines trained; at most one at a time where `every_s` is longer than `away_s`."""
    chance = random.Random(f"{plan.seed}/kills")
    found, at_s = [], plan.every_s
    while at_s < plan.within_s:
        found.append(Strike(at_s, Manner.KILL, Party.LEARNER, plan.away_s, chance.random()))
        at_s += plan.every_s * chance.uniform(1 - JITTER, 1 + JITTER)
    return found


def name_of(machine: int) -> str:
    """A machine's name in all methods."""
    return f"learner-{machine}"


def in_words(plan: Plan) -> str:
    """The kills of a plan in one line."""
    names = [name_of(number) for number in range(plan.machines)]
    listed = ", ".join(f"{one.victim(names)} at {one.at_s:.0f} s" for one in kills(plan))
    return f"SIGKILL to {listed or 'nobody'}; each is started again after {plan.away_s:g} s"


# --- torchrun ----------------------------------------------------------------------------------------------

TORCHRUN = "diloco_studies.bench.kills.torchrun"
RENDEZVOUS = {
    "is_host": "false",
    "join_timeout": 3600,
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
}
"""The least that torch takes, in seconds, but for the attempts: fewer take a machine for dead that is only busy.

`is_host`: the store is beside the machines, as Redis is, so that no kill takes it along.
"""
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}
"""Each round has a store of its own for the ranks. Else survivors of rank 0's machine look for its old one."""


def torchrun(method: Method, plan: Plan, store: str, script: Path, arguments: Sequence[str]) -> list[str]:
    """Arguments of torchrun on one machine, with those of the training script."""
    nodes = method.nodes.format(fewer=max(1, plan.machines - 1), all=plan.machines)
    return [
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        "--max-restarts=1000000",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={store}",
        "--rdzv-id=kills",
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items()),
        "--local-addr=127.0.0.1",
        "--run-path",
        "--start-method=fork",
        str(script),
        *arguments,
    ]
