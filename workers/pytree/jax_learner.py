"""The learner of a pytree of JAX arrays: the exchange is that of torch's learners, on the same wire.

    with Learner(params, run="my-run", redis_url=...) as learner:
        params = learner.params
        while not learner.finished:
            params, moments, loss = train_step(params, moments, batch)
            params = learner.step(params, tokens=batch.size, loss=loss)

An array never changes, so what is adopted comes back from `step`. The optimizer and its moments are the caller's alone:
they stay as a fragment is adopted, and no peer is asked for them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import structlog

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import LEAVE_S, SyncSettings
from diloco.workers.base_learner import BaseLearner
from diloco.workers.checks.arguments import check_arguments, one_loss, whole_tokens
from diloco.workers.copies.losses import Loss
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.local_state import OwnMoments, RecoveryOptions
from diloco.workers.moments.recovery import Recovery
from diloco.workers.progress_schedule import WARMUP, Shape, ShareByProgress
from diloco.workers.pytree.leaves import PytreeParameters
from diloco.workers.pytree.table import PytreeModel
from diloco.workers.pytree.tree import Names, Tree
from diloco.workers.rounds import Rounds
from diloco.workers.spec_proposal import fitting
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training


class Learner(BaseLearner):
    """One learner of a run."""

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
        """Nothing is connected before `with`, or `open`.

        Args:
            params: a pytree of arrays in floating point, all of which are synchronised. Its structure, shapes and types
                are settled here. One of numpy counts as the array that JAX makes of it: float64 is float32, unless
                `jax_enable_x64` is set.
            run, redis_url, learner_id, sync, tokens, trainer, leave_s: as torch's `Learner` has them.
            names: what leaves are called in the run, where learners of another framework call them otherwise: own name
                -> name, or (name, order of the axes there). A learner that is first lists its tensors in this order.
            embeddings: own names of the leaves whose rows are vectors, one a token, which are merged as such. Default:
                those that Flax and Haiku call `embedding` and `embeddings`.
            moments_kept: the optimizer's moments are those of an earlier life, from a checkpoint of the caller's own:
                `recovered` says so, and a schedule has no ramp for young ones.

        Raises:
            UsageError: no Redis URL; or an argument or a leaf that cannot be used, by name.
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
            self._proposed().tensor_table(fitting(given.sync, self._proposed()))
        self._params, self._moments_kept = params, moments_kept
        self._parameters: PytreeParameters | None = None
        """Of the run that was joined."""
        self._taken = False
        """The loop has had the run's parameters."""
        self._done: Any = None
        """An element that is there once the step before is done, and that nobody donates."""

    @property
    def params(self) -> Any:
        """The parameters as they are here now: the run's on joining, then what the last `step` gave."""
        if self._parameters is None:
            return self._params
        self._taken = True
        return self._parameters.params

    def step(self, params: Any, tokens: Any, loss: Any = None) -> Any:
        """Count an inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        It waits until the step before is done. JAX would queue dozens of steps, all trained without what has arrived
        meanwhile, and overwritten by it; and their times would be those of queuing.

        Args:
            params: as the step has left them; it is not waited for, and they may be donated to the next one.
            tokens: trained in this step: a whole number from 0; one on a device is read at once, which waits for it.
            loss: one number, shown in reports; an array is not waited for, and shown once its device is there.

        Returns:
            What to train on: the same arrays, but for those that the run has newer values of.

        Raises:
            UsageError: an argument that is none of that, the pytree is no longer the one that is synchronised, or the
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
            detail = "it began with values of its own: say `params = learner.params` first in the `with` block"
            structlog.get_logger().warning("first_step_not_counted", learner=self.id, detail=detail)
        one = leaves[self._smallest]  # taken by now: whoever interrupts the wait leaves with them
        done, self._done = self._done, jnp.copy(one[(slice(0, 1),) * one.ndim])
        jax.block_until_ready(done)
        self._step(trained, told)
        return parameters.params

    def progress_schedule(
        self, *, shape: Shape = "cosine", warmup: float = WARMUP, decay: float = 0.2, final: float = 0.1
    ) -> Callable[[], float]:
        """What gives the share of the peak learning rate now, by the run's progress: pass it to your step.

        Args:
            shape, warmup, decay, final: as of torch's `Learner`.

        Raises:
            UsageError: one of these is out of bounds.
        """
        share = ShareByProgress((shape, warmup, decay, final), self._place)
        return lambda: share(0)

    def globals(self) -> Any:
        """The pytree with the newest global values, whatever stands here; waits for the network.

        After `close` in a run that ends, its last merges are waited for: then it is the finished run's model.

        Raises:
            UsageError: the learner has not joined its run yet.
            SpecMismatch, BusError, BadPayload: the run is no longer there, or cannot be read for a minute.
        """
        flats = self._life.once_joined.newest(self._read)
        assert self._parameters is not None, "joined without parameters"  # noqa: S101
        return self._parameters.whole(flats)

    # --- joining ----------------------------------------------------------------------------------------

    def open(self) -> Self:
        """As `BaseLearner.open`; where tensors differ, it tells of `names`."""
        try:
            super().open()
        except SpecMismatch as error:
            if not error.tensors:
                raise
            raise SpecMismatch(f"{error}\n{NAMES_HINT}") from error
        self._params = None  # so that nothing keeps their memory
        return self

    def _proposed(self) -> PytreeModel:
        return PytreeModel(self._tree)

    def _prepare(self) -> tuple[Training, ExchangeThread]:
        leaves = arrays(self._tree.flatten(self._params))
        spec = self._proposal()
        layout = layout_of(spec.tensors)
        parameters = self._parameters = PytreeParameters(self._tree, layout, leaves)
        rounds = Rounds(layout, spec.sync)
        told = self._given.run, self.id, self.incarnation, layout.trained, RecoveryOptions()
        moments = OwnMoments(*told, state=None, held=self._moments_kept, folder=None)
        training = Training(
            self.id,
            self.incarnation,
            spec,
            layout,
            rounds,
            parameters=cast(Any, parameters),  # its `snapshot` and `overwrite` are all that is asked of it
            encode_on_device=False,
            watch=cast(Any, parameters),
            recovery=Recovery(moments),
            keeper=Keeper(moments, rounds),
            times=self.times,
        )
        return training, ExchangeThread(self._url, self._given.run, training)


NAMES_HINT = (
    "If it is the same model, with other names or axes as learners in torch have them, say so: own name -> the run's "
    'name, and the order of the axes there, as in Learner(..., names={"hidden.kernel": ("0.weight", (1, 0))})'
)


def arrays(leaves: list[Any]) -> list[Any]:
    """Leaves as JAX's own: one of numpy may be written to, and JAX takes none with its bytes the other way round."""
    return [
        leaf if isinstance(leaf, jax.Array) else jnp.array(leaf.astype(leaf.dtype.newbyteorder("="), copy=False))
        for leaf in leaves
    ]


def _is_concrete(name: str, value: Any) -> bool:
    """Whether it is an array of JAX's.

    Raises:
        UsageError: it has no value, since it is traced or was donated; or it holds no numbers.
    """
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"{name} is traced: call the learner outside of jit, grad and scan")
    if not isinstance(value, jax.Array):
        return False
    if value.is_deleted():
        raise UsageError(
            f"{name} was donated to a jitted function, and is no longer there: pass what that has returned"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):  # such as a random key
        raise UsageError(f"{name}: {value.dtype} of shape {value.shape}; pass a number")
    return True


class _LossArray:
    """A `Loss`: an array never changes, so there is nothing to copy."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def ready(self) -> bool:
        """As `Loss`."""
        return bool(self._array.is_ready())

    def number(self) -> float:
        """As `Loss`."""
        return float(self._array)


def _loss(loss: Any) -> Loss | None:
    """As `one_loss`; an array stays one, so that nothing waits for its device."""
    if not _is_concrete("loss", loss):
        return one_loss(loss)
    if loss.size != 1 or jnp.iscomplexobj(loss):
        raise UsageError(f"loss: {loss.dtype} of shape {loss.shape}; pass one number, or leave it out")
    return _LossArray(loss.reshape(()))
