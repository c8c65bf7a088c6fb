"""The bus in memory: the same steps, checks and stored bytes as on Redis, in the event loop's (virtual) time.

Several buses may share one `MemoryStore`, which stands for the server. Every call gives way to the loop once
before it acts, as a network call would. All of a call's work is then done without giving way, which is what
makes it atomic. A store and its buses belong to one event loop.
"""

from diloco.pipeline.bus.ports import Bus
from diloco_studies.virtual.memory_commits import MemoryOwnerWrites
from diloco_studies.virtual.memory_fragments import MemoryFragments
from diloco_studies.virtual.memory_run import MemoryRun
from diloco_studies.virtual.memory_shards import MemoryWorkQueue
from diloco_studies.virtual.memory_store import MemoryStore

__all__ = ["MemoryBus", "MemoryStore"]


class MemoryBus(MemoryRun, MemoryFragments, MemoryOwnerWrites, MemoryWorkQueue, Bus):
    """A run on a `MemoryStore`: the sum of its parts, as `Bus` is. They have one state, that of `MemoryCalls`."""
