"""One rank's share of the transfers: its pieces of all fragments, and the whole fragments that it serves.

The server of a fragment gathers the pieces of a snapshot, then encodes and uploads the delta. It also pulls a global
and hands each rank its pieces. Rank 0 says when (`rank_carrier.RanksCarrier`). All of this belongs to the exchange
thread, except `pulled`, which the training thread reads.

`Samples` and `Replicas` compare rows of the tensors that all ranks hold whole, since a loop may forget to average its
gradients (docs/explanation/ranks.md, "Replicas that drift apart").
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from diloco.pipeline.errors import RankGone, UsageError
from diloco.pipeline.fragments import FragmentLayout, Layout, Slot
from diloco.pipeline.messages.fragment import Head, MergedBase
from diloco.pipeline.messages.wire import AVERAGED, Codec
from diloco.pipeline.payload import codec
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import DTYPES, TRAITS
from diloco.pipeline.transfer.payloads import Offload
from diloco.workers.background import offload
from diloco.workers.copies.snapshots import Snapshot
from diloco.workers.encoding import Float32, encode_delta
from diloco.workers.exchange.carrier import OwnCarrier, push_initial
from diloco.workers.exchange.member import Member
from diloco.workers.parameters import FragmentParameters
from diloco.workers.ranks.placement import Piece, Shares, elements
from diloco.workers.ranks.transport import Transport
from diloco.workers.rounds import Base, Publication

# Returns a rank's own vector of a fragment as it was at the snapshot; may wait for a device.
TakeSnapshot = Callable[[], Float32]


@dataclass(slots=True)
class _Gathering:
    """A snapshot of a fragment while its pieces arrive at the server.

    If the codec encodes each element alone, without feedback, pieces are encoded as they arrive, so only the payload is
    kept.
    """

    missing: int
    """Number of elements that have not arrived; at first all of them."""
    codec: Codec
    base: Base | None = None
    """The base that the server had adopted at the time of the snapshot."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the base is known."""
    encoded: bool = False
    """True if pieces are encoded as they arrive."""
    _against: Float32 | None = None
    """The base's values if pieces are encoded as they arrive, until all have arrived. They are held here because the
    next base may be adopted before the upload ends."""
    out: npt.NDArray[Any] | None = None
    """The payload (elements,), or the values if they are encoded later."""
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, base: Base | None) -> None:
        """Set the base; None if nothing was adopted."""
        self.base = base
        if base is not None and self.codec in DTYPES and not TRAITS[self.codec].feedback:
            self.encoded = True
            self.base, self._against = replace(base, values=None), base.values
        self.begun.set()

    async def take(self, own: Float32, pieces: Sequence[Piece], offload: Offload) -> None:
        """Store these pieces of a rank's own vector, which is overwritten."""
        await self.begun.wait()
        if self.out is None:
            dtype = DTYPES[self.codec] if self.encoded else np.dtype(np.float32)
            # If this vector has all elements, no other rank sends more: the payload may overwrite the values in place.
            alone = elements(pieces) == self.missing
            self.out = own.view(dtype)[: self.missing] if alone else pooled(self.missing, dtype)
        await offload(self._put, own, pieces, self.out)
        self.missing -= elements(pieces)
        if not self.missing:
            self._against = None
            self.whole.set()

    def _put(self, own: Float32, pieces: Sequence[Piece], out: npt.NDArray[Any]) -> None:
        for piece in pieces:
            values, place = own[piece.at : piece.at + piece.elements], piece.of(out)
            if self._against is None:
                place[:] = values.reshape(place.shape)
            elif place.flags.c_contiguous:
                self._encode(piece, values, place.reshape(-1))
            else:
                encoded = np.empty(piece.elements, out.dtype)
                self._encode(piece, values, encoded)
                place[:] = encoded.reshape(place.shape)

    def _encode(self, piece: Piece, values: Float32, out: npt.NDArray[Any]) -> None:
        assert self._against is not None  # noqa: S101  # pieces are encoded as they arrive
        encode_delta(piece.cut(self._against), lambda: values, self.codec, None, out.view(np.uint8))

    def values(self) -> npt.NDArray[Any]:
        """Return `out`, once it is whole."""
        assert self.out is not None  # noqa: S101  # it is whole
        return self.out


class Transfers:
    """One rank's share of the transfers."""

    def __init__(
        self,
        transport: Transport,
        member: Member,
        shares: Shares,
        snapshot: Callable[[int], TakeSnapshot],
        overwrite: Callable[[int, Float32], None],
    ) -> None:
        """snapshot, overwrite: copy and replace this rank's vector of a fragment, while the training thread waits."""
        self._transport, self._member, self._shares, self._snapshot = transport, member, shares, snapshot
        self._rank, self._overwrite = transport.rank, overwrite
        self._carrier = OwnCarrier(member, initial=self._no_initial)
        self.pulled: dict[tuple[int, int], Float32 | None] = {}
        """Maps (fragment, number of its global) to this rank's own vector (elements,), or None if it is adopted. The
        training thread takes entries out."""
        self._not_finite = set[int]()
        """Fragments whose last snapshot on this rank had values that are not finite."""
        self._arriving: dict[tuple[int, int], Float32] = {}
        """Maps (fragment, number of its global) to a vector of which slices are missing."""
        self._bases: dict[tuple[int, int], Base] = {}
        self._adopted: dict[int, int] = {}
        """Maps a fragment that this rank serves to the number of the adopted global."""
        self._gathering: dict[tuple[int, int], _Gathering] = {}
        self.training_idle = asyncio.Event()
        """Set while the training thread waits, because it joins or leaves. While it is clear, only the training thread
        takes snapshots."""
        self.training_idle.set()
        transport.handle(
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

    def send(self, items: Sequence[tuple[int, int, TakeSnapshot | None]]) -> None:
        """Send snapshots to their servers.

        items: (fragment, tag of the snapshot, this rank's vector, or None if it has nothing to send).
        """
        for item in items:
            self._transport.start_task(self._begin(*item))

    def _begin(self, p: int, tag: int, snapshot: TakeSnapshot | None) -> Coroutine[Any, Any, None]:
        """Return the coroutine that sends a snapshot. The base is fixed here, before another one can be adopted."""
        if self._shares.servers[p] == self._rank:
            self._gathered(p, tag).begin(self._bases.get((p, self._adopted.get(p, 0))))
        return self._send(p, tag, snapshot)

    async def _send(self, p: int, tag: int, snapshot: TakeSnapshot | None) -> None:
        if snapshot is None:
            return
        own, pieces = await self._member.offload(snapshot), self._shares.sent(self._rank, p)
        self._warn_if_not_finite(await self._member.offload(_is_finite, own), p)
        if (server := self._shares.servers[p]) == self._rank:
            await self._gathered(p, tag).take(own, pieces, self._member.offload)
            return
        for number, group in enumerate(self._shares.slices(self._rank, p)):
            await self._transport.ask(server, "take", p, tag, number, vector=_cut(own, group))

    def _warn_if_not_finite(self, finite: bool, p: int) -> None:
        """Warn once per episode if this rank's values are not finite: the syncer cannot tell whose they are."""
        if finite:
            self._not_finite.discard(p)
            return
        if not self._not_finite:
            held = "its own rows have NaN or infinite values, so its learner's deltas are refused"
            detail = f"{held}: lower the learning rate, and check this rank's data and machine"
            self._member.log.warning("rank_not_finite", rank=self._rank, fragment=p, detail=detail)
        self._not_finite.add(p)

    async def _take_snapshot(self, _: int, p: int, tag: int) -> None:
        await self.training_idle.wait()
        await self._begin(p, tag, self._snapshot(p) if self._shares.sent(self._rank, p) else None)

    def _gathered(self, p: int, tag: int) -> _Gathering:
        """Return the gathering of a snapshot. It is created by whichever message about the snapshot arrives first."""
        if (p, tag) not in self._gathering:
            fragment = self._member.layout.fragments[p]
            self._gathering[p, tag] = _Gathering(fragment.elements, fragment.sync(self._member.spec.sync).codec)
        return self._gathering[p, tag]

    async def _take(self, rank: int, p: int, tag: int, number: int, vector: Float32) -> None:
        at, group = 0, list[Piece]()
        sent = self._shares.slices(rank, p)[number]
        _check_size(rank, p, vector, elements(sent))
        for piece in sent:
            group.append(replace(piece, at=at))
            at += piece.elements
        await self._gathered(p, tag).take(vector, group, self._member.offload)

    async def _forget(self, _: int, p: int, tag: int) -> None:
        await self._whole(p, tag)

    async def _whole(self, p: int, tag: int) -> _Gathering:
        """Wait until a snapshot is complete, remove it from the gatherings, and return it."""
        gathering = self._gathered(p, tag)
        await gathering.whole.wait()
        return self._gathering.pop((p, tag))

    async def _upload(self, _: int, p: int, tag: int, fields: dict[str, Any]) -> bool:
        """Upload a gathered delta. fields: of the publication, except its base."""
        gathering = await self._whole(p, tag)
        if gathering.base is None:
            raise UsageError(f"a snapshot of fragment {p} was taken before it was adopted")
        publication, version = Publication(gathering.base, **fields), gathering.base.version

        def of_use() -> bool:
            return max((one.version for (q, _), one in self._bases.items() if q == p), default=version) - 1 <= version

        if gathering.encoded:
            return await self._carrier.upload_encoded(publication, gathering.values(), of_use)
        return await self._carrier.upload(publication, gathering.values, of_use)

    async def _upload_initial(self, _: int, p: int, tag: int, nonce: str) -> int:
        """Upload version 0 of a fragment from the snapshot `tag`; tag 0 stands for the values that were adopted."""
        if not tag:
            return await self._carrier.upload_initial(p, nonce)
        gathering = await self._whole(p, tag)
        return await push_initial(self._member, p, nonce, gathering.values())

    # --- globals ------------------------------------------------------------------------------------------

    async def _pull(self, _: int, p: int, number: int, at_once: bool, encoded: bytes) -> bool:
        """Pull a global, give each rank its pieces; return whether all have it. at_once: they adopt it at once."""
        member, head = self._member, codec.decode(Head, encoded)
        flat = await self._carrier.pull(lambda: head)
        if flat is None:
            return False
        self._bases[p, number] = Base(p, head.version, head.digest, flat)
        for rank in range(self._shares.ranks):
            pieces = self._shares.pieces(rank, p)
            if rank == self._rank:
                self._given(p, number, at_once, await member.offload(own_values, flat, pieces))
                continue
            for group, taken in enumerate(self._shares.given(rank, p)):
                vector = _joined([one.cut(flat) for one in taken])
                await self._transport.ask(rank, "give", p, number, at_once, group, vector=vector)
        return True

    async def _give(self, server: int, p: int, number: int, at_once: bool, group: int, vector: Float32) -> None:
        """Store a slice of this rank's own vector, of which the server sends the slices in order."""
        groups, key = self._shares.given(self._rank, p), (p, number)
        taken = groups[group]
        if group == 0:
            self._arriving[key] = pooled(elements(self._shares.pieces(self._rank, p)), np.float32)
        _check_size(server, p, vector, elements(taken))
        if taken:
            start = taken[0].at
            self._arriving[key][start : start + len(vector)] = vector
        if group + 1 == len(groups):
            self._given(p, number, at_once, self._arriving.pop(key))

    def _given(self, p: int, number: int, at_once: bool, own: Float32) -> None:
        if at_once:
            self._overwrite(p, own)
        self.pulled[p, number] = None if at_once else own

    def adopted(self, p: int, number: int) -> None:
        """Record that the training thread has adopted this global, and drop the older ones."""
        self._adopted[p] = number
        for kept in (self.pulled, self._bases):
            for q, other in list(kept):
                if q == p and other < number:
                    kept.pop((q, other), None)

    def forget(self) -> None:
        """Release everything held of the fragments; the thread has ended."""
        for kept in (self.pulled, self._arriving, self._bases, self._gathering):
            kept.clear()
        for fragment in self._member.layout.fragments:
            self._carrier.drop(fragment.id)

    # --- what became of deltas ----------------------------------------------------------------------------

    async def _merged(self, _: int, p: int, own: list[tuple[int, int]]) -> None:
        """Record that deltas were merged. own: (base version, tokens) of each delta of this learner that was merged."""
        who = {"learner": self._member.learner, "incarnation": self._member.incarnation}
        self._carrier.feedback.merged(p, [MergedBase(**who, base_version=base, tokens=tokens) for base, tokens in own])

    async def _passed(self, _: int, p: int, version: int) -> None:
        self._carrier.feedback.passed(p, version)

    async def _reset(self, _: int, p: int) -> None:
        self._carrier.feedback.reset(p)


def own_values(flat: Float32, pieces: Sequence[Piece]) -> Float32:
    """Return a rank's own vector of a fragment. It is not copied if it equals the whole fragment."""
    if elements(pieces) == len(flat):
        return flat
    own: Float32 = pooled(elements(pieces), np.float32)
    for piece in pieces:
        part = piece.of(flat)
        own[piece.at : piece.at + piece.elements].reshape(part.shape)[:] = part
    return own


def _check_size(rank: int, p: int, vector: Float32, expected: int) -> None:
    if len(vector) != expected:
        raise RankGone(f"rank {rank} of this learner sent {len(vector)} of {expected} elements of fragment {p}")


def _cut(own: Float32, pieces: Iterable[Piece]) -> Float32:
    """Return these pieces of a rank's own vector, concatenated."""
    return _joined([own[piece.at : piece.at + piece.elements] for piece in pieces])


def _joined(vectors: Sequence[Float32]) -> Float32:
    """Concatenate vectors; a single one is not copied."""
    if len(vectors) == 1:
        return vectors[0]
    out: Float32 = pooled(sum(map(len, vectors)), np.float32)
    return np.concatenate(vectors, out=out) if vectors else out


def _is_finite(own: Float32) -> bool:
    """Return whether all values are finite."""
    # One pass without a copy suffices: a value that is not finite makes the sum so, and finite ones hardly ever do.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(own.sum())) or bool(np.isfinite(own).all())


# Limits of what is compared: the number of tensors that rows are taken from, and the number of elements in total.
TENSORS, ELEMENTS = 8, 4096
# Steps between two comparisons. Before that many steps, comparisons come at the powers of two.
EVERY = 1024
# Replicas count as different if they differ by more than these shares of a step's length and of the values' norm:
# rounding does not cause so much.
APART, ROUNDING = 0.1, 1e-6
REMEDY = (
    "the replicas of the model have diverged, so a mixture of them is published: wrap the model in "
    "DistributedDataParallel, or average every gradient over the ranks (all_reduce) before each optimizer step, and "
    "give all ranks' optimizers the same settings"
)


def sample_layout(shares: Shares) -> Layout | None:
    """Return a one-fragment layout of some rows of the tensors that all ranks hold whole; None without such tensors."""
    alike = {
        slot.tensor.name: slot.tensor
        for fragment in shares.layout.fragments
        for slot in fragment.slots
        if slot.tensor.rule not in AVERAGED and shares.is_whole(slot.tensor.name)
    }
    slots, at = list[Slot](), 0
    for tensor in list(alike.values())[:: -(-len(alike) // TENSORS) or 1]:
        rows = tensor.shape[0] if tensor.shape else 1
        row = tensor.whole.elements // rows
        count = min(rows, max(1, ELEMENTS // TENSORS // row))
        if at + count * row <= ELEMENTS:
            first = (rows - count) // 2
            part = tensor.model_copy(update={"rows": (first, first + count) if count < rows else None})
            slots.append(Slot(part, at, at + count * row))
            at += count * row
    return Layout((FragmentLayout(0, tuple(slots)),), b"") if slots else None


class Samples:
    """One rank's copies of the compared rows. For the training thread."""

    def __init__(self, parameters: FragmentParameters, layout: Layout) -> None:
        """layout: the rows to compare, made by `sample_layout`."""
        self._some = parameters.some(layout)
        self._before: Snapshot | None = None
        self._failed = False

    def stepped(self, steps: int) -> tuple[Snapshot, Snapshot] | None:
        """Return the copies from before and after step `steps` if a comparison is due, otherwise None. Never raises."""
        before, self._before = self._before, None
        if (_due(steps) or _due(steps + 1)) and not self._failed:
            try:
                self._before = self._some.snapshot(0)
            except Exception as error:  # a mere check must not end the training
                self._failed = True
                structlog.get_logger().warning("replicas_not_compared", error=str(error)[:200])
        return (before, self._before) if _due(steps) and before is not None and self._before is not None else None


def _due(steps: int) -> bool:
    return steps > 0 and (steps % EVERY == 0 or steps & (steps - 1) == 0)


class Replicas:
    """One rank's side in its exchange thread. Runs on asyncio."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._received: dict[int, dict[int, Float32]] = {}
        """Maps a step and a rank to the values (2, elements) before and after the step; used at rank 0."""
        self._apart = False
        transport.handle(sampled=self._take)

    def compare(self, steps: int, before: Snapshot, now: Snapshot) -> None:
        """Send the copies of a step to rank 0, which compares them."""
        self._transport.start_task(self._send(steps, before, now))

    async def _send(self, steps: int, before: Snapshot, now: Snapshot) -> None:
        both = await offload(lambda: np.concatenate([before.numpy(), now.numpy()]))
        await self._transport.ask(0, "sampled", steps, vector=both)

    async def _take(self, rank: int, steps: int, vector: Float32) -> None:
        self._received.setdefault(steps, {})[rank] = vector.reshape(2, -1)
        if len(self._received[steps]) < self._transport.ranks:
            return
        ranks = differing(self._received.pop(steps))
        if ranks and not self._apart:
            structlog.get_logger().error("replicas_apart", steps=steps, ranks=[0, *ranks], detail=REMEDY)
        self._apart = bool(ranks)


def differing(values: Mapping[int, Float32]) -> Sequence[int]:
    """Return the ranks whose values differ from rank 0's. values: by rank, (2, elements) before and after a step."""
    before, now = values[0].astype(np.float64)
    least = max(APART * np.linalg.norm(now - before), ROUNDING * np.linalg.norm(now))
    return [rank for rank in sorted(values) if np.linalg.norm(values[rank][1] - now) > least]
