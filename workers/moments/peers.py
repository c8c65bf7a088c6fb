"""Get moments from a live peer: wished for on the bus, uploaded once, taken by all that asked. asyncio, no torch.

| a learner that asks                         | a learner that answers                                    |
|---------------------------------------------|-----------------------------------------------------------|
| takes a complete offer that is there        | looks for a wish now and then                             |
| else, if a peer trains, wishes for one      | claims it, holds the claim with an expiry                 |
| waits: shortly for a claim, longer for data | copies its moments between steps, uploads, announces      |
| checks all of it, or begins fresh           | its offer outlives it, and expires                        |

The death of the answering peer only wastes its half upload: the claim expires, nothing was announced, and the next peer
begins under a nonce of its own. The answering peer's training thread copies one fragment a step; its exchange thread
does all the rest.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import structlog

from diloco.pipeline.bus.ports import Bus, Clock, MomentsBoard
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadPayload, BusError, DilocoError
from diloco.pipeline.fragments import Layout
from diloco.pipeline.liveness import is_live
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish, OptimizerKind
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.transfer.payloads import pull, push
from diloco.pipeline.waiting import cancel
from diloco.workers.moments.saved_moments import Moments, check, of_moment
from diloco.workers.times import TIMES

# The moments of a peer with fewer steps of its own are not worth waiting for.
USEFUL_STEPS = 20

NOTHING = np.empty(0, np.float32)

log = structlog.get_logger()


class Peers:
    """One learner's exchange of moments with its peers."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        learner: str,
        layout: Layout,
        kind: OptimizerKind,
        chunk_bytes: int,
        state: Callable[[], RunState | None],
    ) -> None:
        """state: returns the state of this learner's run, as last seen."""
        self._bus, self._clock, self._learner, self._state = bus, clock, learner, state
        self._layout, self._kind, self._chunk_bytes = layout, kind, chunk_bytes

    # --- asking -------------------------------------------------------------------------------------

    async def ask(self) -> Moments | None:
        """Return checked moments of a peer; None: there is no peer, no answer in time, or no usable one."""
        try:
            offer = await self._wait()
            return None if offer is None else await self._fetch(offer)
        except DilocoError as error:  # joining must not fail for want of moments: fresh ones will do
            log.warning("moments_not_taken", learner=self._learner, error=str(error))
            return None

    async def _peer_available(self) -> bool:
        """Return whether a live peer has moments and the run continues: in one that ends, peers no longer answer."""
        state = await self._bus.read_state()
        if state is not None and state.phase is not Phase.RUNNING:
            return False
        return any(
            is_live(seen, BUS_TIMES.live_s) and seen.report.step >= USEFUL_STEPS
            for seen in await self._bus.read_reports()
            if seen.report.learner != self._learner
        )

    async def _wait(self) -> MomentsOffer | None:
        began = unclaimed = self._clock.now()
        while True:
            board, now = await self._bus.read_moments(), self._clock.now()
            if board.offer is not None and self._is_ours(board.offer):
                return board.offer
            if board.claimed:
                unclaimed = now
            elif not await self._peer_available():
                return None
            if now - unclaimed > TIMES.moments_unclaimed_s or now - began > TIMES.moments_wait_s:
                log.info("moments_not_offered", learner=self._learner, waited_s=round(now - began, 1))
                return None
            if board.wish is None:
                wish = MomentsWish(learner=self._learner, kind=self._kind)
                await self._bus.ask_moments(wish, TIMES.moments_wait_s)
            await asyncio.sleep(TIMES.poll_s)

    def _is_ours(self, offer: MomentsOffer) -> bool:
        """Return whether an offer is of this kind, and of this learner's run."""
        state = self._state()
        return state is not None and (offer.kind, offer.began_unix_s) == (self._kind, state.began_unix_s)

    async def _fetch(self, offer: MomentsOffer) -> Moments:
        """Pull an offer.

        Raises:
            PeerError: it is for another model or optimizer, or is damaged.
        """
        if offer.layout != self._layout.digest or offer.kind != self._kind:
            raise BadPayload(
                f"{offer.learner} offers moments of {offer.kind.optimizer} {list(offer.kind.moments)}, but this "
                f"learner has {self._kind.optimizer} {list(self._kind.moments)}"
            )
        flats = []
        for fragment in self._layout.fragments:
            flat = {}
            for name in self._kind.moments:
                key = self._bus.keys.moments_payload(fragment.id, name, offer.nonce)
                elements, flat[name] = of_moment(self._layout, name).fragments[fragment.id].elements, NOTHING
                if elements:
                    flat[name] = (await pull(self._bus, key, elements, "fp32", self._chunk_bytes)).array()
            flats.append(flat)
        if len(offer.numbers) != len(self._kind.numbers):
            raise BadPayload(f"numbers of {len(offer.numbers)} names for {len(self._kind.numbers)}")
        numbers = dict(zip(self._kind.numbers, offer.numbers, strict=True))
        moments = Moments(self._kind, tuple(flats), numbers)
        check(moments, self._layout)
        return moments

    # --- answering ----------------------------------------------------------------------------------

    async def answer(self, steps: Callable[[], int], copy: Callable[[], Awaitable[Moments | None]]) -> None:
        """Look for wishes and answer them, until cancelled or until there are no moments to give.

        Args:
            steps: returns the inner steps of this learner.
            copy: returns a copy of its moments, as soon as the training thread has made one; None: it cannot.
        """
        while True:
            await asyncio.sleep(TIMES.slow_poll_s)
            try:
                board = await self._bus.read_moments()
                if self._can_help(board) and steps() >= USEFUL_STEPS and not await self._donate(steps, copy):
                    return
            except BusError:
                pass  # another peer may answer, or the learner that asked begins fresh
            except TimeoutError:
                error = (
                    f"not copied and uploaded within {TIMES.moments_upload_s:g} s: the learner that asked may start "
                    "with fresh moments"
                )
                log.warning("moments_not_given", learner=self._learner, error=error)
            except Exception as error:  # helping another learner must never harm this one
                log.warning("moments_not_given", learner=self._learner, error=str(error)[:500])
                await asyncio.sleep(TIMES.moments_wait_s)  # this wish is for another peer

    def _can_help(self, board: MomentsBoard) -> bool:
        """Return whether a wish is another learner's, for this kind, and neither claimed nor met by an offer."""
        wish, offer = board.wish, board.offer
        if wish is None or board.claimed or wish.learner == self._learner or wish.kind != self._kind:
            return False
        return offer is None or not self._is_ours(offer)

    async def _donate(self, steps: Callable[[], int], copy: Callable[[], Awaitable[Moments | None]]) -> bool:
        """Answer a wish, unless another peer has claimed it; return False if there are no moments to give."""
        nonce, state = secrets.token_hex(8), self._state()
        if state is None or not await self._bus.claim_moments(nonce, TIMES.moments_claim_ttl_s):
            return True
        holding = asyncio.create_task(self._hold(nonce))
        try:
            async with asyncio.timeout(TIMES.moments_upload_s):
                if (moments := await copy()) is None:
                    return False
                for p, flats in enumerate(moments.flats):
                    for name, flat in flats.items():
                        if not flat.size:
                            continue
                        key = self._bus.keys.moments_payload(p, name, nonce)
                        await push(self._bus, key, flat, self._chunk_bytes, TIMES.moments_payload_ttl_s)
                offer = MomentsOffer(
                    learner=self._learner,
                    nonce=nonce,
                    layout=self._layout.digest,
                    kind=self._kind,
                    numbers=tuple(moments.numbers[name] for name in self._kind.numbers),
                    steps=steps(),
                    began_unix_s=state.began_unix_s,
                )
                announced = await self._bus.finish_moments(offer, TIMES.moments_offer_ttl_s)
                log.info("moments_offered", learner=self._learner, announced=announced)
                return True
        finally:
            await cancel(holding)

    async def _hold(self, nonce: str) -> None:
        """Renew the claim for as long as this learner works on it."""
        while True:
            await asyncio.sleep(TIMES.moments_claim_ttl_s / 3)
            with suppress(BusError):
                await self._bus.claim_moments(nonce, TIMES.moments_claim_ttl_s)
