"""Objects whose state is saved with the moments: `Learner(state={"data": loader})`.

Each state is written by `torch.save` and read with `weights_only=True`, so that loading it executes no code.
"""

import io
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import structlog
import torch
from torch.optim.lr_scheduler import LRScheduler

from diloco.pipeline.errors import UsageError

# Limit on all states together, which `state_folder.STATE_FILE` holds as hex.
MAX_STATES_BYTES = 16 * 2**20


@runtime_checkable
class Stateful(Protocol):
    """The same protocol as torch's `distributed.checkpoint.stateful.Stateful`, whose import takes long."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from a state."""


def pack(objects: Mapping[str, Stateful]) -> dict[str, bytes]:
    """Return the objects' current states; for the training thread, between two steps.

    Raises:
        UsageError: a state cannot be saved, or could not be loaded again; names the object.
    """
    states = dict[str, bytes]()
    for name, one in objects.items():
        file = io.BytesIO()
        try:
            torch.save(one.state_dict(), file)
            file.seek(0)
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        except Exception as error:  # whatever an object of the user's own raises
            raise UsageError(f"Learner: state[{name!r}]: its state_dict() cannot be saved: {error!r:.300}") from error
        if unsafe:
            raise UsageError(
                f"Learner: state[{name!r}]: its state_dict() contains {', '.join(sorted(unsafe))}: use only numbers, "
                "text, bytes, lists, tuples, dicts and tensors"
            )
        states[name] = file.getvalue()
    if (size := sum(map(len, states.values()))) > MAX_STATES_BYTES:
        largest = max(states, key=lambda name: len(states[name]))
        raise UsageError(
            f"Learner: state[{largest!r}]: the states have {size} bytes, and at most {MAX_STATES_BYTES} are kept"
        )
    return states


def unpack(objects: Mapping[str, Stateful], states: Mapping[str, bytes], folder: object, steps: int) -> None:
    """Load the states saved after `steps` steps; an object of a new name is left as it is, with a warning.

    Raises:
        UsageError: an object does not take its state.
    """
    for name, one in objects.items():
        if name not in states:
            continue
        try:
            one.load_state_dict(torch.load(io.BytesIO(states[name]), weights_only=True))
        except Exception as error:  # whatever an object of the user's own raises
            raise UsageError(
                f"Learner: state[{name!r}] does not take the state saved in {folder}: {error!r:.300}; pass the same "
                "object as before, or a different state_dir to start without it"
            ) from error
        if isinstance(one, LRScheduler):  # many compute the next rate from the current one, which is in the optimizer
            for group, rate in zip(one.optimizer.param_groups, one.get_last_lr(), strict=True):
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
    if restored := sorted(objects.keys() & states.keys()):
        structlog.get_logger().info("state_restored", names=restored, folder=str(folder), steps=steps)
    if dropped := sorted(states.keys() - objects.keys()):
        detail = "these were saved, but are not in state=: the next save drops them"
        structlog.get_logger().warning("state_dropped", names=dropped, folder=str(folder), detail=detail)
    if missing := sorted(objects.keys() - states.keys()):
        detail = "nothing was saved under these names: the objects start as they were passed"
        structlog.get_logger().warning("state_not_restored", names=missing, folder=str(folder), detail=detail)


def warn_unmoved(objects: Mapping[str, Stateful], earlier: Mapping[str, bytes], states: Mapping[str, bytes]) -> None:
    """Warn of objects that have the same state as steps ago, since the loop may be reading a different object."""
    for name, state in states.items():
        if state == earlier.get(name) and not isinstance(objects[name], LRScheduler):
            detail = "its state has not changed since the last save: pass the object that the loop iterates over"
            structlog.get_logger().warning("state_unchanged", name=name, detail=detail)
