"""torchtitan's debug model over two ranks, by FSDP2 or tensor parallelism, as two learners; one is killed."""

import asyncio
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torchtitan")

from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.run import LearnerReport
from tests.parties import ROOT
from tests.ranks.party import Party, children_of

pytestmark = [pytest.mark.trainers, pytest.mark.redis]
SCRIPT = ROOT / "tests/trainers/titan.py"


def files(folder: Path) -> None:
    """Write a text and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(2000)))


async def reports_of(url: str, learner: str) -> list[LearnerReport]:
    """The last reports of a learner's lives."""
    async with open_bus(url, "ranks") as bus:
        return [seen.report for seen in await bus.read_reports() if seen.report.learner == learner]


def test_two_torchtitans_learn_together_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    """It has its layers divided then, which were sharded by rows. Both end with the run's model and save it, and each
    token counts once."""
    files(tmp_path)
    with Party(tmp_path, sync_interval=8, fragments=4) as party:

        def titan(name: str, parallel: int = 1) -> object:
            launched = "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()
            return party.start(f"{name}.log", {}, "-m", *launched, SCRIPT, name, tmp_path, parallel)

        one, two = titan("one"), titan("two")
        party.until(lambda: sum(one.tokens for one in asyncio.run(reports_of(party.url, "two"))) > 2000)
        os.kill(children_of(two)[0], signal.SIGKILL)
        assert party.ended(two) != [0]
        two = titan("two", parallel=2)
        party.until(lambda: len(party.said("two", "learner_joined")) == 2)
        (tmp_path / "hurry").touch()
        assert party.ended(one, two) == [0, 0], party.shown()
        ends = [line.split() for name in ("one", "two") for line in party.said(name, "ended")]
        assert len({digest for _, _, _, digest in ends}) == 1, "all ranks end with the run's model"
        (_, steps, tokens, _), (_, same_steps, of_other_rank, _), (_, _, same_tokens, _), _ = ends
        assert steps == same_steps
        (report,) = asyncio.run(reports_of(party.url, "one"))
        assert report.tokens == int(tokens) + int(of_other_rank)
        assert int(same_tokens) in [life.tokens for life in asyncio.run(reports_of(party.url, "two"))]
        assert report.loss is not None
        assert report.loss < 0.8 * math.log(2048), "a vocabulary of 2048"
        saved = tmp_path / "one" / "checkpoint"
        assert [path.name for path in saved.glob("step-*")] == [f"step-{steps}"]
        shutil.rmtree(saved)
        assert party.ended(titan("one")) == [0]
        assert [path.name for path in saved.glob("step-*")] == ["step-1"], "the run was over, and its values are saved"


@pytest.mark.filterwarnings("default")  # of libraries that are not ours
@pytest.mark.parametrize("kind", ["pipeline", "expert"])
def test_parallelism_that_a_learner_cannot_have_is_refused_by_name(kind: str) -> None:
    """Before anything connects."""
    from diloco.integrations.torchtitan import train

    dims = {f"{name}_enabled": name[0] == kind[0] for name in ("pp", "ep")}
    with pytest.raises(UsageError, match=f"{kind}_parallel_degree"):
        train(SimpleNamespace(parallel_dims=SimpleNamespace(**dims)))
