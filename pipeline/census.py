"""How much of each kind of key a run has on its bus. Pure; `redis_census` counts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """All keys of one kind at one moment."""

    keys: int
    entries: int
    """Entries of streams, fields of hashes, 1 a string; summed over the keys."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Census:
    """What was on the bus at one moment."""

    unix_s: float
    used_bytes: int
    """Memory of the whole server."""
    kinds: Mapping[str, Kind]


def kind_of(key: str) -> str:
    """`deltas` for `diloco:{run:0}:deltas:3` (see `keys.RunKeys`)."""
    return key.partition("}:")[2].partition(":")[0]


def count(keys: Iterable[tuple[str, int, int]]) -> dict[str, Kind]:
    """Sum up (key, entries, bytes)."""
    kinds: dict[str, Kind] = {}
    for key, entries, size in keys:
        name = kind_of(key)
        before = kinds.get(name, Kind(0, 0, 0))
        kinds[name] = Kind(before.keys + 1, before.entries + entries, before.bytes + size)
    return kinds
