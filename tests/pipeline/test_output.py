"""Standard output and error whose reader goes away, each in a process of its own."""

import fcntl
import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests import HANGING_S
from tests.parties import ROOT, python, wait_for

PROGRAM = """
import sys
from pathlib import Path
from diloco.pipeline.process.output import survive_closed_pipes
survive_closed_pipes(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
print("heard", flush=True)
sys.stdin.readline()  # until the reader is gone
print("unheard ö", flush=True)
print("unheard too", file=sys.stderr, flush=True)
Path(sys.argv[2] if len(sys.argv) > 2 else "end").touch()
"""


@pytest.fixture
def program(popen):
    def start(*arguments: object, out: int, cwd: Path = ROOT, text: str = PROGRAM) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", text, *map(str, arguments)]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        return popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environ, cwd=cwd)

    return start


def closed_pipe() -> tuple[int, int]:
    return os.pipe()


def closed_terminal() -> tuple[int, int]:
    return os.openpty()


@pytest.mark.parametrize("pair", [closed_pipe, closed_terminal])
def test_what_nobody_reads_any_more_goes_to_the_refuge_and_nothing_fails(tmp_path, pair, program):
    """Of a pipe and of a terminal, of standard output and of standard error."""
    ours, theirs = pair()
    refuge, end = tmp_path / "refuge.log", tmp_path / "end"
    process = program(refuge, end, out=theirs)
    os.close(theirs)
    assert os.read(ours, 100).strip() == b"heard"
    os.close(ours)
    process.communicate(b"\n", timeout=HANGING_S)
    assert process.returncode == 0
    assert end.exists()
    assert refuge.read_text() == "unheard ö\nunheard too\n"


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="sets the size of a pipe")
def test_a_reader_that_goes_in_the_middle_of_a_character_leaves_text(tmp_path, program):
    """The refuge begins with the next character."""
    ours, theirs = os.pipe()
    size = fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    refuge = tmp_path / "refuge.log"
    text = PROGRAM.replace('"unheard ö"', f'"x" * {size - 1} + "öä"')
    process = program(refuge, out=theirs, cwd=tmp_path, text=text)
    os.close(theirs)
    assert os.read(ours, 100) == b"heard\n"
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_for(lambda: int.from_bytes(fcntl.ioctl(ours, termios.FIONREAD, bytes(4)), sys.byteorder) >= size)
    os.close(ours)
    process.communicate(timeout=HANGING_S)
    assert process.returncode == 0
    assert refuge.read_text() == "ä\nunheard too\n"


@pytest.mark.parametrize("refuge", [[], ["no/such/folder.log", "end"]])
def test_without_a_refuge_it_goes_nowhere(tmp_path, refuge, program):
    """None was named, or it cannot be opened."""
    ours, theirs = os.pipe()
    process = program(*refuge, out=theirs, cwd=tmp_path)
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    process.communicate(b"\n", timeout=HANGING_S)
    assert process.returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["end"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_ends_nothing(tmp_path, program):
    """Neither is its file given up: there may be room again."""
    with Path("/dev/full").open("w") as full:
        process = program(tmp_path / "refuge.log", tmp_path / "end", out=full.fileno())
        process.communicate(b"\n", timeout=HANGING_S)
    assert process.returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["end"]


def test_a_log_line_that_nobody_reads_does_not_fail_in_the_middle_of_the_work():
    """Of any process with a log: `diloco learner 2>&1 | tee` whose tee has died."""
    code = """
import os, structlog
from diloco.pipeline.process import logs
ours, theirs = os.pipe()
os.dup2(theirs, 2)
os.close(ours), os.close(theirs)
logs.configure("info")
structlog.get_logger().info("delta_published")
print("went on")
"""
    done = python("-c", code)
    assert done.stdout == "went on\n"
    assert done.returncode == 0


def test_streams_that_were_closed_before_the_start_are_none_to_write_to():
    """`diloco run >&- 2>&-`."""
    code = "from diloco.pipeline.process import output; output.survive_closed_pipes(); print('x', flush=True)"
    shell = [f'exec "{sys.executable}" -c "{code}" >&- 2>&-']
    done = subprocess.run(["/bin/sh", "-c", *shell], cwd=ROOT, check=False)
    assert done.returncode == 0


CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_whose_streams_are_closed_opens_them_on_nowhere_and_so_do_its_children(tmp_path, closed):
    """Else its first socket is a standard stream, which uvloop never closes: it ends by SIGABRT instead."""
    code = """
import os, socket, subprocess, sys
from pathlib import Path
from diloco.pipeline.process.output import open_all
open_all()
print("heard", file=sys.stderr)
print("heard", sys.stdin.read())
there = subprocess.run([sys.executable, "-c", "import os; [os.fstat(fd) for fd in range(3)]"]).returncode == 0
Path(sys.argv[1]).write_text(f"{socket.socket().fileno() > 2} {there}")
"""
    shell = f'exec "$0" -c "$1" "$2" </dev/null {closed}'
    command = ["/bin/sh", "-c", shell, sys.executable, code, str(tmp_path / "end")]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end").read_text() == "True True"


def test_help_is_shown_on_a_stream_without_its_characters():
    done = python("-m", "diloco", "run", "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "--learners" in done.stdout
