"""The bandwidth that a method needs for a share of compute: a graph of forward, backward and communication. Pure.

As in Streaming DiLoCo (arXiv:2501.18512): a step is the forward passes of all layers from the first to the last, then
the backward passes the other way round, one after the other; a layer's communication begins after its backward pass,
on a link that carries one at a time; the forward pass of that layer, `overlap` steps later than the next, waits for
it. Data-parallel communicates every layer at every step, DiLoCo every layer at every H-th, streaming one fragment of
three layers at a time, spread over the H steps. Decoupled learners never wait; there it is counted what they train in
vain, because the merged fragment comes later than `overlap_steps` after its publication.

All methods have the run's H and codec, so that like stands beside like; data-parallel has no H, and its gradients are
bf16. `PUBLISHED` has that paper's own, by which the graph is held against its tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.needs import GLOBALS, USUAL
from diloco.pipeline.redis_memory import CODECS
from diloco.pipeline.site import layers_of
from diloco.pipeline.units import counted

TARGETS = (50, 75, 80, 90, 95, 99)
"""Percent of compute utilisation."""
GRID_GBIT_S = tuple(float(rate) for rate in np.logspace(-1, 3, 50))
"""Bandwidths tried: that paper's, whose figures are points of it."""
PUBLISHED_INTERVAL = 100
"""H; that paper's."""
LAYERS_A_FRAGMENT = 3
BITS_A_PARAMETER = 13.4
"""On the wire for one reduction. Calibrated: that paper's rows of 1B and 10B need 13.3 to 13.5 (bf16 would be 16)."""
FORWARD = 1 / 3
"""Share of a step's time; the backward pass has the rest. The usual 1 to 2."""


class Method(NamedTuple):
    """How a method communicates."""

    every: int
    """Steps between two communications of a layer."""
    streamed: bool
    """Fragments in turn, not all layers at once."""
    overlap: int
    """Steps that may pass before a layer waits for its communication."""
    wire: str
    """What travels, in words."""
    bits: float
    """Bits of a parameter in a reduction, of 16; of a decoupled learner, those that it sends."""
    pulled_bits: float = 0.0
    """Those of a global that a decoupled learner pulls."""
    fragments: int = 0
    """P of decoupled learners; 0: of three layers."""

    @property
    def waits(self) -> bool:
        """Whether anybody does."""
        return not self.pulled_bits


@dataclass(frozen=True, slots=True)
class Run:
    """What a run communicates, by its settings."""

    sync_interval: int = USUAL["sync_interval"]
    codec: Codec = USUAL["codec"]
    global_codec: str = USUAL["global_codec"]
    fragments: int = USUAL["fragments"]
    overlap_steps: int = USUAL["overlap_steps"]


DATA_PARALLEL = Method(1, False, 0, "bf16", 16)


def methods(run: Run) -> dict[str, Method]:
    """All methods at a run's H, in its codec."""
    every, bits, wire = run.sync_interval, 8 * CODECS[run.codec], run.codec
    both = f"{wire} up, {run.global_codec} down"
    pulled = 8 * GLOBALS[run.global_codec].pulled
    return {
        "data-parallel": DATA_PARALLEL,
        "diloco": Method(every, False, 0, wire, bits),
        "streaming": Method(every, True, 0, wire, bits),
        "streaming, overlap": Method(every, True, 1, wire, bits),
        "decoupled": Method(every, True, run.overlap_steps, both, bits, pulled, run.fragments),
    }


PUBLISHED: dict[str, Method] = {
    "data-parallel": DATA_PARALLEL,
    "diloco": Method(PUBLISHED_INTERVAL, False, 0, "bf16", 16),
    "streaming": Method(PUBLISHED_INTERVAL, True, 0, "bf16", 16),
    "streaming, overlap": Method(PUBLISHED_INTERVAL, True, 1, "bf16", 16),
    "streaming, overlap, 4-bit": Method(PUBLISHED_INTERVAL, True, 1, "4 bits", 4),
}
"""Rows of that paper's tables."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained."""

    params: float
    step_s: float
    layers: int

    @property
    def fragments(self) -> int:
        """P: fragments of three layers, far apart from one another."""
        return math.ceil(self.layers / LAYERS_A_FRAGMENT)

    def bits(self, method: Method) -> float:
        """On the wire for all layers once."""
        return self.params * BITS_A_PARAMETER * method.bits / 16


def utilisation(model: Model, method: Method, bits_per_s: float) -> float:
    """Share of the time that computes what counts."""
    if not method.waits:
        return _decoupled(model, method, bits_per_s)
    schedule = _schedule(model, method)
    warm = method.every if method.every > 1 else 4
    return _walk(model, schedule, method.overlap, model.bits(method) / model.layers / bits_per_s, warm)


def _schedule(model: Model, method: Method) -> list[frozenset[int]]:
    """Layers that communicate after each step of a round."""
    everything = frozenset(range(model.layers))
    if not method.streamed:
        return [frozenset()] * (method.every - 1) + [everything]
    steps: list[frozenset[int]] = [frozenset()] * method.every
    for p in range(model.fragments):
        step = p * method.every // model.fragments
        steps[step] = steps[step] | frozenset(range(p, model.layers, model.fragments))
    return steps


def _walk(model: Model, schedule: Sequence[frozenset[int]], overlap: int, comm_s: float, warm: int) -> float:
    """Go through the graph in the order of its nodes, as long as it takes to warm up, and as long again."""
    forward_s = model.step_s * FORWARD / model.layers
    backward_s = model.step_s * (1 - FORWARD) / model.layers
    now = link_free = began = 0.0
    awaited: list[dict[int, float]] = [{} for _ in range(overlap + 1)]
    for step in range(2 * warm):
        if step == warm:
            began = now
        arriving = awaited.pop(0)
        if arriving:
            for layer in range(model.layers):
                now = max(now, arriving.get(layer, 0.0)) + forward_s
        else:
            now += forward_s * model.layers
        sent: dict[int, float] = {}
        talking = schedule[step % len(schedule)]
        if talking:
            for layer in reversed(range(model.layers)):
                now += backward_s
                if layer in talking:
                    link_free = max(link_free, now) + comm_s
                    sent[layer] = link_free
        else:
            now += backward_s * model.layers
        awaited.append(sent)
    return warm * model.step_s / (now - began)


def _decoupled(model: Model, method: Method, bits_per_s: float) -> float:
    """Steps that count: H, and those that the round trip may hide behind, of all in a fragment's round.

    Both directions of the line are its own. What the busier one cannot carry in H steps makes the round longer.
    """
    up_s, down_s = (model.params * bits / bits_per_s for bits in (method.bits, method.pulled_bits))
    queued_s = max(up_s, down_s) - method.every * model.step_s
    round_trip_steps = math.ceil(max((up_s + down_s) / method.fragments, queued_s) / model.step_s)
    return (method.every + min(round_trip_steps, method.overlap)) / (method.every + round_trip_steps)


def needed(model: Model, method: Method, targets: Sequence[float] = TARGETS) -> dict[float, float | None]:
    """Least bandwidth of the grid, Gbit/s, for each percentage; None: not even the greatest is enough."""
    known: dict[int, float] = {}

    def reached(i: int) -> float:
        if i not in known:
            known[i] = utilisation(model, method, GRID_GBIT_S[i] * 1e9)
        return known[i]

    found: dict[float, float | None] = {}
    for target in targets:
        low, high = 0, len(GRID_GBIT_S)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) >= target / 100 else (middle + 1, high)
        found[target] = GRID_GBIT_S[low] if low < len(GRID_GBIT_S) else None
    return found


def how_to_read(run: Run) -> str:
    """What a table does not say by itself."""
    return (
        f"the bandwidths tried are {GRID_GBIT_S[1] / GRID_GBIT_S[0] - 1:.0%} apart: equal neighbours lie between the "
        "same two\n"
        f"decoupled learners lose whole steps, those of a round trip beyond {counted(run.overlap_steps, 'step')}: one "
        f"is {1 / (run.sync_interval + run.overlap_steps + 1):.1%} of a round. In a round trip 1/"
        f"{run.fragments} of the model goes up, and then down; a streamed fragment has three layers, and goes once. "
        "More --fragments ask for less"
    )


def table(model: Model, kinds: Mapping[str, Method]) -> dict[str, dict[float, float | None]]:
    """Of each method."""
    return {name: needed(model, method) for name, method in kinds.items()}


def speed_up(model: Model, method: Method, bits_per_s: float) -> float:
    """How many times faster a method is than data-parallel on that link between all."""
    return utilisation(model, method, bits_per_s) / utilisation(model, DATA_PARALLEL, bits_per_s)


REGIONS = Model(params=12e9, step_s=0.96, layers=layers_of(12e9))
"""Paper: 12B over 4 regions on 2-5 Gbit/s, over 20 times faster. Its step time, H and codec there are not published:
the step time is 10B's, scaled."""
REGION_LINKS_GBIT_S = (2.0, 3.0, 5.0)

STREAMING: Mapping[float, tuple[float, Mapping[str, tuple[float, ...]]]] = {
    1e9: (
        0.1,
        {
            "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
            "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
            "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
            "streaming, overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
            "streaming, overlap, 4-bit": (0.4, 0.9, 1.7, 2.0, 3.0),
        },
    ),
    10e9: (
        0.8,
        {
            "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
            "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
            "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
            "streaming, overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
            "streaming, overlap, 4-bit": (0.4, 0.9, 1.4, 1.4, 1.7),
        },
    ),
}
"""Parameters -> (step time, method -> Gbit/s at 50, 80, 90, 95 and 99 %), as published there."""
STREAMING_TARGETS = (50, 80, 90, 95, 99)
