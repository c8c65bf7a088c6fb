"""A Redis with the users of one run, for tests of what each may do and of what one does to others. Redis 7."""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis as redis_py

from diloco.pipeline.bus import acl
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from tests.backdoor import RedisBackdoor

LEARNERS = ("l0", "l1")


def rules_of(user: acl.User) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", user.rules)


def as_user(url: str, name: str) -> str:
    return url.replace("://", f"://{name}:pw-{name}@", 1)


@contextmanager
def known(client: Any, users: Iterable[acl.User]) -> Iterator[None]:
    """These users are the server's for as long as the block lasts: `as_user`. Skipped before Redis 7."""
    users, version = list(users), client.info()["redis_version"]
    if int(str(version).split(".")[0]) < 7:
        pytest.skip(f"ACL selectors need Redis 7, this is {version}")
    for user in users:
        client.execute_command("ACL", "SETUSER", user.name, "on", f">pw-{user.name}", *rules_of(user))
    try:
        yield
    finally:
        client.execute_command("ACL", "DELUSER", *(user.name for user in users))


class Server:
    """A Redis 7 with the users of one run."""

    def __init__(self, url: str) -> None:
        self.url, self.run = url, f"acl-{secrets.token_hex(4)}"
        self.keys = RunKeys(self.run)
        self.backdoor = RedisBackdoor(self.run, url)
        self.admin: Any = self.backdoor.client
        self.admin.execute_command("ACL", "LOG", "RESET")
        self.users = acl.users(self.run, LEARNERS)

    async def bus(self, user: str) -> RedisBus:
        return await connect(as_user(self.url, user), self.run)

    def raw(self, user: str) -> Any:
        return redis_py.Redis.from_url(as_user(self.url, user), protocol=2)


@pytest.fixture
def server(redis_server: str) -> Iterator[Server]:
    server = Server(redis_server)
    with server.admin, known(server.admin, server.users):
        yield server
