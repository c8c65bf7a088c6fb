"""Learners in five trainers of others, as processes of one run: one is killed and comes back, every token counts."""

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.run import SeenReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import LedgerInputs, read_ledger_inputs
from diloco.tape import read_archive
from tests import HANGING_S
from tests.parties import Parties
from tests.trainers import scripts

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.redis,
    pytest.mark.filterwarnings("default"),  # of libraries that are not ours
]
KINDS = ("transformers", "trl", "lightning", "accelerate", "attach")
KILLED = "transformers"


async def left(url: str) -> tuple[Spec, LedgerInputs, list[SeenReport]]:
    async with open_bus(url, "trainers") as bus:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, await read_ledger_inputs(bus, spec.sync.fragments, 5.0), await bus.read_reports()


def test_five_trainers_make_one_model_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    """The ledger closes to the token, each counted what its trainer made, and all save the same learned model."""
    forks = multiprocessing.get_context("forkserver")  # whose parent has read the libraries, which takes long
    forks.set_forkserver_preload([*scripts.LIBRARIES, scripts.__name__])
    started: list[Any] = []
    with Parties(tmp_path) as here:
        settings = {"DILOCO_REDIS_URL": here.url, "DILOCO_SYNC_INTERVAL": "8", "DILOCO_FRAGMENTS": "4"}

        def learner(kind: str) -> Any:
            started.append(forks.Process(target=scripts.main, args=(kind, tmp_path, KINDS, settings)))
            started[-1].start()
            return started[-1]

        def all_trained() -> bool:
            said = {kind: here.said(kind).splitlines().count("trained") for kind in KINDS}
            return all(said[kind] == 1 + (kind == KILLED) for kind in KINDS)

        syncer = here.syncer("--run", "trainers", "--tape-dir", tmp_path / "tape", env=settings)
        try:
            learners = {kind: learner(kind) for kind in KINDS}
            here.until(lambda: list((tmp_path / f"{KILLED}-checkpoints").glob("checkpoint-*/trainer_state.json")))
            learners[KILLED].kill()
            learners[KILLED].join()
            learners[KILLED] = learner(KILLED)
            here.until(all_trained)
            (tmp_path / "hurry").touch()
            for one in learners.values():
                one.join(HANGING_S)
            assert [one.exitcode for one in learners.values()] == [0] * 5, here.shown()
            assert here.ends(syncer) == [0]
        finally:
            for process in started:
                process.kill()
        spec, inputs, reports = asyncio.run(left(here.url))
    parts = accounts(read_archive(tmp_path / "tape"), inputs, layout_of(spec.tensors))
    assert problems(parts) == []
    assert [part.unaccounted for part in parts] == [0] * 6
    assert [part.learner for part in parts if not part.left] == [KILLED]
    for kind in KINDS:
        (part,) = [part for part in parts if part.learner == kind and part.left]
        (said,) = [line for line in (tmp_path / f"{kind}.log").read_text().splitlines() if line.startswith("end ")]
        assert part.tokens == scripts.STEP_TOKENS * int(said.split()[1]) > 0
    assert {seen.report.learner for seen in reports if seen.report.loss is None and seen.report.left} == {"accelerate"}
    assert "moments_recovered" in (tmp_path / f"{KILLED}.log").read_text()
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype="float32") for kind in KINDS]
    first, *others = (model.state_dict() for model in models)
    for other in others:
        assert first.keys() == other.keys()
        assert all(bool((first[name] == other[name]).all()) for name in first), "all have the finished run's model"
    assert scripts.loss_of(scripts.llama()) > 3.0
    assert scripts.loss_of(models[0]) < 1.0, "the global model has hardly learned"


@pytest.mark.parametrize("kind", ["transformers", "trl", "lightning", "accelerate", "fabric"])
def test_it_takes_two_lines(kind: str) -> None:
    """Beyond the script's ordinary form."""
    assert scripts.lines_beyond(kind) == 2
