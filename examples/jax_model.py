"""Train a model in JAX with optax as a learner: it predicts the next byte of Python source from the eight before.

Start a syncer (`diloco syncer --run jax-model`), then this script once per learner, all with DILOCO_REDIS_URL set.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.jax import Learner

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 24, 192, 2048

NAMES = {  # names and axes for torch learners in the same run (jax_twin.py); a run in JAX alone needs none
    "table.embedding": "table.weight",
    "hidden.kernel": ("hidden.weight", (1, 0)),
    "hidden.bias": "hidden.bias",
    "out.kernel": ("out.weight", (1, 0)),
    "out.bias": "out.bias",
}

text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
rng = np.random.default_rng()  # each learner draws rows of its own


def initial(key: jax.Array) -> dict:
    """Return the initial parameters: any pytree of arrays would do."""
    table, hidden, out = jax.random.split(key, 3)
    return {
        "table": {"embedding": 0.1 * jax.random.normal(table, (256, WIDTH))},
        "hidden": {
            "kernel": jax.random.normal(hidden, (CONTEXT * WIDTH, HIDDEN)) / (CONTEXT * WIDTH) ** 0.5,
            "bias": jnp.zeros(HIDDEN),
        },
        "out": {"kernel": jax.random.normal(out, (HIDDEN, 256)) / HIDDEN**0.5, "bias": jnp.zeros(256)},
    }


def loss_of(params: dict, rows: jax.Array) -> jax.Array:
    """Return the mean loss in nats of the last byte of each row (B, CONTEXT + 1)."""
    inputs = params["table"]["embedding"][rows[:, :-1]].reshape(len(rows), -1)
    hidden = jnp.tanh(inputs @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]).mean()


optimizer = optax.adamw(3e-3)


def train_step(params: dict, moments: optax.OptState, rows: jax.Array, share: float) -> tuple:
    """Take one step of the optimizer, at this share of its learning rate."""
    loss, gradients = jax.value_and_grad(loss_of)(params, rows)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, jax.tree.map(lambda update: share * update, updates)), moments, loss


def drawn() -> np.ndarray:
    """Draw rows of the text (BATCH, CONTEXT + 1)."""
    starts = rng.integers(len(text) - CONTEXT, size=(BATCH, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


train_step = jax.jit(train_step, donate_argnums=(0, 1))
loss = None
with Learner(initial(jax.random.key(0)), names=NAMES, run="jax-model") as learner:
    params, rate = learner.params, learner.progress_schedule()
    moments = optimizer.init(params)
    while not learner.finished:
        params, moments, loss = train_step(params, moments, drawn(), rate())
        params = learner.step(params, tokens=BATCH, loss=loss)
params = learner.globals()  # the run's values, the same for all learners
rng = np.random.default_rng(0)  # the same rows for all learners
own = f"last loss {loss:.3f}" if loss is not None else "the run is finished already"
print(f"{own}, of the run's values {loss_of(params, drawn()):.3f}")
np.savez(
    f"jax-model-{learner.id}.npz", **{jax.tree_util.keystr(p): leaf for p, leaf in jax.tree.leaves_with_path(params)}
)
