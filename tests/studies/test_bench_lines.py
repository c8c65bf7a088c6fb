"""Runs on slow lines: what a line does to packets, what a cell's line carries, and what a forecast says of it."""

import random
from pathlib import Path

import pytest

from diloco.cli import main
from diloco_studies.bench.slow import line_runs, lines_command
from diloco_studies.bench.slow.line_cells import Cell, asked, cells, forecast, line_rates, row
from diloco_studies.bench.slow.packets import Direction, Shape

PARAMS, STEP_S = 5e6, 0.2


def direction(**shape: float) -> Direction:
    made = Direction(random.Random(0))
    made.shape = Shape(**shape)
    return made


def test_a_line_carries_what_its_rate_allows_and_drops_what_its_queue_cannot_hold() -> None:
    line = direction(bytes_per_s=100_000.0, queue_s=1.0)
    for _ in range(200):
        line.put(bytes(1000), 0.0)
    assert line.carried == pytest.approx(101, abs=1), "one on the line, a second's worth before it"
    assert line.dropped == 200 - line.carried
    assert len(list(line.ready(0.505))) == 50
    assert len(list(line.ready(2.0))) == line.carried - 50


def test_packets_are_late_by_the_delay_and_none_overtakes_another() -> None:
    line = direction(delay_s=0.1, jitter_s=0.05)
    for n in range(100):
        line.put(bytes([n]), n * 0.001)
    assert not list(line.ready(0.05))
    assert [packet[0] for packet in line.ready(1.0)] == list(range(100))
    assert line.next_at is None


def test_as_many_are_lost_as_the_line_loses() -> None:
    line = direction(loss=0.1)
    for _ in range(10_000):
        line.put(b"x", 0.0)
    assert line.lost == pytest.approx(1000, rel=0.1)
    assert len(list(line.ready(0.0))) == 10_000 - line.lost


def test_a_line_of_rate_one_carries_a_round_of_the_usual_codec_in_a_round() -> None:
    """In its busier direction: fp32 globals to a learner; values and momenta from the syncer, of whom both ask."""
    rates = line_rates(Cell(1.0), PARAMS, 24 * STEP_S)
    assert rates["learner-0"] * 24 * STEP_S == pytest.approx(4 * PARAMS)
    assert rates["syncer"] * 24 * STEP_S == pytest.approx(8 * PARAMS)
    assert asked(PARAMS, "int8", "int8", 1.0)["learner-0"][0] < asked(PARAMS, "bf16", "fp32", 1.0)["learner-0"][0] / 1.9


def test_a_forecast_has_longer_rounds_on_slower_lines_and_fewer_bytes_a_token() -> None:
    found = [forecast(Cell(rate), PARAMS, STEP_S, 64, 256, 6) for rate in (2.0, 1.0, 0.5, 0.25)]
    assert [one.interval for one in found] == sorted(one.interval for one in found)
    assert [one.bytes_a_token for one in found] == sorted((one.bytes_a_token for one in found), reverse=True)
    assert found[-1].interval <= 16 * 24


def test_cells_have_names_of_their_own_and_a_table_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))
    file = tmp_path / "lines.csv"
    rows = [row(cell, forecast(cell, PARAMS, STEP_S, 64, 256, 6), {"merged_share": 0.5}) for cell in cells()]
    lines_command.write(file, rows)
    assert [lines_command._named(one) for one in lines_command.read(file)] == names


def test_who_may_make_no_lines_is_told_what_they_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(line_runs.os, "geteuid", lambda: 1000)
    assert main(["bench", "lines", "--csv", str(tmp_path / "a.csv")]) == 2
    assert "needs Linux, root and /dev/net/tun" in capsys.readouterr().err
    assert main(["bench", "lines", "--csv", str(tmp_path / "a.csv"), "--only", "1,bf16"]) == 2
    assert "seven values" in capsys.readouterr().err
