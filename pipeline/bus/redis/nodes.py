"""Discovery of the servers that hold a run's keys, and of the server that holds a given key; repeated when that
changes.

There are three kinds: one server, whose host name may lead to another one later; a primary that sentinels know; and the
primaries of a cluster, by slot. The last two are looked up every `refresh_s`. So a primary whose machine failed
silently, or which was demoted but still answers, is left as soon as another one has replaced it.
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
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable, UsageError

T = TypeVar("T")


class Nodes:
    """One server at one address, which may be a host name or a virtual IP; base class of the other kinds."""

    moves = False
    """True if the addresses may change and must be looked up again."""
    cluster = False
    known_replicas = 0
    """Number of servers that sentinels list as replicas of the primary, dead ones included; 0 if unknown."""

    def __init__(self, address: HostPort | None) -> None:
        """Use one address; None is the unix socket, or unknown until the first `refresh`."""
        self._address = address

    def all(self) -> list[HostPort | None]:
        """Return the addresses of the nodes that hold keys: the primaries."""
        return [self._address]

    def of(self, key: bytes | str | None) -> HostPort | None:  # only subclasses use the key
        """Return the node that has a key; for None, any node.

        Raises:
            BusUnavailable: no node is known to have it.
        """
        return self._address

    async def refresh(self) -> None:
        """Look the nodes up again.

        Raises:
            UsageError, BusUnavailable: the sentinels or nodes gave no usable answer. The known addresses are kept.
        """

    def moved(self, slot: int, address: HostPort) -> None:
        """Record that a cluster's node has redirected a slot to another node."""


# What each sentinel is asked, and what is wrong with one that does not reach a server.
_ASKED = ("MASTER", "REPLICAS")
_CANNOT_REACH = "cannot reach the {}, or is refused by it (auth-pass)"


class NoSentinel(BusUnavailable):
    """No sentinel answers."""


class SentinelNodes(Nodes):
    """The primary that a majority of the answering sentinels names, so that one stale sentinel misleads nobody."""

    moves = True

    def __init__(self, place: Place) -> None:
        super().__init__(None)
        self._place = place
        self._primary: HostPort | None = None

    def all(self) -> list[HostPort | None]:
        return [self.of(None)]

    def of(self, key: bytes | str | None) -> HostPort | None:
        if self._primary is None:
            raise BusUnavailable(f"the primary of Redis at {self._place.where} is not known yet")
        return self._primary

    async def refresh(self) -> None:
        answers = await self._ask()
        told, errors = _read(answers, _vote_of)
        if not told:
            raise self._no_primary_error(errors)
        ((named, votes),) = Counter(vote.primary for vote in told).most_common(1)
        if 2 * votes <= len(told):
            raise BusUnavailable(f"the sentinels of Redis at {self._place.where} do not agree on who is primary")
        if named is not None and Vote(named, reached=True) not in told:
            raise BusUnavailable(
                f"no sentinel of Redis at {self._place.where} can reach the primary {named}: it has just failed, or "
                "it refuses the sentinels"
            )
        if named is None:
            raise BusUnavailable(
                f"the sentinels of Redis say that {self._place.service!r} has no primary now: it is down, and no "
                "replica has been promoted yet"
            )
        self._primary = named
        counts, _ = _read(answers, lambda answer: int(_fields(answer).get("num-slaves", 0)))
        self.known_replicas = median_low(counts)

    async def unhealthy(self) -> list[str]:
        """Return the sentinels that could not help to replace the primary, each with the reason."""
        hosts, options = self._place.hosts, self._place.sentinel_options or {}
        asked = [_ask(host, options, "SENTINEL", what, self._place.service) for what in _ASKED for host in hosts]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        each = zip(hosts, answers[: len(hosts)], answers[len(hosts) :], strict=True)
        return [f"{host} {wrong}" for host, answer, its in each if (wrong := self._wrong(answer) or _unreached(its))]

    def _wrong(self, answer: Any) -> str:
        """Return what is wrong with a sentinel that gave this answer; "" if nothing is."""
        told, errors = _read([answer], _vote_of)
        if errors:
            if "No such master" in str(errors[0]):
                return f"does not know service {self._place.service!r}"
            if isinstance(translate(errors[0], ""), UsageError):
                return "refuses the connection, or its login"
            return "does not answer as a sentinel" if isinstance(errors[0], rx.ResponseError) else "does not answer"
        (vote,) = told
        if vote.primary is None:
            return "considers the primary dead"
        if self._primary not in (None, vote.primary):
            return f"considers {vote.primary} the primary"
        return "" if vote.reached else _CANNOT_REACH.format("primary")

    async def _ask(self) -> list[Any]:
        """Ask all sentinels; return the answers of a majority, or if there is none, of all that answer, with errors."""
        hosts, options = self._place.hosts, self._place.sentinel_options or {}
        asked = [_ask(host, options, "SENTINEL", "MASTER", self._place.service) for host in hosts]
        return await _await_majority(asked)

    def _no_primary_error(self, errors: Iterable[BaseException]) -> UsageError | BusUnavailable:
        """Return the error to raise if no sentinel knows the primary."""
        place, said = self._place, list(errors)
        replies = [error for error in said if isinstance(error, (rx.ResponseError, rx.AuthenticationError))]
        if any("No such master" in str(error) for error in replies):
            return UsageError(
                f"the sentinels of {place.where} do not know service {place.service!r}",
                "use the name that follows `sentinel monitor` in their configuration",
            )
        if any("unknown command" in str(error).lower() for error in replies):
            return UsageError(
                f"the server at {', '.join(map(str, place.hosts))} is not a sentinel (their usual port is 26379)",
                "for a plain server use a redis:// URL",
            )
        if replies:
            return UsageError(
                f"the sentinels of {place.where} refuse this user",
                "set the sentinels' own login in DILOCO_REDIS_URL: ?sentinel_username=...&sentinel_password=...",
                str(replies[0]),
            )
        translated = translate(said[0], place.where)
        if isinstance(translated, UsageError):
            return translated
        return NoSentinel(f"no sentinel of {place.where} answers", translated.remedy, translated.said)


class ClusterNodes(Nodes):
    """The primaries of a cluster, by the slot table on which most of its answering nodes agree."""

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

    async def refresh(self) -> None:
        known = dict.fromkeys((*self._primaries, *self._replicas, *self._place.hosts))
        answers = await _await_majority([self._view(host) for host in known])
        views = Counter(answer for answer in answers if not isinstance(answer, BaseException))
        if not views:
            raise translate(answers[0], self._place.where, self._place.user)
        ((view, _),) = views.most_common(1)
        if not view:
            raise BusUnavailable(
                f"the cluster of Redis at {self._place.where} serves no slots: it has not been created yet, or is down",
                "create it with `redis-cli --cluster create HOST:PORT ...` (redis-cli of Redis) or CLUSTER ADDSLOTS",
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
    """Parse answers; return the parsed ones and the errors. An unparsable answer becomes a "not a sentinel" error."""
    told, errors = list[T](), list[BaseException]()
    for answer in answers:
        if isinstance(answer, BaseException):
            errors.append(answer)
            continue
        try:
            told.append(reading(answer))
        except (LookupError, ValueError, TypeError, AttributeError):
            errors.append(rx.ResponseError("unknown command: it does not answer as a sentinel"))
    return told, errors


class Vote(NamedTuple):
    """One sentinel's view of the primary."""

    primary: HostPort | None
    """None if the sentinels have agreed that it is down."""
    reached: bool
    """True if this sentinel itself reaches it; a sentinel that is cut off, or has an old password, reaches nobody."""


def _vote_of(answer: Any) -> Vote:
    fields = _fields(answer)
    flags = set(fields["flags"].split(","))
    return Vote(None if "o_down" in flags else _address_of(fields), not flags & {"s_down", "o_down"})


def _unreached(replicas: Any) -> str:
    """Return a sentinel's problem with its replicas; "" if it has none, or did not list them."""
    told, _ = _read(replicas if isinstance(replicas, list) else [], _vote_of)
    down = [str(one.primary) for one in told if not one.reached]
    return _CANNOT_REACH.format(f"replica {', '.join(down)}") if down else ""


def _address_of(fields: Mapping[str, str]) -> HostPort:
    return HostPort(fields["ip"], int(fields["port"]))


def _fields(flat: list[bytes]) -> Mapping[str, str]:
    texts = [part.decode(errors="replace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


async def _ask(host: HostPort, options: Mapping[str, Any], *command: str) -> Any:
    """Send one command on a connection of its own, so that no other call can hold it up."""
    given = {**options, "host": host.host, "port": host.port, "socket_connect_timeout": BUS_TIMES.ask_s}
    connection: Any = ConnectionPool(**given).make_connection()  # type: ignore[no-untyped-call]
    try:
        async with asyncio.timeout(BUS_TIMES.ask_s):
            await connection.connect()
            await connection.send_command(*command)
            return await connection.read_response()
    finally:
        await drop(connection)


async def _await_majority(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run calls concurrently until a majority has succeeded, plus `rest_s` for the others.

    Returns:
        The successful results if they are a majority; otherwise all results, with exceptions among them.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        pending, found = set(tasks), list[Any]()
        while pending and 2 * len(found) <= len(tasks):
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending = {task for task in tasks if not task.done()}
            found = [task for task in tasks if task.done() and task.exception() is None]
        if pending:
            await asyncio.wait(pending, timeout=BUS_TIMES.rest_s)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [result for result in results if not isinstance(result, BaseException)]
    return answers if 2 * len(answers) > len(tasks) else [one for one in results if not _cancelled(one)]


def _cancelled(result: object) -> bool:
    return isinstance(result, asyncio.CancelledError)
