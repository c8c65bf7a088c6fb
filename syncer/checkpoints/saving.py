"""Saving: each fragment by whoever is told to, then the manifest that makes them one. asyncio.

Fragments are read one after the other: as for a learner that joins, their versions are no consistent cut unless the
run is finished. Each fragment is consistent in itself, and checked by its digest. In memory is one at a time.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.messages.wire import MOST_ELEMENTS, MOST_TOKENS
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.retry import Backoff
from diloco.pipeline.transfer.payloads import Offload, pull_state
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

OLD_S = 3600.0
"""What nobody has written to for so long is nobody's: no fragment takes so long, and no two clocks differ by it."""
BACKOFF, TRIES = Backoff(1.0, 8.0), 8
"""What the bus is asked for a checkpoint: with waits of 39 s, which a failover ends within."""
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}-[0-9]{8}-[0-9]{6}-[0-9]{6}")
RandomHex = Callable[[int], str]
T = TypeVar("T")
_log = structlog.get_logger


def run_folder(name: str, run: RunState) -> str:
    """The run's folder in any place: other names, and runs that began at another time, have others.

    A resumed run goes on in its own. Parts of it under two names have one each.
    """
    return name + began(run)


def began(run: RunState) -> str:
    """How the name of its folder ends, whatever the run is called."""
    return f"-{datetime.fromtimestamp(run.began_unix_s, UTC):%Y%m%d-%H%M%S-%f}"


def is_run_folder(name: str) -> bool:
    """Whether a folder has the name of a run's."""
    return _RUN.fullmatch(name) is not None


def is_folder_of(name: str, run: str) -> bool:
    """Whether a folder has the name of a run's that is called so."""
    return is_run_folder(name) and name.rsplit("-", 3)[0] == run


def checkpoint_name(tokens: int, random_hex: RandomHex) -> str:
    """A folder's name that nobody else has. tokens: trained so far."""
    return f"{CHECKPOINT}{tokens}-{random_hex(4)}"


async def begin_checkpoint(place: Place, name: str, leftovers: Leftovers, offload: Offload) -> None:
    """Make room, by removing what killed writers left, and make the folder: by it others know that the place is theirs.

    leftovers: of looks at this place before.

    Raises:
        OSError: the folder cannot be written.
    """
    await _or_unmade(offload, place, name, _to_its_end(offload, _begin, place, name, leftovers))


def _begin(place: Place, name: str, leftovers: Leftovers) -> None:
    try:
        drop_leftovers(place, leftovers)
    except OSError as error:
        _log().warning("leftovers_not_removed", path=str(place), error=str(error))
    place.below(name).write(SUMS_FILE, [b""])


async def finish_checkpoint(
    bus: Bus, spec: Spec, place: Place, name: str, fragments: Iterable[int], offload: Offload
) -> Place:
    """Save the fragments that nobody has saved in a checkpoint yet, in this order, and make it one; returns its folder.

    Others may save theirs meanwhile: what they have saved when its turn comes is taken.

    Raises:
        UsageError: the run has no state or no version 0 yet.
        BadPayload: a payload on the bus is damaged, or not finite.
        BusError, OSError: nothing was changed, `latest` names the one before.
    """
    folder = place.below(name)

    async def write() -> list[str]:
        for p in fragments:
            if p not in found_fragments(await offload(folder.names)):
                await save_fragment(bus, spec, folder, p, offload)
        state = await _answered(partial(_saved_state, bus, spec, folder, offload))
        return await _to_its_end(offload, _make_one, place, name, state)

    dropped = await _or_unmade(offload, place, name, write())
    await _to_its_end(offload, _drop, place, dropped)
    return folder


async def _or_unmade(offload: Offload, place: Place, name: str, work: Awaitable[T]) -> T:
    """What work on a checkpoint comes to; where it fails, nothing of the checkpoint stays."""
    try:
        return await work
    except BaseException:
        with suppress(OSError):
            await _to_its_end(offload, _unmake, place, name)
        raise


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """What the bus is asked for, soon again where it fails: else one call costs all that was saved before it."""
    for wait_s in islice(BACKOFF.waits(), TRIES - 1):
        try:
            return await ask()
        except BusError as error:
            _log().warning(outage_event(error), error=str(error), retry_s=wait_s)
            await asyncio.sleep(wait_s)
    return await ask()


async def _to_its_end(offload: Offload, write: Callable[..., T], *args: object) -> T:
    """Offload what writes. A thread cannot be cancelled: whoever is, waits for it, and knows then what it left."""
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
    """Write a fragment's present version into a checkpoint.

    Raises:
        UsageError: it has no version yet.
        BadPayload: its payload on the bus is damaged, or not finite.
        BusError, OSError: it is not saved.
    """
    layout = layout_of(spec.tensors).fragments[fragment]
    head, values, momentum = await _answered(partial(_read_fragment, bus, layout, spec.sync, offload))
    await _to_its_end(offload, _write_fragment, folder, head, values, momentum)


async def _read_fragment(
    bus: Bus, layout: FragmentLayout, sync: SyncSpec, offload: Offload
) -> tuple[Head, Float32, Float32 | None]:
    """Head, values and momentum of one version; starts again when the head moves meanwhile."""
    seen: Head | None = None
    while True:
        (head,) = await bus.read_heads([layout.id])
        if head is None:
            raise UsageError(f"fragment {layout.id} has no version yet: there is nothing to save")
        try:
            return head, *await pull_state(bus, head, layout.elements, layout.sync(sync), offload)
        except BadPayload:
            if seen is not None and (seen.version, seen.digest, seen.payload) == (
                head.version,
                head.digest,
                head.payload,
            ):
                raise  # twice the same head: it did not move, the payload is damaged
            seen = head


def _write_fragment(folder: Place, head: Head, values: Float32, momentum: Float32 | None) -> None:
    if not finite(values, momentum):
        raise BadPayload(
            f"fragment {head.fragment} version {head.version} is not finite: the checkpoint saved before stays"
        )
    vectors = {GLOBALS: values}
    if momentum is not None and momentum.any():
        vectors[MOMENTUM] = momentum
    name, digest = fragment_name(head.fragment, head.version, head.digest), hashlib.sha256()
    folder.write(f"{name}.safetensors", digested(parts_of(_tensors(vectors)), digest.update))
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


def _tensors(vectors: Mapping[str, Float32]) -> dict[str, Tensor]:
    """Flat float32 vectors as tensors of a file."""

    def one(vector: Float32) -> Tensor:
        return Tensor("F32", vector.shape, vector.nbytes, lambda: as_bytes(vector))

    return {name: one(vector) for name, vector in vectors.items()}


# --- the manifest ------------------------------------------------------------------------------------


async def run_state(bus: Bus) -> RunState:
    """The run's state with the tokens of now.

    Raises:
        UsageError: it has none yet.
    """
    run = await bus.read_state()
    if run is None:
        raise UsageError("the run has no state yet: there is nothing to save")
    # The state is written a few times a second; the reports are newer.
    reported = sum(seen.report.tokens for seen in await bus.read_reports() if seen.counts_in(run))
    return run.model_copy(update={"tokens": min(MOST_TOKENS, max(run.tokens, run.base_tokens + reported))})


async def _saved_state(bus: Bus, spec: Spec, folder: Place, offload: Offload) -> SavedState:
    """The manifest of what lies in a folder; read after the fragments, so that no tokens of theirs are missing."""
    shards, data_order = await _data_queue(bus)
    run = await run_state(bus)
    overwritten = sum(seen.report.overwritten for seen in await bus.read_reports() if seen.counts_in(run))
    return SavedState(
        format=1,
        spec=spec,
        run=run,
        overwritten=min(MOST_ELEMENTS, overwritten),
        fragments=await offload(_fragments, folder, spec.sync.fragments),
        shards=shards,
        data_order=data_order,
    )


async def _data_queue(bus: Bus) -> tuple[ShardQueue, DataOrder | None]:
    """The data queue and its order; neither where one is damaged: any learner may write there, and it costs no more."""
    try:
        return await bus.read_shards(), await bus.read_data_order()  # who queues shards has agreed on their order
    except BadMessage as error:
        keys = bus.keys
        _log().warning(
            "data_queue_not_saved",
            error=str(error),
            detail="a learner has damaged it. The checkpoint has all parameters; who resumes it reads the data from "
            "their start. To mend this run's queue, cut that learner off and delete these keys of Redis: the others "
            "queue the data again",
            keys=[keys.shards, keys.shard_positions, keys.shard_epoch, keys.data_order],
        )
        return ShardQueue(epochs=0, open=()), None


def _fragments(folder: Place, count: int) -> tuple[SavedFragment, ...]:
    found = found_fragments(folder.names())
    if missing := [p for p in range(count) if p not in found]:
        raise OSError(f"{folder} has lost fragment {missing[0]} while it was saved")
    return tuple(_fragment(folder, f"{found[p]}.json") for p in range(count))


def _fragment(folder: Place, file: str) -> SavedFragment:
    try:
        return SavedFragment.model_validate_json(folder.read(file))
    except ValidationError as error:
        raise OSError(f"{folder}/{file} is damaged: {complaint(error)}") from error


def _make_one(place: Place, name: str, state: SavedState) -> list[str]:
    """Write the manifest, then name it in `latest`; returns which ones are not kept any more.

    Raises:
        OSError: also if others took this one for a leftover, since its writer stood still, and have removed it.
    """
    told = state.model_dump(mode="json", exclude={"spec": {"format"}})
    manifest, folder = to_json(told, indent=1, inf_nan_mode="constants"), place.below(name)
    sums = {one.file: one.sha256 for one in state.fragments} | {STATE_FILE: hashlib.sha256(manifest).hexdigest()}
    folder.write(SUMS_FILE, ["".join(f"{digest}  {file}\n" for file, digest in sums.items()).encode()])
    folder.write(STATE_FILE, [manifest])
    if lost := {*sums, SUMS_FILE} - folder.names():
        raise OSError(f"{folder} has lost {min(lost)} while it was saved")
    there = place.names()
    whole = [one for one in read_latest(place) if one in there and STATE_FILE in place.below(one).names()]
    kept, dropped = kept_names(whole, name)
    place.write(LATEST, ["".join(f"{one}\n" for one in kept).encode()])
    return dropped


def _unmake(place: Place, name: str) -> None:
    """A disk that is full must not be filled with what nothing names: but a store may have heard more than it said."""
    if name not in read_latest(place):
        _remove(place, name)


def _drop(place: Place, names: Iterable[str]) -> None:
    for name in names:
        _remove(place, name)


def _remove(place: Place, name: str) -> None:
    """The manifest first: what is left of a checkpoint, should that break off, is none. A leftover goes later."""
    try:
        place.below(name).remove(STATE_FILE)
        place.remove(name)
    except OSError as error:
        _log().warning("checkpoint_not_removed", path=str(place.below(name)), error=str(error))


def read_latest(place: Place) -> list[str]:
    """The names in `latest`, newest first, as they stand there; empty where there is none.

    Raises:
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError):
        return [line.strip() for line in place.read(LATEST).decode(errors="replace").splitlines() if line.strip()]
    return []


def drop_leftovers(place: Place, leftovers: Leftovers) -> None:
    """Remove what killed writers left, as far as it can be told by now.

    Raises:
        OSError: the place cannot be read.
    """
    there = place.names()
    kept = there & {*read_latest(place)}
    found = {name: place.below(name).names() for name in there - kept if may_be_left(name)}
    others = {name: files for name, files in found.items() if all_ours(files)}
    old = [name for name in others if place.below(name).age_s() > OLD_S]
    for name in leftovers.look(others, old, len(kept)):
        _log().info("leftover_removed", path=str(place.below(name)))
        _remove(place, name)
