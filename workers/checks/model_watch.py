"""Verify that the model being trained is still the model that is synchronised.

The set of synchronised tensors is fixed when the learner joins. A layer that is unfrozen afterwards, or a parameter
that is replaced, would be trained here and never travel; a parameter that is frozen or converted would still be
overwritten. But all parameters of one optimizer may be frozen for a while, as when networks take turns. A buffer may be
another tensor after each step, in the same module. So the training thread inspects the whole model again and again, at
a cost of at most a thousandth of its time: an inspection of 10 ms is followed by the next after 10 s.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers.names import named_buffers, named_parameters
from diloco.workers.parameters import resharding

# Largest share of the training thread's time.
SHARE = 1e-3
REMEDY = (
    "what is synchronised is fixed when a learner joins. Change the model before the `with` block. Or leave the "
    "block, change the model, and join another run with all learners"
)


class _Form(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tensor.dtype, tensor.device, tensor.shape)


class ModelWatch:
    """Watches one model's synchronised tensors."""

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str],
        clock: Callable[[], float] = time.perf_counter,
        check: Callable[[], object] = lambda: None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Remember the model's current structure.

        Args:
            model: in the form in which it joins.
            names: of the parameters and buffers that are synchronised.
            clock: s.
            check: called at each inspection; may raise.
            optimizers: those that train it; there may be others.
        """
        self._model, self._clock, self._check = model, clock, check
        self._trained = {name: (one, _form(one)) for name, one in named_parameters(model) if name in names}
        self._averaged = {
            buffer.name: (buffer.owner, _form(tensor))
            for buffer in (named_buffers(model) if len(self._trained) < len(names) else ())
            if buffer.name in names and (tensor := buffer.tensor) is not None
        }
        groups = [(number, group) for number, one in enumerate(optimizers) for group in one.param_groups]
        self._optimizer = {id(tensor): number for number, group in groups for tensor in group["params"]}
        self._reshard = resharding(model)
        self._next_s = clock()

    def inspect(self, now: float) -> None:
        """Inspect the model if it is time to. A sharded model holds its shards afterwards, inspected or not.

        Ranks inspect at different times, but must reshard after the same steps.

        Raises:
            UsageError: names the tensor that has changed.
        """
        self._reshard()
        if now < self._next_s:
            return
        began = self._clock()
        self._check()
        self._compare()
        ended = self._clock()
        self._next_s = ended + (ended - began) / SHARE

    def _compare(self) -> None:
        missing, frozen, trains = dict(self._trained), dict[int | None, str](), set[int | None]()
        for name, tensor in named_parameters(self._model):
            known = missing.pop(name, None)
            if known is None:
                if tensor.requires_grad and tensor.numel():
                    raise UsageError(
                        f"parameter {name} now requires a gradient but did not when the learner joined: {REMEDY}"
                    )
                continue
            was, form = known
            if tensor is not was:
                raise UsageError(f"parameter {name} was replaced by a different one: {REMEDY}")
            optimizer = self._optimizer.get(id(tensor))
            if tensor.requires_grad:
                trains.add(optimizer)
            else:
                frozen.setdefault(optimizer, name)
            if _form(tensor) != form:
                raise UsageError(f"parameter {name} was {_said(form)} and is now {_said(_form(tensor))}: {REMEDY}")
        for optimizer in trains & frozen.keys():
            why = "although its optimizer still trains other parameters and the run continues to merge it"
            raise UsageError(f"parameter {frozen[optimizer]} was frozen, {why}: {REMEDY}")
        if missing:
            raise UsageError(f"parameter {next(iter(missing))} is no longer in the model: {REMEDY}")
        if self._averaged:
            self._compare_buffers()

    def _compare_buffers(self) -> None:
        now = {buffer.name: buffer for buffer in named_buffers(self._model)}
        for name, (owner, form) in self._averaged.items():
            found = now.get(name)
            tensor = None if found is None or found.owner is not owner else found.tensor
            if tensor is None:
                raise UsageError(f"buffer {name} is no longer in the module where it was: {REMEDY}")
            if _form(tensor) != form:
                raise UsageError(f"buffer {name} was {_said(form)} and is now {_said(_form(tensor))}: {REMEDY}")


def _said(form: _Form) -> str:
    return f"{form.dtype} of shape {tuple(form.shape)} on {form.device}"
