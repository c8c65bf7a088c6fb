"""`deploy/again.sh`: what is started again on a machine without a scheduler, and what is not."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.process.signals import AGAIN_STATUS
from tests import HANGING_S
from tests.parties import wait_for

AGAIN = Path(__file__).parents[2] / "deploy/again.sh"
LIVES = """
import pathlib, sys
lives = pathlib.Path(sys.argv[1])
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
sys.exit(int(sys.argv[1 + len(lives.read_text())]))
"""
STAYS = """
import pathlib, signal, sys
lives = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
signal.pause()
"""


@pytest.mark.parametrize("statuses", [(0,), (2,), (75, 0), (1, 75, 137, 0), (1, 2)], ids=str)
def test_what_is_not_done_is_started_again(tmp_path: Path, statuses: tuple[int, ...]) -> None:
    """Until it ends with 0: its run is finished. Or with 2: it was refused, and would be again."""
    command = [str(AGAIN), sys.executable, "-c", LIVES, str(tmp_path / "lives"), *map(str, statuses)]
    done = subprocess.run(command, env={"AFTER_S": "0"}, capture_output=True, timeout=HANGING_S, check=False)
    assert done.returncode == statuses[-1], done.stderr
    assert len((tmp_path / "lives").read_text()) == len(statuses)


def test_what_is_asked_to_end_does_and_stays_down(tmp_path: Path, popen: Callable[..., Any]) -> None:
    """SIGTERM is handed on, once; the status is the command's."""
    lives = tmp_path / "lives"
    process = popen([str(AGAIN), sys.executable, "-c", STAYS, str(lives)], env={"AFTER_S": "0"})
    wait_for(lives.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGING_S) == AGAIN_STATUS
    assert lives.read_text() == "x"
