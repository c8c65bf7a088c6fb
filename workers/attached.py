"""Inner steps counted by the optimizers themselves, through torch's step hooks, in loops that are not ours to change.

A step hook runs inside `optimizer.step()`, once its update is made: after accumulation and clipping, before
schedulers and `zero_grad`. A step that torch's GradScaler skips calls no hook. A fused optimizer is called all the
same, and leaves its parameters as they are where `found_inf` says so.

When an inner step is over, with the optimizers in the order in which they step:

| what happens                                        | the step is over                                   |
|-----------------------------------------------------|----------------------------------------------------|
| the last one steps                                  | then                                               |
| the last one sits it out (skipped, or steps seldom) | before one steps that has stepped, or stands before |

So each step is counted once, whoever sits out, and never while an update is half made.
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
    """Whether a fused optimizer has skipped its step, as the GradScaler told it on its device."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        """found_inf: one number; not 0: skipped."""
        self._copy = snapshot_of(found_inf)  # behind the step: to wait for it would be to wait for the step

    def says_skipped(self) -> bool:
        """It is known, and so: False while it is still on its way to host memory."""
        return self._copy.ready() and bool(self._copy.tensor().item())


class StepTokens:
    """What a step counts for, where it may turn out a step later that it was skipped. Pure but for the flags."""

    def __init__(self) -> None:
        self._last: tuple[int, list[Flag | None]] = 0, []
        self._debt = 0
        """Counted for steps that were skipped."""

    def counted(self, tokens: int, flags: list[Flag | None]) -> int:
        """What to count for a step now.

        tokens, flags: of the step; a flag for each optimizer that made it, None: it did.
        """
        before, skipped = self._last
        if skipped and all(flag is not None and flag.says_skipped() for flag in skipped):
            self._debt += before
        paid = min(self._debt, tokens)
        self._debt -= paid
        self._last = tokens, flags
        return tokens - paid


def asking(tokens: Any) -> Callable[[], int]:
    """What gives the tokens of each inner step, from a number or from what is called for it.

    Raises:
        UsageError: it is neither.
    """
    if callable(tokens):
        return lambda: whole_tokens(tokens())
    whole = whole_tokens(tokens)
    return lambda: whole


def asking_loss(loss: Any) -> Callable[[], Loss | None]:
    """What gives the loss of each inner step, from what is called for it; None: nobody tells.

    Raises:
        UsageError: it cannot be called.
    """
    if loss is None:
        return lambda: None
    if not callable(loss):
        raise UsageError("attach(loss=...): pass what is called for the loss of each step, as `lambda: loss`")
    return lambda: one_loss(loss())


def unwrapped(model: nn.Module, given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that train a model, of one or several that may be wrappers.

    Raises:
        UsageError: there is none, one is named twice, or one trains nothing of the model.
    """
    inner = [check_optimizer(model, one) for one in (given if isinstance(given, list | tuple) else [given])]
    hooked = [one for one in inner if one is not None]
    if not hooked or len(hooked) < len(inner) or len(set(map(id, hooked))) < len(hooked):
        raise UsageError("name each optimizer once (optimizers=...), or make the Learner with one, or a list of them")
    return hooked


def alone(model: nn.Module, given: Any) -> torch.optim.Optimizer:
    """The one optimizer that is meant.

    Raises:
        UsageError: as `unwrapped`, or there are several.
    """
    hooked = unwrapped(model, given)
    if len(hooked) > 1:
        raise UsageError("the learner has several optimizers: say which one is meant")
    return hooked[0]


def say_unkept(hooked: Iterable[torch.optim.Optimizer], kept: Iterable[torch.optim.Optimizer]) -> None:
    """Say whose moments a restart will not find, since the learner was made without them."""
    known = {id(one) for one in kept}
    if strange := [type(one).__qualname__ for one in hooked if id(one) not in known]:
        detail = "their moments are not kept for a restart: make it with all of them, Learner(model, [one, another])"
        structlog.get_logger().warning("optimizers_unknown", optimizers=strange, detail=detail)


def say_replaced(hooked: Iterable[torch.optim.Optimizer]) -> None:
    """Say which have a `step` that somebody put in the place of their class's, whose hooks it may never call."""
    if replaced := [type(one).__qualname__ for one in hooked if not getattr(one.step, "hooked", False)]:
        detail = "its steps are counted if what took the place of `step` calls the one before; else call Learner.step"
        structlog.get_logger().warning("step_replaced", optimizers=replaced, detail=detail)


class Attached:
    """The hooks of one learner in its optimizers. The training thread's."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        tokens: Callable[[], int],
        loss: Callable[[], Loss | None],
        stepped: Callable[[int, Loss | None], None],
    ) -> None:
        """Hooks them.

        Args:
            optimizers: in the order in which they step.
            tokens, loss: asked once for each inner step, when the first update of it is made.
            stepped: called with the tokens and the loss of each inner step that is over.
        """
        self._tokens, self._loss, self._stepped, self._last = tokens, loss, stepped, len(optimizers) - 1
        self._made: dict[int, Flag | None] = {}
        """Places of the optimizers that have made an update in this step."""
        self._asked: tuple[int, Loss | None] = 0, None
        """Tokens and loss of this step."""
        self._counts = StepTokens()
        self._stepping = self._off = False
        # a compiled `step` calls them, instead of compiling them anew with each number in them
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
        """The optimizers are as they were before. A step whose last optimizer has not stepped is not counted.

        In a step the hooks stay, and do nothing: torch is going through them.
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
        found_inf = getattr(optimizer, "found_inf", None)  # there for the time of a fused step under a GradScaler
        flag = Flag(found_inf) if isinstance(found_inf, torch.Tensor) else None
        if self._off or (flag is not None and flag.says_skipped()):
            return
        if not self._made:
            self._asked = self._tokens(), self._loss()
        self._made[place] = flag
        if place == self._last and not self._off:  # the tokens' callable may have closed the learner
            self._over()

    def _over(self) -> None:
        made, self._made = self._made, {}
        tokens, loss = self._asked
        self._stepped(self._counts.counted(tokens, list(made.values())), loss)
