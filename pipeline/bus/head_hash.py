"""How a head lies in its hash: what a commit sets there, and what is read from it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from diloco.pipeline.bus.commits import Commit, Republication
from diloco.pipeline.bus.stored_values import decode_count
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.head import Head, MergedBase, WindowView
from diloco.pipeline.messages.payload import Update, Updates
from diloco.pipeline.messages.tape import RefusalReason
from diloco.pipeline.messages.wire import Message
from diloco.pipeline.payload.codec import decode, encode

COUNTER_LIMIT = 2**62
"""Totals of a head stay below this, so that adding to one cannot fail half-way through a commit."""


class MergedBases(Message):
    """The head's `merged` field as stored."""

    merged: Annotated[tuple[MergedBase, ...], Field(fail_fast=True)]


def head_fields(commit: Commit) -> dict[str, bytes]:
    """What a commit sets in the head's hash; the three totals are added to, not set."""
    previous = commit.expected[1] if commit.expected else commit.lost and commit.lost.previous_digest
    return {
        "version": b"%d" % commit.version,
        "digest": commit.digest,
        "interval": b"%d" % commit.interval,
        **payload_fields(commit),
        "previous_digest": previous or b"",
        "window": encode(commit.window),
        "merged": encode(MergedBases(merged=commit.merged)),
        **lost_totals(commit),
    }


def lost_totals(commit: Commit) -> dict[str, bytes]:
    """What a lost head had counted: set before the commit's own numbers are added."""
    if commit.lost is None:
        return {}
    totals = {name: getattr(commit.lost, name) for name in ("merged_deltas", "merged_tokens", "rejected_tokens")}
    totals |= {refused_field(reason): n for reason, n in commit.lost.refused.items()}
    return {name: b"%d" % total for name, total in totals.items()}


def payload_names(of: Commit | Republication) -> dict[str, Any]:
    """What a head says of its payloads, by the names of its fields."""
    return {
        "payload": of.payload.key,
        "chunks": of.payload.chunks,
        "momentum": of.momentum.key if of.momentum else "",
        "rest": of.rest.key if of.rest else "",
        "payload_digest": of.rest.shown if of.rest else None,
        "updates": of.updates,
        "behind": of.behind,
    }


def payload_fields(of: Commit | Republication) -> dict[str, bytes]:
    """The same, as its hash has it."""
    said = payload_names(of)
    return {
        **{name: said[name].encode() for name in ("payload", "momentum", "rest")},
        **{name: b"%d" % said[name] for name in ("chunks", "behind")},
        "payload_digest": said["payload_digest"] or b"",
        "updates": encode(Updates(updates=of.updates)) if of.updates else b"",
    }


NAMED = ("payload", "rest", "momentum", "updates")
"""Fields of the head's hash that name payloads."""


def replaced_by(of: Commit | Republication, named: Sequence[bytes]) -> tuple[list[str], str]:
    """Payloads that a head names no more: global, rest and updates, which live on for a while; and a momentum or "".

    named: what the head says in the fields `NAMED`.

    Raises:
        BadMessage: its updates do not decode.
    """
    kept = {one.key for one in of.staged}
    payload, rest, momentum = (value.decode() for value in named[:3])
    keys = [payload, rest, *(key for one in decode_updates(named[3]) for key in one.payloads)]
    return [key for key in keys if key and key not in kept], momentum if momentum not in kept else ""


def decode_updates(blob: bytes | None) -> tuple[Update, ...]:
    """The head's `updates` field.

    Raises:
        BadMessage: it does not decode.
    """
    return decode(Updates, blob).updates if blob else ()


def head_after(head: Head, commit: Commit) -> Head:
    """What a commit makes of a head, as far as its owner knows."""
    return Head(
        fragment=head.fragment,
        version=commit.version,
        digest=commit.digest,
        **payload_names(commit),
        previous_digest=head.digest,
        interval=commit.interval,
        window=commit.window,
        merged=commit.merged,
        merged_deltas=head.merged_deltas + len(commit.entries),
        merged_tokens=head.merged_tokens + commit.merged_tokens,
        rejected_tokens=head.rejected_tokens,
        refused=head.refused,
    )


def refused_field(reason: str) -> str:
    """The head's count of deltas refused for a reason."""
    return f"refused:{reason}"


_REFUSED = {refused_field(reason.value).encode(): reason.value for reason in RefusalReason}
"""Field of a head's hash -> reason."""


def decode_head(fragment: int, fields: Mapping[bytes, bytes]) -> Head | None:
    """The head's hash to a `Head`; None where there is no hash.

    Raises:
        BadMessage: a field is missing or does not decode.
    """
    if not fields:
        return None
    try:
        return Head(
            fragment=fragment,
            version=int(fields[b"version"]),
            digest=fields[b"digest"],
            payload=fields[b"payload"].decode(),
            chunks=int(fields[b"chunks"]),
            momentum=fields[b"momentum"].decode(),
            previous_digest=fields[b"previous_digest"] or None,
            window=decode(WindowView, fields[b"window"]),
            merged=decode(MergedBases, fields[b"merged"]).merged,
            merged_deltas=int(fields[b"merged_deltas"]),
            merged_tokens=int(fields[b"merged_tokens"]),
            rejected_tokens=int(fields[b"rejected_tokens"]),
            rest=fields.get(b"rest", b"").decode(),
            payload_digest=fields.get(b"payload_digest") or None,
            updates=decode_updates(fields.get(b"updates")),
            behind=decode_count("behind", fields.get(b"behind")),
            interval=decode_count("interval", fields.get(b"interval")),
            refused={reason: decode_count("refusals", fields[n]) for n, reason in _REFUSED.items() if n in fields},
        )
    except (KeyError, ValueError) as error:  # pydantic's and UnicodeDecodeError are ValueErrors
        raise BadMessage(f"head of fragment {fragment} is unreadable: {error}") from error


def fragment_of(commit: Commit) -> int:
    """The fragment a commit is about.

    Raises:
        ValueError: the commit contradicts itself.
    """
    if commit.expected is not None and commit.version != commit.expected[0] + 1:
        raise ValueError(f"commit of version {commit.version} on top of version {commit.expected[0]}")
    if commit.lost is not None and (commit.expected or (commit.lost.version, commit.lost.digest) != _at(commit)):
        raise ValueError(f"commit of version {commit.version} in the place of a lost {commit.lost.version}")
    if commit.record.version != commit.version or commit.record.digest != commit.digest:
        raise ValueError("the commit and its tape record disagree")
    if both := {one.key for one in commit.staged} & {*commit.delta_payloads, *commit.retired}:
        raise ValueError(f"the commit names what it deletes: {sorted(both)}")
    return commit.record.fragment


def _at(commit: Commit) -> tuple[int, bytes]:
    return commit.version, commit.digest
