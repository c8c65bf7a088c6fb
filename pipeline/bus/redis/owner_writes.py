"""An owner's writes on Redis: each is one script, which checks the lease and the head before it changes anything."""

from collections.abc import Iterable
from typing import Any

import msgpack

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.commits import Commit, Refusal, Republication
from diloco.pipeline.bus.ports import OwnerWrites
from diloco.pipeline.bus.redis.calls import to_ms
from diloco.pipeline.bus.redis.connection import RedisConnection
from diloco.pipeline.messages.head import WindowView
from diloco.pipeline.messages.tape import Rewound, WindowChanged
from diloco.pipeline.payload.codec import encode


class _Step:
    """A call of a script by named fields. A key stands in them as its place among the script's keys.

    Numbers that may be large are decimal text: Lua has no integers above 2**53.
    """

    def __init__(self, keys: list[str], nonce: str) -> None:
        self.keys = keys
        self.fields: dict[str, Any] = {"nonce": nonce}

    def place(self, key: str) -> int:
        """Name a key; its place, from 1."""
        self.keys.append(key)
        return len(self.keys)

    def places(self, keys: Iterable[str]) -> list[int]:
        """The same of several."""
        return [self.place(key) for key in keys]

    def call(self) -> tuple[list[str], bytes]:
        """Keys, and the one argument."""
        return self.keys, msgpack.packb(self.fields, use_bin_type=False)  # Lua has one type for text and bytes


class RedisOwnerWrites(RedisConnection, OwnerWrites):
    """Scripts on a fragment's lease, head, tape, headers and payloads."""

    def _owned(self, p: int) -> list[str]:
        return [self.keys.lease(p), self.keys.head(p), self.keys.tape(self.keys.group(p))]

    def _headers(self, step: _Step, p: int, entries: Iterable[str]) -> None:
        """Headers that go, by learner's stream."""
        found = stored_values.by_learner(entries).items()
        step.fields["headers"] = [
            {"key": step.place(self.keys.deltas(p, learner)), "entries": ids} for learner, ids in found
        ]

    async def _name_payloads(self, step: _Step, p: int, of: Commit | Republication, retired: Iterable[str]) -> None:
        """What the head will name, and what it names no more.

        A script may only touch keys named beforehand, so what it replaces is looked up first. The script checks that
        the head still names the same.
        """
        found = await self._redis.command("HMGET", self.keys.head(p), *stored_values.NAMED)
        named = [value or b"" for value in found]
        replaced, old_momentum = stored_values.replaced_by(of, named)
        version, digest = of.expected or ("", b"")
        step.fields |= {
            "was": {"version": str(version), "digest": digest, **dict(zip(stored_values.NAMED, named, strict=True))},
            "staged": [{"key": step.place(one.key), "chunks": one.chunks} for one in of.staged],
            "replaced": step.places(replaced),
            "replaced_ttl_ms": to_ms(of.replaced_ttl_s),
            "gone": step.places([*retired, *([old_momentum] if old_momentum else [])]),
        }

    async def commit(self, commit: Commit) -> None:
        p = stored_values.fragment_of(commit)
        step = _Step(self._owned(p), commit.nonce)
        self._headers(step, p, commit.entries)
        await self._name_payloads(step, p, commit, [*commit.delta_payloads, *commit.retired])
        step.fields |= {
            "set": [part for pair in stored_values.head_fields(commit).items() for part in pair],
            "merged_deltas": str(len(commit.record.contributions)),
            "merged_tokens": str(commit.merged_tokens),
            "record": encode(commit.record),
        }
        await self._redis.script("commit", *step.call())

    async def republish(self, fragment: int, anew: Republication) -> None:
        step = _Step(self._owned(fragment), anew.nonce)
        await self._name_payloads(step, fragment, anew, ())
        step.fields["set"] = [part for pair in stored_values.payload_fields(anew).items() for part in pair]
        await self._redis.script("republish", *step.call())

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        step = _Step(self._owned(fragment), refusal.nonce)
        self._headers(step, fragment, refusal.entries)
        version, digest = refusal.expected
        step.fields |= {
            "was": {"version": str(version), "digest": digest},
            "lost_tokens": str(refusal.lost_tokens),
            "counts": [
                {"field": stored_values.refused_field(reason), "more": str(n)} for reason, n in refusal.counts().items()
            ],
            "gone": step.places(refusal.delta_payloads),
            "records": [encode(record) for record in refusal.records],
        }
        await self._redis.script("refuse", *step.call())

    async def write_window(
        self,
        fragment: int,
        nonce: str,
        expected: tuple[int, bytes],
        window: WindowView,
        record: WindowChanged | Rewound | None,
    ) -> None:
        args = (nonce, *expected, encode(window), encode(record) if record else "")
        await self._redis.script("write_window", self._owned(fragment), *args)
