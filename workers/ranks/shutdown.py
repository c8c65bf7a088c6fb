"""How the ranks of a learner end: together, when a signal arrives inside torch, and while gloo's threads still run.

`ExitBarrier` ends all ranks with an error if only some leave their loops. `RankStopping` ends a rank whose main thread
is inside torch, where Python's signal handlers do not run. A second thread reads which signals arrive
(`signal.set_wakeup_fd`). It checks whether the main thread still returns to Python by sending it SIGURG, which nothing
else uses and whose handler records the time.

| signal                                      | the main thread               | what happens                           |
|---------------------------------------------|-------------------------------|----------------------------------------|
| SIGTERM, SIGHUP, noted by the learner       | comes back                    | the loop ends between two steps        |
| SIGINT                                      | comes back                    | KeyboardInterrupt                      |
| any of the above                            | not within `hang_limit_s`     | the process ends, and says where it is |
| a second one (SIGHUP never counts as one)   | not within `SECOND_SIGNAL_S`  | the same                               |
| one with a handler of the program's own     | in any state                  | what that handler does                 |

Nothing is watched in a program whose main thread already has a wakeup descriptor (asyncio's `add_signal_handler`).

docs/explanation/ranks.md gives the reasons ("When a rank dies"), and says why Python's exit waits for gloo's threads
(`wait_for_gloo_threads`, "The end of Python").
"""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import structlog

from diloco.pipeline.errors import RankGone
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.workers.background import OwnThread
from diloco.workers.ranks.transport import INFORM_S, Transport
from diloco.workers.stopping import HANGUP, STOPS, Stopping

# Seconds from the time at which one rank leaves its loop until all must have left theirs.
LEAVE_TOGETHER_S = 40.0
# After this many seconds without a step of rank 0, a warning says which step each rank has reached.
APART_S = 60.0
EQUALLY = "all ranks of a learner must call step equally often before they leave"


class ExitBarrier:
    """One rank's side of the barrier."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.steps = 0
        """Steps that this rank has trained. The training thread writes it."""
        self._left: dict[int, int] = {}
        """Maps a rank that has left its loop to its number of steps."""
        self._all_left = asyncio.Event()
        transport.handle(left=self._take_left, steps=self._answer_steps)

    async def wait_for_all(self) -> None:
        """Announce that this rank has left its loop, and wait for the others.

        Raises:
            RankGone: other ranks train on, or left after another step.
        """
        for rank in range(self._transport.ranks):
            self._transport.notify(rank, "left", self.steps)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TOGETHER_S):
                await self._all_left.wait()
        how = _steps_text(self._left)
        if others := [rank for rank in range(self._transport.ranks) if rank not in self._left]:
            there = _steps_text({rank: await _steps_of(self._transport, rank) for rank in others})
            how = f"{how}; within {LEAVE_TOGETHER_S:g} s these did not: {there}"
        if others or len(set(self._left.values())) > 1:
            why = f"ranks of this learner have left their loops: {how}. {EQUALLY[0].upper()}{EQUALLY[1:]}"
            await self._transport.end(why)
            raise RankGone(why)

    async def watch(self) -> None:
        """Warn when the ranks wait for each other at different steps. Runs at rank 0 until cancelled."""
        before = 0
        while True:
            await asyncio.sleep(APART_S)
            if self.steps == before:
                with suppress(RankGone):  # either the learner ends by it, or all ranks are leaving: no warning needed
                    steps = await self._transport.ask_all("steps")
                    if len(set(steps)) > 1:
                        structlog.get_logger().warning(
                            "ranks_apart", steps=steps, detail=f"steps have stopped: {EQUALLY}"
                        )
            before = self.steps

    async def _take_left(self, rank: int, steps: int) -> None:
        self._left[rank] = steps
        if len(self._left) == self._transport.ranks:
            self._all_left.set()

    async def _answer_steps(self, _: int) -> int:
        return self.steps


async def _steps_of(transport: Transport, rank: int, within_s: float = INFORM_S) -> int | str:
    """Return a rank's number of steps, or the reason why it gives none."""
    try:
        async with asyncio.timeout(within_s):
            return int(await transport.ask(rank, "steps"))
    except TimeoutError:
        return "is not answering (it is paused, or its machine is unreachable)"
    except RankGone:
        return "has ended"


async def steps_of_all(transport: Transport, within_s: float) -> str:
    """Return a text that says how far each rank is; takes at most `within_s` seconds."""
    steps = await asyncio.gather(*(_steps_of(transport, rank, within_s) for rank in range(transport.ranks)))
    return _steps_text(dict(enumerate(steps)))


def _steps_text(steps: Mapping[int, int | str]) -> str:
    known = {rank: at if isinstance(at, str) else f"after step {at}" for rank, at in steps.items()}
    return ", ".join(f"rank {rank} {at}" for rank, at in sorted(known.items()))


# Seconds that the main thread has to come back after a signal, or to call the learner after the exchange has failed. If
# steps take longer, it has the time of `HANG_STEPS` steps, but at most `MAX_HANG_S`: one step that contains an
# evaluation or a compilation raises the average step time for many steps. Ending sooner loses at most a step that no
# rank can publish any more.
HANG_S, HANG_STEPS, MAX_HANG_S = 10.0, 2, 120.0
# Seconds that the main thread has to come back after a second signal, and between two probes.
SECOND_SIGNAL_S, PROBE_S = 2.0, 0.5
# Seconds for the other ranks and the bus to hear why this rank ends, after one signal and after a second one.
REPORT_S, REPORT_AT_ONCE_S = 10.0, 2.0
PROBE: signal.Signals | None = getattr(signal, "SIGURG", None)  # Windows has none
# Number of the main thread's innermost calls that are named in the log.
SHOWN = 3


class RankStopping(Stopping):
    """The requests to end that a rank received by signals, even while its main thread is inside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.together = True
        self.step_s: Callable[[], float] = lambda: 0.0
        """Returns the duration of this rank's steps, in seconds."""
        self.report: Callable[[str, float], str] = lambda why, within_s: why
        """Tells the other ranks and the bus why this rank ends, within a time in seconds; returns what to log."""
        self._awaited = 0
        """The signal for which the main thread should come back; 0 if there is none."""
        self._responded_s = 0.0
        """Time at which the main thread was last known to be in Python."""
        self._wakeup: socket.socket | None = None

    def install(self) -> None:
        """Note the signals, as `Stopping.install` does, and begin to watch."""
        super().install()
        if threading.current_thread() is not threading.main_thread() or PROBE is None:
            return
        if signal.getsignal(PROBE) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # it belongs to asyncio, whose loop is woken through it: give it back and do not watch
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._wakeup = writer
        signal.signal(PROBE, self._on_probe)
        _watches.append(self)
        OwnThread("signals", partial(self._watch, reader)).start()

    def restore(self) -> None:
        """Undo `install`. If called outside the main thread, the watch stays but does nothing."""
        super().restore()
        if threading.current_thread() is not threading.main_thread() or self._wakeup is None:
            return
        if (now := signal.set_wakeup_fd(-1)) != self._wakeup.fileno():
            signal.set_wakeup_fd(now)
        if PROBE is not None and signal.getsignal(PROBE) == self._on_probe:
            signal.signal(PROBE, signal.SIG_DFL)
        with suppress(OSError):
            self._wakeup.send(b"\0")
        self._wakeup.close()
        self._wakeup = None
        _watches.remove(self)

    def _on_probe(self, number: int, frame: FrameType | None) -> None:
        self._responded_s = time.monotonic()

    # --- the watching thread --------------------------------------------------------------------------------

    def _watch(self, reader: socket.socket) -> None:
        count = 0  # of the signals that came
        again = False  # a second signal came, so that the main thread has only SECOND_SIGNAL_S
        seen_s = until_s = 0.0
        with reader:
            while (came := self._read(reader)) is not None:
                now = time.monotonic()
                if not self._awaited and came:
                    self._awaited, seen_s, until_s = came[0], self._responded_s, now + hang_limit_s(self.step_s())
                count += sum(number != HANGUP for number in came)
                if came and count > 1:
                    until_s, again = min(until_s, now + SECOND_SIGNAL_S), True
                # The main thread came back to Python, but it may enter torch again before its loop ends: watch on.
                if self._responded_s != seen_s:
                    seen_s, until_s, again = self._responded_s, now + hang_limit_s(self.step_s()), False
                    if not self.heard:  # KeyboardInterrupt was raised; the loop sees it
                        self._awaited = count = 0
                elif self._awaited and now > until_s and not self._over:
                    self._end(self._awaited, again)
                if self._awaited and not self._over:
                    time.sleep(PROBE_S)
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)  # which the next read hears

    def _read(self, reader: socket.socket) -> list[int] | None:
        """Wait for signals; return the watched ones that came, or None once the watch is over."""
        read = reader.recv(1024)
        return None if not read or 0 in read else [number for number in read if self._is_watched(number)]

    def _is_watched(self, number: int) -> bool:
        if self._over:
            return False
        handler = signal.getsignal(number)
        return (number in STOPS and handler == self._note) or handler is signal.default_int_handler

    def _end(self, number: int, again: bool) -> None:
        name = signal.Signals(number).name
        limit_s = hang_limit_s(self.step_s())
        since = (
            f"was received again, and {SECOND_SIGNAL_S:g} s later"
            if again
            else (f"was received, and {limit_s:.3g} s later")
        )
        why = f"{name} {since} its main thread is still waiting in {main_thread_calls()}"
        with suppress(Exception):  # the process ends in any case
            why = self.report(why, REPORT_AT_ONCE_S if again else REPORT_S)
        structlog.get_logger().error("rank_ended", detail=why)
        os._exit(128 + number if number == signal.SIGINT else AGAIN_STATUS)


def hang_limit_s(step_s: float) -> float:
    """Return the seconds that a main thread which may wait forever is given, by its step time in seconds."""
    return max(HANG_S, min(MAX_HANG_S, HANG_STEPS * step_s))


def main_thread_calls() -> str:
    """Return the main thread's innermost calls as text, innermost first, and the innermost call outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)[::-1]
    own = next((one for one in stack if f"{os.sep}torch{os.sep}" not in one.filename), None)
    shown = stack[:SHOWN] if own is None or own in stack[:SHOWN] else [*stack[: SHOWN - 1], own]
    return ", in ".join(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in shown)


# The installed watches of this process.
_watches = list[RankStopping]()


def _forget_in_child() -> None:
    """Remove the watches in a forked child, such as a data-loading worker: its signals are not this rank's."""
    for one in _watches:
        with suppress(ValueError):  # only the main thread may set the descriptor
            signal.set_wakeup_fd(-1)
        if one._wakeup is not None:
            one._wakeup.close()
            one._wakeup = None
    _watches.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

# The threads of this process; exists only on Linux.
THREADS = Path("/proc/self/task")
# The name that torch gives to a thread that does a gloo group's work.
GLOO_THREAD = "pt_gloo_runloop"
GLOO_WAIT_S = 10.0
# Two checks are this many switch intervals apart. A thread that waits for the GIL wakes up once per interval, so
# between two checks it must have been awake.
LOCK_WAITS = 2
_FIELDS = "State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"


def wait_for_gloo_threads() -> None:
    """Wait until no gloo thread has anything left to do. Called when Python exits, after everything else is done.

    A thread that sleeps at two successive looks and did not wake up in between has nothing to do: the GIL was free, and
    a thread that waits for the GIL wakes up again and again. A thread that waits for another rank sleeps as well, and
    is not waited for.
    """
    until_s, before = time.monotonic() + GLOO_WAIT_S, None
    while (now := _thread_states()) != before or any("S (sleeping)" not in one for one in now.values()):
        if not now or time.monotonic() > until_s:
            return
        before = now
        time.sleep(LOCK_WAITS * sys.getswitchinterval())


def _thread_states() -> dict[str, str]:
    """Return for each gloo thread its state, and how often it was switched out."""
    found = {}
    for thread in THREADS.iterdir() if THREADS.exists() else ():
        with suppress(OSError):  # the thread has just ended
            name, *lines = (thread / "status").read_text().splitlines()
            if name.endswith(GLOO_THREAD):
                found[thread.name] = " ".join(line for line in lines if line.startswith(_FIELDS))
    return found
