"""Python ends after gloo's threads have let go of their tensors."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import free_port
from diloco.workers.ranks import shutdown
from tests import HANGING_S
from tests.parties import environment

PROGRAM = textwrap.dedent(
    """
    import atexit, ctypes, hashlib, os, time
    last = os.environ["RANK"] == "0"
    if last:  # called last, without Python's lock let go: as Python ends, who has not rested waits for that lock
        atexit.register(ctypes.PyDLL(None).usleep, 3_000_000)
    import torch
    from torch import distributed
    from diloco.workers.ranks import topology

    distributed.init_process_group("gloo")
    group, vector = topology._group_of((0, 1)), torch.ones(4)
    distributed.all_reduce(vector, group=group)
    if not last:
        time.sleep(0.5)
    work = distributed.all_reduce(vector, group=group, async_op=True)
    there = work.get_future()
    if last:  # the thread tells that the sum is there, and then has a second's work before it lets go of it
        there.then(lambda told: hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000))
    there.wait()
    del work, there
    distributed.destroy_process_group()
    """
)


@pytest.mark.slow
@pytest.mark.skipif(not shutdown.THREADS.exists(), reason="what threads do is told on Linux only")
def test_a_rank_ends_well_though_a_thread_of_gloo_lags_behind(popen: Callable[..., Any]) -> None:
    """With status 0: without a rest Python ends while that thread waits for its lock, and the process crashes."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [popen([sys.executable, "-c", PROGRAM], env=environment(RANK=str(rank), **group)) for rank in range(2)]
    assert [process.wait(HANGING_S) for process in ranks] == [0, 0]


class Threads:
    """As Linux tells of threads; each look finds what comes next."""

    def __init__(self, folder: Path, *looks: dict[str, tuple[str, str, int]]) -> None:
        """looks: thread -> name, state, and how often it was awake."""
        self.folder, self.looks, self.slept = folder, iter(looks), 0
        self.clock = 0.0

    def exists(self) -> bool:
        return True

    def iterdir(self) -> Iterator[Path]:
        for number, (name, state, awake) in next(self.looks).items():
            (self.folder / number).mkdir(exist_ok=True)
            told = f"Name:\t{name}\nState:\t{state}\nVmRSS:\t{self.slept} kB\nvoluntary_ctxt_switches:\t{awake}\n"
            (self.folder / number / "status").write_text(told)
            yield self.folder / number
        yield self.folder / "ended"

    def sleep(self, _: float) -> None:
        self.slept += 1
        self.clock += 1.0


GLOO, ASLEEP, AWAKE = shutdown.GLOO_THREAD, "S (sleeping)", "R (running)"


@pytest.mark.parametrize(
    ("looks", "slept"),
    [
        pytest.param([{"1": ("python", AWAKE, 1)}], 0, id="no gloo"),
        pytest.param([{"1": (GLOO, ASLEEP, 1)}] * 2, 1, id="asleep"),
        pytest.param([{"1": (GLOO, ASLEEP, 1)}, {"1": (GLOO, ASLEEP, 2)}, {"1": (GLOO, ASLEEP, 2)}], 2, id="was awake"),
        pytest.param([{"1": (GLOO, AWAKE, 1)}] * 3 + [{"1": (GLOO, ASLEEP, 1)}] * 2, 4, id="waits for a core"),
        pytest.param([{"1": (GLOO, ASLEEP, 1), "2": (GLOO, AWAKE, 1)}] * 3 + [{}], 3, id="ends"),
        pytest.param([{"1": (GLOO, AWAKE, 1)}] * 12, 11, id="never rests"),
    ],
)
def test_it_rests_once_none_was_awake_between_two_looks(
    looks: list[dict[str, tuple[str, str, int]]], slept: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Other threads do not matter. One that works for ever is not waited for longer than it says."""
    threads = Threads(tmp_path, *looks)
    monkeypatch.setattr(shutdown, "THREADS", threads)
    monkeypatch.setattr(shutdown.time, "sleep", threads.sleep)
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: threads.clock)
    shutdown.wait_for_gloo_threads()
    assert threads.slept == slept
