"""How much memory the processes of a run need: one formula for the planner, the doctor and the benchmarks. Pure."""

import math
from typing import Literal

from diloco.pipeline.messages.wire import Codec, OuterName
from diloco.pipeline.payload.codec import TRAITS
from diloco.pipeline.redis_memory import CODECS, VALUE_BYTES

# Factor on the syncer's memory: freed buffers are reused, and up to a quarter more is held (`payload.buffers`).
SYNCER_SPARE = 1.25
# The program itself, and chunks in flight. Measured (docs/results/performance.md).
SYNCER_PROCESS_BYTES = 0.2e9
# The program with torch and a trainer, per rank, measured with a model of negligible size
# (docs/results/performance.md).
LEARNER_PROCESS_BYTES = 0.4e9
Precision = Literal["fp32", "bf16"]
# Bytes per parameter in training, without activations: parameter, gradient and AdamW's two moments; with bf16 also the
# bf16 copy used for compute. This is the layout of the built-in trainer (docs/howto/gpus.md).
TRAINING_BYTES: dict[Precision, int] = {"fp32": 16, "bf16": 18}
# A learner takes another snapshot only while the ones that it holds are less than 1/`ROOM_SHARE` of the model, or fewer
# than `MIN_ROOM` (`workers.rounds`).
ROOM_SHARE = 4
MIN_ROOM = 2
# Bytes per parameter in a checkpoint: value and momentum.
CHECKPOINT_BYTES = 2 * VALUE_BYTES


def syncer_bytes(params: float, learners: int, codec: Codec, outer: OuterName, share: float = 1.0) -> float:
    """Return the peak memory of a syncer that serves the part `share` of the model: when all of its windows are open.

    That is the case when a run ends, and after an outage. Between merges a syncer keeps the values, the momentum, and
    the values of the previous version, which it needs to rebase stale deltas.
    """
    kept, made = 3 * VALUE_BYTES, (2 + (outer == "halley")) * VALUE_BYTES
    return SYNCER_SPARE * share * params * (kept + CODECS[codec] * learners + made) + SYNCER_PROCESS_BYTES


def syncer_share(fragments: int, syncers: int) -> float:
    """Return the share of the model that each of `syncers` must have memory for, given that one of them may die."""
    return math.ceil(fragments / max(1, syncers - 1)) / fragments


def exchange_bytes(params: float, fragments: int, codec: Codec, ranks: int = 1) -> float:
    """Return the memory that one rank of a learner needs in addition to its training (`docs/explanation/ranks.md`).

    A rank holds, for the fragments that it serves, the bases, the residuals, and (as long as nothing is merged) the
    quantization errors of two deltas each; for one fragment the wire buffer and the pulled global; and snapshots, of
    one fragment or of as many as fit while the bus is unavailable. With several ranks, a rank holds only
    the wire buffer of an exact snapshot, and in both directions its rows of what all ranks serve.
    """
    lost = VALUE_BYTES if TRAITS[codec].feedback else 0
    kept = (VALUE_BYTES + 3 * lost) * math.ceil(fragments / ranks)
    snapshots = VALUE_BYTES * (max(MIN_ROOM, math.ceil(fragments / ROOM_SHARE)) if ranks == 1 else 1)
    rows = 0 if ranks == 1 else 2 * VALUE_BYTES * min(1, fragments / ranks) - (0 if lost else VALUE_BYTES)
    return params / fragments * (kept + snapshots + CODECS[codec] + VALUE_BYTES + rows)


def learner_bytes(params: float, fragments: int, codec: Codec, ranks: int = 1) -> float:
    """Return the memory of one rank of a learner without its training: the exchange plus the process itself."""
    return exchange_bytes(params, fragments, codec, ranks) + LEARNER_PROCESS_BYTES
