"""One small classifier, in torch and in JAX, on the same data: both begin with the same values and step by SGD."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from diloco.pipeline.settings import SyncSettings
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import until

FEATURES, HIDDEN, CLASSES, BATCH = 8, 16, 4, 16
RATE = 0.1
NAMES = {
    "hidden.kernel": ("0.weight", (1, 0)),
    "hidden.bias": "0.bias",
    "out.kernel": ("2.weight", (1, 0)),
    "out.bias": "2.bias",
}
"""JAX's kernels are [in, out], torch's weights [out, in]."""

Batch = tuple[np.ndarray, np.ndarray]


def batches(seed: int, learner: int) -> Callable[[], Batch]:
    """What gives a learner's next batch; classes are the same for all seeds and learners."""
    truth = np.random.default_rng(99).standard_normal((FEATURES, CLASSES))
    rng = np.random.default_rng([seed, learner])

    def draw() -> Batch:
        inputs = rng.standard_normal((BATCH, FEATURES)).astype(np.float32)
        return inputs, (inputs @ truth).argmax(1)

    return draw


def jax_params(seed: int = 0) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int) -> dict[str, Any]:
        kernel = rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(outputs)}

    return {"hidden": layer(FEATURES, HIDDEN), "out": layer(HIDDEN, CLASSES)}


def torch_model(seed: int = 0) -> nn.Module:
    """With the values of `jax_params`."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for module, layer in zip((model[0], model[2]), jax_params(seed).values(), strict=True):
            module.weight.copy_(torch.tensor(np.asarray(layer["kernel"]).T))
            module.bias.copy_(torch.tensor(np.asarray(layer["bias"])))
    return model


def jax_loss(params: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def jax_step(optimizer: Any) -> Callable[..., Any]:
    """Its arguments are donated, as they are in programs that are short of memory."""

    def step(params: Any, moments: Any, inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(jax_loss)(params, inputs, targets)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return jax.jit(step, donate_argnums=(0, 1))


SGD = optax.sgd(RATE)
SGD_STEP = jax_step(SGD)


class JaxParty:
    """A learner of the pytree, step by step."""

    def __init__(self, seed: int, number: int, **how: Any) -> None:
        from diloco.jax import Learner

        self.learner, self._draw = Learner(jax_params(seed), **how), batches(seed, number)

    def joined(self) -> None:
        """Training begins."""
        self._params = self.learner.params
        self._moments = SGD.init(self._params)

    def train(self) -> None:
        self._params, self._moments, loss = SGD_STEP(self._params, self._moments, *self._draw())
        self._params = self.learner.step(self._params, tokens=BATCH, loss=loss)

    def adopt(self) -> None:
        """A step that trains nothing."""
        self._params = self.learner.step(self._params, tokens=0)

    def globals(self) -> dict[str, np.ndarray]:
        """The run's."""
        self._params = self.learner.globals()
        return self.values()

    def values(self) -> dict[str, np.ndarray]:
        """By torch's names, with torch's axes."""
        found = jax.tree_util.tree_flatten_with_path(self._params)[0]
        named = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in found}
        return {
            NAMES[name][0] if leaf.ndim > 1 else str(NAMES[name]): leaf.T if leaf.ndim > 1 else leaf
            for name, leaf in named.items()
        }


class TorchParty:
    """A learner of the module, step by step."""

    def __init__(self, seed: int, number: int, **how: Any) -> None:
        from diloco import Learner

        self._model, self._draw = torch_model(seed), batches(seed, number)
        self._optimizer = torch.optim.SGD(self._model.parameters(), RATE)
        self.learner = Learner(self._model, self._optimizer, **how)

    def joined(self) -> None:
        """Training begins."""

    def train(self) -> None:
        inputs, targets = map(torch.from_numpy, self._draw())
        loss = nn.functional.cross_entropy(self._model(inputs), targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.learner.step(tokens=BATCH, loss=loss)

    def adopt(self) -> None:
        """A step that trains nothing."""
        self.learner.step(tokens=0)

    def globals(self) -> dict[str, np.ndarray]:
        """The run's."""
        self.learner.load_globals()
        return self.values()

    def values(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self._model.named_parameters()}


IN_STEP = SyncSettings(
    fragments=1,
    first_interval=0,
    quorum=2,
    overlap_steps=10**6,  # a round trip of any length: every H steps both publish
    tokens=2**40,
)


def in_step(
    kinds: tuple[type[Any], ...], url: str, run: str, seed: int, sync: SyncSettings, rounds: int
) -> list[dict[str, np.ndarray]]:
    """What each of two learners has after rounds in step: both train, publish, and adopt what came of it.

    sync: as `IN_STEP`. So all runs merge after the same steps, whatever time they take.
    """
    with ExitStack() as stack:
        stack.enter_context(a_syncer(url, run))
        parties = []
        for number, kind in enumerate(kinds):
            names = {"names": NAMES} if kind is JaxParty else {}
            parties.append(kind(seed, number, run=run, redis_url=url, sync=sync, learner_id=f"l{number}", **names))
            stack.enter_context(parties[-1].learner)
            parties[-1].joined()
        for number in range(rounds):
            for _ in range(sync.sync_interval if number else 1):  # on version 0 the fragment is due at once
                for party in parties:  # in turns: who sees an open window would publish before it is due
                    party.train()
            until(lambda: all(party.learner.joined.shared.adoptions for party in parties))
            for party in parties:
                party.adopt()
        assert all(party.learner.joined.training.rounds.versions == (rounds,) for party in parties)
        return [party.values() for party in parties]
