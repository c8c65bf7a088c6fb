"""A learner's own checkpoint on its local disk: moments, counters, random states and data position.

    <folder>/state.json                  `SavedState`; names the file below; replaced atomically, and last
    <folder>/moments-<step>.safetensors  "<moment>/<tensor>" -> float32; other tensors of the optimizer unchanged
    <folder>/set-aside-1/                the same of another run or optimizer, which was here before
    <folder>/losses.jsonl                if asked for: the training loss of every step

A thread of its own does all the writing, one file at a time, so a caller that saves never waits. Nothing here is ever
unpickled, except by torch's `weights_only` loader (`stateful`).
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import structlog
from pydantic import Field, FiniteFloat, ValidationError
from safetensors import SafetensorError

from diloco.pipeline.errors import BadPayload, PeerError
from diloco.pipeline.files.appending import append_whole
from diloco.pipeline.files.replacing import TEMPORARY, digested, replace
from diloco.pipeline.files.sums import file_sha256
from diloco.pipeline.files.tensor_file import Tensor, parts_of
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.pipeline.messages.wire import Count, Digest, FirstFormat, Message, PartyId, Text
from diloco.pipeline.wrong_values import complaint
from diloco.workers.background import BackgroundThread
from diloco.workers.encoding import Float32
from diloco.workers.moments.saved_moments import Moments, check, of_moment, slots

STATE_FILE = "state.json"
LOCK_FILE = ".lock"
LOSSES_FILE = "losses.jsonl"
MAX_STATE_BYTES = 64 * 2**20
# numpy's kinds of numbers -> the letters of safetensors' type names.
LETTERS = {"f": "F", "i": "I", "u": "U", "c": "C"}
# Descriptors of the lock files that this process has open.
_LOCKS = set[int]()


def _close_locks() -> None:
    """Close the locks in a forked child, such as a DataLoader's worker, which would hold them while it lives."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_close_locks)


class StateRefused(PeerError):
    """A saved state that cannot be used here; the message says why."""


class RunIdentity(Message):
    """A run's name and its start, which tells it from other runs of that name."""

    run: Text
    started_unix_s: FiniteFloat

    def same(self, other: "RunIdentity | None") -> bool:
        """Return whether both are parts of the same run, which may have another name after it was resumed."""
        return other is not None and self.started_unix_s == other.started_unix_s


class SavedState(Message):
    """The content of state.json (bytes as hex)."""

    format: FirstFormat = 1
    identity: RunIdentity
    learner: PartyId
    layout: Digest
    kind: OptimizerKind
    moments_file: Annotated[str, Field(pattern=r"^moments-[0-9]+\.safetensors$")]
    moments_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Digest of that file; "" before it is written."""
    numbers: dict[str, tuple[FiniteFloat, ...]]
    steps: Count
    """Inner steps of all the learner's incarnations so far."""
    torch_rng: bytes
    """`torch.get_rng_state()`, of the CPU."""
    python_rng: tuple[int, tuple[int, ...], float | None]
    """`random.getstate()`."""
    held: dict[str, tuple[Count, Count, Count, Count]] = Field(default_factory=dict)
    """For a rank's file: the block of each tensor that it has (`placement.Block`); a tensor that is not named is
    whole."""
    partition: Text = ""
    """Identifies which of several ranks hold what: only files of the same partition together are a whole checkpoint."""
    objects: dict[str, bytes] = Field(default_factory=dict)
    """States of the objects of `Learner(state=...)`, as `stateful.pack` makes them; of a rank, its own."""
    shard: tuple[str, int] | None
    """Entry id of the data shard being read, and its blocks already read. For people only: after a restart the work
    queue gives its rest to the first learner that asks."""


class StateFolder:
    """The folder to which one learner saves its state."""

    def __init__(self, path: Path, layout: Layout, ranks: Mapping[str, Any] | None = None) -> None:
        """The folder is created when it is first looked at or written to. ranks: fields of `SavedState` about ranks."""
        self.path, self._layout, self._ranks = path, layout, dict(ranks or {})
        self._writer = BackgroundThread("state")
        self._lock: int | None = None
        self._ours = False  # True once the folder is known to hold only state that this learner may replace

    # --- write ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while something is being written."""
        return self._writer.busy

    def look(self) -> None:
        """Check in the background whether the folder can be used, so that a problem is logged before the first save."""
        self._writer.submit(partial(self._logged, self._look))

    def save(self, make: Callable[[], tuple[SavedState, Moments]]) -> None:
        """Save in the background; `make` is called there too, since it may wait for a device."""
        self._writer.submit(partial(self._logged, self._save, make))

    def append_losses(self, lines: Callable[[], Sequence[str]]) -> None:
        """Append lines in the background."""
        self._writer.submit(partial(self._logged, self._append, lines))

    def close(self, within_s: float) -> None:
        """Wait for pending writes, and warn if they take too long; the last complete state then stays in place."""
        if not self._writer.close(within_s):
            error = f"the disk took longer than {within_s:g} s"
            structlog.get_logger().warning("state_not_saved", folder=str(self.path), error=error)
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # explicitly: closing is not enough if a new child has a copy still
            _LOCKS.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def _logged(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:  # a full disk or non-finite moments must not end the training
            structlog.get_logger().warning("state_not_saved", folder=str(self.path), error=str(error))

    def _hold(self) -> None:
        """Lock the folder for as long as this process lives.

        Raises:
            OSError: another learner saves there.
        """
        if self._lock is None:
            lock = os.open(self.path / LOCK_FILE, os.O_WRONLY | os.O_CREAT, 0o644)
            _LOCKS.add(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                _LOCKS.discard(lock)
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
                raise OSError(
                    f"another live learner saves to {self.path}: give each learner its own folder, or stop the one "
                    "that used it first"
                ) from error
            self._lock = lock

    def _save(self, make: Callable[[], tuple[SavedState, Moments]]) -> None:
        state, moments = make()
        check(moments, self._layout)  # a state that could not be loaded must not replace one that can
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold()
        for left in self.path.glob(f"{TEMPORARY}*"):  # left by a killed process; safe, since this one holds the lock
            left.unlink()
        self._set_aside(state)
        arrays = {
            f"{name}/{slot.name}": moments.flats[p][name][slot.start : slot.stop].reshape(slot.shape)
            for name in moments.kind.moments
            for p, slot in slots(of_moment(self._layout, name))
        }
        arrays |= {f"{name}/{tensor}": array for (name, tensor), array in moments.others.items()}
        # The order makes a crash harmless: first the new moments file, then state.json, which names it, then the
        # removal of old ones. state.json always names a complete file.
        file, digest = self.path / state.moments_file, hashlib.sha256()
        new = not file.exists()
        replace(file, digested(to_safetensors(arrays), digest.update))
        state = state.model_copy(update={"moments_sha256": digest.hexdigest(), **self._ranks})
        names, data = self.path / STATE_FILE, state.model_dump_json().encode()
        try:
            replace(names, [data])
        except OSError:  # the disk may be full
            if new and not (names.exists() and names.read_bytes() == data):
                file.unlink()
            raise
        for old in self.path.glob("moments-*.safetensors"):
            if old.name != state.moments_file:
                old.unlink()
        structlog.get_logger().debug("state_saved", folder=str(self.path), steps=state.steps)

    def _look(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold()
        self._let_go()

    def _set_aside(self, state: SavedState) -> None:
        """Before the first save: move away, rather than replace, a state that this learner could not continue from."""
        path = self.path / STATE_FILE
        if not self._ours and path.exists() and (reason := _another(path, state)):
            aside = next(one for n in count(1) if not (one := self.path / f"set-aside-{n}").exists())
            aside.mkdir()
            for file in (*self.path.glob("moments-*.safetensors"), path):
                file.replace(aside / file.name)
            structlog.get_logger().warning("state_set_aside", folder=str(aside), reason=reason)
        self._ours = True

    def check_alone(self) -> None:
        """Check that no other process saves there.

        Raises:
            StateRefused: one does: its moments and its data are not this learner's.
        """
        if (self.path / STATE_FILE).is_file():
            try:
                self._hold()
            except OSError as error:
                if isinstance(error.__cause__, BlockingIOError):
                    raise StateRefused(str(error)) from error
            self._let_go()

    def _append(self, lines: Callable[[], Sequence[str]]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with FileIO(self.path / LOSSES_FILE, "ab") as file:
            append_whole(file, "".join(f"{line}\n" for line in lines()).encode())

    # --- read -----------------------------------------------------------------------------------------

    def load(self, identity: RunIdentity | None, kind: OptimizerKind) -> tuple[SavedState, Moments] | None:
        """Return what was saved last; None if nothing was.

        Args:
            identity: the run that this learner has joined; None if that is not known yet.
            kind: of the optimizer that would continue from it.

        Raises:
            StateRefused: it is from another run, model or optimizer, or damaged.
        """
        path = self.path / STATE_FILE
        if not path.is_file():
            return None
        state = read_state(path)
        self._compare(state, identity, kind)
        file = self.path / state.moments_file
        try:
            if not file.is_file():  # also refuses a named pipe, whose reading would never end
                raise StateRefused(f"{self.path} does not hold a complete state: {file.name} is missing")
            if file_sha256(file) != state.moments_sha256:
                raise StateRefused(f"{file} is damaged: its digest differs from that in {path.name}")
            moments = self._arrays(state, safetensors.numpy.load_file(file))
            check(moments, self._layout)
        except (
            OSError,
            SafetensorError,
            BadPayload,
            AttributeError,  # safetensors asks numpy for a type that it does not have
        ) as error:
            raise StateRefused(f"{self.path} does not hold a complete state: {error}") from error
        return state, moments

    def _compare(self, state: SavedState, identity: RunIdentity | None, kind: OptimizerKind) -> None:
        if identity is None:
            raise StateRefused(f"{self.path} cannot be compared: it is not known yet when this run started")
        if not state.identity.same(identity):
            raise StateRefused(f"{self.path} was saved in another run, {state.identity.run!r}")
        if state.layout != self._layout.digest:
            raise StateRefused(f"{self.path} was saved for a different model or number of fragments")
        if state.kind != kind:
            raise StateRefused(
                f"{self.path} was saved for {state.kind.optimizer}, which keeps "
                f"{[*state.kind.moments, *state.kind.numbers]}; this learner has {kind.optimizer}, which keeps "
                f"{[*kind.moments, *kind.numbers]}"
            )

    def _arrays(self, state: SavedState, arrays: Mapping[str, Any]) -> Moments:
        """Return moments from a file's arrays, which are named `<name>/<tensor>`.

        Raises:
            StateRefused: one is missing, of another shape or type, or without a tensor's name.
        """
        flats: list[dict[str, Float32]] = [{} for _ in self._layout.fragments]
        for name in state.kind.moments:
            layout = of_moment(self._layout, name)
            for flat, fragment in zip(flats, layout.fragments, strict=True):
                flat[name] = np.empty(fragment.elements, np.float32)
            for p, slot in slots(layout):
                array = arrays.get(f"{name}/{slot.name}")
                if array is None or array.shape != slot.shape or array.dtype != np.float32:
                    raise StateRefused(f"{self.path} lacks a valid {name} of {slot.name}")
                flats[p][name][slot.start : slot.stop] = array.reshape(-1)
        others: dict[tuple[str, str], Any] = {}
        for key, array in arrays.items():
            name, slash, tensor = key.partition("/")
            if not slash:
                raise StateRefused(f"{self.path} holds an array {key[:80]!r} that does not belong to any tensor")
            if name not in state.kind.moments:
                others[name, tensor] = array
        return Moments(state.kind, tuple(flats), state.numbers, others)


def read_state(path: Path) -> SavedState:
    """Read a `STATE_FILE`, or another file of that form.

    Raises:
        StateRefused: it is missing, too large, damaged, or from another release.
    """
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise StateRefused(f"{path} is larger than {MAX_STATE_BYTES} bytes")
        return SavedState.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise StateRefused(f"{path} is damaged, or from a different release: {complaint(error)}") from error
    except OSError as error:
        raise StateRefused(f"{path} cannot be read: {error}") from error


def _another(path: Path, state: SavedState) -> str:
    """Return why a saved state is not of the same run and optimizer as `state`; "" if it is.

    A state that cannot be read counts as another one.
    """
    try:
        found = read_state(path)
    except StateRefused as error:
        return str(error)
    if not found.identity.same(state.identity):
        return f"it was saved in another run, {found.identity.run!r}"
    return "" if found.kind.optimizer == state.kind.optimizer else f"it was saved for {found.kind.optimizer}"


def to_safetensors(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[Any]:
    """Yield the parts of a safetensors file: its header, and views of the arrays.

    The format's own writer copies everything, twice, and holds the interpreter's lock meanwhile, so training would
    stand still. Writing the views releases the lock.
    """
    widest_first = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so each lies aligned
    return parts_of({name: _tensor_of(array) for name, array in widest_first})


def _tensor_of(array: npt.NDArray[Any]) -> Tensor:
    kind = "BOOL" if array.dtype == np.bool_ else f"{LETTERS[array.dtype.kind]}{8 * array.itemsize}"
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(kind, array.shape, array.nbytes, lambda: np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
