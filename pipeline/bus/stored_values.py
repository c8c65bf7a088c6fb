"""Values as the bus stores them, besides heads, shared by its adapters so that neither is kinder than the other.

Pure: bytes in, messages out, and the checks that need no server.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from diloco.pipeline.bus.entry_ids import offer_id
from diloco.pipeline.bus.ports import MomentsBoard, Offered
from diloco.pipeline.errors import BadMessage, LearnerReplaced
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import LearnerReport, RunState, SeenReport
from diloco.pipeline.messages.shards import Shard, ShardQueue
from diloco.pipeline.payload.codec import Encoded, decode

EVENTS_CAP = 10_000
EVALUATIONS_CAP = 100_000

_HOLDER = re.compile(rb"([0-9]{1,15}) [0-9a-f]+", re.IGNORECASE)


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
    return Offered(name, header)


def decode_state(blob: bytes | None) -> RunState | None:
    """The run's state, or None where there is none yet."""
    return None if blob is None else _decoded_state(blob)


@lru_cache(maxsize=2)
def _decoded_state(blob: bytes) -> RunState:
    """Every report is answered with it, and it hardly changes."""
    return decode(RunState, blob)


def moments_board(wish: bytes | None, claim: bytes | None, offer: bytes | None) -> MomentsBoard:
    """Who asks for which moments, whether a peer has taken it up, and the complete offer."""
    return MomentsBoard(
        wish=None if wish is None else decode(MomentsWish, wish),
        claimed=claim is not None,
        offer=None if offer is None else decode(MomentsOffer, offer),
    )


def decode_shard(blob: bytes) -> Shard:
    """A data shard."""
    return decode(Shard, blob, 1024)


def _is_count(blob: bytes) -> bool:
    """Digits, and not more of them than any number of ours has."""
    return blob.isdigit() and len(blob) <= 20


def decode_count(what: str, blob: bytes | None) -> int:
    """A stored decimal number, 0 where there is none.

    Raises:
        BadMessage: not a number.
    """
    if blob and not _is_count(blob):
        raise BadMessage(f"{what} is not a number: {blob!r:.80}")
    return int(blob or 0)


def live_syncers(now_ms: int, found: Mapping[bytes, bytes]) -> dict[str, str]:
    """Nonce -> name of those whose time is not over; what cannot be read is as good as nothing."""
    live = {}
    for nonce, value in sorted(found.items()):
        until_ms, blank, name = value.partition(b" ")
        if blank and _is_count(until_ms) and int(until_ms) > now_ms:
            live[nonce.decode(errors="replace")] = name.decode(errors="replace")
    return live


def seen_reports(now_ms: int, reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes]) -> list[SeenReport]:
    """Stored reports with their ages, by name; one that cannot be read is as good as none."""
    found = []
    for name, blob in sorted(reports.items()):
        with suppress(BadMessage):
            age_s = max(0, now_ms - decode_count("report time", seen.get(name))) / 1000
            found.append(SeenReport(report=decode(LearnerReport, blob), age_s=age_s))
    return found


def holder(report: LearnerReport) -> bytes:
    """What a report makes its learner's holder."""
    return b"%d %s" % (report.generation, report.incarnation.encode())


def check_holder(key: str, held: bytes | None, mine: bytes, generation: int) -> None:
    """Whether a report may be written by who holds its learner's id; what cannot be read holds nothing.

    Raises:
        LearnerReplaced: another incarnation does.
    """
    readable = _HOLDER.fullmatch(held or b"")
    if readable and held != mine and int(readable[1]) >= generation:
        raise replaced(key, int(readable[1]))


def replaced(key: str, generation: int) -> LearnerReplaced:
    """Another incarnation holds a learner's id."""
    return LearnerReplaced(f"{key} is held by generation {generation}", generation)


def shard_queue(epochs: int, entries: Iterable[tuple[str, bytes]], positions: Mapping[bytes, bytes]) -> ShardQueue:
    """The shard stream as a checkpoint keeps it."""
    return ShardQueue(
        epochs=epochs,
        open=tuple(
            (decode_shard(blob), decode_count("shard position", positions.get(at.encode()))) for at, blob in entries
        ),
    )


def check_chunks(first: int, chunks: Sequence[Encoded]) -> None:
    """Arguments of `write_chunks`.

    Raises:
        ValueError: a negative index or an empty chunk.
    """
    if first < 0 or not all(chunks):
        raise ValueError("chunks are numbered from 0 and never empty")
