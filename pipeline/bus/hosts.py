"""The hosts of a Redis URL; URLs of sentinels and of clusters may name several. Pure."""

from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

SERVER_PORT, SENTINEL_PORT = 6379, 26379
# Scheme of a URL that names sentinels -> scheme of their servers.
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
# Option of a URL for the sentinels' login -> redis-py's connection option.
SENTINELS_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}


class HostPort(NamedTuple):
    """Address of one node."""

    host: str
    port: int

    def __str__(self) -> str:
        host = self.host.replace("%", "%25")  # before the zone of an IPv6 address: RFC 6874
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Hosts(NamedTuple):
    """The part of a URL between its scheme and its path."""

    login: str
    """`user:password@`; "" if there is none."""
    hosts: tuple[HostPort, ...]

    @classmethod
    def of(cls, parts: SplitResult) -> "Hosts":
        """Parse one or more hosts, separated by commas.

        Raises:
            ValueError: there is no host, or a port is invalid.
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
