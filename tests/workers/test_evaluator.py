"""Promises about the evaluator, on the bus in memory, and about sampling from a checkpoint."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from diloco.export import read_globals
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import OtherFormat, RunReplaced, UsageError, exit_status
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import FORMAT
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.settings import EvaluatorProcess, SyncSettings, TrainerSettings
from diloco.workers import evaluator as library
from diloco.workers.evaluator import Evaluator
from diloco.workers.exchange import evaluating
from diloco.workers.exchange.evaluating import Evaluating
from diloco.workers.parameters import FragmentParameters, tensor_table
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data_parallel import save
from diloco.workers.trainer.evaluator_process import built_in
from diloco.workers.trainer.models.gpt import GPT, build
from diloco.workers.trainer.recipe import held_out_loss, trainer_spec
from diloco.workers.trainer.sample import Loaded, load_model, sample
from diloco_studies.virtual.memory import MemoryBus
from tests import HANGING_S, samples


class Run:
    """A run on the bus whose globals are what the test says."""

    def __init__(self, book: Path) -> None:
        self.bus = MemoryBus("run", LoopClock())
        asked = TrainerSettings(data=str(book), seq_len=32)
        sync = SyncSettings(fragments=2, chunk_bytes=64 * 1024, global_codec="fp32")
        self.text = open_text(str(book))
        self.spec = Spec(
            sync=sync.sync_spec(),
            tensors=tensor_table(build("tiny", 0), sync),
            trainer=trainer_spec(asked, self.text),
        )
        self.layout = layout_of(self.spec.tensors)
        self.heads: dict[int, tuple[int, bytes]] = {}

    async def commit(self, model: GPT, p: int) -> None:
        """Make fragment p of the globals that of a model."""
        held = self.heads.get(p)
        version = held[0] + 1 if held else 0
        flat = FragmentParameters(model, self.layout).snapshot(p).numpy()
        chunk_bytes = self.spec.sync.chunk_bytes
        digest = await samples.commit(self.bus, p, version, flat, expected=held, chunk_bytes=chunk_bytes)
        self.heads[p] = (version, digest)

    async def state(self, phase: Phase, tokens: int, began: float = 0.0) -> None:
        manifest = tuple(self.heads[p] for p in sorted(self.heads)) if phase is Phase.FINISHED else ()
        told = {"phase": phase, "tokens": tokens, "budget_tokens": 1000, "manifest": manifest}
        await self.bus.write_state(samples.run_state(**told, started_unix_s=began))

    def evaluating(self, every_s: float = 0.0, tokens: int = 64, **told: Any) -> Evaluating:
        return Evaluating(self.spec, built_in(self.spec, EvaluatorProcess(eval_tokens=tokens, **told)), every_s)

    async def evaluations(self) -> list[Any]:
        return [evaluation for _, evaluation in await self.bus.read_evaluations()]


async def test_it_measures_the_globals_and_ends_with_the_manifest(book: Path) -> None:
    """It waits for all heads, measures what is there, again once a fragment has moved, and not before; and once
    finished what the manifest says, as final."""
    run = Run(book)
    evaluator = run.evaluating(tokens=512)
    first, second = build("tiny", 0), build("tiny", 1)
    assert not await evaluator.look(run.bus)
    await run.state(Phase.RUNNING, 10)
    await run.commit(first, 0)
    assert not await evaluator.look(run.bus)
    assert await run.evaluations() == []
    await run.commit(first, 1)
    for _ in range(3):
        assert not await evaluator.look(run.bus)
    assert len(await run.evaluations()) == 1
    await run.commit(second, 1)
    assert not await evaluator.look(run.bus)
    await run.commit(second, 0)
    await run.state(Phase.FINISHED, 20)
    assert await evaluator.look(run.bus)

    validation = Blocks(run.text.validation, 32).spread(512)
    expected = [held_out_loss(model, validation, torch.device("cpu")) for model in (first, second)]
    found = await run.evaluations()
    assert [found[0].loss, found[-1].loss] == pytest.approx(expected)
    assert [(e.tokens, e.versions, e.final) for e in found] == [
        (10, (0, 0), False),
        (10, (0, 1), False),
        (20, (1, 1), True),
    ]


async def test_a_run_of_another_wire_format_ends_it(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask again, or to start it again, helps only once somebody has updated a party."""
    run = Run(book)

    async def connect(*_: object) -> MemoryBus:
        return run.bus

    monkeypatch.setattr(evaluating, "connect", connect)
    run.bus.store.values[run.bus.keys.spec] = msgpack.packb({**run.spec.model_dump(), "format": FORMAT + 1})
    async with asyncio.timeout(HANGING_S):
        with pytest.raises(OtherFormat) as told:
            await evaluating.follow("", "run", lambda spec: run.evaluating(), asyncio.Event())
    assert exit_status(told.value) == 2


@pytest.mark.parametrize("more_tokens", [0, 1])
def test_the_loss_of_another_run_of_the_name_is_not_given_out_as_this_ones(
    book: Path, monkeypatch: pytest.MonkeyPatch, more_tokens: int
) -> None:
    """Redis was emptied, and a fresh learner began anew, perhaps with another budget: `evaluate` says so, each time,
    and adds nothing to the new run. Whoever has measured nothing yet measures what is there."""
    run = Run(book)

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[MemoryBus]:
        yield run.bus

    async def begin(model: GPT, began: float) -> None:
        run.bus = MemoryBus("run", LoopClock())
        run.heads.clear()
        await run.bus.propose_spec(encode(run.spec))
        await run.state(Phase.RUNNING, 10, began)
        for p in (0, 1, 0, 1):
            await run.commit(model, p)

    monkeypatch.setattr(library, "open_bus", opened)
    first = Evaluator(build("tiny", 0), lambda model: 1.0, redis_url="redis://nowhere")
    asyncio.run(begin(build("tiny", 0), 5.0))
    assert first.evaluate() == 1.0
    other = run.spec.sync.model_copy(update={"tokens": run.spec.sync.tokens + more_tokens})
    run.spec = run.spec.model_copy(update={"sync": other})
    asyncio.run(begin(build("tiny", 1), 6.0))
    for _ in range(2):
        with pytest.raises(RunReplaced, match="This evaluator has measured the run that began"):
            first.evaluate()
    assert asyncio.run(run.evaluations()) == []
    assert Evaluator(build("tiny", 0), lambda model: 2.0, redis_url="redis://nowhere").evaluate() == 2.0


async def test_evaluations_keep_their_distance(book: Path) -> None:
    """Within `eval_every` of the last one nothing is measured, unless the run is finished."""
    run = Run(book)
    evaluator = run.evaluating(every_s=3600.0)
    await run.state(Phase.RUNNING, 10)
    for model in (build("tiny", 0), build("tiny", 1)):
        for p in range(2):
            await run.commit(model, p)
        await evaluator.look(run.bus)
    assert len(await run.evaluations()) == 1
    await run.state(Phase.FINISHED, 20)
    assert await evaluator.look(run.bus)
    assert [e.final for e in await run.evaluations()] == [False, True]


async def test_a_payload_that_went_is_looked_up_again(book: Path) -> None:
    """A replaced payload that is gone when it is read does no harm: the next look finds the new head."""
    run = Run(book)
    evaluator = run.evaluating()
    await run.state(Phase.RUNNING, 10)
    for p in range(2):
        await run.commit(build("tiny", 0), p)
    read_chunks = run.bus.read_chunks

    async def gone(*asked: Any, **named: Any) -> list[bytes]:
        return []

    run.bus.read_chunks = gone  # type: ignore[method-assign]
    assert not await evaluator.look(run.bus)
    run.bus.read_chunks = read_chunks  # type: ignore[method-assign]
    await evaluator.look(run.bus)
    assert len(await run.evaluations()) == 1


def test_the_text_may_lie_elsewhere_here(book: Path, tmp_path: Path) -> None:
    """The spec's path need not exist on the evaluator's machine if it is told another one."""
    run = Run(book)
    moved = book.rename(tmp_path / "moved.txt")
    with pytest.raises(UsageError, match=r"book\.txt"):
        run.evaluating()
    run.evaluating(data=str(moved))


def test_a_foreign_models_run_is_refused(book: Path) -> None:
    run = Run(book)
    with pytest.raises(UsageError, match="not started by the built-in trainer"):
        built_in(run.spec.model_copy(update={"trainer": {}}), EvaluatorProcess())


def loaded_from(folder: Path) -> Loaded:
    found = read_globals(folder)
    return load_model(found.folder, found.trainer, found.tensors)


def test_a_checkpoint_gives_back_its_model_and_its_text(tmp_path: Path) -> None:
    """Parameters come back exactly; the same seed gives the same sample, which begins with its prompt."""
    model = build("tiny", 5)
    save(model, {"trainer": {"model": "tiny", "seed": 0, "seq_len": 16}}, tmp_path)
    loaded = loaded_from(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), model.parameters(), strict=True))
    texts = [sample(loaded, "naïve ", 20, 1.0, 40, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("naïve ")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A missing, damaged or unknown one is named in one line."""
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        loaded_from(tmp_path)
    save(build("tiny", 0), {"trainer": {"model": "small", "seed": 0}}, tmp_path)
    with pytest.raises(UsageError, match="does not fit model 'small'"):
        loaded_from(tmp_path)
    save(build("tiny", 0), {"trainer": {}}, tmp_path)
    with pytest.raises(UsageError, match="does not belong to the built-in"):
        loaded_from(tmp_path)
    save(build("tiny", 0), {"trainer": {"model": "tiny", "seed": 0}}, tmp_path)
    loaded_from(tmp_path)
    whole = (tmp_path / "globals.safetensors").read_bytes()
    (tmp_path / "globals.safetensors").write_bytes(whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:])
    with pytest.raises(UsageError, match=r"globals\.safetensors is damaged: its digest differs"):
        loaded_from(tmp_path)
    (tmp_path / "globals.safetensors").write_bytes(np.zeros(100, np.uint8).tobytes())
    with pytest.raises(UsageError, match="damaged"):
        loaded_from(tmp_path)
    save(build("tiny", 0), {"trainer": 3}, tmp_path)
    with pytest.raises(UsageError, match="not a checkpoint"):
        loaded_from(tmp_path)
