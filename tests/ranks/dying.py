"""Ranks that die at a given moment: `TEST_DIES="RANK MODULE NAME CALL"` kills a rank as it calls that so often.

`TEST_STOPS` has it paused instead.
"""

import importlib
import os
import signal
from typing import Any


def die_as_told(rank: int) -> None:
    """Have this process killed in the call that the environment names, as by the system."""
    kills = "TEST_DIES" in os.environ
    told = os.environ.get("TEST_DIES" if kills else "TEST_STOPS", "").split()
    if not told or int(told[0]) != rank:
        return
    *owners, name = told[2].split(".")
    owner: Any = importlib.import_module(told[1])
    for one in owners:
        owner = getattr(owner, one)
    before, left = getattr(owner, name), [int(told[3])]

    def dying(*args: Any, **given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            print(f"{'dies' if kills else 'stops'} {told[2]}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL if kills else signal.SIGSTOP)
        return before(*args, **given)

    setattr(owner, name, dying)
