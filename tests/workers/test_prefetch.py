"""Which of the batches in hand a step has trained: the oldest, and as many as the loop has had."""

import pytest

from diloco.pipeline.errors import UsageError
from diloco.workers.prefetch import WRONG_STEPS, Drawn, Prefetched


class Drawing:
    """A loader that draws so many batches ahead, and a loop over it."""

    def __init__(self, accumulate: int = 1, ahead: int = 0) -> None:
        self.in_hand, self.ahead = Prefetched(accumulate), ahead
        self.made = 0
        self.begin()

    def begin(self) -> None:
        self.in_hand.begin()
        self.drawn: list[int] = [self.draw() for _ in range(self.ahead)]

    def _new(self) -> Drawn:
        self.made += 1
        return Drawn((self.made,), ())

    def draw(self) -> int:
        return self.in_hand.draw(self._new).indices[0]

    def take(self, count: int = 1) -> list[int]:
        """The loop is handed so many, and the loader draws as many more."""
        self.drawn += [self.draw() for _ in range(count)]
        taken, self.drawn = self.drawn[:count], self.drawn[count:]
        return taken

    def step(self) -> list[int]:
        return [batch.indices[0] for batch in self.in_hand.stepped()]


@pytest.mark.parametrize("ahead", [0, 5])
def test_what_a_loop_lets_go_by_without_a_step_goes_with_the_next_one(ahead: int) -> None:
    """A step that a GradScaler skipped; batches that a filter left out."""
    drawing = Drawing(1, ahead)
    assert drawing.take() == drawing.step()
    for let_go in (1, 3, 0, 2):
        handed = [at for _ in range(let_go + 1) for at in drawing.take()]
        assert drawing.step() == handed


def test_several_steps_on_one_batch_train_one_batch() -> None:
    drawing = Drawing(1, 5)
    assert drawing.take() == drawing.step()
    for _ in range(5):
        assert drawing.take() == drawing.step()
        assert drawing.step() == drawing.step() == []


def test_at_the_end_of_a_pass_each_step_has_trained_what_was_said() -> None:
    """Nothing is drawn any more, so nothing shows what the loop was handed."""
    drawing = Drawing(2, 6)
    assert drawing.take(2) == drawing.step()
    drawing.in_hand.end()
    assert [drawing.step() for _ in range(4)] == [[3, 4], [5, 6], [7, 8], []]


def test_skips_before_the_first_step_of_a_pass_cost_as_many_batches_again_and_lose_none() -> None:
    """They cannot be told from what is drawn ahead, which must not be acknowledged."""
    drawing = Drawing(1, 4)
    handed = drawing.take(4)
    taken = [drawing.step()]
    for _ in range(6):
        handed += drawing.take()
        taken.append(drawing.step())
    acknowledged = [at for step in taken for at in step]
    assert acknowledged == handed[:7], "three fewer than the loop has had"
    drawing.begin()
    assert drawing.take(3) == handed[7:]


def test_a_step_without_a_batch_has_trained_none() -> None:
    drawing = Drawing(2)
    assert drawing.step() == []
    assert drawing.take(2) == drawing.step()


@pytest.mark.parametrize(("said", "true"), [(1, 4), (4, 1), (2, 3)])
def test_another_number_of_batches_than_was_said_is_refused_with_what_to_say(said: int, true: int) -> None:
    drawing = Drawing(said, 8)
    for _ in range(WRONG_STEPS):
        drawing.take(true)
        drawing.step()
    drawing.take(true)
    with pytest.raises(UsageError, match=rf"trained {true} batches instead of {said}: use .*accumulate={true}"):
        drawing.step()


def test_changing_numbers_of_batches_are_not_refused() -> None:
    drawing = Drawing(1, 2)
    for at in range(10 * WRONG_STEPS):
        drawing.take(2 + at % 2)
        drawing.step()
