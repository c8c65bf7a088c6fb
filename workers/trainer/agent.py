"""Starts a learner on several devices, `--device cuda:0+cuda:1`: one rank per device, through torch's own launcher.

    diloco learner (this process) ──torch's elastic agent──▶ diloco learner, as rank 0..N-1

This does what `torchrun --nproc-per-node N -m diloco learner` does, called as a library, with two differences: a rank
that was refused is not restarted, because it would be refused again; and the ranks end with this process, however it
ends.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diloco.pipeline.process.signals import AGAIN_STATUS, LAUNCHER_PID, end_signals
from diloco.workers.trainer.together import AT_WORK

MAX_RESTARTS = 100
# The exit status of a command that was given something it cannot use (`cli.main`).
REFUSED_STATUS = 2
# After `MAX_QUICK` attempts in a row that each ended within `QUICK_S` seconds, another would not help.
MAX_QUICK, QUICK_S = 5, 60.0
# Seconds, on top of the time to flush, before ranks that were asked to end are killed. It must exceed the time that
# ranks wait for each other when they leave (`rank_exchange.GOODBYE_S`).
LEAVE_MARGIN_S = 40

log = structlog.get_logger()


def run_ranks(count: int, learner: str | None, leave_s: float) -> int:
    """Start the ranks of this command, restart all of them when one has died, and return the exit status.

    Args:
        count: number of ranks.
        learner: the learner's id, for the log.
        leave_s: seconds that the learner may take to leave its run.
    """
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(leave_s) + LEAVE_MARGIN_S)
    quick = 0
    for restart in range(MAX_RESTARTS + 1):
        began = time.monotonic()
        with TemporaryDirectory(prefix="diloco-ranks-") as at_work:
            os.environ[AT_WORK] = at_work
            try:
                if restart:
                    time.sleep(1.0)
                elastic_launch(_config(count), sys.executable)("-P", "-m", "diloco", *sys.argv[1:])
                return 0
            except SignalException as asked:
                lost = sorted(path.name for path in Path(at_work).iterdir())
                told = {"learner": learner, "reason": signal.Signals(asked.sigval).name, "not_in_order": lost}
                (log.error if lost else log.info)("ranks_ended", **told)
                return AGAIN_STATUS
            except ChildFailedError as failed:
                statuses = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        quick = quick + 1 if time.monotonic() - began < QUICK_S else 0
        if not may_start_again(statuses) or quick == MAX_QUICK or restart == MAX_RESTARTS:
            log.error("ranks_ended", learner=learner, statuses=_words(statuses), restarts=restart)
            return REFUSED_STATUS if REFUSED_STATUS in statuses.values() else 1  # another try would do no better
        log.warning("ranks_restarted", learner=learner, statuses=_words(statuses), restarts=restart + 1)
    raise AssertionError("the last restart has returned")


def may_start_again(statuses: Mapping[int, int]) -> bool:
    """Return whether ranks that ended with these statuses may do better when restarted.

    They may if one was killed by a signal or crashed, and none was refused. SIGTERM does not count: the agent itself
    sends it to the ranks that are left when one has died.
    """
    told = {*statuses.values()} - {-signal.SIGTERM}
    return REFUSED_STATUS not in told and any(status < 0 or status == AGAIN_STATUS for status in told)


def _config(count: int) -> LaunchConfig:
    """Return the launch configuration for ranks on this machine.

    Each attempt has its own rendezvous: what an earlier one left in the store, such as addresses, would mislead the
    next.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id=f"learner-{os.getpid()}",
        max_restarts=0,
    )
    config.signals_to_handle = ",".join(number.name for number in end_signals())  # torch 2.6 ignores it
    return config


def _words(statuses: Mapping[int, int]) -> str:
    named = {rank: signal.Signals(-code).name if code < 0 else f"status {code}" for rank, code in statuses.items()}
    return ", ".join(f"rank {rank}: {how}" for rank, how in sorted(named.items()))
