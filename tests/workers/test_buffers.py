"""Promises about a model's buffers: which travel, that a merge is their mean, and what that costs a model without."""

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from pydantic import ValidationError
from torch import nn

from diloco.export import export
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.transfer.globals import pull_exact
from diloco.syncer.admission import Offer
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.merging.fragment import Delta, FragmentState
from diloco.syncer.merging.merge import delta_norms
from diloco.syncer.replay import recording, replay
from diloco.workers.checks.model_watch import ModelWatch
from diloco.workers.learner import Learner
from diloco.workers.parameters import FragmentParameters, tensor_table
from tests import samples
from tests.saving import save_checkpoint
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus
from tests.workers.test_parameters import Net

SYNC = SyncSettings(fragments=2, sync_interval=4, first_interval=0, quorum=2, tokens=2**40)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def names(model: nn.Module) -> list[str]:
    """Of the average-only tensors."""
    return [t.name for t in tensor_table(model, SyncSettings(fragments=2)) if t.rule in ("average", "variance")]


def with_buffer(value: torch.Tensor | None, persistent: bool = True) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("kept", value, persistent=persistent)
    return model


def beside(codes: torch.Tensor) -> nn.Module:
    """A buffer in a module with other numbers."""
    model = with_buffer(torch.ones(4))
    model.register_buffer("codes", codes)
    return model


def aliased() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("kept", model.weight.data[1])
    return model


TRAVELS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: with_buffer(torch.ones(3)),
    "bf16": lambda: with_buffer(torch.ones(3).bfloat16()),
    "no dimensions": lambda: with_buffer(torch.tensor(1.0)),
    "not a number, as after a loss that exploded": lambda: with_buffer(torch.full((3,), math.nan)),
    "beside a mask": lambda: beside(torch.ones(4, dtype=torch.bool)),
    "beside counts": lambda: beside(torch.zeros(4, dtype=torch.int64)),
}
STAYS: dict[str, Callable[[], nn.Module]] = {
    "a counter": lambda: with_buffer(torch.tensor(3)),
    "not persistent": lambda: with_buffer(torch.ones(3), persistent=False),
    "a mask with infinities": lambda: with_buffer(torch.full((3, 3), -math.inf).triu(1)),
    "scales beside packed numbers": lambda: beside(torch.zeros(4, dtype=torch.int8)),
    "a part of a parameter": aliased,
    "elsewhere": lambda: with_buffer(torch.ones(3, device="meta")),
    "expanded": lambda: with_buffer(torch.ones(1).expand(3)),
    "empty": lambda: with_buffer(torch.ones(0)),
    "complex": lambda: with_buffer(torch.ones(3, dtype=torch.complex64)),
    "none": lambda: with_buffer(None),
}


@pytest.mark.parametrize("what", [*TRAVELS, *STAYS])
def test_buffers_that_can_be_averaged_travel_and_no_others(what: str) -> None:
    assert names((TRAVELS | STAYS)[what]()) == (["kept"] if what in TRAVELS else [])


def test_a_model_without_such_buffers_has_the_spec_that_it_always_had() -> None:
    """To the byte, with counters and tables that are not saved; so its layout has the same digest."""

    def spec(model: nn.Module) -> Spec:
        return Spec(sync=SYNC.sync_spec(), tensors=tensor_table(model, SYNC), trainer={})

    plain, other = Net(), Net()
    other.register_buffer("steps", torch.tensor(1))
    other.body.register_buffer("rotary", torch.ones(3), persistent=False)
    assert encode(spec(plain)) == encode(spec(other))
    assert {tensor.rule for tensor in spec(plain).tensors} <= {"mean", "rda"}


def test_buffers_have_the_last_fragment_to_themselves_exactly_and_without_momentum() -> None:
    """Whatever codec and outer optimizer the run has; the parameters are spread over the others."""
    sync = SyncSettings(fragments=3, codec="int4", outer="halley", outer_momentum=0.9)
    layout = layout_of(tensor_table(normed(), sync))
    *trained, last = layout.fragments
    assert [slot.tensor.name for slot in last.slots] == ["1.running_mean", "1.running_var"]
    assert [slot.tensor.rule for slot in last.slots] == ["average", "variance"]
    own, run = last.sync(sync.sync_spec()), sync.sync_spec()
    assert (own.codec, own.global_codec, own.outer, own.outer_lr, own.outer_momentum) == (
        *("fp32", "fp32", "nesterov"),
        *(1.0, 0.0),
    )
    assert all(one.sync(run) is run and not one.averaged for one in trained)
    assert layout.trained.fragments == tuple(trained)
    for fragments, say in ((1, 2), (9, 7)):
        with pytest.raises(UsageError, match=f"the 2 averaged buffers: set fragments={say}"):
            tensor_table(normed(), SyncSettings(fragments=fragments))


def test_a_spec_with_a_buffer_beside_parameters_is_refused() -> None:
    """By whoever reads it: a syncer relies on it."""
    table = tensor_table(normed(), SYNC)
    for wrong in ({"fragment": 0}, {"rule": "mean"}):
        tensors = (*table[:-1], table[-1].model_copy(update=wrong))
        with pytest.raises(ValidationError, match="mixes average-only tensors with others"):
            Spec(sync=SYNC.sync_spec(), tensors=tensors, trainer={})
    matrix = table[-1].model_copy(update={"shape": (4, 2), "matrix": True})
    with pytest.raises(ValidationError, match="is average-only: it is never orthogonalised"):
        Spec(sync=SYNC.sync_spec(), tensors=(*table[:-1], matrix), trainer={})


@pytest.mark.parametrize("rule", ["average", "variance"])
def test_a_variance_never_falls_below_zero_and_a_mean_may(rule: str) -> None:
    """Of a stale delta that cannot be rebased, and where float32 rounds two large numbers that are nearly alike."""
    layout = layout_of([samples.tensor("kept", (2,), rule=rule)]).fragments[0]
    theta = np.array([1.0, 1000.0], np.float32)
    state = FragmentState(layout, samples.sync_spec(fragments=1), 1, bytes(16), theta, None)
    values = [np.array([3.0, 1000.00006], np.float32), np.array([1.5, 1000.00006], np.float32)]
    deltas = [
        Delta(Offer(f"{i}-0", samples.header(f"l{i}", base_version=1)), value, delta_norms(layout, value))
        for i, value in enumerate(values)
    ]
    found = state.merge(deltas, []).stepped.theta
    assert bool((found >= 0).all()) is (rule == "variance")
    assert bool((found <= 0).all())


def test_a_buffer_is_looked_up_whenever_it_is_copied() -> None:
    """What a step has put in its place travels, and is overwritten; memory of those before is let go."""
    model = normed()
    layout = layout_of(tensor_table(model, SYNC))
    parameters = FragmentParameters(model, layout)
    for value in (1.0, 2.0, 3.0):
        model[1].running_mean = torch.full((8,), value)
        assert parameters.snapshot(1).numpy()[:8].tolist() == [value] * 8
    assert len(parameters._views) == 2
    parameters.overwrite(1, np.full(16, 7, np.float32))
    assert model[1].running_mean.tolist() == model[1].running_var.tolist() == [7.0] * 8
    model[1].running_mean = torch.zeros(9)
    with pytest.raises(UsageError, match=r"buffer 1.running_mean was torch.float32 \(8,\) when the learner joined"):
        parameters.snapshot(1)
    model[1].running_mean = None
    with pytest.raises(UsageError, match=r"buffer 1.running_mean is no longer in the model"):
        parameters.snapshot(1)


def test_a_buffer_that_is_no_longer_the_runs_is_found() -> None:
    """Another tensor in its place is the same buffer; of another type, or of another module, it is not."""
    model = normed()
    watch = ModelWatch(model, [tensor.name for tensor in tensor_table(model, SYNC)])
    model[1].running_mean = torch.ones(8)
    model[1].register_buffer("later", torch.ones(3))
    watch.inspect(math.inf)
    model[1].running_mean = torch.ones(8).double()
    with pytest.raises(UsageError, match=r"buffer 1.running_mean was torch.float32 .* and is now torch.float64"):
        watch.inspect(math.inf)
    model[1].running_mean = torch.ones(8)
    model[1].running_var = None
    with pytest.raises(UsageError, match=r"buffer 1.running_var is no longer in the module where it was"):
        watch.inspect(math.inf)


def a_learner(url: str, run: str, name: str, **more: Any) -> Learner:
    torch.manual_seed(len(name))
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Learner(model, optimizer, run=run, redis_url=url, learner_id=name, leave_s=10.0, **more)


def train(learner: Learner, tokens: int, seen: list[np.ndarray]) -> None:
    """For some merges, on data of its own; seen: the buffers after each forward."""
    model, mean = learner.model, float(len(learner.id))
    generator = torch.Generator().manual_seed(len(learner.id))
    with learner:
        learner.attach(tokens=tokens)
        while min(learner.joined.training.rounds.versions) < 5:
            given = mean + mean * torch.randn(16, 4, generator=generator)
            model(given).square().mean().backward()
            seen.append(flat(model))
            learner.optimizer.step()  # type: ignore[union-attr]
            learner.optimizer.zero_grad()  # type: ignore[union-attr]


def flat(model: Any) -> np.ndarray:
    return np.concatenate([model[1].running_mean.numpy(), model[1].running_var.numpy()])


@pytest.mark.redis
@pytest.mark.parametrize("told", [{}, {"codec": "int4", "outer": "halley"}], ids=["", "4 bits"])
def test_two_learners_with_batch_norm_end_with_the_weighted_mean_of_its_buffers(
    redis_server: str, tmp_path: Path, told: dict[str, Any]
) -> None:
    """Each merge is the mean of what the two had gathered, by the merge's weights; it can be made again bit for bit.

    What the learners, a checkpoint and an export have in the end is the last of these, and a plain model loads it.
    """
    run, sync = f"normed-{len(told)}", SyncSettings(**SYNC.model_dump(exclude_unset=True), **told)
    seen: dict[str, list[np.ndarray]] = {"a": [], "bb": []}
    with a_syncer(redis_server, run, record_deltas=tmp_path / "deltas", checkpoint_dir=tmp_path / "saved"):
        learners = [a_learner(redis_server, run, name, sync=sync, state_dir=tmp_path / name) for name in seen]
        trained = zip(learners, (10, 30), strict=True)
        threads = [threading.Thread(target=train, args=(one, tokens, seen[one.id])) for one, tokens in trained]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spec = learners[0].spec
    for one in learners:
        one.load_globals()
    commits = on_bus(redis_server, run, lambda bus: commits_of(bus))
    outcome = replay.replay(tmp_path / "deltas", commits, lambda merges: None)
    assert [str(one) for one in outcome.differences] == []
    assert outcome.repeated == outcome.merges >= 10
    last = check_means(tmp_path / "deltas", spec, [one for one in commits if one.fragment == 1], seen)
    for one in learners:
        assert np.array_equal(flat(one.model), last)
    final = on_bus(redis_server, run, lambda bus: exact(bus, spec))
    assert np.array_equal(final, last)
    folder = on_bus(redis_server, run, lambda bus: save_checkpoint(bus, spec, place_of(tmp_path / "saved")))
    values, momentum = load_checkpoint(str(folder)).fragment(1)
    assert momentum is None
    assert np.array_equal(values, last)
    export(str(folder), tmp_path / "model.safetensors")
    plain = normed()
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert np.array_equal(flat(plain), last)


async def commits_of(bus: Any) -> list[Committed]:
    entries = await bus.read_tape(dict.fromkeys(range(1), "0-0"))
    return [entry.record for entry in entries if isinstance(entry.record, Committed)]


async def exact(bus: Any, spec: Spec) -> np.ndarray:
    (head,) = await bus.read_heads([1])
    layout = layout_of(spec.tensors).fragments[1]
    found: np.ndarray = await pull_exact(bus, head, layout.elements, layout.sync(spec.sync), asyncio.to_thread)
    return found


def check_means(folder: Path, spec: Spec, commits: list[Committed], seen: dict[str, list[np.ndarray]]) -> np.ndarray:
    """That each of one fragment's merges is the weighted mean of values that its learners had; the last values."""
    layout, files = layout_of(spec.tensors).fragments[1], recording.list_files(folder, 1)
    by_version = {(name.version, name.kind): path for path, name in files.items()}
    values = replay.Values(recording.read_global(by_version[0, ".global"], layout, spec).theta, None)
    for commit in sorted((one for one in commits if one.contributions), key=lambda one: one.version):
        merge = recording.read_merge(by_version[commit.version, ".merge"], layout, spec)
        weights, learners_had = [], []
        for part, delta in zip(merge.header.contributions, merge.deltas, strict=True):
            base = values.before if part.rebased else values.theta
            assert base is not None
            had = base.astype(np.float64) - delta[:]
            assert min(np.abs(had - one).max() for one in seen[part.learner]) < 1e-5, f"{part.learner} never had these"
            weights.append(part.weight)  # of one that stalled it is bounded
            learners_had.append(had)
        again = replay.repeat(layout, layout.sync(spec.sync), values, merge, commit).values
        assert again is not None
        np.testing.assert_allclose(again.theta, np.average(learners_had, axis=0, weights=weights), rtol=1e-5, atol=1e-5)
        assert len(weights) == 2
        values = again
    found: np.ndarray = values.theta
    return found


@pytest.mark.redis
def test_a_restart_has_its_moments_and_the_runs_buffers(redis_server: str, tmp_path: Path) -> None:
    """Moments are of parameters; a learner whose model has no such buffers is refused, with what it lacks."""
    sync = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=2**40)
    given = {"sync": sync, "state_dir": tmp_path}
    with a_syncer(redis_server, "again"):
        for earlier in (0, 1):
            with a_learner(redis_server, "again", "l0", **given) as learner:
                learner.attach(tokens=5)
                assert learner.recovered == ("checkpoint" if earlier else "start")
                if earlier:
                    assert not np.array_equal(flat(learner.model), flat(normed()))
                joined = learner.joined  # what is saved names the run, of which a learner hears with its reports
                while min(joined.training.rounds.versions) < 2 + earlier or joined.shared.state is None:
                    learner.model(torch.randn(16, 4)).square().mean().backward()
                    learner.optimizer.step()  # type: ignore[union-attr]
                    learner.optimizer.zero_grad()  # type: ignore[union-attr]
        (moments,) = tmp_path.glob("moments-*.safetensors")
        assert {key.split("/")[1] for key in safetensors.numpy.load_file(moments)} == {
            name for name, _ in normed().named_parameters()
        }
        bare = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(
            SpecMismatch, match=r"1.running_var: here absent, the run has \[8\] .* fragment 1, variance"
        ):
            Learner(bare, run="again", redis_url=redis_server).open()
