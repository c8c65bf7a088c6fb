"""How much memory Redis needs for a run: one formula for the planner, the syncer's check and the docs. Pure."""

from diloco.pipeline.messages.moments import MAX_OFFERED_BYTES
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import TRAITS, payload_bytes

_MANY = 2**20
# Bytes per element of a delta, by codec.
CODECS: dict[Codec, float] = {codec: payload_bytes(_MANY, codec) / _MANY for codec in TRAITS}
# Globals held per fragment: the current one, its predecessor, and the next one while it is uploaded.
GLOBALS_HELD = 3
# Outer states held per fragment: the current one and the next one. The replaced one is deleted at once.
STATES_HELD = 2
# Bytes per element of a global, of the outer state and of the inner optimizer's moments: all are float32.
VALUE_BYTES = 4
# Offers of moments that lie on the bus at a time.
OFFERS = 2
# Moments per parameter: Adam's two. No usual optimizer has more.
MOMENTS = 2
# Memory for everything that is not a payload.
RESERVE_BYTES = 32 * 2**20
# The machine should have this many times maxmemory: while a child process of Redis writes a snapshot to disk or to a
# replica, values that a round replaces exist twice (copy on write).
MACHINE_TIMES = 2


def redis_bytes(elements: float, learners: int, codec: Codec) -> float:
    """Return the memory that Redis needs, over all nodes of a cluster together; `redis_holds` says what it is for.

    The count includes a delta of every learner for every fragment, because they pile up while no syncer runs. A global
    in two parts counts as one.
    """
    each = (GLOBALS_HELD + STATES_HELD) * VALUE_BYTES + CODECS[codec] * learners
    return elements * each + offered_bytes(elements) + RESERVE_BYTES


def round_bytes(elements: float, learners: int, codec: Codec) -> float:
    """Return the bytes uploaded in a round: for all fragments, a delta per learner, the next global and outer state."""
    return elements * (CODECS[codec] * learners + 2 * VALUE_BYTES)


def offered_bytes(elements: float) -> float:
    """Return the share of `redis_bytes` that offers of moments take.

    A learner whose moments exceed `MAX_OFFERED_BYTES` makes no offer.
    """
    return OFFERS * min(MOMENTS * VALUE_BYTES * elements, MAX_OFFERED_BYTES)


def redis_holds(learners: int) -> str:
    """Return in words what `redis_bytes` counts."""
    held = f"{GLOBALS_HELD} globals, {STATES_HELD} momenta, {learners} deltas"
    return f"{held}, {OFFERS} offers of moments, a reserve"
