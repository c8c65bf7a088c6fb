"""Which deltas are too long to be true: measured by what the fragment's merges were made of."""

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.tape import RefusalReason
from diloco.syncer.admission import Offer
from diloco.syncer.merging.fragment import MERGES_NEEDED, Delta, FragmentState
from diloco.syncer.merging.merge import delta_norms
from tests import samples

SIZE = 1000


def fragment() -> FragmentState:
    """Values of length 10, which hardly move."""
    layout = layout_of([samples.tensor("t", (SIZE,))]).fragments[0]
    return FragmentState(layout, samples.sync_spec(fragments=1, outer_lr=1e-6), 0, bytes(16), along(10.0), {})


def along(length: float) -> np.ndarray:
    return np.full(SIZE, length / SIZE**0.5, np.float32)


def judge(state: FragmentState, offer: Offer, values: np.ndarray) -> Delta | tuple[RefusalReason, str]:
    """With its norms, as its owner gives them."""
    return state.judge(offer, values, delta_norms(state.layout, values))


def merged(state: FragmentState, learners: int, length: float) -> None:
    """A merge of deltas of this length."""
    deltas = []
    for number in range(learners):
        judged = judge(state, Offer("0-0", samples.header(f"l{number}", base_version=state.version)), along(length))
        assert isinstance(judged, Delta), judged
        deltas.append(judged)
    state.advance(state.merge(deltas, []))


@pytest.mark.parametrize("learners", [1, 2, 4, 8, 64])
def test_deltas_that_grow_are_merged_however_many_learners_began(learners: int) -> None:
    """A run's first delta is of one step at a rate that still warms up: three thousandths of what follows."""
    state = fragment()
    for length in (0.001, 3.0, 3.3, 2.8, 3.1, 2.9):
        merged(state, learners, length)


def test_many_merges_before_the_rate_warms_up_do_not_make_all_later_deltas_absurd() -> None:
    """A run of fast steps makes dozens of merges before the first rate above nearly nothing."""
    state = fragment()
    for length in [0.001] * 40 + [3.0] * 40:
        merged(state, 2, length)


@pytest.mark.parametrize("learners", [1, 8])
def test_a_delta_a_hundred_times_as_long_as_usual_is_refused(learners: int) -> None:
    """Once there is a usual length; before, one a hundred times as long as the fragment."""
    state = fragment()
    for merges in range(2 * MERGES_NEEDED):
        most = 100 * (0.3 if merges >= MERGES_NEEDED else 10.0)
        offer = Offer("0-0", samples.header(base_version=state.version))
        refused = judge(state, offer, along(1.1 * most))
        assert isinstance(refused, tuple)
        assert refused[0] is RefusalReason.ABSURD_NORM
        assert isinstance(judge(state, offer, along(0.9 * most)), Delta)
        merged(state, learners, 0.3)
