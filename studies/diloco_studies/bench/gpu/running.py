"""Does pieces, each in processes of its own, and keeps what came of each as soon as it is there.

    <folder>/<piece>.json    the result; whole, or not there
    <folder>/<piece>/        what its commands left, with their output in log.txt
    <folder>/summary.md      all of it, after each piece

A piece that was interrupted has no result, so the next call does it again: an experiment goes on with the runs that are
missing, any other piece begins anew. Where time runs out, the figures that are there are kept with the failure.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.launcher.launch import PROGRAM
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.replacing import replace
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.sources import ENV_PREFIX
from diloco_studies.bench.gpu.pieces import Figures, Piece, summary

LIMIT_S = 540.0
"""The longest that a piece may take."""
LEAVE_S = 30.0
"""A command whose time is over has so long to write its report."""
BEGIN_S = 60.0
"""No piece is begun with less time left than this."""
WRITTEN = {"status", "reason", "figures", "seconds", "device", "rehearsal"}
"""What a result has at least."""
SUMMARY_FILE, LOG_FILE = "summary.md", "log.txt"
Result = dict[str, Any]


class Failed(DilocoError):
    """A piece; the message says why."""


def device_name() -> str:
    """The first GPU's, asked for in a process of its own: what this one held would be missing from the measurements.

    Raises:
        UsageError: torch can use none.
    """
    code = "import torch; print(torch.cuda.get_device_name())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError(
            "torch cannot use a GPU here: use --rehearse to run the same pieces at a small size on the CPU"
        )
    return asked.stdout.strip()


def read_results(folder: Path, pieces: list[Piece], rehearsal: bool) -> dict[str, Result]:
    """Those of earlier calls, by their piece's name. One that cannot be read is said, and is to do again.

    Raises:
        UsageError: rehearsed ones among measured ones, or the other way round.
    """
    found: dict[str, Result] = {}
    for piece in pieces:
        path = folder / f"{piece.name}.json"
        if path.is_file():
            try:
                found[piece.name] = _read(path)
            except (OSError, ValueError) as error:
                sys.stderr.write(f"warning: {path} cannot be read ({error}): {piece.name} must be run again\n")
    if any(one["rehearsal"] != rehearsal for one in found.values()):
        was = "measured" if rehearsal else "rehearsed"
        raise UsageError(f"{folder} holds {was} results: choose a different --out")
    return found


def _read(path: Path) -> Result:
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not result.keys() >= WRITTEN:
        raise ValueError("it is not a result")
    return result


def do(piece: Piece, folder: Path, device: str, rehearsal: bool, limit_s: float | None = None) -> Result:
    """One piece to its end; the result is in the folder before this returns. limit_s: default `LIMIT_S`.

    Raises:
        KeyboardInterrupt: asked to end; nothing of the piece is kept, and nothing of it runs on.
    """
    own, began, began_unix_s = folder / piece.name, time.monotonic(), time.time()
    limit_s = LIMIT_S if limit_s is None else limit_s
    if not piece.goes_on:
        shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    for name, text in piece.files.items():
        (own / name).write_text(text)
    figures, reason = Figures(), ""
    try:
        for number in range(len(piece.commands)):
            _run(piece.command(number, own.resolve()), own / LOG_FILE, began, limit_s)
    except Failed as error:
        reason = str(error)
    try:
        figures = piece.figures(own)
    except (DilocoError, OSError, ValueError, KeyError) as error:
        reason = reason or (str(error) if isinstance(error, DilocoError) else f"{type(error).__name__}: {error}")
    result = {
        "piece": piece.name,
        "status": "failed" if reason else "ok",
        "reason": reason,
        "figures": figures,
        "seconds": time.monotonic() - began,
        "began_unix_s": began_unix_s,
        "device": device,
        "rehearsal": rehearsal,
        "commands": [" ".join(command) for command in piece.commands],
    }
    replace(folder / f"{piece.name}.json", [f"{dumps(result, indent=1)}\n".encode()])
    return result


def do_all(
    pieces: list[Piece],
    doing: list[Piece],
    folder: Path,
    device: str,
    results: dict[str, Result],
    heard: Callable[[Piece, Result | None], None],
    for_s: float | None = None,
) -> dict[str, Result]:
    """Do some of all pieces, one after another, whatever became of those before. Returns all results.

    results: of earlier calls. heard: told as a piece begins (None), and what came of it. for_s: altogether at most.
    """
    rehearsal, began = device == "cpu", time.monotonic()
    for piece in doing:
        left_s = LIMIT_S if for_s is None else min(LIMIT_S, began + for_s - time.monotonic())
        if for_s is not None and left_s < BEGIN_S:
            break
        heard(piece, None)
        results[piece.name] = do(piece, folder, device, rehearsal, left_s)
        replace(folder / SUMMARY_FILE, [summary(pieces, results, rehearsal).encode()])
        heard(piece, results[piece.name])
    return results


def _run(arguments: list[str], log: Path, began: float, limit_s: float) -> None:
    """A command, as a process that ends with this one; nothing of it is left, however this returns.

    began: its piece, by the monotonic clock. limit_s: of the piece.

    Raises:
        Failed: it did, or took too long.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROGRAM), os.environ.get("PYTHONPATH"))))
    guard = [sys.executable, "-m", "diloco.pipeline.process.signals", str(os.getpid())]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*guard, sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=PROGRAM,
            start_new_session=True,
        )
    try:
        status = process.wait(max(0.0, began + limit_s - time.monotonic()))
    except BaseException as error:  # an interrupt too
        if isinstance(error, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise Failed(f"it took longer than {limit_s:.0f} s; its output: {log}") from error
    if status:
        raise Failed(f"{_last_words(log)} (status {status}; its output: {log})")


def _last_words(log: Path) -> str:
    """The last line that a command wrote, or the last error among its last lines."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-20:]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1][:300]
