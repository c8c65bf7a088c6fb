"""Outer steps per second as one model is cut into more fragments, all in flight at once: total bytes stay the same.

Also the round trip of a model that is hardly there, which is what windows, headers, scripts and polls cost.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from diloco.pipeline.units import counted
from diloco_studies.bench.end_to_end import Case, Fleet, server
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.machine import need_memory

SMALL = 65_536


@dataclass(frozen=True, slots=True)
class Ladder:
    """What is measured."""

    params: int = 10_000_000
    fragments: Sequence[int] = (1, 2, 4, 8, 16, 32)
    learners: int = 2
    wire: str = "bf16"
    rounds: int = 7
    passes: int = 2
    """How often the ladder is gone through."""


def measure(given: Ladder, console: Console, redis_url: str | None, aof: bool) -> dict[str, dict[str, Spread]]:
    """For each number of fragments: outer steps per second and seconds of a round."""
    whole = Case(given.params, learners=given.learners, wire=given.wire, rounds=given.rounds, outer="nesterov")
    need_memory(whole.memory_bytes(), f"{given.params / 1e6:g}M parameters with {counted(given.learners, 'learner')}")
    cases = {str(p): replace(whole, fragments=p) for p in given.fragments}
    cases["1, tiny"] = replace(whole, params=SMALL)
    took: dict[str, list[float]] = {name: [] for name in cases}
    with server(redis_url, aof) as url, progress(console) as bar:
        task = bar.add_task("", total=given.passes * len(cases))
        for _ in range(given.passes):
            for name, case in cases.items():
                bar.update(task, description=f"{name} fragments")
                took[name] += _rounds(case, url)
                bar.advance(task)
    return {
        name: {
            "outer_steps_per_s": spread(cases[name].fragments / one for one in values),
            "round_s": spread(values),
        }
        for name, values in took.items()
    }


def _rounds(case: Case, url: str) -> list[float]:
    """Seconds of each round but the first."""
    found = []
    with Fleet(case, url) as fleet:
        for number in range(case.rounds + 1):
            fleet.all("prepare")
            time.sleep(0.4)
            said = fleet.all("round")
            if number:
                found.append(max(one["adopted"] for one in said) - max(one["began"] for one in said))
    return found
