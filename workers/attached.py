"""Count inner steps through torch's optimizer step hooks, in loops that are not ours to change.

A step hook runs inside `optimizer.step()`, after the update: after accumulation and clipping, before schedulers and
`zero_grad`. If torch's GradScaler skips a step, it calls no hook. A fused optimizer is always called, and itself leaves
its parameters unchanged if `found_inf` says so.

When an inner step is over, with the optimizers in the order in which they step:

| what happens                                        | the step is over                                |
|-----------------------------------------------------|-------------------------------------------------|
| the last one steps                                  | then                                            |
| the last one sits it out (skipped, or steps seldom) | just before the first update of the next step   |

The next step has begun when an optimizer is about to update that does not come after all that have updated so far.

So each step is counted once, whichever optimizer sits out, and never while an update is half made.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import structlog
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.checks.arguments import one_loss, whole_tokens
from diloco.workers.checks.model_checks import check_optimizer
from diloco.workers.copies.losses import Loss
from diloco.workers.copies.snapshots import snapshot_of


class Flag:
    """The device-side flag by which the GradScaler tells a fused optimizer to skip its step."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        """found_inf: one number; not 0: skipped."""
        self._copy = snapshot_of(found_inf)  # asynchronous: reading it now would wait for the whole step

    def says_skipped(self) -> bool:
        """Return True if the step is known to be skipped; False also while the flag is on its way to host memory."""
        return self._copy.ready() and bool(self._copy.tensor().item())


class StepTokens:
    """Corrects the tokens of steps that turn out, one step later, to have been skipped. Pure but for the flags."""

    def __init__(self) -> None:
        self._last: tuple[int, list[Flag | None]] = 0, []
        self._debt = 0  # tokens counted for skipped steps, to be deducted from later ones

    def counted(self, tokens: int, flags: list[Flag | None]) -> int:
        """Return how many tokens to count for a step now.

        Args:
            tokens: of the step.
            flags: one for each optimizer that made the step; None: it certainly did.
        """
        before, skipped = self._last
        if skipped and all(flag is not None and flag.says_skipped() for flag in skipped):
            self._debt += before
        paid = min(self._debt, tokens)
        self._debt -= paid
        self._last = tokens, flags
        return tokens - paid


def asking(tokens: Any) -> Callable[[], int]:
    """Return a function that gives the tokens of each inner step, from a number or a callable.

    Raises:
        UsageError: it is neither.
    """
    if callable(tokens):
        return lambda: whole_tokens(tokens())
    whole = whole_tokens(tokens)
    return lambda: whole


def asking_loss(loss: Any) -> Callable[[], Loss | None]:
    """Return a function that gives the loss of each inner step, from a callable; None: there is no loss.

    Raises:
        UsageError: it cannot be called.
    """
    if loss is None:
        return lambda: None
    if not callable(loss):
        raise UsageError("attach(loss=...): pass a function that returns each step's loss, such as `lambda: loss`")
    return lambda: one_loss(loss())


def unwrapped(model: nn.Module, given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that train a model, without their wrappers, from one or several.

    Raises:
        UsageError: there is none, one is named twice, or one trains nothing of the model.
    """
    optimizers = given if isinstance(given, list | tuple) else [given]
    if not optimizers:
        raise UsageError("the list of optimizers is empty: pass one, or None")
    inner = [check_optimizer(model, one) for one in optimizers]
    hooked = [one for one in inner if one is not None]
    if not hooked or len(hooked) < len(inner) or len(set(map(id, hooked))) < len(hooked):
        raise UsageError(
            "pass each optimizer once (optimizers=...), or create the Learner with one optimizer or a list of them"
        )
    return hooked


def alone(model: nn.Module, given: Any) -> torch.optim.Optimizer:
    """Return the only optimizer given, without its wrappers.

    Raises:
        UsageError: see `unwrapped`; or there are several.
    """
    hooked = unwrapped(model, given)
    if len(hooked) > 1:
        raise UsageError("the learner has several optimizers: say which one you mean")
    return hooked[0]


def warn_unkept(hooked: Iterable[torch.optim.Optimizer], kept: Iterable[torch.optim.Optimizer]) -> None:
    """Warn of optimizers that the learner was made without, so that a restart will not find their moments."""
    known = {id(one) for one in kept}
    if strange := [type(one).__qualname__ for one in hooked if id(one) not in known]:
        detail = (
            "a restart will not find their moments: pass all of them when creating the learner: Learner(model, "
            "[one, another])"
        )
        structlog.get_logger().warning("optimizers_unknown", optimizers=strange, detail=detail)


def warn_replaced(hooked: Iterable[torch.optim.Optimizer]) -> None:
    """Warn of optimizers whose `step` was replaced on the instance: the replacement may never call the hooks."""
    if replaced := [type(one).__qualname__ for one in hooked if not getattr(one.step, "hooked", False)]:
        detail = (
            "its steps are counted only if the replacement of `step` calls the original; otherwise call Learner.step"
        )
        structlog.get_logger().warning("step_replaced", optimizers=replaced, detail=detail)


class Attached:
    """One learner's hooks in its optimizers. Used by the training thread only."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        tokens: Callable[[], int],
        loss: Callable[[], Loss | None],
        stepped: Callable[[int, Loss | None], None],
    ) -> None:
        """Register the hooks.

        Args:
            optimizers: in the order in which they step.
            tokens, loss: each called once for each inner step, when its first update is made.
            stepped: called with the tokens and the loss of each finished inner step.
        """
        self._tokens, self._loss, self._stepped, self._last = tokens, loss, stepped, len(optimizers) - 1
        self._made: dict[int, Flag | None] = {}  # places of the optimizers that have made an update in this step
        self._asked: tuple[int, Loss | None] = 0, None  # tokens and loss of this step
        self._counts = StepTokens()
        self._stepping = self._off = False
        # A compiled `step` then just calls the hooks, instead of recompiling for each new number in them.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._handles = [
            handle
            for place, optimizer in enumerate(optimizers)
            for handle in (
                optimizer.register_step_pre_hook(partial(before, place)),
                optimizer.register_step_post_hook(partial(after, place)),
            )
        ]

    def detach(self) -> None:
        """Remove the hooks. A step whose last optimizer has not stepped yet is not counted.

        Inside a step the hooks stay and do nothing, because torch is iterating over them.
        """
        self._off = True
        if not self._stepping:
            for handle in self._handles:
                handle.remove()

    def _before(self, place: int, *_: Any) -> None:
        self._stepping = True
        if self._off:
            return
        if self._made and place <= max(self._made):
            self._over()

    def _after(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        try:
            self._made_update(place, optimizer)
        finally:
            self._stepping = False

    def _made_update(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # exists only during a fused step under a GradScaler
        flag = Flag(found_inf) if isinstance(found_inf, torch.Tensor) else None
        if self._off or (flag is not None and flag.says_skipped()):
            return
        if not self._made:
            self._asked = self._tokens(), self._loss()
        self._made[place] = flag
        if place == self._last and not self._off:  # `self._tokens` may have closed the learner
            self._over()

    def _over(self) -> None:
        made, self._made = self._made, {}
        tokens, loss = self._asked
        self._stepped(self._counts.counted(tokens, list(made.values())), loss)
