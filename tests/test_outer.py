"""The outer step against torch."""

from typing import Any

import numpy as np
import pytest
import torch

from syncer.norms import BLOCK
from syncer.outer import NesterovStep


def nesterov_step(theta: Any, momentum: Any, pseudogradient: Any, lr: float, mu: float) -> None:
    """A whole outer step in place, but for the pseudogradient."""
    out = pseudogradient.copy()
    step = NesterovStep(theta, momentum, out, momentum, lr, mu)
    for start in range(0, len(theta), BLOCK):
        step.block(start, min(start + BLOCK, len(theta)))
    theta[:] = out


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (0.4, 0.5), (1.0, 0.0)])
def test_outer_steps_equal_torch_sgd(lr, mu):
    """Several steps, the first included, are those of torch.optim.SGD(nesterov=True), or plain SGD at mu = 0."""
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(2 * BLOCK + 17).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
    momentum = np.zeros_like(theta) if mu else None
    for _ in range(5):
        pseudogradient = rng.standard_normal(len(theta)).astype(np.float32)
        parameter.grad = torch.from_numpy(pseudogradient.copy())
        sgd.step()
        nesterov_step(theta, momentum, pseudogradient, lr, mu)
        np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_golden_history_of_a_constant_pseudogradient():
    """D = 1, lr = 1, mu = 0.5: by hand, b = 1, 1.5, 1.75 and theta = 0 - 1.5 - 1.75 - 1.875."""
    theta, momentum, d = np.zeros(3, np.float32), np.zeros(3, np.float32), np.ones(3, np.float32)
    seen = []
    for _ in range(3):
        nesterov_step(theta, momentum, d, 1.0, 0.5)
        seen.append((float(momentum[0]), float(theta[0])))
    assert seen == [(1.0, -1.5), (1.5, -3.25), (1.75, -5.125)]
    assert (d == 1).all()


def test_momentum_without_its_buffer_is_a_bug_of_ours():
    """Momentum is never silently left out."""
    with pytest.raises(ValueError, match="buffer"):
        nesterov_step(np.zeros(2, np.float32), None, np.zeros(2, np.float32), 1.0, 0.9)
