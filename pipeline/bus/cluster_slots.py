"""Which keys lie in the same slot of a Redis cluster, and names whose slots lie evenly. Pure."""

from binascii import crc_hqx
from collections.abc import Iterable, Mapping
from functools import cache
from math import gcd

SLOTS = 16384
_GOLDEN = 0.6180339887498949


def tag(key: bytes | str) -> bytes | str:
    """The part of a key that its slot depends on, with its braces; "" if there is none."""
    if isinstance(key, bytes):
        return key[key.find(b"{") : key.find(b"}") + 1]
    return key[key.find("{") : key.find("}") + 1]


def slot(key: bytes | str) -> int:
    """Of one of our keys, which have a tag, by Redis Cluster's rule (CRC-16 of what stands between the braces)."""
    braced = tag(key)
    return crc_hqx((braced if isinstance(braced, bytes) else braced.encode())[1:-1], 0) % SLOTS


@cache
def numbers(run: str, groups: int) -> tuple[int, ...]:
    """For each group the number n with which `{run:n}` is its tag.

    The ring of slots is cut into as many equal parts as there are groups, and each has one near its middle. So any N
    nodes with equal ranges of slots hold groups // N each, or one more; nothing has to be known of the nodes, and slots
    that move to other nodes keep it so. Groups that follow each other, whose merges do too, lie far apart.
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
    """Cursors of streams, apart by hash tag."""
    found: dict[bytes | str, dict[str, str]] = {}
    for key, cursor in cursors.items():
        found.setdefault(tag(key), {})[key] = cursor
    return list(found.values())


def one_slot(keys: Iterable[str]) -> None:
    """All keys of one atomic step must share a hash tag, or it would fail on Redis Cluster only.

    Raises:
        ValueError: naming the tags.
    """
    tags = set(map(tag, keys))
    if len(tags) > 1 or "" in tags:
        raise ValueError(f"keys of several cluster slots in one step: {sorted(map(str, tags))}")
