"""Users of a Redis that is up: made, and taken away again, on all its nodes and their replicas. For operators; Redis 7.

No server tells another one of its users. One that is away meanwhile has to be told later, or it lets in, or keeps out,
whom it should not once it is primary.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from diloco.pipeline.bus.acl import User
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.keys import run_of
from diloco.pipeline.bus.redis.calls import RedisCalls
from diloco.pipeline.bus.redis.connecting import connect_calls
from diloco.pipeline.errors import BusError, DilocoError

Kept = Literal["kept", "no file", "failed"]
"""Whether users are remembered over a restart: a node may have no ACL file, or one that it may not write."""


class RedisUsers:
    """A connection that may make users; made by `connect_users`."""

    def __init__(self, calls: RedisCalls) -> None:
        self._calls = calls
        self.away = set[str]()
        """Addresses of nodes, replicas too, that did not answer, and so were not told."""

    async def version(self) -> int:
        """Major version of the server; Valkey says that of the Redis that it is like."""
        return int((await self._calls.info()).version.partition(".")[0])

    async def exists(self, name: str) -> bool:
        """Whether any node has a user of this name."""
        return any(reply is not None for reply in await self._everywhere("ACL GETUSER", name))

    async def make(self, user: User, password: str) -> None:
        """Make a user. One of this name that was made at the same moment has both passwords then: neither is broken.

        Raises:
            NotPermitted: who is connected may make none.
        """
        digest = hashlib.sha256(password.encode()).hexdigest()
        rules = re.findall(r"\([^)]*\)|\S+", user.rules)
        await self._everywhere("ACL SETUSER", user.name, "on", f"#{digest}", *rules)

    async def run_of(self, name: str) -> str | None:
        """The one run that a user's rules are for; None: there is no such user, or its rules are for others too."""
        found = await self._everywhere("ACL GETUSER", name)
        runs = set(map(run_of, re.findall(r"~(\S+)", str(found)))) - {""}
        return runs.pop() if len(runs) == 1 else None

    async def take_away(self, name: str) -> bool:
        """Delete a user, and end its connections; False: there was none."""
        return any(await self._everywhere("ACL DELUSER", name))

    async def keep(self) -> Kept:
        """Have all nodes remember their users over a restart."""
        try:
            await self._everywhere("ACL SAVE")
        except BusError as error:
            if "not configured to use an ACL file" in str(error):
                return "no file"
            if "error trying to save the ACLs" in str(error):
                return "failed"
            raise
        return "kept"

    async def _everywhere(self, *command: Any) -> Sequence[Any]:
        nodes = dict.fromkeys([*self._calls.nodes.all(), *await self._calls.nodes.replicas()])
        told: Mapping[HostPort | None, Any] = await self._calls.everywhere(*command, at=nodes)
        self.away |= {str(node) for node, reply in told.items() if isinstance(reply, DilocoError)}
        return [reply for reply in told.values() if not isinstance(reply, DilocoError)]

    async def close(self) -> None:
        """Close the connection."""
        await self._calls.close()


async def connect_users(url: str) -> RedisUsers:
    """Reach the users of a Redis server.

    Raises:
        UsageError, BusUnavailable: as `redis_streams.connect`.
    """
    return RedisUsers(await connect_calls(url))
