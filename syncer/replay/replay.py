"""Replay of a recorded run: every merge of the event tape is made again from its recording, and compared.

For each merge on the tape these are compared:

- facts: version, base, contributions with their order, steps, tokens, weights and norms must be exactly the same on the
  tape and in the recording;
- reductions (weights from steps and tokens, norms, lengths of directions): they are computed again and must agree
  within `TOLERANCE`, since another machine may sum in another order;
- orthogonalised steps of matrices: they are computed again and must agree within `ORTHOGONAL_TOLERANCE`, since products
  of matrices are reductions too;
- elementwise work: merge and outer step from the *recorded* order, steps, tokens, lengths and orthogonalised steps must
  give the tape's digest, bit for bit, on any machine. The momentum is checked by that too, since it goes into the next
  version. So are the values of the version before, if the tape says that a stale delta was rebased.

Values go from one replayed version to the next, along base digest -> digest. So a history that a rewind replaced is
replayed in addition to its replacement. The values start from recorded globals; a recorded global of a replayed version
must be equal to it. After a merge that cannot be repeated, the replay continues at the next recorded global.

An incomplete tape is a difference too. It is recognised by a fragment without records, by a base or a checkpoint's
version that is not on the tape, and by recorded merges after the tape's end from which others were made: a merge that
the bus refused has no successor. The module is blocking and needs only numpy.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diloco.pipeline.errors import BadMessage
from diloco.pipeline.fragments import FragmentLayout, layout_of
from diloco.pipeline.messages.fragment import Committed, Contribution
from diloco.pipeline.messages.spec import Spec, SyncSpec
from diloco.pipeline.payload.codec import Vector, as_bytes, payload_digest
from diloco.pipeline.ramps import interval_in_force
from diloco.syncer.algorithm import clip_factors, merge_weights
from diloco.syncer.merging.merge import Contributions, Float32, Sum, delta_norms, merge_shares, rebase
from diloco.syncer.merging.outer import OuterStep, Recorded, State, outer_at
from diloco.syncer.replay.recording import GLOBAL, MERGE, RecordedMerge, list_files, read_global, read_merge, read_spec

# Allowed relative difference of two computations of one reduction; float32 sums in rows differ by 5e-7 at most.
TOLERANCE = 1e-6

# Allowed difference of two computations of one orthogonalised step, relative to its length. Halley's iteration
# multiplies float32's rounding of small singular values by up to 86; float32 and float64 differ by less than 2e-4.
ORTHOGONAL_TOLERANCE = 1e-3

# A version of a fragment and its digest in hex: one point of its history.
Node = tuple[int, str]


class Difference(NamedTuple):
    """A difference between the tape and the replay."""

    fragment: int
    version: int
    what: str

    def __str__(self) -> str:
        return f"fragment {self.fragment} version {self.version}: {self.what}"


class Values(NamedTuple):
    """Global values (elements,) float32 and momentum of one version."""

    theta: Float32
    momentum: Float32 | None
    """(elements,); None stands for zeros."""
    before: Float32 | None = None
    """(elements,): values of the version before, if that was replayed too."""


class Checked(NamedTuple):
    """Outcome of one repeated merge."""

    values: Values | None
    """Its values; None if they do not have the tape's digest."""
    largest: float
    """Largest relative difference of a reduction."""
    problems: list[str]


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay."""

    merges: int = 0
    """Merges on the tape."""
    repeated: int = 0
    """Merges that were made again, with whatever outcome."""
    fragments: int = 0
    read_bytes: int = 0
    largest: float = 0.0
    """Largest relative difference of a reduction."""
    unused: int = 0
    """Recorded merges that are not on the tape: their commits were refused, or came after the tape was read."""
    differences: list[Difference] = field(default_factory=list)


# --- one merge ---------------------------------------------------------------------------------------


def relative(found: Any, expected: Any) -> float:
    """Return the largest relative difference of two numbers or arrays of one shape; infinite if one is not finite."""
    a, b = np.atleast_1d(np.asarray(found, np.float64)), np.atleast_1d(np.asarray(expected, np.float64))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    ratio[a == b] = 0.0
    worst = float(ratio.max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def _facts(recorded: RecordedMerge, tape: Committed) -> list[str]:
    """Return the facts in which the recording and the tape differ."""
    header, problems = recorded.header, []
    for name in ("fragment", "version", "digest", "base_digest", "norm"):
        there, here = getattr(tape, name), getattr(header, name)
        if there != here:
            problems.append(f"{name}: the tape has {_shown(there)}, but the recording has {_shown(here)}")

    def who(part: Contribution) -> str:
        return f"{part.learner}/{part.incarnation} on version {part.base_version}"

    there, here = [who(c) for c in tape.contributions], [who(c) for c in header.contributions]
    if there != here:
        what = "order of contributions" if sorted(there) == sorted(here) else "contributions"
        return [*problems, f"{what}: the tape has {', '.join(there)}, but the recording has {', '.join(here)}"]
    for mine, other in zip(header.contributions, tape.contributions, strict=True):
        for name in ("attempt", "steps", "tokens", "weight", "norm", "rebased", "factor"):
            a, b = getattr(other, name), getattr(mine, name)
            if a != b:
                problems.append(f"{name} of {mine.learner}: the tape has {a!r}, but the recording has {b!r}")
    return problems


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def repeat(layout: FragmentLayout, sync: SyncSpec, base: Values, recorded: RecordedMerge, tape: Committed) -> Checked:
    """Make one merge again, from its recording and the replayed values of its base, and compare it with the tape."""
    problems, largest = _facts(recorded, tape), 0.0
    parts = recorded.header.contributions

    def compare(what: str, found: Any, expected: Any) -> None:
        nonlocal largest
        largest = max(largest, off := relative(found, expected))
        if off > TOLERANCE:
            problems.append(f"{what}: recomputed, it differs from the recorded value by {off:.2g} of its size")

    weights = np.array([part.weight for part in parts])
    shares = tuple(weights.tolist())
    if all(part.steps > 0 and part.tokens > 0 for part in parts):
        counters = [(part.steps, part.tokens) for part in parts]
        interval = interval_in_force(sync, recorded.header.version - 1, tape.interval)
        compare("merge weights", merge_weights(counters, sync.weights, interval=interval), weights)
        shares = merge_shares(counters, sync.weights, interval=interval)
    else:
        problems.append("a contribution's steps or tokens are not positive")
    factors = [part.factor for part in parts]
    compare("clip factors", clip_factors([float(np.linalg.norm(n)) for n in recorded.norms], sync.delta_clip), factors)
    deltas: list[Vector] = []
    for part, values, digest, norms in zip(parts, recorded.deltas, recorded.header.deltas, recorded.norms, strict=True):
        if payload_digest(as_bytes(values), sync.chunk_bytes) != digest:
            problems.append(f"the delta of {part.learner} is damaged: its digest differs from the recorded one")
        measured = delta_norms(layout, values)
        compare(f"norm of the delta of {part.learner}", float(np.linalg.norm(measured)), part.norm)
        merged = values
        if part.rebased and base.before is not None:
            merged, measured = rebase(layout, values, base.theta, base.before)
        elif part.rebased:
            problems.append(f"the delta of {part.learner} was rebased, but the values of its own base are not known")
        for slot, mine, other in zip(layout.slots, measured, norms, strict=True):
            compare(f"norm of {slot.name} in the delta of {part.learner}", mine, other)
        deltas.append(merged)
    version = recorded.header.version - 1
    outer = outer_at(sync, version, (part.steps for part in parts), tape.interval)
    contributions = Contributions(deltas, recorded.norms, shares, factors)
    step = OuterStep(Sum(layout), contributions, sync, outer, State(base.theta, base.momentum))
    chosen = recorded.orthogonal
    if (chosen is not None) != step.orthogonalises:
        problems.append(f"the recording has {'an' if chosen is not None else 'no'} orthogonalised step, unlike the run")
        chosen = None
    if chosen is not None and payload_digest(as_bytes(chosen), sync.chunk_bytes) != recorded.header.orthogonal:
        problems.append("the orthogonalised step is damaged: its digest differs from the recorded one")
    stepped = step.take(Recorded(recorded.directions, chosen))
    if chosen is not None and stepped.orthogonal is not None:
        problems += _other_steps(layout, stepped.orthogonal, chosen)
    for slot, mine, other in zip(layout.slots, stepped.reduced.directions, recorded.directions, strict=True):
        compare(f"length of the mean direction of {slot.name}", mine, other)
    compare("norm of the pseudogradient", stepped.reduced.norm, recorded.header.norm)
    if tape.step_norm is not None:
        compare("norm of the outer step", stepped.norm, tape.step_norm)
    if stepped.digest != tape.digest:
        again = stepped.digest.hex()
        problems.append(f"values: the tape has digest {tape.digest.hex()}; recomputed, it is {again}")
        return Checked(None, largest, problems)
    return Checked(Values(stepped.theta, stepped.momentum, base.theta), largest, problems)


def _other_steps(layout: FragmentLayout, found: Float32, recorded: Float32) -> list[str]:
    """Return a line for each matrix whose orthogonalised step differs; found and recorded are (matrix elements,)."""
    problems, done = [], 0
    for slot in layout.slots:
        if slot.tensor.matrix:
            mine, theirs = (one[done : done + slot.stop - slot.start].astype(np.float64) for one in (found, recorded))
            done += slot.stop - slot.start
            off, length = float(np.linalg.norm(mine - theirs)), float(np.linalg.norm(mine))
            if not off <= ORTHOGONAL_TOLERANCE * length:
                problems.append(
                    f"orthogonalised step of {slot.name}: recomputed, it differs from the recorded one by "
                    f"{off / length if length else float('inf'):.2g} of its length"
                )
    return problems


# --- a run -------------------------------------------------------------------------------------------


def replay(
    directory: Path,
    tape: Iterable[Committed],
    progress: Callable[[int], None],
    saved: Iterable[tuple[int, int, bytes]] = (),
    before: Container[Path] | None = None,
) -> Replayed:
    """Replay all merges of a run.

    Args:
        tape: the run's commits, by time; they are of several histories if the bus was ever rewound.
        progress: called with the number of merges that were done since the last call.
        saved: (fragment, version, digest) of a checkpoint of the run; the tape must have them.
        before: the recording's files before the tape was read (`list_recording`), for a run that may continue: merges
            in later files need not be on the tape. None: all files count. Merges that the bus refused never need to be.

    Raises:
        UsageError: `directory` is not a recording.
        BadMessage: its spec is damaged.
        OSError: it cannot be read.
    """
    spec, outcome = read_spec(directory), Replayed()
    layouts = {layout.id: layout for layout in layout_of(spec.tensors).fragments}
    by_fragment: dict[int, list[Committed]] = defaultdict(list)
    for record in tape:
        by_fragment[record.fragment].append(record)
    for p, records in sorted(by_fragment.items()):
        if p not in layouts:
            outcome.differences.append(
                Difference(
                    p,
                    records[0].version,
                    f"the recorded run has {len(layouts)} fragments: the tape may "
                    "belong to another run; give this run's tape",
                )
            )
            continue
        _FragmentReplay(directory, spec, layouts[p], records, outcome, progress, before).replay()
    for p in layouts.keys() - by_fragment.keys():
        outcome.differences.append(
            Difference(p, 0, "the tape has no record of this fragment: check that none of its files is missing")
        )
    for p, version, digest in saved:
        if p in by_fragment and (version, digest.hex()) not in map(_node, by_fragment[p]):
            what = (
                f"the checkpoint has it, with digest {digest.hex()}, but the tape does not, so the tape is incomplete"
            )
            outcome.differences.append(Difference(p, version, what))
    outcome.differences.sort(key=lambda difference: difference[:2])
    return outcome


class _FragmentReplay:
    """The replay of one fragment, whose records on the tape form a graph of versions."""

    def __init__(
        self,
        directory: Path,
        spec: Spec,
        layout: FragmentLayout,
        records: Sequence[Committed],
        outcome: Replayed,
        progress: Callable[[int], None],
        before: Container[Path] | None,
    ) -> None:
        self._spec, self._layout, self._outcome, self._progress = spec, layout, outcome, progress
        self._records, self._before = records, before
        self._merges = [record for record in records if record.contributions]
        self._after: dict[Node, list[Committed]] = defaultdict(list)
        for record in self._merges:
            self._after[record.version - 1, record.base_digest.hex() if record.base_digest else ""].append(record)
        self._globals: dict[Node, list[Path]] = defaultdict(list)
        """Recorded globals of each version; several owners may have recorded the same one."""
        self._files: dict[Node, list[Path]] = defaultdict(list)
        for path, name in list_files(directory, layout.id).items():
            if name.kind == GLOBAL:
                self._globals[name.version, name.digest].append(path)
            elif name.kind == MERGE:
                self._files[name.version, name.digest].append(path)
        self._known: set[Node] = set()
        self._tried: set[Committed] = set()

    def replay(self) -> None:
        outcome = self._outcome
        outcome.fragments += 1
        outcome.merges += len(self._merges)
        on_tape = {_node(record) for record in self._records}
        for record in self._records:
            if not record.contributions and _node(record) not in self._globals:
                self._differs(record.version, f"no values were recorded ({record.reason})")
        for node in sorted(self._globals):
            if node not in self._known and (node in on_tape or node in self._after):
                if node not in on_tape:
                    self._differs(node[0], "the tape lacks it, but has a merge that was computed from it")
                self._start_at(node)
        self._tell_gaps()
        self._tell_end(on_tape)
        outcome.unused += sum(len(paths) for node, paths in self._files.items() if node not in on_tape)

    def _start_at(self, node: Node) -> None:
        """Replay from recorded values; if there are several recordings of them, they must be equal."""
        if found := self._load(node):
            for other in found[1:]:
                self._compare(node, found[0], other, "two recordings of it differ")
            self._walk(node, found[0])

    def _walk(self, start: Node, values: Values) -> None:
        """Replay everything that can be made from the values of `start`; keep in memory only what is still needed."""
        stack = [(start, values)]
        while stack:
            node, values = stack.pop()
            if node in self._known:
                continue
            self._known.add(node)
            if node != start and node in self._globals:
                self._meet(node, values)
            for record in self._after.get(node, ()):
                self._tried.add(record)
                made = self._make(record, values)
                self._progress(1)
                if made is not None:
                    stack.append((_node(record), made))

    def _make(self, record: Committed, base: Values) -> Values | None:
        recorded = self._find(record)
        if recorded is None:
            return None
        checked = repeat(self._layout, self._layout.sync(self._spec.sync), base, recorded, record)
        self._outcome.repeated += 1
        self._outcome.largest = max(self._outcome.largest, checked.largest)
        for problem in checked.problems:
            self._differs(record.version, problem)
        return checked.values

    def _find(self, record: Committed) -> RecordedMerge | None:
        """Return the recording of a commit; None if there is none that can be read.

        Several syncers may have recorded the same version. The recording that agrees with the tape is taken, or the
        first one if none does.
        """
        paths = self._files.get(_node(record), [])
        if not paths:
            others = [digest for version, digest in self._files if version == record.version]
            hint = f"; a merge to digest {others[0]} was recorded" if others else ""
            self._differs(record.version, f"no recording of the merge to digest {record.digest.hex()}{hint}")
            return None
        found, damage = [], ""
        for path in paths:
            try:
                found.append(read_merge(path, self._layout, self._spec))
                self._outcome.read_bytes += path.stat().st_size
            except (BadMessage, OSError) as error:
                damage = str(error)
        if not found:
            self._differs(record.version, damage)
            return None
        return next((merge for merge in found if not _facts(merge, record)), found[0])

    def _load(self, node: Node) -> list[Values]:
        """Return all sound recordings of the values at `node`; report the others."""
        sound = []
        for path in self._globals[node]:
            try:
                found = read_global(path, self._layout, self._spec)
            except (BadMessage, OSError) as error:
                self._differs(node[0], str(error))
                continue
            self._outcome.read_bytes += path.stat().st_size
            header = found.header
            if (header.fragment, header.version, header.digest.hex()) != (self._layout.id, *node):
                self._differs(node[0], f"{path.name} holds fragment {header.fragment} version {header.version}")
                continue
            sound.append(Values(found.theta, found.momentum))
        return sound

    def _meet(self, node: Node, values: Values) -> None:
        """Compare replayed values with those that owners read from the bus."""
        for other in self._load(node):
            self._compare(node, values, other, "recomputed, it differs from the one that was read from the bus")

    def _compare(self, node: Node, values: Values, other: Values, how: str) -> None:
        """Compare the momenta; the values have equal digests already."""
        mine, theirs = (np.zeros_like(v.theta) if v.momentum is None else v.momentum for v in (values, other))
        if not np.array_equal(mine, theirs):
            self._differs(node[0], f"momentum: {how}")

    def _tell_gaps(self) -> None:
        """Report merges that could not be reached, with one line for each chain of them."""
        left = [record for record in self._merges if record not in self._tried]
        nodes = {_node(record) for record in left}
        begins = [r for r in left if (r.version - 1, r.base_digest.hex() if r.base_digest else "") not in nodes]
        self._progress(len(left))
        for record in begins:
            row, node = 0, _node(record)
            while rest := [r for r in self._after.get(node, ()) if r not in self._tried]:
                row, node = row + 1, _node(rest[0])
            also = f", nor are the {row} merges after it" if row else ""
            self._differs(
                record.version,
                f"not recomputed{also}: the values of version {record.version - 1}, which it was computed from, are "
                "not known",
            )

    def _tell_end(self, on_tape: set[Node]) -> None:
        """Report merges that were committed after the tape's last record.

        They must have been committed if other merges were made from them, or if an owner read them from the bus.
        """
        node = last = _node(self._records[-1])
        if last in self._after:
            return  # a rewind ended the history to which the last record belongs
        made: dict[Node, Node] = {}
        for later, paths in self._files.items():
            if later[0] > last[0] and later not in on_tape:
                for path in filter(self._must_be_told, paths):
                    with suppress(BadMessage, OSError):
                        header = read_merge(path, self._layout, self._spec).header
                        made[later] = header.version - 1, header.base_digest.hex()
        read = {node for node, paths in self._globals.items() if any(map(self._must_be_told, paths))}
        committed = read.union(made.values())
        missing = 0
        while following := [later for later, base in made.items() if base == node and later in committed]:
            node, missing = following[0], missing + 1
        if missing:
            self._differs(
                last[0] + 1,
                f"the tape ends before it: it lacks the {missing} merges up to version {node[0]}, which were recorded "
                "and from which other merges were computed",
            )

    def _must_be_told(self, path: Path) -> bool:
        return self._before is None or path in self._before

    def _differs(self, version: int, what: str) -> None:
        self._outcome.differences.append(Difference(self._layout.id, version, what))


def _node(record: Committed) -> Node:
    return record.version, record.digest.hex()
