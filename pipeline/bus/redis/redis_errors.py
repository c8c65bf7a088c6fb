"""Translation of Redis errors into this project's errors, with a remedy; no message shows credentials."""

import re
from typing import Any

import redis.exceptions as rx

from diloco.pipeline.bus import acl, stored_reports
from diloco.pipeline.bus.keys import run_of
from diloco.pipeline.bus.redis.zero_copy import ReplyTooLarge
from diloco.pipeline.bus.schema import unlink
from diloco.pipeline.errors import (
    BadMessage,
    BusError,
    BusFull,
    BusUnavailable,
    DilocoError,
    HeadMoved,
    LeaseLost,
    LoginRefused,
    NotPermitted,
    Oversized,
    PayloadIncomplete,
    ScriptsMissing,
    UsageError,
)

# Error code in a text that redis-py has not parsed: from inside a script, or from our own reader (`zero_copy`).
_CODE = re.compile(r"(?:^|[-\s])([A-Z]{3,}) ")
# XADD refuses an id that exists, or is below the last one, with this text.
THERE = re.compile("equal or smaller than the target stream top item")
# Reasons why writes are refused, and the remedy. The parties keep retrying, so nothing has to be restarted.
_FULL = {
    "OOM": ("its memory is full", "raise its maxmemory"),
    "MISCONF": ("it cannot write to its disk", "free disk space where it keeps its data"),
    "NOREPLICAS": ("too few replicas are connected", "start its replicas, or lower its min-replicas-to-write"),
}
# States of a server in which it is unavailable for now; it, or another one in its place, may serve again.
_UNAVAILABLE = {
    "READONLY": "is a replica, which accepts no writes",
    "LOADING": "is loading its data from disk",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "TRYAGAIN": "is moving a slot",
    "MASTERDOWN": "is a replica that has lost its primary",
    "UNBLOCKED": "has aborted a blocked call",
    "BUSY": "is busy with a script",
    "MOVED": "has handed a slot to another node",
    "ASK": "is moving a slot",
    "DENIED": "accepts no connections from other machines while it has no password",
}
USE_PRIMARY = "if no primary takes its place at this address, use the primary's address in DILOCO_REDIS_URL"
# Remedies for those states that need one.
_UNAVAILABLE_REMEDIES = {
    "ASK": "this party continues on its own once the slot has moved",
    "CLUSTERDOWN": "start the node that is down. With `cluster-require-full-coverage no`, the other nodes keep serving "
    "meanwhile",
    "READONLY": USE_PRIMARY,
    "DENIED": "give it a password or users (`diloco acl`), and put the login in DILOCO_REDIS_URL",
}
# redis-py removes the code from the text of these errors. Subclasses stand before their base classes.
_KINDS = {
    rx.NoPermissionError: "NOPERM",
    rx.OutOfMemoryError: "OOM",
    rx.ReadOnlyError: "READONLY",
    rx.BusyLoadingError: "LOADING",
    rx.MasterDownError: "MASTERDOWN",
    rx.ClusterDownError: "CLUSTERDOWN",
    rx.TryAgainError: "TRYAGAIN",
    rx.MovedError: "MOVED",
    rx.AskError: "ASK",
}
_FORBIDDEN = re.compile(r"The user executing the script can't |ACL failure in script")
_COMMAND = re.compile(r"run the '([^']+)' command")
# Commands that a run needs, on a server that lacks them or on which they were renamed.
_UNKNOWN = re.compile(
    r"unknown command [`']((?:EVALSHA|SCRIPT|X)[^`']*)[`']|"
    r"Unknown (?:Redis )?command called from (?:Lua )?script|Redis command is not allowed from script",
    re.IGNORECASE,
)
NO_TLS = "it does not speak TLS"
NAME_REDIS = "use its TLS port, or redis"
# (OpenSSL's text, its meaning, remedy).
_TLS = (
    (
        re.compile("CERTIFICATE_REQUIRED|certificate required"),
        "it asks for a client certificate",
        "set DILOCO_REDIS_CERT and DILOCO_REDIS_KEY",
    ),
    (
        re.compile("certificate is not valid for"),
        "its certificate is for a different host name",
        "use the certificate's host name in DILOCO_REDIS_URL, or have a certificate issued for this one",
    ),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED"),
        "its certificate is not trusted",
        "set DILOCO_REDIS_CA to the CA file of its issuer",
    ),
    (
        re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|PACKET_LENGTH_TOO_LONG"),
        NO_TLS,
        f"{NAME_REDIS}://",
    ),
)


CHECK_ADDRESS = "check that Redis is running and that DILOCO_REDIS_URL is its address"
# (redis-py's text, its meaning, remedy) if no server answers, because none was ever there or it is down for now.
_NOT_THERE = (
    ("Too many open files", "this process cannot open more connections", "raise its limit of open files (`ulimit -n`)"),
    ("connecting to", "no server answers", CHECK_ADDRESS),
    ("Protocol error", "the server there is not Redis", "check the port in DILOCO_REDIS_URL"),
)


def translate(error: BaseException, where: str, user: str = "", key: bytes | str | None = None) -> DilocoError:
    """Translate an error of redis-py, a socket or a timeout into one of this project; it never shows credentials.

    Args:
        error: the original error.
        where: the server's name for messages.
        user: user name of the connection.
        key: the key that was asked for.
    """
    if isinstance(error.__cause__, rx.AuthenticationError):
        error = error.__cause__  # redis-py wraps errors that happen while it connects
    text = str(error)
    code = _code(error, text)
    if code == "NOPERM" or _FORBIDDEN.search(text):
        return _not_permitted(text, where, user, key)
    if code in ("NOAUTH", "WRONGPASS") or isinstance(error, (rx.AuthenticationError, rx.AuthorizationError)):
        return _login_error(text, where, user)
    if re.search("certificate (has )?expired|certificate is not yet valid", text, re.IGNORECASE):
        remedy = (
            "have it renewed, or correct this machine's clock; everything then continues on its own. If it is a "
            "party's own certificate, restart that party: it reads the certificate only at startup"
        )
        return BusUnavailable(f"Redis at {where}: a certificate has expired, or is not valid yet", remedy, text)
    for sign, found, remedy in _TLS:
        if sign.search(text):
            return UsageError(f"Redis at {where}: {found}", remedy, text)
    if isinstance(error, ReplyTooLarge):
        return Oversized(f"Redis at {where} sent more data than any party of a run writes", said=text)
    if isinstance(error, rx.NoScriptError):
        return scripts_missing(where)
    if code in _FULL:
        found, remedy = _FULL[code]
        return BusFull(f"Redis at {where} refuses writes: {found}", remedy, text)
    if code in _UNAVAILABLE:
        return BusUnavailable(f"Redis at {where} {_UNAVAILABLE[code]}", _UNAVAILABLE_REMEDIES.get(code, ""), text)
    if "WRONGTYPE" in text:
        named = key.decode(errors="replace") if isinstance(key, bytes) else key
        if "script" in text:  # `key` is the script's first, and any of its keys may be the wrong one
            named = None
        at, remedy = (f"at {named}", unlink(named)) if named else ("there", "")
        return BadMessage(f"Redis at {where} holds a value of the wrong type {at}", remedy, text)
    if unknown := _UNKNOWN.search(text):
        name = (unknown[1] or "").upper() or "that a script of the run calls"
        remedy = "use a service that allows scripts (EVALSHA, SCRIPT) and streams (XADD, XREAD ...)"
        return UsageError(f"Redis at {where} does not have the command {name}", remedy, text)
    if "max number of clients" in text:
        return BusUnavailable(f"Redis at {where} has reached its connection limit", "raise its maxclients", text)
    if isinstance(error, rx.ResponseError) and not isinstance(error, rx.ClusterError):
        return BusError(f"Redis at {where} refuses the command", said=text)
    found, remedy = next((told for sign, *told in _NOT_THERE if sign in text), ("it does not answer", ""))
    return BusUnavailable(f"Redis at {where}: {found}", remedy, text.rstrip(".") or type(error).__name__)


def _code(error: BaseException, text: str) -> str:
    """Return an error's code (the first word of Redis's text), or "" if it has no known one."""
    known = next((code for kind, code in _KINDS.items() if isinstance(error, kind)), "")
    told = {"NOPERM", "NOAUTH", "WRONGPASS", *_FULL, *_UNAVAILABLE}
    return known or next((code for code in _CODE.findall(text) if code in told), "")


def scripts_missing(where: str) -> ScriptsMissing:
    """Return the error for a party that needs scripts which are not loaded and which it may not load."""
    return ScriptsMissing(
        f"Redis at {where} does not have all scripts, and this user may not load them",
        "wait for a syncer to load them, which takes seconds, as after each restart of Redis; if no syncer is "
        "running, start one. This party then continues on its own",
    )


def _not_permitted(text: str, where: str, user: str, key: bytes | str | None) -> NotPermitted:
    """Return the error for missing rights: it names the user, the command and the run, and how to get the rights."""
    who = f"user {user!r}" if user else "the user of this connection"
    run, command = run_of(key), _COMMAND.search(text)
    what = f"send {command[1].replace('|', ' ').upper()}" if command else "do that"
    at = key.decode(errors="replace") if isinstance(key, bytes) else key
    found = f"Redis at {where} does not let {who} {what}" + (f" in run {run!r} (key {at})" if run else "")
    return NotPermitted(found, _rights_remedy(user, run, command[1] if command else ""), text)


def _rights_remedy(user: str, run: str, command: str) -> str:
    """Return the remedy for missing rights."""
    if command == "scan":
        return "listing runs needs the operator's user"
    if not user:
        return "put this party's user in DILOCO_REDIS_URL: redis://USER:PASSWORD@HOST:PORT (`diloco acl` creates users)"
    if not run:
        return "put this party's own user in DILOCO_REDIS_URL; `diloco acl` creates users"
    return (
        "each user belongs to one party in one run: put this party's own user in DILOCO_REDIS_URL (to change a run, "
        "the operator's), and set the run that it was created for. Or create users for this run (for several runs: "
        f"--run '*'), and start Redis with them instead of its current users: {acl.acl_command(run, user)}"
    )


def _login_error(text: str, where: str, user: str) -> UsageError:
    """Return the error for a login that was refused, or was required and not given."""
    if "without any password configured" in text or "no password is set" in text:
        return UsageError(f"Redis at {where} has no passwords", "remove user and password from DILOCO_REDIS_URL", text)
    if "required" in text:
        found = "requires a login"
    else:
        of_user = f" of user {user!r}" if user else ""
        found = f"refuses the login{of_user}: name or password is wrong, or the user was deleted"
    remedy = "set user and password in DILOCO_REDIS_URL (redis://[USER]:PASSWORD@HOST:PORT), or ask its operator"
    return LoginRefused(f"Redis at {where} {found}", remedy, text.rstrip("."))


ERRORS = (rx.RedisError, OSError, TimeoutError)


def refused(reply: list[Any]) -> DilocoError:
    """Return the error for a script's answer other than OK."""
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
            return stored_reports.replaced(str(key), int(detail or 0))
        case "TOTAL":
            return BadMessage(f"{key}: {detail} is not a total that can be increased", unlink(str(key)))
        case _:
            return BadMessage(f"{key} holds a {detail}", unlink(str(key)))
