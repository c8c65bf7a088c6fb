"""Promises about a model that is changed while a learner synchronises it: it is seen, and said by name."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.checks.model_watch import SHARE, ModelWatch
from diloco.workers.learner import Learner
from diloco.workers.names import state_with
from diloco.workers.parameters import FragmentParameters, tensor_table, trained_tensors
from tests import HANGING_S
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_model_checks import process_group
from tests.workers.test_parameters import Net, fragments_of


def watched(model: nn.Module) -> ModelWatch:
    return ModelWatch(model, trained_tensors(model))


def unfreeze(model: Net) -> None:
    model.frozen.requires_grad_(True)


def freeze(model: Net) -> None:
    model.body.requires_grad_(False)


def replace(model: Net) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def replace_module(model: Net) -> None:
    model.body = nn.Linear(4, 4)


def tie(model: Net) -> None:
    model.head.weight = model.table.weight


def add(model: Net) -> None:
    model.adapter = nn.Linear(4, 4)


def take_away(model: Net) -> None:
    del model.body


def convert(model: Net) -> None:
    model.half()


def resize(model: Net) -> None:
    model.table.weight.data = torch.zeros(9, 4)


CHANGES: dict[Callable[[Net], None], str] = {
    unfreeze: "parameter frozen now requires a gradient",
    freeze: r"parameter body\.\w+ was frozen",
    replace: r"parameter head.weight was replaced",
    replace_module: r"parameter body\.\w+ was replaced",
    tie: r"parameter head.weight is no longer in the model",
    add: r"parameter adapter\.\w+ now requires a gradient",
    take_away: r"parameter body\.\w+ is no longer in the model",
    convert: r"parameter \S+ was torch.float32 .*and is now torch.float16",
    resize: r"parameter table.weight was .*\(7, 4\).* and is now .*\(9, 4\)",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_is_seen_and_named(change: Callable[[Net], None]) -> None:
    """With what to do about it."""
    model = Net()
    watch = watched(model)
    watch.inspect(1e9)
    change(model)
    with pytest.raises(UsageError, match=f"{CHANGES[change]}.*before the `with` block"):
        watch.inspect(1e18)


def test_what_training_does_to_a_model_is_no_change() -> None:
    """Steps, other storages, modules without trained parameters, another mode."""
    model = Net()
    watch = watched(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    model.head.weight.data = model.head.weight.data.clone()
    model.dropout = nn.Dropout(0.1)
    model.added = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.eval()
    watch.inspect(1e18)


def test_looks_take_a_thousandth_of_the_time() -> None:
    """One that took a second is followed by the next after a thousand."""
    model, now, looks = Net(), [0.0], []
    watch = ModelWatch(model, trained_tensors(model), lambda: now[0])

    def compare() -> None:
        looks.append(now[0])
        now[0] += 1.0

    watch._compare = compare  # type: ignore[method-assign]
    while now[0] < 10_000:
        watch.inspect(now[0])
        now[0] += 0.5
    assert len(looks) == pytest.approx(10_000 * SHARE, abs=1)


def test_networks_that_take_turns_are_no_change() -> None:
    """All that an optimizer trains may be frozen while another one steps. A part of it may not."""
    model = Net()
    optimizers = [torch.optim.SGD(part.parameters()) for part in (model.body, model.table)]
    watch = ModelWatch(model, trained_tensors(model), optimizers=optimizers)
    for turn, other in ((model.body, model.table), (model.table, model.body)):
        turn.requires_grad_(True)
        other.requires_grad_(False)
        watch.inspect(1e18)
    model.body.weight.requires_grad_(True)
    with pytest.raises(
        UsageError, match=r"parameter body.bias was frozen, although its optimizer still trains other parameters"
    ):
        watch.inspect(1e36)


# --- copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [convert, resize])
def test_nothing_is_copied_from_or_to_what_was_converted(change: Callable[[Net], None]) -> None:
    """Even before the next look: half precision would be published as if it had been trained."""
    model = Net()
    fragments = fragments_of(model, 1)
    values = fragments.snapshot(0).numpy().copy()
    change(model)
    for copy in (lambda: fragments.snapshot(0), lambda: fragments.on_device(0), lambda: fragments.overwrite(0, values)):
        with pytest.raises(UsageError, match="when the learner joined and is"):
            copy()


@pytest.mark.parametrize("way", ["strided", "transposed in place"])
def test_other_memory_layouts_are_copied_by_value(way: str) -> None:
    """A tensor given another storage that is not contiguous: read and written as it is, not as it once lay."""
    model = nn.Linear(4, 4, bias=False)
    fragments = FragmentParameters(model, layout_of(tensor_table(model, SyncSettings(fragments=1))))
    fragments.snapshot(0)
    model.weight.data = torch.randn(4, 8)[:, ::2] if way == "strided" else model.weight.data.t()
    expected = model.weight.detach().clone()
    np.testing.assert_array_equal(fragments.snapshot(0).numpy(), expected.reshape(-1).numpy())
    fragments.overwrite(0, np.arange(16, dtype=np.float32))
    assert torch.equal(model.weight, torch.arange(16.0).reshape(4, 4))


# --- shards -----------------------------------------------------------------------------------------


def evaluated(model: nn.Module) -> torch.Tensor:
    """What it gives for ones, in a forward pass that no backward follows."""
    with torch.no_grad():
        out: torch.Tensor = model(torch.ones(1, 2))
    return out


def holds_shards(model: nn.Module) -> bool:
    return all(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def test_an_evaluation_is_no_change_of_a_sharded_model(tmp_path: Path) -> None:
    """After one a learner is made of it, looks at it, adopts into what its next pass takes, and gives what is global.

    At each step it has its shards again, whether a look is due or not: ranks look at different steps, and one that had
    them alone would gather them alone in the next pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(tmp_path):
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        evaluated(model)
        assert not holds_shards(model), "torch leaves them be: nothing is tried here"
        assert Learner(model, redis_url="redis://localhost")._ranks == (0,)
        fragments, watch = fragments_of(model, 1), watched(model)
        for now in (1e9, 0.0):
            evaluated(model)
            watch.inspect(now)
            assert holds_shards(model)
        evaluated(model)
        fragments.overwrite(0, np.full(4, 3, np.float32))
        assert evaluated(model).tolist() == [[6, 6]]
        (weight,) = state_with(model, {"0.weight": np.full(4, 5, np.float32)}).values()
        assert weight.tolist() == [[5, 5], [5, 5]]


# --- a whole learner --------------------------------------------------------------------------------


def go_on(learner: Learner) -> None:
    for _ in range(10**6):
        learner.step(tokens=1)


@pytest.mark.redis
@pytest.mark.parametrize("change", [unfreeze, replace, convert], ids=lambda change: change.__name__)
def test_a_learner_stops_at_a_changed_model(redis_server: str, change: Callable[[Net], None]) -> None:
    """With the tensor's name, after a few steps; it leaves in order, if it can."""
    model, run = Net(), f"watch-{change.__name__}"
    sync = SyncSettings(fragments=1, sync_interval=4, tokens=2**40)
    with a_syncer(redis_server, run):
        learner = Learner(model, run=run, redis_url=redis_server, learner_id="l0", sync=sync)
        with learner:
            learner.step(tokens=1, loss=torch.tensor(1.0))
            learner.step(tokens=0)
            for refused in ({"tokens": -1}, {"tokens": 1, "loss": torch.ones(2)}):
                with pytest.raises(UsageError, match=r"^tokens=-1|step\(loss"):
                    learner.step(**refused)  # type: ignore[arg-type]
            rounds = learner.joined.training.rounds
            assert rounds.counts[:2] == (2, 1)
            deadline = time.monotonic() + HANGING_S
            while rounds.versions == (0,):
                assert time.monotonic() < deadline
                learner.step(tokens=1)
            learner.step(tokens=1)  # on a new base, of which nothing is published yet
            change(model)
            with pytest.raises(UsageError, match=r"parameter \S+ (now requires|was)"):
                go_on(learner)
        assert learner.left_in_order is (change is not convert), "its last training cannot be copied"


@pytest.mark.redis
def test_a_learner_of_several_networks_that_take_turns_goes_on(redis_server: str) -> None:
    """Where the step that is counted is one in which the other network is frozen."""
    model, sync = Net(), SyncSettings(fragments=1, sync_interval=4, tokens=2**40)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.table)]
    with a_syncer(redis_server, "turns"):
        learner = Learner(model, optimizers, run="turns", redis_url=redis_server, learner_id="l0", sync=sync)
        with learner:
            learner.attach(1)
            for optimizer, other in zip(optimizers, (model.table, model.body), strict=True):
                other.requires_grad_(False)
                optimizer.step()
                other.requires_grad_(True)
            assert learner.joined.training.rounds.steps == 1


@pytest.mark.redis
def test_a_model_that_is_frozen_as_a_whole_for_a_while_trains_on(redis_server: str) -> None:
    """Even if the learner inspects it meanwhile."""
    model, sync = nn.Linear(4, 4), SyncSettings(fragments=1, sync_interval=4, tokens=2**40)
    with a_syncer(redis_server, "frozen"):
        learner = Learner(model, run="frozen", redis_url=redis_server, learner_id="l0", sync=sync)
        with learner:
            watch = learner.joined.training.watch
            assert watch is not None
            for trains, now in ((False, 1e18), (True, 1e36)):
                model.requires_grad_(trains)
                watch.inspect(now)
