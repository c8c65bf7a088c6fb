"""Promises about learners of JAX parameters: alone, beside torch's, and what they refuse."""

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

# Promised of a CPU: its rounding, two of it in one process, how long a step takes. On a GPU 60 of 64 pass.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from diloco import Learner as TorchLearner  # noqa: E402
from diloco.jax import Learner  # noqa: E402
from diloco.pipeline.errors import SpecMismatch, UsageError  # noqa: E402
from diloco.pipeline.fragments import layout_of  # noqa: E402
from diloco.pipeline.settings import SyncSettings  # noqa: E402
from diloco.workers.parameters import FragmentParameters, tensor_table  # noqa: E402
from diloco.workers.pytree.leaves import PytreeParameters  # noqa: E402
from diloco.workers.pytree.tree import Names, Tree  # noqa: E402
from tests import HANGING_S  # noqa: E402
from tests.system import test_example  # noqa: E402
from tests.trainers.jax_models import (  # noqa: E402
    BATCH,
    FEATURES,
    HIDDEN,
    IN_STEP,
    NAMES,
    RATE,
    SGD,
    SGD_STEP,
    JaxParty,
    TorchParty,
    batches,
    in_step,
    jax_loss,
    jax_params,
)
from tests.workers.test_device_encoding import a_syncer  # noqa: E402
from tests.workers.test_learner_life import reports  # noqa: E402

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("one_thread")]

ONE = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1, tokens=2**40, global_codec="fp32")
ONE_FRAGMENT = ONE.model_copy(update={"fragments": 1})
NOWHERE = {"redis_url": "unix:///nowhere"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_model.py"


# --- between a pytree and the vectors that travel -----------------------------------------------------


class Language(nn.Module):
    """Its embedding and its head have no room in a fragment: they lie in parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 8, dtype=dtype)
        self.body = nn.Linear(8, 12, dtype=dtype)
        self.back = nn.Linear(12, 8, dtype=dtype)
        self.look = nn.Conv2d(4, 5, (2, 3), bias=False, dtype=dtype)
        self.head = nn.Linear(8, 96, bias=False, dtype=dtype)


LANGUAGE_NAMES: Names = {
    "table.embedding": "table.weight",
    "body.kernel": ("body.weight", (1, 0)),
    "body.bias": "body.bias",
    "back.kernel": ("back.weight", (1, 0)),
    "back.bias": "back.bias",
    "look.kernel": ("look.weight", (3, 2, 0, 1)),  # HWIO in JAX, OIHW in torch
    "head.kernel": ("head.weight", (1, 0)),
}


def language_params(model: nn.Module, dtype: str) -> dict[str, dict[str, Any]]:
    """The values of the module, with JAX's names and axes."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    params: dict[str, dict[str, Any]] = {}
    for path, given in LANGUAGE_NAMES.items():
        module, leaf = path.split(".")
        name, axes = (given, None) if isinstance(given, str) else given
        value = state[name] if axes is None else np.moveaxis(state[name], range(len(axes)), axes)
        params.setdefault(module, {})[leaf] = jnp.asarray(value, dtype)
    return params


@pytest.mark.parametrize("merge", ["mean", "rda", "rda-row"])
@pytest.mark.parametrize("outer", ["halley", "nesterov"])
def test_a_mapped_pytree_is_the_table_that_torch_has(merge, outer):
    """Names, order, shapes, fragments, rules, which are matrices, and what lies in parts."""
    model = Language(torch.bfloat16)
    sync = SyncSettings(fragments=3, merge=merge, outer=outer)
    tree = Tree(language_params(model, "bfloat16"), LANGUAGE_NAMES)
    table = tensor_table(model, sync)
    assert tree.described().tensor_table(sync) == table
    assert any(tensor.rows for tensor in table)


def test_a_pytree_follows_the_order_of_a_run_that_is_there():
    """So a table need not be in the order of torch's modules."""
    model, sync = Language(torch.float32), SyncSettings(fragments=3)
    turned = dict(reversed(LANGUAGE_NAMES.items()))
    tree, held = Tree(language_params(model, "float32"), turned), tensor_table(model, sync)
    assert tree.described().tensor_table(sync) != held
    assert tree.described(held).tensor_table(sync) == held


def both(dtype: str) -> tuple[FragmentParameters, PytreeParameters, int]:
    """The same values, in a module and in a pytree; and the number of fragments."""
    torch.manual_seed(0)
    model = Language(getattr(torch, dtype))
    params = language_params(model, dtype)
    layout = layout_of(tensor_table(model, SyncSettings(fragments=3)))
    tree = Tree(params, LANGUAGE_NAMES)
    return FragmentParameters(model, layout), PytreeParameters(tree, layout, tree.flatten(params)), 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_and_jax_fragments_are_the_same_vectors(dtype):
    """As they are, and after an adoption of values that their type has to round."""
    by_torch, by_jax, count = both(dtype)
    rng = np.random.default_rng(0)
    for p in range(count):
        first = by_torch.snapshot(p).numpy()
        np.testing.assert_array_equal(by_jax.snapshot(p).numpy(), first)
        flat = rng.standard_normal(len(first)).astype(np.float32)
        for one in (by_torch, by_jax):
            one.overwrite(p, flat)
        adopted = by_torch.snapshot(p).numpy()
        np.testing.assert_array_equal(by_jax.snapshot(p).numpy(), adopted)
        assert (adopted == flat).all() == (dtype == "float32")
    for p in range(count):  # no part of a tensor has moved another
        np.testing.assert_array_equal(by_jax.snapshot(p).numpy(), by_torch.snapshot(p).numpy())


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "jax"])
def test_a_snapshot_keeps_its_moment_and_an_adopted_vector_is_not_trained(which):
    """Both adapters: neither shares memory with what it was copied from."""
    fragments = both("float32")[which]
    taken, before = fragments.snapshot(0), fragments.snapshot(0).numpy().copy()
    base = np.arange(len(before), dtype=np.float32)
    fragments.overwrite(0, base)
    encoded = fragments.snapshot(0).numpy()
    encoded[:] = -1.0  # an encoder overwrites it
    np.testing.assert_array_equal(taken.numpy(), before)
    np.testing.assert_array_equal(base, np.arange(len(base)))
    np.testing.assert_array_equal(fragments.snapshot(0).numpy(), base)


def test_a_snapshot_outlives_arrays_that_are_donated():
    """The next step may have their memory before the snapshot is read."""
    params = jax_params()
    expected = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])
    tree = Tree(params)
    layout = layout_of(tree.described().tensor_table(SyncSettings(fragments=1)))
    fragments = PytreeParameters(tree, layout, tree.flatten(params))
    taken = fragments.snapshot(0)
    SGD_STEP(params, SGD.init(params), *batches(0, 0)())
    with pytest.raises(UsageError, match=r"leaf hidden.bias was donated"):
        fragments.snapshot(0)
    np.testing.assert_array_equal(taken.numpy(), expected)


def test_what_a_step_was_compiled_for_stays_after_an_adoption():
    """Arrays that were placed nowhere in particular are not pinned, and those that were stay there."""
    device = jax.devices()[0]
    params = {"loose": jnp.ones(4), "pinned": jax.device_put(jnp.ones(4), device)}
    tree = Tree(params)
    layout = layout_of(tree.described().tensor_table(SyncSettings(fragments=1)))
    fragments = PytreeParameters(tree, layout, tree.flatten(params))
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params))
    step(params)
    fragments.overwrite(0, np.arange(8, dtype=np.float32))
    assert step(fragments.params)["pinned"].tolist() == [8.0, 10.0, 12.0, 14.0]
    assert step._cache_size() == 1


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as Spec
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings
from diloco.workers.pytree.leaves import PytreeParameters
from diloco.workers.pytree.tree import Tree

def laid(shape, *how):
    return jax.device_put(jnp.ones(shape), NamedSharding(Mesh(np.array(jax.devices()), "d"), Spec(*how)))

params = {"embedding": laid((96, 8), "d"), "body": laid((8, 12), None, "d"), "bias": laid(12)}
tree = Tree(params)
layout = layout_of(tree.described().tensor_table(SyncSettings(fragments=3)))
assert any(slot.tensor.rows for fragment in layout.fragments for slot in fragment.slots)
fragments = PytreeParameters(tree, layout, tree.flatten(params))
for p, fragment in enumerate(layout.fragments):
    flat = np.arange(fragment.elements, dtype=np.float32)
    fragments.overwrite(p, flat)
    np.testing.assert_array_equal(fragments.snapshot(p).numpy(), flat)
assert jax.tree.map(lambda leaf: leaf.sharding, fragments.params) == jax.tree.map(lambda leaf: leaf.sharding, params)
print(fragments.device)
"""


def test_sharded_leaves_come_back_as_they_lay():
    """Over two devices of one process, whole ones and those that lie in parts."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "cpu and 1 more\n", done.stderr


# --- a whole learner ------------------------------------------------------------------------------------


def held_out(params: Any) -> float:
    """Loss on batches that nobody trains on; ln 4 = 1.39 of who knows nothing."""
    draw = batches(0, 99)
    return float(np.mean([jax_loss(params, *draw()) for _ in range(4)]))


@pytest.mark.redis
def test_one_learner_trains_publishes_and_adopts(redis_server):
    """By optax, with donated arguments, until what the run has merged has learned."""
    draw, first = batches(0, 0), jax_params()
    with a_syncer(redis_server, "jax-alone"), Learner(first, run="jax-alone", redis_url=redis_server, sync=ONE) as one:
        params, until, steps = one.params, time.monotonic() + HANGING_S, 0
        moments = SGD.init(params)
        while steps % 50 or held_out(one.globals()) > 1.0:
            assert time.monotonic() < until, "nothing was learned"
            params, moments, loss = SGD_STEP(params, moments, *draw())
            params = one.step(params, tokens=np.int64(BATCH), loss=loss)
            steps += 1
        assert min(one.joined.training.rounds.versions) > 1
        assert one.recovered == "start"
        assert one.progress_schedule(shape="constant", warmup=0.0)() == 1.0
        (seen,) = reports(redis_server, "jax-alone")
        assert (seen.report.device, seen.report.threads) == ("cpu", (0, 0))
        assert seen.report.loss is not None
    assert one.left_in_order
    assert held_out(one.params) < 1.0
    assert jax.tree.structure(one.globals()) == jax.tree.structure(first)


ROUNDS, H = 8, 4
TWO = IN_STEP.model_copy(
    update={"sync_interval": H, "codec": "fp32", "outer": "nesterov", "outer_momentum": 0.5, "outer_warmup": 0}
)


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of two models."""
    assert one.keys() == other.keys()
    return max(float(abs(one[name] - other[name]).max()) for name in one)


STEPS = 1 + (ROUNDS - 1) * H
ROUNDING = 2.0**-24
ERROR = STEPS * ROUNDING * (2.0 + RATE * (BATCH + HIDDEN + FEATURES))
"""What rounding may make of a weight below 2 in all steps: each rounds the weight, half a unit of 2^-23; and its
gradient, of size 1 at most, which is made by sums over the batch, the hidden layer and the features, each of whose
terms may be rounded once. Merging averages such errors."""
GROWTH = (1.0 + RATE * 0.5) ** STEPS
"""Of an error in later steps: along directions of negative curvature, of which half is assumed to be the most."""
TOLERANCE = ERROR * GROWTH


@pytest.mark.redis
def test_torch_and_jax_learners_share_a_run_bit_for_bit_and_train_as_two_of_a_kind_do(redis_server):
    """In each run both end with the same bits. Runs of the same data differ by the rounding of two arithmetics."""
    kinds = {"torch": (TorchParty, TorchParty), "jax": (JaxParty, JaxParty), "mixed": (JaxParty, TorchParty)}
    ends = {}
    for name, pair in kinds.items():
        one, other = in_step(pair, redis_server, f"two-{name}", 3, TWO, ROUNDS)
        assert {key: value.tobytes() for key, value in one.items()} == {k: v.tobytes() for k, v in other.items()}
        ends[name] = one
    assert apart(ends["torch"], TorchParty(3, 0, **NOWHERE).values()) > 0.1, "nothing was trained"
    assert apart(ends["jax"], ends["torch"]) < TOLERANCE
    assert apart(ends["mixed"], ends["torch"]) < TOLERANCE


@pytest.mark.redis
def test_a_learner_that_comes_back_has_the_runs_values(redis_server):
    """Of its own optimizer the caller says whether it was kept; what it counts goes on in the run."""
    how = {"run": "jax-again", "redis_url": redis_server, "learner_id": "again"}
    with a_syncer(redis_server, "jax-again"):
        with Learner(jax_params(), sync=ONE_FRAGMENT, **how) as one:
            params = jax.tree.map(lambda leaf: leaf + 1.0, one.params)
            one.step(params, tokens=1)
        until, runs = time.monotonic() + HANGING_S, one.globals()
        while not all(np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (runs, params)), strict=True)):
            assert time.monotonic() < until, "what it has trained was not merged"
            time.sleep(0.01)
            runs = one.globals()
        for kept, source in ((False, "fresh"), (True, "optimizer")):
            with Learner(jax_params(seed=1), moments_kept=kept, **how) as back:
                assert back.recovered == source
                for mine, theirs in zip(*map(jax.tree.leaves, (back.params, runs)), strict=True):
                    np.testing.assert_array_equal(mine, theirs)


@jax.jit
def slow_step(params: dict[str, Any]) -> dict[str, Any]:
    """Takes some milliseconds on the device, and far less to be queued."""
    turned = jnp.ones((400, 400)) * params["w"][0]
    for _ in range(8):
        turned = jnp.tanh(turned @ turned)
    return {"w": params["w"] + turned.mean()}


@pytest.mark.redis
def test_a_loop_is_never_more_than_one_step_ahead_of_its_device(redis_server):
    """JAX itself queues 32 steps and more: what arrives meanwhile would overwrite all of them."""
    waiting = []
    with (
        a_syncer(redis_server, "jax-ahead"),
        Learner({"w": jnp.ones(2)}, run="jax-ahead", redis_url=redis_server, sync=ONE_FRAGMENT) as one,
    ):
        params, made = one.params, []
        for _ in range(12):
            params = slow_step(params)
            made.append(params["w"])
            params = one.step(params, tokens=1)
            waiting.append(sum(not array.is_ready() for array in made))
    assert max(waiting) <= 1


@pytest.mark.redis
def test_a_report_waits_for_no_loss_and_one_that_is_donated_is_shown_all_the_same(redis_server):
    """Until its device is there, the one before is shown: the exchange's loop carries all that the learner sends."""
    taken = jax.jit(lambda one: one + 1.0, donate_argnums=0)
    with (
        a_syncer(redis_server, "jax-loss"),
        Learner({"w": jnp.ones(2)}, run="jax-loss", redis_url=redis_server, sync=ONE_FRAGMENT) as one,
    ):
        losses, params = one.joined.training.losses, one.params
        jax.block_until_ready(slow_step(params))  # compiled
        one.step(params, tokens=1, loss=1.5)
        queued = params
        for _ in range(8):
            queued = slow_step(queued)
        loss = queued["w"][0]
        one.step(params, tokens=1, loss=loss)
        assert losses.shown() == 1.5
        assert not loss.is_ready(), "the report has waited"
        trained = float(loss)
        taken(loss)
        assert loss.is_deleted()
        assert losses.shown() == trained
    assert [seen.report.loss for seen in reports(redis_server, "jax-loss")] == [trained]


@pytest.mark.redis
def test_a_loop_that_begins_with_values_of_its_own_loses_that_step_and_no_more(redis_server):
    """Its delta would be measured from values that it never had: it is given the run's, and told so."""
    with a_syncer(redis_server, "jax-own"), capture_logs() as logs:
        with Learner(jax_params(), run="jax-own", redis_url=redis_server, sync=ONE):
            pass
        with Learner(jax_params(seed=1), run="jax-own", redis_url=redis_server) as one:
            params = one.step(jax_params(seed=1), tokens=7)
            for mine, theirs in zip(*map(jax.tree.leaves, (params, jax_params())), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            one.step(params, tokens=7)
            assert one.joined.training.rounds.tokens == 7
    (said,) = [line for line in logs if line["event"] == "first_step_not_counted"]
    assert "params = learner.params" in said["detail"]


@pytest.mark.redis
def test_a_loop_that_breaks_off_with_donated_arrays_leaves_all_the_same(redis_server):
    """What they had is lost; what was published before is not."""
    with a_syncer(redis_server, "jax-donated"), capture_logs() as logs:
        one = Learner(jax_params(), run="jax-donated", redis_url=redis_server, sync=ONE)

        def break_off() -> None:
            with one:
                params = one.step(one.params, tokens=1)  # the first fragment is due, the second is not
                SGD_STEP(params, SGD.init(params), *batches(0, 0)())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            break_off()
        assert not one.left_in_order
        (withheld,) = [line["error"] for line in logs if line["event"] == "last_delta_withheld"]
        assert "was donated to a jitted function, and step() has not been called with its new value" in withheld
        assert jax.tree.structure(one.globals()) == jax.tree.structure(jax_params())


def test_the_twin_of_the_example_has_the_same_tensors(monkeypatch):
    """So one of each is a run; either may be first."""
    spec_of = []

    class Stop(Exception):
        """Before anything is connected."""

    def seen(self: Any, *_: Any, **__: Any) -> None:
        spec_of.append(self._proposed().tensor_table(SyncSettings(fragments=5)))
        raise Stop

    for learner in (Learner, TorchLearner):
        monkeypatch.setattr(learner, "open", seen)
    monkeypatch.setenv("DILOCO_REDIS_URL", NOWHERE["redis_url"])
    for example in (EXAMPLE, EXAMPLE.with_name("jax_twin.py")):
        with pytest.raises(Stop):
            runpy.run_path(str(example))
    assert spec_of[0] == spec_of[1]


@pytest.mark.redis
def test_the_example_learns_with_two_learners_that_end_with_one_model(tmp_path):
    """As a user would run it; they save the same bits."""
    for out, err in test_example.run_of(EXAMPLE, "jax-model", 300_000, tmp_path):
        found = re.search(r"last loss ([0-9.]+), of the run's values ([0-9.]+)", out)
        assert found, err
        assert max(map(float, found.groups())) < 4.5  # of ln 256 = 5.5
    one, other = (np.load(file) for file in tmp_path.glob("jax-model-*.npz"))
    assert {name: one[name].tobytes() for name in one} == {name: other[name].tobytes() for name in other}
    assert "['table']['embedding']" in one


# --- what is refused --------------------------------------------------------------------------------------


def donated() -> Any:
    params = {"w": jnp.ones(3)}
    jax.jit(lambda params: params, donate_argnums=0)(params)
    return params


REFUSED = {
    "an integer": (lambda: {"a": {"step": jnp.zeros((), jnp.int32)}}, {}, "leaf a.step is int32"),
    "a key": (lambda: {"key": jax.random.key(0)}, {}, r"leaf key is key<"),
    "a name of half a character": (
        lambda: {"a\ud800": jnp.ones(2)},
        {},
        r"leaf 'a\\ud800': its name is not valid Unicode",
    ),
    "eight bits": (
        lambda: [jnp.zeros(2, jnp.float8_e4m3fn)],
        {},
        "leaf 0 is float8_e4m3fn; .* may be float32, bfloat16",
    ),
    "a number": (lambda: {"w": 1.0}, {}, "leaf w is a float"),
    "only empty ones": (lambda: {"w": jnp.zeros((0, 3))}, {}, "none of the pytree's leaves has elements"),
    "a donated one": (donated, {}, "leaf w was donated"),
    "one name twice": (lambda: {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, {}, "leaves a.b and a.b are both 'a.b'"),
    "a long name": (lambda: {"w" * 1000: jnp.ones(1)}, {}, "a name of 1000 characters"),
    "many axes": (lambda: {"w": jnp.ones([1] * 20)}, {}, "leaf w has 20 dimensions"),
    "a name of nothing": (
        jax_params,
        {"names": {"hidden.weight": "x"}},
        "names: the pytree does not have a leaf 'hidden.weight'",
    ),
    "one name for two": (jax_params, {"names": {"out.bias": "hidden.bias"}}, "out.bias and hidden.bias are both"),
    "names as text": (jax_params, {"names": "out.bias"}, "names='out.bias': pass a dict of own name -> its name in"),
    "an embedding as text": (jax_params, {"embeddings": "out.kernel"}, "embeddings='out.kernel': pass a list of own"),
    "an embedding as a number": (jax_params, {"embeddings": 1}, "embeddings=1: pass a list of own names"),
    "moments kept in words": (jax_params, {"moments_kept": "no"}, "moments_kept='no': pass True or False"),
    "keys of two types": (lambda: {1: jnp.ones(1), "a": jnp.ones(1)}, {}, "Use keys of only one type"),
    "axes of another": (jax_params, {"names": {"out.kernel": ("w", (0,))}}, r"out.kernel -> 'w' with axes \(0,\)"),
    "an embedding of nothing": (
        jax_params,
        {"embeddings": ["table"]},
        "embeddings: the pytree does not have a leaf 'table'",
    ),
    "many fragments": (jax_params, {"sync": SyncSettings(fragments=9)}, "fragments=9, but the model has 4 trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pytree_that_cannot_be_trained_is_refused_at_once(case):
    """Before anything is connected, by the leaf's name."""
    make, how, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        Learner(make(), **how, **NOWHERE)


@pytest.mark.parametrize(
    "wrong", [None, 3, ("x",), ("x", (0, 1), 2), ("x", None), ("x", (0.0, 1.0)), ("x", "ab"), (5, (1, 0))], ids=repr
)
def test_a_name_that_is_none_is_refused_with_the_form_that_is_wanted(wrong):
    """At once, and not where the run is proposed."""
    with pytest.raises(
        UsageError, match=r"names: out.kernel -> .*; give its name in the run, or \(its name in the run"
    ):
        Learner(jax_params(), names={"out.kernel": wrong}, **NOWHERE)


def deleted() -> Any:
    """An array that is no longer there."""
    (array := jnp.ones(())).delete()
    return array


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (deleted, "loss was donated to a jitted function"),
        (lambda: jax.random.key(0), "loss: key<fry> of shape ()"),
        (lambda: jnp.ones((), complex), "loss: complex64 of shape ()"),
        (lambda: jnp.ones(2), "loss: float32 of shape (2,)"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_at_its_step(loss, said):
    """The exchange would find out later, and end the loop."""
    with pytest.raises(UsageError, match=re.escape(said)):
        Learner(params := {"w": jnp.ones(2)}, run="r", **NOWHERE).step(params, tokens=1, loss=loss())


def test_a_key_is_no_count_of_tokens():
    """It is told at its step, in words."""
    with pytest.raises(UsageError, match=re.escape("tokens: key<fry> of shape (); pass a number")):
        Learner(params := {"w": jnp.ones(2)}, run="r", **NOWHERE).step(params, tokens=jax.random.key(0))


def test_embeddings_may_come_one_after_another():
    """A generator gives its names once, and each is heeded."""
    tree = Tree(jax_params(), embeddings=(name for name in ("out.kernel", "hidden.kernel")))
    assert {leaf.path for leaf in tree.leaves if leaf.embedding} == {"out.kernel", "hidden.kernel"}


@pytest.mark.redis
def test_arrays_of_numpy_train_as_those_that_jax_makes_of_them(redis_server):
    """Of float64 and of another order of bytes: the run has float32, and takes both a step later."""
    values = np.array([1.5, -2.0, 3.0])
    params = {"double": values, "turned": values.astype(">f4"), "half": values.astype(">f2")}
    how = {"run": "jax-numpy", "redis_url": redis_server, "sync": ONE}
    with a_syncer(redis_server, "jax-numpy"), Learner(params, **how) as one:
        assert {name: leaf.dtype.name for name, leaf in one.params.items()} == {
            "double": "float32",
            "turned": "float32",
            "half": "float16",
        }
        assert all(np.array_equal(leaf, values) for leaf in one.params.values())
        one.step(one.params, tokens=1)
        given = one.step(jax.tree.map(lambda leaf: leaf + 1, params), tokens=1)
        assert all(np.array_equal(leaf, values + 1) for leaf in given.values())


@pytest.mark.redis
def test_another_pytree_than_the_one_that_joined_is_refused_at_its_step(redis_server):
    """By name; and the learner goes on with the right one."""
    one = Learner(jax_params(), run="jax-changed", redis_url=redis_server, sync=ONE)
    with a_syncer(redis_server, "jax-changed"), one:
        params = one.params
        more = params | {"extra": jnp.ones(2)}
        wide = params | {"out": {"kernel": params["out"]["kernel"], "bias": jnp.ones(9)}}
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        for wrong, said in (
            (more, "leaf extra did not exist"),
            ({"hidden": params["hidden"]}, "leaf out.bias no longer exists"),
            (tuple(params.values()), "leaf 0.bias did not exist"),
            (wide, r"leaf out.bias was float32 of shape \(4,\) when the learner joined and is float32 of shape \(9,\)"),
            (params | {1: jnp.ones(2)}, "Use keys of only one type"),
            (half, "leaf hidden.bias was float32 .* and is bfloat16"),
        ):
            with pytest.raises(UsageError, match=said):
                one.step(wrong, tokens=1)
        with pytest.raises(UsageError, match="pass one number"):
            one.step(params, tokens=1, loss="low")
        with pytest.raises(UsageError, match="traced"):
            jax.jit(lambda params: one.step(params, tokens=1))(params)
        with pytest.raises(UsageError, match="tokens"):
            one.step(params, tokens=jnp.asarray(0.5))
        assert one.joined.training.rounds.steps == 0
        one.step(params, tokens=jnp.asarray(3))
        assert one.joined.training.rounds.tokens == 3
    with pytest.raises(UsageError, match="not in a run"):
        one.step(params, tokens=1)


@pytest.mark.redis
def test_a_pytree_that_is_not_the_runs_is_refused_with_the_difference(redis_server):
    """Without the table names and axes are its own; the refusal says that there is such a table."""
    with a_syncer(redis_server, "jax-other"):
        how = {"run": "jax-other", "redis_url": redis_server}
        with Learner(jax_params(), names=NAMES, sync=ONE, **how):
            pass
        difference = r"(?s)tensor 0.weight: here absent, the run has \[16, 8\].*names=\{"
        with pytest.raises(SpecMismatch, match=difference):
            Learner(jax_params(), **how).open()
        with pytest.raises(SpecMismatch) as other_settings:
            Learner(jax_params(), names=NAMES, sync=ONE.model_copy(update={"sync_interval": 4}), **how).open()
        assert "names=" not in str(other_settings.value), "the tensors are the same"
