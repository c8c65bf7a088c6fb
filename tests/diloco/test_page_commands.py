"""`diloco watch` and `diloco report`: the page beside a run, and of one that is over."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from diloco import watch
from diloco.cli import main
from diloco.launcher.folder import Folder
from diloco.launcher.locate import RUN_FILE, Place, RunFile
from diloco.launcher.page import MODEL_FILE, PAGE_FILE
from diloco.options import RunProcess, WatchProcess
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable, DilocoError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.payload.codec import encode
from diloco_studies.virtual.memory import MemoryBus
from tests import HANGING_S, samples
from tests.backdoor import RedisBackdoor
from tests.parties import environment


def tape(folder: Path, merges: int = 3) -> None:
    """One of a fragment to which a learner has brought a delta every ten seconds."""
    folder.mkdir(parents=True)
    part = samples.contribution("anna", tokens=500)
    records = [samples.committed(unix_s=1000.0)]
    records += [
        samples.committed(version=n, base_digest=bytes(16), contributions=(part,), unix_s=1000.0 + 10 * n)
        for n in range(1, merges + 1)
    ]
    (folder / "0-ab.msgpack").write_bytes(b"".join(encode(one) for one in records))


def model_in(page: Path) -> dict[str, object]:
    (data,) = re.findall(r'<script type="application/json" id="model">(.*?)</script>', page.read_text())
    return dict(json.loads(data))


@contextmanager
def watching(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`diloco watch`, with a token."""
    command = [sys.executable, "-m", "diloco", "watch", *arguments]
    env = environment(DILOCO_HTTP_TOKEN="correct-horse", PYTHONUNBUFFERED="1")  # noqa: S106  # made up
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(address: str, path: str, count: int) -> list[str]:
    """The first lines of an answer to who has the token."""
    with closing(HTTPConnection(address.split("/")[2], timeout=HANGING_S)) as connection:
        connection.request("GET", path, headers={"Authorization": "Bearer correct-horse"})
        answer = connection.getresponse()
        return [answer.readline().decode() for _ in range(count)]


@pytest.mark.parametrize("inside", ["", "tape"])
def test_a_page_is_made_of_a_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str) -> None:
    """Of a folder of --tape-dir, or of an output folder that has nothing else; its address is printed last."""
    tape(tmp_path / "its" / inside)
    page = tmp_path / "new" / "page.html"
    assert main(["report", str(tmp_path / "its"), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == page.as_uri()
    told = model_in(page)
    assert told["sentence"]["text"] == (  # type: ignore[index]
        "According to its tape, the run made 3 merges of 1 learner in 0:20: 1500 tokens merged, 0 rejected."
    )
    assert list(told["learners"]) == ["anna"]  # type: ignore[call-overload]


def test_what_the_launcher_has_seen_is_taken_before_the_tape(tmp_path: Path) -> None:
    """It knows more: the recorded model is in the page as it is."""
    tape(tmp_path / "tape")
    (tmp_path / MODEL_FILE).write_text(json.dumps({"run": "seen", "coarse": {"step_s": 1}, "notes": []}))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / PAGE_FILE)]) == 0
    assert model_in(tmp_path / PAGE_FILE)["run"] == "seen"


def test_a_page_of_a_damaged_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the page that was there stays."""
    page = tmp_path / PAGE_FILE
    page.write_text("before")
    (tmp_path / MODEL_FILE).write_text(json.dumps({"run": "\ud800", "coarse": {"step_s": 1}, "notes": []}))
    assert main(["report", str(tmp_path), "--html", str(page)]) == 2
    assert f"{page} cannot be written, because its data is damaged" in capsys.readouterr().err
    assert page.read_text() == "before"


def test_a_folder_with_nothing_to_show_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, and with what was looked for."""
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 2
    assert "has neither page.json nor a tape (*.msgpack)" in capsys.readouterr().err
    tape(tmp_path / "tape", merges=0)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 2
    assert "has no merges, so there is nothing to show" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "has no report.json" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_the_report_of_a_run_that_left_none_says_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the status does, and that a page can still be made."""
    (tmp_path / RUN_FILE).write_text(RunFile(ended="stopped at once by a second signal", pids={}).model_dump_json())
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"the run in {tmp_path} was stopped at once by a second signal; its logs are in {tmp_path / 'logs'}" in told
    assert "--html FILE" in told


def test_a_page_for_a_folder_is_put_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the name that `diloco run` gives it; where nothing can be written, the error names it."""
    tape(tmp_path / "its")
    assert main(["report", str(tmp_path / "its"), "--html", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (tmp_path / PAGE_FILE).as_uri()
    assert model_in(tmp_path / PAGE_FILE)["run"] == "its"
    assert main(["report", str(tmp_path / "its"), "--html", str(tmp_path / PAGE_FILE / "x.html")]) == 2
    assert f"{tmp_path / PAGE_FILE / 'x.html'} cannot be written" in capsys.readouterr().err


def test_an_output_folder_gets_the_page_of_its_own_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as the page's place it chooses the run; where another one is chosen, what to type is said."""
    monkeypatch.chdir(tmp_path)
    for name in ("DILOCO_REDIS_URL", "DILOCO_RUN"):
        monkeypatch.delenv(name, raising=False)
    for number, name in enumerate(("old", "new")):
        tape(Path("runs", name, "tape"))
        file = Path("runs", name, "report.json")
        file.write_text(json.dumps({"run": name}))
        os.utime(file.parent, (1000 + number, 1000 + number))
    old, new = Path("runs/old"), Path("runs/new")
    for page in (old, old / PAGE_FILE):
        model = {"run": f"old-{page.name}", "coarse": {"step_s": 1}, "notes": []}
        (old / MODEL_FILE).write_text(json.dumps(model))
        assert main(["report", "--html", str(page)]) == 0
        assert model_in(old / PAGE_FILE)["run"] == model["run"]
    before = (old / PAGE_FILE).read_text()
    for named in ([str(new)], ["--run", "new"], ["--redis-url", "redis://127.0.0.1:1"]):
        capsys.readouterr()
        assert main(["report", *named, "--html", str(old)]) == 2
        assert "diloco report runs/old --html runs/old" in capsys.readouterr().err
    assert (old / PAGE_FILE).read_text() == before
    assert not (new / PAGE_FILE).exists()


def test_a_report_of_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nosuch")]) == 2
    said = capsys.readouterr().err
    assert f"the folder {tmp_path / 'nosuch'} does not exist" in said
    assert "tape" not in said


@pytest.mark.redis
def test_a_report_is_of_the_run_on_the_redis_that_is_named(
    tmp_path: Path, redis_server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag or variable, live or finished, as text and as a page; not of what lies in ./runs."""
    monkeypatch.chdir(tmp_path)
    name = f"reported-{tmp_path.name}"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "report.json").write_text("{}")
    ask = ["report", "--redis-url", redis_server, "--run", name]
    assert main(ask) == 1
    assert f"this Redis has no run '{name}'" in capsys.readouterr().err

    async def put(phase: Phase) -> None:
        async with open_bus(redis_server, name) as bus:
            await bus.propose_spec(encode(samples.spec()))
            await bus.write_report(samples.report("anna", tokens=1500))
            await bus.write_state(samples.run_state(phase=phase, started_unix_s=time.time() - 30))

    asyncio.run(put(Phase.RUNNING))
    assert main(ask) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("waiting (")
    assert f"): run '{name}', 1 learner, 1500 of 10.0k tokens in 0:30" in lines[0]
    assert lines[2].startswith("tokens: 1500 trained = 0 merged + ")
    assert "goodput 100.0%" in lines
    assert main([*ask, "--price", "360"]) == 0
    spent = "cost 1.00; badput 0, of which failures 0"
    assert spent in capsys.readouterr().out.splitlines(), "10 s at 0.1 a second, and nothing merged yet"
    assert main([*ask, "--html", str(tmp_path / "now.html")]) == 0
    told = model_in(tmp_path / "now.html")
    assert list(told["learners"]) == ["anna"]  # type: ignore[call-overload]
    assert told["notes"][0].startswith("This page is a snapshot")  # type: ignore[index]
    assert told["totals"]["redis"]["used"] > 0  # type: ignore[index]
    series = told["coarse"]["series"]  # type: ignore[index]
    assert min(series["received"][-1], series["sent"][-1]) > 0
    capsys.readouterr()
    asyncio.run(put(Phase.FINISHED))
    monkeypatch.setenv("DILOCO_REDIS_URL", redis_server)
    monkeypatch.setenv("DILOCO_RUN", name)
    assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith(f"finished: run '{name}'")
    backdoor = RedisBackdoor(name, redis_server)
    backdoor.free_memory()
    backdoor.client.close()


@pytest.mark.redis
def test_a_page_stays_when_its_run_and_its_redis_are_gone(tmp_path: Path, redis_binary: object) -> None:
    """It says that the run is finished, and goes on showing it; Ctrl-C ends it well."""
    with EmbeddedRedis() as server:

        async def finish() -> None:
            async with open_bus(server.url, "gone") as bus:
                await bus.propose_spec(encode(samples.spec()))
                await bus.write_report(samples.report("anna", left=True))
                stopped = {"phase": Phase.FINISHED, "reason": "stopped by the user"}
                await bus.write_state(samples.run_state(started_unix_s=time.time() - 10, **stopped))

        asyncio.run(finish())
        Folder(tmp_path).write_run(server.url, RunProcess(run="gone"), {})
        with watching("--http-port", "0", str(tmp_path)) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[1]
            lines = iter(process.stdout.readline, "")
            over = next(line for line in lines if "finished" in line)
            assert over == (
                f"run 'gone' is finished; its page stays up until Ctrl-C; its report: diloco report {tmp_path}\n"
            )
            server.kill()
            time.sleep(4.5)  # longer than `verdict.AWAY_S`, and a look
            said = json.loads(lines_of(address, "/page/events", 2)[1].removeprefix("data: "))["sentence"]
            assert said["level"] == "over"
            assert said["text"].startswith("The run was stopped at 10% of its budget (by the user)")
            process.send_signal(signal.SIGINT)
            assert process.wait(HANGING_S) == 0


@pytest.mark.parametrize("left", ["{}", '{"run": null, "method": 5, "learners": "x"}', '{"global_val_loss": "x"}'])
@pytest.mark.parametrize("command", ["report", "status"])
def test_a_report_of_another_form_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, left: str
) -> None:
    """It is damaged, or of something else: neither a traceback nor a run that is still closing."""
    (tmp_path / "report.json").write_text(left)
    assert main([command, str(tmp_path)]) == 2
    assert "report.json is not a report of `diloco run`, or is damaged" in capsys.readouterr().err


def test_a_process_that_has_the_launchers_id_by_now_is_not_taken_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after the machine was started anew. Nor is an id that no process can have."""
    file = tmp_path / "run.json"
    for pid in (os.getpid(), 99999999999999999999):
        file.write_text(json.dumps({"run": "r", "redis_url": "redis://127.0.0.1:1", "pids": {"launcher": pid}}))
        os.utime(file, (1e9, 1e9))
        assert main(["status", str(tmp_path)]) == 2
        assert "ended without a report" in capsys.readouterr().err


async def test_a_page_outlives_the_output_folder_of_its_run_for_as_long_as_redis_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody deletes the folder while the run goes on; once Redis is gone as well, the end says what happened."""
    bus = MemoryBus("kept", LoopClock())
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "AWAY_S", 0.3)
    monkeypatch.setattr(watch, "open_bus", lambda url, run: nullcontext(bus))
    away = BusUnavailable("away")
    answers = [None, away, None, None, *[away] * 100]
    monkeypatch.setattr(bus, "read_spec", AsyncMock(return_value=None))
    monkeypatch.setattr(bus, "read_state", AsyncMock(side_effect=answers))
    page = SimpleNamespace(model=SimpleNamespace(over=False)), ""
    monkeypatch.setattr(watch, "served", lambda *given: nullcontext(page))
    place = Place("kept", "redis://127.0.0.1:1", tmp_path / "deleted")
    with pytest.raises(
        DilocoError, match="deleted was moved or deleted, and the Redis of its run 'kept' no longer answers"
    ):
        await watch._serve(WatchProcess(), place)
    assert 10 < bus.read_state.await_count < len(answers)  # type: ignore[attr-defined]  # a mock
    assert capsys.readouterr().out.count("was moved or deleted: watching its run for as long as its Redis answers") == 1


@pytest.mark.redis
def test_a_page_beside_any_run(redis_server: str) -> None:
    """Whoever may read the bus serves it: the address is the first line; a token is asked for; Ctrl-C ends it well."""
    with watching("--run", "beside", "--redis-url", redis_server) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], HANGING_S)[0]
        (address,) = re.findall(r"^page (http://127\.0\.0\.1:\d+/) \(it requires DILOCO_", process.stdout.readline())
        assert 'src="/page/app.js"' in "".join(lines_of(address, "/", 30))
        lines = lines_of(address, "/page/events", 2)
        assert lines[0] == "event: snapshot\n"
        said = json.loads(lines[1].removeprefix("data: "))["sentence"]
        assert said["text"] == "The run has not started: no learner has joined, and there is no syncer."
        assert said["command"] == f"{sys.executable} -m diloco learner --run beside --redis-url {redis_server}"
        assert 'diloco_run_phase{phase="finished",run="beside"} 0.0\n' in lines_of(address, "/metrics", 1000)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGING_S) == 0
