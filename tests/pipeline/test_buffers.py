"""Memory that is used again: never while anybody refers to it, and never more of it than was needed at once."""

import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from diloco.pipeline.payload.buffers import IDLE_S, MIN_BYTES, ROOM, Buffers

SIZE = 4 * MIN_BYTES


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_what_nobody_refers_to_is_taken_again():
    buffers = Buffers()
    first = buffers.empty(SIZE)
    at = address(first)
    del first
    assert buffers.free_bytes == SIZE
    assert address(buffers.empty(SIZE)) == at


def test_a_view_of_it_keeps_it():
    """A view of a view, in another type, or the memory alone: each is a reference."""
    buffers = Buffers()
    for view in (
        lambda a: a.view(np.float32)[7:].view(np.uint16),
        lambda a: memoryview(a)[10:20],
        lambda a: np.frombuffer(memoryview(a), np.uint8).reshape(2, -1)[1],
    ):
        taken = buffers.empty(SIZE)
        kept = view(taken)
        del taken
        gc.collect()
        other = buffers.empty(SIZE)
        other[:] = 1
        assert not np.shares_memory(np.asarray(kept), other)
        del kept, other


def test_it_does_for_less_but_not_for_much_less():
    buffers = Buffers()
    taken = buffers.empty(SIZE)
    at = address(taken)
    del taken
    less = buffers.empty(int(SIZE / ROOM) + 1)
    assert len(less) == int(SIZE / ROOM) + 1
    assert address(less) == at
    del less
    much_less = buffers.empty(SIZE // 2)
    assert much_less.base.obj.nbytes == int(ROOM * (SIZE // 2))


def test_arrays_of_nearly_one_size_go_round_in_the_same_memory():
    """As fragments do: whichever comes, nothing new is made, and only what was touched counts as held."""
    buffers = Buffers()
    sizes = [int(SIZE * factor) for factor in (1.0, 1.1, 0.95, 1.15)]
    first = buffers.empty(sizes[0])
    at = address(first)
    del first
    for size in sizes * 3:
        taken = buffers.empty(size)
        assert len(taken) == size
        taken[:] = 1
        assert address(taken) == at
        del taken
    assert buffers.free_bytes == max(sizes)


def test_small_arrays_are_the_allocators():
    buffers = Buffers()
    taken = buffers.empty(MIN_BYTES - 1)
    del taken
    assert buffers.free_bytes == 0


def test_no_more_is_held_than_a_quarter_above_what_was_in_use_at_once():
    """Sizes that nothing fits, one after the other: what is free goes before new memory is made."""
    buffers = Buffers()
    for step in range(40):
        taken = buffers.empty(SIZE + step * SIZE)
        most = len(taken)
        del taken
        assert buffers.free_bytes <= ROOM * most
    few = [buffers.empty(SIZE) for _ in range(4)]
    assert buffers.free_bytes <= ROOM * most
    del few


def test_threads_never_get_the_same_memory():
    buffers, wrong = Buffers(), []

    def work(number: int) -> None:
        for _ in range(200):
            taken = buffers.empty(MIN_BYTES)
            taken[::4096] = number
            if not (taken[::4096] == number).all():
                wrong.append(number)
            del taken

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.free_bytes <= 4 * ROOM * MIN_BYTES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_what_is_let_go_of_is_no_longer_resident():
    """The allocator would keep it for others: the more sizes there were, the more."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    buffers, before, kept = Buffers(), resident(), []
    for size in (25, 2, 3, 5, 8, 12, 18):
        taken = buffers.empty(size * MIN_BYTES)
        taken[:] = 1
        kept.append(np.ones(MIN_BYTES // 8, np.uint8))  # the allocator's: it cannot give back what lies below
        del taken
    assert resident() - before < 1.5 * 25 * MIN_BYTES


def test_what_nobody_took_for_a_minute_goes_back_to_the_kernel():
    """A syncer that served all fragments for a while is not as large for ever. What goes round stays."""
    at_s = 0.0
    buffers = Buffers(lambda: at_s)
    many = [buffers.empty(SIZE) for _ in range(8)]
    del many
    assert buffers.free_bytes == 8 * SIZE
    goes_round = address(buffers.empty(SIZE))
    for _ in range(20):
        at_s += IDLE_S / 10
        assert address(buffers.empty(SIZE)) == goes_round
    assert buffers.free_bytes == SIZE
    at_s += 2 * IDLE_S  # nobody came at all
    buffers.empty(SIZE)
    assert buffers.free_bytes == SIZE
