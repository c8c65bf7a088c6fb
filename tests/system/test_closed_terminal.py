"""Whole runs whose terminal is closed, or whose output nobody reads any more."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import HANGING_S
from tests.parties import ROOT, environment
from tests.system.test_processes import QUICK, SMALL, Run

pytestmark = [pytest.mark.slow]


class Watched(Run):
    """`diloco run` whose output goes to a descriptor that the test may close."""

    def __init__(self, out: Path, output: int, *arguments: object, **how: Any) -> None:
        self.out = out
        command = [sys.executable, "-m", "diloco", "run", "--out", str(out), *SMALL, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=output, stdout=output, stderr=output, text=True, env=environment(**QUICK), cwd=ROOT, **how
        )
        os.close(output)

    @property
    def launcher_log(self) -> str:
        return (self.out / "logs" / "launcher.log").read_text()


@contextmanager
def watched(out: Path, output: int, *arguments: object, **how: Any) -> Iterator[Watched]:
    run = Watched(out, output, "--learners", 2, *arguments, **how)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@contextmanager
def shown(terminal: int) -> Iterator[None]:
    """Read what comes, in the background; afterwards close the terminal."""
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()
        os.close(terminal)


def of_its_own_terminal(hangup: signal.Handlers) -> Callable[[], None]:
    """In the child: its input becomes the terminal of its session, and SIGHUP is treated so."""

    def take() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, hangup)

    return take


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """`diloco run | head -1`: it trains to its budget; what was not read is in the folder, and the status is 0."""
    ours, theirs = os.pipe()
    with watched(tmp_path / "out", theirs, "--tokens", 60_000) as run:
        assert b"output folder" in os.read(ours, 100)
        os.close(ours)
        assert run.process.wait(HANGING_S) == 0
    assert run.report["tokens"] >= 60_000
    assert run.report["stopped"] is False
    assert "picture" in run.launcher_log
    run.left_nothing_running()


@pytest.mark.parametrize("times", [1, 2])
def test_a_hangup_ends_a_run_in_order(tmp_path: Path, times: int) -> None:
    """With checkpoint and report, also when it comes twice, as from the kernel and the shell."""
    with watched(tmp_path / "out", os.open(os.devnull, os.O_RDWR), "--tokens", 2_000_000) as run:
        run.reaches(5_000)
        for _ in range(times):
            run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(HANGING_S) == 0
    assert run.report["stopped"] is True
    assert run.report["tokens_lost"]["unaccounted"] == 0
    assert Path(run.report["checkpoint"]).is_dir()
    run.left_nothing_running()


def run_whose_terminal_closes(out: Path, hangup: signal.Handlers, tokens: int) -> Watched:
    """In a session of its own; its terminal goes as it trains, and it ends without a fault."""
    ours, theirs = os.openpty()
    take = of_its_own_terminal(hangup)
    with watched(out, theirs, "--tokens", tokens, start_new_session=True, preexec_fn=take) as run:
        with shown(ours):
            run.reaches(5_000)
        assert run.process.wait(HANGING_S) == 0
    assert "picture" in run.launcher_log
    run.left_nothing_running()
    return run


def test_a_closed_terminal_ends_a_run_in_order(tmp_path: Path) -> None:
    """The live display has nowhere to go then, and the folder gets the rest."""
    run = run_whose_terminal_closes(tmp_path / "out", signal.SIG_DFL, 2_000_000)
    assert run.report["stopped"] is True
    assert Path(run.report["checkpoint"]).is_dir()


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    """SIGHUP stays ignored; from then on a line every ten seconds goes to the folder."""
    run = run_whose_terminal_closes(tmp_path / "out", signal.SIG_IGN, 60_000)
    assert run.report["stopped"] is False
    assert run.report["tokens"] >= 60_000
