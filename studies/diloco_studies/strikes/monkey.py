"""Strikes a live run as planned: kills, pauses, cuts and hangs its processes, and undoes each strike in time. asyncio.

Nobody is struck twice at a time. A planned strike finds its victim when it is due, among those that can be hit then;
if there is none it is left out, and counted as `missed`. `relent` undoes what is under way, at once.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from diloco.launcher.launch import Children
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco_studies.strikes.failing.topology import Topology
from diloco_studies.strikes.proxy import Door, Proxy
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.schedule import Manner, Party, Strike
from diloco_studies.strikes.tail import Tail, append_only_file

REDIS = "redis"
POLL_S = 0.02
NOTE_TAIL_S = 0.05
"""How often the size of the append-only file is noted."""
AT_DOORS = (Manner.CUT, Manner.HANG)
DONE = {
    Manner.KILL: "killed",
    Manner.PAUSE: "paused",
    Manner.CUT: "cut off",
    Manner.HANG: "hung",
    Manner.PARTITION: "cut off with some of the others",
}
UNDONE = {
    Manner.KILL: "started again",
    Manner.PAUSE: "goes on",
    Manner.CUT: "let in",
    Manner.HANG: "let through",
    Manner.PARTITION: "in reach again",
}


class Monkey:
    """One plan of strikes, carried out once."""

    def __init__(
        self,
        strikes: Sequence[Strike],
        children: Children,
        server: EmbeddedRedis | None,
        proxy: Proxy | None,
        note: Callable[[str], None],
        lose_tail: bool = False,
        topology: Topology | None = None,
    ) -> None:
        """As told.

        Args:
            server: None if no strike is on Redis.
            proxy: None if none is at a door.
            note: told what is done.
            lose_tail: a killed Redis comes back without its last second.
            topology: None if no strike is on a server that others take over from.
        """
        self._strikes, self._children, self._redis, self._proxy = strikes, children, server, proxy
        self._topology = topology
        self._note = note
        self._tail = Tail() if lose_tail else None
        self._busy: dict[str, Manner] = {}
        """Who is struck at the moment, and how."""
        self._over = asyncio.Event()
        self.history: list[Struck] = []
        """Strikes that have begun, in the order in which they were over."""
        self.missed = 0
        self.late_s = 0.0
        """How much longer than planned a strike has lasted at most."""

    async def run(self) -> None:
        """Carry out the plan, from now on; ends when all is undone."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_tail())
            tasks = []
            for strike in self._strikes:
                await self._until(began + strike.at_s - clock.time())
                if self._over.is_set():
                    break
                victim = await self._choose(strike)
                if victim is None:
                    self.missed += 1
                else:
                    self._busy[victim] = strike.manner
                    tasks.append(group.create_task(self._strike(strike, victim)))
            if tasks:
                await asyncio.wait(tasks)
            watching.cancel()

    def relent(self) -> None:
        """Undo all strikes now, and begin none any more."""
        self._over.set()

    def striking(self, name: str) -> bool:
        """Whether this process is struck at the moment."""
        return name in self._busy

    async def _choose(self, strike: Strike) -> str | None:
        doors = {name for name, manner in self._busy.items() if manner in AT_DOORS}
        if strike.manner in AT_DOORS and (REDIS in doors or (doors and strike.party is Party.REDIS)):
            return None  # the same door must not be shut by two, and opened by one of them
        if strike.manner is Manner.PARTITION and strike.manner in self._busy.values():
            return None  # the same for cables
        if strike.party is Party.REDIS:
            free = [REDIS]
        elif strike.party in (Party.PRIMARY, Party.SENTINEL):
            free = await self._servers.candidates(strike)
        else:
            free = [child.name for child in self._children.named(strike.party) if child.alive]
        free = [name for name in free if name not in self._busy]
        return strike.victim(free) if free else None

    async def _until(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(0.0, wait_s))

    async def _strike(self, strike: Strike, victim: str) -> None:
        began_s = time.time()
        long = "for good" if strike.for_good else f"for {strike.length_s:.1f} s"
        self._note(f"{victim} {DONE[strike.manner]} {long}")
        detail, ended_s = "", None
        if strike.party in (Party.PRIMARY, Party.SENTINEL):
            ended_s, detail = await self._servers.strike(strike, victim, self._until)
        elif strike.manner in AT_DOORS:
            doors = self._doors(strike, victim)
            for door in doors:
                if strike.manner is Manner.CUT:
                    door.cut()
                else:
                    door.hang()
            await self._until(strike.length_s)
            for door in doors:
                door.restore()
        elif strike.party is Party.REDIS:
            detail = self._begin_redis(strike.manner)
            await self._until(strike.length_s)
            await self._end_redis(strike.manner)
        else:
            child, kills = self._children[victim], strike.manner is Manner.KILL
            if kills:
                child.expected_end = True
                child.kill_group()
            else:
                child.send(signal.SIGSTOP)
            await self._until(strike.length_s)
            if kills:
                child.restart()
            else:
                child.send(signal.SIGCONT)
        undone = "stays dead" if strike.for_good else UNDONE[strike.manner]
        self._note(f"{victim} {undone}{detail and f' ({detail})'}")
        self.late_s = max(self.late_s, time.time() - began_s - strike.length_s)
        ended_s = ended_s or time.time()
        self.history.append(Struck(strike.manner, strike.party, victim, began_s, ended_s, detail))
        del self._busy[victim]

    def _doors(self, strike: Strike, victim: str) -> list[Door]:
        """Those that the strike shuts."""
        assert self._proxy is not None  # noqa: S101  # of a plan with strikes at doors
        return self._proxy.doors() if strike.party is Party.REDIS else [self._proxy[victim]]

    # --- Redis ----------------------------------------------------------------------------------------------

    @property
    def _servers(self) -> Topology:
        assert self._topology is not None  # noqa: S101  # of a plan with strikes on them
        return self._topology

    @property
    def _server(self) -> EmbeddedRedis:
        assert self._redis is not None  # noqa: S101  # of a plan with strikes on it
        return self._redis

    def _begin_redis(self, manner: Manner) -> str:
        if manner is Manner.PAUSE:
            self._server.send(signal.SIGSTOP)
            return ""
        self._server.kill()
        if self._tail is None:
            return ""
        return f"without the last {self._tail.lose(time.monotonic(), append_only_file(self._server))} bytes of its file"

    async def _end_redis(self, manner: Manner) -> None:
        if manner is Manner.PAUSE:
            self._server.send(signal.SIGCONT)
            return
        self._server.start()
        while not self._server.answers():  # noqa: ASYNC110  # a starting server has no event to wait for
            await asyncio.sleep(POLL_S)

    async def _watch_tail(self) -> None:
        while self._tail is not None:
            if self._server.pid is not None:
                with suppress(FileNotFoundError):  # it is being replaced by a rewritten one
                    self._tail.note(time.monotonic(), append_only_file(self._server))
            await asyncio.sleep(NOTE_TAIL_S)
