"""The learner for a pytree of JAX arrays; exchange and wire format are the same as for torch.

    with Learner(params, run="my-run", redis_url=...) as learner:
        params = learner.params
        while not learner.finished:
            params, moments, loss = train_step(params, moments, batch)
            params = learner.step(params, tokens=batch.size, loss=loss)

An array never changes, so adopted values are returned by `step`. The optimizer and its moments belong only to the
caller: they are kept when a fragment is adopted, and no peer is asked for moments.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import structlog

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import LEAVE_S, SyncSettings
from diloco.workers.base_learner import BaseLearner
from diloco.workers.checks.arguments import check_arguments, one_loss, whole_tokens
from diloco.workers.copies.losses import Loss
from diloco.workers.joined import LearnerThread
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.local_state import OwnMoments, RecoveryOptions
from diloco.workers.moments.recovery import Recovery
from diloco.workers.progress_schedule import WARMUP, Shape, ShareByProgress
from diloco.workers.proposed import Proposed
from diloco.workers.pytree.leaves import PytreeParameters
from diloco.workers.pytree.tree import Names, Tree
from diloco.workers.rounds import Rounds
from diloco.workers.spec_proposal import fitting
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training


class Learner(BaseLearner):
    """One learner of a run, whose model is a pytree."""

    def __init__(
        self,
        params: Any,
        *,
        run: str | None = None,
        redis_url: str | None = None,
        learner_id: str | None = None,
        sync: SyncSettings | None = None,
        tokens: int | str | None = None,
        trainer: Mapping[str, Any] | None = None,
        leave_s: float = LEAVE_S,
        names: Names | None = None,
        embeddings: Iterable[str] | None = None,
        moments_kept: bool = False,
    ) -> None:
        """Make a learner. It connects to nothing before `with` or `open`.

        Args:
            params: a pytree of floating-point arrays, all of which are synchronised. Its structure, shapes and types
                are fixed here. A numpy array counts as the array that JAX makes of it: float64 becomes float32, unless
                `jax_enable_x64` is set.
            run, redis_url, learner_id, sync, tokens, trainer, leave_s: see torch's `Learner`.
            names: names of the leaves in the run, if learners of another framework name them otherwise: own name ->
                name, or (name, order of the axes there). The first learner of a run lists its tensors in this order.
            embeddings: own names of the leaves whose rows are vectors, one a token, and are merged as such. Default:
                those that Flax and Haiku call `embedding` and `embeddings`.
            moments_kept: the caller has restored the optimizer's moments from a checkpoint of its own: `recovered` says
                so, and a schedule does not ramp up for young moments.

        Raises:
            UsageError: there is no Redis URL, or an argument or a leaf cannot be used; the message names it.
        """
        given = check_arguments(
            run=run,
            redis_url=redis_url,
            learner_id=learner_id,
            sync=sync,
            tokens=tokens,
            trainer=dict(trainer) if isinstance(trainer, Mapping) else trainer,
            leave_s=leave_s,
        )
        if not isinstance(moments_kept, bool):
            raise UsageError(f"Learner: moments_kept={moments_kept!r}: pass True or False")
        self._tree = Tree(params, names, embeddings)
        self._smallest = min(self._tree.leaves, key=lambda leaf: leaf.elements).at
        super().__init__(given, Stopping())
        if given.sync is not None:
            proposed = self._proposed()
            proposed.tensor_table(fitting(given.sync, proposed))
        self._params, self._moments_kept = params, moments_kept
        self._parameters: PytreeParameters | None = None  # those of the joined run
        self._taken = False  # the loop has read the run's parameters
        self._done: Any = None  # a copied element, which nobody can donate; ready when the previous step is done

    @property
    def params(self) -> Any:
        """The current parameters: the run's when it joins, then what the last `step` returned."""
        if self._parameters is None:
            return self._params
        self._taken = True
        return self._parameters.params

    def step(self, params: Any, tokens: Any, loss: Any = None) -> Any:
        """Count the inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        It waits until the previous step is done. Otherwise JAX would queue dozens of steps that are trained without
        what arrives meanwhile and then overwritten by it, and their measured times would be those of queuing.

        Args:
            params: as the step has returned them; this does not wait for them, and they may be donated to the next
                step.
            tokens: number trained in this step: a whole number from 0; one on a device is read at once, which waits for
                it.
            loss: one number, shown in reports. This does not wait for an array, which is shown once its device has it.

        Returns:
            The parameters to train on: the same arrays, except those of which the run has newer values.

        Raises:
            UsageError: an argument is none of these, the pytree is no longer the synchronised one, or the
                learner is not in its run.
        """
        leaves, told = arrays(self._tree.flatten(params)), _loss(loss)
        trained = whole_tokens(np.asarray(tokens) if _is_concrete("tokens", tokens) else tokens)
        _, parameters = self.joined, self._parameters
        assert parameters is not None, "joined without parameters"  # noqa: S101
        if self._taken:
            parameters.take(leaves)
        else:
            trained, self._taken = 0, True
            detail = "it started from its own values: put `params = learner.params` first in the `with` block"
            structlog.get_logger().warning("first_step_not_counted", learner=self.id, detail=detail)
        # The leaves were taken above, so an interrupt of the wait below does not lose this step's training.
        one = leaves[self._smallest]
        done, self._done = self._done, jnp.copy(one[(slice(0, 1),) * one.ndim])
        jax.block_until_ready(done)
        self._step(trained, told)
        return parameters.params

    def progress_schedule(
        self, *, shape: Shape = "cosine", warmup: float = WARMUP, decay: float = 0.2, final: float = 0.1
    ) -> Callable[[], float]:
        """Return a function that gives the current share of the peak learning rate by the run's progress.

        Call it for each step, and pass the share to the step.

        Args:
            shape, warmup, decay, final: see torch's `Learner`.

        Raises:
            UsageError: an argument is out of bounds.
        """
        share = ShareByProgress((shape, warmup, decay, final), self._schedule_inputs)
        return lambda: share(0)

    def globals(self) -> Any:
        """Return the pytree with the newest global values, without changing the current one; waits for the network.

        After `close` in a run that is ending, this waits for the last merges: the result is then the finished run's
        model.

        Raises:
            UsageError: the learner has not joined its run yet.
            SpecMismatch, BusError, BadPayload: the run is no longer there, or could not be read for a minute.
        """
        flats = self._once_joined.newest(self._read)
        assert self._parameters is not None, "joined without parameters"  # noqa: S101
        return self._parameters.whole(flats)

    # --- joining ----------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Join, as `BaseLearner.open` does; if tensors differ, the error explains `names`."""
        try:
            super().open()
        except SpecMismatch as error:
            if not error.tensors:
                raise
            raise SpecMismatch(f"{error}\n{NAMES_HINT}") from error
        self._params = None  # frees the memory of the initial parameters
        return self

    def _proposed(self, held: Spec | None = None) -> Proposed:
        return self._tree.described(() if held is None else held.tensors)

    def _prepare(self) -> LearnerThread:
        leaves = arrays(self._tree.flatten(self._params))
        spec = self._proposal()
        layout = layout_of(spec.tensors)
        rounds, parameters = Rounds(layout, spec.sync), PytreeParameters(self._tree, layout, leaves)
        self._parameters = parameters
        who = self.id, self.incarnation
        told = self._given.run, *who, layout.trained, RecoveryOptions()
        moments = OwnMoments(*told, state=None, held=self._moments_kept, folder=None)
        recovery, keeper = Recovery(moments), Keeper(moments, rounds)
        training = Training(*who, spec, layout, rounds, parameters, recovery, keeper, self.times)
        return LearnerThread(self._url, self._given.run, training)


NAMES_HINT = (
    "If it is the same model under other names or axis orders, as in a torch learner, map own names to (the run's "
    'name, the order of its axes there): Learner(..., names={"hidden.kernel": ("0.weight", (1, 0))})'
)


def arrays(leaves: list[Any]) -> list[Any]:
    """Return leaves as JAX arrays.

    A numpy array is copied, because it may be written to; it is also converted to native byte order, which JAX
    requires.
    """
    return [
        leaf if isinstance(leaf, jax.Array) else jnp.array(leaf.astype(leaf.dtype.newbyteorder("="), copy=False))
        for leaf in leaves
    ]


def _is_concrete(name: str, value: Any) -> bool:
    """Return whether a value is a JAX array.

    Raises:
        UsageError: it has no value, because it is traced or was donated; or it holds no numbers.
    """
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"{name} is traced: call the learner outside of jit, grad and scan")
    if not isinstance(value, jax.Array):
        return False
    if value.is_deleted():
        raise UsageError(
            f"{name} was donated to a jitted function and no longer exists: pass what that function returned"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):  # such as a random key
        raise UsageError(f"{name}: {value.dtype} of shape {value.shape}; pass a number")
    return True


class _LossArray:
    """A `Loss` that is a JAX array. An array never changes, so there is nothing to copy."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def ready(self) -> bool:
        """Return True if `number` would not wait (`Loss.ready`)."""
        return bool(self._array.is_ready())

    def number(self) -> float:
        """Return the loss; may wait for the device (`Loss.number`)."""
        return float(self._array)


def _loss(loss: Any) -> Loss | None:
    """Return a loss as `one_loss` does, but leave an array on its device, so that nothing waits for it."""
    if not _is_concrete("loss", loss):
        return one_loss(loss)
    if loss.size != 1 or jnp.iscomplexobj(loss):
        raise UsageError(f"loss: {loss.dtype} of shape {loss.shape}; pass one number, or leave it out")
    return _LossArray(loss.reshape(()))
