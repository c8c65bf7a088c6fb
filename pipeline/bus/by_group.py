"""What is asked of several fragments, where the node of some may be away and those of others are not. asyncio."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.errors import BusUnavailable

T = TypeVar("T")


async def by_group(
    keys: RunKeys, fragments: Iterable[int], ask: Callable[[list[int]], Awaitable[list[T]]]
) -> dict[int, T]:
    """Fragment -> answer, of the groups whose nodes answer.

    ask: gives the answers of some fragments, in their order.

    Raises:
        BusUnavailable: nobody answers.
    """
    groups: dict[int, list[int]] = {}
    for p in fragments:
        groups.setdefault(keys.group(p), []).append(p)
    answers = await asyncio.gather(*map(ask, groups.values()), return_exceptions=True)
    found, away = dict[int, T](), list[BusUnavailable]()
    for some, answer in zip(groups.values(), answers, strict=True):
        if isinstance(answer, BusUnavailable):
            away.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found |= zip(some, answer, strict=True)
    if away and not found:
        raise away[0]
    return found
