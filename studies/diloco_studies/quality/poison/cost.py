"""What it takes to know who disagrees, beside the merge: processor time of one thread, the least of some times.

`python -m diloco_studies.quality.poison.cost` prints the tables of `docs/results/poison.md`.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.process.cores import one_blas_thread
from diloco.syncer.merging.merge import Sum, delta_norms
from diloco.syncer.standing import agreements, gram, judged, places, sample_of
from diloco_studies.bench.machine import need_memory

ELEMENTS, LEARNERS, TIMES = 12_500_000, 8, 5
MANY = 64, 256, 1024


def least_ms(what: Callable[[], object], times: int = TIMES) -> float:
    """CPU milliseconds."""
    took = []
    for _ in range(times):
        began = time.process_time()
        what()
        took.append(time.process_time() - began)
    return 1e3 * min(took)


def beside_the_merge() -> str:
    """A line each: cosines, sum, and sum with a factor, of deltas that are here."""
    layout = layout_of([TensorSpec(name="t", shape=(ELEMENTS,), dtype="float32", rule="mean", fragment=0)]).fragments[0]
    chance = np.random.default_rng(0)
    deltas = [chance.standard_normal(ELEMENTS, np.float32) for _ in range(LEARNERS)]
    norms, shares = [delta_norms(layout, delta) for delta in deltas], [1.0] * LEARNERS
    clipped = [0.5] + [1.0] * (LEARNERS - 1)
    out, at = np.empty(ELEMENTS, np.float32), places(ELEMENTS, 0, sample_of(LEARNERS))
    rows = {
        "their cosines": lambda: judged(deltas, at),
        "their sum": lambda: Sum(layout, out).add(deltas, norms, shares),
        "their sum, one of them with a factor": lambda: Sum(layout, out).add(deltas, norms, shares, clipped),
    }
    return "\n".join(f"| {name} | {least_ms(what):.0f} |" for name, what in rows.items())


def of_many(learners: int) -> str:
    """A line: the sample of each, what all samples take, scalar products and agreements."""
    sample = sample_of(learners)
    at, chance = places(2 * sample, 0, sample), np.random.default_rng(0)
    common = chance.standard_normal(2 * sample, np.float32)
    deltas = [common + chance.standard_normal(2 * sample, np.float32) for _ in range(learners)]
    products = gram(deltas, at)
    took = least_ms(lambda: gram(deltas, at)), least_ms(lambda: agreements(products))
    return f"| {learners:,} | {sample:,} | {8 * learners * sample >> 20} | {took[0]:.0f} | {took[1]:.1f} |"


if __name__ == "__main__":
    one_blas_thread()
    need_memory(4 * ELEMENTS * (LEARNERS + 3), "a merge")
    lines = [f"| {LEARNERS} deltas of {ELEMENTS:,} elements | ms a merge |", "|---|---|", beside_the_merge(), ""]
    lines += ["| deltas | elements looked at | MiB | products, ms | agreements, ms |", "|---|---|---|---|---|"]
    sys.stdout.write("\n".join([*lines, *map(of_many, MANY)]) + "\n")
