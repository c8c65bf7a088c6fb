"""The hosts of a Redis URL, of which those of sentinels and of clusters name several. Pure."""

from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

SERVER_PORT, SENTINEL_PORT = 6379, 26379
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""Schemes of URLs that name sentinels, and those of the servers that they know."""
SENTINELS_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
"""Options of a URL that are the sentinels', and what they are on a connection."""


class HostPort(NamedTuple):
    """Of one node."""

    host: str
    port: int

    def __str__(self) -> str:
        host = self.host.replace("%", "%25")  # before the zone of an IPv6 address: RFC 6874
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Hosts(NamedTuple):
    """The part of a URL between its scheme and its path."""

    login: str
    """With its @; "" if there is none."""
    hosts: tuple[HostPort, ...]

    @classmethod
    def of(cls, parts: SplitResult) -> "Hosts":
        """One or more hosts, with commas between them.

        Raises:
            ValueError: there is none, or a port is no port.
        """
        login, _, rest = parts.netloc.rpartition("@")
        usual = SENTINEL_PORT if parts.scheme in SENTINEL_SCHEMES else SERVER_PORT
        hosts = []
        for one in rest.split(","):
            alone = urlsplit(f"//{one}")
            if not alone.hostname:
                raise ValueError
            hosts.append(HostPort(alone.hostname.replace("%25", "%", 1), alone.port or usual))
        return cls(f"{login}@" if login else "", tuple(hosts))
