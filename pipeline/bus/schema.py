"""How values lie in the bus: ids of entries, headers, heads and what is read beside them.

Shared by the bus's adapters, so that neither is kinder than the other. Pure: bytes in, messages out, and the checks
that need no server.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field

from diloco.pipeline.bus.commits import Commit, Published
from diloco.pipeline.bus.ports import START, MomentsBoard, Offered
from diloco.pipeline.errors import BadMessage, BadPayload, BusError
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.head import Head, MergedBase, Norms, WindowView
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.payload import Update, Updates
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import ClaimedShard, Shard, ShardQueue
from diloco.pipeline.messages.tape import RefusalReason
from diloco.pipeline.messages.wire import MAX_LEARNERS, MAX_NAME_CHARS, MOST_TOKENS, PARTY, Message
from diloco.pipeline.payload.codec import Encoded, decode, encode

T = TypeVar("T", bound=Message)

EVENTS_CAP = 10_000
EVALUATIONS_CAP = 100_000

MOMENTS_S = 120.0
"""No wish, claim or offer of moments that we write lives for longer."""

COUNTER_LIMIT = 2**62
"""Totals of a head stay below this, so that adding to one cannot fail half-way through a commit."""

MOST_NEW_SENDERS = 512
MOST_SENDERS = MAX_LEARNERS
"""Names that a reader of headers does not know, and reads; of more, those that have one. Of more than the second, none
is known."""

MOST_OPEN_SHARDS = 2**15
"""Entries of a queue of shards that is read: of an epoch there are half as many at most (`MAX_SHARDS`)."""
NO_SHARD = Shard(epoch=0, index=0, start=0, stop=0)
"""What stands for an entry that cannot be read: no blocks, so that who claims it takes it off the queue."""

_LEARNER = re.compile(PARTY.encode())


# --- entries of streams, and headers by name: whose stream, and which entry ------------------------------


def offer_id(learner: str, at: str, data: bytes = b"") -> str:
    """Name of an entry of a learner's stream: `ms-seq:mark@learner`, of its bytes; without them `ms-seq@learner`.

    A server whose clock is behind gives ids one after the other, so once it has lost its last entries, it gives theirs
    to others. Whoever names a header that was lost must not mean another one. One that cannot be taken has no mark: it
    may have been read in part, and is refused at once.
    """
    return f"{at}:{mark_of(data)}@{learner}" if data else f"{at}@{learner}"


def mark_of(data: bytes) -> str:
    """What tells two entries of one id apart. The scripts make the same of what is there."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:8]


def parse_offer_id(text: str) -> tuple[str, str]:
    """(learner, entry id) of such a name.

    Raises:
        BusError: it is none.
    """
    learner, at, _ = _parts_of(text)
    return learner, at


def by_learner(entries: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Names of headers as learner -> (entry id, mark or ''), learners in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for learner, at, mark in map(_parts_of, entries):
        found.setdefault(learner, []).append((at, mark))
    return dict(sorted(found.items()))


def _parts_of(text: str) -> tuple[str, str, str]:
    """(learner, entry id, mark or '')."""
    where, _, learner = text.partition("@")
    at, _, mark = where.partition(":")
    entry_id(at)
    if not learner:
        raise BusError(f"invalid name of a header {text!r:.80}: it is <entry id>:<mark>@<learner>")
    return learner, at, mark


def offer_cursors(senders: Iterable[bytes], after: Mapping[str, str] | None) -> dict[str, str]:
    """Learner -> entry id after which its stream is read: from the start where none is named.

    Any learner may have put a sender there that is none. Those of `after`, if few, are read though they are not there.
    """
    names = {name.decode() for name in senders if is_learner(name)}
    known = after or {}
    also = known if len(known) <= MOST_SENDERS else ()
    return {learner: known.get(learner, START) for learner in sorted(names.union(also))}


def new_senders(senders: Collection[bytes], after: Mapping[str, str] | None, seen: Iterable[bytes] = ()) -> set[bytes]:
    """Those that are neither in `after` nor `seen`, if there are too many; else none."""
    known = {*seen, *(name.encode() for name in after or ())} if len(senders) <= MOST_SENDERS else set()
    new = set(senders) - known
    return new if len(new) > MOST_NEW_SENDERS else set()


def is_learner(name: bytes) -> bool:
    """Whether a sender can be a learner's name; what cannot has no stream."""
    return len(name) <= MAX_NAME_CHARS and _LEARNER.fullmatch(name) is not None


def entry_id(text: str) -> tuple[int, int]:
    """A stream entry id, `ms-seq` or `ms`, as numbers.

    Raises:
        BusError: not an entry id.
    """
    ms, _, seq = text.partition("-")
    if not ms.isdecimal() or not (seq or "0").isdecimal():
        raise BusError(f"invalid stream entry id {text!r:.80}")
    return int(ms), int(seq or 0)


def decode_offer(fragment: int, learner: str, at: str, data: bytes) -> Offered:
    """An entry of a learner's stream; what does not decode is reported, not raised: its owner refuses it."""
    name = offer_id(learner, at)
    try:
        header = decode(DeltaHeader, data)
    except BadMessage as error:
        return Offered(name, None, str(error))
    if header.fragment != fragment:
        return Offered(name, None, f"header of fragment {header.fragment} on a stream of fragment {fragment}")
    if header.learner != learner:
        return Offered(name, None, f"header of {header.learner} on the stream of {learner}")
    return Offered(offer_id(learner, at, data), header)


# --- what else is read -----------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def decode_state(blob: bytes | None) -> RunState | None:
    """The run's state, or None where there is none yet. Every report is answered with it, and it hardly changes."""
    return None if blob is None else decode(RunState, blob)


def readable(kind: type[T], blob: bytes | None) -> T | None:
    """What any learner may write: what cannot be read is as good as none, and is written over."""
    with suppress(BadMessage):
        return None if blob is None else decode(kind, blob)
    return None


def moments_board(wish: bytes | None, claim: bytes | None, offer: bytes | None) -> MomentsBoard:
    """Who asks for which moments, whether a peer has taken it up, and the complete offer."""
    return MomentsBoard(
        wish=readable(MomentsWish, wish),
        claimed=claim is not None,
        offer=readable(MomentsOffer, offer),
    )


def _is_count(blob: bytes) -> bool:
    """Digits, not more of them than any number of ours has, and a number that a message may have."""
    return blob.isdigit() and len(blob) <= 20 and int(blob) <= MOST_TOKENS


def decode_count(what: str, blob: bytes | None) -> int:
    """A stored decimal number, 0 where there is none.

    Raises:
        BadMessage: not a number, or one above `MOST_TOKENS`.
    """
    if blob and not _is_count(blob):
        raise BadMessage(f"{what} is not a number up to 2^62: {blob!r:.80}")
    return int(blob or 0)


class HereSyncer(NamedTuple):
    """What a syncer says of itself."""

    saved_tokens: int
    nonce: str
    name: str


def live_syncers(now_ms: int, found: Mapping[bytes, bytes]) -> list[HereSyncer]:
    """Those whose time is not over, in order of their nonces; what cannot be read is as good as nothing."""
    live = []
    for nonce, value in sorted(found.items()):
        until_ms, saved, name = [*value.split(b" ", 2), b"", b""][:3]
        if _is_count(until_ms) and _is_count(saved) and int(until_ms) > now_ms:
            live.append(HereSyncer(int(saved), nonce.decode(errors="replace"), name.decode(errors="replace")))
    return live


def syncer_names(live: Iterable[HereSyncer]) -> dict[str, str]:
    """Nonce -> name."""
    return {one.nonce: one.name for one in live}


def savers(live: Iterable[HereSyncer]) -> list[HereSyncer]:
    """As `SyncerBoard.read_savers`."""
    return sorted(one for one in live if one.saved_tokens)


def shard_count(blob: bytes | None) -> int:
    """Epochs queued, or blocks read of a shard: a number that any learner may write. 0 where there is none."""
    return int(blob) if blob and blob.isdigit() and len(blob) < 19 else 0  # as the scripts


def claimed_shard(at: str, blob: bytes, position: bytes | None) -> ClaimedShard:
    """An entry of the shard stream, with how far it was read; where that cannot be told, from its start."""
    return ClaimedShard(entry_id=at, shard=readable(Shard, blob) or NO_SHARD, position=shard_count(position))


def shard_queue(epochs: int, entries: Iterable[tuple[str, bytes]], positions: Mapping[bytes, bytes]) -> ShardQueue:
    """The shard stream as a checkpoint keeps it, without what cannot be read."""
    found = [claimed_shard(at, blob, positions.get(at.encode())) for at, blob in entries]
    return ShardQueue(epochs=epochs, open=tuple((one.shard, one.position) for one in found if one.shard != NO_SHARD))


def check_chunks(first: int, chunks: Sequence[Encoded]) -> None:
    """Arguments of `write_chunks`.

    Raises:
        ValueError: a negative index or an empty chunk.
    """
    if first < 0 or not all(chunks):
        raise ValueError("chunks are numbered from 0 and never empty")


def chunks_too_large(key: str, chunk_bytes: int) -> BadPayload:
    """What a peer wrote as chunks of a payload is more than so many can be."""
    return BadPayload(f"{key} has chunks of more than the {chunk_bytes} bytes that the spec says")


# --- heads: what a commit sets in the hash, and what is read from it -------------------------------------


class MergedBases(Message):
    """The head's `merged` field as stored, and its `norms`."""

    merged: Annotated[tuple[MergedBase, ...], Field(fail_fast=True)]
    norms: Norms


def head_fields(commit: Commit) -> dict[str, bytes]:
    """What a commit sets in the head's hash; the three totals are added to, not set."""
    previous = commit.expected[1] if commit.expected else commit.lost and commit.lost.previous_digest
    return {
        "version": b"%d" % commit.version,
        "digest": commit.digest,
        "interval": b"%d" % commit.interval,
        **payload_fields(commit.published),
        "previous_digest": previous or b"",
        "window": encode(commit.window),
        "merged": encode(MergedBases(merged=commit.merged, norms=commit.norms)),
        **lost_totals(commit),
    }


def lost_totals(commit: Commit) -> dict[str, bytes]:
    """What a lost head had counted: set before the commit's own numbers are added."""
    if commit.lost is None:
        return {}
    totals = {name: getattr(commit.lost, name) for name in ("merged_deltas", "merged_tokens", "rejected_tokens")}
    totals |= {refused_field(reason): n for reason, n in commit.lost.refused.items()}
    return {name: b"%d" % total for name, total in totals.items()}


def payload_names(of: Published) -> dict[str, Any]:
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


def payload_fields(of: Published) -> dict[str, bytes]:
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


def replaced_by(of: Published, named: Sequence[bytes]) -> tuple[list[str], str]:
    """Payloads that a head names no more: global, rest and updates, which live on for a while; and a momentum or "".

    named: what the head says in the fields `NAMED`.

    Raises:
        BadMessage: its updates do not decode.
    """
    kept = of.keys
    payload, rest, momentum = (value.decode() for value in named[:3])
    keys = [payload, rest, *(key for one in decode_updates(named[3]) for key in one.payloads)]
    return [key for key in keys if key and key not in kept], momentum if momentum not in kept else ""


def decode_updates(blob: bytes | None) -> tuple[Update, ...]:
    """The head's `updates` field.

    Raises:
        BadMessage: it does not decode.
    """
    return decode(Updates, blob).updates if blob else ()


def room(have: int, more: int) -> int:
    """What a total of a head takes of `more` tokens: all, or none of them where it would go out of bounds.

    Peers say how many there are, and nobody's word may stop a commit or a refusal.
    """
    return more if have + more < COUNTER_LIMIT else 0


def head_after(head: Head, commit: Commit) -> Head:
    """What a commit makes of a head, as far as its owner knows."""
    return Head(
        fragment=head.fragment,
        version=commit.version,
        digest=commit.digest,
        **payload_names(commit.published),
        previous_digest=head.digest,
        interval=commit.interval,
        window=commit.window,
        merged=commit.merged,
        norms=commit.norms,
        merged_deltas=head.merged_deltas + len(commit.entries),
        merged_tokens=head.merged_tokens + room(head.merged_tokens, commit.merged_tokens),
        rejected_tokens=head.rejected_tokens,
        refused=head.refused,
    )


def refused_field(reason: str) -> str:
    """The head's count of deltas refused for a reason."""
    return f"refused:{reason}"


_REFUSED = {refused_field(reason.value).encode(): reason.value for reason in RefusalReason}
"""Field of a head's hash -> reason."""


def decode_head(fragment: int, fields: Mapping[bytes, bytes]) -> Head | None:
    """The head's hash to a `Head`; None where there is none, or one without a version.

    All is written at once with the version. A hash without one is what a server that threw that away has taken since.

    Raises:
        BadMessage: another field is missing, or one does not decode.
    """
    if b"version" not in fields:
        return None
    try:
        said: dict[str, Any] = {
            "fragment": fragment,
            "version": int(fields[b"version"]),
            "digest": fields[b"digest"],
            "payload": fields[b"payload"].decode(),
            "chunks": int(fields[b"chunks"]),
            "momentum": fields[b"momentum"].decode(),
            "previous_digest": fields[b"previous_digest"] or None,
            "window": decode(WindowView, fields[b"window"]),
            **dict(decode(MergedBases, fields[b"merged"])),
            "merged_deltas": int(fields[b"merged_deltas"]),
            "merged_tokens": int(fields[b"merged_tokens"]),
            "rejected_tokens": int(fields[b"rejected_tokens"]),
            "rest": fields[b"rest"].decode(),
            "payload_digest": fields[b"payload_digest"] or None,
            "updates": decode_updates(fields[b"updates"]),
            "behind": decode_count("behind", fields[b"behind"]),
            "interval": decode_count("interval", fields[b"interval"]),
            "refused": {reason: decode_count("refusals", fields[n]) for n, reason in _REFUSED.items() if n in fields},
        }
        return Head(**said)
    except (KeyError, ValueError) as error:  # pydantic's and UnicodeDecodeError are ValueErrors
        raise BadMessage(f"head of fragment {fragment} is unreadable", said=str(error)) from error


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
    if both := commit.published.keys & {*commit.delta_payloads, *commit.retired}:
        raise ValueError(f"the commit names what it deletes: {sorted(both)}")
    return commit.record.fragment


def _at(commit: Commit) -> tuple[int, bytes]:
    return commit.version, commit.digest
