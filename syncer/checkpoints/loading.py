"""Loading: find a checkpoint, check all of it, read it fragment by fragment. What it raises names the file."""

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
from diloco.pipeline.files.writable import said
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
from diloco.syncer.checkpoints.places import Place, place_of
from diloco.syncer.checkpoints.saving import is_folder_of, is_run_folder, read_latest

READS = 3
"""Newer checkpoints that are tried in the place of one that was dropped as it was read."""
T = TypeVar("T")


class NoCheckpoint(UsageError):
    """There is none in a place."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, of which the manifest is in memory."""

    folder: Place
    saved: SavedState

    @property
    def folder_name(self) -> str:
        """Without the place that it lies in."""
        return str(self.folder).rpartition("/")[2]

    @property
    def spec(self) -> Spec:
        """The run's."""
        return self.saved.spec

    @property
    def state(self) -> RunState:
        """The run's."""
        return self.saved.run

    @property
    def fragments(self) -> tuple[SavedFragment, ...]:
        """By id."""
        return self.saved.fragments

    @property
    def shards(self) -> ShardQueue:
        """The open ones."""
        return self.saved.shards

    @property
    def data_order(self) -> DataOrder | None:
        """As in `SavedState`."""
        return self.saved.data_order

    @cached_property
    def layout(self) -> Layout:
        """Of the spec's tensors."""
        return layout_of(self.spec.tensors)

    def fragment(self, p: int) -> tuple[Float32, Float32 | None]:
        """Values (elements,) and momentum (None: zeros) of one fragment, checked.

        Raises:
            UsageError: naming the file and what is wrong with it.
        """
        saved, elements = self.fragments[p], self.layout.fragments[p].elements
        file = f"{self.folder}/{saved.file}"
        data = _read(self.folder, saved.file)
        if hashlib.sha256(data).hexdigest() != saved.sha256:
            raise damaged(file)
        vectors = {name: _vector(tensor, elements, file) for name, tensor in _tensors(data, file).items()}
        values = vectors.get(GLOBALS)
        if values is None or payload_digest(as_bytes(values), self.spec.sync.chunk_bytes) != saved.digest:
            raise UsageError(f"{file}: fragment {p} does not have the digest that {STATE_FILE} says: of another run?")
        return values, vectors.get(MOMENTUM)

    def check(self) -> None:
        """Read all of it once, a fragment at a time.

        Raises:
            UsageError: as `fragment`.
        """
        if len(self.fragments) != len(self.layout.fragments):
            raise UsageError(
                f"{self.folder}/{STATE_FILE}: {len(self.fragments)} fragments, the spec has "
                f"{len(self.layout.fragments)}"
            )
        for p in range(len(self.fragments)):
            self.fragment(p)

    def tensors(self) -> dict[str, Tensor]:
        """The global parameters by name, each read when asked for; the fragment that was read last stays in memory."""
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
        UsageError: naming the file and what is wrong with it.
    """
    return read_newest(partial(find_checkpoint, place), _checked)


def _checked(folder: Place) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    return checkpoint


def read_newest(find: Callable[[], Place], read: Callable[[Place], T]) -> T:
    """What is read of the folder that is found; of a newer one, where a run that goes on has dropped it meanwhile.

    Raises:
        UsageError: as `find` and `read`; also if the run drops checkpoints faster than they can be read.
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
    """The checkpoint folder meant: itself, or the newest of the only run that has some in there or in checkpoints/.

    Raises:
        NoCheckpoint: there is none.
        UsageError: there are several runs', or the place cannot be read.
    """
    given = place_of(place)
    try:
        if STATE_FILE in given.names():
            return given
        for directory in (given, given.below("checkpoints")):
            if runs := runs_in(directory):
                return _newest(_only(runs, directory))
    except OSError as error:
        raise UsageError(f"cannot look for a checkpoint: {said(error)}") from error
    raise NoCheckpoint(
        f"{place} is no checkpoint: expected a folder with {STATE_FILE}, or one where a run has saved its checkpoints"
    )


def runs_in(place: Place) -> list[Place]:
    """Folders of the runs that have saved something in a place; itself, if it is a run's.

    Raises:
        OSError: the place cannot be read.
    """
    names = place.names()
    if LATEST in names:
        return [place]
    runs = map(place.below, sorted(filter(is_run_folder, names)))
    return [run for run in runs if LATEST in run.names() or _whole(run)]


def _whole(run: Place) -> list[str]:
    """Names of the checkpoints of a run that were written to their end, by their tokens."""
    names = (name for name in run.names() if name.startswith(CHECKPOINT) and may_be_left(name))
    return sorted(
        (one for one in names if STATE_FILE in run.below(one).names()), key=lambda one: int(one.split("-")[1])
    )


def newest_of_run(place: Place, run: str) -> Checkpoint | None:
    """The newest checkpoint that a run of this name has saved in a place: of the part that began last; None: none.

    Nothing is checked yet but its manifest.

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
        raise UsageError(f"cannot look for a checkpoint: {said(error)}") from error


def _only(runs: list[Place], place: Place) -> Place:
    if len(runs) > 1:
        told = ", ".join(f"{run} ({next(iter(read_latest(run)), 'empty')})" for run in runs)
        raise UsageError(f"{place} has checkpoints of {len(runs)} runs; name the folder of the one you mean: {told}")
    return runs[0]


def _newest(directory: Place) -> Place:
    latest, before = read_latest(directory), None
    while latest != before:  # else others have been saved meanwhile, and this one was dropped
        name = next(iter(latest), "")
        names = {one for one in directory.names() if one.startswith(CHECKPOINT)}
        if name in names and STATE_FILE in directory.below(name).names():
            return directory.below(name)
        latest, before = read_latest(directory), latest
    there = _whole(directory)
    if there and LATEST not in directory.names():  # of a copy that was broken off, or the first save was
        structlog.get_logger().warning("latest_missing", path=f"{directory}/{LATEST}", taken=there[-1])
        return directory.below(there[-1])
    found = f"there are {', '.join(there)}: name one of them" if there else "and there is no other"
    raise UsageError(f"{directory}/{LATEST} names {name!r}, which is no checkpoint folder; {found}")


def open_checkpoint(folder: Place) -> Checkpoint:
    """The checkpoint in a folder, of which nothing is checked yet but the manifest.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    data = _read(folder, STATE_FILE)
    try:
        saved = SavedState.model_validate_json(data)
    except ValidationError as error:
        raise UsageError(f"{folder}/{STATE_FILE}: {complaint(error)}") from error
    _check_manifest(folder, saved, data)
    return Checkpoint(folder, saved)


def _check_manifest(folder: Place, saved: SavedState, data: bytes) -> None:
    where = f"{folder}/{SUMS_FILE}"
    sums = parse_sums(_read(folder, SUMS_FILE).decode(errors="replace"), where)
    for file, digest in {one.file: one.sha256 for one in saved.fragments}.items():
        if file not in sums:
            raise UsageError(f"{where} is damaged: it does not name {file}")
        if digest != sums[file]:
            raise damaged(f"{folder}/{STATE_FILE}")
    if STATE_FILE not in sums:
        raise UsageError(f"{where} is damaged: it does not name {STATE_FILE}")
    if sums[STATE_FILE] != hashlib.sha256(data).hexdigest():
        raise damaged(f"{folder}/{STATE_FILE}")


def _read(folder: Place, name: str) -> bytes:
    try:
        return folder.read(name)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder}/{name} is missing: what is here is no whole checkpoint; take another one or another copy"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot read {folder}/{name}: {said(error)}") from error


def _tensors(data: bytes, file: str) -> Mapping[str, Tensor]:
    try:
        return tensors_in(memoryview(data))
    except ValueError as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def _vector(tensor: Tensor, elements: int, file: str) -> Float32:
    if (tensor.dtype, tensor.shape) != ("F32", (elements,)):
        raise UsageError(f"{file} has {tensor.dtype} {tensor.shape} where the spec says F32 ({elements},)")
    vector: Float32 = np.frombuffer(tensor.read(), "<f4")
    return vector


# --- what is asked of one ----------------------------------------------------------------------------


def is_saved(place: Place, run: RunState) -> bool:
    """Whether the newest checkpoint in a run's folder is of this state's manifest.

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
    """Whether a checkpoint is of these heads (fragment, version, digest); True if it is no run's, or there are none.

    Raises:
        UsageError: its state cannot be read.
    """
    if not (known := {p: (version, digest) for p, version, digest in heads}):
        return True
    return {p: (one.version, one.digest) for p, one in enumerate(open_checkpoint(folder).fragments)} == known


def known_elements(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Token-elements merged, overwritten and rejected up to the checkpoint, in all parts of its run."""
    state = checkpoint.state
    parts = [(f.elements, one) for f, one in zip(checkpoint.layout.fragments, checkpoint.fragments, strict=True)]
    return (
        sum(elements * one.merged_tokens for elements, one in parts),
        state.base_overwritten + checkpoint.saved.overwritten,
        state.base_rejected + sum(elements * one.rejected_tokens for elements, one in parts),
    )
