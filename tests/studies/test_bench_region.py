"""Real learners behind one line, with a cache beside them: what the line carries, also where one of them is killed."""

import math
from typing import get_args

import pytest
from rich.console import Console

from diloco.pipeline.messages.wire import GlobalCodec
from diloco_studies.bench.region.measuring import Case, measure

pytestmark = [pytest.mark.slow, pytest.mark.redis]


def measured(**given: object) -> dict[str, float]:
    return measure(Case(**{"model": "tiny", "line_bytes_s": 2e6, **given}), Console(quiet=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("global_codec", get_args(GlobalCodec))
def test_the_line_carries_one_learners_pull(global_codec: str) -> None:
    """From the first load on. Headers, heads and reports of all of them are in the sum; small ones count for more."""
    found = measured(global_codec=global_codec, model="small", line_bytes_s=8e6, seconds=25.0)
    assert found["first_load_over_one"] < 1.2
    assert found["down_over_one_pull"] < 1.2
    assert math.isclose(found["from_region_mb"], 3 * found["from_main_mb"], rel_tol=0.2)
    assert found["warned"] == 0


def test_a_learner_killed_as_it_pulls_for_all_costs_the_line_no_second_pull() -> None:
    found = measured(strike="claimant", model="small", line_bytes_s=8e6, seconds=40.0)
    assert found["down_over_one_pull"] < 1.2
    assert found["warned"] == 0


def test_a_cache_that_was_killed_is_used_again_when_it_is_back() -> None:
    """By all four, each of which has said once that it was away."""
    found = measured(strike="cache", seconds=60.0, pace_s=0.5)
    assert found["warned"] == found["found_again"] == 4
    assert found["from_region_mb"] > found["from_main_mb"] / 2
