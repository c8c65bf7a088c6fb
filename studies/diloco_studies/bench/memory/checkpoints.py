"""Memory and time of saving a checkpoint and of resuming it: `python -m diloco_studies.bench.memory.checkpoints`.

A run's globals and outer momentum are put on an embedded Redis. Then one process of its own saves them, another one
reads them onto a second run. Their peak memory counts beyond what they had before they began. Linux only.
"""

import asyncio
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.head import WindowView
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.spec import Spec, TensorSpec
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.payload.codec import as_bytes, encode, payload_digest
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.transfer.payloads import push_global
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint
from diloco.syncer.checkpoints.saving import save_checkpoint
from diloco_studies.bench.end_to_end import server
from diloco_studies.bench.machine import need_memory

NONCE = "ab" * 8
MB = 1e6


class Took(NamedTuple):
    """What one stage took."""

    seconds: float
    peak_bytes: int
    """Resident memory at its peak, beyond what there was before."""


def spec_of(params: int, fragments: int, global_codec: str) -> Spec:
    """A model of one vector a fragment, of equal sizes."""
    settings = SyncSettings(fragments=fragments, tokens=10**9, outer="nesterov", global_codec=global_codec)
    tensors = tuple(
        TensorSpec(name=f"t{p}", shape=(params // fragments,), dtype="float32", rule="rda", fragment=p)
        for p in range(fragments)
    )
    return Spec(sync=settings.sync_spec(), tensors=tensors, trainer={})


async def fill(bus: Bus, spec: Spec, place: str) -> None:
    """Put the run's state on the bus, fragment by fragment."""
    await bus.propose_spec(encode(spec))
    clock = LoopClock()
    await bus.write_state(
        RunState(
            phase=Phase.RUNNING,
            tokens=1000,
            base_tokens=0,
            budget_tokens=10**9,
            started_unix_s=clock.unix(),
            reason="",
            manifest=(),
        )
    )
    window = WindowView(state="idle", attempt=0, members=(), expected=0, reason="", deadline_unix_s=None)
    for fragment in layout_of(spec.tensors).fragments:
        rng, p = np.random.default_rng(fragment.id), fragment.id
        values, momentum = (rng.standard_normal(fragment.elements, np.float32) for _ in range(2))
        digest = payload_digest(as_bytes(values), spec.sync.chunk_bytes)
        await bus.acquire_lease(p, NONCE, 600.0)
        state, offload = {"momentum": momentum}, asyncio.to_thread
        made = await push_global(bus, p, 3, f"{p:016x}", values, spec.sync, 600.0, offload, state)
        await bus.commit(
            Commit(
                nonce=NONCE,
                expected=None,
                version=3,
                digest=digest,
                payload=made.payload,
                rest=made.rest,
                momentum=made.outer_state,
                window=window,
                merged=(),
                merged_tokens=0,
                record=Committed.installed(p, 3, digest, reason="", syncer="bench", unix_s=clock.unix()),
            )
        )


async def save(bus: Bus, spec: Spec, place: str) -> None:
    """As the only syncer of a run does."""
    await save_checkpoint(bus, spec, place_of(place))


async def resume(bus: Bus, spec: Spec, place: str) -> None:
    """As a syncer with --resume does: check all of it, then put it on the bus."""
    checkpoint = await asyncio.to_thread(load_checkpoint, place)
    for p in range(spec.sync.fragments):
        await bus.acquire_lease(p, NONCE, 600.0)
    await restore_checkpoint(bus, checkpoint, spec, NONCE, "bench", LoopClock())


def begin_peak() -> None:
    """From now on the peak is of what comes."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Bytes of a line of this process's status: VmRSS, VmHWM."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _stage(work: Callable[..., Any], url: str, run: str, spec: Spec, place: str, answer: Any) -> None:
    async def main() -> Took:
        bus = await connect(url, run)
        begin_peak()
        before, began = memory("VmRSS"), time.perf_counter()
        await work(bus, spec, place)
        return Took(time.perf_counter() - began, memory("VmHWM") - before)

    answer.send(asyncio.run(main()))


def main(
    params: Annotated[float, typer.Option(help="Parameters of the model")] = 100e6,
    fragments: Annotated[int, typer.Option(min=1, help="Number of fragments P")] = 8,
    global_codec: Annotated[str, typer.Option(help="Globals on the bus: fp32, bf16 or int8")] = "fp32",
    place: Annotated[
        str | None, typer.Option(help="Where to: a folder or an address (default: a temporary one)")
    ] = None,
) -> None:
    """Save and resume, each once in a process of its own."""
    spec = spec_of(int(params), fragments, global_codec)
    need_memory(int(20 * params), f"two runs of {int(params):,} parameters on a Redis")
    folder = tempfile.mkdtemp(prefix="diloco-bench-")
    processes, where = multiprocessing.get_context("spawn"), place or folder
    size = 8 * params / fragments
    print(f"{int(params):,} parameters, {fragments} fragments of {size / MB:.0f} MB with their momentum, to {where}")
    try:
        with server(None, False, None) as url:
            for work, run in ((fill, "one"), (save, "one"), (resume, "two")):
                answers, answer = processes.Pipe(duplex=False)
                child = processes.Process(target=_stage, args=(work, url, run, spec, where, answer))
                child.start()
                answer.close()  # the child's alone: it ends with it
                try:
                    took = answers.recv()
                except EOFError:
                    raise SystemExit(f"{work.__name__} has failed: its error is above") from None
                finally:
                    child.join()
                peak = f"+{took.peak_bytes / MB:.0f} MB, {took.peak_bytes / size:.1f} fragments"
                print(f"{work.__name__:7}{took.seconds:7.2f} s   peak {peak}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)
