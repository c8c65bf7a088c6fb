"""Moments from a live peer: asked for on the bus, uploaded once, taken by all who asked. asyncio, no torch.

| asks                                        | answers                                                   |
|---------------------------------------------|-----------------------------------------------------------|
| takes a complete offer that is there        | looks for a wish now and then                             |
| else, if a peer trains, wishes for one      | claims it, holds the claim with an expiry                 |
| waits: shortly for a claim, longer for data | copies its moments at step boundaries, uploads, announces |
| checks all of it, or begins fresh           | the offer outlives it, and expires                        |

A donor's death costs its half upload only: the claim lapses, nothing was announced, and the next peer begins under
a nonce of its own. The copy is one fragment a step, in the donor's training thread; all else is its exchange thread's.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import structlog

from diloco.pipeline.bus.ports import Bus, Clock, MomentsBoard
from diloco.pipeline.errors import BadPayload, BusError, DilocoError
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish, OptimizerKind
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.transfer.payloads import pull, push
from diloco.workers.moments.moments import Moments, check, of_moment

LOOK_S = 1.0
"""Time between a donor's looks at the bus."""
POLL_S = 0.1
UNCLAIMED_S = 5.0
"""Longest wait for a peer to take up the wish."""
OFFER_S = 30.0
"""Longest wait of all, once a peer has taken it up."""
UPLOAD_S = 40.0
"""A donor gives up after this."""
WISH_TTL_S, CLAIM_TTL_S, OFFER_TTL_S = 30.0, 3.0, 60.0
PAYLOAD_TTL_S = 2 * OFFER_TTL_S
"""Longer than upload and offer together: what is announced is there, and 20 s on. Not longer than two offers: a third
one's upload begins when the first one's payloads are gone, however often somebody joins."""
USEFUL_STEPS = 20
"""A peer with fewer steps of its own has no moments worth waiting for."""
LIVE_S = 5.0

NOTHING = np.empty(0, np.float32)

log = structlog.get_logger()


class Peers:
    """A learner's dealings with its peers' moments."""

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
        """state: of the run that this learner is in, as it last saw it."""
        self._bus, self._clock, self._learner, self._state = bus, clock, learner, state
        self._layout, self._kind, self._chunk_bytes = layout, kind, chunk_bytes

    # --- asking -------------------------------------------------------------------------------------

    async def ask(self) -> Moments | None:
        """Moments of a peer, checked; None if there is no peer, no answer in time, or none that can be used."""
        try:
            offer = await self._wait()
            return None if offer is None else await self._fetch(offer)
        except DilocoError as error:  # whatever it is: fresh moments will do
            log.warning("moments_not_taken", learner=self._learner, error=str(error))
            return None

    async def _somebody_may_answer(self) -> bool:
        """A live peer has moments, and the run goes on: peers that leave answer no more."""
        state = await self._bus.read_state()
        if state is not None and state.phase is not Phase.RUNNING:
            return False
        return any(
            seen.age_s < LIVE_S and not seen.report.left and seen.report.step >= USEFUL_STEPS
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
            elif not await self._somebody_may_answer():
                return None
            if now - unclaimed > UNCLAIMED_S or now - began > OFFER_S:
                log.info("moments_not_offered", learner=self._learner, waited_s=round(now - began, 1))
                return None
            if board.wish is None:
                wish = MomentsWish(learner=self._learner, kind=self._kind)
                await self._bus.ask_moments(wish, WISH_TTL_S)
            await asyncio.sleep(POLL_S)

    def _is_ours(self, offer: MomentsOffer) -> bool:
        """Of this kind, and of the run that this learner is in."""
        state = self._state()
        return state is not None and (offer.kind, offer.began_unix_s) == (self._kind, state.began_unix_s)

    async def _fetch(self, offer: MomentsOffer) -> Moments:
        """Pull an offer.

        Raises:
            PeerError: it is another model's or optimizer's, or damaged.
        """
        if offer.layout != self._layout.digest or offer.kind != self._kind:
            raise BadPayload(
                f"{offer.learner} offers moments of {offer.kind.optimizer} {list(offer.kind.moments)}, "
                f"here is {self._kind.optimizer} {list(self._kind.moments)}"
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
        """Look for wishes and fulfil them, until cancelled, or until there are no moments to give.

        Args:
            steps: inner steps this learner has made.
            copy: one of its moments, when the training thread next has made one; None: it cannot make any.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                board = await self._bus.read_moments()
                if self._can_help(board) and steps() >= USEFUL_STEPS and not await self._donate(steps, copy):
                    return
            except BusError:
                pass  # somebody else may, or the asker begins fresh
            except TimeoutError:
                error = f"not copied and uploaded within {UPLOAD_S:g} s: who asked may begin fresh"
                log.warning("moments_not_given", learner=self._learner, error=error)
            except Exception as error:  # whatever it is: who helps must not come to harm by it
                log.warning("moments_not_given", learner=self._learner, error=str(error)[:500])
                await asyncio.sleep(WISH_TTL_S)  # this wish is for another peer

    def _can_help(self, board: MomentsBoard) -> bool:
        """A wish of another's for moments of this kind, which nobody answers and no offer answers already."""
        wish, offer = board.wish, board.offer
        if wish is None or board.claimed or wish.learner == self._learner or wish.kind != self._kind:
            return False
        return offer is None or not self._is_ours(offer)

    async def _donate(self, steps: Callable[[], int], copy: Callable[[], Awaitable[Moments | None]]) -> bool:
        """Fulfil a wish, if nobody else does; False: there are no moments to give."""
        nonce, state = secrets.token_hex(8), self._state()
        if state is None or not await self._bus.claim_moments(nonce, CLAIM_TTL_S):
            return True
        holding = asyncio.create_task(self._hold(nonce))
        try:
            async with asyncio.timeout(UPLOAD_S):
                if (moments := await copy()) is None:
                    return False
                for p, flats in enumerate(moments.flats):
                    for name, flat in flats.items():
                        if not flat.size:
                            continue
                        key = self._bus.keys.moments_payload(p, name, nonce)
                        await push(self._bus, key, flat, self._chunk_bytes, PAYLOAD_TTL_S)
                offer = MomentsOffer(
                    learner=self._learner,
                    nonce=nonce,
                    layout=self._layout.digest,
                    kind=self._kind,
                    numbers=tuple(moments.numbers[name] for name in self._kind.numbers),
                    steps=steps(),
                    began_unix_s=state.began_unix_s,
                )
                announced = await self._bus.finish_moments(offer, OFFER_TTL_S)
                log.info("moments_offered", learner=self._learner, announced=announced)
                return True
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def _hold(self, nonce: str) -> None:
        """Keep the claim for as long as this learner works on it."""
        while True:
            await asyncio.sleep(CLAIM_TTL_S / 3)
            with suppress(BusError):
                await self._bus.claim_moments(nonce, CLAIM_TTL_S)
