"""Measure the facts on this machine and its Redis. This takes seconds and megabytes, and leaves nothing behind.

Redis gets one payload at a time under a key of its own, which is deleted at once, and expires if this process dies. It
also gets the scripts that every party loads, which change no run. A folder gets one file, which is removed.
"""

import asyncio
import os
import platform
import re
import secrets
import shutil
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np

from diloco.doctor.facts import Folder, Link, Machine, Run
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis.inspection import RedisExamination
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.bus.server import Server, to_maxmemory
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusError, DilocoError, NotPermitted, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.liveness import is_live
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.outer_cost import operations_of
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.process.cgroup import limits
from diloco.pipeline.process.cores import blas_threads, one_blas_thread, product_speed, seen_cores, usable_cores
from diloco.pipeline.ramps import interval_at, interval_in_force
from diloco.pipeline.settings import CHUNK_BYTES, SyncSettings
from diloco.pipeline.site import Site, outer_operations
from diloco.pipeline.transfer.payloads import pull, push
from diloco.pipeline.units import as_maxmemory
from diloco.pipeline.view.status_reader import as_heard
from diloco.syncer.checkpoints.places import Folder as FolderPlace
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.saving import run_folder
from diloco.syncer.merging.merge import Contributions, Sum, delta_norms
from diloco.syncer.merging.outer import Outer, OuterStep, State

# Packages whose versions are printed.
PACKAGES = ("diloco", "numpy", "redis", "torch")
# Number of small calls whose median is the round trip.
LOOKS = 9
# Size of the first payload, and of the largest one, which is only tried on a fast network.
FIRST_BYTES, MAX_BYTES = 2**20, 2**24
# Largest share of a server's free memory that the payload may take, so that it does not disturb a run.
SHARE_OF_FREE = 0.05
# A payload that takes longer than this gives the rate well enough: no larger one is tried.
LONG_S = 0.2
# A payload that takes longer than this, there and back, is given up.
PATIENCE_S = 10.0
# The payload of a doctor that was killed expires after this time.
TTL_S = 30.0
# Size of the merge that is timed: 8 MiB of bf16 deltas.
MERGED_ELEMENTS, MERGED_DELTAS = 2**19, 8


# --- this machine -----------------------------------------------------------------------------------------


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing() -> tuple[str, ...]:
    """Return the packages that every process needs and that are not installed."""
    try:
        asked = requires("diloco") or []
    except PackageNotFoundError:  # from a source tree
        return ()
    names = [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in asked if ";" not in one]
    return tuple(name for name in names if _installed(name) is None)


def look_at_machine(processes: int, threads: int | None) -> Machine:
    """Return what this machine has, and how fast it merges; threads: setting of each learner, None if not given."""
    one_blas_thread()  # a syncer does the same, and its speed is measured here
    cores, said = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if threads is not None:
        each, by = threads, "as set"
    elif said.isdecimal() and int(said):
        each, by = int(said), f"OMP_NUM_THREADS={said}"
    else:
        each, by = seen_cores(), "all cores by default"
    found = {name: _installed(name) for name in PACKAGES}
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    told = all(name in os.sysconf_names for name in names)
    return Machine(
        python=platform.python_version(),
        packages={name: one for name, one in found.items() if one is not None},
        missing=_missing(),
        cores=cores,
        memory_bytes=min(limits().memory_bytes, os.sysconf(names[0]) * os.sysconf(names[1])) if told else 0.0,
        processes=processes,
        threads=each,
        threads_from=by,
        blas_threads=blas_threads(),
        speed=product_speed(),
        merge_bytes_per_s=_merge_rate(),
    )


def _merge_rate() -> float:
    """Measure the bytes of bf16 deltas per second that a core merges, outer step included, by a syncer's own code."""
    spec = TensorSpec(name="t", shape=(MERGED_ELEMENTS,), dtype="float32", rule="mean", fragment=0)
    layout, sync = layout_of([spec]).fragments[0], SyncSettings(outer="nesterov", outer_warmup=0).sync_spec()
    values = np.linspace(-1, 1, MERGED_ELEMENTS, dtype=np.float32)
    deltas = [values.astype(ml_dtypes.bfloat16)] * MERGED_DELTAS
    even = [1.0] * MERGED_DELTAS
    contributions = Contributions(deltas, [delta_norms(layout, deltas[0])] * MERGED_DELTAS, even, even)
    given = contributions, sync, Outer(sync.outer_lr, sync.outer_momentum), State(values, None)
    took_s = []
    for _ in range(3):
        began = time.perf_counter()
        OuterStep(Sum(layout), *given).take()
        took_s.append(time.perf_counter() - began)
    return sum(delta.nbytes for delta in deltas) / min(took_s)


def look_at_folder(setting: str, path: Path | str) -> Folder:
    """Try to write to a place, in the way in which a syncer tries its checkpoints, and read its free space."""
    try:
        place = place_of(path)
        place.check()
        if not isinstance(place, FolderPlace):
            return Folder(setting, path)
        there = next(one for one in (place.path.absolute(), *place.path.absolute().parents) if one.exists())
        return Folder(
            setting, path, free_bytes=float(shutil.disk_usage(there).free), there=there == place.path.absolute()
        )
    except (OSError, UsageError) as error:
        said = error.found if isinstance(error, UsageError) else error.strerror or str(error)
        return Folder(setting, path, said.removeprefix(f"{path}: "))


def saved_bytes(path: Path | str, run: str) -> float:
    """Return the bytes that a run's checkpoints take by now: dropping them frees the space for new ones.

    run: name of the run's folder among the checkpoints; "" if it has none.
    """
    try:
        return float(place_of(path).below(run).size_bytes()) if run else 0.0
    except (OSError, UsageError):  # already reported by look_at_folder
        return 0.0


# --- the run ----------------------------------------------------------------------------------------------


async def read_run(bus: Bus, step_s: float | None) -> Run | None:
    """Return the run on the bus, or None; step_s: time of a step to use in place of the time that learners report."""
    data = await bus.read_spec()
    if data is None:
        return None
    spec = decode_spec(bus.keys, data)
    layout = layout_of(spec.tensors)
    heard = as_heard(await bus.read_reports(), await bus.info(), BUS_TIMES.live_s)
    live = [one.report for one in heard if is_live(one, BUS_TIMES.live_s)]
    steps = known_steps([report.step_s_median or report.step_s for report in live])
    state, heads = await bus.read_state(), await bus.read_heads(range(len(layout.fragments)))
    present = [head for head in heads if head is not None]
    merges = [head.window.merge_s for head in present if head.window.merge_s]
    grown = [
        interval_in_force(spec.sync, head.version, head.interval) / interval_at(spec.sync, head.version)
        for head in present
    ]
    return Run(
        name=bus.keys.run,
        sync=spec.sync,
        params=float(layout.elements),
        learners=max(1, len(live)),
        step_s=step_s or (median(steps) if steps else None),
        operations=tuple(operations_of((slot.tensor for slot in f.slots), spec.sync.outer) for f in layout.fragments),
        live=len(live),
        finished=state is not None and state.phase is Phase.FINISHED,
        folder="" if state is None else run_folder(bus.keys.run, state),
        saves=state is not None and bool(state.checkpoint),
        merge_s=median(merges) if merges else 0.0,
        stretched=median(grown) if grown else 1.0,
    )


def planned_run(name: str, sync: SyncSpec, params: float, learners: int, step_s: float | None) -> Run:
    """Return a run that does not exist yet, whose model has a usual shape."""
    each = outer_operations(Site(params=params), sync.outer) / sync.fragments
    return Run(name, sync, params, learners, step_s, (each,) * sync.fragments)


# --- the link ---------------------------------------------------------------------------------------------


async def look_at_line(
    bus: Bus, examination: RedisExamination, nodes: list[Server], writes: bool
) -> tuple[Link, float]:
    """Measure round trip and rates, and by how many seconds this machine's clock is ahead of the server's.

    writes: whether this user may write payloads; if not, only the round trip is measured.
    """
    trips, ahead_s = await examination.look_at_clock(LOOKS)
    room = min((node.maxmemory_bytes - node.used_bytes for node in nodes if node.maxmemory_bytes), default=None)
    most = MAX_BYTES if room is None else min(MAX_BYTES, int(SHARE_OF_FREE * room))
    round_trip_s = median(trips)
    if not writes:
        return Link(round_trip_s), ahead_s
    if most < FIRST_BYTES:
        full = min((one for one in nodes if one.maxmemory_bytes), key=lambda one: one.maxmemory_bytes - one.used_bytes)
        found = f"only {as_maxmemory(max(0, room or 0))} of its maxmemory is free{f' at {full.at}' if full.at else ''}"
        remedy = to_maxmemory(full.used_bytes + FIRST_BYTES / SHARE_OF_FREE)
        return Link(round_trip_s, problem=found, remedy=remedy), ahead_s
    size, up, down = FIRST_BYTES, None, None
    try:
        while True:
            try:
                up_s, down_s = await _both_ways(bus, size)
            except TimeoutError:
                if up is None:
                    up = down = size / PATIENCE_S
                break
            up, down = size / up_s, size / down_s
            if 4 * size > most or min(up_s, down_s) > LONG_S:
                break
            size *= 4
    except (BusError, NotPermitted) as error:  # any other UsageError would end a run's parties too
        return Link(round_trip_s, problem=error.problem, remedy=error.remedy), ahead_s
    return Link(round_trip_s, up, down, size), ahead_s


async def _both_ways(bus: Bus, size: int) -> tuple[float, float]:
    """Return how many seconds a payload of `size` bytes takes to upload and to download.

    Raises:
        TimeoutError: it takes longer than `PATIENCE_S`.
    """
    key = bus.keys.initial_payload(0, f"doctor-{secrets.token_hex(8)}")
    values = np.frombuffer(secrets.token_bytes(size), np.float32)
    try:
        async with asyncio.timeout(PATIENCE_S):
            began = time.perf_counter()
            await push(bus, key, values, CHUNK_BYTES, TTL_S)
            there = time.perf_counter()
            await pull(bus, key, len(values), "fp32", CHUNK_BYTES, extend_s=0.0)
            return there - began, time.perf_counter() - there
    finally:
        with suppress(DilocoError):  # the key expires in any case
            await bus.expire_soon(key, 0.0)
