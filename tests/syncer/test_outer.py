"""The outer step against torch."""

from typing import Any

import numpy as np
import pytest
import torch

from diloco.pipeline.fragments import layout_of
from diloco.syncer import algorithm
from diloco.syncer.merging.merge import BLOCK, Sum
from diloco.syncer.merging.outer import (
    NesterovStep,
    Outer,
    OuterStep,
    PlainStep,
    State,
    halley_iteration,
    solve,
    with_unit_norm,
)
from diloco.syncer.replay.replay import ORTHOGONAL_TOLERANCE
from tests import samples


def nesterov_step(theta: Any, momentum: Any, pseudogradient: Any, lr: float, mu: float) -> None:
    """A whole outer step in place, but for the pseudogradient."""
    out = pseudogradient.copy()
    step = NesterovStep(theta, out, lr, mu, momentum, momentum) if mu else PlainStep(theta, out, lr)
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


SHAPES = [(8, 8), (12, 40), (40, 12), (2, 2)]
HALLEY = samples.sync_spec(fragments=1, outer="halley", outer_lr=0.7, outer_momentum=0.6)
MIXED = layout_of(
    [
        samples.tensor("embedding", (6, 4)),
        *(samples.tensor(f"m{i}", shape).model_copy(update={"matrix": True}) for i, shape in enumerate(SHAPES)),
        samples.tensor("vector", (7,)),
    ]
).fragments[0]
"""Only what is flagged is a matrix."""


def stepped(sync, outer, momentum, delta, layout=MIXED):
    """An outer step from zeros that merges one delta: theta, momentum and the orthogonalised step."""
    before = State(np.zeros(layout.elements, np.float32), momentum)
    return samples.outer_step(sync, outer, before, layout, delta)


def random_vector(seed, layout=MIXED):
    return np.random.default_rng(seed).standard_normal(layout.elements).astype(np.float32)


def test_while_learners_are_averaged_nothing_is_orthogonalised():
    """Rate 1 and no momentum, as in the warm-up and in a run's short last merges: the delta itself."""
    delta = random_vector(4)
    averaged = stepped(HALLEY, (1.0, 0.0), random_vector(5), delta)
    np.testing.assert_array_equal(averaged.theta, -delta)
    assert averaged.orthogonal is None


LONG = layout_of([samples.tensor("matrix", (600, 500)), samples.tensor("vector", (7,))]).fragments[0]
BUFFERS = layout_of([samples.tensor("mean", (5,), rule="average"), samples.tensor("var", (6,), rule="variance")])


@pytest.mark.parametrize("layout", [MIXED, LONG, BUFFERS.fragments[0]], ids=["mixed", "blocks", "buffers"])
@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.7, 0.6)], ids=["averaging", "momentum"])
@pytest.mark.parametrize("optimizer", ["nesterov", "halley"])
def test_a_step_has_its_norm_and_the_elements_asked_for_of_what_it_merges(layout, outer, optimizer):
    """Norms are numpy's, of the new values minus the old; a variance that becomes 0 moves no further than to 0."""
    sync = HALLEY.model_copy(update={"outer": optimizer})
    theta, delta = np.abs(random_vector(1, layout)), random_vector(2, layout)
    momentum = random_vector(3, layout)
    at = [0, 1, layout.elements // 2, layout.elements - 1]
    if layout.averaged:
        outer = (1.0, 0.0)
        assert (theta - delta < 0).any()
    given = samples.contributions(layout, [delta], [1.0])
    found = OuterStep(Sum(layout), given, sync, Outer(*outer), State(theta, momentum), at=at).take()
    assert found.norm == pytest.approx(np.linalg.norm(found.theta.astype(np.float64) - theta), rel=1e-6)
    np.testing.assert_array_equal(found.sample, delta[at])


def test_a_matrix_lies_on_its_side_before_its_gram_matrix_is_made():
    """That of a tall one, say of an embedding, would take rows x rows."""
    assert [with_unit_norm(np.ones(shape, np.float32)).shape for shape in SHAPES[:3]] == [(8, 8), (12, 40), (12, 40)]


@pytest.mark.parametrize("shape", [*SHAPES, (3, 200), (300, 200)])
@pytest.mark.parametrize("steep", [0.5, 1.0, 2.0])
def test_halleys_iteration_keeps_singular_vectors_and_lifts_all_above_a_hundredth(shape, steep):
    """Wide and tall, one block and many, of singular values that fall as k^-steep: what was 1 to 100 is 1 to 3."""
    random = np.random.default_rng(1)
    left, _, right = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
    values = np.arange(1.0, min(shape) + 1) ** -steep
    turned = left.T @ halley_iteration(((left * values) @ right).astype(np.float32)) @ right.T
    told = np.diag(turned)[values > 0.01]
    assert told.max() < 3 * told.min()
    np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-3 * told.max())


def test_a_division_by_halves_is_numpys():
    """Of a matrix as badly conditioned as Halley's iteration makes one, and of several blocks."""
    random = np.random.default_rng(1)
    x = random.standard_normal((200, 300)).astype(np.float32)
    thin = random.standard_normal((200, 3))
    a = np.eye(200) + 1900 * (thin @ thin.T) / np.linalg.norm(thin @ thin.T)
    exact = np.linalg.solve(a, x.astype(np.float64))
    np.testing.assert_allclose(solve(a.astype(np.float32), x), exact, atol=2e-3 * np.abs(exact).max())


@pytest.mark.parametrize(
    "shape", [(65, 65), (129, 300), *(pytest.param(one, marks=pytest.mark.slow) for one in ((128, 512), (256, 1024)))]
)
@pytest.mark.parametrize("steep", [0.0, 2.0, 3.0, np.inf])
def test_float32_turns_matrices_as_float64_does(shape, steep):
    """To a fifth of what replays on other machines tolerate; infinitely steep: all rows are the same."""
    random = np.random.default_rng(0)
    matrix = np.ones((shape[0], 1)) * random.standard_normal((1, shape[1]))
    if np.isfinite(steep):
        left, values, right = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
        values = np.arange(1.0, len(values) + 1) ** -steep
        matrix = (left * values) @ right
    single = matrix.astype(np.float32)
    exact = algorithm.orthogonalised(single.astype(np.float64))
    found = halley_iteration(single).astype(np.float64)
    found *= np.linalg.norm(exact) / np.linalg.norm(found)
    assert np.linalg.norm(found - exact) < ORTHOGONAL_TOLERANCE / 5 * np.linalg.norm(exact)


def test_a_matrix_longer_than_float32_can_say_is_turned_as_any_other():
    """Each of its elements is a number, the root of the sum of their squares is none in float32."""
    matrix = np.random.default_rng(0).uniform(-1, 1, (8, 12)).astype(np.float32)
    long = matrix * np.float32(2.0**127)
    assert np.linalg.norm(long.astype(np.float64)) > np.finfo(np.float32).max
    np.testing.assert_allclose(halley_iteration(long), halley_iteration(matrix), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-35, 1e-28, 1e-15, 1e-4, 1e12])
def test_matrices_of_any_length_are_turned_unless_they_have_no_direction(size):
    """All zero or too short to have a direction: they stay as they are. All others are turned as at any other length,
    also those so short or long that their squares are hardly float32's."""
    unscaled = random_vector(6)
    found = stepped(HALLEY, (1.0, 0.5), None, unscaled * np.float32(size)).theta
    turned = stepped(HALLEY, (1.0, 0.5), None, unscaled).theta
    expected = np.float32(size) * (turned if size > 1e-30 else np.float32(-1.5) * unscaled)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
