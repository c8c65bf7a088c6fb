"""Version 0 of a run, from the learners' side: one of them uploads it, the others wait for heads. asyncio.

Also of a run that has lost its heads for good: it begins again with what a learner has adopted.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from diloco.pipeline.agreement import PATIENCE_S
from diloco.pipeline.errors import BadPayload, BusError, BusUnavailable
from diloco.pipeline.messages.run import InitialUpload
from diloco.pipeline.payload.codec import chunk_count
from diloco.pipeline.view.ledger import whole_tokens
from diloco.pipeline.waiting import meanwhile
from diloco.workers.exchange.carrier import INITIAL_TTL_S, Carrier, some_at_once
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.spec_check import Agreement

CLAIM_TTL_S = 10.0
RENEW_S = CLAIM_TTL_S / 4
PROLONG_S = INITIAL_TTL_S / 4
POLL_S = 0.05


class Version0:
    """How one learner sees to it that its run has a version 0."""

    def __init__(self, member: Member, agreement: Agreement, carrier: Carrier) -> None:
        self._bus, self._member, self._agreement, self._carrier = member.bus, member, agreement, carrier
        self._fragments = range(len(member.layout.fragments))
        self._chunks: dict[int, int] = {}
        """Fragment that this learner has uploaded -> chunks of it."""
        self._announced: InitialUpload | None = None
        """What it has, once all of it was there."""

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
        # An upload that is there while heads are lost did not bring them back; nor does another's that is fresh.
        useless = await retry(bus.read_initial) if trained else None

        async def prolong() -> None:
            await self._prolong(nonce)

        async with meanwhile(self._member.outages.forever(prolong)):
            missing: Sequence[int] = self._fragments
            while missing := await self._headless(missing) or await self._headless(self._fragments):
                await retry(self._agreement.look, patience_s)
                upload = await retry(bus.read_initial)
                fresh = upload is not None and upload.began_unix_s is None and upload.nonce != nonce
                if (
                    (upload in (None, useless) or (trained and fresh) or await retry(self._is_lost, upload, missing[0]))
                    and (trained or not await retry(self._agreement.others_trained))
                    and await retry(bus.claim_initial, nonce, CLAIM_TTL_S)
                ):
                    await self._upload(nonce, trained)
                await asyncio.sleep(POLL_S)

    async def _headless(self, fragments: Sequence[int]) -> list[int]:
        """Those that have no head. Of very many, to read those of all again and again would take all of the time."""
        heads = await self._member.outages.retry(self._bus.read_heads, fragments)
        return [p for p, head in zip(fragments, heads, strict=True) if head is None]

    async def _is_lost(self, upload: InitialUpload, p: int) -> bool:
        """Whether the bus has the word of an upload, and not what a fragment without a head needs of it.

        A failover of a cluster can leave it so: the word and the payloads are on different nodes.
        """
        bus, member = self._bus, self._member
        wanted = chunk_count(member.layout.fragments[p].elements, "fp32", member.spec.sync.chunk_bytes)
        if await bus.count_chunks(bus.keys.initial_payload(p, upload.nonce)) >= wanted:
            return False
        return None in await bus.read_heads([p])  # else it went with the commit that made it a head

    def _word(self, nonce: str, trained: bool) -> InitialUpload:
        """What is said of an upload: of adopted values, also which run they are of, for its ledger to go on."""
        member, state = self._member, self._member.shared.state
        if not trained or state is None:
            return InitialUpload(learner=member.learner, nonce=nonce)
        return InitialUpload(
            learner=member.learner,
            nonce=nonce,
            began_unix_s=state.began_unix_s,
            tokens=state.tokens,
            merged_tokens=min(state.tokens, whole_tokens(member.shared.merged_tokens, member.layout)),
        )

    async def _upload(self, nonce: str, trained: bool) -> None:
        """All that has no head, under a claim that is kept however long a fragment takes; then announce it."""
        member, self._chunks, self._announced = self._member, {}, None
        member.log.info("initial_upload_started", fragments=len(self._fragments))

        async def upload_one(p: int) -> None:
            self._chunks[p] = await self._carrier.upload_initial(p, nonce)

        try:
            async with meanwhile(self._keep_claim(nonce)):
                heads = await self._bus.read_heads(self._fragments)
                # What has a head is not wanted any more.
                await some_at_once(upload_one, [p for p in self._fragments if heads[p] is None])
                upload = self._word(nonce, trained)
                if await self._bus.finish_initial(upload, INITIAL_TTL_S):
                    self._announced = upload
        except BusError:  # whatever went wrong, the claim lapses and somebody begins again
            self._chunks = {}

    async def _keep_claim(self, nonce: str) -> None:
        while await self._member.outages.retry(self._bus.claim_initial, nonce, CLAIM_TTL_S):  # noqa: ASYNC110  # no event
            await asyncio.sleep(RENEW_S)
        raise BusUnavailable("the claim to version 0 has lapsed, and another learner has it")

    async def _prolong(self, nonce: str) -> None:
        """What is uploaded lives on while it is wanted: the rest of it, and the syncers' copy, may take long."""
        bus, size = self._bus, self._member.spec.sync.chunk_bytes
        while True:
            await asyncio.sleep(PROLONG_S)
            for p, count in list(self._chunks.items()):
                with suppress(BadPayload):  # whoever appends to it harms its readers, who look at it
                    await bus.read_chunks(bus.keys.initial_payload(p, nonce), count, 1, size, extend_s=INITIAL_TTL_S)
            mine = self._announced
            if mine and await bus.read_initial() in (None, mine) and await bus.claim_initial(nonce, CLAIM_TTL_S):
                await bus.finish_initial(mine, INITIAL_TTL_S)
