"""A process ends though its gloo groups have something under way."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from diloco.pipeline.bus.embedded import free_port
from tests import HANGING_S
from tests.parties import environment

PROGRAM = textwrap.dedent(
    """
    import datetime, os, sys
    import torch
    from torch import distributed
    from diloco.workers.ranks.topology import RankGroup

    distributed.init_process_group("gloo")
    hour = datetime.timedelta(hours=1)
    group = distributed.new_group([0, 1], timeout=hour, backend="gloo", use_local_synchronization=True)
    if distributed.get_rank():  # it is there, and puts nothing in
        print("here", flush=True)
        sys.stdin.read()
        os._exit(0)
    ranks = RankGroup(group, 0, ("a", "b"), None, (), {}, None)
    sums = [ranks.start_sum([1]) for _ in range(5)]
    ranks.leak_groups()
    if sys.argv[1] == "destroyed":
        del group, sums
        distributed.destroy_process_group()
    raise SystemExit(3)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as it is", "destroyed"])
def test_a_rank_that_parts_ends_though_the_others_never_answer(how: str, popen: Callable[..., Any]) -> None:
    """With its own status: gloo's groups would wait for their sums, and for each other's processes, for an hour."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [
        popen([sys.executable, "-c", PROGRAM, how], env=environment(RANK=str(rank), **group), **told)
        for rank in range(2)
    ]
    assert ranks[1].stdout.readline() == b"here\n"
    assert ranks[0].wait(HANGING_S) == 3
    assert ranks[1].poll() is None
