"""Slots of a Redis cluster: the slot of a key, and hash tags whose slots are evenly spread. Pure."""

from binascii import crc_hqx
from collections.abc import Iterable, Mapping
from functools import cache
from math import gcd

SLOTS = 16384
_GOLDEN = 0.6180339887498949


def tag(key: bytes | str) -> bytes | str:
    """Return the hash tag of a key, which determines its slot, with its braces; "" if it has none."""
    if isinstance(key, bytes):
        return key[key.find(b"{") : key.find(b"}") + 1]
    return key[key.find("{") : key.find("}") + 1]


def slot(key: bytes | str) -> int:
    """Return the slot of a key with a hash tag, by Redis Cluster's rule (CRC-16 of the text between the braces)."""
    braced = tag(key)
    return crc_hqx((braced if isinstance(braced, bytes) else braced.encode())[1:-1], 0) % SLOTS


@cache
def numbers(run: str, groups: int) -> tuple[int, ...]:
    """Return for each group the number n of its hash tag `{run:n}`.

    The slots are cut into as many equal ranges as there are groups, and each group gets a slot near the middle of one.
    So with any N nodes that have equal ranges of slots, each node holds groups // N groups or one more. Nothing has to
    be known about the nodes, and the balance survives resharding. Groups with consecutive numbers, which merge one
    after the other, get slots that are far apart.
    """
    if groups == 1:
        return (0,)
    found: dict[int, int] = {}
    part, n = SLOTS / groups, 0
    while len(found) < groups:
        at = slot(f"{{{run}:{n}}}")
        if abs(at + 0.5 - (at // part + 0.5) * part) <= max(0.5, part / 16):
            found.setdefault(int(at // part), n)
        n += 1
    stride = round(groups * _GOLDEN)
    while gcd(stride, groups) > 1:
        stride += 1
    return tuple(found[g * stride % groups] for g in range(groups))


def by_slot(cursors: Mapping[str, str]) -> list[dict[str, str]]:
    """Split cursors of streams by hash tag."""
    found: dict[bytes | str, dict[str, str]] = {}
    for key, cursor in cursors.items():
        found.setdefault(tag(key), {})[key] = cursor
    return list(found.values())


def one_slot(keys: Iterable[str]) -> None:
    """Check that all keys of an atomic step share a hash tag: otherwise it would fail, but only on Redis Cluster.

    Raises:
        ValueError: they do not; the message names the tags.
    """
    tags = set(map(tag, keys))
    if len(tags) > 1 or "" in tags:
        raise ValueError(f"keys of several cluster slots in one step: {sorted(map(str, tags))}")
