"""Parsing of a Redis URL, which names one server, a cluster, or sentinels that know the server. It connects nowhere.

`redis+sentinel://[user:password@]host1:port1,host2,host3/service[/database][?options]` names sentinels and a service;
with `rediss+sentinel://` the sentinels and their servers use TLS. The sentinels' own login is given by two options,
`sentinel_username` and `sentinel_password`; like the rest of the URL it comes from the environment.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import parse_url

from diloco.pipeline.bus.hosts import SENTINEL_SCHEMES, SENTINELS_LOGIN, HostPort, Hosts
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import UsageError

_PROBES = 3

_MALFORMED = (
    "not a usable Redis URL: use redis://[user:password@]host:port (a port is 65535 at most), rediss://... for TLS, "
    "redis+sentinel://[user:password@]host:port,host:port,host:port/service, or unix:///path/to/socket; special "
    "characters in a password are percent-encoded"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The parts of a Redis URL."""

    options: Mapping[str, Any]
    """Options of redis-py's connections to servers, without host and port, which are in `hosts`."""
    hosts: tuple[HostPort, ...]
    """Addresses of the sentinels if there is a service; else of a server, or of some nodes of a cluster. Empty for a
    unix socket."""
    where: str
    """The URL's address without credentials, for messages."""
    service: str = ""
    """Name under which sentinels know the servers; "" if the URL names no sentinels."""
    sentinel_options: Mapping[str, Any] | None = None
    """Options of connections to sentinels."""

    @property
    def user(self) -> str:
        """User name of connections to servers; "" for the default user."""
        return str(self.options.get("username") or "")

    def at(self, address: HostPort | None) -> dict[str, Any]:
        """Return the options of connections to one server; None: the unix socket."""
        return dict(self.options) if address is None else {**self.options, "host": address.host, "port": address.port}


def parse(url: str) -> Place:
    """Parse a Redis URL into arguments of redis-py's connections and an address without credentials.

    Raises:
        UsageError: the URL is malformed.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            if not parts.path or parts.fragment:
                raise ValueError
            options = {**parse_url(url), **_USUAL}
            return Place(options, (), str(options["path"]))
        return _of_hosts(parts, Hosts.of(parts))
    except ValueError:  # its text may hold a part of a password
        raise UsageError(_MALFORMED) from None


_USUAL: dict[str, Any] = {
    # socket_timeout would cut blocking reads short; every call has its own time limit instead.
    **{"socket_timeout": None, "socket_connect_timeout": BUS_TIMES.connect_s, "protocol": 2},
    **{"decode_responses": False, "socket_read_size": 2**20, "max_connections": 2**20},
}


def _of_hosts(parts: SplitResult, named: Hosts) -> Place:
    service, path = "", parts.path
    if parts.scheme in SENTINEL_SCHEMES:
        found = re.fullmatch(r"/([A-Za-z0-9._-]+)((?:/[0-9]*)?)", path)
        if not found:
            raise UsageError(
                "a Redis URL of sentinels without a service: use "
                "redis+sentinel://[user:password@]host1:port1,host2:port2,host3:port3/service"
            )
        service, path = found[1], found[2]
    if parts.fragment or re.fullmatch("(/[0-9]*)?", path) is None:  # redis-py would silently ignore it
        raise ValueError
    asked = parse_qsl(parts.query, keep_blank_values=True)
    theirs = {SENTINELS_LOGIN[name]: value for name, value in asked if name in SENTINELS_LOGIN and service}
    query = urlencode([(name, value) for name, value in asked if not (name in SENTINELS_LOGIN and service)])
    scheme = SENTINEL_SCHEMES.get(parts.scheme, parts.scheme)
    options: dict[str, Any] = dict(parse_url(urlunsplit((scheme, f"{named.login}host", path, query, ""))))
    del options["host"]
    options |= _USUAL | {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    where = ",".join(map(str, named.hosts))
    if not service:
        return Place(options, named.hosts, where)
    encrypted = {
        name: value for name, value in options.items() if name.startswith("ssl_") or name == "connection_class"
    }
    sentinels = _USUAL | encrypted | theirs
    return Place(options, named.hosts, f"{service} of sentinels {where}", service, sentinels)


def _keepalive() -> dict[int, int]:
    """Return the TCP options of this system that detect a silent peer within `silent_s`."""
    each_s = int(BUS_TIMES.silent_s / (_PROBES + 1))
    values = {
        "TCP_KEEPIDLE": each_s,
        "TCP_KEEPINTVL": each_s,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": int(1000 * BUS_TIMES.silent_s),  # while sent bytes are unacknowledged, no probes are sent
    }
    return {getattr(socket, name): value for name, value in values.items() if hasattr(socket, name)}


def is_tls(options: Mapping[str, Any]) -> bool:
    """Return whether connections with these options are encrypted."""
    kind = options.get("connection_class")
    return kind is not None and kind.__name__ == "SSLConnection"
