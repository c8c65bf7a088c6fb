"""Checkpoints: the run's globals, outer state, versions, shard queue and spec on disk, and back on an empty run.

    <directory>/latest                     text: name of the newest checkpoint
    <directory>/checkpoint-<tokens>/       written beside, synced, then renamed: whole or not there
        globals.safetensors                tensor name -> float32; of a tensor in parts "name[first:last]" -> those rows
        momentum.safetensors               the same of the outer state, a file for each of its names; a fragment of
                                           which it is all zeros is absent, as is an empty file
        state.json                         `SavedState`
        SHA256SUMS                         digests of all of these (`pipeline.files.sums`)

Fragments are read one after the other: as for a learner that joins, their versions are no consistent cut
unless the run is finished. Each fragment is consistent in itself, and checked by its digest on both ways. Format 1 had
no SHA256SUMS: of its outer state only that it is finite can be checked.
"""

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import structlog
from pydantic import ValidationError
from safetensors import SafetensorError

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.errors import BadPayload, UsageError
from diloco.pipeline.files.sums import SUMS_FILE, check_sums, write_sums
from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.head import Head, WindowView
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.messages.wire import MOST_TOKENS, Count, Digest, Message, Version
from diloco.pipeline.payload.codec import as_bytes, decode, encode, payload_digest
from diloco.pipeline.transfer.global_format import STATE_RULES, OuterState
from diloco.pipeline.transfer.payloads import Offload, pull_state, push_global
from diloco.syncer.merging.merge import all_finite
from diloco.syncer.scratch import scratch_folder

KEPT = 3
"""Checkpoints kept in a directory."""

STAGED_TTL_S = 120.0
GLOBALS = "globals"
"""Name of the values' file; those of the outer state have its names."""

Float32 = npt.NDArray[np.float32]


class SavedFragment(Message):
    """A fragment's head at the time of the checkpoint."""

    version: Version
    digest: Digest
    merged_deltas: Count
    merged_tokens: Count
    rejected_tokens: Count


class SavedState(Message):
    """state.json (bytes as hex)."""

    format: Literal[1, 2] = 2
    spec: Spec
    run: RunState
    overwritten: Count
    """Sum of the learners' reports (token-elements), without what was resumed."""
    fragments: tuple[SavedFragment, ...]
    shards: ShardQueue
    data_order: DataOrder | None = None
    """What the shards are of; None: no learner has said, or an earlier build has not saved it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory, every tensor checked against its spec."""

    path: Path
    spec: Spec
    state: RunState
    overwritten: int
    """As in `SavedState`."""
    fragments: tuple[SavedFragment, ...]
    shards: ShardQueue
    data_order: DataOrder | None
    globals: tuple[Float32, ...]
    """Flat vector (elements,) of each fragment."""
    outer_state: tuple[OuterState, ...]
    """Of each fragment; empty: all zeros."""


# --- save --------------------------------------------------------------------------------------------


async def _read_fragment(
    bus: Bus, layout: FragmentLayout, sync: SyncSpec, offload: Offload
) -> tuple[Head, Float32, OuterState]:
    """Head, global and outer state of one version; starts again when the head moves meanwhile."""
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


def _by_name(layout: FragmentLayout, flat: Float32) -> dict[str, Float32]:
    return {slot.name: flat[slot.start : slot.stop].reshape(slot.shape) for slot in layout.slots}


def _sync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(directory: Path, state: SavedState, files: Mapping[str, Mapping[str, Float32]]) -> Path:
    """Write one checkpoint folder, then name it in `latest`, then drop the oldest.

    files: name -> tensors; what has none is not written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with scratch_folder(directory) as temporary:
        for name, tensors in files.items():
            if tensors:
                _write_tensors(temporary / f"{name}.safetensors", tensors)
        (temporary / "state.json").write_text(state.model_dump_json(indent=1))
        write_sums(temporary)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        temporary.chmod(0o755)
        name = _rename(temporary, directory, f"checkpoint-{state.run.tokens}")
    pointer = directory / f".latest.{name}"
    try:
        pointer.write_text(name + "\n")
        _sync(pointer)
        pointer.rename(directory / "latest")
    except OSError:  # a disk that is full must not be filled with what nothing names
        pointer.unlink(missing_ok=True)
        shutil.rmtree(directory / name, ignore_errors=True)
        raise
    _sync(directory)
    with suppress(FileNotFoundError):  # another syncer drops them at the same time
        found = [file.parent for file in directory.glob("checkpoint-*/state.json")]
        # File times are coarse: among equals the longer name, then the higher number, is the newer one.
        found.sort(key=lambda folder: ((folder / "state.json").stat().st_mtime_ns, len(folder.name), folder.name))
        for folder in found[:-KEPT]:
            if folder.name != name:
                shutil.rmtree(folder)
    return directory / name


def _write_tensors(file: Path, tensors: Mapping[str, Float32]) -> None:
    try:
        safetensors.numpy.save_file(dict(tensors), file)
    except SafetensorError as error:  # how the library tells of a disk that is full
        raise OSError(f"cannot write {file}: {error}") from error


def _rename(temporary: Path, directory: Path, name: str) -> str:
    """Give a whole checkpoint its name, or the next one that is free: another syncer may write here too."""
    taken = 1
    while True:
        free = name if taken == 1 else f"{name}.{taken}"
        try:
            temporary.rename(directory / free)
            return free
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        taken += 1


async def save_checkpoint(
    bus: Bus, spec: Spec, directory: Path, clock: Clock, offload: Offload = asyncio.to_thread
) -> Path:
    """Write the run's present state as a new checkpoint in `directory`; returns its folder.

    Raises:
        UsageError: the run has no state or no version 0 yet.
        BadPayload: a payload on the bus is damaged, or not finite.
        BusError, OSError: nothing was changed, `latest` is the one before.
    """
    layout = layout_of(spec.tensors)
    files: dict[str, dict[str, Float32]] = {name: {} for name in (GLOBALS, *STATE_RULES[spec.sync.outer].names)}
    fragments = []
    for fragment in layout.fragments:
        head, theta, outer_state = await _read_fragment(bus, fragment, spec.sync, offload)
        if not all(map(all_finite, (theta, *outer_state.values()))):
            raise BadPayload(f"fragment {fragment.id} version {head.version} is not finite: the one saved before stays")
        kept = {name: vector for name, vector in outer_state.items() if vector.any()}
        for name, flat in ({GLOBALS: theta} | kept).items():
            files[name].update(_by_name(fragment, flat))
        fragments.append(
            SavedFragment(
                version=head.version,
                digest=head.digest,
                merged_deltas=head.merged_deltas,
                merged_tokens=head.merged_tokens,
                rejected_tokens=head.rejected_tokens,
            )
        )
    run = await bus.read_state()
    if run is None:
        raise UsageError("the run has no state yet: there is nothing to save")
    reports = [seen.report for seen in await bus.read_reports()]
    # The state is written a few times a second; the reports are newer.
    tokens = min(MOST_TOKENS, max(run.tokens, run.base_tokens + sum(report.tokens for report in reports)))
    state = SavedState(
        spec=spec,
        run=run.model_copy(update={"tokens": tokens}),
        overwritten=min(MOST_TOKENS, sum(report.overwritten for report in reports)),
        fragments=tuple(fragments),
        shards=await bus.read_shards(),
        data_order=await bus.read_data_order(),  # after the shards: who queues them has agreed on it
    )
    path: Path = await offload(_write, directory, state, files)
    return path


# --- load --------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder meant by `path`: itself, what its `latest` names, or its checkpoints/latest.

    Raises:
        UsageError: there is none.
    """
    if (path / "state.json").is_file():
        return path
    for directory in (path, path / "checkpoints"):
        pointer = directory / "latest"
        if pointer.is_file():
            name = pointer.read_text(errors="replace").strip()
            if Path(name).name == name and (directory / name / "state.json").is_file():
                return directory / name
            there = sorted(folder.parent.name for folder in directory.glob("checkpoint-*/state.json"))
            found = f"there are {', '.join(there)}: name one of them" if there else "and there is no other"
            raise UsageError(f"{pointer} names {name!r}, which is no checkpoint folder; {found}")
    raise UsageError(
        f"{path} is no checkpoint: expected a folder with state.json, with `latest`, or with checkpoints/latest"
    )


def _read_tensors(file: Path) -> dict[str, Float32]:
    try:
        return safetensors.numpy.load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def _flatten(file: Path, layout: FragmentLayout, tensors: Mapping[str, Float32]) -> Float32:
    parts = []
    for slot in layout.slots:
        tensor = tensors.get(slot.name)
        if tensor is None:
            raise UsageError(f"{file}: tensor {slot.name!r} is missing")
        if tensor.dtype != np.float32 or tensor.shape != slot.shape:
            raise UsageError(
                f"{file}: tensor {slot.name!r} is {tensor.dtype} {tensor.shape}, the spec says float32 {slot.shape}"
            )
        parts.append(tensor.reshape(-1))
    return np.concatenate(parts)  # after the checks: what the spec says of sizes is true then


def _read_state(folder: Path) -> SavedState:
    try:
        return SavedState.model_validate_json((folder / "state.json").read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {folder / 'state.json'}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise UsageError(f"{folder / 'state.json'}: {where}: {first['msg']}") from error


def is_saved(directory: Path, run: RunState) -> bool:
    """Whether the newest checkpoint in `directory` is of this state's manifest."""
    try:
        saved = _read_state(find_checkpoint(directory)).run
    except UsageError:
        return False
    return (saved.phase, saved.manifest) == (run.phase, run.manifest)


def is_of(folder: Path, heads: Iterable[tuple[int, int, bytes]]) -> bool:
    """Whether a checkpoint is of these heads (fragment, version, digest); True if it is no run's, or there are none.

    Raises:
        UsageError: its state cannot be read.
    """
    if not (known := {p: (version, digest) for p, version, digest in heads}):
        return True
    return {p: (one.version, one.digest) for p, one in enumerate(_read_state(folder).fragments)} == known


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and check a checkpoint (see `find_checkpoint` for what `path` may be).

    Raises:
        UsageError: naming the file and what is wrong with it.
    """
    folder = find_checkpoint(path)
    state = _read_state(folder)
    layout = layout_of(state.spec.tensors)
    if len(state.fragments) != len(layout.fragments):
        raise UsageError(
            f"{folder / 'state.json'}: {len(state.fragments)} fragments, the spec has {len(layout.fragments)}"
        )
    files = {name: folder / f"{name}.safetensors" for name in (GLOBALS, *STATE_RULES[state.spec.sync.outer].names)}
    found = {name: _read_tensors(file) for name, file in files.items() if name == GLOBALS or file.exists()}
    known = {slot.name for fragment in layout.fragments for slot in fragment.slots}
    for name, tensors in found.items():
        if strange := sorted(set(tensors) - known):
            raise UsageError(f"{files[name]}: tensor {strange[0]!r} is not in the spec")
    theta: list[Float32] = []
    outer_state: list[OuterState] = []
    for fragment, saved in zip(layout.fragments, state.fragments, strict=True):
        saved_here = {
            name: _flatten(files[name], fragment, tensors)
            for name, tensors in found.items()
            if name == GLOBALS or any(slot.name in tensors for slot in fragment.slots)
        }
        flat = saved_here[GLOBALS]
        if payload_digest(as_bytes(flat), state.spec.sync.chunk_bytes) != saved.digest:
            raise UsageError(
                f"{files[GLOBALS]}: fragment {fragment.id} does not have the digest that "
                "state.json says: the file is damaged or of another checkpoint"
            )
        for name, values in saved_here.items():
            if not all_finite(values):
                raise UsageError(
                    f"{files[name]}: fragment {fragment.id} has values that are not finite: no run can "
                    "go on from it; take an earlier checkpoint"
                )
        theta.append(saved_here.pop(GLOBALS))
        outer_state.append(saved_here)
    summed = check_sums(folder)  # after what says more about a file than that it is another one
    if not summed and state.format > 1:
        raise UsageError(f"{folder / SUMS_FILE} is missing: what is here cannot be checked; take another checkpoint")
    if not summed:
        checked = "values by their digests; of the outer state only that it is finite"
        structlog.get_logger().warning("checkpoint_without_sums", path=str(folder), checked=checked)
    return Checkpoint(
        path=folder,
        spec=state.spec,
        state=state.run,
        overwritten=state.overwritten,
        fragments=state.fragments,
        shards=state.shards,
        data_order=state.data_order,
        globals=tuple(theta),
        outer_state=tuple(outer_state),
    )


# --- restore -----------------------------------------------------------------------------------------


async def restore_checkpoint(
    bus: Bus, checkpoint: Checkpoint, spec: Spec, nonce: str, syncer: str, clock: Clock
) -> None:
    """Put a checkpoint on an empty run: spec, run state, data, then every fragment at its saved version.

    The heads come last, because learners wait for them: who reads a head finds the data's order and shards in place.
    What an interrupted restore of the same checkpoint left is kept, so it can be called again.

    Args:
        bus: bound to the run, groups set.
        checkpoint: what to restore.
        spec: the saved spec, or one with another budget or other sync settings; the tensors must be the same.
        nonce: under which the caller holds the leases of all fragments.
        syncer: its name, for the tape.
        clock: for the tape.

    Raises:
        UsageError: the run has another spec or data order, or was started before, or the budget is used up.
        LeaseLost: another syncer took over.
    """
    if spec.tensors != checkpoint.spec.tensors:
        raise UsageError(f"{checkpoint.path} holds another model than the one to be trained")
    if spec.sync.tokens <= checkpoint.state.tokens:
        raise UsageError(
            f"tokens={spec.sync.tokens}: {checkpoint.path} has trained {checkpoint.state.tokens} already; "
            "give a larger budget"
        )
    if decode(Spec, await bus.propose_spec(encode(spec))) != spec:
        raise UsageError("the run already has another spec: resume under a --run name that is not in use")
    layout = layout_of(spec.tensors)
    heads = await bus.read_heads([fragment.id for fragment in layout.fragments])
    for head, mine in zip(heads, checkpoint.fragments, strict=True):
        if head is not None and head.version != mine.version:
            raise UsageError("the run was started before: resume under a --run name that is not in use")
    if not any(heads):
        await bus.write_state(_restored_run(checkpoint, spec, clock))
        order = checkpoint.data_order
        if order is not None and await bus.propose_data_order(order) != order:
            raise UsageError("the run already has another data order: resume under a --run name that is not in use")
        if await bus.count_epochs() == 0:
            await bus.restore_shards(checkpoint.shards)
    for p, fragment in enumerate(layout.fragments):
        if heads[p] is None:
            await _restore_fragment(bus, checkpoint, spec, fragment, nonce, syncer, clock)


def known_elements(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Token-elements merged, overwritten and rejected up to the checkpoint, in all parts of its run."""
    state, parts = checkpoint.state, list(zip(map(len, checkpoint.globals), checkpoint.fragments, strict=True))
    return (
        sum(elements * one.merged_tokens for elements, one in parts),
        state.base_overwritten + checkpoint.overwritten,
        state.base_rejected + sum(elements * one.rejected_tokens for elements, one in parts),
    )


def _restored_run(checkpoint: Checkpoint, spec: Spec, clock: Clock) -> RunState:
    merged, overwritten, rejected = known_elements(checkpoint)
    return RunState(
        phase=Phase.RUNNING,
        tokens=checkpoint.state.tokens,
        base_tokens=checkpoint.state.tokens,
        base_merged=min(checkpoint.state.tokens, merged // sum(map(len, checkpoint.globals))),
        base_overwritten=min(MOST_TOKENS, overwritten),
        base_rejected=min(MOST_TOKENS, rejected),
        budget_tokens=spec.sync.tokens,
        started_unix_s=clock.unix(),
        reason=f"resumed from {checkpoint.path.name}",
        manifest=(),
    )


async def _restore_fragment(
    bus: Bus, checkpoint: Checkpoint, spec: Spec, fragment: FragmentLayout, nonce: str, syncer: str, clock: Clock
) -> None:
    """Commit one fragment at its saved version (there is no head before)."""
    p, sync = fragment.id, fragment.sync(spec.sync)
    saved, theta = checkpoint.fragments[p], checkpoint.globals[p]
    names = STATE_RULES[sync.outer].names if sync.outer_momentum else ()
    state = {name: vector for name, vector in checkpoint.outer_state[p].items() if name in names}
    published = await push_global(bus, p, saved.version, secrets.token_hex(8), theta, sync, STAGED_TTL_S, state)
    digest = payload_digest(as_bytes(theta), sync.chunk_bytes)
    reason = f"restored from {checkpoint.path.name}"
    await bus.commit(
        Commit(
            nonce=nonce,
            expected=None,
            version=saved.version,
            digest=digest,
            payload=published.payload,
            rest=published.rest,
            momentum=published.outer_state,
            window=WindowView(state="idle", attempt=0, members=(), expected=0, reason=reason, deadline_unix_s=None),
            merged=(),
            merged_tokens=saved.merged_tokens,
            record=Committed.installed(p, saved.version, digest, reason=reason, syncer=syncer, unix_s=clock.unix()),
        )
    )
