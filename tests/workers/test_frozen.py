"""Promises about frozen parameters: learners train on the same ones, unless their run lets them differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.pipeline.agreement import differences
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.settings import SyncSettings
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.workers.checks import frozen_digests as module
from diloco.workers.checks.frozen_digests import frozen_digests
from diloco.workers.exchange.spec_check import compare
from diloco.workers.learner import Learner
from diloco_studies.virtual.virtual_time import run_virtual
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_model_checks import Wrapped, parameter

A, B = (("base", b"a" * 16), ("norm", b"n" * 16)), (("base", b"b" * 16), ("norm", b"n" * 16))


def spec(frozen: Any) -> Spec:
    return samples.spec().model_copy(update={"frozen": frozen})


class Adapted(nn.Module):
    """A frozen base with trained adapters, as LoRA has them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.base(x)) + self.up(self.down(x))
        return out


# --- digests ----------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> bytes:
    ((_, found),) = frozen_digests(parameter(tensor, requires_grad=False))
    return found


def test_all_that_is_frozen_has_a_digest_and_nothing_else() -> None:
    """No adapter, and no buffer: running statistics change in training."""
    model = Adapted()
    before = frozen_digests(model)
    assert [name for name, _ in before] == ["base.weight", "base.bias", "norm.weight", "norm.bias"]
    model(torch.randn(8, 4)).sum().backward()
    torch.optim.SGD([*model.up.parameters(), *model.down.parameters()], lr=1.0).step()
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.any()
    assert frozen_digests(model) == before
    assert frozen_digests(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_a_digest_is_of_values_however_they_lie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, strided, conjugate, cut into other pieces."""
    tensor = torch.randn(6, 5).to(dtype)
    expected = digest(tensor)
    assert digest(tensor.t().contiguous().t()) == expected
    assert digest(torch.stack([tensor, tensor], 2)[..., 0]) == expected
    assert digest(tensor.conj().resolve_conj().conj()) == expected
    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    assert digest(tensor) == expected


def test_a_digest_tells_values_shapes_and_precisions_apart() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    others = [tensor + 1e-6, tensor.reshape(4, 3), tensor.double(), tensor.view(torch.int32), tensor[:2], tensor[:0]]
    assert len({digest(other) for other in [tensor, *others]}) == 7


def test_quantized_tensors_are_read_with_their_scales() -> None:
    """A wrapper's inner tensors; beside packed codes, the state of their quantization."""
    assert digest(Wrapped(torch.ones(2))) == digest(Wrapped(torch.ones(2)))
    assert digest(Wrapped(torch.ones(2))) != digest(Wrapped(torch.zeros(2)))

    def packed(scale: float) -> nn.Module:
        model = parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)

        class State:
            def as_dict(self) -> dict[str, Any]:
                return {"absmax": torch.tensor([scale]), "quant_type": "nf4"}

        model.p.quant_state = State()
        return model

    assert frozen_digests(packed(1.0)) == frozen_digests(packed(1.0))
    assert frozen_digests(packed(1.0)) != frozen_digests(packed(2.0))
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3))


def test_what_cannot_be_read_is_named() -> None:
    class Opaque(Wrapped):
        __tensor_flatten__ = property(lambda self: self.nothing)  # type: ignore[assignment]

    with pytest.raises(UsageError, match=r"frozen parameter p, a Opaque, cannot be read.*same_frozen=False"):
        digest(Opaque(torch.ones(2)))


def test_long_work_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "LONG_WORK_BYTES", 100)
    frozen_digests(Adapted())
    out = capsys.readouterr().out
    assert "frozen_hashing_started" in out
    assert f"bytes={(16 + 4 + 4 + 4) * 4}" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_digest_is_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 7)
    model = Adapted()
    assert frozen_digests(model) == frozen_digests(model.cuda())


# --- what learners agree on -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs"), [(A, A), ((), ()), (None, None), (A, None), (None, ()), (A[::-1], A)], ids=str
)
def test_these_may_train_together(mine: Any, theirs: Any) -> None:
    """The same; or any, where the run does not compare."""
    compare(spec(mine), spec(theirs))


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (B, A, "frozen tensor base: values, shape or precision differ from the run's"),
        (A[1:], A, "frozen tensor base: absent here"),
        (A, A[:1], "frozen tensor norm: the run has none"),
        (A, (), "frozen tensor base: the run has none"),
        (None, A, "same_frozen: here False, the run has True"),
    ],
)
def test_these_may_not(mine: Any, theirs: Any, said: str) -> None:
    """And are told which tensor it is and what to do; one that is the same is not told."""
    with pytest.raises(SpecMismatch, match=said) as refused:
        compare(spec(mine), spec(theirs))
    assert "same_frozen=False in all learners of a new run" in str(refused.value)
    assert ("norm" in str(refused.value)) is ("norm" in said or theirs == ())


def test_other_differences_are_still_told() -> None:
    other = samples.spec(quorum=2).model_copy(update={"frozen": None})
    with pytest.raises(SpecMismatch, match="quorum: here 1, the run has 2") as refused:
        compare(spec(A), other)
    assert "frozen" not in str(refused.value)


@pytest.mark.parametrize(
    "frozen", [(("n" * 513, b"a" * 16),), (("n", b"a" * 15),), (("n",),), (("n", "a" * 16),), (("n", b"a" * 16, 1),)]
)
def test_bounds_of_what_is_frozen(frozen: Any) -> None:
    with pytest.raises(ValueError, match="frozen"):
        Spec.model_validate(samples.spec().model_dump() | {"frozen": frozen})


def test_as_many_frozen_tensors_as_there_may_be_travel() -> None:
    """Beside a trained table; 100,000 names and digests, within a message's bounds."""
    frozen = tuple((f"layers.{i}.self_attention.projection.weight", np.int64(i).tobytes() * 2) for i in range(100_000))
    whole = spec(frozen)
    assert decode(Spec, encode(whole)) == whole


# --- runs -------------------------------------------------------------------------------------------


def test_a_run_goes_on_after_a_resume_with_the_same_frozen_tensors_only(tmp_path: Path) -> None:
    """The checkpoint keeps what was agreed on; the syncer takes no part in it."""

    def world(frozen: Any, **settings: Any) -> VirtualRun:
        made = VirtualRun(sync_spec(tokens=12_000), **settings)
        made.spec = made.spec.model_copy(update={"frozen": frozen})
        return made

    async def begin() -> None:
        first = world(A, checkpoint_dir=tmp_path)
        first.start_syncer()
        learner = VirtualLearner("l0", first).start()
        await first.until_version(2)
        first.stop.set()
        assert first.syncer is not None
        await first.syncer
        await learner.kill()

    async def go_on(frozen: Any) -> None:
        again = world(frozen)
        again.start_syncer(resume=tmp_path)
        await again.until_version(2)
        learner = VirtualLearner("again", again, incarnation="f" * 16)
        try:
            await learner.live()
        finally:
            again.stop.set()
            assert again.syncer is not None
            await again.syncer

    run_virtual(begin())
    assert load_checkpoint(tmp_path).spec.frozen == A
    run_virtual(go_on(A))
    with pytest.raises(SpecMismatch, match="frozen tensor base"):
        run_virtual(go_on(B))


@pytest.mark.redis
def test_a_learner_on_another_base_is_refused(redis_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tensor's name. Where the first one said so, it joins, and this is logged."""

    def learner(seed: int, name: str, run: str, **given: Any) -> Learner:
        told: dict[str, Any] = {"run": run, "redis_url": redis_server, "learner_id": name}
        return Learner(Adapted(seed), sync=SyncSettings(fragments=2, tokens=2**40), **told, **given)

    with a_syncer(redis_server, "same"), learner(0, "l0", "same"):
        with pytest.raises(SpecMismatch, match=r"frozen tensor base\.weight: values, shape"), learner(1, "l1", "same"):
            pass
        with (
            pytest.raises(SpecMismatch, match="same_frozen: here False"),
            learner(0, "l2", "same", same_frozen=False),
        ):
            pass
        with learner(0, "l3", "same") as joined:
            joined.step(tokens=1)
    with a_syncer(redis_server, "any"), learner(0, "l0", "any", same_frozen=False), learner(1, "l1", "any") as joined:
        joined.step(tokens=1)
    assert "frozen_not_compared" in "".join(capsys.readouterr())


def test_the_same_tensors_in_another_order_are_refused_by_name() -> None:
    """A fragment's elements lie in the order of the tensors: adopted in another one, they would be exchanged."""
    spec = samples.spec()
    turned = spec.model_copy(update={"tensors": spec.tensors[::-1]})
    assert differences(spec, spec) == ""
    assert "order of the tensors" in differences(turned, spec)
    with pytest.raises(SpecMismatch, match="order of the tensors"):
        compare(turned, spec)


def test_a_difference_in_how_a_tensor_is_merged_is_told() -> None:
    spec = samples.spec()
    other = spec.tensors[0].model_copy(update={"rule": "mean" if spec.tensors[0].rule != "mean" else "rda"})
    told = differences(spec.model_copy(update={"tensors": (other, *spec.tensors[1:])}), spec)
    assert f", {other.rule}, the run has" in told
