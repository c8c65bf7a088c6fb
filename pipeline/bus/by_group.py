"""Requests for several fragments on a cluster, where the nodes of some fragments may be down. Runs on asyncio."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BadMessage, BusUnavailable

T = TypeVar("T")


async def by_group(
    keys: RunKeys,
    fragments: Iterable[int],
    ask: Callable[[list[int]], Awaitable[list[T]]],
    unreadable: Callable[[BadMessage], None] | None = None,
) -> dict[int, T]:
    """Ask for several fragments, group by group; return fragment -> answer for the groups whose nodes answer.

    Args:
        keys: the run's key names.
        fragments: ids.
        ask: returns the answers for some fragments, in order.
        unreadable: called with the error of each fragment whose answer cannot be read; the fragment is left out. If it
            is None, the error is raised.

    Raises:
        BusUnavailable: no node answers.
    """

    async def each(some: list[int]) -> dict[int, T]:
        # One unreadable answer makes the whole request fail. Halving it again and again isolates the bad fragments.
        try:
            return dict(zip(some, await ask(some), strict=True))
        except BadMessage as error:
            if unreadable is None:
                raise
            if len(some) == 1:
                unreadable(error)
                return {}
            half = len(some) // 2
            return await each(some[:half]) | await each(some[half:])

    groups: dict[int, list[int]] = {}
    for p in fragments:
        groups.setdefault(keys.group(p), []).append(p)
    answers = await asyncio.gather(*map(each, groups.values()), return_exceptions=True)
    found, away = dict[int, T](), list[BusUnavailable]()
    for answer in answers:
        if isinstance(answer, BusUnavailable):
            away.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found |= answer
    if away and not found:
        raise away[0]
    return found
