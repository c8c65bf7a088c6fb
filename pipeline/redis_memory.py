"""What Redis holds for a run: one count for the planner, the syncer before it begins, and the docs. Pure."""

from typing import get_args

from diloco.pipeline.messages.moments import MOST_OFFERED_BYTES
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import payload_bytes
from diloco.pipeline.settings import SyncSettings, defaults

_MANY = 2**20
CODECS: dict[str, float] = {name: payload_bytes(_MANY, name) / _MANY for name in get_args(Codec)}
"""Bytes of an element of a delta."""
KEY_FRAMES: int = defaults(SyncSettings)["key_frame_interval"]
GLOBALS_HELD = 3
"""Of each fragment: the present one, the one that it replaced, and the next one while it is uploaded."""
STATES_HELD = 2
"""Of its outer state, which goes as it is replaced: the present one and the next one."""
VALUE_BYTES = 4
"""Of an element of a global, of the outer state and of the inner optimizer's moments: all are float32."""
OFFERS = 2
"""Of moments, that lie on the bus at a time."""
MOMENTS = 2
"""Of Adam, which keeps as many as any usual optimizer."""
RESERVE_BYTES = 32 * 2**20
"""For everything that is not a payload."""
MACHINE_TIMES = 2
"""Memory of its machine, in maxmemory: while a child of Redis writes all that it holds to disk or to a replica, what
a round replaces is there twice."""


def redis_bytes(
    elements: float, learners: int, codec: str, global_codec: str, key_frame_interval: int = KEY_FRAMES
) -> float:
    """Memory of Redis (`redis_holds` in words), of all nodes of a cluster together.

    All learners' deltas of all fragments are counted, as they are there when syncers have been away. Globals in two
    parts count as one. Globals that are updates have those of two key frames beside them.
    """
    each = (GLOBALS_HELD + STATES_HELD) * VALUE_BYTES + CODECS[codec] * learners
    if global_codec == "int8":
        each += 2 * key_frame_interval * CODECS["int8"]
    return elements * each + offered_bytes(elements) + RESERVE_BYTES


def round_bytes(elements: float, learners: int, codec: str) -> float:
    """What is uploaded in a round: a delta of each learner, the next global and its outer state, of all fragments."""
    return elements * (CODECS[codec] * learners + 2 * VALUE_BYTES)


def offered_bytes(elements: float) -> float:
    """Of it, the offers of moments: a learner whose moments are of more than `MOST_OFFERED_BYTES` makes none."""
    return OFFERS * min(MOMENTS * VALUE_BYTES * elements, MOST_OFFERED_BYTES)


def redis_holds(learners: int, global_codec: str) -> str:
    """What `redis_bytes` counts."""
    updates = ", int8 updates of two key frames" if global_codec == "int8" else ""
    deltas = f"{learners} deltas{updates}"
    return f"{GLOBALS_HELD} globals, {STATES_HELD} momenta, {deltas}, {OFFERS} offers of moments, a reserve"
