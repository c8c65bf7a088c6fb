"""Uploads that one learner at a time may make, on Redis: version 0, and moments. A claim, then the announcement."""

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.ports import InitialUploads, MomentsBoard, MomentsExchange
from diloco.pipeline.bus.redis.calls import to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import InitialUpload
from diloco.pipeline.payload.codec import decode, encode


class RedisInitialUploads(RedisConnection, InitialUploads):
    """Claim and upload are strings that expire."""

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.init_claim, nonce, ttl_s)

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        keys = [self.keys.init_claim, self.keys.initial]
        return await self._redis.script("announce", keys, upload.nonce, encode(upload), to_ms(ttl_s)) == [1]

    async def read_initial(self) -> InitialUpload | None:
        blob = await self._redis.command("GET", self.keys.initial)
        return None if blob is None else decode(InitialUpload, blob)


class RedisMomentsExchange(RedisConnection, MomentsExchange):
    """Wish, claim and offer are strings that expire."""

    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        await self._redis.script("ask", [self.keys.moments_wish], encode(wish), to_ms(ttl_s))

    async def read_moments(self) -> MomentsBoard:
        keys = (self.keys.moments_wish, self.keys.moments_claim, self.keys.moments_offer)
        return stored_values.moments_board(*await self._redis.many(("GET", key) for key in keys))

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        return await self._claim(self.keys.moments_claim, nonce, ttl_s)

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        keys = [self.keys.moments_claim, self.keys.moments_offer, self.keys.moments_wish, self.keys.moments_claim]
        return await self._redis.script("announce", keys, offer.nonce, encode(offer), to_ms(ttl_s)) == [1]
