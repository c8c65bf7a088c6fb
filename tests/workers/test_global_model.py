"""Promises about the run's model as a learner gives it: `globals` and `load_globals`."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.transfer.globals import pull_exact
from diloco.workers.exchange import newest
from diloco.workers.learner import Learner
from diloco.workers.times import LearnerTimes
from tests import samples
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import learner_of, on_bus

pytestmark = pytest.mark.redis
SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=400, global_codec="fp32")


def train(learner: Learner) -> None:
    """To the end of the run, on data of its own."""
    own = torch.full((2, 4), float(len(learner.id)))
    with learner:
        learner.attach(tokens=10)
        while not learner.finished:
            learner.model(own).square().sum().backward()
            assert isinstance(learner.optimizer, torch.optim.Optimizer)
            learner.optimizer.step()
            learner.optimizer.zero_grad()
            time.sleep(0.01)


def heads(url: str, run: str, learner: Learner) -> list[np.ndarray]:
    """As an evaluator reads them."""

    async def read(bus: Any) -> list[np.ndarray]:
        spec, layout = learner.spec, learner._once_joined.training.layout
        return [
            await pull_exact(bus, head, layout.fragments[head.fragment].elements, spec.sync, asyncio.to_thread)
            for head in await bus.read_heads(range(2))
        ]

    found: list[np.ndarray] = on_bus(url, run, read)
    return found


def flat(learner: Learner) -> list[np.ndarray]:
    parameters = learner._once_joined.training.parameters
    return [parameters.snapshot(p).numpy().copy() for p in range(2)]


def test_after_a_run_every_learner_has_the_finished_runs_model(redis_server: str) -> None:
    """Its last merges, those of what was published on leaving, are waited for. The optimizers keep their moments."""
    with a_syncer(redis_server, "whole"):
        learners = [learner_of(redis_server, "whole", learner_id=name, sync=SYNC, leave_s=10.0) for name in ("a", "bb")]
        threads = [threading.Thread(target=train, args=(one,)) for one in learners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():  # a learner may have trained no step since its last adoption
            for one in learners:
                for parameter in one.model.parameters():  # type: ignore[union-attr]
                    parameter.add_(1.0)
        moments = [one.optimizer.state_dict()["state"][0]["exp_avg"].clone() for one in learners]  # type: ignore[union-attr]
        for one in learners:
            one.load_globals()
        state = on_bus(redis_server, "whole", lambda bus: bus.read_state())
        assert state.phase is Phase.FINISHED
        final = heads(redis_server, "whole", learners[0])
        for one, moment in zip(learners, moments, strict=True):
            after = flat(one)
            assert all(np.array_equal(a, b) for a, b in zip(after, final, strict=True))
            assert torch.equal(one.optimizer.state_dict()["state"][0]["exp_avg"], moment)  # type: ignore[union-attr]
    plain = nn.Linear(4, 4)
    plain.load_state_dict(learners[0].globals())
    assert torch.equal(plain.weight, learners[1].model.weight)  # type: ignore[arg-type]


def test_the_global_model_is_read_beside_training_and_not_written(redis_server: str) -> None:
    """Also where the caller's thread has an event loop, as in a notebook."""
    with a_syncer(redis_server, "beside"):
        learner = learner_of(redis_server, "beside")
        for use in (learner.globals, learner.load_globals):
            with pytest.raises(UsageError, match="has not joined yet"):
                use()
        with learner:
            learner.step(1)
            with torch.no_grad():
                learner.model.weight.fill_(7.0)  # type: ignore[union-attr, operator]
            with pytest.raises(UsageError, match=r"close\(\) first"):
                learner.load_globals()

            async def asked() -> dict[str, Any]:
                return learner.globals()

            found = asyncio.run(asked())
            assert bool((learner.model.weight == 7.0).all())  # type: ignore[union-attr, operator]
            assert not (found["weight"] == 7.0).any()


def test_what_is_no_longer_the_runs_is_not_loaded(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run under its name, a model that was changed; and a bus that has lost the heads is asked for a while."""
    monkeypatch.setattr(newest, "TIMES", LearnerTimes(newest_s=1.0))
    with a_syncer(redis_server, "gone"), learner_of(redis_server, "gone") as learner:
        learner.step(1)
    keys = on_bus(redis_server, "gone", lambda bus: _drop_head(bus))
    with pytest.raises(Exception, match="fragment 0 has no head"):
        learner.globals()
    assert keys
    spec = on_bus(redis_server, "gone", lambda bus: bus.read_spec())
    assert on_bus(redis_server, "gone", lambda bus: bus.replace_spec(encode(samples.spec()), spec))
    with pytest.raises(SpecMismatch, match="choose a different run name"):
        learner.load_globals()
    learner.model.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(UsageError, match="parameter bias was replaced"):
        learner.load_globals()


async def _drop_head(bus: Any) -> int:
    """As a bus that has come back empty."""
    return int(await bus._redis.command("DEL", bus.keys.head(0)))
