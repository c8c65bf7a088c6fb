"""Loading: find a checkpoint, check all of it, and read it fragment by fragment. Errors name the file."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
from pydantic import ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import SUMS_FILE, damaged, parse_sums
from diloco.pipeline.files.tensor_file import Tensor, tensors_in
from diloco.pipeline.files.writable import error_text
from diloco.pipeline.fragments import FragmentLayout, Layout, Slot, layout_of
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import as_bytes, payload_digest
from diloco.pipeline.wrong_values import complaint
from diloco.syncer.checkpoints.manifest import (
    CHECKPOINT,
    GLOBALS,
    LATEST,
    MOMENTUM,
    STATE_FILE,
    Float32,
    SavedFragment,
    SavedState,
    may_be_left,
    pieces,
)
from diloco.syncer.checkpoints.places import Folder, Place, place_of
from diloco.syncer.checkpoints.saving import is_folder_of, is_run_folder, read_latest

# How many newer checkpoints are tried if the run drops one while it is read.
READS = 3
T = TypeVar("T")


class NoCheckpoint(UsageError):
    """There is no checkpoint in a place."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is in memory."""

    folder: Place
    spec: Spec
    state: RunState
    overwritten: int
    """See `SavedState.overwritten`."""
    fragments: tuple[SavedFragment, ...]
    shards: ShardQueue
    data_order: DataOrder | None
    """See `SavedState.data_order`."""

    @property
    def folder_name(self) -> str:
        """Name of the folder, without the place that it is in."""
        return str(self.folder).rpartition("/")[2]

    @cached_property
    def layout(self) -> Layout:
        """Layout of the spec's tensors."""
        return layout_of(self.spec.tensors)

    def fragment(self, p: int) -> tuple[Float32, Float32 | None]:
        """Read and check the values (elements,) and the momentum (elements,) (None: zeros) of one fragment.

        Raises:
            UsageError: the fragment is damaged; the message names the file and the problem.
        """
        saved, elements = self.fragments[p], self.layout.fragments[p].elements
        file = f"{self.folder}/{saved.file}"
        data = _read(self.folder, saved.file)
        if hashlib.sha256(data).hexdigest() != saved.sha256:
            raise damaged(file)
        vectors = {name: _vector(tensor, elements, file) for name, tensor in _tensors(data, file).items()}
        values = vectors.get(GLOBALS)
        if values is None or payload_digest(as_bytes(values), self.spec.sync.chunk_bytes) != saved.digest:
            raise UsageError(
                f"{file}: fragment {p} does not have the digest in {STATE_FILE}: it may belong to "
                "another run; use another copy of the checkpoint"
            )
        return values, vectors.get(MOMENTUM)

    def check(self) -> None:
        """Read and check the whole checkpoint, a fragment at a time.

        Raises:
            UsageError: it is damaged (see `fragment`).
        """
        if len(self.fragments) != len(self.layout.fragments):
            raise UsageError(
                f"{self.folder}/{STATE_FILE}: {len(self.fragments)} fragments, but the spec has "
                f"{len(self.layout.fragments)}"
            )
        for p in range(len(self.fragments)):
            self.fragment(p)

    def tensors(self) -> dict[str, Tensor]:
        """Return the global parameters by name. Each is read when needed; only the last read fragment is in memory."""
        last: dict[int, Float32] = {}

        def values(p: int) -> Float32:
            if p not in last:
                last.clear()
                last[p] = self.fragment(p)[0]
            return last[p]

        return {name: _tensor(parts, values) for name, parts in pieces(self.layout).items()}


def _tensor(parts: list[tuple[FragmentLayout, Slot]], values: Callable[[int], Float32]) -> Tensor:
    shape = parts[0][1].tensor.shape

    def read() -> memoryview:
        found = [values(fragment.id)[slot.start : slot.stop] for fragment, slot in parts]
        return as_bytes(found[0] if len(found) == 1 else np.concatenate(found))

    return Tensor("F32", shape, 4 * sum(slot.stop - slot.start for _, slot in parts), read)


def load_checkpoint(place: str | Path) -> Checkpoint:
    """Find and check a checkpoint (see `find_checkpoint` for what `place` may be).

    Raises:
        UsageError: there is none, or it is damaged; the message names the file and the problem.
    """
    return read_newest(partial(find_checkpoint, place), _checked)


def _checked(folder: Place) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    return checkpoint


def read_newest(find: Callable[[], Place], read: Callable[[Place], T]) -> T:
    """Find a checkpoint's folder and read it; take a newer one if a running run has dropped it meanwhile.

    Raises:
        UsageError: `find` or `read` failed, or the run drops checkpoints faster than they can be read.
    """
    folder = find()
    for _ in range(READS):
        try:
            return read(folder)
        except UsageError:
            if _is_there(folder):
                raise
            before, folder = folder, find()
            structlog.get_logger().warning("checkpoint_dropped_meanwhile", path=str(before), newer=str(folder))
    return read(folder)


def _is_there(folder: Place) -> bool:
    with suppress(OSError):
        return STATE_FILE in folder.names()
    return True


def find_checkpoint(place: str | Path) -> Place:
    """Return the folder of the checkpoint that `place` means.

    It is the place itself, or the newest checkpoint of the only run that has any in it or in its folder checkpoints/.

    Raises:
        NoCheckpoint: there is none.
        UsageError: there are checkpoints of several runs, or the place has no name, is a file or cannot be read.
    """
    if not str(place):
        raise UsageError("the checkpoint's name is empty", "give its folder, or an address such as s3://bucket/path")
    given = place_of(place)
    try:
        if isinstance(given, Folder) and given.path.is_file():
            raise UsageError(f"{place} is a file, and a checkpoint is a folder", "give its folder")
        if STATE_FILE in given.names():
            return given
        for directory in (given, given.below("checkpoints")):
            if runs := runs_in(directory):
                return _newest(_only(runs, directory))
    except OSError as error:
        raise UsageError(f"cannot look for a checkpoint: {error_text(error)}") from error
    if isinstance(given, Folder) and not given.path.exists():
        raise NoCheckpoint(f"no such checkpoint or folder: {place}", "check the path")
    raise NoCheckpoint(
        f"{place} has no checkpoint yet",
        "a run saves its first one after --checkpoint-every, or when it ends. If it has saved one, check the path",
    )


def runs_in(place: Place) -> list[Place]:
    """Return the folders of the runs that have saved something in a place; the place itself, if it is such a folder.

    Raises:
        OSError: the place cannot be read.
    """
    names = place.names()
    if LATEST in names:
        return [place]
    runs = map(place.below, sorted(filter(is_run_folder, names)))
    return [run for run in runs if LATEST in run.names() or _whole(run)]


def _whole(run: Place) -> list[str]:
    """Return the names of a run's completely written checkpoints, in the order of their tokens."""
    names = (name for name in run.names() if name.startswith(CHECKPOINT) and may_be_left(name))
    return sorted(
        (one for one in names if STATE_FILE in run.below(one).names()), key=lambda one: int(one.split("-")[1])
    )


def newest_of_run(place: Place, run: str) -> Checkpoint | None:
    """Return a run's newest checkpoint in a place; None if there is none.

    If several runs of this name have saved there, the run that began last counts. Only the manifest is checked yet.

    Raises:
        UsageError: it is damaged, or the place cannot be read.
    """
    try:
        try:
            own = [folder for folder in runs_in(place) if is_folder_of(str(folder).rpartition("/")[2], run)]
        except FileNotFoundError:
            return None
        return read_newest(partial(_newest, own[-1]), open_checkpoint) if own else None
    except OSError as error:
        raise UsageError(f"cannot look for a checkpoint: {error_text(error)}") from error


def _only(runs: list[Place], place: Place) -> Place:
    if len(runs) > 1:
        told = ", ".join(f"{run} ({next(iter(read_latest(run)), 'empty')})" for run in runs)
        raise UsageError(f"{place} has checkpoints of {len(runs)} runs; name the folder of the one you mean: {told}")
    return runs[0]


def _newest(directory: Place) -> Place:
    latest, before = read_latest(directory), None
    while latest != before:  # if it changed, newer ones were saved meanwhile and the listed one was dropped
        name = next(iter(latest), "")
        names = {one for one in directory.names() if one.startswith(CHECKPOINT)}
        if name in names and STATE_FILE in directory.below(name).names():
            return directory.below(name)
        latest, before = read_latest(directory), latest
    there = _whole(directory)
    if there and LATEST not in directory.names():  # a copy or the first save was interrupted
        structlog.get_logger().warning("latest_missing", path=f"{directory}/{LATEST}", taken=there[-1])
        return directory.below(there[-1])
    found = f"choose one of {', '.join(there)}" if there else "and there are no others"
    raise UsageError(f"{directory}/{LATEST} names {name!r}, which is not a checkpoint folder; {found}")


def open_checkpoint(folder: Place) -> Checkpoint:
    """Return the checkpoint in a folder. Only its manifest is checked yet.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    data = _read(folder, STATE_FILE)
    try:
        saved = SavedState.model_validate_json(data)
    except ValidationError as error:
        raise UsageError(f"{folder}/{STATE_FILE}: {complaint(error)}") from error
    _check_manifest(folder, saved, data)
    rest = saved.overwritten, saved.fragments, saved.shards, saved.data_order
    return Checkpoint(folder, saved.spec, saved.run, *rest)


def _check_manifest(folder: Place, saved: SavedState, data: bytes) -> None:
    where = f"{folder}/{SUMS_FILE}"
    sums = parse_sums(_read(folder, SUMS_FILE).decode(errors="replace"), where)
    for file, digest in {one.file: one.sha256 for one in saved.fragments}.items():
        if file not in sums:
            raise UsageError(f"{where} is damaged: it does not list {file}")
        if digest != sums[file]:
            raise damaged(f"{folder}/{STATE_FILE}")
    if STATE_FILE not in sums:
        raise UsageError(f"{where} is damaged: it does not list {STATE_FILE}")
    if sums[STATE_FILE] != hashlib.sha256(data).hexdigest():
        raise damaged(f"{folder}/{STATE_FILE}")


def _read(folder: Place, name: str) -> bytes:
    try:
        return folder.read(name)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder}/{name} is missing, so the checkpoint is incomplete; use another checkpoint or copy"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot read {folder}/{name}: {error_text(error)}") from error


def _tensors(data: bytes, file: str) -> Mapping[str, Tensor]:
    try:
        return tensors_in(memoryview(data))
    except ValueError as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def _vector(tensor: Tensor, elements: int, file: str) -> Float32:
    if (tensor.dtype, tensor.shape) != ("F32", (elements,)):
        raise UsageError(f"{file} has {tensor.dtype} {tensor.shape} instead of the spec's F32 ({elements},)")
    vector: Float32 = np.frombuffer(tensor.read(), "<f4")
    return vector


# --- questions about a checkpoint --------------------------------------------------------------------


def is_saved(place: Place, run: RunState) -> bool:
    """Return whether the newest checkpoint in a run's folder has this state's phase and manifest.

    Raises:
        OSError: the place cannot be read.
    """
    if LATEST not in place.names():
        return False
    try:
        saved = open_checkpoint(_newest(place)).state
    except UsageError:
        return False
    return (saved.phase, saved.manifest) == (run.phase, run.manifest)


def is_of(folder: Place, heads: Iterable[tuple[int, int, bytes]]) -> bool:
    """Return whether a checkpoint has exactly these heads (fragment, version, digest); True if no heads are given.

    Raises:
        UsageError: its state cannot be read.
    """
    if not (known := {p: (version, digest) for p, version, digest in heads}):
        return True
    return {p: (one.version, one.digest) for p, one in enumerate(open_checkpoint(folder).fragments)} == known


def known_elements(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Return the token-elements merged, overwritten and rejected up to this checkpoint, across all restarts."""
    state = checkpoint.state
    parts = [(f.elements, one) for f, one in zip(checkpoint.layout.fragments, checkpoint.fragments, strict=True)]
    return (
        sum(elements * one.merged_tokens for elements, one in parts),
        state.base_overwritten + checkpoint.overwritten,
        state.base_rejected + sum(elements * one.rejected_tokens for elements, one in parts),
    )
