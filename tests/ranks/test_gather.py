"""Pieces of a snapshot at its server: encoded as they come, by whoever they come from, in whatever order."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import DTYPES, payload_bytes
from diloco.workers.encoding import encode_delta
from diloco.workers.ranks.gather import _Gathering
from diloco.workers.ranks.placement import Piece
from diloco.workers.rounds import Base

ELEMENTS = 300_000
RNG = np.random.default_rng(0)
BASE = RNG.standard_normal(ELEMENTS).astype(np.float32)
VALUES = BASE + RNG.standard_normal(ELEMENTS).astype(np.float32)
CUTS = [(200_000, ELEMENTS), (0, 10), (10, 200_000)]


async def offload(work: Any, *args: Any) -> Any:
    await asyncio.sleep(0)
    return work(*args)


async def gathered(codec: Codec, base: Base | None, cuts: Sequence[tuple[int, int]]) -> _Gathering:
    """All pieces, of which some came before it was known on what base."""
    one = _Gathering(ELEMENTS, codec)
    async with asyncio.TaskGroup() as group:
        for start, stop in cuts:
            piece = Piece(start, 0, stop - start, stop - start, 0)
            group.create_task(one.take(VALUES[start:stop].copy(), [piece], offload))
        await asyncio.sleep(0)
        assert one.out is None
        one.begin(base)
    assert one.whole.is_set()
    return one


@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize("cuts", [CUTS, [(0, ELEMENTS)]])
async def test_what_is_gathered_is_the_payload_and_nothing_else_is_kept(codec: Codec, cuts: Any) -> None:
    """Neither the values nor the base, which the next one may replace before all is uploaded."""
    one = await gathered(codec, Base(0, 3, b"", BASE.copy()), cuts)
    due = np.empty(payload_bytes(ELEMENTS, codec), np.uint8)
    encode_delta(BASE, VALUES.copy, codec, None, due)
    assert one.encoded
    assert one.values().tobytes() == due.tobytes()
    assert one.base == Base(0, 3, b"", None)


@pytest.mark.parametrize("codec", DTYPES)
async def test_columns_are_gathered_like_rows(codec: Codec) -> None:
    """One column, and three, of a matrix of four."""
    one, rows = _Gathering(ELEMENTS, codec), ELEMENTS // 4
    one.begin(Base(0, 3, b"", BASE))
    for piece in (Piece(0, 0, rows, 1, 4), Piece(1, 0, 3 * rows, 3, 4)):
        await one.take(piece.cut(VALUES).copy(), [piece], offload)
    due = np.empty(payload_bytes(ELEMENTS, codec), np.uint8)
    encode_delta(BASE, VALUES.copy, codec, None, due)
    assert one.values().tobytes() == due.tobytes()


@pytest.mark.parametrize("codec", DTYPES)
async def test_what_one_rank_has_alone_needs_no_more_room(codec: Codec) -> None:
    """The payload lies where its values did."""
    one, own, due = _Gathering(ELEMENTS, codec), VALUES.copy(), np.empty(payload_bytes(ELEMENTS, codec), np.uint8)
    one.begin(Base(0, 3, b"", BASE))
    await one.take(own, [Piece(0, 0, ELEMENTS, ELEMENTS, 0)], offload)
    assert np.shares_memory(one.values(), own)
    encode_delta(BASE, VALUES.copy, codec, None, due)
    assert one.values().tobytes() == due.tobytes()
