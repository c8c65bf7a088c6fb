"""Payloads of one fragment on the bus: staged for a commit, and replaced ones until they must go. asyncio."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from diloco.pipeline.bus.commits import Staged
from diloco.pipeline.bus.ports import Clock, PayloadStore
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.chunks import Payload
from diloco.pipeline.transfer.global_format import Kind, Published, key_of
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.pipeline.transfer.payloads import push_growing
from diloco.syncer.merging.draft import Draft

STAGED_TTL_S = 120.0
"""A payload staged for a commit that never came is gone after this."""
REPLACED_TTL_S = 120.0
REPLACED_BYTES = 256 * 2**20
"""Replaced globals of one fragment live until they are this old, or together this large."""

RandomHex = Callable[[int], str]
"""`random_hex(n)`: 2n hex digits for a nonce; injected, so that a simulated run can be repeated."""


class Uploads:
    """The payloads of a draft on their way to the bus."""

    def __init__(self, head: Head, draft: Draft, tasks: dict[Kind, asyncio.Task[Staged]]) -> None:
        self._head, self._draft, self._tasks = head, draft, tasks

    async def published(self) -> Published:
        """What the next head names, once all of it is there; the draft must be written in full by now.

        Raises:
            BusError: as the bus.
        """
        await asyncio.gather(*self._tasks.values())
        return self._draft.published(self._head, {kind: task.result() for kind, task in self._tasks.items()})


class Staging:
    """What an owner has uploaded of its fragment."""

    def __init__(
        self,
        bus: PayloadStore,
        clock: Clock,
        layout: FragmentLayout,
        sync: SyncSpec,
        random_hex: RandomHex = secrets.token_hex,
    ) -> None:
        self._bus, self._clock, self._layout = bus, clock, layout
        self._sync, self._random_hex = sync, random_hex
        self._more = asyncio.Event()
        """Set when more of a draft is written."""
        self._replaced: deque[tuple[tuple[str, ...], float, int]] = deque()

    def draft(self) -> Draft:
        """Memory for a merge, of which `uploads` learns when another thread has written some."""
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, self._more.set)
        return Draft(self._layout, self._sync, tell)

    @asynccontextmanager
    async def uploads(self, head: Head, draft: Draft) -> AsyncIterator[Uploads]:
        """Upload a prepared draft under fresh keys while the block writes it; they expire unless a commit keeps them.

        Args:
            head: of the version that is merged into.
            draft: from `draft`.
        """
        version = head.version + 1
        tasks = {
            kind: asyncio.create_task(self._push(kind, version, payload))
            for kind, payload in draft.uploads(version).items()
        }
        try:
            yield Uploads(head, draft, tasks)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _push(self, kind: Kind, version: int, payload: Payload) -> Staged:
        key = key_of(self._bus.keys, kind, self._layout.id, version, self._random_hex(8))
        return await push_growing(self._bus, key, payload, self._sync.chunk_bytes, STAGED_TTL_S, self._more)

    def retire(self, head: Head, published: Published) -> tuple[str, ...]:
        """Keys of replaced globals that must go before their time, oldest first (byte cap).

        head: what is replaced. After a rewind it may name again what was replaced before.
        """
        kept, now = published.keys, self._clock.now()
        named = FORMATS[self._sync.global_codec].sizes(head, self._layout.elements)
        sizes = {key: size for key, size in named.items() if key not in kept}
        self._replaced.append((tuple(sizes), now, nbytes := sum(sizes.values())))
        while self._replaced and now - self._replaced[0][1] > REPLACED_TTL_S:
            self._replaced.popleft()
        retired: list[str] = []
        while sum(size for _, _, size in self._replaced) > max(REPLACED_BYTES, nbytes):
            retired += self._replaced.popleft()[0]
        return tuple(key for key in retired if key not in kept)
