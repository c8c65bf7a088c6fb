"""How many merges met with the end of their owner's lease: it expired before their commit took effect. Pure."""

from collections.abc import Callable
from typing import Any

from pipeline.census import kind_of
from pipeline.errors import LeaseLost
from pipeline.keys import RunKeys
from pipeline.memory_store import MemoryStore


class Lapses:
    """Watches one run's merges, which are told apart by the key of the global that they stage."""

    def __init__(self, store: MemoryStore, keys: RunKeys, now: Callable[[], float]) -> None:
        self._store, self._keys, self._now = store, keys, now
        self._merges: set[str] = set()

    def found(self, nonce: str, method: str, args: tuple[Any, ...], outcome: Any) -> bool:
        """Whether a call that took effect shows that a merge has outlived its lease; once a merge."""
        if method == "commit":
            key, lapsed = args[0].payload.key, isinstance(outcome, LeaseLost)
        elif method == "write_chunks" and kind_of(args[0]) == "global":
            key = args[0]
            fragment = int(key.split(":")[-3])  # see `RunKeys.global_payload`
            lapsed = not self._holds(self._keys.lease(fragment), nonce)
        else:
            return False
        if not lapsed or key in self._merges:
            return False
        self._merges.add(key)
        return True

    def _holds(self, lease: str, nonce: str) -> bool:
        expired = self._store.expiries.get(lease, self._now()) <= self._now()
        return not expired and self._store.values.get(lease) == nonce.encode()
