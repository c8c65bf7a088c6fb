"""The outer optimizer's state of one fragment: vectors by name, and how it goes on from what lies on the bus. Pure.

A vector (elements,) that is absent is all zeros. On the bus, and in a recording, the state is one payload: its vectors
one after another, in the order of the rule's names. A rule with other vectors is one class here and one line in
`STATE_RULES`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from diloco.pipeline.messages.wire import OuterName

Float32 = npt.NDArray[np.float32]
OuterState = Mapping[str, Float32]
"""Name -> vector (elements,)."""


class StateRule(Protocol):
    """How the state goes on; all vectors given are of the same elements, a whole fragment's or some of them."""

    names: ClassVar[tuple[str, ...]]
    """Of its vectors, in their order on the bus."""

    def __init__(self, lr: float, mu: float) -> None:
        """lr, mu: outer learning rate and momentum."""
        ...

    def after_step(self, before: OuterState, step: Float32, after: OuterState) -> None:
        """The state after a step, of which only `step` is known: what was subtracted from the values.

        Args:
            before: the state before it.
            step: overwritten.
            after: overwritten with the new state; it may be `before`.
        """
        ...

    def after_pseudogradient(self, before: OuterState, pseudogradient: Float32, after: OuterState) -> None:
        """The state after a step that was made from `pseudogradient`; `after` as above."""
        ...


class MomentumState:
    """One momentum, as all of them have, b' = mu b + D.

    With Nesterov's step s = lr (D + mu b') (`syncer.merging.outer`), the momentum follows from the step too:

        D = (s/lr - mu^2 b) / (1 + mu)   so   b' = (mu b + s/lr) / (1 + mu)

    A matrix that was orthogonalised does not tell D, so there D itself must be known.
    """

    names: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, lr: float, mu: float) -> None:
        self._lr, self._mu = lr, mu

    def after_step(self, before: OuterState, step: Float32, after: OuterState) -> None:
        """As `StateRule`."""
        out, momentum = after["momentum"], before.get("momentum")
        np.divide(step, self._lr, out=step)
        if momentum is None:
            np.copyto(out, step)
        else:
            np.multiply(momentum, self._mu, out=out)
            np.add(out, step, out=out)
        np.divide(out, 1 + self._mu, out=out)

    def after_pseudogradient(self, before: OuterState, pseudogradient: Float32, after: OuterState) -> None:
        """As `StateRule`."""
        out, momentum = after["momentum"], before.get("momentum")
        if momentum is None:
            out.fill(0)
        else:
            np.multiply(momentum, self._mu, out=out)
        np.add(out, pseudogradient, out=out)


STATE_RULES: Final[Mapping[OuterName, type[StateRule]]] = {
    "nesterov": MomentumState,
    "muon": MomentumState,
    "halley": MomentumState,
}


def part(state: OuterState, piece: slice) -> OuterState:
    """Some elements of each vector, sharing memory."""
    return {name: vector[piece] for name, vector in state.items()}


def vectors(joined: Float32, names: Sequence[str]) -> dict[str, Float32]:
    """The state whose payload this is, (names * elements,), sharing its memory."""
    return dict(zip(names, joined.reshape(len(names), -1), strict=True))


def joined(state: OuterState, names: Sequence[str]) -> Float32:
    """The payload (names * elements,) of a state that has any of these; one vector alone is not copied."""
    if len(names) == 1:
        return state[names[0]]
    zeros = np.zeros_like(next(iter(state.values())))
    return np.concatenate([state.get(name, zeros) for name in names])
