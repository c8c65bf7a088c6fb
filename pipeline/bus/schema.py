"""The storage format of values on the bus: entry ids, headers, heads, and the other stored values.

Both adapters share it, so that they accept and refuse the same values. Pure: bytes in, messages out, and the checks
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
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import START, MomentsBoard, Offered, TapeEntry
from diloco.pipeline.errors import BadMessage, BadPayload, BusError, OtherFormat
from diloco.pipeline.messages.fragment import DeltaHeader, Head, MergedBase, Norms, RefusalReason, WindowView
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import ClaimedShard, Shard, ShardQueue
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_LEARNERS, MAX_NAME_CHARS, MAX_TOKENS, PARTY, Message
from diloco.pipeline.payload.codec import Encoded, decode, decode_tape, encode

T = TypeVar("T", bound=Message)

EVENTS_CAP = 10_000
EVALUATIONS_CAP = 100_000


# Totals of a head stay below this, so that HINCRBY cannot overflow half-way through a commit, which has no rollback.
COUNTER_LIMIT = 2**62

# Each read of headers costs time per sender. Up to this many unknown names are read as they are; if there are more,
# the reader first asks which of them have a header pending.
MAX_NEW_SENDERS = 512
# If there are more names than this, all of them count as unknown.
MAX_SENDERS = MAX_LEARNERS

# Most entries of the shard queue that are read. An epoch has at most half as many (`MAX_SHARDS`).
MAX_OPEN_SHARDS = 2**15
# Stands for an unreadable entry. It has no blocks, so the learner that claims it finishes it at once.
NO_SHARD = Shard(epoch=0, index=0, start=0, stop=0)

_LEARNER = re.compile(PARTY.encode())


# --- entries of streams, and names of headers (the learner's stream, and the entry in it) ----------------


def offer_id(learner: str, at: str, data: bytes = b"") -> str:
    """Return the name of an entry of a learner's stream: `ms-seq:mark@learner`, or `ms-seq@learner` without its bytes.

    The mark identifies the content. A server whose clock is behind numbers entries consecutively; once it has lost its
    last entries, it gives their ids to new ones, and the name of a lost header must not match another header. An
    unacceptable entry has no mark, because it may have been read only in part; it is refused at once.
    """
    return f"{at}:{mark_of(data)}@{learner}" if data else f"{at}@{learner}"


def mark_of(data: bytes) -> str:
    """Return the hash that distinguishes two entries with the same id. The Lua scripts compute the same."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:8]


def parse_offer_id(text: str) -> tuple[str, str]:
    """Return (learner, entry id) of a header's name.

    Raises:
        BusError: the text is not such a name.
    """
    learner, at, _ = _parts_of(text)
    return learner, at


def by_learner(entries: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Group names of headers: learner -> (entry id, mark or ''), learners sorted."""
    found: dict[str, list[tuple[str, str]]] = {}
    for learner, at, mark in map(_parts_of, entries):
        found.setdefault(learner, []).append((at, mark))
    return dict(sorted(found.items()))


def _parts_of(text: str) -> tuple[str, str, str]:
    """Split a header's name into (learner, entry id, mark or '')."""
    where, _, learner = text.partition("@")
    at, _, mark = where.partition(":")
    entry_id(at)
    if not learner:
        raise BusError(f"invalid name of a header {text!r:.80}: it must be <entry id>:<mark>@<learner>")
    return learner, at, mark


def offer_cursors(senders: Iterable[bytes], after: Mapping[str, str] | None) -> dict[str, str]:
    """Return learner -> entry id after which its stream is read; streams of learners not in `after` from the start.

    Any learner may have added a name that is not a learner's: those are skipped. The learners of `after` are read even
    if they are not among the senders, unless there are too many of them.
    """
    names = {name.decode() for name in senders if is_learner(name)}
    known = after or {}
    also = known if len(known) <= MAX_SENDERS else ()
    return {learner: known.get(learner, START) for learner in sorted(names.union(also))}


def new_senders(senders: Collection[bytes], after: Mapping[str, str] | None, seen: Iterable[bytes] = ()) -> set[bytes]:
    """Return the senders that are neither in `after` nor `seen` if they are too many; otherwise an empty set."""
    known = {*seen, *(name.encode() for name in after or ())} if len(senders) <= MAX_SENDERS else set()
    new = set(senders) - known
    return new if len(new) > MAX_NEW_SENDERS else set()


def is_learner(name: bytes) -> bool:
    """Return whether a sender can be a learner's name; any other has no stream."""
    return len(name) <= MAX_NAME_CHARS and _LEARNER.fullmatch(name) is not None


def entry_id(text: str) -> tuple[int, int]:
    """Parse a stream entry id, `ms-seq` or `ms`, into numbers.

    Raises:
        BusError: not an entry id.
    """
    ms, _, seq = text.partition("-")
    if not ms.isdecimal() or not (seq or "0").isdecimal():
        raise BusError(f"invalid stream entry id {text!r:.80}")
    return int(ms), int(seq or 0)


def decode_offer(fragment: int, learner: str, at: str, data: bytes) -> Offered:
    """Decode an entry of a learner's stream. A bad entry is returned with its problem, so that the owner refuses it."""
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


def decode_entries(group: int, stored: Iterable[tuple[str, bytes]]) -> tuple[list[TapeEntry], dict[str, BadMessage]]:
    """Decode entries of a group's tape; return those that are readable, and the errors of the others by entry id."""
    entries, errors = list[TapeEntry](), dict[str, BadMessage]()
    for at, data in stored:
        try:
            entries.append(TapeEntry(group, at, decode_tape(data)))
        except BadMessage as error:
            errors[at] = error
    return entries, errors


# --- other stored values ---------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # every report is answered with the state, which hardly changes
def decode_state(blob: bytes | None) -> RunState | None:
    """Decode the run's state; None if there is none yet."""
    return None if blob is None else decode(RunState, blob)


def readable(kind: type[T], blob: bytes | None) -> T | None:
    """Decode a value that any learner may write; None if it is absent or unreadable, which the bus treats alike."""
    with suppress(BadMessage):
        return None if blob is None else decode(kind, blob)
    return None


def moments_board(wish: bytes | None, claim: bytes | None, offer: bytes | None) -> MomentsBoard:
    """Decode the three values of the moments exchange."""
    return MomentsBoard(
        wish=readable(MomentsWish, wish),
        claimed=claim is not None,
        offer=readable(MomentsOffer, offer),
    )


def _is_count(blob: bytes) -> bool:
    """Return whether it is a decimal number up to `MAX_TOKENS`; the length is checked before `int` parses it."""
    return blob.isdigit() and len(blob) <= 20 and int(blob) <= MAX_TOKENS


def unlink(key: str) -> str:
    """Return the remedy for a key of the run whose value no party can have written."""
    return f"delete it (UNLINK '{key}'); the run's parties put the right value back"


def decode_spec(keys: RunKeys, blob: bytes) -> Spec:
    """Decode the run's spec.

    Raises:
        OtherFormat: it is of another release.
        BadMessage: it is unreadable. The message names the key.
    """
    try:
        return decode(Spec, blob)
    except OtherFormat:
        raise
    except BadMessage as error:
        raise BadMessage("the run's spec is unreadable", unlink(keys.spec), str(error)) from error


def decode_count(what: str, blob: bytes | None) -> int:
    """Decode a stored decimal number; 0 if it is absent.

    Raises:
        BadMessage: it is not a number, or is above `MAX_TOKENS`.
    """
    if blob and not _is_count(blob):
        raise BadMessage(f"{what} is not a number up to 2^62: {blob!r:.80}")
    return int(blob or 0)


class LiveSyncer(NamedTuple):
    """A live syncer's entry on the bus."""

    saved_tokens: int
    nonce: str
    name: str
    page: str = ""


# Where a syncer serves its page: bounded, and without characters that a terminal would obey.
_PAGE = re.compile(rb"http://[!-~]{1,255}/( on [!-~]{1,255})?")


def live_syncers(now_ms: int, found: Mapping[bytes, bytes]) -> list[LiveSyncer]:
    """Return the syncers whose entries have not expired, sorted by nonce; unreadable entries are skipped."""
    live = []
    for nonce, value in sorted(found.items()):
        until_ms, saved, name, page = [*value.split(b" ", 3), b"", b"", b""][:4]
        if _is_count(until_ms) and _is_count(saved) and int(until_ms) > now_ms:
            shown = page.decode() if _PAGE.fullmatch(page) else ""
            live.append(LiveSyncer(int(saved), nonce.decode(errors="replace"), name.decode(errors="replace"), shown))
    return live


def syncer_names(live: Iterable[LiveSyncer]) -> dict[str, str]:
    """Return nonce -> name."""
    return {one.nonce: one.name for one in live}


def pages(live: Iterable[LiveSyncer]) -> dict[str, str]:
    """Return name -> page of the syncers that serve one (`SyncerBoard.read_pages`)."""
    return {one.name: one.page for one in live if one.page}


def savers(live: Iterable[LiveSyncer]) -> list[tuple[int, str, str]]:
    """Return the syncers that have a checkpoint to restore, most tokens last (`SyncerBoard.read_savers`)."""
    return sorted((one.saved_tokens, one.nonce, one.name) for one in live if one.saved_tokens)


def shard_count(blob: bytes | None) -> int:
    """Decode a number of epochs or blocks that any learner may write; 0 if it is absent or unreadable."""
    return int(blob) if blob and blob.isdigit() and len(blob) < 19 else 0  # the same rule as in the scripts


def claimed_shard(at: str, blob: bytes, position: bytes | None) -> ClaimedShard:
    """Decode an entry of the shard stream and its saved position; an unreadable position counts as 0."""
    return ClaimedShard(entry_id=at, shard=readable(Shard, blob) or NO_SHARD, position=shard_count(position))


def shard_queue(epochs: int, entries: Iterable[tuple[str, bytes]], positions: Mapping[bytes, bytes]) -> ShardQueue:
    """Decode the shard stream for a checkpoint, without unreadable entries."""
    found = [claimed_shard(at, blob, positions.get(at.encode())) for at, blob in entries]
    return ShardQueue(epochs=epochs, open=tuple((one.shard, one.position) for one in found if one.shard != NO_SHARD))


def check_chunks(first: int, chunks: Sequence[Encoded]) -> None:
    """Check the arguments of `write_chunks`.

    Raises:
        ValueError: a negative index or an empty chunk.
    """
    if first < 0 or not all(chunks):
        raise ValueError("chunks must be numbered from 0 and not be empty")


def chunks_too_large(key: str, chunk_bytes: int) -> BadPayload:
    """Return the error for chunks that are larger than the spec's size."""
    return BadPayload(f"{key} has chunks larger than the spec's {chunk_bytes} bytes")


# --- heads: the fields that a commit sets in the hash, and reading them back -----------------------------


class MergedBases(Message):
    """The `merged` field of the head's hash; it also holds the head's `norms`."""

    merged: Annotated[tuple[MergedBase, ...], Field(fail_fast=True)]
    norms: Norms


def head_fields(commit: Commit) -> dict[str, bytes]:
    """Return the fields that a commit sets in the head's hash; the three totals are incremented, not set."""
    previous = commit.expected[1] if commit.expected else commit.lost and commit.lost.previous_digest
    return {
        "version": b"%d" % commit.record.version,
        "digest": commit.record.digest,
        "interval": b"%d" % commit.interval,
        **payload_fields(commit.published),
        "previous_digest": previous or b"",
        "window": encode(commit.window),
        "merged": encode(MergedBases(merged=commit.merged, norms=commit.norms)),
        **lost_totals(commit),
    }


def lost_totals(commit: Commit) -> dict[str, bytes]:
    """Return the totals of a lost head; they are set before the commit's own numbers are added."""
    if commit.lost is None:
        return {}
    totals = {name: getattr(commit.lost, name) for name in ("merged_deltas", "merged_tokens", "rejected_tokens")}
    totals |= {refused_field(reason): n for reason, n in commit.lost.refused.items()}
    return {name: b"%d" % total for name, total in totals.items()}


def payload_names(of: Published) -> dict[str, Any]:
    """Return the fields of a `Head` that describe its payloads."""
    return {
        "payload": of.payload.key,
        "chunks": of.payload.chunks,
        "momentum": of.momentum.key if of.momentum else "",
        "rest": of.rest.key if of.rest else "",
        "payload_digest": of.rest.shown if of.rest else None,
    }


def payload_fields(of: Published) -> dict[str, bytes]:
    """Return the same fields as they are stored in the head's hash."""
    said = payload_names(of)
    return {
        **{name: said[name].encode() for name in ("payload", "momentum", "rest")},
        "chunks": b"%d" % said["chunks"],
        "payload_digest": said["payload_digest"] or b"",
    }


# Fields of the head's hash that name payloads.
NAMED = ("payload", "rest", "momentum")


def replaced_by(of: Published, named: Sequence[bytes]) -> tuple[list[str], str]:
    """Return the keys that the head will no longer name once it names `of`.

    Args:
        of: the payloads that the head will name.
        named: the head's current values of the fields `NAMED`.

    Returns:
        Keys of global and rest, which live on for a while because learners may be pulling them; and the key of the old
        momentum, or "".
    """
    kept = of.keys
    payload, rest, momentum = (value.decode() for value in named)
    return [key for key in (payload, rest) if key and key not in kept], momentum if momentum not in kept else ""


def room(have: int, more: int) -> int:
    """Return `more` if the total `have` can take it within its bounds, otherwise 0.

    `more` comes from a peer's claim, and no peer's claim may make a commit or a refusal fail.
    """
    return more if have + more < COUNTER_LIMIT else 0


def head_after(head: Head, commit: Commit) -> Head:
    """Return the head that a commit produces, as its owner can compute it without reading it back."""
    return Head(
        fragment=head.fragment,
        version=commit.record.version,
        digest=commit.record.digest,
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
    """Return the field of the head's hash that counts the deltas refused for a reason."""
    return f"refused:{reason}"


# Field of a head's hash -> reason.
_REFUSED = {refused_field(reason.value).encode(): reason.value for reason in RefusalReason}


def decode_head(fragment: int, fields: Mapping[bytes, bytes]) -> Head | None:
    """Decode the head's hash; None if there is no hash, or one without a version.

    A commit writes all fields at once, the version included. A hash without a version is what remains if a server has
    lost that write but kept later writes to single fields.

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
            "interval": decode_count("interval", fields[b"interval"]),
            "refused": {reason: decode_count("refusals", fields[n]) for n, reason in _REFUSED.items() if n in fields},
        }
        return Head(**said)
    except (KeyError, ValueError) as error:  # pydantic's and UnicodeDecodeError are ValueErrors
        raise BadMessage(f"head of fragment {fragment} is unreadable", said=str(error)) from error


def fragment_of(commit: Commit) -> int:
    """Check that a commit is consistent, and return its fragment.

    Raises:
        ValueError: the commit contradicts itself.
    """
    record, lost = commit.record, commit.lost
    if commit.expected is not None and record.version != commit.expected[0] + 1:
        raise ValueError(f"commit of version {record.version} on top of version {commit.expected[0]}")
    if lost is not None and (commit.expected or (lost.version, lost.digest) != (record.version, record.digest)):
        raise ValueError(f"commit of version {record.version} does not match the lost head {lost.version}")
    if both := commit.published.keys & {*commit.delta_payloads, *commit.retired}:
        raise ValueError(f"the commit both uses and deletes payloads: {sorted(both)}")
    return record.fragment
