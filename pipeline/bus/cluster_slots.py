"""Which keys lie in the same slot of a Redis cluster. Pure."""

from collections.abc import Iterable, Mapping


def _tag(key: str) -> str:
    return key[key.find("{") : key.find("}") + 1]


def by_slot(cursors: Mapping[str, str]) -> list[dict[str, str]]:
    """Cursors of streams, apart by hash tag."""
    found: dict[str, dict[str, str]] = {}
    for key, cursor in cursors.items():
        found.setdefault(_tag(key), {})[key] = cursor
    return list(found.values())


def one_slot(keys: Iterable[str]) -> None:
    """All keys of one atomic step must share a hash tag, or it would fail on Redis Cluster only.

    Raises:
        ValueError: naming the tags.
    """
    tags = set(map(_tag, keys))
    if len(tags) > 1 or "" in tags:
        raise ValueError(f"keys of several cluster slots in one step: {sorted(tags)}")
