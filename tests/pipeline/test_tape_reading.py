"""Who reads a tape on and on misses nothing of it, whichever server it lies on by now. On every adapter."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import Bus, TapeEntry
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, BusUnavailable
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.payload.codec import encode
from diloco.syncer.replay.archive import TapeArchive
from diloco.tape import read_archive
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.memory_store import MemoryStore
from tests import samples
from tests.backdoor import Backdoor, MemoryBackdoor

AHEAD_MS = 10_000


def merged(version: int, by: str = "s") -> Committed:
    return samples.committed(version=version, digest=by.encode() * 16, syncer=by)


async def fails(*args: object, **more: object) -> None:
    raise BusUnavailable("cut")


async def read(reader: TapeReader) -> list[Committed]:
    entries = await reader.read()
    for entry in entries:
        reader.passed(entry)
    return [entry.record for entry in entries if isinstance(entry.record, Committed)]


def taken_over(bus: Bus, backdoor: Backdoor, now_ms: int, *made: Committed) -> None:
    """Another server: it has the first record, and what came with its own clock, which is behind."""
    key = bus.keys.tape(0)
    backdoor.delete(key)
    for number, one in enumerate(made):
        backdoor.append(key, encode(one), now_ms + number)


async def test_what_a_server_with_an_earlier_clock_writes_is_read_though_its_ids_are_lower(
    bus: Bus, backdoor: Backdoor
) -> None:
    """No call has failed: the reader sees that what it read last is gone, and begins at the tape's start."""
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    for number in range(3):
        backdoor.append(key, encode(merged(number)), now_ms + AHEAD_MS * number)
    reader = TapeReader(bus, 1)
    assert await read(reader) == [merged(0), merged(1), merged(2)]
    assert await read(reader) == []
    taken_over(bus, backdoor, now_ms, merged(0), merged(1, "t"))
    assert await read(reader) == [merged(0), merged(1, "t")]
    assert await read(reader) == []


async def test_another_entry_under_the_id_of_what_was_read_last_is_another_tape(bus: Bus, backdoor: Backdoor) -> None:
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    backdoor.append(key, encode(merged(0)), now_ms)
    reader = TapeReader(bus, 1)
    await read(reader)
    taken_over(bus, backdoor, now_ms, merged(1, "t"))
    assert await read(reader) == [merged(1, "t")]


class TwoServers(MemoryBus):
    """A cluster: each of two groups lies on a server of its own."""

    away: frozenset[int] = frozenset()

    async def read_tape(
        self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000, away: set[int] | None = None
    ) -> list[TapeEntry]:
        if silent := self.away & cursors.keys():
            asked = {group: at for group, at in cursors.items() if group not in silent}
            found = await super().read_tape(asked, 0.0, limit) if asked else []
            if not asked or (not found and away is None):
                raise BusUnavailable("a server is away")
            if away is not None:
                away |= silent
            return found
        return await super().read_tape(cursors, block_s, limit)


@pytest.fixture
def two() -> TwoServers:
    bus = TwoServers("r", LoopClock(), MemoryStore())
    bus.keys = RunKeys("r", 2)
    return bus


def backdoor_of(bus: TwoServers) -> MemoryBackdoor:
    found = MemoryBackdoor("r")
    found.store = bus.store
    return found


async def test_a_server_that_is_away_while_the_other_one_has_news_hides_nothing_for_good(two: TwoServers) -> None:
    """Its successor's clock is behind, and no call of the reader has failed."""
    backdoor, now_ms = backdoor_of(two), int(time.time() * 1000)
    for number in range(2):
        backdoor.append(two.keys.tape(1), encode(merged(number)), now_ms + AHEAD_MS * number)
    reader = TapeReader(two, 2)
    assert await read(reader) == [merged(0), merged(1)]
    two.away = frozenset({1})
    backdoor.append(two.keys.tape(0), encode(merged(7)), now_ms)
    assert await read(reader) == [merged(7)]
    two.away = frozenset()
    backdoor.delete(two.keys.tape(1))
    for number, one in enumerate((merged(0), merged(1, "t"))):
        backdoor.append(two.keys.tape(1), encode(one), now_ms + number)
    backdoor.append(two.keys.tape(0), encode(merged(8)), now_ms + 1)
    assert await read(reader) == [merged(8)]
    assert await read(reader) == [merged(0), merged(1, "t")]


async def test_a_server_that_was_away_and_has_lost_nothing_is_read_on(two: TwoServers) -> None:
    backdoor, now_ms = backdoor_of(two), int(time.time() * 1000)
    for group in range(2):
        backdoor.append(two.keys.tape(group), encode(merged(group)), now_ms)
    reader = TapeReader(two, 2)
    await read(reader)
    two.away = frozenset({1})
    with pytest.raises(BusUnavailable):
        await read(reader)
    backdoor.append(two.keys.tape(0), encode(merged(7)), now_ms + 1)
    backdoor.append(two.keys.tape(1), encode(merged(8)), now_ms + 1)
    assert await read(reader) == [merged(7)]
    two.away = frozenset()
    assert await read(reader) == [merged(8)]


async def test_what_came_from_a_server_that_is_away_now_is_read_again(two: TwoServers) -> None:
    """Whether it followed on what was read before, nobody can tell."""
    backdoor, now_ms = backdoor_of(two), int(time.time() * 1000)
    backdoor.append(two.keys.tape(1), encode(merged(0)), now_ms)
    reader = TapeReader(two, 2)
    await read(reader)
    backdoor.append(two.keys.tape(1), encode(merged(1)), now_ms + 1)

    reads = 0
    real = two.read_tape

    async def goes(*args: Any, **more: Any) -> list[TapeEntry]:
        nonlocal reads
        reads += 1
        two.away = frozenset({1}) if reads == 2 else frozenset()
        return await real(*args, **more)

    two.read_tape = goes  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable):
        await read(reader)
    assert await read(reader) == [merged(1)]


async def test_an_archive_has_what_both_servers_had_each_once(
    bus: Bus, backdoor: Backdoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    for number in range(2):
        backdoor.append(key, encode(merged(number)), now_ms + AHEAD_MS * number)
    archive = TapeArchive(bus, 1, tmp_path, "aa" * 8, lambda: False)
    await archive.finish()
    taken_over(bus, backdoor, now_ms, merged(0), merged(1, "t"))
    with monkeypatch.context() as patch:
        patch.setattr(bus, "read_tape", fails)
        with pytest.raises(BusError):
            await archive.finish()
    await archive.finish()
    assert read_archive(tmp_path) == [merged(0), merged(1), merged(1, "t")]


async def test_ids_go_up_though_the_servers_clock_goes_back(bus: Bus, backdoor: Backdoor) -> None:
    """A stream that is there keeps its last id: what comes next is above it, whatever time it is."""
    ahead_ms, header = int(time.time() * 1000) + 3_600_000, samples.header()
    backdoor.append(bus.keys.deltas(header.fragment, header.learner), encode(header), ahead_ms)
    first, second = [parse_offer_id(await bus.offer(header))[1] for _ in range(2)]
    assert (first, second) == (f"{ahead_ms}-1", f"{ahead_ms}-2")
