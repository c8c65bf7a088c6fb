"""What only shows a run: no number of a peer stops it, and a mistake of its own costs it one poll, and nothing else."""

import asyncio
import json
import math
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from structlog.testing import capture_logs

from diloco.launcher import finish
from diloco.launcher.display import plain_line, render
from diloco.launcher.finish import conclude
from diloco.launcher.folder import Folder
from diloco.launcher.page import MODEL_FILE, left_in
from diloco.launcher.report import Outcome, build, learner_rows, summary, summary_so_far
from diloco.options import RunProcess
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Evaluation, LearnerReport
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco.pipeline.view.loss_curves import loss_curves
from diloco.pipeline.view.page.collector import AGAIN_S, Collector
from diloco.pipeline.view.page.join_command import RedisRoute
from diloco.pipeline.view.page.last_poll import Reading
from diloco.pipeline.view.page.model import PageModel, Poll
from diloco.pipeline.view.status import build_status
from diloco.syncer import run_metrics
from diloco.syncer.metrics import registry_of
from diloco.syncer.run_metrics import FIGURES, RunMetrics
from diloco.tracking import curves
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests import samples
from tests.virtual_run import RUN, end, under_way

NOW_S = 2e9
GREATEST: tuple[Any, ...] = (math.inf, math.nan, 1e308, 1e60, 1e11, 1e9, 2**110, 2**62, 2**48, 2**20)
NUMBERS = [
    name
    for name, field in LearnerReport.model_fields.items()
    if "float" in str(field.annotation) or "int" in str(field.annotation)
]


def greatest(name: str) -> list[Any]:
    """What a report may say there at most, of what a float and an integer of the wire may be."""
    pair = name in ("versions", "threads", "earlier")
    taken = []
    for number in GREATEST:
        try:
            said = samples.report(**{name: (number, number) if pair else number})
            taken.append(getattr(decode(LearnerReport, encode(said)), name))
        except (ValueError, BadMessage):
            continue
    return taken


def show(reports: list[LearnerReport], evaluation: Evaluation) -> None:
    """All that shows a run, at two polls at it."""
    reading, model, rounds = Reading(), PageModel("run"), curves.Rounds()
    losses = curves.Losses()
    registry = registry_of("run")
    for at_s in (0.0, 10.0):
        now_s = NOW_S + at_s
        seen = [samples.seen(age_s=0.1).model_copy(update={"report": one}) for one in reports]
        heads = [samples.head(p, version=3, merged_tokens=80) for p in range(2)]
        given = samples.spec(), samples.run_state(), seen, heads, evaluation, [], now_s, 5.0, {"0": "s"}, ["0", "0"]
        status = build_status("run", *given)
        poll = Poll(
            **{"now_s": now_s, "status": status, "evaluations": [evaluation], "info": BusInfo("id", "7", 0, 0)},
            **{"shares": {0: 0.5, 1: 0.5}, "curves": loss_curves(seen, now_s, 0.0)},
        )
        reading.see(poll)
        model.see(poll)
        dumps(model.patch())
        curves.now(reading, poll)
        losses.see(poll)
        rounds.see(poll)
        Console(width=120).print(render(status))
        plain_line(status)
        summary_so_far(status, poll.curves.values())
    registry.register(RunMetrics(reading, VirtualNow(), lambda: True))
    assert generate_latest(registry).count(b"\ndiloco_") >= len(FIGURES) - 3  # of a server without limit, no rewind
    dumps(learner_rows(reports))
    built = build(outcome(reports, evaluation))
    dumps(built)
    summary(built)


class VirtualNow:
    """A clock that stands still."""

    def now(self) -> float:
        return NOW_S

    def unix(self) -> float:
        return NOW_S + 10.0


def outcome(reports: list[LearnerReport], evaluation: Evaluation) -> Outcome:
    return Outcome(
        settings={"method": "decoupled", "seed": 0, "run": "run", "learners": 1},
        stopped=False,
        wall_s=1.0,
        elapsed_s=1.0,
        outer_steps=1,
        started_unix_s=NOW_S,
        ledger_inputs=LedgerInputs(reports=reports),
        evaluations=[evaluation],
        curves=loss_curves([samples.seen().model_copy(update={"report": one}) for one in reports], NOW_S, 0.0).values(),
    )


SANE = samples.evaluation(unix_s=NOW_S, final=True)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_greatest_numbers_of_a_report_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By page, metrics, curves, status and report: 1e308 is no number of seconds, and nothing overflows by another."""
    said = greatest(name)
    assert said
    for value in said:
        report = samples.report(**{name: value})
        second = samples.report("l1", incarnation="1" * 8, **{name: value})
        show([report, second], SANE)
        if name != "loss":
            assert all(number < 1e100 for number in (value if isinstance(value, tuple) else [value]))


@pytest.mark.parametrize(("loss", "kept"), [(1e308, math.inf), (-1e308, -math.inf), (math.inf, math.inf), (2.5, 2.5)])
def test_the_greatest_numbers_of_an_evaluation_are_shown(
    loss: float, kept: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss beyond what any is counts as infinite; NaN is one, too. The picture is drawn of them."""
    for told in (loss, math.nan):
        raw = SANE.model_copy(update={"loss": told, "tokens": 2**62, "elapsed_s": 1e11})
        found = decode(Evaluation, encode(raw))
        assert math.isnan(found.loss) if math.isnan(told) else found.loss == kept
        show([samples.report()], found)
        built = build(outcome([samples.report()], found))
        finish_picture(built, tmp_path / "loss.png")


def finish_picture(built: dict[str, Any], path: Path) -> None:
    from diloco.launcher.plot import draw

    draw(built, [], "title", "ledger", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_page_that_fails_says_so_and_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mistake of ours: who follows is told instead of seeing a page that stands still, and has it again soon."""
    fails = [True]
    see = PageModel.see

    def seeing(model: PageModel, poll: Poll) -> None:
        see(model, poll)
        if fails[0] and poll.status["outer_steps"] > 4:
            raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(PageModel, "see", seeing)

    async def main() -> None:
        world, party = await under_way(2)
        collector = Collector(MemoryBus(RUN, world.clock, world.store), VirtualClock())
        running, said = asyncio.create_task(collector.run()), list[str]()
        async with aclosing(collector.follow()) as events:
            async for event in events:
                data = json.loads(event.decode().split("data: ")[1])
                if not (said and data.get("sentence") is None):
                    said.append(data["sentence"]["text"])
                if "could not be created (OverflowError: cannot convert" in said[-1]:
                    fails[0] = False
                elif not fails[0] and "well" in said[-1]:
                    break
        assert collector.model.snapshot()["fine"]["lanes"], "it is drawn again, from the start"
        assert collector.reading.poll is not None
        running.cancel()
        await end(*party)

    with capture_logs() as lines:
        run_virtual(main())
    (line,) = [line for line in lines if line["event"] == "page_failed"]
    assert line["retry_s"] == AGAIN_S
    assert isinstance(line["exc_info"], OverflowError)


def test_a_figure_that_fails_costs_metrics_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading()
    given = samples.spec(), samples.run_state(), [samples.seen()], [samples.head()], None, [], NOW_S + 10, 5.0
    reading.see(Poll(now_s=NOW_S + 10, status=build_status("run", *given)))
    registry = registry_of("run")
    registry.register(RunMetrics(reading, VirtualNow(), lambda: True))
    whole = generate_latest(registry)
    broken = run_metrics.Figure("diloco_run_broken", "fails", lambda *_: iter([((), 1 / 0)]))
    monkeypatch.setattr(run_metrics, "FIGURES", (broken, *FIGURES))
    with capture_logs() as lines:
        assert generate_latest(registry) == whole
    assert [line["figure"] for line in lines if line["event"] == "figure_failed"] == ["diloco_run_broken"]


async def test_a_page_that_cannot_be_kept_costs_a_run_its_report_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the run's end is done all the same."""

    def snapshot(_: PageModel) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(PageModel, "snapshot", snapshot)
    told: list[str] = []
    async with left_in(tmp_path, MemoryBus("run", LoopClock()), HttpSettings(), told.append, RedisRoute()):
        pass
    assert told[-1] == "the page could not be created: OverflowError: too large"
    assert not (tmp_path / MODEL_FILE).exists()


def test_a_picture_and_a_text_that_cannot_be_made_cost_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are among its warnings."""
    pytest.importorskip("matplotlib")
    from diloco.launcher import plot

    def fail(*_: Any) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(plot, "draw", fail)
    monkeypatch.setattr(finish, "find_checkpoint", lambda _: tmp_path)
    monkeypatch.setattr(finish, "read_globals", fail)
    monkeypatch.setattr(finish, "is_of", lambda *_: True)
    folder = Folder(tmp_path)
    conclude(outcome([samples.report()], SANE), RunProcess(), folder)
    report = json.loads(folder.report.read_text())
    assert report["warnings"] == [
        "the text could not be created: OverflowError: too large",
        "the picture could not be created: OverflowError: too large",
    ]
    assert report["plot"] is None
    assert report["global_val_loss"] == 2.5
    assert "warning: the picture could not be created" in capsys.readouterr().out
