"""Saving a checkpoint (asyncio): the syncers save its fragments, and the lead then writes the manifest.

Fragments are read one after the other. Like those of a learner that joins, their versions are not a consistent cut
unless the run is finished. Each fragment is consistent in itself and checked by its digest. Only one is in memory at a
time.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TypeVar

import structlog
from pydantic import ValidationError
from pydantic_core import to_json

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BadMessage, BadPayload, BusError, UsageError, outage_event
from diloco.pipeline.files.replacing import digested
from diloco.pipeline.files.sums import SUMS_FILE
from diloco.pipeline.files.tensor_file import Tensor, parts_of
from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.messages.wire import MAX_ELEMENTS, MAX_TOKENS
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.transfer.globals import pull_state
from diloco.pipeline.transfer.payloads import Offload
from diloco.pipeline.wrong_values import complaint
from diloco.syncer.checkpoints.manifest import (
    CHECKPOINT,
    GLOBALS,
    LATEST,
    MOMENTUM,
    STATE_FILE,
    Float32,
    Leftovers,
    SavedFragment,
    SavedState,
    all_ours,
    found_fragments,
    fragment_name,
    kept_names,
    may_be_left,
)
from diloco.syncer.checkpoints.places import Place
from diloco.syncer.merging.fragment import finite
from diloco.syncer.times import TIMES

# Tries of a read from the bus. The waits between them add up to 39 s, within which a failover ends.
TRIES = 8
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}-[0-9]{8}-[0-9]{6}-[0-9]{6}")
RandomHex = Callable[[int], str]
T = TypeVar("T")
_log = structlog.get_logger


def run_folder(name: str, run: RunState) -> str:
    """Return the name of the run's folder in any place; it is distinct for each run name and time of beginning.

    A resumed run continues in the same folder, unless it was given another name.
    """
    return name + began(run)


def began(run: RunState) -> str:
    """Return the end of the run folder's name, which is the time when the run began."""
    return f"-{datetime.fromtimestamp(run.began_unix_s, UTC):%Y%m%d-%H%M%S-%f}"


def is_run_folder(name: str) -> bool:
    """Return whether this is the name of a run's folder."""
    return _RUN.fullmatch(name) is not None


def is_folder_of(name: str, run: str) -> bool:
    """Return whether this is the name of a folder of the run `run`."""
    return is_run_folder(name) and name.rsplit("-", 3)[0] == run


def checkpoint_name(tokens: int, random_hex: RandomHex) -> str:
    """Return a unique name for a checkpoint's folder; tokens is the number trained so far."""
    return f"{CHECKPOINT}{tokens}-{random_hex(4)}"


async def begin_checkpoint(place: Place, name: str, leftovers: Leftovers, offload: Offload) -> None:
    """Remove the leftovers of killed writers from the run's folder, and make the checkpoint's.

    Other syncers that find the folder know that the checkpoint is in their own place, and can help.

    Raises:
        OSError: the folder cannot be written.
    """
    await _remove_on_failure(offload, place, name, _run_to_completion(offload, _begin, place, name, leftovers))


def _begin(place: Place, name: str, leftovers: Leftovers) -> None:
    try:
        drop_leftovers(place, leftovers)
    except OSError as error:
        _log().warning("leftovers_not_removed", path=str(place), error=str(error))
    place.below(name).write(SUMS_FILE, [b""])


async def finish_checkpoint(
    bus: Bus, spec: Spec, place: Place, name: str, fragments: Iterable[int], offload: Offload
) -> Place:
    """Save the fragments of a checkpoint that are not saved yet, in this order, and complete it; return its folder.

    Other syncers may save theirs meanwhile: a fragment that is already there when its turn comes is used.

    Raises:
        UsageError: the run has no state or no version 0 yet.
        BadPayload: a payload on the bus is damaged, or not finite.
        BusError, OSError: nothing was changed, `latest` names the checkpoint before.
    """
    folder = place.below(name)

    async def write() -> list[str]:
        for p in fragments:
            if p not in found_fragments(await offload(folder.names)):
                await save_fragment(bus, spec, folder, p, offload)
        state = await _answered(partial(_saved_state, bus, spec, folder, offload))
        return await _run_to_completion(offload, _make_one, place, name, state)

    dropped = await _remove_on_failure(offload, place, name, write())
    await _run_to_completion(offload, _remove_all, place, dropped)
    return folder


async def _remove_on_failure(offload: Offload, place: Place, name: str, work: Awaitable[T]) -> T:
    """Return the result of work on a checkpoint; if it fails, remove what was written."""
    try:
        return await work
    except BaseException:
        with suppress(OSError):
            await _run_to_completion(offload, _remove_unfinished, place, name)
        raise


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Call the bus, with retries. Otherwise one failed call would discard all fragments that are saved already."""
    for wait_s in islice(TIMES.checkpoint_retry.waits(), TRIES - 1):
        try:
            return await ask()
        except BusError as error:
            _log().warning(outage_event(error), error=str(error), retry_s=wait_s)
            await asyncio.sleep(wait_s)
    return await ask()


async def _run_to_completion(offload: Offload, write: Callable[..., T], *args: object) -> T:
    """Run a write in a thread. A thread cannot be cancelled, so if this task is, it first waits for the thread's end.

    The caller can then remove what was written, without a thread that still writes there.
    """
    writing = asyncio.ensure_future(offload(write, *args))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        raise


# --- a fragment --------------------------------------------------------------------------------------


async def save_fragment(bus: Bus, spec: Spec, folder: Place, fragment: int, offload: Offload) -> None:
    """Write a fragment's current version into a checkpoint.

    Raises:
        UsageError: it has no version yet.
        BadPayload: its payload on the bus is damaged, or not finite.
        BusError, OSError: it was not saved.
    """
    layout = layout_of(spec.tensors).fragments[fragment]
    head, values, momentum = await _answered(partial(_read_fragment, bus, layout, spec.sync, offload))
    await _run_to_completion(offload, _write_fragment, folder, head, values, momentum)


async def _read_fragment(
    bus: Bus, layout: FragmentLayout, sync: SyncSpec, offload: Offload
) -> tuple[Head, Float32, Float32 | None]:
    """Read head, values and momentum of one version; start again if the head moves meanwhile."""
    seen: Head | None = None
    while True:
        (head,) = await bus.read_heads([layout.id])
        if head is None:
            raise UsageError(f"fragment {layout.id} has no version yet, so there is nothing to save")
        try:
            return head, *await pull_state(bus, head, layout.elements, layout.sync(sync), offload)
        except BadPayload:
            if seen is not None and (seen.version, seen.digest, seen.payload) == (
                head.version,
                head.digest,
                head.payload,
            ):
                raise  # the same head twice: it did not move, so the payload is damaged
            seen = head


def _write_fragment(folder: Place, head: Head, values: Float32, momentum: Float32 | None) -> None:
    if not finite(values, momentum):
        raise BadPayload(
            f"fragment {head.fragment} version {head.version} is not finite: the previous checkpoint is kept"
        )
    vectors = {GLOBALS: values}
    if momentum is not None and momentum.any():
        vectors[MOMENTUM] = momentum
    name, digest = fragment_name(head.fragment, head.version, head.digest), hashlib.sha256()
    tensors = {name: Tensor("F32", one.shape, one.nbytes, partial(as_bytes, one)) for name, one in vectors.items()}
    folder.write(f"{name}.safetensors", digested(parts_of(tensors), digest.update))
    saved = SavedFragment(
        version=head.version,
        digest=head.digest,
        merged_deltas=head.merged_deltas,
        merged_tokens=head.merged_tokens,
        rejected_tokens=head.rejected_tokens,
        file=f"{name}.safetensors",
        sha256=digest.hexdigest(),
        norms=head.norms,
    )
    folder.write(f"{name}.json", [saved.model_dump_json(indent=1).encode()])


# --- the manifest ------------------------------------------------------------------------------------


async def run_state(bus: Bus) -> RunState:
    """Return the run's state with the current number of tokens.

    Raises:
        UsageError: the run has no state yet.
    """
    run = await bus.read_state()
    if run is None:
        raise UsageError("the run has no state yet, so there is nothing to save")
    # The state is written a few times a second; the reports are newer.
    reported = sum(seen.report.tokens for seen in await bus.read_reports() if seen.counts_in(run))
    return run.model_copy(update={"tokens": min(MAX_TOKENS, max(run.tokens, run.base_tokens + reported))})


async def _saved_state(bus: Bus, spec: Spec, folder: Place, offload: Offload) -> SavedState:
    """Return the manifest of a folder. The state is read after the fragments, so that it counts all their tokens."""
    shards, data_order = await _data_queue(bus)
    run = await run_state(bus)
    overwritten = sum(seen.report.overwritten for seen in await bus.read_reports() if seen.counts_in(run))
    return SavedState(
        format=1,
        spec=spec,
        run=run,
        overwritten=min(MAX_ELEMENTS, overwritten),
        fragments=await offload(_fragments, folder, spec.sync.fragments),
        shards=shards,
        data_order=data_order,
    )


async def _data_queue(bus: Bus) -> tuple[ShardQueue, DataOrder | None]:
    """Return the data queue and its order, or an empty queue and None if either is damaged.

    Any learner can write there, so damage must not keep the parameters from being saved.
    """
    try:
        return await bus.read_shards(), await bus.read_data_order()  # a learner agrees on the order before it queues
    except BadMessage as error:
        keys = bus.keys
        _log().warning(
            "data_queue_not_saved",
            error=str(error),
            detail="a learner has damaged the data queue. The checkpoint has all parameters, but a run resumed from "
            "it reads the data from the start. To repair this run's queue, disconnect that learner and delete "
            "these keys in Redis; the other learners then queue the data again",
            keys=[keys.shards, keys.shard_positions, keys.shard_epoch, keys.data_order],
        )
        return ShardQueue(epochs=0, open=()), None


def _fragments(folder: Place, count: int) -> tuple[SavedFragment, ...]:
    found = found_fragments(folder.names())
    if missing := [p for p in range(count) if p not in found]:
        raise OSError(f"{folder}: fragment {missing[0]} disappeared while the checkpoint was being saved")
    return tuple(_fragment(folder, f"{found[p]}.json") for p in range(count))


def _fragment(folder: Place, file: str) -> SavedFragment:
    try:
        return SavedFragment.model_validate_json(folder.read(file))
    except ValidationError as error:
        raise OSError(f"{folder}/{file} is damaged: {complaint(error)}") from error


def _make_one(place: Place, name: str, state: SavedState) -> list[str]:
    """Write the manifest, then name the checkpoint in `latest`; return the names that are no longer kept.

    Raises:
        OSError: a write failed; or other syncers took this checkpoint for a leftover, because its writer made no
            progress, and have removed it.
    """
    told = state.model_dump(mode="json", exclude={"spec": {"format"}})
    manifest, folder = to_json(told, indent=1, inf_nan_mode="constants"), place.below(name)
    sums = {one.file: one.sha256 for one in state.fragments} | {STATE_FILE: hashlib.sha256(manifest).hexdigest()}
    folder.write(SUMS_FILE, ["".join(f"{digest}  {file}\n" for file, digest in sums.items()).encode()])
    folder.write(STATE_FILE, [manifest])
    if lost := {*sums, SUMS_FILE} - folder.names():
        raise OSError(f"{folder}: {min(lost)} disappeared while the checkpoint was being saved")
    there = place.names()
    whole = [one for one in read_latest(place) if one in there and STATE_FILE in place.below(one).names()]
    kept, dropped = kept_names(whole, name)
    place.write(LATEST, ["".join(f"{one}\n" for one in kept).encode()])
    return dropped


def _remove_unfinished(place: Place, name: str) -> None:
    """Remove an unfinished checkpoint, which would fill the disk, unless `latest` names it.

    It may: an object store can carry out a write whose answer was lost.
    """
    if name not in read_latest(place):
        _remove(place, name)


def _remove(place: Place, name: str) -> None:
    """Remove a checkpoint. The manifest is removed first: if this breaks off, the rest counts as a leftover."""
    try:
        place.below(name).remove(STATE_FILE)
        place.remove(name)
    except OSError as error:
        _log().warning("checkpoint_not_removed", path=str(place.below(name)), error=str(error))


def _remove_all(place: Place, names: Iterable[str]) -> None:
    for name in names:
        _remove(place, name)


def read_latest(place: Place) -> list[str]:
    """Return the unchecked names in `latest`, newest first; an empty list if there is no such file.

    Raises:
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError):
        return [line.strip() for line in place.read(LATEST).decode(errors="replace").splitlines() if line.strip()]
    return []


def drop_leftovers(place: Place, leftovers: Leftovers) -> None:
    """Remove what killed writers left, as far as can be told from the listings so far.

    Raises:
        OSError: the place cannot be read.
    """
    there = place.names()
    kept = there & {*read_latest(place)}
    found = {name: place.below(name).names() for name in there - kept if may_be_left(name)}
    others = {name: files for name, files in found.items() if all_ours(files)}
    old = [name for name in others if place.below(name).age_s() > TIMES.abandoned_s]
    for name in leftovers.removable(others, old, len(kept)):
        _log().info("leftover_removed", path=str(place.below(name)))
        _remove(place, name)
