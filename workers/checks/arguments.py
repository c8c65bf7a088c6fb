"""Check a `Learner`'s arguments at once; an error names the argument and what is allowed."""

import errno
import math
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.writable import try_folder
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.settings import SECRETS, STATE_S, BusSettings, EncodeOn, SyncSettings, load
from diloco.pipeline.units import parse_whole
from diloco.pipeline.wrong_values import format_problem
from diloco.workers.copies.losses import Loss, loss_copy
from diloco.workers.moments.state_folder import LOCK_FILE, LOSSES_FILE
from diloco.workers.moments.stateful import Stateful

MAX_STEP_TOKENS = 2**40
# Errors of a wrong path. Others, such as those of a full disk or NFS, must not keep a returning learner from training.
_WRONG_PATH = {errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def _stateful(value: Any) -> Any:
    if not isinstance(value, Stateful):
        raise ValueError("it has no state_dict() and load_state_dict(): torchdata's StatefulDataLoader has them")
    return value


class Arguments(BaseModel):
    """The plain arguments of a `Learner`."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True, extra="forbid")

    run: PartyName
    redis_url: str | None
    learner_id: PartyName | None
    sync: InstanceOf[SyncSettings] | None
    tokens: Annotated[int, BeforeValidator(parse_whole), Field(ge=1, le=2**62)] | None
    trainer: Annotated[dict[str, str | int | bool | _Finite | None] | None, Field(max_length=64)]
    leave_s: Annotated[_Finite, Field(ge=0)]
    state_dir: Annotated[str, Field(min_length=1)] | Path | None = None
    state_every_s: Annotated[_Finite, Field(gt=0)] = STATE_S
    recover: Literal["auto", "peer", "fresh"] = "auto"
    log_losses: bool = False
    state: Annotated[dict[str, Annotated[Any, AfterValidator(_stateful)]], Field(max_length=64)] | None = None
    encode_on: EncodeOn = "cpu"
    same_frozen: bool = True


class _Named(BusSettings):
    """The names from the environment, used if the program gives none."""

    learner_id: str | None = None


# Arguments that may differ among the ranks of a learner.
OWN = {"redis_url", "state_dir", "state_every_s", "log_losses", "state"}


def together(given: Arguments) -> dict[str, str]:
    """Return the arguments that all ranks of a learner must have in common, as text."""
    return {name: repr(value) for name, value in given if name not in OWN}


def check_arguments(**given: Any) -> Arguments:
    """Check what a `Learner` was called with.

    Raises:
        UsageError: names the argument, its value and what is allowed.
    """
    named = load(_Named)
    given |= {name: getattr(named, name) for name in ("run", "learner_id") if given[name] is None}
    try:
        arguments = Arguments(**given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        name = ".".join(map(str, first["loc"][:2] if first["loc"][0] in ("trainer", "state") else first["loc"][:1]))
        shown = "***" if name in SECRETS else _shown(first["input"])
        wrong = " or ".join(dict.fromkeys(format_problem(one) for one in problems if one["input"] is first["input"]))
        raise UsageError(f"Learner: {name}={shown}: {wrong}") from None
    if arguments.state_dir is not None:
        try:
            try_folder(Path(arguments.state_dir), LOCK_FILE, LOSSES_FILE)
        except OSError as error:
            if isinstance(error, NotADirectoryError) or getattr(error.__cause__, "errno", None) in _WRONG_PATH:
                raise UsageError(f"Learner: state_dir={_shown(arguments.state_dir)}: {error}") from None
    if arguments.log_losses and arguments.state_dir is None:
        raise UsageError("log_losses (DILOCO_LOG_LOSSES) needs state_dir for losses.jsonl: set it (--state-dir)")
    if arguments.state and arguments.state_dir is None:
        raise UsageError("Learner: state= needs state_dir=, the folder where these states are saved")
    if arguments.tokens is not None and arguments.sync is not None and "tokens" in arguments.sync.model_fields_set:
        raise UsageError("Learner: the budget is given twice: leave out either tokens= or the tokens of sync=")
    return arguments


def whole_tokens(tokens: Any) -> int:
    """Return the tokens of a step as an int, from any kind of number; a CUDA tensor makes this wait for the device.

    Raises:
        UsageError: it is not a whole number from 0 on.
    """
    if type(tokens) is int and 0 <= tokens <= MAX_STEP_TOKENS:
        return tokens
    if isinstance(tokens, torch.Tensor | np.ndarray) and math.prod(tokens.shape) != 1:
        raise UsageError(f"tokens: a tensor of shape {tuple(tokens.shape)}; pass one number, such as its sum")
    value = tokens.item() if isinstance(tokens, torch.Tensor | np.ndarray | np.generic) else tokens
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"tokens={_shown(tokens)}: a {type(tokens).__name__}; pass the number of trained tokens")
    if not (0 <= value <= MAX_STEP_TOKENS and value == int(value)):
        raise UsageError(
            f"tokens={_shown(tokens)}: pass a whole number from 0 to {MAX_STEP_TOKENS}; 0 means that nothing was "
            "trained"
        )
    return int(value)


def one_loss(loss: Any) -> Loss | None:
    """Return a copy of the loss of a step, taken now; None: there is none. Raises as `one_number` does."""
    return None if loss is None else loss_copy(one_number(loss, "step(loss={}): {}; pass one number, or leave it out"))


def one_number(value: Any, told: str) -> float | torch.Tensor:
    """Return a loss to be read later: a tensor stays a tensor, so that nothing waits for its device.

    It may be NaN or infinite.

    told: text of the error, with places for the value and for what it is.

    Raises:
        UsageError: it is not one number.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.is_nested:
            raise UsageError(told.format("...", "a tensor on the meta device" if value.is_meta else "a nested tensor"))
        if value.numel() != 1:
            raise UsageError(told.format("...", f"a tensor of shape {tuple(value.shape)}"))
        if value.is_complex():
            raise UsageError(told.format("...", "a complex number"))
        return value.detach() if value.requires_grad else value
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError
        return float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except OverflowError:
        raise UsageError(told.format(_shown(value), "a number too large for a float")) from None
    except (TypeError, ValueError):
        raise UsageError(told.format(_shown(value), f"a {type(value).__name__}")) from None


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)[:80]
    except ValueError:  # Python refuses to print a number of more than some thousand digits
        return "..."
