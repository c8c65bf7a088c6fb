"""Gradients of the lab on CUDA: a replayed graph computes what a step computes that is launched kernel by kernel."""

import pytest
import torch

from diloco_studies.quality.inner import EAGER_STEPS, Gradients
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.text import TextTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def task(text):
    return TextTask(LabRun(model="nano", data=str(text), batch=4, seq_len=32), torch.device("cuda"))


def batch(task, number, size=4):
    return task.batch([(0, number * size + i) for i in range(size)])


def test_a_graph_computes_what_is_computed_without_it(task):
    """Over steps that change the parameters in place, and for a batch of another size between them."""
    replayed, eager = task.build(), task.build()
    gradients = Gradients(task, replayed)
    for number in range(EAGER_STEPS + 6):
        given = batch(task, number, size=2 if number == EAGER_STEPS + 3 else 4)
        loss = gradients(given)
        expected = task.loss(eager, given)
        torch.autograd.backward(expected)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
        for one, other in zip(replayed.parameters(), eager.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=0.05, atol=1e-3 * other.grad.abs().max().item())
            with torch.no_grad():
                one -= 0.1 * one.grad
                other.copy_(one)
            one.grad = other.grad = None
    assert gradients.captured


def test_a_loss_is_not_overwritten_by_the_next_step(task):
    """The lab reads losses much later."""
    gradients = Gradients(task, task.build())
    losses = [gradients(batch(task, number)) for number in range(EAGER_STEPS + 3)]
    assert gradients.captured
    assert len({loss.item() for loss in losses}) == len(losses)
