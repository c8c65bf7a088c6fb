"""How much of each kind of key a run has on its bus. Pure; `redis.key_usage` counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindUsage:
    """All keys of one kind at one moment."""

    keys: int
    entries: int
    """Entries of streams, fields of hashes, 1 a string; summed over the keys."""
    bytes: int


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What was on the bus at one moment."""

    unix_s: float
    used_bytes: int
    """Memory of the whole server."""
    kinds: Mapping[str, KindUsage]


def kind_of(key: str) -> str:
    """`deltas` for `diloco:{run:0}:deltas:3` (see `keys.RunKeys`)."""
    return key.partition("}:")[2].partition(":")[0]


def count(keys: Iterable[tuple[str, int, int]]) -> dict[str, KindUsage]:
    """Sum up (key, entries, bytes)."""
    kinds: dict[str, KindUsage] = {}
    for key, entries, size in keys:
        name = kind_of(key)
        before = kinds.get(name, KindUsage(0, 0, 0))
        kinds[name] = KindUsage(before.keys + 1, before.entries + entries, before.bytes + size)
    return kinds
