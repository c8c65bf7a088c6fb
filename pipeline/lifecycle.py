"""Two-phase shutdown: the first signal asks for an orderly end, the second one ends the process at once.

A handler never raises into the code it interrupts: it sets an event that the service waits on.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_at_once() -> None:
    """End the process without any clean-up; what is committed is safe, what is not is lost."""
    sys.stderr.write("second signal: exiting at once\n")
    sys.stderr.flush()
    os._exit(1)


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop, event: asyncio.Event, second: Callable[[], object] = exit_at_once
) -> None:
    """Set `event` at the first SIGINT or SIGTERM, call `second` at each later one. Main thread only."""

    def handle() -> None:
        if event.is_set():
            second()
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, handle)


def stop_event() -> asyncio.Event:
    """An event of the running loop that is set by the first SIGINT or SIGTERM. Main thread only."""
    event = asyncio.Event()
    install_signal_handlers(asyncio.get_running_loop(), event)
    return event
