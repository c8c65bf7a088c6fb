"""`diloco run --method data-parallel`: start the ranks of the baseline, and show them like any other run.

There is no Redis and no syncer here: rank 0 (`workers/trainer/data_parallel.py`) writes its progress to the output
folder.
"""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

from diloco.launcher.devices import devices_line
from diloco.launcher.display import Screen
from diloco.launcher.folder import Folder, plain
from diloco.launcher.launch import Child, ChildDied, Children, environment, places_of, threads_for
from diloco.launcher.locate import RunFile
from diloco.launcher.report import Outcome
from diloco.options import RunProcess
from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.messages.run import Evaluation, LearnerReport
from diloco.pipeline.process import signals
from diloco.pipeline.view.goodput import goodput
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco.pipeline.view.merged_share import shares
from diloco.pipeline.view.status import EvaluationStatus, LearnerStatus, Status

TICK_S = 0.5
# Time for the ranks to end after the first SIGTERM: longer than the 60 s after which their all-reduce gives up.
STOP_S = 90.0


def _progress(out: Path) -> list[dict[str, Any]]:
    """Return the lines of progress so far, without the last one if it is only half written."""
    path = out / "progress.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def _learner(row: dict[str, Any]) -> LearnerStatus:
    return {
        "incarnation": "",
        "live": True,
        "left": False,
        "versions": [],
        "age_s": 0.0,
        "id": row["id"],
        "step": row["step"],
        "tokens": row["tokens"],
        "tokens_per_s": row["tokens_per_s"],
        "loss": row["loss"],
        "step_s": row["step_s"],
    }


def baseline_status(out: Path, budget_tokens: int | None = None) -> Status:
    """Make the status of a baseline run from its folder, in the shape of `pipeline.view.status`.

    Raises:
        UsageError: no budget is given, and run.json does not have it.
    """
    lines = _progress(out)
    last: dict[str, Any] = lines[-1] if lines else {"tokens": 0, "elapsed_s": 0.0, "learners": []}
    measured = [line for line in lines if line["val_loss"] is not None]
    budget = budget_tokens or RunFile.budget(out)
    evaluation: EvaluationStatus | None = None
    if measured:
        at = measured[-1]
        evaluation = {"loss": at["val_loss"], "final": False, "tokens": at["tokens"], "elapsed_s": at["elapsed_s"]}
    return {
        "run": out.name,
        "own_loop": False,
        "phase": "running" if lines else "waiting",
        "reason": "data-parallel" if lines else "waiting for the ranks",
        "tokens": last["tokens"],
        "budget_tokens": budget,
        "progress": min(1.0, last["tokens"] / budget),
        "merged_tokens": last["tokens"],
        "merged_share": shares((), 0.0, last["tokens"], last["tokens"]),
        "goodput": goodput((), None, (0, 0, {}), None, (0.0, 0.0, 0.0)),
        "outer_steps": 0,
        "refused": {},
        "tokens_lost": {"overwritten": 0, "rejected": 0, "died": 0, "pending": 0},
        "elapsed_s": last["elapsed_s"],
        "learners": [_learner(row) for row in last["learners"]],
        "syncers": [],
        "fragments": [],
        "evaluation": evaluation,
        "outer_step": None,
        "warnings": [],
    }


def _start(settings: RunProcess, folder: Folder, children: Children) -> float:
    """Start all ranks, and return the Unix time before the first one was started."""
    began_unix_s = time.time()
    threads = threads_for(settings.learners, settings.threads)
    environ = environment(threads, None) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = ["--config", str(folder.settings), "--threads", str(threads), "--learners", str(settings.learners)]
    for number, place in enumerate(places_of(settings)):
        own = ["--device", place.device, "--rank", str(number), "--out", str(folder.path)]
        children.start(f"learner-{number}", ["rank", *shared, *own], environ | place.environ)
    folder.write_run(None, settings, children.pids())
    return began_unix_s


def _failed(ranks: list[Child], stopped: bool) -> Child | None:
    """Return a rank that ended with an error, if any did; the signal of a stop is not an error."""
    harmless = (None, 0, -signal.SIGTERM, signals.AGAIN_STATUS) if stopped else (None, 0)
    return next((rank for rank in ranks if rank.status not in harmless), None)


async def _supervise(settings: RunProcess, folder: Folder) -> tuple[float, bool]:
    """Watch the ranks until all have ended. Return the Unix time before their start, and whether the user stopped them.

    Raises:
        ChildDied: a rank died, so that the others cannot continue.
        DilocoError: the ranks did not stop in time.
    """
    stop, task = asyncio.Event(), asyncio.current_task()
    assert task is not None  # noqa: S101  # this is a coroutine
    signals.install_signal_handlers(asyncio.get_running_loop(), stop, task.cancel)
    stopped_s: float | None = None
    with Screen() as screen, Children(folder.logs) as children:
        began_unix_s = _start(settings, folder, children)
        screen.note(f"output folder {folder.path}")
        if line := devices_line(places_of(settings)):
            screen.note(line)
        ranks = children.named("learner-")
        while any(rank.alive for rank in ranks):
            if stopped_s is not None and not all(rank.alive for rank in ranks) and not _progress(folder.path):
                return (
                    began_unix_s,
                    True,
                )  # a rank left before the first step: the others would wait forever for its all-reduce
            if failed := _failed(ranks, stopped_s is not None):
                raise ChildDied(failed.describe_end())
            screen.show(baseline_status(folder.path, settings.tokens))
            if stop.is_set() and stopped_s is None:
                stopped_s = time.monotonic()
                screen.note("stopping (Ctrl-C again stops everything at once)")
                for rank in ranks:
                    rank.send(signal.SIGTERM)
            if stopped_s is not None and time.monotonic() > stopped_s + STOP_S:
                raise DilocoError(f"the ranks did not stop in {STOP_S:.0f} s")
            await asyncio.sleep(TICK_S)
        if failed := _failed(ranks, stopped_s is not None):
            raise ChildDied(failed.describe_end())
    return began_unix_s, stopped_s is not None


def _outcome(settings: RunProcess, folder: Folder, began_unix_s: float, stopped: bool) -> Outcome | None:
    """Read what the ranks wrote to the folder; return None if they were stopped before the first step."""
    path = folder.path / "result.json"
    if stopped and not path.is_file():
        return None
    result = json.loads(path.read_text())
    lines, started = _progress(folder.path), result["started_unix_s"]
    measured = [line for line in lines if line["val_loss"] is not None]
    reports = [
        LearnerReport(
            learner=row["id"],
            incarnation="00000000",
            step=row["steps"],
            tokens=row["tokens"],
            overwritten=0,
            published=0,
            versions=(),
            loss=None,
            tokens_per_s=row["tokens_per_s"],
            step_s=row["step_s_median"],
            step_s_median=row["step_s_median"],
            blocked_s=row["blocked_s"],
            wall_s=result["wall_s"],
            left=True,
            host="",
            device=result["device"],
        )
        for row in result["learners"]
    ]
    evaluations = [
        Evaluation(
            loss=line["val_loss"],
            tokens=line["tokens"],
            versions=(),
            unix_s=started + line["elapsed_s"],
            elapsed_s=line["elapsed_s"],
            final=line is measured[-1],
        )
        for line in measured
    ]
    return Outcome(
        settings=plain(settings),
        stopped=stopped,
        wall_s=started + result["wall_s"] - began_unix_s,
        elapsed_s=result["wall_s"],
        outer_steps=0,
        started_unix_s=started,
        ledger_inputs=LedgerInputs(reports=tuple(reports)),
        evaluations=evaluations,
        progress=[(started + line["elapsed_s"], line["tokens"]) for line in lines],
    )


async def run_baseline(settings: RunProcess, folder: Folder) -> Outcome | None:
    """Train with all ranks; return None if the run was stopped before its first step.

    Raises:
        DilocoError: a rank died.
    """
    began_unix_s, stopped = await _supervise(settings, folder)
    return _outcome(settings, folder, began_unix_s, stopped)
