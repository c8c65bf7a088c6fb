"""Headers of deltas on Redis: a stream for each fragment and learner, and one that tells when any of a group came."""

import asyncio
from collections.abc import Mapping

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.ports import START, Offered, Offers
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.payload.codec import encode


class RedisOffers(RedisConnection, Offers):
    """A learner's stream, the set of names that have one, and the group's arrivals."""

    async def offer(self, header: DeltaHeader) -> str:
        p, learner = header.fragment, header.learner
        group = self.keys.group(p)
        keys = [self.keys.deltas(p, learner), self.keys.senders(group), self.keys.arrivals(group)]
        (at,) = await self._redis.script("offer", keys, learner, encode(header))
        return stored_values.offer_id(learner, at.decode())

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        group, now = self.keys.group(fragment), asyncio.get_running_loop().time
        senders, arrivals = self.keys.senders(group), self.keys.arrivals(group)
        until = now() + block_s
        while True:
            # The last arrival before the names: whoever comes after them is a later one, and ends the read.
            last, names = await self._redis.many([("XREVRANGE", arrivals, "+", "-", "COUNT", 1), ("HKEYS", senders)])
            streams = {
                self.keys.deltas(fragment, name): (name, at)
                for name, at in stored_values.offer_cursors(names, after).items()
            }
            cursors = {key: at for key, (_, at) in streams.items()}
            cursors[arrivals] = last[0][0].decode() if last else START
            found = dict(await self._redis.read(cursors, limit, max(0.0, until - now())))
            came = found.pop(arrivals, None)
            if found or not came or now() >= until:
                of = {streams[key][0]: entries for key, entries in found.items()}
                return [
                    stored_values.decode_offer(fragment, name, at, data) for name in sorted(of) for at, data in of[name]
                ]
