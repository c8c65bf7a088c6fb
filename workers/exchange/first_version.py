"""Provide version 0 of a run: one learner uploads it, the others wait for heads. Runs on asyncio.

The same code restarts a run that has lost its heads for good, from the globals that a learner has adopted.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadPayload, BusError, BusUnavailable
from diloco.pipeline.messages.run import InitialUpload
from diloco.pipeline.payload.codec import chunk_count
from diloco.pipeline.view.ledger import whole_tokens
from diloco.pipeline.waiting import in_background
from diloco.workers.exchange.carrier import NoDeltas, run_concurrently
from diloco.workers.exchange.member import Member
from diloco.workers.exchange.spec_check import Agreement
from diloco.workers.times import TIMES


class Version0:
    """One learner's part in providing version 0 of its run."""

    def __init__(self, member: Member, agreement: Agreement, carrier: NoDeltas) -> None:
        self._bus, self._member, self._agreement, self._carrier = member.bus, member, agreement, carrier
        self._fragments = range(len(member.layout.fragments))
        self._chunks: dict[int, int] = {}  # fragment that this learner has uploaded -> its number of chunks
        self._waits = TIMES.retry.waits()  # after failed uploads
        self._announced: InitialUpload | None = None  # this learner's upload, once it was complete and announced

    async def ensure(self, nonce: str, *, trained: bool) -> None:
        """Wait until every fragment has a head; upload version 0 if nobody has.

        Args:
            nonce: names the upload; other values need another nonce.
            trained: the run had heads, and the adopted globals are uploaded. If False, the values are fresh ones, and
                are uploaded only if no live learner has trained ones.

        Raises:
            SpecMismatch: the run has another spec by now.
            UsageError: the values are not finite.
        """
        patience_s = BUS_TIMES.other_spec_s if trained else 0.0
        bus, retry = self._bus, self._member.outages.retry
        # If heads are lost, an upload that is there already has failed to bring them back. Below, another learner's
        # fresh values are treated likewise: trained values take precedence over them.
        useless = await retry(bus.read_initial) if trained else None

        async def prolong() -> None:
            await self._prolong(nonce)

        async with in_background(self._member.outages.forever(prolong)):
            missing: Sequence[int] = self._fragments
            while missing := await self._headless(missing) or await self._headless(self._fragments):
                await retry(self._agreement.look, patience_s)
                upload = await retry(bus.read_initial)
                fresh = upload is not None and upload.began_unix_s is None and upload.nonce != nonce
                if (
                    (upload in (None, useless) or (trained and fresh) or await retry(self._is_lost, upload, missing[0]))
                    and (trained or not await retry(self._agreement.others_trained))
                    and await retry(bus.claim_initial, nonce, TIMES.initial_claim_ttl_s)
                ):
                    await self._upload(nonce, trained)
                await asyncio.sleep(TIMES.poll_s)

    async def _headless(self, fragments: Sequence[int]) -> list[int]:
        """Return those of the fragments that have no head.

        `ensure` asks for the missing ones first: with very many fragments, reading all heads each time would take all
        its time.
        """
        heads = await self._member.outages.retry(self._bus.read_heads, fragments)
        return [p for p, head in zip(fragments, heads, strict=True) if head is None]

    async def _is_lost(self, upload: InitialUpload, p: int) -> bool:
        """Return whether an upload was announced, but its payload for fragment p is gone while p has no head.

        A failover in a cluster can cause this, because the announcement and the payloads are on different nodes.
        """
        bus, member = self._bus, self._member
        wanted = chunk_count(member.layout.fragments[p].elements, "fp32", member.spec.sync.chunk_bytes)
        if await bus.count_chunks(bus.keys.initial_payload(p, upload.nonce)) >= wanted:
            return False
        return None in await bus.read_heads([p])  # with a head, the payload was only removed by the commit that made it

    def _word(self, nonce: str, trained: bool) -> InitialUpload:
        """Return the announcement of an upload; for adopted values it names their run, so that its ledger continues."""
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
        """Upload every fragment that has no head, holding the claim however long that takes; then announce it."""
        member, self._chunks, self._announced = self._member, {}, None
        member.log.info("initial_upload_started", fragments=len(self._fragments))

        async def upload_one(p: int) -> None:
            self._chunks[p] = await self._carrier.upload_initial(p, nonce)

        try:
            async with in_background(self._keep_claim(nonce)):
                heads = await self._bus.read_heads(self._fragments)
                # Fragments that have a head need no upload any more.
                await run_concurrently(upload_one, [p for p in self._fragments if heads[p] is None])
                upload = self._word(nonce, trained)
                if await self._bus.finish_initial(upload, TIMES.payload_ttl_s):
                    self._announced = upload
        except BusError as error:  # the claim lapses, and this learner or another one begins again
            self._chunks = {}
            wait_s = next(self._waits)
            member.outages.log_error(error, task="initial_upload", retry_s=wait_s)
            await asyncio.sleep(wait_s)

    async def _keep_claim(self, nonce: str) -> None:
        ttl_s, retry = TIMES.initial_claim_ttl_s, self._member.outages.retry
        while await retry(self._bus.claim_initial, nonce, ttl_s):  # noqa: ASYNC110  # no event
            await asyncio.sleep(ttl_s / 4)
        raise BusUnavailable("the claim to version 0 has expired, and another learner has it")

    async def _prolong(self, nonce: str) -> None:
        """Keep extending the lifetime of the upload: other fragments and the syncers' copying may take long."""
        bus, size, ttl_s = self._bus, self._member.spec.sync.chunk_bytes, TIMES.payload_ttl_s
        while True:
            await asyncio.sleep(ttl_s / 4)
            for p, count in list(self._chunks.items()):
                with suppress(BadPayload):  # only the expiry matters here; readers check the payload themselves
                    await bus.read_chunks(bus.keys.initial_payload(p, nonce), count, 1, size, extend_s=ttl_s)
            mine = self._announced
            if mine is None or await bus.read_initial() not in (None, mine):
                continue
            if await bus.claim_initial(nonce, TIMES.initial_claim_ttl_s):
                await bus.finish_initial(mine, ttl_s)
