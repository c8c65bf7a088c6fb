"""Who reads a tape on and on misses nothing of it, whichever server it lies on by now. On every adapter."""

import time
from pathlib import Path

import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.errors import BusError, BusUnavailable
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.payload.codec import encode
from diloco.syncer.replay.archive import TapeArchive
from diloco.tape import read_archive
from tests import samples
from tests.backdoor import Backdoor

AHEAD_MS = 10_000


def merged(version: int, by: str = "s") -> Committed:
    return samples.committed(version=version, digest=by.encode() * 16, syncer=by)


async def fails(*args: object) -> None:
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
    """After an error the reader sees that what it read last is gone, and begins at the tape's start."""
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    for number in range(3):
        backdoor.append(key, encode(merged(number)), now_ms + AHEAD_MS * number)
    reader = TapeReader(bus, 1)
    assert await read(reader) == [merged(0), merged(1), merged(2)]
    assert await read(reader) == []
    taken_over(bus, backdoor, now_ms, merged(0), merged(1, "t"))
    assert await read(reader) == [], "nothing has told it yet"
    reader.doubt()
    assert await read(reader) == [merged(0), merged(1, "t")]
    assert await read(reader) == []


async def test_another_entry_under_the_id_of_what_was_read_last_is_another_tape(bus: Bus, backdoor: Backdoor) -> None:
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    backdoor.append(key, encode(merged(0)), now_ms)
    reader = TapeReader(bus, 1)
    await read(reader)
    taken_over(bus, backdoor, now_ms, merged(1, "t"))
    reader.doubt()
    assert await read(reader) == [merged(1, "t")]


async def test_where_nothing_was_lost_a_reader_in_doubt_reads_on(bus: Bus, backdoor: Backdoor) -> None:
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    backdoor.append(key, encode(merged(0)), now_ms)
    reader = TapeReader(bus, 1)
    await read(reader)
    reader.doubt()
    assert await read(reader) == []
    backdoor.append(key, encode(merged(1)), now_ms + 1)
    reader.doubt()
    assert await read(reader) == [merged(1)]


async def test_a_reader_doubts_by_itself_after_a_call_that_failed(
    bus: Bus, backdoor: Backdoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, key = int(time.time() * 1000), bus.keys.tape(0)
    backdoor.append(key, encode(merged(0)), now_ms + AHEAD_MS)
    reader = TapeReader(bus, 1)
    await read(reader)
    with monkeypatch.context() as patch:
        patch.setattr(bus, "read_tape", fails)
        with pytest.raises(BusError):
            await reader.read()
    taken_over(bus, backdoor, now_ms, merged(0, "t"))
    assert await read(reader) == [merged(0, "t")]


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
    archive.close()
    assert read_archive(tmp_path) == [merged(0), merged(1), merged(1, "t")]


async def test_ids_go_up_though_the_servers_clock_goes_back(bus: Bus, backdoor: Backdoor) -> None:
    """A stream that is there keeps its last id: what comes next is above it, whatever time it is."""
    ahead_ms, header = int(time.time() * 1000) + 3_600_000, samples.header()
    backdoor.append(bus.keys.deltas(header.fragment, header.learner), encode(header), ahead_ms)
    first, second = [(await bus.offer(header)).partition("@")[0] for _ in range(2)]
    assert (first, second) == (f"{ahead_ms}-1", f"{ahead_ms}-2")
