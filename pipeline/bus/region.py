"""A port: what learners of a region, behind one line to the run's Redis, keep for each other on a Redis beside them.

Payloads lie there by name, their sums in hex. Nobody vouches for anything that is read there: a neighbour, or whoever
runs that Redis, may have written it. Adapters: `redis.region` and, in virtual time, `testing.memory_region`. Promises
that both keep:

- Every method raises `RegionAway`, and nothing else, if the cache does not do it in time.
- What is read has no more than `limit` chunks of `chunk_bytes` each, whatever the server says.
"""

from collections.abc import Sequence
from typing import Protocol

LEASE_S = 1.5
"""Who brings a payload and is not heard of for so long is gone: another one goes on."""
ENTRY_S = 600.0
"""What nobody has added to for so long is gone; a newcomer finds what was brought since."""
FADING_S = 10.0
"""What a newer version has replaced lives on for so long, for those who are reading it."""
LEAST_CALL_S = 1.0
"""Time that a call of the cache is given at least. Two of these, and the pull goes straight."""


class RegionCache(Protocol):
    """One run's payloads on a region's Redis."""

    async def read(
        self, name: str, first: int, limit: int, chunk_bytes: int, within_s: float, block_s: float = 0.0
    ) -> Sequence[bytes | memoryview]:
        """Encoded chunks from `first` on, as somebody wrote them; waits up to `block_s` for the first.

        within_s: beside that.
        """
        ...

    async def claim(self, name: str, nonce: str) -> str:
        """Become the one that brings a payload, or stay it, for `LEASE_S`; the nonce of who is. "": nobody by now."""
        ...

    async def write(self, name: str, first: int, chunks: Sequence[bytes | memoryview], within_s: float) -> None:
        """Append chunks as they are. One that is there stays; none is added where those before are gone."""
        ...

    async def keep(self, fragment: int, version: int, name: str, oldest: int) -> None:
        """A payload of a version is there; those of versions before `oldest` may go."""
        ...

    async def drop(self, name: str) -> None:
        """Delete a payload."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
