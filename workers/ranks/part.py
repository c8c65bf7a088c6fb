"""What one rank of a learner carries: its pieces of all fragments, and whole those that it serves. asyncio.

A server gathers the pieces of a snapshot, encodes and uploads the delta; it pulls a global and hands each rank its
piece. Rank 0 says when (`carrier`). All of it is the exchange thread's, but for `pulled`, which the training thread
reads.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import RankGone, UsageError
from diloco.pipeline.messages.head import Head, MergedBase
from diloco.pipeline.payload import codec
from diloco.pipeline.payload.buffers import pooled
from diloco.workers.exchange.carrier import OwnCarrier, push_initial
from diloco.workers.exchange.member import Member
from diloco.workers.ranks.shares import Piece, Shares, elements, server_of
from diloco.workers.ranks.wires import Wires
from diloco.workers.rounds import Base, Publication

Float32 = npt.NDArray[np.float32]
Snapshot = Callable[[], Float32]
"""A rank's own vector of a fragment as it was; may wait for a device."""


@dataclass(slots=True)
class _Gathering:
    """A snapshot of a fragment on its way to its server."""

    flat: Float32
    missing: int
    """Elements."""
    base: Base | None = None
    """What the server had adopted at the snapshot."""
    whole: asyncio.Event = field(default_factory=asyncio.Event)


class Part:
    """One rank's."""

    def __init__(self, wires: Wires, member: Member, shares: Shares, snapshot: Callable[[int], Snapshot]) -> None:
        """snapshot: takes one of a fragment, while the training thread waits."""
        self._wires, self._member, self._shares, self._snapshot = wires, member, shares, snapshot
        self._rank = wires.rank
        self._carrier = OwnCarrier(member, initial=self._no_initial)
        self.pulled: dict[tuple[int, int], Float32] = {}
        """(fragment, number of its global) -> this rank's own vector (elements,); the training thread takes it."""
        self._bases: dict[tuple[int, int], Base] = {}
        self._adopted: dict[int, int] = {}
        """Fragment that is served -> number of the adopted global."""
        self._gathering: dict[tuple[int, int], _Gathering] = {}
        self.still = asyncio.Event()
        """The training thread waits: it joins, or leaves. Until then snapshots are its own."""
        self.still.set()
        wires.handle(
            take=self._take,
            snapshot=self._take_snapshot,
            upload=self._upload,
            forget=self._forget,
            initial=self._upload_initial,
            pull=self._pull,
            give=self._give,
            merged=self._merged,
            passed=self._passed,
            reset=self._reset,
        )

    @staticmethod
    def _no_initial(fragment: int) -> Float32:
        raise UsageError(f"fragment {fragment} was never pulled")

    # --- snapshots ----------------------------------------------------------------------------------------

    def send(self, items: Sequence[tuple[int, int, Snapshot | None]]) -> None:
        """Send snapshots to their servers.

        items: fragment, tag of the snapshot, and what this rank has of it; None: others send it.
        """
        for p, tag, snapshot in items:
            self._wires.go_on(self._send(p, tag, snapshot))

    async def _send(self, p: int, tag: int, snapshot: Snapshot | None) -> None:
        server = server_of(p, self._shares.ranks)
        if server == self._rank:
            self._gathered(p, tag).base = self._bases.get((p, self._adopted.get(p, 0)))
        if snapshot is None:
            return
        own = await self._member.offload(snapshot)
        await self._wires.ask(server, "take", p, tag, vector=_cut(own, self._shares.sent(self._rank, p)))

    async def _take_snapshot(self, _: int, p: int, tag: int) -> None:
        await self.still.wait()
        await self._send(p, tag, self._snapshot(p) if self._shares.sent(self._rank, p) else None)

    def _gathered(self, p: int, tag: int) -> _Gathering:
        """That of a snapshot, begun with what is first heard of it."""
        if (p, tag) not in self._gathering:
            size = self._member.layout.fragments[p].elements
            self._gathering[p, tag] = _Gathering(pooled(size, np.float32), size)
        return self._gathering[p, tag]

    async def _take(self, rank: int, p: int, tag: int, vector: Float32) -> None:
        gathering, at = self._gathered(p, tag), 0
        sent = self._shares.sent(rank, p)
        _check_size(rank, p, vector, elements(sent))
        for piece in sent:
            gathering.flat[piece.start : piece.start + piece.elements] = vector[at : at + piece.elements]
            at += piece.elements
        gathering.missing -= at
        if not gathering.missing:
            gathering.whole.set()

    async def _forget(self, _: int, p: int, tag: int) -> None:
        await self._gathered(p, tag).whole.wait()
        del self._gathering[p, tag]

    async def _upload(self, _: int, p: int, tag: int, said: dict[str, Any]) -> bool:
        """said: the publication, without its base."""
        gathering = self._gathered(p, tag)
        await gathering.whole.wait()
        del self._gathering[p, tag]
        if gathering.base is None:
            raise UsageError(f"fragment {p} was snapshot before it was adopted")
        publication, version = Publication(gathering.base, **said), gathering.base.version

        def of_use() -> bool:
            return max((one.version for (q, _), one in self._bases.items() if q == p), default=version) - 1 <= version

        return await self._carrier.upload(publication, lambda: gathering.flat, of_use)

    async def _upload_initial(self, _: int, p: int, tag: int, nonce: str) -> int:
        """tag: of a snapshot; 0: of what was adopted."""
        if not tag:
            return await self._carrier.upload_initial(p, nonce)
        gathering = self._gathered(p, tag)
        await gathering.whole.wait()
        del self._gathering[p, tag]
        return await push_initial(self._member, p, nonce, gathering.flat)

    # --- globals ------------------------------------------------------------------------------------------

    async def _pull(self, _: int, p: int, number: int, encoded: bytes) -> bool:
        """Whether all ranks have it."""
        member, head = self._member, codec.decode(Head, encoded)
        flat = await member.outages.retry(self._carrier.pull, head)
        if flat is None:
            return False
        self._bases[p, number] = Base(p, head.version, head.digest, flat)
        for rank in range(self._shares.ranks):  # one after the other: of what replicas get there is one copy at a time
            own = await member.offload(own_of, flat, self._shares.pieces(rank, p))
            await self._wires.ask(rank, "give", p, number, vector=own)
        return True

    async def _give(self, rank: int, p: int, number: int, vector: Float32) -> None:
        _check_size(rank, p, vector, elements(self._shares.pieces(self._rank, p)))
        self.pulled[p, number] = vector

    def adopted(self, p: int, number: int) -> None:
        """The training thread has adopted it: older ones are no longer needed."""
        self._adopted[p] = number
        for kept in (self.pulled, self._bases):
            for q, other in list(kept):
                if q == p and other < number:
                    kept.pop((q, other), None)

    # --- what became of deltas ----------------------------------------------------------------------------

    async def _merged(self, _: int, p: int, own: list[tuple[int, int]]) -> None:
        """own: base version and tokens of each of the learner's deltas that were merged."""
        who = {"learner": self._member.learner, "incarnation": self._member.incarnation}
        self._carrier.feedback.merged(p, [MergedBase(**who, base_version=base, tokens=tokens) for base, tokens in own])

    async def _passed(self, _: int, p: int, version: int) -> None:
        self._carrier.feedback.passed(p, version)

    async def _reset(self, _: int, p: int) -> None:
        self._carrier.feedback.reset(p)


def own_of(flat: Float32, pieces: Sequence[Piece]) -> Float32:
    """A rank's own vector of a fragment; without a copy where that is the fragment's."""
    if elements(pieces) == len(flat):
        return flat
    own: Float32 = pooled(elements(pieces), np.float32)
    for piece in pieces:
        own[piece.at : piece.at + piece.elements] = flat[piece.start : piece.start + piece.elements]
    return own


def _check_size(rank: int, p: int, vector: Float32, expected: int) -> None:
    if len(vector) != expected:
        raise RankGone(f"rank {rank} of this learner has sent {len(vector)} of {expected} elements of fragment {p}")


def _cut(own: Float32, pieces: Iterable[Piece]) -> Float32:
    """These of a rank's own vector, one after the other; without a copy where they are all of it."""
    cut = [own[piece.at : piece.at + piece.elements] for piece in pieces]
    return own if sum(map(len, cut)) == len(own) else np.concatenate(cut)
