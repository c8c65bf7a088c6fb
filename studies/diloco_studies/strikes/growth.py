"""What a run may have on its bus: every kind of key, and how many of it at most. Pure.

A key of a kind that is not named here is one that nobody thought of; more of a kind than its bound means that something
is not taken away. Bounds follow from what the run is (learners, fragments) and what was done to it (how many lives were
begun): what a killed process leaves behind may stay until it expires.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.pipeline.bus.schema import EVALUATIONS_CAP, EVENTS_CAP

TAPE_CAP = 30_000
"""Twice what the archive leaves untrimmed, and what came since."""
NODE = 256
"""Redis trims capped streams in whole nodes."""
WISHES = 8
"""Headers of one learner and fragment that may wait at a time, while no syncer serves it."""
MOMENTS = 2
"""Moments of an inner optimizer."""


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


@dataclass(frozen=True, slots=True)
class Scale:
    """What the bounds follow from."""

    learners: int
    fragments: int
    chunks: int
    """Of the largest payload."""
    lives: int
    """Learners started, restarts included."""
    syncer_lives: int
    replaced: int
    """Most commits within the time that a replaced global lives on."""
    shards: int
    """Of an epoch."""
    groups: int = 1
    """Of fragments."""


def bounds(scale: Scale) -> dict[str, tuple[int, int]]:
    """Kind of key -> most keys, most entries of them together."""
    p, m = scale.fragments, scale.learners
    deltas = WISHES * m * p
    left = p * scale.lives  # half uploads of killed learners, until they expire
    staged = p * scale.syncer_lives  # merges that a killed syncer had in hand, until they expire
    shards = 2 * scale.shards + NODE
    payloads = {
        "delta": deltas + left,
        "global": p + scale.replaced + staged,
        "rest": p + scale.replaced + staged,
        "momentum": p + staged,
        "initial": 1 + p * (1 + scale.lives),
        "moments": MOMENTS * p * (3 + scale.lives),
    }
    moments = ("moments-wish", "moments-claim", "moments-offer")
    single = ("spec", "wanted", "data-order", "shard-epoch", "init-claim", *moments)
    return {
        **dict.fromkeys(single, (1, 1)),
        **{name: (keys, keys * scale.chunks) for name, keys in payloads.items()},
        "state": (1, 2),
        "learners": (1, scale.lives),
        "seen": (1, scale.lives),
        "holder": (scale.learners, scale.learners),
        "syncers": (1, scale.syncer_lives),
        "events": (1, EVENTS_CAP + NODE),
        "evaluations": (1, EVALUATIONS_CAP + NODE),
        "shards": (1, shards),
        "shard-positions": (1, shards),
        "deltas": (p * m, deltas),
        "senders": (scale.groups, scale.groups * m),
        "arrivals": (scale.groups, scale.groups),
        "head": (p, 32 * p),
        "lease": (p, p),
        "tape": (p, TAPE_CAP),
    }


def peaks(samples: Iterable[KeyUsage]) -> dict[str, KindUsage]:
    """The most that there was of each kind at any one time; keys, entries and bytes each."""
    most: dict[str, KindUsage] = {}
    for sample in samples:
        for name, kind in sample.kinds.items():
            before = most.get(name, kind)
            most[name] = KindUsage(
                max(before.keys, kind.keys), max(before.entries, kind.entries), max(before.bytes, kind.bytes)
            )
    return dict(sorted(most.items()))


def grown(samples: Iterable[KeyUsage], scale: Scale) -> list[str]:
    """What was more than it may be, each kind once, at its worst."""
    limits = bounds(scale)
    worst: dict[str, tuple[float, str]] = {}
    for sample in samples:
        for name, kind in sample.kinds.items():
            if name not in limits:
                worst[name] = (0.0, f"there are {kind.keys} keys of the unknown kind {name!r}")
                continue
            most_keys, most_entries = limits[name]
            excess = max(kind.keys / most_keys, kind.entries / most_entries)
            if excess > max(1.0, worst.get(name, (0.0, ""))[0]):
                text = f"{name}: {kind.keys} keys with {kind.entries} entries; at most {most_keys} with {most_entries}"
                worst[name] = (excess, text)
    return [text for _, text in worst.values()]
