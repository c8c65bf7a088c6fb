"""What processes of a run hold in memory: one count for planner, doctor and measurement. Pure."""

import math
from typing import Literal

from diloco.pipeline.messages.wire import OuterName
from diloco.pipeline.redis_memory import CODECS, VALUE_BYTES

EXACT = ("fp32", "bf16")
"""Codecs of deltas without an error that is kept."""
SYNCER_SPARE = 1.25
"""Of its memory: what is freed is used again, and up to a quarter more is held (`payload.buffers`)."""
SYNCER_PROCESS_BYTES = 0.2e9
"""The program, and chunks on their way. Measured (docs/results/performance.md)"""
LEARNER_PROCESS_BYTES = 0.4e9
"""The program with torch and a trainer, of each rank: what it takes with a model of next to nothing. Measured
(docs/results/performance.md)"""
Precision = Literal["fp32", "bf16"]
TRAINING_BYTES: dict[Precision, int] = {"fp32": 16, "bf16": 18}
"""Of a parameter in training, without activations: parameter, gradient, AdamW's moments; in bf16 a copy that computes.
As the built-in trainer has them (docs/howto/gpus.md)."""
ROOM_SHARE = 4
"""A learner takes snapshots while those that it holds are less than the model divided by this (`workers.rounds`)."""
ROOM_LEAST = 2
"""Or so many."""
CHECKPOINT_BYTES = 2 * VALUE_BYTES
"""Of a parameter in a checkpoint: value and momentum."""


def syncer_bytes(params: float, learners: int, codec: str, outer: OuterName, share: float = 1.0) -> float:
    """Memory of one syncer that serves so much of the model, at most: when all of its windows are open at once.

    So it is when a run ends, and after an outage. Kept between merges are values, momentum, and the values of the
    version before, by which stale deltas are rebased.
    """
    kept, made = 3 * VALUE_BYTES, (2 + (outer == "halley")) * VALUE_BYTES
    return SYNCER_SPARE * share * params * (kept + CODECS[codec] * learners + made) + SYNCER_PROCESS_BYTES


def syncer_share(fragments: int, syncers: int) -> float:
    """Of the model, that one of so many syncers must have room for: one of the others may have died."""
    return math.ceil(fragments / max(1, syncers - 1)) / fragments


def exchange_bytes(params: float, fragments: int, codec: str, ranks: int = 1) -> float:
    """Memory that one rank of a learner needs beside its training: `docs/explanation/ranks.md`.

    Bases and residuals of what it serves, and while nothing is merged what two deltas of each have lost; of one
    fragment the wire and the pulled global; snapshots, of one fragment or of as many as there is room for while the bus
    is away. Of several ranks each has of an exact snapshot the wire only, and its rows of what all serve, both ways.
    """
    lost = 0 if codec in EXACT else VALUE_BYTES
    kept = (VALUE_BYTES + 3 * lost) * math.ceil(fragments / ranks)
    snapshots = VALUE_BYTES * (max(ROOM_LEAST, math.ceil(fragments / ROOM_SHARE)) if ranks == 1 else 1)
    rows = 0 if ranks == 1 else 2 * VALUE_BYTES * min(1, fragments / ranks) - (0 if lost else VALUE_BYTES)
    return params / fragments * (kept + snapshots + CODECS[codec] + VALUE_BYTES + rows)


def learner_bytes(params: float, fragments: int, codec: str, ranks: int = 1) -> float:
    """Memory of one rank of a learner without its training: the exchange, and the process itself."""
    return exchange_bytes(params, fragments, codec, ranks) + LEARNER_PROCESS_BYTES
