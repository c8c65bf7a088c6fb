"""What the user has to mend: refused at once, by name, with what mends it and status 2; nothing is left."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from diloco.cli import main
from diloco.launcher.option_checks import check_evaluator
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.process.interrupts import INTERRUPTED_STATUS
from diloco.pipeline.settings import EvaluatorProcess, load
from tests import HANGING_S, samples
from tests.parties import python
from tests.pipeline.conftest import as_user, known

REFUSED = 2
Here = Callable[..., subprocess.CompletedProcess[str]]
NOWHERE = ["--redis-url", "redis://127.0.0.1:1"]


pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def of_another_run(redis_server: str) -> Iterator[tuple[str, str]]:
    """URL of a Redis whose users were made for another run, and a run's name."""
    users = acl.users(f"other-{secrets.token_hex(3)}", ["anna"])
    with redis_py.Redis.from_url(redis_server, protocol=2) as admin, known(admin, users):
        yield redis_server, f"mine-{secrets.token_hex(3)}"


def party(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command as a process, with all that it says as its stdout."""
    command = [sys.executable, "-m", "diloco", *arguments]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, env=os.environ | environ, check=False, timeout=HANGING_S, **output)


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """The same in this process, which has what a learner imports: to import it anew takes seconds."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        status = main(list(arguments))
        return subprocess.CompletedProcess(arguments, status, "".join(capfd.readouterr()))

    return run


# --- a program of one's own -------------------------------------------------------------------------------

OWN = """
import sys
from torch import nn
from diloco import Learner
sys.excepthook = {hook}
model = nn.Linear(2, 1)
with Learner(model, run={run!r}, redis_url={url!r}) as learner:
    pass
"""
FULL = "lambda kind, error, trace: print('mine', type(error).__name__)"


@pytest.mark.parametrize(("hook", "out"), [("sys.excepthook", ""), (FULL, "mine NotPermitted\n")])
def test_a_refused_program_ends_as_a_refused_command_does(hook: str, out: str, of_another_run: tuple[str, str]) -> None:
    """Else `again.sh` starts it again for ever. A hook that the program has itself prints in its own way."""
    url, run = of_another_run
    done = python("-c", OWN.format(hook=hook, run=run, url=as_user(url, "learner-anna")))
    assert (done.returncode, done.stdout) == (REFUSED, out)
    last = done.stderr.splitlines()[-1:]
    assert last[0].startswith("error: Redis at ") if not out else "error: " not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


RAISED = """
import sys
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.interrupts import without_traceback
error = UsageError("no")
{more}
raise error
"""


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("", 1),
        ("without_traceback(error)", REFUSED),
        ("without_traceback(error); sys.ps1 = '> '", 1),
    ],
)
def test_a_mistake_in_a_program_and_one_at_a_prompt_keep_their_tracebacks(more: str, status: int) -> None:
    """The user looks for the line, and wants to stay at the prompt."""
    done = python("-c", RAISED.format(more=more))
    assert (done.returncode, "Traceback" in done.stderr) == (status, status == 1), done.stderr
    assert done.stderr.endswith("Error: no\n" if status == 1 else "error: no\n"), "and nothing after the message"


# --- names that nothing has -----------------------------------------------------------------------------


def test_one_file_of_settings_does_for_all_parties_of_a_run() -> None:
    """`diloco run` gives its own to the evaluator too, a model's size and all."""
    check_evaluator(load(EvaluatorProcess, {"model": "small"}))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--model", "huge"], ["model='huge'", "large (100.5M)", "hf:FOLDER"]),
        (["run", "--model", "larg"], ["did you mean 'large'?"]),
        (["demo", "--model", "huge"], ["model='huge'", "large (100.5M)"]),
        (["learner", "--model", "huge", *NOWHERE], ["model='huge'", "large (100.5M)"]),
        (["learner", "--data", "nosuch", *NOWHERE], ["data='nosuch'", "no such file"]),
        (["evaluator", "--model", "huge", *NOWHERE], ["model='huge'", "hf:FOLDER"]),
        (["evaluator", "--data", "nosuch", *NOWHERE], ["data='nosuch'", "no such file"]),
        (["run", "--data", "/dev/null"], ["data='/dev/null' is neither a file nor a folder"]),
        (["run", "--data", "/proc/self/mem"], ["data='/proc/self/mem': 0 bytes are too few"]),
        (["run", "--data", sys.executable], ["is a binary file"]),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_a_name_that_nothing_has_is_refused_before_anything_is_begun(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where no Redis is there to be asked. No folder is left."""
    assert main(arguments) == REFUSED
    said = capsys.readouterr().err
    assert [part for part in told if part not in said] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["relative", "/nowhere/absolute"])
def test_a_run_does_not_start_in_a_deleted_folder(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["run", "--out", out]) == REFUSED
    assert "the current folder was deleted: change to another one" in capsys.readouterr().err


def test_a_token_that_is_too_short_is_told_the_least_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_HTTP_TOKEN", "hunter2")
    assert main(["syncer", *NOWHERE]) == REFUSED
    said = capsys.readouterr().err
    assert said.startswith("error: http_token=***: too short (allowed: at least 8 characters); set it with DILOCO_HTTP")
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--tokens", "-5"], "tokens=-5: too small (allowed: at least 1, at most "),
        (["run", "--http-port", "70000"], "http_port=70000: too large (allowed: at least 0, at most 65535)"),
        (["run", "--lr", "high"], "lr='high': not a number (allowed: more than 0)"),
        (["run", "--lr", "nan"], "lr='nan': not a finite number (allowed: more than 0)"),
        (["run", "--pace", "2 weeks"], "pace='2 weeks': not a number, such as 200ms, 10s, 5m or 30d (allowed: at "),
        (["run", "--method", "magic"], "method='magic': not a valid choice (allowed: one of decoupled, paper, "),
        (["run", "--lease-s", "1e300"], "lease_s='1e300': too large (allowed: more than 0.1, at most 3600)"),
        *((["plan", "--link", given], "5Gbps or 800Mbit/s") for given in ("fast", "5 Gbyte/s")),
        (["plan", "--link", "5"], "at least 1k"),
        (["learner", "--device", "tpu"], "device='tpu': not in the expected format (allowed: auto, cpu, cuda, "),
        (
            ["doctor", "--params", "huge"],
            "--params huge: not a number, such as 150k, 2.5M or 70B (allowed: ",
        ),
        (["doctor", "--params", "-3"], "--params -3: too small (allowed: more than 0)"),
        (["doctor", "--as", "boss"], "--as"),
        (["doctor", "--learners", "0"], "--learners"),
        (["doctor", "--params", "nan"], "--params nan: not a number"),
        (["doctor", "--step-time", "nan"], "--step-time nan: not a number"),
        (["status", "--price", "nan"], "--price nan: not a number"),
        (["status", "--watch", "0"], "--watch"),
        (["status", "--watch", "inf"], "--watch"),
        (["lab", "run", "--threads", "0", "nosuch"], "--threads"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_named_with_what_is_allowed_in_no_librarys_words(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of settings, and of options that the library of the command line checks itself."""
    assert main(arguments) == REFUSED
    said = capsys.readouterr().err
    assert told in said
    assert arguments[-1].removesuffix("nosuch") in said
    assert [words for words in ("Input should", "Value error", "unable to parse", "pattern") if words in said] == []


def test_a_variable_that_says_neither_yes_nor_no_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_COMPILE", "maybe")
    assert main(["learner", *NOWHERE]) == REFUSED
    assert "compile='maybe': neither true nor false; set it with --compile" in capsys.readouterr().err


# --- rights ---------------------------------------------------------------------------------------------


@pytest.mark.redis
@pytest.mark.parametrize(
    ("user", "arguments"),
    [
        ("syncer", ["syncer", "--http-port", "0"]),
        ("learner-anna", ["learner", "--learner-id", "anna"]),
        ("evaluator", ["evaluator"]),
        ("viewer", ["status"]),
        ("viewer", ["watch"]),
        ("operator", ["finish"]),
    ],
)
def test_a_user_of_another_run_is_told_who_it_is_in_which_run_and_what_makes_its_users(
    user: str, arguments: list[str], of_another_run: tuple[str, str], here: Here
) -> None:
    """In one message, without a traceback; a syncer does not begin to serve its page."""
    url, run = of_another_run
    ends = party if arguments[0] == "syncer" else here
    done = ends(*arguments, "--run", run, DILOCO_REDIS_URL=as_user(url, user))
    assert done.returncode == REFUSED, done.stdout
    named = " --learner anna" if user == "learner-anna" else ""
    made = f"diloco acl --run {run}{named} --passwords FILE > new-users.acl"
    for part in (f"user '{user}'", f"run '{run}'", f"diloco:{{{run}}}:", made):
        assert part in done.stdout
    assert "Traceback" not in done.stdout
    assert "page_failed" not in done.stdout
    assert "http_listening" not in done.stdout
    assert "pw-" not in done.stdout
    said = [line for line in done.stdout.strip().splitlines() if "machine_warning" not in line]  # of no checkpoints
    assert len(said) == 1, done.stdout


@pytest.mark.redis
def test_a_wrong_password_is_status_2(of_another_run: tuple[str, str], here: Here) -> None:
    url, run = of_another_run
    for ends, arguments in ((party, ["syncer", "--http-port", "0"]), (here, ["status"])):
        done = ends(*arguments, "--run", run, DILOCO_REDIS_URL=as_user(url, "syncer").replace("pw-", "wrong-"))
        assert done.returncode == REFUSED, done.stdout
        assert "refuses the login of user 'syncer'" in done.stdout
        assert "Traceback" not in done.stdout


@pytest.mark.redis
def test_who_was_told_otherwise_than_the_run_ends_with_2(redis_server: str, here: Here) -> None:
    """Another budget than the run's: to start it again would change nothing."""
    run = f"r-{secrets.token_hex(3)}"

    async def begin() -> None:
        async with open_bus(redis_server, run) as bus:
            await bus.propose_spec(encode(samples.spec()))

    asyncio.run(begin())
    for ends, arguments in ((party, ["syncer", "--http-port", "0"]), (here, ["learner", "--model", "nano"])):
        done = ends(*arguments, "--run", run, "--tokens", "12345", DILOCO_REDIS_URL=redis_server)
        assert done.returncode == REFUSED, done.stdout
        assert "tokens: here 12345, the run has" in done.stdout
        assert "`diloco runs extend RUN --tokens N`" in done.stdout
    client: Any = redis_py.Redis.from_url(redis_server, protocol=2)
    client.delete(*client.keys(f"diloco:{{{run}*"))
    client.close()


# --- Ctrl-C ---------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["diloco", *{arguments!r}]
from diloco.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module",
    ["diloco.pipeline.process.interrupts", "typer", "pydantic", "numpy._core", "diloco.doctor.checks", "redis"],
)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(module: str) -> None:
    """Whatever is being imported: a library may take an exception there for a part of itself that is missing."""
    code = INTERRUPTED.format(module=module, arguments=["doctor", "--json"])
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED_STATUS, "", "")


def test_ctrl_c_is_left_ignored_where_it_was() -> None:
    """As `nohup` and shells do for what they start in the background."""
    code = INTERRUPTED.format(module="typer", arguments=["--version"])
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + code
    done = python("-c", code)
    assert done.returncode == 0
    assert done.stdout.startswith("diloco ")


def test_ctrl_c_after_the_end_of_a_command_changes_nothing() -> None:
    """A second one in haste comes while the interpreter ends, which takes a while; the status stands. A thread that
    does not end is not waited for then."""
    code = "import os, signal, sys, threading, time; from diloco.__main__ import main; status = main()"
    code = f"{code}; threading.Thread(target=time.sleep, args=(90,)).start()"
    code = f"{code}; os.kill(os.getpid(), signal.SIGINT); sys.exit(status)"
    done = python("-c", code, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("diloco ")
