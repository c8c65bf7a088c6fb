"""`diloco watch --to`: a run's curves in the local files of TensorBoard, Weights & Biases, trackio and MLflow."""

import asyncio
import importlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from diloco.cli import main
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.pipeline.messages.run import Evaluation, LearnerReport, Phase
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view.loss_curves import loss_curves
from diloco.pipeline.view.page.collector import RunReader
from diloco.pipeline.view.page.model import Poll
from diloco.tracking.curves import Point
from diloco.tracking.follow import Notes, Writer, follow
from diloco.tracking.trackers import TRACKERS, Tracker, Wandb
from diloco_studies.virtual.memory import MemoryBus
from tests import HANGING_S, samples
from tests.parties import environment, wait_for
from tests.syncer.test_run_metrics import poll

QUICK = """
import sys, diloco.tracking.follow
diloco.tracking.follow.EVERY_S = 0.3
for lacking in sys.argv.pop(1).split(","):
    sys.modules[lacking] = None
from diloco.cli import main
sys.argv[0] = "diloco"
sys.exit(main())
"""


class Kept:
    """Keeps points."""

    stored = True

    def __init__(self, *_: object) -> None:
        self.points: list[Point] = []

    def put(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        pass

    def of(self, tag: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in self.points if one.tag == tag]


@contextmanager
def writer(folder: Path, kept: Tracker, run: str = "r") -> Iterator[Writer]:
    """One life of a watcher."""
    with closing(Notes(folder, run, "kept")) as notes:
        yield Writer(notes, kept)


def evaluation(tokens: int, loss: float, unix_s: float = 1000.0, final: bool = False) -> Evaluation:
    return samples.evaluation(loss=loss, tokens=tokens, versions=(0, 0), unix_s=unix_s, final=final)


def merge(fragment: int, version: int, unix_s: float, base: int | None = None, **given: Any) -> Committed:
    """Of two learners with 100 and 300 tokens; `base`: of the second, where it is stale."""
    bases = {"l0": (version - 1, 100), "l1": (version - 1 if base is None else base, 300)}
    parts = tuple(samples.contribution(name, base_version=at, tokens=n, weight=0.5) for name, (at, n) in bases.items())
    return samples.committed(
        fragment=fragment, version=version, contributions=parts, unix_s=unix_s, base_digest=bytes(16), norm=3.0, **given
    )


def test_what_is_so_now_is_written_once_there_are_more_tokens(tmp_path: Path) -> None:
    """Of looks at the same tokens the last one counts, that of the end too; the next watcher adds no point."""
    kept = Kept()
    with writer(tmp_path, kept) as first:
        for loss, tokens in ((3.6, 500), (3.5, 500), (3.0, 900), (2.9, 900)):
            first.see(poll([samples.seen("l0", tokens=tokens, loss=loss, versions=(3, 2), step_s=0.25)]))
        assert kept.of("steps_per_s/l0") == [(500, 4.0)]
        first.end()
    with writer(tmp_path, kept) as second:
        second.see(poll([samples.seen("l0", tokens=900, loss=2.0)]))
        second.end()
    assert kept.of("steps_per_s/l0") == [(500, 4.0), (900, 4.0)]
    assert kept.of("staleness/l0") == [(500, 3.0), (900, 3.0)]
    assert kept.of("redis/sent_bytes") == [(500, 900.0), (900, 900.0)]
    fates = [f"tokens/{fate}" for fate in ("merged", "overwritten", "rejected", "died", "pending")]
    assert sum(kept.of(fate)[1][1] for fate in fates) == 900


def test_a_learners_losses_are_written_from_its_first_step_whoever_comes(tmp_path: Path) -> None:
    """Each bucket once it is full, at the tokens of its time; the last one when the run is over.

    The first poll of a run that has resumed another knows the tokens with which it began.
    """
    kept, began_tokens = Kept(), 0

    def look(now_s: float, tokens: int, *losses: float, phase: Phase = Phase.RUNNING, late_s: float = 0.0) -> Poll:
        curve = b64encode(np.array(losses, "<f4").tobytes()).decode()
        wall_s = now_s - 1000.0
        seen = samples.seen("l0", age_s=late_s, tokens=tokens, wall_s=wall_s - late_s, curve_s=10.0, curve=curve)
        found = poll([seen])
        status = found.status | {"phase": phase.value}
        curves = loss_curves([seen], now_s + 0.004, 1000.0)
        return replace(found, now_s=now_s, status=status, began_s=1000.0, began_tokens=began_tokens, curves=curves)

    with writer(tmp_path, kept) as first:
        first.see(look(1025.0, 500, 5.0, 4.0, 3.9))
        assert kept.of("loss/l0") == [(200, 5.0), (400, 4.0)]
        first.see(look(1035.0, 600, 5.0, 4.0, 3.5, 3.4, late_s=0.3))
    with writer(tmp_path, kept) as second:
        second.see(look(1045.0, 700, 5.0, 4.0, 3.5, 3.0, 2.9, phase=Phase.FINISHED))
        second.end()
    assert kept.of("loss/l0") == [(200, 5.0), (400, 4.0), (550, 3.5), (622, 3.0), (700, 2.9000)]
    kept, began_tokens = Kept(), 400
    with writer(tmp_path / "resumed", kept) as third:
        third.see(look(1025.0, 500, 5.0, 4.0, 3.9))
    assert kept.of("loss/l0") == [(440, 5.0), (480, 4.0)]


def test_a_round_is_told_once_each_fragment_has_its_merge_by_whoever_comes(tmp_path: Path) -> None:
    """From the tape, so also of the time when nobody watched; a round that is not whole waits, none comes twice."""
    kept, shares = Kept(), {0: 0.75, 1: 0.25}
    lost = Rejected.of(None, (1, 1), lost_tokens=40, reason=RefusalReason.TOO_STALE, detail="", unix_s=22.0)
    tape = [merge(0, 1, 10.0, step_norm=4.0), merge(1, 1, 20.0), merge(0, 2, 21.0, step_norm=8.0), lost]
    seen = replace(poll([]), shares=shares)
    with writer(tmp_path, kept) as first:
        first.see(replace(seen, records=tape))
        assert {one.step for one in kept.points} == {1}
    later = [merge(1, 2, 24.0, base=0), merge(1, 2, 25.0, base=0, step_norm=6.0, rho=0.5), merge(0, 3, 30.0)]
    with writer(tmp_path, kept) as second:
        second.see(replace(seen, records=[*tape, *later]))
        second.see(replace(seen, records=[merge(0, 2, 40.0)]))  # Redis went back
    assert kept.of("merges/merged_tokens") == [(1, 400.0), (2, 400.0)]
    assert kept.of("merges/rejected_tokens") == [(1, 0.0), (2, 10.0)]
    assert kept.of("merges/staleness") == [(1, 0.0), (2, 0.25)]
    assert kept.of("merges/learners") == [(1, 2.0), (2, 2.0)]
    assert kept.of("merges/per_s") == [(2, 2 / 5)]
    assert kept.of("merges/step_norm") == [(2, 10.0)], "none where a merge's is not known"
    assert kept.of("merges/rho") == [(2, 0.5)]
    assert kept.of("merges/norm") == [(1, pytest.approx(18**0.5)), (2, pytest.approx(18**0.5))]


def test_the_last_evaluation_of_the_same_tokens_is_another_point(tmp_path: Path) -> None:
    """A run is evaluated again at its end, though it trains no more."""
    kept = Kept()
    mid, last = evaluation(900, 3.0, 1000.0), evaluation(900, 2.9, 1010.0, final=True)
    for news in ([mid], [mid, last], [mid, last]):
        with writer(tmp_path, kept) as one:
            one.see(replace(poll([]), evaluations=news))
    assert kept.of("global/loss") == [(900, 3.0), (900, 2.9)]


def test_curves_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """Not those of two names, not those of two runs that had one name, not those of two watchers at a time."""
    with writer(tmp_path, Kept(), "a") as first:
        first.see(replace(poll([samples.seen()]), origin_s=5.0))
        first.end()
        with pytest.raises(UsageError, match="another watcher is writing there"):
            Notes(tmp_path, "a", "kept")
    with pytest.raises(UsageError, match=r"has curves of run 'a', not 'b'; choose a different folder"):
        Notes(tmp_path, "b", "kept")
    with writer(tmp_path, Kept(), "a") as again, pytest.raises(UsageError, match="curves of an earlier run named 'a'"):
        again.see(replace(poll([]), origin_s=6.0))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--to", "excel"], "use one of tensorboard, wandb, trackio, mlflow"),
        (["--into", "x"], "--into is the folder for --to"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("DILOCO_RUN", "my-run")
    assert main(["watch", *given]) == 2
    assert told in capsys.readouterr().err


def anna(tokens: int, loss: float, number: int) -> LearnerReport:
    curve = b64encode(np.full(11, loss + 0.5, "<f4").tobytes()).decode()
    return samples.report("anna", tokens=tokens, number=number, curve_s=1.0, curve=curve)


async def lives(url: str, run: str, tokens: int, loss: float) -> None:
    """Its learner, still: whoever began to poll some seconds after `train` would find it silent."""
    async with open_bus(url, run) as bus:
        await bus.write_report(anna(tokens, loss, tokens + 1))


async def train(url: str, run: str, tokens: int, loss: float) -> None:
    """So far the run is, and its evaluator has said so."""
    async with open_bus(url, run) as bus:
        await bus.propose_spec(encode(samples.spec()))
        await bus.write_report(anna(tokens, loss, tokens))
        await bus.write_state(samples.run_state(tokens=tokens))
        await bus.add_evaluation(evaluation(tokens, loss))


class Watcher:
    """A process that writes a run's curves."""

    def __init__(self, url: str, run: str, kind: str, folder: Path, lacking: str = "") -> None:
        kept = {
            name: value
            for name, value in environment(DILOCO_REDIS_URL=url).items()
            if not name.startswith(("WANDB_", "TRACKIO_", "MLFLOW_"))
        }
        environ = kept | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder)}
        environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
        given = ["watch", "--run", run, "--to", kind, "--into", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", QUICK, lacking or "no_such_module", *given],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._kind, self._reads = kind, True
        self._notes = folder / f"diloco-{kind}.json"

    def wrote(self, tokens: int) -> None:
        """Wait until it has noted them, and a poll more; where it notes nothing while it lives, for some looks."""
        if self._kind == "wandb":
            assert self.process.stdout is not None
            while self._reads and "writing run" not in self.process.stdout.readline():
                assert self.process.poll() is None, self.process.communicate()
            self._reads = False
            time.sleep(3.0)
            return

        def noted() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return self._last() >= tokens

        wait_for(noted)
        time.sleep(1.0)

    def _last(self) -> int:
        last = json.loads(self._notes.read_text())["last"] if self._notes.exists() else {}
        return int(last["evaluations"][0]) if "evaluations" in last else -1

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        self.told = self.process.communicate(timeout=HANGING_S)
        return self.process.returncode


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points by tag, in the order of the files."""
    loading = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in loading.LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def of_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of the offline files of all its lives."""
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record  # noqa: N806  # a class
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            axes = row.keys() & {"tokens", "round"}
            for key in row.keys() - axes:
                if not key.startswith("_"):
                    found.setdefault(key, []).append((int(row[min(axes)]), float(row[key])))
    return found


def of_trackio(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of its only run."""
    with closing(sqlite3.connect(folder / "diloco.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    found: dict[str, list[tuple[int, float]]] = {}
    for _, step, values in rows:
        for tag, value in json.loads(values).items():
            found.setdefault(tag, []).append((step, value))
    return found


def of_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of its only run, which has ended."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        rows = database.execute("SELECT key, step, value FROM metrics ORDER BY rowid").fetchall()
        assert database.execute("SELECT name, status FROM runs").fetchall() == [("tracked-mlflow", "FINISHED")]
    found: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in rows:
        found.setdefault(tag, []).append((step, value))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB, of records that may be cut into a first, middle and last part."""
    at, whole = 7, b""  # behind the file's own head
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if part == 0 or at + 7 + length > len(data):
            return  # its writer was killed within a record
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


@pytest.mark.redis
@pytest.mark.parametrize(
    ("kind", "read"),
    [("tensorboard", of_tensorboard), ("wandb", of_wandb), ("trackio", of_trackio), ("mlflow", of_mlflow)],
)
def test_one_that_is_killed_goes_on_and_writes_no_step_twice(
    redis_server: str, tmp_path: Path, kind: str, read: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    """It ends cleanly at Ctrl-C, and has told what came while nobody watched: evaluations are kept on Redis. Whatever a
    killed Weights & Biases lost is told again, as far as the run still knows it."""
    for package in (kind, "sqlalchemy") if kind == "mlflow" else (kind,):
        if find_spec(package) is None:
            pytest.skip(f"{package} comes with the extra `{kind}`")
    run = f"tracked-{kind}"
    asyncio.run(train(redis_server, run, 100, 5.0))
    first = Watcher(redis_server, run, kind, tmp_path)
    first.wrote(100)
    asyncio.run(lives(redis_server, run, 100, 5.0))
    first.wrote(100)
    asyncio.run(train(redis_server, run, 150, 4.5))
    first.wrote(150)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    asyncio.run(train(redis_server, run, 200, 4.0))
    second = Watcher(redis_server, run, kind, tmp_path)
    second.wrote(200)
    asyncio.run(train(redis_server, run, 300, 3.0))
    second.wrote(300)
    assert second.end(signal.SIGINT) == 0, second.told
    found = read(tmp_path)
    assert found["global/loss"] == [(100, 5.0), (150, 4.5), (200, 4.0), (300, 3.0)]
    last, loss = found["loss/anna"][-1]
    assert loss == 3.5
    assert 200 < last <= 300  # at the tokens of the time of its last full bucket
    if kind != "wandb":
        assert found["loss/anna"][0] == (100, 5.5)
    assert all(len({step for step, _ in points}) == len(points) for points in found.values())


@pytest.mark.redis
@pytest.mark.parametrize("kind", TRACKERS)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(redis_server: str, tmp_path: Path, kind: str) -> None:
    """Before anything is made: no folder is left behind."""
    watcher = Watcher(redis_server, "any", kind, tmp_path / "into", lacking=kind)
    _, errors = watcher.process.communicate(timeout=HANGING_S)
    assert watcher.process.returncode == 2
    assert f"pip install 'diloco[{kind}]'" in errors
    assert list(tmp_path.iterdir()) == []


def test_who_is_not_logged_in_to_wandb_is_told_of_the_way_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusal(Exception):
        pass

    def init(**_: object) -> None:
        raise Refusal("No API key configured. Use `wandb login` to log in.")

    fake = SimpleNamespace(init=init, errors=SimpleNamespace(Error=Refusal))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UsageError, match=r"`wandb login`.*WANDB_MODE=offline"):
        Wandb(tmp_path, "r", "life")


class StandIn:
    """What wandb, trackio and mlflow are used for, and no more: runs by name or id, and the points that each has."""

    class Refusal(Exception):
        pass

    class Metric(NamedTuple):
        key: str
        value: float
        timestamp: int
        step: int

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[str, int, float]]] = {}
        self.refuses = False
        self.errors = SimpleNamespace(Error=self.Refusal)
        self.MlflowException, self.entities = self.Refusal, SimpleNamespace(Metric=self.Metric)
        self.tags: dict[str, dict[str, str]] = {}

    def init(self, project: str = "", *, name: str, id: str = "", **_: object) -> SimpleNamespace:
        """Of wandb and trackio: what is logged is there once the run is finished."""
        points, rows = self.runs.setdefault(id or name, []), list[tuple[str, int, float]]()

        def log(values: dict[str, float], step: int = -1) -> None:
            at = int(min((values[axis] for axis in ("tokens", "round") if axis in values), default=step))
            rows.extend((tag, at, value) for tag, value in values.items() if tag not in ("tokens", "round"))

        def finish() -> None:
            points.extend(rows)
            rows.clear()

        return SimpleNamespace(log=log, finish=finish, define_metric=lambda *_, **__: None)

    def search_runs(self, *, filter_string: str, output_format: str) -> list[SimpleNamespace]:
        assert output_format == "list"
        said = [
            id
            for id, tags in self.tags.items()
            for tag, own in tags.items()
            if filter_string == f"tags.`{tag}` = '{own}'"
        ]
        return [SimpleNamespace(info=SimpleNamespace(run_id=id)) for id in said]

    def start_run(self, id: str | None = None, *, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        id = id or f"{run_name}-{len(self.runs)}"
        self.tags[id] = tags
        self.runs.setdefault(id, [])
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def MlflowClient(self) -> "StandIn":  # noqa: N802  # its name there
        return self

    def log_batch(self, id: str, metrics: list[Metric], synchronous: bool) -> None:
        assert synchronous
        if self.refuses:
            raise self.Refusal("no answer")
        self.runs[id] += [(one.key, one.step, one.value) for one in metrics]

    def end_run(self) -> None:
        pass


def lives_of(kind: str, folder: Path, tokens: Sequence[int]) -> None:
    """A watcher for each: it sees the run with so many tokens, with what it was before."""
    for n, seen in enumerate(tokens):
        with closing(Notes(folder, "r", kind)) as notes:
            notes.save()
            tracker = TRACKERS[kind](folder, "r", notes.life)
            one = Writer(notes, tracker)
            tape = [merge(0, 1, 10.0), merge(0, 2, 20.0)][: n + 1]
            news = [evaluation(at, 3.0) for at in tokens[: n + 1]]
            look = poll([samples.seen("l0", tokens=seen, loss=3.5, step_s=0.25)])
            one.see(replace(look, records=tape, evaluations=news, shares={0: 1.0}))
            one.end()
            tracker.close()
            if not tracker.stored:
                notes.save()


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_each_tracker_has_one_run_with_the_same_curves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two watchers in turn write each point once, by the tags and steps of TensorBoard."""
    library = StandIn()
    monkeypatch.setitem(sys.modules, kind, library)
    lives_of(kind, tmp_path, (500, 900))
    [found] = library.runs.values()
    assert {("global/loss", 500, 3.0), ("global/loss", 900, 3.0), ("merges/learners", 2, 2.0)} <= set(found)
    assert len(set(found)) == len(found)
    kept = Kept()
    monkeypatch.setitem(TRACKERS, "kept", lambda *_: kept)
    lives_of("kept", tmp_path / "kept", (500, 900))
    assert sorted(found) == sorted((one.tag, one.step, one.value) for one in kept.points)
    lives_of(kind, tmp_path / "other", (500,))
    assert len(library.runs) == 2, "curves in a different folder are a different run there, whatever its name"


def test_points_that_mlflow_does_not_take_are_written_by_the_next_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandIn()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    library.refuses = True
    with pytest.raises(DilocoError, match="MLflow does not take the points"):
        lives_of("mlflow", tmp_path, (500,))
    library.refuses = False
    lives_of("mlflow", tmp_path, (500,))
    assert [one for one in library.runs["r-0"] if one[0] == "global/loss"] == [("global/loss", 500, 3.0)]


def test_points_that_a_tracker_did_not_take_are_not_noted_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by a tracker that stores its points as it is closed: the next watcher writes them."""

    class Held(Kept):
        stored = False

        def put(self, points: Sequence[Point]) -> None:
            if failing:
                raise RuntimeError("the service is gone")
            super().put(points)

    async def look_once(url: str, run: str, writer: Writer) -> None:
        writer.see(replace(poll([]), evaluations=[evaluation(500, 3.0)]))

    kept, failing = Held(), True
    monkeypatch.setitem(TRACKERS, "held", lambda *_: kept)
    monkeypatch.setattr("diloco.tracking.follow._follow", look_once)
    monkeypatch.setattr("diloco.tracking.follow.load_extra", lambda *_: None)
    with pytest.raises(RuntimeError):
        follow("redis://nowhere", "r", "held", tmp_path)
    failing = False
    for _ in range(2):
        follow("redis://nowhere", "r", "held", tmp_path)
    assert kept.of("global/loss") == [(500, 3.0)]


async def test_a_resumed_run_is_the_one_that_it_resumes() -> None:
    """So its curves go on in the same folder."""
    bus = MemoryBus("r", LoopClock())
    for origin_s, same_s in ((None, 1000.0), (400.0, 400.0)):
        await bus.write_state(samples.run_state(started_unix_s=1000.0, origin_unix_s=origin_s))
        seen = await RunReader(bus, LoopClock(), None).poll()
        assert (seen.began_s, seen.origin_s) == (1000.0, same_s)
