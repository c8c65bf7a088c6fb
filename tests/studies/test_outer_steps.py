"""What docs/explanation/outer-step.md says of small runs that go badly."""

import pytest
import torch

from tests.outer_steps import ODD, figures


@pytest.mark.slow
def test_a_wrong_sign_shows_in_that_learners_cosine_and_a_high_outer_rate_in_rho_and_all_cosines() -> None:
    """Both against a run with the defaults; a high rate makes learners agree, since all undo the same step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        good, odd, far = map(figures, ("defaults", "wrong sign", "outer rate 2.8"))
    finally:
        torch.set_num_threads(threads)
    assert odd[f"cosine of {ODD}"] < 0 < odd["of the others"]
    assert abs(good[f"cosine of {ODD}"] - good["of the others"]) < 0.1
    assert far["rho"] < good["rho"] - 0.1
    assert far["of the others"] > good["of the others"] + 0.1
