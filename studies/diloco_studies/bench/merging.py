"""The merge and the outer step of one fragment in memory, on one core: production code beside whole-array numpy.

default_s: with the outer optimizer that a run has by default, where the fragment's tensors are square matrices, in one
thread as a syncer's. halley_s: what orthogonalising them takes of it; beside one product of such a matrix with a square
one. All else is elementwise, with Nesterov's step.

rows_s: the same as merge_s, with RDA of each row instead of each tensor, in rows as long as those matrices are wide.
merge_s: all deltas are here at once. folding_s and closing_s: they came one after another, and all but the last were
summed before. Rates are bytes of deltas per second. The floor is a copy between large arrays by one thread, for the
bytes that a merge must read and write. Seconds are of the core, so that what else the machine does shows less.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import DTYPES, as_bytes, payload_digest
from diloco.pipeline.process.cores import one_blas_thread
from diloco.pipeline.settings import SyncSettings
from diloco.syncer.algorithm import merge_weights
from diloco.syncer.merging.merge import Contributions, Float64, Sum, delta_norms, merge_shares
from diloco.syncer.merging.outer import Outer, OuterStep, State, Stepped, halley_iteration, with_norm_of
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.floor import merge_traffic
from diloco_studies.bench.machine import need_memory

TENSORS = 8
CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is merged."""

    elements: int = 8_000_000
    learners: int = 8
    wire: Codec = "bf16"
    momentum: float = 0.9
    repeats: int = 7
    side: int = 768
    """Rows of a matrix that is orthogonalised; columns of one that is merged by rows."""
    columns: int | None = None
    """Of a matrix that is orthogonalised; None: as many as rows."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of one that is orthogonalised."""
        return self.side, self.columns or self.side


class Work:
    """Random deltas, values and momentum."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sync = SyncSettings(
            outer="nesterov", outer_momentum=sizes.momentum, outer_lr=0.7, outer_warmup=0
        ).sync_spec()
        each = [sizes.elements // TENSORS] * TENSORS
        each[0] += sizes.elements - sum(each)
        self.layout: FragmentLayout = layout_of(
            TensorSpec(name=f"t{i}", shape=(n,), dtype="float32", rule="mean" if i == 0 else "rda", fragment=0)
            for i, n in enumerate(each)
        ).fragments[0]
        side = min(sizes.side, sizes.elements)
        rows = sizes.elements // side
        self.by_rows = layout_of(
            (
                TensorSpec(name="t0", shape=(rows, side), dtype="float32", rule="rda-row", fragment=0),
                TensorSpec(name="t1", shape=(sizes.elements - rows * side,), dtype="float32", rule="mean", fragment=0),
            )
        ).fragments[0]
        count = sizes.elements // math.prod(sizes.matrix)
        table = [
            TensorSpec(name=f"t{i}", shape=sizes.matrix, dtype="float32", rule="mean", fragment=0, matrix=True)
            for i in range(count)
        ]
        left = sizes.elements - count * math.prod(sizes.matrix)
        table.append(TensorSpec(name="rest", shape=(left,), dtype="float32", rule="mean", fragment=0))
        self.by_default, self.default = layout_of(table).fragments[0], SyncSettings(outer_warmup=0).sync_spec()
        rng = np.random.default_rng(0)
        self.deltas = [
            rng.standard_normal(sizes.elements, np.float32).astype(DTYPES[sizes.wire]) for _ in range(sizes.learners)
        ]
        self.theta = rng.standard_normal(sizes.elements, np.float32)
        self.momentum = np.zeros_like(self.theta) if sizes.momentum else None
        counters = [(24, 1000 * (i + 1)) for i in range(sizes.learners)]
        interval = max(steps for steps, _ in counters)
        self.weights = merge_weights(counters, interval=interval)
        self.shares = merge_shares(counters, interval=interval)
        self.norms = [delta_norms(self.layout, delta) for delta in self.deltas]
        self.default_norms = [delta_norms(self.by_default, delta) for delta in self.deltas]
        self.matrices = rng.standard_normal((max(1, count), *sizes.matrix), np.float32)
        self.square = rng.standard_normal((sizes.side, sizes.side), np.float32)
        self._copy = np.ones(2**28, np.uint8), np.ones(2**28, np.uint8)

    def step(self, layout: FragmentLayout | None = None) -> Stepped:
        """Merge and outer step, as the syncer makes them."""
        return self._taken(Sum(layout or self.layout), self.norms, self.sync)

    def default_step(self) -> Stepped:
        """The same with the defaults of a run, where tensors are matrices."""
        return self._taken(Sum(self.by_default), self.default_norms, self.default)

    def _taken(self, total: Sum, norms: list[Float64], sync: SyncSpec) -> Stepped:
        outer, before = Outer(sync.outer_lr, sync.outer_momentum), State(self.theta, self.momentum)
        return OuterStep(total, self._contributions(norms), sync, outer, before).take()

    def _contributions(self, norms: list[Float64]) -> Contributions:
        return Contributions(self.deltas, norms, self.shares, [1.0] * len(self.deltas))

    def summed(self, count: int) -> Sum:
        """A sum that has the first so many deltas, each as it came."""
        total, given = Sum(self.layout), self._contributions(self.norms)
        for start, stop in ((0, 2), *((at, at + 1) for at in range(2, count))):
            total.add(given.part(slice(start, stop)))
        return total

    def close(self, total: Sum) -> Stepped:
        """The rest of the merge, and the step."""
        return self._taken(total, self.norms, self.sync)

    def judged(self) -> Any:
        """The norms of all deltas, which the syncer takes while uploads come in."""
        return [delta_norms(self.layout, delta) for delta in self.deltas]

    def digested(self) -> Any:
        """The digest of the new values."""
        return payload_digest(as_bytes(self.theta), CHUNK_BYTES)

    def turned(self) -> Any:
        """What an orthogonalised step does with matrices of about as many elements as the fragment has."""
        for matrix in self.matrices:
            with_norm_of(halley_iteration(matrix), matrix)

    def product(self) -> Any:
        """One product of such a matrix with a square one."""
        return self.square @ self.matrices[0]

    def plain(self) -> Any:
        """The same merge and step as one writes them at first, in whole arrays."""
        merged = np.empty_like(self.theta)
        tensor: Any
        for t, slot in enumerate(self.layout.slots):
            parts = [delta[slot.start : slot.stop].astype(np.float32) for delta in self.deltas]
            if slot.tensor.rule == "mean":
                tensor = sum(np.float32(w) * part for w, part in zip(self.weights, parts, strict=True))
            else:
                lengths = [norms[t] for norms in self.norms]
                units = [part / np.float32(length) for part, length in zip(parts, lengths, strict=True)]
                tensor = sum(np.float32(w) * unit for w, unit in zip(self.weights, units, strict=True))
                length = sum(w * length for w, length in zip(self.weights, lengths, strict=True))
                tensor = tensor * np.float32(length / np.linalg.norm(tensor))
            merged[slot.start : slot.stop] = tensor
        mu, lr = np.float32(self.sync.outer_momentum), np.float32(self.sync.outer_lr)
        if self.momentum is None:
            return self.theta - lr * merged
        momentum = mu * self.momentum + merged
        return self.theta - lr * (merged + mu * momentum)

    def copied(self) -> None:
        """As many bytes as a merge must read and write at least, one thread."""
        source, target = self._copy
        item = self.deltas[0].itemsize
        left = merge_traffic(self.sizes.elements, self.sizes.learners, item, self.momentum is not None) / 2
        while left > 0:
            size = int(min(left, len(source)))
            np.copyto(target[:size], source[:size])
            left -= size


def alternate(
    ways: Mapping[str, Callable[[], float]], repeats: int, console: Console, what: str
) -> dict[str, list[float]]:
    """Measure each way in turn, `repeats` times over, after one turn that does not count.

    What drifts on a machine (its clock, its neighbours) then meets all of them alike.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    with progress(console) as bar:
        task = bar.add_task(what, total=(repeats + 1) * len(ways))
        for turn in range(repeats + 1):
            for name, measure in ways.items():
                value = measure()
                if turn:
                    found[name].append(value)
                bar.advance(task)
    return found


def measure(sizes: Sizes, console: Console) -> dict[str, Spread]:
    """CPU seconds of each way, and the rates that follow."""
    one_blas_thread()
    item = DTYPES[sizes.wire].itemsize
    need_memory(sizes.elements * (sizes.learners * (item + 8) + 36) + 2**29, f"a merge of {sizes.elements:,} elements")
    work = Work(sizes)
    deltas = sizes.elements * sizes.learners * item

    def timed(what: Callable[[], Any]) -> Callable[[], float]:
        def seconds() -> float:
            began = time.process_time()
            what()
            return time.process_time() - began

        return seconds

    def closing() -> float:
        room = work.summed(sizes.learners - 1)
        return timed(lambda: work.close(room))()

    ways = {
        "default_s": timed(work.default_step),
        "merge_s": timed(work.step),
        "rows_s": timed(lambda: work.step(work.by_rows)),
        "plain_numpy_s": timed(work.plain),
        "memory_floor_s": timed(work.copied),
        "norms_s": timed(work.judged),
        "digest_s": timed(work.digested),
        "halley_s": timed(lambda: work.turned()),
        "product_s": timed(work.product),
    }
    if sizes.learners > 2:  # two are never summed before both are here
        ways |= {"folding_s": timed(lambda: work.summed(sizes.learners - 1)), "closing_s": closing}
    found = alternate(ways, sizes.repeats, console, "merging")
    report = {name: spread(values) for name, values in found.items()}
    for name in ("default", "merge", "rows", "plain_numpy", "memory_floor", "norms"):
        report[f"{name}_gb_per_s"] = spread(deltas / 1e9 / value for value in found[f"{name}_s"])
    report["halley_ms_per_million"] = spread(1e9 * one / work.matrices.size for one in found["halley_s"])
    report["product_gflop_per_s"] = spread(
        2e-9 * work.matrices[0].size * sizes.side / one for one in found["product_s"]
    )
    both = zip(found["merge_s"], found["norms_s"], strict=True)
    report["merge_and_norms_gb_per_s"] = spread(deltas / 1e9 / (a + b) for a, b in both)
    report["floor_ratio"] = spread(a / b for a, b in zip(found["merge_s"], found["memory_floor_s"], strict=True))
    return report
