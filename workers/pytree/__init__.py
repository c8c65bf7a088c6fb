"""A learner whose model is a pytree of JAX arrays."""
