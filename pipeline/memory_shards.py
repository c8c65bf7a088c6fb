"""Which shard of the work queue a claim takes, on the bus in memory: the twin of `lua/claim_shard.lua`. Pure."""

from collections.abc import Collection, Mapping

from .memory_store import EntryId, Hash

RELEASED = "released"
"""Holder of what was given back: no consumer's name, since those have a dot before the incarnation."""


def choose(
    held: Mapping[EntryId, tuple[str, int]],
    seen: Hash,
    consumer: str,
    known: Collection[EntryId],
    silent_ms: int,
    now_ms: int,
) -> EntryId | None:
    """The held entry to take: one that the consumer holds without knowing it, else the oldest whose holder is gone.

    Args:
        held: entry -> (consumer, when it was delivered to it, in ms).
        seen: `learner/incarnation` -> when it last reported, in ms.
        consumer: who claims.
        known: what the consumer knows it holds.
        silent_ms: a holder not heard from for this long is gone.
        now_ms: the server's time.
    """

    def gone(at: EntryId) -> bool:
        holder, delivered_ms = held[at]
        learner, _, incarnation = holder.rpartition(".")
        last = seen.get(f"{learner}/{incarnation}".encode() if learner else holder.encode(), b"")
        return holder == RELEASED or now_ms - (int(last) if last.isdigit() else delivered_ms) >= silent_ms

    mine = sorted(at for at, (holder, _) in held.items() if holder == consumer and at not in known)
    if mine:
        return mine[0]
    return min((at for at, (holder, _) in held.items() if holder != consumer and gone(at)), default=None)
