"""A learner whose model is sharded, of one rank: all of it in this process, on a real Redis."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.pipeline.settings import SyncSettings
from diloco.workers.learner import Learner
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_model_checks import process_group


@pytest.mark.redis
def test_a_sharded_learner_is_evaluated_at_any_time_and_ends_with_the_runs_model(
    redis_server: str, tmp_path: Path
) -> None:
    """Before it joins, between a step and its count, before it leaves and after. Then it holds no bases any more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sync = SyncSettings(fragments=1, sync_interval=1, first_interval=0, quorum=1, tokens=2**40)
    with process_group(tmp_path), a_syncer(redis_server, "sharded"):
        model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), init_device_mesh("cpu", (1,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(1, 4))

        evaluate()
        learner = Learner(model, optimizer, run="sharded", redis_url=redis_server, learner_id="l0", sync=sync)
        evaluate()
        with learner:
            joined: Any = learner.joined
            while max(joined.training.rounds.versions) < 1:
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                evaluate()
                joined.training.watch._next_s = 0.0  # it looks at every step
                learner.step(1)
            part = joined._rank.transfers
            held = [weakref.ref(base.values) for base in (*part._bases.values(), *part._carrier._bases.values())]
            evaluate()
        evaluate()
        learner.load_globals()
        found = learner.globals()
        assert all(torch.equal(tensor.full_tensor(), found[name]) for name, tensor in model.state_dict().items())
        gc.collect()
        assert held
        assert all(one() is None for one in held)
