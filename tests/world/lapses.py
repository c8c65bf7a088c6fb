"""How many merges met with the end of their owner's lease: it expired before their commit took effect. Pure."""

from collections.abc import Callable
from typing import Any

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import LeaseLost
from diloco_studies.strikes.growth import kind_of
from diloco_studies.virtual.memory_store import MemoryStore


class Lapses:
    """Watches one run's merges, which are told apart by who makes which version."""

    def __init__(self, store: MemoryStore, keys: RunKeys, now: Callable[[], float]) -> None:
        self._store, self._keys, self._now = store, keys, now
        self._merges: set[tuple[str, int, int]] = set()
        """Nonce of the owner, fragment and version."""

    def found(self, nonce: str, method: str, args: tuple[Any, ...], outcome: Any) -> bool:
        """Whether a call that took effect shows that a merge has outlived its lease; once a merge."""
        if method == "commit":
            of, lapsed = (args[0].record.fragment, args[0].record.version), isinstance(outcome, LeaseLost)
        elif method == "write_chunks" and kind_of(args[0]) == "global":
            fragment, version = (int(part) for part in args[0].split(":")[-3:-1])  # see `RunKeys.global_payload`
            of = fragment, version
            lapsed = not self._holds(self._keys.lease(fragment), nonce)
        else:
            return False
        if not lapsed or (nonce, *of) in self._merges:
            return False
        self._merges.add((nonce, *of))
        return True

    def _holds(self, lease: str, nonce: str) -> bool:
        expired = self._store.expiries.get(lease, self._now()) <= self._now()
        return not expired and self._store.values.get(lease) == nonce.encode()
