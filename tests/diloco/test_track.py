"""`diloco watch --to`: a run's curves in TensorBoard's files, or offline ones of Weights & Biases."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.run import Evaluation
from diloco.pipeline.payload.codec import encode
from diloco.track import NOTES, Notes, write
from diloco.trackers import Point
from tests import samples
from tests.syncer.test_run_metrics import look

LIMIT_S = 90.0
QUICK = """
import sys, diloco.track
diloco.track.EVERY_S = 0.3
for lacking in sys.argv.pop(1).split(","):
    sys.modules[lacking] = None
from diloco.cli import main
sys.argv[0] = "diloco"
sys.exit(main())
"""


class Kept:
    """Keeps points."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def put(self, points: Any) -> None:
        self.points += points

    def close(self) -> None:
        pass


def test_nothing_is_written_twice_by_whoever_goes_on(tmp_path: Path) -> None:
    """The same look again, by the same writer or the next one, adds no point; a later one adds what is new."""
    kept, seen = Kept(), look([samples.seen("l0", tokens=500, loss=3.5)])
    first = Notes(tmp_path, "r")
    write(seen, first, kept)
    write(seen, first, kept)
    write(seen, Notes(tmp_path, "r"), kept)
    assert [one.value for one in kept.points if one.tag == "loss/l0"] == [3.5]
    write(look([samples.seen("l0", tokens=900, loss=3.0)]), Notes(tmp_path, "r"), kept)
    assert [(one.step, one.value) for one in kept.points if one.tag == "loss/l0"] == [(500, 3.5), (900, 3.0)]
    assert len({(one.tag, one.step) for one in kept.points}) == len(kept.points)
    assert {"run/merged_share", "run/tokens_per_s", "tokens/overwritten", "steps_per_s/l0"} <= {
        one.tag for one in kept.points
    }


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    """Curves of two runs in one would be a third one."""
    Notes(tmp_path, "a").new("now", [Point("x", 1, 1.0, 1.0)])
    with pytest.raises(UsageError, match=r"has curves of run 'a': name another folder for 'b'"):
        Notes(tmp_path, "b")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--to", "excel"], "there are tensorboard, wandb"),
        ([], "say how, one of both"),
        (["--to", "wandb", "--web"], "say how, one of both"),
        (["--web", "--into", "x"], "--into is the folder of --to"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_REDIS_URL", "redis://127.0.0.1:1")
    assert main(["watch", *given]) == 2
    assert told in capsys.readouterr().err


async def train(url: str, run: str, tokens: int, loss: float) -> None:
    """So far the run is, and its evaluator has said so."""
    async with open_bus(url, run) as bus:
        await bus.propose_spec(encode(samples.spec()))
        await bus.write_report(samples.report("anna", tokens=tokens, loss=loss + 0.5, number=tokens))
        await bus.write_state(samples.run_state(tokens=tokens))
        at = {"tokens": tokens, "versions": (0, 0), "unix_s": 1000.0, "elapsed_s": 1.0, "final": False}
        await bus.add_evaluation(Evaluation(loss=loss, **at))


class Watcher:
    """A process that writes a run's curves."""

    def __init__(self, url: str, run: str, kind: str, folder: Path, lacking: str = "") -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "WANDB_"))}
        environ = kept | {"DILOCO_REDIS_URL": url, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        given = ["watch", "--run", run, "--to", kind, "--into", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", QUICK, lacking or "no_such_module", *given],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._folder = folder

    def wrote(self, tokens: int) -> None:
        """Wait until it has noted them, and a look more."""
        until = time.monotonic() + LIMIT_S
        while self._last() < tokens:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(1.0)

    def _last(self) -> int:
        file = self._folder / NOTES
        return min(json.loads(file.read_text())["last"].values()) if file.exists() else -1

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        self.told = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All points by tag, in the order of the files."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in loading.LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def of_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of the offline files of all its lives."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for key, value in row.items():
                if not key.startswith("_") and key != "tokens":
                    found.setdefault(key, []).append((int(row["tokens"]), float(value)))
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
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "read"), [("tensorboard", of_tensorboard), ("wandb", of_wandb)])
def test_one_that_is_killed_goes_on_and_writes_no_step_twice(
    redis_server: str, tmp_path: Path, kind: str, read: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    """It ends cleanly at Ctrl-C, and has told what came while nobody watched: evaluations are kept on Redis."""
    pytest.importorskip(kind)
    run = f"tracked-{kind}"
    asyncio.run(train(redis_server, run, 100, 5.0))
    first = Watcher(redis_server, run, kind, tmp_path)
    first.wrote(100)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    for tokens, loss in ((200, 4.0), (300, 3.0)):
        asyncio.run(train(redis_server, run, tokens, loss))
    second = Watcher(redis_server, run, kind, tmp_path)
    second.wrote(300)
    assert second.end(signal.SIGINT) == 0, second.told
    found = read(tmp_path)
    assert found["global/loss"] == [(100, 5.0), (200, 4.0), (300, 3.0)]
    assert found["loss/anna"] == [(100, 5.5), (300, 3.5)]
    assert all(len({step for step, _ in points}) == len(points) for points in found.values())


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(redis_server: str, tmp_path: Path, kind: str) -> None:
    lacking = "tensorboard.compat.proto.event_pb2" if kind == "tensorboard" else kind
    watcher = Watcher(redis_server, "any", kind, tmp_path, lacking=f"{kind},{lacking}")
    _, errors = watcher.process.communicate(timeout=LIMIT_S)
    assert watcher.process.returncode == 2
    assert f"pip install 'diloco[{kind}]'" in errors
