"""Which servers have a run's keys, and which of them has a key; found again whenever that changes.

Three ways: one server, whose name may lead to another one tomorrow; a primary that sentinels know; the primaries of a
cluster, by slot. Those of the last two are looked for every LOOK_S, so that a primary whose machine is gone without a
word, or which was demoted while it answers, is left as soon as another one has its place.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import redis.exceptions as rx
from redis.asyncio import ConnectionPool

from diloco.pipeline.bus import cluster_slots
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.redis.redis_errors import translate
from diloco.pipeline.bus.redis.redis_url import Place
from diloco.pipeline.bus.redis.zero_copy import drop
from diloco.pipeline.errors import BusUnavailable, UsageError

T = TypeVar("T")

LOOK_S = 2.0
"""Between two looks at who is primary."""
ASK_S = 1.0
"""Longest that a sentinel or a node is waited for in a look: several are asked at once, and most of them answer."""
REST_S = 0.1
"""For how long the others are waited for once most have answered."""


class Nodes:
    """One server at one address, which may be a name or a virtual one; and what all kinds have."""

    moves = False
    """They are to be looked for; else the address is always the same."""
    cluster = False
    known_replicas = 0
    """Servers that sentinels take for replicas of the primary, dead ones too; 0: nobody tells."""

    def __init__(self, address: HostPort | None) -> None:
        """address: None: a unix socket."""
        self._address = address

    def all(self) -> list[HostPort | None]:
        """Those that hold keys: the primaries."""
        return [self._address]

    def of(self, key: bytes | str | None) -> HostPort | None:  # others go by it
        """Who has a key; of no key: any of them.

        Raises:
            BusUnavailable: nobody is known to have it.
        """
        return self._address

    async def look(self) -> None:
        """Find them again.

        Raises:
            UsageError, BusUnavailable: nobody who should know says so. What was known before stays.
        """

    def moved(self, slot: int, address: HostPort) -> None:
        """A node of a cluster says who has a slot now."""


class NoSentinel(BusUnavailable):
    """None of them answers."""


class SentinelNodes(Nodes):
    """A primary, as most sentinels say that answer: one of several alone sends nobody elsewhere."""

    moves = True

    def __init__(self, place: Place) -> None:
        super().__init__(None)
        self._place = place
        self._primary: HostPort | None = None

    def all(self) -> list[HostPort | None]:
        return [self.of(None)]

    def of(self, key: bytes | str | None) -> HostPort | None:
        if self._primary is None:
            raise BusUnavailable(f"no primary of Redis at {self._place.where} is known yet")
        return self._primary

    async def look(self) -> None:
        answers = await self._ask()
        told, errors = _read(answers, _vote_of)
        if not told:
            raise self._nobody(errors)
        ((named, votes),) = Counter(vote.primary for vote in told).most_common(1)
        if 2 * votes <= len(told):
            raise BusUnavailable(f"the sentinels of Redis at {self._place.where} do not agree on who is primary")
        if named is not None and Vote(named, reached=True) not in told:
            raise BusUnavailable(
                f"no sentinel of Redis at {self._place.where} reaches the primary {named}: it died a moment ago, or "
                "refuses them"
            )
        if named is None:
            raise BusUnavailable(
                f"the sentinels of Redis say that {self._place.service!r} has no primary now: it is down, and no "
                "replica has been promoted yet"
            )
        self._primary = named
        counts, _ = _read(answers, lambda answer: int(_fields(answer).get("num-slaves", 0)))
        self.known_replicas = median_low(counts)

    async def unwell(self) -> list[str]:
        """Sentinels that would not help to replace the primary, each with why."""
        options, service = self._place.sentinel_options or {}, self._place.service
        asked = [_ask(host, options, "SENTINEL", "MASTER", service) for host in self._place.hosts]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [
            f"{host} {wrong}"
            for host, answer in zip(self._place.hosts, answers, strict=True)
            if (wrong := self._wrong(answer))
        ]

    def _wrong(self, answer: Any) -> str:
        """With a sentinel that answered so; "": nothing."""
        told, errors = _read([answer], _vote_of)
        if errors:
            if "No such master" in str(errors[0]):
                return f"knows no service {self._place.service!r}"
            if isinstance(translate(errors[0], ""), UsageError):
                return "refuses the connection, or its login"
            return "does not answer as a sentinel" if isinstance(errors[0], rx.ResponseError) else "does not answer"
        (vote,) = told
        if vote.primary is None:
            return "takes the primary for dead"
        if self._primary not in (None, vote.primary):
            return f"takes {vote.primary} for the primary"
        return "" if vote.reached else "does not reach the primary, or is refused there (auth-pass)"

    async def _ask(self) -> list[Any]:
        """Answers of as many sentinels as most of them are, or in the time of all that do answer; errors among them."""
        hosts, options = self._place.hosts, self._place.sentinel_options or {}
        asked = [_ask(host, options, "SENTINEL", "MASTER", self._place.service) for host in hosts]
        return await _most(asked)

    def _nobody(self, errors: Iterable[BaseException]) -> UsageError | BusUnavailable:
        """What is to be said if no sentinel knows anything."""
        place, said = self._place, list(errors)
        replies = [error for error in said if isinstance(error, (rx.ResponseError, rx.AuthenticationError))]
        if any("No such master" in str(error) for error in replies):
            return UsageError(
                f"the sentinels of {place.where} know no service {place.service!r}",
                "name the one that stands in their configuration after `sentinel monitor`",
            )
        if any("unknown command" in str(error).lower() for error in replies):
            return UsageError(
                f"what answers at {', '.join(map(str, place.hosts))} is no sentinel (their usual port is 26379)",
                "a server is named by redis://",
            )
        if replies:
            return UsageError(
                f"the sentinels of {place.where} refuse this user",
                "their own login is ?sentinel_username=...&sentinel_password=... in DILOCO_REDIS_URL",
                str(replies[0]),
            )
        translated = translate(said[0], place.where)
        if isinstance(translated, UsageError):
            return translated
        return NoSentinel(f"no sentinel of {place.where} answers", translated.remedy, translated.said)


class ClusterNodes(Nodes):
    """The primaries of a cluster, as most of its nodes say."""

    moves = cluster = True

    def __init__(self, place: Place) -> None:
        super().__init__(None)
        self._place = place
        self._slots: list[HostPort | None] = [None] * cluster_slots.SLOTS
        self._primaries: tuple[HostPort, ...] = ()
        self._replicas: tuple[HostPort, ...] = ()

    def all(self) -> list[HostPort | None]:
        return list(self._primaries)

    def of(self, key: bytes | str | None) -> HostPort | None:
        if key is None:
            return self._primaries[0]
        slot = cluster_slots.slot(key)
        if (address := self._slots[slot]) is None:
            raise BusUnavailable(f"no node of the cluster at {self._place.where} has slot {slot} now")
        return address

    async def look(self) -> None:
        known = dict.fromkeys((*self._primaries, *self._replicas, *self._place.hosts))
        answers = await _most([self._view(host) for host in known])
        views = Counter(answer for answer in answers if not isinstance(answer, BaseException))
        if not views:
            raise translate(answers[0], self._place.where, self._place.user)
        ((view, _),) = views.most_common(1)
        if not view:
            raise BusUnavailable(
                f"the cluster of Redis at {self._place.where} serves no slot: it is not made yet, or down",
                "make it: `redis-cli --cluster create HOST:PORT ...` with redis-cli of Redis, or CLUSTER ADDSLOTS",
            )
        slots: list[HostPort | None] = [None] * cluster_slots.SLOTS
        for first, last, primary, _ in view:
            slots[first : last + 1] = [primary] * (last + 1 - first)
        self._slots = slots
        self._primaries = tuple(dict.fromkeys(primary for _, _, primary, _ in view))
        self._replicas = tuple(dict.fromkeys(replica for *_, replicas in view for replica in replicas))

    async def _view(self, host: HostPort) -> tuple[tuple[int, int, HostPort, tuple[HostPort, ...]], ...]:
        ranges = await _ask(host, self._place.options, "CLUSTER", "SLOTS")

        def named(node: Any) -> HostPort:
            name = node[0].decode() if node[0] else ""
            return HostPort(name if name not in ("", "?") else host.host, int(node[1]))

        return tuple(
            sorted(
                (int(first), int(last), named(primary), tuple(sorted(map(named, others))))
                for first, last, primary, *others in ranges
            )
        )

    def moved(self, slot: int, address: HostPort) -> None:
        self._slots[slot] = address


def _read(answers: Iterable[Any], reading: Callable[[Any], T]) -> tuple[list[T], list[BaseException]]:
    """What sentinels say, each for itself, and the errors; one that talks nonsense is none."""
    told, errors = list[T](), list[BaseException]()
    for answer in answers:
        if isinstance(answer, BaseException):
            errors.append(answer)
            continue
        try:
            told.append(reading(answer))
        except (LookupError, ValueError, TypeError, AttributeError):
            errors.append(rx.ResponseError("unknown command: it answers as no sentinel does"))
    return told, errors


class Vote(NamedTuple):
    """What one sentinel says."""

    primary: HostPort | None
    """None: it is dead, as sentinels have agreed."""
    reached: bool
    """By this sentinel itself: one that is cut off, or whose password is an old one, reaches nobody."""


def _vote_of(answer: Any) -> Vote:
    fields = _fields(answer)
    flags = set(fields["flags"].split(","))
    return Vote(None if "o_down" in flags else _address_of(fields), not flags & {"s_down", "o_down"})


def _address_of(fields: Mapping[str, str]) -> HostPort:
    return HostPort(fields["ip"], int(fields["port"]))


def _fields(flat: list[bytes]) -> Mapping[str, str]:
    texts = [part.decode(errors="replace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


async def _ask(host: HostPort, options: Mapping[str, Any], *command: str) -> Any:
    """One command on a connection of its own, which no other call can hold up."""
    given = {**options, "host": host.host, "port": host.port, "socket_connect_timeout": ASK_S}
    connection: Any = ConnectionPool(**given).make_connection()  # type: ignore[no-untyped-call]
    try:
        async with asyncio.timeout(ASK_S):
            await connection.connect()
            await connection.send_command(*command)
            return await connection.read_response()
    finally:
        await drop(connection)


async def _most(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Answers of all who answer at once, and of as many as most are; errors among them if those are not so many."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        pending, found = set(tasks), list[Any]()
        while pending and 2 * len(found) <= len(tasks):
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending = {task for task in tasks if not task.done()}
            found = [task for task in tasks if task.done() and task.exception() is None]
        if pending:
            await asyncio.wait(pending, timeout=REST_S)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [result for result in results if not isinstance(result, BaseException)]
    return answers if 2 * len(answers) > len(tasks) else [one for one in results if not _cancelled(one)]


def _cancelled(result: object) -> bool:
    return isinstance(result, asyncio.CancelledError)
