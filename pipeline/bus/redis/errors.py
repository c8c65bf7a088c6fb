"""Errors of Redis as this project names them, with what to do; none shows credentials."""

import re
from typing import Any

import redis.exceptions as rx

from diloco.pipeline.bus import acl, stored_values
from diloco.pipeline.errors import (
    BadMessage,
    BusError,
    BusFull,
    BusUnavailable,
    DilocoError,
    HeadMoved,
    LeaseLost,
    NotPermitted,
    PayloadIncomplete,
    ScriptsMissing,
    UsageError,
)

_UNAVAILABLE = re.compile(r"(^|[-\s])(READONLY|LOADING|CLUSTERDOWN|TRYAGAIN|MASTERDOWN|UNBLOCKED|BUSY|MOVED|ASK)\s")
THERE = re.compile("equal or smaller than the target stream top item")
"""How XADD refuses an id that is there, or was passed."""
_FULL = re.compile(r"(^|[-\s])(OOM|MISCONF|NOREPLICAS)\s")
_REMEDIES = {
    "OOM": "its memory is full: raise its maxmemory",
    "MISCONF": "it cannot write to its disk: free space where it keeps its data",
    "NOREPLICAS": "too few replicas answer: start them, or lower its min-replicas-to-write",
}
"""What to do where writes are refused. Nothing else is needed: whoever was refused goes on trying."""
_FORBIDDEN = re.compile(r"The user executing the script can't |ACL failure in script")
NO_TLS = "no TLS is spoken there; name its TLS port, or use redis"
_TLS = (
    (
        re.compile("CERTIFICATE_REQUIRED|certificate required"),
        "it asks for a client certificate; set DILOCO_REDIS_CERT and DILOCO_REDIS_KEY",
    ),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED"),
        "its certificate is not to be trusted; set DILOCO_REDIS_CA to the file of the authority that issued it",
    ),
    (
        re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH_TOO_LONG"),
        f"{NO_TLS}://",
    ),
)
"""What OpenSSL says, and what to do."""


_NOT_THERE = (
    (
        "connecting to",
        "; nobody answers there: has a Redis been started, and is DILOCO_REDIS_URL its address?",
    ),
    ("Protocol error", "; what answers there is no Redis: does DILOCO_REDIS_URL have the right port?"),
)
"""What redis-py says, and what to look at: nothing of it was ever there, or it is away for now."""


def translate(error: BaseException, where: str, user: str = "") -> DilocoError:
    """An error of redis-py, of a socket or of a time limit as one of ours; never shows credentials.

    user: as whom it was asked.
    """
    if isinstance(error.__cause__, rx.AuthenticationError):
        error = error.__cause__  # redis-py wraps what happens while it connects
    text = str(error)
    if isinstance(error, rx.NoPermissionError) or _FORBIDDEN.search(text):
        return NotPermitted(f"Redis at {where} does not permit this user that: {text}; {_may(user)}")
    if isinstance(error, (rx.AuthenticationError, rx.AuthorizationError)):
        return UsageError(f"Redis at {where} refused this user: {text.rstrip('.')}; {_log_in(text, user)}")
    for sign, hint in _TLS:
        if sign.search(text):
            return UsageError(f"Redis at {where}: {text}: {hint}")
    if isinstance(error, rx.NoScriptError):
        return scripts_missing(where)
    if (full := _FULL.search(text)) or isinstance(error, rx.OutOfMemoryError):
        return BusFull(f"Redis at {where} refuses writes, {_REMEDIES[full[2] if full else 'OOM']} ({text})")
    if isinstance(error, rx.AskError):
        return BusUnavailable(f"Redis at {where}: slot {text.replace(' ', ' is moving to ', 1)}; it goes on by itself")
    if "WRONGTYPE" in text:
        return BadMessage(f"Redis at {where}: {text}")
    down = (rx.ReadOnlyError, rx.ClusterError, rx.MasterDownError)
    if isinstance(error, rx.ResponseError) and not isinstance(error, down) and not _UNAVAILABLE.search(text):
        return BusError(f"Redis at {where}: {text}")
    hint = next((hint for sign, hint in _NOT_THERE if sign in text), "")
    return BusUnavailable(f"Redis at {where}: {text.rstrip('.') or type(error).__name__}{hint}")


def scripts_missing(where: str) -> ScriptsMissing:
    """What a party is told that may not load the scripts that it calls."""
    return ScriptsMissing(
        f"Redis at {where} does not have all scripts of this release, and this user may not load them: start a syncer "
        "of this release (`diloco --version` here says which), or replace one by it; then it goes on by itself"
    )


def _may(user: str) -> str:
    """What to do where a user may not do something."""
    if learner := acl.invited_learner(user):
        return (
            f"the invitation is for learner {learner!r} of one run, and for nothing else: leave out --learner-id and "
            "--run (learner_id= and run= of a Learner)"
        )
    return (
        "set a user for this party in DILOCO_REDIS_URL (a learner's own user goes with its --learner-id; runs and "
        "invitations are the operator's; `diloco acl` makes users)"
    )


def _log_in(text: str, user: str) -> str:
    """What to do where a user is not let in."""
    if "without any password configured" in text:
        return "leave user and password out of DILOCO_REDIS_URL"
    if learner := acl.invited_learner(user):
        return (
            f"whoever runs it may have revoked the invitation of learner {learner!r}: ask for a new one (`diloco "
            f"invite {learner}`)"
        )
    return "set user and password in DILOCO_REDIS_URL, or ask whoever runs it"


ERRORS = (rx.RedisError, OSError, TimeoutError)


def refused(reply: list[Any]) -> DilocoError:
    """What a script answered instead of OK."""
    code, key, *more = (x.decode(errors="replace") if isinstance(x, bytes) else x for x in reply)
    detail = more[0] if more else None
    match code:
        case "LEASE":
            return LeaseLost(f"{key} is not held by this owner")
        case "HEAD":
            return HeadMoved(f"{key} is at version {detail}" if detail else f"{key} does not exist")
        case "PAYLOAD":
            return PayloadIncomplete(f"{key} has {detail} chunks")
        case "HOLDER":
            return stored_values.replaced(str(key), int(detail or 0))
        case "TOTAL":
            return BadMessage(f"{key}: {detail} is no total that can be added to")
        case _:
            return BadMessage(f"{key} holds a {detail}")
