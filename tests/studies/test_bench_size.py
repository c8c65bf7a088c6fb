"""What a run of a size takes, beside what the plan says."""

import sys
from pathlib import Path

import pytest

from diloco.pipeline.fragments import LEVEL
from diloco.pipeline.needs import needs_of, pace_of
from diloco.pipeline.redis_memory import offered_bytes
from diloco.pipeline.site import Site
from diloco_studies.bench.memory import checkpoints, size

LEAST = 0.4
"""Of what is planned, that a run takes whose windows are all open at once."""


@pytest.mark.parametrize("fragments", [8, 16, 24])
@pytest.mark.parametrize("model", ["124m", "350m", "1b"])
def test_the_large_built_in_models_have_fragments_of_equal_size(model: str, fragments: int) -> None:
    """A tenth above the mean at most; by their shapes, so no memory is taken."""
    sizes = [one.elements for one in size.case_of(model, fragments, 1, 1).layout.fragments]
    assert len(sizes) == fragments
    assert max(sizes) * len(sizes) / sum(sizes) <= LEVEL


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_takes_what_the_plan_says(tmp_path: Path) -> None:
    """Redis and the syncer, at their peaks, no more than planned and no less than 0.4 of it; offers of moments are not
    in it, for there are none. To save and to resume take a fragment's memory, not the model's.
    """
    case = size.case_of("base", 8, learners=2, merges=24, at_once=True)
    elements = case.layout.elements
    site = Site(params=float(elements))
    pace = pace_of(site, 2, 2, "bf16", "fp32", case.spec.sync.outer)._replace(fragments=8)
    planned = needs_of(site, pace, 2, 2, case.spec.sync.outer)
    stages = {one.name: one for one in size.measure(case, tmp_path)}
    assert list(stages) == ["version 0", "24 merges", "stop and save", "resume", "a merge after it"]
    redis = planned.redis_memory_bytes - offered_bytes(elements)
    assert LEAST * redis < stages["24 merges"].redis_bytes < redis
    assert LEAST * planned.syncer_memory_bytes < stages["24 merges"].peak_bytes < planned.syncer_memory_bytes
    model = 4 * elements
    for name in ("stop and save", "resume"):
        assert stages[name].peak_bytes - max(stages[name].before_bytes, size.PROGRAM_BYTES) < model, name
    saved = sum(one.stat().st_size for one in tmp_path.rglob("*.safetensors"))
    assert saved == pytest.approx(planned.checkpoint_bytes, rel=0.01)


def test_a_child_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    """Of a checkpoint's memory: nobody waits for an answer that will not come."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SystemExit, match="has failed"):
        checkpoints.main(params=1e4, fragments=2, global_codec="fp32", place=str(tmp_path / "file"))
