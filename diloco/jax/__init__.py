"""A learner of JAX parameters, with optax or any other optimizer: `from diloco.jax import Learner`."""

from diloco.extras import naming_extra

with naming_extra("diloco.jax", "jax"):
    from diloco.workers.pytree.jax_learner import Learner

__all__ = ["Learner"]
