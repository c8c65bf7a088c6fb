"""The replay of recorded runs: a true recording is found equal, and each kind of change is found and named."""

import asyncio
import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import pytest

from diloco import tape as command
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, Contribution
from diloco.pipeline.messages.spec import Spec, TensorSpec
from diloco.pipeline.messages.wire import FORMAT, Codec, MergeName
from diloco.pipeline.payload.codec import as_bytes, decode, encode, payload_digest
from diloco.pipeline.settings import BusSettings
from diloco.syncer.merging import outer
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.replay import recording, replay
from diloco.syncer.replay.recording import _PREFIX, MergeHeader, Recorder, list_files, list_recording, read_merge
from diloco.syncer.replay.replay import TOLERANCE, Replayed, relative
from diloco_studies.virtual.virtual_time import inline, run_virtual
from tests import samples, slow_beyond
from tests.virtual_run import VirtualLearner, VirtualRun, spec_of, sync_spec

Change = Callable[[MergeHeader, np.ndarray], MergeHeader]


def shaped(tensor: TensorSpec, merge: str) -> dict[str, Any]:
    """The rule, and where it goes by rows two of them if the elements allow."""
    rows = 2 - tensor.elements % 2
    return {"rule": merge} | ({"shape": (rows, tensor.elements // rows)} if merge == "rda-row" else {})


MATRIX = {"shape": (2, 3), "matrix": True}


def record_run(
    folder: Path,
    *,
    rewind: bool = False,
    merge: str = "rda",
    averaged: bool = False,
    learners_: int = 2,
    **changes: Any,
) -> list[Committed]:
    """Two learners, or more, of different speed to the end of their budget, recorded; the tape's commits.

    averaged: the last fragment is average-only.
    """
    sync = sync_spec(**{"quorum": 2, "tokens": 3000, "merge": merge} | changes)
    commits: list[Committed] = []

    async def main() -> None:
        world = VirtualRun(sync, record_deltas=folder)
        if merge != "rda":
            tensors = tuple(t.model_copy(update=shaped(t, merge)) for t in world.spec.tensors)
            world.spec = world.spec.model_copy(update={"tensors": tensors})
        if averaged:
            rules = {p: {"rule": "variance" if p % 2 else "rda"} for p in range(2)}
            tensors = tuple(t.model_copy(update=rules[t.fragment]) for t in world.spec.tensors)
            world.spec = world.spec.model_copy(update={"tensors": tensors})
        elif sync.outer != "nesterov":
            tensors = tuple(t.model_copy(update=MATRIX if t.elements < 5 else {}) for t in world.spec.tensors)
            world.spec = world.spec.model_copy(update={"tensors": tensors})
        world.start_syncer()
        learners = [
            VirtualLearner(f"l{i}", world, step_s=0.1 + 0.03 * i, incarnation=f"{i:016x}").start()
            for i in range(learners_)
        ]
        if rewind:
            await world.until_version(3)
            saved, kept = world.store.snapshot(), await world.tape()
            await world.until_version(6)
            kept += await world.tape()
            world.store.restart(saved)
            await world.finish(*learners)
            commits.extend(r for r in dict.fromkeys(kept) if isinstance(r, Committed))
        else:
            await world.finish(*learners)
        tape = [record for record in await world.tape() if isinstance(record, Committed)]
        commits.extend(record for record in tape if record not in commits)

    run_virtual(main())
    return commits


def check(folder: Path, commits: list[Committed]) -> Replayed:
    return replay.replay(folder, commits, lambda merges: None)


def told(outcome: Replayed) -> list[str]:
    return [str(difference) for difference in outcome.differences]


QUICK = list(zip(cycle(get_args(MergeName)), get_args(Codec), cycle((0.9, 0.0)), strict=False))
"""Every value of each once, at least."""
ALL = product(get_args(MergeName), get_args(Codec), (0.0, 0.9))


@pytest.mark.parametrize(("merge", "codec", "momentum"), slow_beyond(len(QUICK), dict.fromkeys([*QUICK, *ALL])))
def test_a_recorded_run_is_replayed_bit_for_bit(tmp_path, merge: str, codec: str, momentum: float) -> None:
    """Every merge rule, codec and outer optimizer."""
    commits = record_run(tmp_path, merge=merge, codec=codec, outer_momentum=momentum)
    outcome = check(tmp_path, commits)
    assert told(outcome) == []
    assert outcome.merges == outcome.repeated == sum(bool(c.contributions) for c in commits) >= 10
    assert max(len(c.contributions) for c in commits) == 2
    assert outcome.fragments == 2
    assert outcome.unused == 0
    assert outcome.largest < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "int4", "outer_momentum": 0.9},
        {"codec": "bf16", "global_codec": "bf16", "outer_momentum": 0.9, "rewind": True},
        {"codec": "int8", "outer_lr": 0.4, "weights": "equal"},
    ],
)
def test_a_run_with_an_average_only_fragment_is_replayed_bit_for_bit(tmp_path, changes: dict[str, Any]) -> None:
    """In any codec of the others, with and without momentum, and after a bus that went back."""
    commits = record_run(tmp_path, averaged=True, **changes)
    outcome = check(tmp_path, commits)
    assert told(outcome) == []
    assert outcome.repeated == outcome.merges >= 10
    assert {c.fragment for c in commits if len(c.contributions) == 2} == {0, 1}


@pytest.fixture(scope="module")
def orthogonal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Committed]]:
    folder = tmp_path_factory.mktemp("orthogonal")
    return folder, record_run(folder, outer="halley", outer_momentum=0.7, outer_warmup=2, codec="int4")


def test_a_run_with_an_orthogonalised_step_is_replayed_bit_for_bit(orthogonal) -> None:
    """Each fragment has a matrix; a merge after the warm-up has its orthogonalised step, and one before it has none."""
    folder, commits = orthogonal
    outcome = check(folder, commits)
    assert told(outcome) == []
    assert outcome.merges == outcome.repeated >= 10
    spec = recording.read_spec(folder)
    layouts = layout_of(spec.tensors).fragments
    for commit in (c for c in commits if c.contributions and c.version <= 4):
        steps = read_merge(file_of(folder, commit), layouts[commit.fragment], spec).orthogonal
        assert (commit.version > 2) == (steps is not None)
        assert steps is None or len(steps) == 6


@pytest.mark.parametrize("off", [1e-5, 0.01])
def test_a_step_orthogonalised_by_another_machine_is_taken_within_the_tolerance(
    orthogonal, monkeypatch, off: float
) -> None:
    """Products of matrices summed in another order: the values are made from the recorded step, whatever it is."""
    folder, commits = orthogonal
    production = outer.with_norm_of
    monkeypatch.setattr(outer, "with_norm_of", lambda *given: production(*given) * np.float32(1 + off))
    lines = told(check(folder, commits))
    assert all("orthogonalised step of t" in line and "from the recorded one by 0.0099 of" in line for line in lines)
    assert bool(lines) is (off > 1e-3)


def test_a_damaged_or_missing_orthogonalised_step_is_found(orthogonal, tmp_path) -> None:
    """Even in a bit that no value shows; and a recording that leaves it out, or has one where the run averaged."""
    folder, commits = orthogonal
    shutil.copytree(folder, tmp_path / "copy")
    bad = victim(commits)
    path = file_of(tmp_path / "copy", bad)
    whole = path.read_bytes()

    at = 8 * 2 * (1 + len(bad.contributions))
    step = slice(at, at + 24)

    def flip(header: MergeHeader, body: np.ndarray) -> MergeHeader:
        body[at] ^= 1
        return header

    def wrong(header: MergeHeader, body: np.ndarray) -> MergeHeader:
        body[step].view(np.float32)[:] *= -1
        return header.model_copy(update={"orthogonal": payload_digest(as_bytes(body[step].copy()), 1024)})

    for change, said in (
        (flip, "the orthogonalised step is damaged"),
        (wrong, "orthogonalised step of t0: recomputed, it differs"),
        (wrong, "values: the tape has digest"),
    ):
        rewrite(path, change)
        lines = told(check(tmp_path / "copy", commits))
        assert any(
            f"version {bad.version}: " in line and said.replace("t0", f"t{bad.fragment}") in line for line in lines
        )
        path.write_bytes(whole)
    rewrite(path, lambda header, _: header.model_copy(update={"orthogonal": None}), without=step)
    lines = told(check(tmp_path / "copy", commits))
    assert lines == [
        f"fragment {bad.fragment} version {bad.version}: the recording has no orthogonalised step, unlike the run"
    ]


@pytest.mark.parametrize("merge", slow_beyond(1, ["rda", "rda-row", "mean"]))
@pytest.mark.parametrize("changes", [{}, {"outer": "halley", "outer_warmup": 2, "codec": "int8"}], ids=str)
def test_a_run_that_clips_long_deltas_is_replayed_bit_for_bit(tmp_path, merge: str, changes: dict[str, Any]) -> None:
    """By the factors on its tape, which are computed again; one that is another is found."""
    told_of = {"quorum": 4, "tokens": 4000, "delta_clip": 1.0, "outer_momentum": 0.5, "learners_": 4}
    commits = record_run(tmp_path, merge=merge, **told_of, **changes)
    assert sum(part.factor < 1 for c in commits for part in c.contributions) >= 10
    outcome = check(tmp_path, commits)
    assert told(outcome) == []
    assert outcome.repeated == outcome.merges >= 10
    at = next(n for n, c in enumerate(commits) if any(part.factor < 1 for part in c.contributions))
    parts = tuple(part.model_copy(update={"factor": 1.0}) for part in commits[at].contributions)
    changed = [*commits[:at], commits[at].model_copy(update={"contributions": parts}), *commits[at + 1 :]]
    assert any("factor of" in line for line in told(check(tmp_path, changed)))


def test_both_histories_of_a_rewound_run_are_replayed(tmp_path) -> None:
    """What was merged after the snapshot and what took its place, each from its own base, momentum included."""
    commits = record_run(tmp_path, rewind=True, quorum=1, tokens=12_000, outer_momentum=0.9)
    versions = [(c.fragment, c.version) for c in commits]
    twice = {v for v in versions if versions.count(v) > 1}
    assert twice, "the rewind replaced nothing"
    outcome = check(tmp_path, commits)
    assert told(outcome) == []
    assert outcome.repeated == outcome.merges == sum(bool(c.contributions) for c in commits)


@pytest.mark.parametrize("global_codec", ["fp32", "bf16"])
def test_a_take_over_records_values_that_must_be_met(tmp_path, global_codec: str) -> None:
    """A second syncer begins from the bus; its recorded momentum is compared with the one replayed."""
    commits: list[Committed] = []

    async def main() -> None:
        sync = sync_spec(tokens=4000, outer_momentum=0.5, global_codec=global_codec)
        world = VirtualRun(sync, record_deltas=tmp_path)
        world.start_syncer()
        learner = VirtualLearner("l", world).start()
        await world.until_version(3)
        await world.stop_syncer()
        world.start_syncer()
        await world.finish(learner)
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))

    run_virtual(main())
    assert told(check(tmp_path, commits)) == []
    (path, name), *_ = [(p, n) for p, n in list_files(tmp_path, 0).items() if n.kind == ".global" and n.version]
    spec = recording.read_spec(tmp_path)
    layout = layout_of(spec.tensors).fragments[0]
    found = recording.read_global(path, layout, spec)
    state = replay_state(spec, found)
    state.momentum = found.momentum + np.float32(1e-3)
    writer = name_writer(path)
    record_values(tmp_path, spec, writer, state)
    (line,) = told(check(tmp_path, commits))
    assert line.startswith(f"fragment 0 version {name.version}: momentum: recomputed, it differs")


def record_values(folder: Path, spec: Spec, writer: str, state: FragmentState) -> None:
    """As an owner that has read them from the bus."""
    run_virtual(Recorder(folder, spec, writer, inline).loaded(state))


# --- stale deltas ----------------------------------------------------------------------------------------


def record_stragglers(folder: Path, **changes: Any) -> list[Committed]:
    """Three learners, of whom one's headers come after the others' merge; a second syncer takes over."""
    commits: list[Committed] = []
    given = {"quorum": 2, "tokens": 5000, "grace_gamma": 0.0, "outer_momentum": 0.5} | changes

    async def main() -> None:
        world = VirtualRun(sync_spec(**given), record_deltas=folder)
        world.start_syncer()
        learners = [VirtualLearner(f"l{i}", world, incarnation=f"{i:016x}").start() for i in range(3)]
        await world.until_version(2)
        offer = learners[2].bus.offer

        async def slowly(*args: Any) -> str:
            await asyncio.sleep(0.45)
            answer: str = await offer(*args)
            return answer

        learners[2].bus.offer = slowly
        await world.until_version(8)
        await world.stop_syncer()
        world.start_syncer()
        await world.finish(*learners)
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))

    run_virtual(main())
    return commits


def stale_parts(commits: list[Committed]) -> list[tuple[Committed, Contribution]]:
    return [(c, part) for c in commits for part in c.contributions if part.base_version < c.version - 1]


@pytest.mark.parametrize(
    ("merge", "codec", "global_codec"), [("mean", "bf16", "fp32"), ("rda", "int4", "bf16"), ("rda-row", "fp32", "bf16")]
)
def test_rebased_deltas_are_replayed_bit_for_bit(tmp_path, merge: str, codec: str, global_codec: str) -> None:
    """The tape says which; the recording has them as they were sent."""
    commits = record_stragglers(tmp_path, merge=merge, codec=codec, global_codec=global_codec)
    assert sum(part.rebased for _, part in stale_parts(commits)) >= 3
    fresh = {part.rebased for c in commits for part in c.contributions if part.base_version == c.version - 1}
    assert fresh == {False}
    outcome = check(tmp_path, commits)
    assert told(outcome) == []
    assert outcome.merges == outcome.repeated


@pytest.fixture(scope="module")
def stragglers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Committed]]:
    folder = tmp_path_factory.mktemp("stragglers")
    return folder, record_stragglers(folder)


def test_a_new_owner_merges_a_stale_delta_as_it_is_and_says_so(stragglers) -> None:
    """It has not the version before the one with which it took over; of all others stale deltas are rebased."""
    folder, commits = stragglers
    began = {name[:2] for p in (0, 1) for path, name in list_files(folder, p).items() if name.kind == ".global"}
    kept = {(c.fragment, c.version - 1) for c, part in stale_parts(commits) if not part.rebased}
    rebased = {(c.fragment, c.version - 1) for c, part in stale_parts(commits) if part.rebased}
    assert kept, "no delta was stale after the take-over"
    assert kept <= began
    assert not rebased & began


def test_a_tape_that_says_otherwise_of_a_stale_delta_is_found(stragglers, tmp_path) -> None:
    """Named in the merge, whose values do not come out either if the recording says so too."""
    folder, commits = stragglers
    shutil.copytree(folder, tmp_path / "copy")
    bad = next(c for c, part in stale_parts(commits) if part.rebased)
    at = next(i for i, part in enumerate(bad.contributions) if part.rebased)
    parts = [part.model_copy(update={"rebased": part.rebased and i != at}) for i, part in enumerate(bad.contributions)]
    changed = bad.model_copy(update={"contributions": tuple(parts)})
    other = [changed if c is bad else c for c in commits]
    (line,) = told(check(tmp_path / "copy", other))
    where = f"fragment {bad.fragment} version {bad.version}: "
    assert line == f"{where}rebased of {parts[at].learner}: the tape has False, but the recording has True"
    rewrite(file_of(tmp_path / "copy", bad), lambda h, b: h.model_copy(update={"contributions": tuple(parts)}))
    lines = told(check(tmp_path / "copy", other))
    assert any(f"{where}norm of t" in line for line in lines)
    assert any(f"{where}values: the tape has digest" in line for line in lines)


def test_a_rebased_delta_whose_base_was_not_replayed_is_told(stragglers, tmp_path) -> None:
    """As if the values of its version had been read from the bus: those before them are in no file."""
    folder, commits = stragglers
    spec = recording.read_spec(folder)
    bad = next(c for c, part in stale_parts(commits) if part.rebased)
    layout = layout_of(spec.tensors).fragments[bad.fragment]
    recorded = read_merge(file_of(folder, bad), layout, spec)
    theta = np.ones(layout.elements, np.float32)
    made = replay.repeat(layout, spec.sync, replay.Values(theta, None), recorded, bad)
    assert made.values is None
    assert any(
        problem.endswith("was rebased, but the values of its own base are not known") for problem in made.problems
    )


# --- other lives ------------------------------------------------------------------------------------------


def replay_state(spec: Spec, found: recording.RecordedGlobal) -> FragmentState:
    layout = layout_of(spec.tensors).fragments[found.header.fragment]
    header = found.header
    return FragmentState(layout, spec.sync, header.version, header.digest, found.theta, found.momentum)


def name_writer(path: Path) -> str:
    return path.stem.split("-")[2]


def test_a_resumed_run_is_replayed_from_its_checkpoint(tmp_path) -> None:
    """The restored values and momentum are recorded, so the recording is complete in itself."""
    commits: list[Committed] = []
    sync = sync_spec(tokens=6000, outer_momentum=0.5)

    async def first() -> None:
        world = VirtualRun(sync, checkpoint_dir=tmp_path / "saved")
        world.start_syncer()
        learner = VirtualLearner("l", world).start()
        await world.until_version(4)
        await world.stop_syncer()
        await learner.kill()

    async def second() -> None:
        world = VirtualRun(sync, resume=tmp_path / "saved", record_deltas=tmp_path / "kept")
        world.start_syncer()
        await world.finish(VirtualLearner("l", world, incarnation="f" * 16).start())
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))

    run_virtual(first())
    run_virtual(second())
    assert min(c.version for c in commits) >= 4
    outcome = check(tmp_path / "kept", commits)
    assert told(outcome) == []
    assert outcome.repeated == outcome.merges >= 4
    (path, _), *_ = list_files(tmp_path / "kept", 0).items()
    spec = recording.read_spec(tmp_path / "kept")
    assert recording.read_global(path, layout_of(spec.tensors).fragments[0], spec).momentum is not None


def test_a_recording_of_another_wire_format_says_which_build_replays_it(tmp_path: Path) -> None:
    theirs = {**samples.spec().model_dump(), "format": FORMAT + 1}
    (tmp_path / recording.SPEC_FILE).write_bytes(msgpack.packb(theirs))
    with pytest.raises(BadMessage, match=f"wire format {FORMAT + 1}, but this build speaks {FORMAT} ") as refused:
        recording.read_spec(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}: ")
    assert refused.value.remedy == "replay it with the build that recorded it"


# --- tampering -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def true(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Committed]]:
    folder = tmp_path_factory.mktemp("true")
    return folder, record_run(folder, outer_momentum=0.9)


@pytest.fixture
def copy(true: tuple[Path, list[Committed]], tmp_path: Path) -> tuple[Path, list[Committed]]:
    """A copy of a true recording, and its tape."""
    folder, commits = true
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy", list(commits)


def victim(commits: list[Committed]) -> Committed:
    """A merge of two in the middle of fragment 1, with later ones after it."""
    return next(c for c in commits if c.fragment == 1 and c.version >= 3 and len(c.contributions) == 2)


def file_of(folder: Path, commit: Committed) -> Path:
    return next(
        path
        for path, name in list_files(folder, commit.fragment).items()
        if (name.version, name.digest, name.kind) == (commit.version, commit.digest.hex(), ".merge")
    )


def rewrite(path: Path, change: Change, without: slice = slice(0)) -> None:
    """Change header or body (uint8 view) of a recorded merge, and leave some of the body out."""
    data = path.read_bytes()
    _, length = _PREFIX.unpack(data[: _PREFIX.size])
    header = decode(MergeHeader, data[_PREFIX.size : _PREFIX.size + length])
    body = np.frombuffer(data[_PREFIX.size + length :], np.uint8).copy()
    packed = encode(change(header, body))
    path.write_bytes(_PREFIX.pack(b"DLRC", len(packed)) + packed + np.delete(body, without).tobytes())


def part(header: MergeHeader, **changes: Any) -> MergeHeader:
    """The header with a changed first contribution."""
    first, *rest = header.contributions
    return header.model_copy(update={"contributions": (first.model_copy(update=changes), *rest)})


def flip_a_bit(header: MergeHeader, body: np.ndarray) -> MergeHeader:
    body[-1] ^= 0x10
    return header


def swap_order(header: MergeHeader, body: np.ndarray) -> MergeHeader:
    return header.model_copy(update={"contributions": header.contributions[::-1]})


def swap_deltas(header: MergeHeader, body: np.ndarray) -> MergeHeader:
    half = len(deltas_of(header, body)) // 2
    deltas = deltas_of(header, body)
    deltas[:] = np.concatenate([deltas[half:], deltas[:half]])
    return header


def deltas_of(header: MergeHeader, body: np.ndarray) -> np.ndarray:
    tensors = 2
    return body[8 * tensors * (1 + len(header.contributions)) :]


def scale_norm(factor: float) -> Change:
    def change(header: MergeHeader, body: np.ndarray) -> MergeHeader:
        body[16:32].view(np.float64)[0] *= factor
        return header

    return change


def scale_direction(header: MergeHeader, body: np.ndarray) -> MergeHeader:
    body[:16].view(np.float64)[0] *= 1.001
    return header


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip_a_bit, "the delta of l1 is damaged"),
        (swap_order, "order of contributions: the tape has l0/"),
        (swap_deltas, "the delta of l0 is damaged"),
        (lambda h, b: part(h, weight=0.25), "weight of l0: the tape has"),
        (lambda h, b: part(h, weight=0.25), "merge weights: recomputed"),
        (lambda h, b: part(h, tokens=7), "tokens of l0: the tape has"),
        (lambda h, b: part(h, steps=7), "steps of l0: the tape has"),
        (lambda h, b: part(h, steps=0), "a contribution's steps or tokens are not positive"),
        (lambda h, b: part(h, learner="l9"), "contributions: the tape has l0/"),
        (lambda h, b: part(h, norm=h.contributions[0].norm * 2), "norm of the delta of l0: recomputed"),
        (lambda h, b: h.model_copy(update={"format": 2}), "format 2 cannot be read by this build, which reads 1"),
        (scale_norm(1.001), "norm of t1 in the delta of l0: recomputed, it differs from the recorded value by 0.001"),
        (scale_direction, "length of the mean direction of t1: recomputed"),
        (lambda h, b: h.model_copy(update={"norm": h.norm * 1.001}), "norm of the pseudogradient: recomputed"),
        (lambda h, b: h.model_copy(update={"version": h.version + 1}), "version: the tape has"),
        (lambda h, b: h.model_copy(update={"fragment": 0}), "fragment: the tape has 1, but the recording has 0"),
        (lambda h, b: h.model_copy(update={"base_digest": bytes(16)}), "base_digest: the tape has"),
        (lambda h, b: h.model_copy(update={"deltas": h.deltas[:1]}), "2 contributions but 1 deltas"),
    ],
)
def test_a_changed_recording_is_found_and_named(copy, change: Change, said: str) -> None:
    """With its fragment and version; nothing is said of the merges before it."""
    folder, commits = copy
    bad = victim(commits)
    rewrite(file_of(folder, bad), change)
    outcome = check(folder, commits)
    lines = told(outcome)
    assert any(line.startswith(f"fragment 1 version {bad.version}: ") and said in line for line in lines), lines
    assert {d[:2] for d in outcome.differences} <= {(1, bad.version), (1, bad.version + 1)}


def test_after_a_merge_with_another_result_the_rest_is_a_gap_told_once(copy) -> None:
    """A damaged delta: its version is named, and one line says how many cannot be known for it."""
    folder, commits = copy
    bad = victim(commits)
    rewrite(file_of(folder, bad), flip_a_bit)
    outcome = check(folder, commits)
    later = [c for c in commits if c.fragment == 1 and c.version > bad.version]
    assert f"values: the tape has digest {bad.digest.hex()}" in "".join(told(outcome))
    assert told(outcome)[-1] == (
        f"fragment 1 version {bad.version + 1}: not recomputed, nor are the {len(later) - 1} merges after it: "
        f"the values of version {bad.version}, which it was computed from, are not known"
    )
    assert outcome.repeated == outcome.merges - len(later)


def test_a_flipped_bit_is_found_by_the_values_even_if_its_digest_is_forged(copy) -> None:
    """The tape has the last word, not the recording's own digests."""
    folder, commits = copy
    bad, spec = victim(commits), recording.read_spec(folder)

    def change(header: MergeHeader, body: np.ndarray) -> MergeHeader:
        body[-1] ^= 0x10
        half = len(deltas_of(header, body)) // 2
        forged = payload_digest(as_bytes(deltas_of(header, body)[half:].copy()), spec.sync.chunk_bytes)
        return header.model_copy(update={"deltas": (header.deltas[0], forged)})

    rewrite(file_of(folder, bad), change)
    lines = told(check(folder, commits))
    assert any(f"version {bad.version}: values: " in line for line in lines)
    assert not any("damaged" in line for line in lines)


@pytest.mark.parametrize(
    ("keep", "said"), [(-1, "truncated"), (6, "does not begin"), (40, "in its header"), (0, "begin")]
)
def test_a_file_cut_short_is_named(copy, keep: int, said: str) -> None:
    """As a power cut leaves it."""
    folder, commits = copy
    bad = victim(commits)
    path = file_of(folder, bad)
    path.write_bytes(path.read_bytes()[:keep])
    first = check(folder, commits).differences[0]
    assert (first.fragment, first.version) == (1, bad.version)
    assert said in first.what


def test_a_header_of_any_length_is_refused_before_it_is_read(copy) -> None:
    folder, commits = copy
    path = file_of(folder, victim(commits))
    path.write_bytes(_PREFIX.pack(b"DLRC", 2**32 - 1))
    assert "does not begin" in check(folder, commits).differences[0].what


def test_a_missing_recording_is_a_gap(copy) -> None:
    folder, commits = copy
    bad = victim(commits)
    file_of(folder, bad).unlink()
    first, second = check(folder, commits).differences
    assert first[:2] == (1, bad.version)
    assert "no recording of the merge" in first.what
    assert second[:2] == (1, bad.version + 1)
    assert "not recomputed" in second.what


def record_taken_over(folder: Path, commits: list[Committed], commit: Committed) -> None:
    """As an owner that began with what a merge of fragment 1 had made."""
    made: list[Any] = []
    make = replay._FragmentReplay._make

    def noted(self: Any, record: Committed, base: Any) -> Any:
        values = make(self, record, base)
        made.extend([values] * (record == commit))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay._FragmentReplay, "_make", noted)
        check(folder, commits)
    spec = recording.read_spec(folder)
    layout = layout_of(spec.tensors).fragments[1]
    state = FragmentState(layout, spec.sync, commit.version, commit.digest, made[0].theta, made[0].momentum)
    record_values(folder, spec, "ab" * 8, state)


def test_the_replay_goes_on_from_the_next_recorded_values(copy) -> None:
    """A gap ends where a syncer read the values from the bus."""
    folder, commits = copy
    bad = victim(commits)
    record_taken_over(folder, commits, bad)
    file_of(folder, bad).unlink()
    outcome = check(folder, commits)
    assert [d[:2] for d in outcome.differences] == [(1, bad.version)]
    assert outcome.repeated == outcome.merges - 1


def test_missing_initial_values_are_named(copy) -> None:
    folder, commits = copy
    for path, name in list_files(folder, 0).items():
        if name.kind == ".global":
            path.unlink()
    first, second = check(folder, commits).differences
    assert str(first).startswith("fragment 0 version 0: no values were recorded (initial parameters of")
    assert str(second).startswith("fragment 0 version 1: not recomputed, nor are the ")


def test_a_damaged_global_is_named(copy) -> None:
    folder, commits = copy
    path = next(path for path, name in list_files(folder, 0).items() if name.kind == ".global")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "is damaged" in check(folder, commits).differences[0].what


@pytest.mark.parametrize("writer", ["0" * 16, "f" * 16])
def test_of_several_recordings_of_the_same_values_each_is_looked_at(copy, writer: str) -> None:
    """Whichever comes first: a damaged copy does not hide a sound one, nor a sound one another momentum."""
    folder, commits = copy
    true_copy = next(path for path, name in list_files(folder, 0).items() if name.kind == ".global")
    other = true_copy.with_name(true_copy.name.replace(name_writer(true_copy), writer))
    other.write_bytes(true_copy.read_bytes()[:-1])
    outcome = check(folder, commits)
    assert [d[:2] for d in outcome.differences] == [(0, 0)]
    assert "truncated" in outcome.differences[0].what
    assert outcome.repeated == outcome.merges
    other.unlink()
    spec = recording.read_spec(folder)
    state = replay_state(spec, recording.read_global(true_copy, layout_of(spec.tensors).fragments[0], spec))
    state.momentum = np.full_like(state.theta, 1e-3)
    record_values(folder, spec, writer, state)
    lines = told(check(folder, commits))
    assert "fragment 0 version 0: momentum: two recordings of it differ" in lines


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": 123.0}, "norm: the tape has 123.0"),
        ({"step_norm": 123.0}, "norm of the outer step: recomputed, it differs"),
        ({"digest": bytes(16)}, "no recording of the merge to digest 0000"),
        ({"base_digest": bytes(16)}, "not recomputed"),
        ({"contributions": "weight"}, "weight of l0: the tape has 0.125"),
        ({"contributions": "tokens"}, "tokens of l0: the tape has 1"),
        ({"contributions": "fewer"}, "contributions: the tape has l1/"),
    ],
)
def test_an_altered_tape_is_found(copy, change: dict[str, Any], said: str) -> None:
    """The recording is true, the tape is not."""
    folder, commits = copy
    bad = victim(commits)
    first, *rest = bad.contributions
    parts = {
        "weight": (first.model_copy(update={"weight": 0.125}), *rest),
        "tokens": (first.model_copy(update={"tokens": 1}), *rest),
        "fewer": tuple(rest),
    }
    if "contributions" in change:
        change = {"contributions": parts[change["contributions"]]}
    commits[commits.index(bad)] = bad.model_copy(update=change)
    lines = told(check(folder, commits))
    assert any(line.startswith(f"fragment 1 version {bad.version}: ") and said in line for line in lines), lines


# --- a tape that is not whole ------------------------------------------------------------------------------


def test_a_fragment_that_is_not_on_the_tape_is_named(true) -> None:
    """As when the file of one group was lost."""
    folder, commits = true
    outcome = check(folder, [c for c in commits if c.fragment == 0])
    assert told(outcome) == [
        "fragment 1 version 0: the tape has no record of this fragment: check that none of its files is missing"
    ]


def test_merges_of_a_run_that_goes_on_while_its_tape_is_read_are_no_lost_ones(true) -> None:
    """They were recorded after the tape's end; what was recorded before the tape was read must be on it."""
    folder, commits = true
    whole = [c for c in commits if c.fragment == 1]
    tape = [c for c in commits if c.fragment == 0 or c.version <= whole[-6].version]
    assert told(check(folder, tape))

    def recorded_before(version: int) -> set[Path]:
        return {path for path in list_recording(folder) if int(path.name.split("-")[0]) <= version}

    assert not told(replay.replay(folder, tape, lambda _: None, before=recorded_before(whole[-6].version)))
    late = replay.replay(folder, tape, lambda _: None, before=recorded_before(whole[-4].version))
    assert "it lacks the 1 merges up to" in told(late)[0]


def test_the_command_looks_at_the_recording_before_it_reads_the_tape(copy, monkeypatch, capsys) -> None:
    """A live run records more while the tape is read, and that is no difference."""
    folder, commits = copy
    last = [c for c in commits if c.fragment == 1][-6].version
    later = [path for path, name in list_files(folder, 1).items() if name.version > last]
    held = {path: path.read_bytes() for path in later}
    for path in later:
        path.unlink()

    def tape(*_: Any) -> list[Committed]:
        for path, data in held.items():
            path.write_bytes(data)
        return [c for c in commits if c.fragment == 0 or c.version <= last]

    monkeypatch.setattr(command, "_tape", tape)
    assert command.check_replay(BusSettings(), folder, None, json_object=False) == 0
    assert "all equal" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [2, 5])
def test_a_tape_that_ends_early_is_found_by_the_recorded_merges_after_it(true, lost: int) -> None:
    """All but the last of them have successors, so they were no refused ones."""
    folder, commits = true
    whole = [c for c in commits if c.fragment == 1]
    last, end = whole[-lost - 1].version, whole[-1].version
    outcome = check(folder, [c for c in commits if c.fragment == 0 or c.version <= last])
    assert told(outcome) == [
        f"fragment 1 version {last + 1}: the tape ends before it: it lacks the {lost - 1} merges up to version "
        f"{end - 1}, which were recorded and from which other merges were computed"
    ]


def test_a_tape_and_a_recording_that_both_end_early_are_found_by_the_checkpoint(copy) -> None:
    """A full disk ends both at once."""
    folder, commits = copy
    end = [c for c in commits if c.fragment == 1][-1]
    file_of(folder, end).unlink()
    saved = [(c.fragment, c.version, c.digest) for c in commits if c.contributions]
    commits.remove(end)
    assert told(check(folder, commits)) == []
    assert told(replay.replay(folder, commits, lambda merges: None, saved)) == [
        f"fragment 1 version {end.version}: the checkpoint has it, with digest {end.digest.hex()}, but the tape does "
        "not, so the tape is incomplete"
    ]


def test_merges_missing_before_values_that_an_owner_read_are_found(copy) -> None:
    """The replay can go on from those values, which must not hide the gap."""
    folder, commits = copy
    bad = victim(commits)
    record_taken_over(folder, commits, bad)
    assert told(check(folder, commits)) == []
    commits.remove(bad)
    assert told(check(folder, commits)) == [
        f"fragment 1 version {bad.version}: the tape lacks it, but has a merge that was computed from it"
    ]


# --- reductions of another machine -------------------------------------------------------------------------


@pytest.mark.parametrize(("off", "equal"), [(1e-7, True), (1e-4, False)])
def test_reductions_may_differ_a_little_and_the_elementwise_work_takes_the_recorded_ones(
    true, monkeypatch, off: float, equal: bool
) -> None:
    """A machine that sums in another order: lengths differ in their last digits, the values in no bit."""
    folder, commits = true
    production = replay.delta_norms
    monkeypatch.setattr(replay, "delta_norms", lambda layout, delta: production(layout, delta) * (1 + off))
    outcome = check(folder, commits)
    assert outcome.largest == pytest.approx(off, rel=0.01)
    assert outcome.repeated == outcome.merges
    assert (told(outcome) == []) is equal
    assert not any("values:" in line for line in told(outcome)), "the values were made from other norms"


def test_relative_differences() -> None:
    assert relative(0.0, 0.0) == 0
    assert relative([1.0, 2.0], [1.0, 2.002]) == pytest.approx(0.001, rel=0.01)
    assert relative(np.nan, 1.0) == np.inf
    assert relative(np.inf, 1.0) == np.inf


# --- recording -----------------------------------------------------------------------------------------------


def test_recordings_of_commits_that_never_were_do_no_harm(copy) -> None:
    """Another syncer made the same merge in another order, and its commit was refused."""
    folder, commits = copy
    path = file_of(folder, victim(commits))
    orphan = path.with_name(path.name.replace(name_writer(path), "0" * 16))
    shutil.copy(path, orphan)
    rewrite(orphan, swap_order)
    assert told(check(folder, commits)) == []
    lost = path.with_name("999-" + "ab" * 16 + "-00.merge")
    shutil.copy(path, lost)
    outcome = check(folder, commits)
    assert told(outcome) == []
    assert outcome.unused == 1


def test_nothing_half_written_stays(tmp_path) -> None:
    spec = spec_of(sync_spec())
    with pytest.raises(TypeError):
        recording._write(tmp_path / "x.merge", [b"abc", object()], "00")  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []
    Recorder(tmp_path, spec, "00")
    assert [path.name for path in tmp_path.iterdir()] == ["spec.msgpack"]


def test_a_folder_of_another_run_is_refused(tmp_path) -> None:
    """Its own may be gone on with."""
    Recorder(tmp_path, spec_of(sync_spec()), "00")
    Recorder(tmp_path, spec_of(sync_spec()), "01")
    with pytest.raises(UsageError, match="another run"):
        Recorder(tmp_path, spec_of(sync_spec(tokens=9999)), "00")
    with pytest.raises(UsageError, match="cannot write"):
        Recorder(tmp_path / "spec.msgpack" / "x", spec_of(sync_spec()), "00")


def test_what_is_no_recording_is_said(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no spec\.msgpack"):
        check(tmp_path, [])
    (tmp_path / "spec.msgpack").write_bytes(b"nonsense")
    with pytest.raises(BadMessage):
        check(tmp_path, [])


def test_a_merge_can_be_read_back_as_it_was_written(true) -> None:
    """Arrays in their types; norms to the last bit."""
    folder, commits = true
    spec = recording.read_spec(folder)
    commit = victim(commits)
    found = read_merge(file_of(folder, commit), layout_of(spec.tensors).fragments[1], spec)
    assert found.header.contributions == commit.contributions
    assert [d.dtype.name for d in found.deltas] == ["bfloat16", "bfloat16"]
    for norms, contribution in zip(found.norms, commit.contributions, strict=True):
        assert float(np.linalg.norm(norms)) == contribution.norm
