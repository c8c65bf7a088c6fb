"""Version 0 of a run, from the learners' side: one of them uploads it, the others wait for heads. asyncio.

Also of a run that has lost its heads for good: it begins again with what a learner has adopted.
"""

import asyncio
from contextlib import suppress

from diloco.pipeline.agreement import PATIENCE_S
from diloco.pipeline.errors import BusError
from diloco.pipeline.messages.run import InitialUpload
from diloco.workers.exchange.agreement import Agreement
from diloco.workers.exchange.carrier import INITIAL_TTL_S, Carrier
from diloco.workers.exchange.member import Member

CLAIM_TTL_S = 10.0
POLL_S = 0.05


class Version0:
    """How one learner sees to it that its run has a version 0."""

    def __init__(self, member: Member, agreement: Agreement, carrier: Carrier) -> None:
        self._bus, self._member, self._agreement, self._carrier = member.bus, member, agreement, carrier
        self._fragments = range(len(member.layout.fragments))

    async def ensure(self, nonce: str, *, trained: bool) -> None:
        """Wait until every fragment has a head; upload version 0 if nobody has.

        Args:
            nonce: for the upload: other values, another nonce.
            trained: the run had heads, and this is what was adopted. Fresh values go to the bus only where no live
                learner has such ones.

        Raises:
            SpecMismatch: the run has another spec by now.
            UsageError: the values are not finite.
        """
        patience_s = PATIENCE_S if trained else 0.0
        bus, retry = self._bus, self._member.outages.retry
        # An upload that is there while heads are lost did not bring them back.
        useless = await retry(bus.read_initial) if trained else None
        while None in await retry(bus.read_heads, self._fragments):
            await retry(self._agreement.look, patience_s)
            if (
                await retry(bus.read_initial) in (None, useless)
                and (trained or not await retry(self._agreement.others_trained))
                and await retry(bus.claim_initial, nonce, CLAIM_TTL_S)
            ):
                await self._upload(nonce)
            await asyncio.sleep(POLL_S)

    async def _upload(self, nonce: str) -> None:
        member, chunks = self._member, []
        member.log.info("initial_upload_started", fragments=len(self._fragments))
        with suppress(BusError):  # whatever went wrong, the claim lapses and somebody begins again
            for p in self._fragments:
                chunks.append(await self._carrier.upload_initial(p, nonce))
                await self._bus.claim_initial(nonce, CLAIM_TTL_S)
            upload = InitialUpload(learner=member.learner, nonce=nonce, chunks=tuple(chunks))
            await self._bus.finish_initial(upload, INITIAL_TTL_S)
