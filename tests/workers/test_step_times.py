"""Step times that one thread writes and another one reads."""

from diloco.workers.step_times import StepTimes


def test_a_report_that_was_begun_before_training_is_a_report():
    """Its thread has read the clock, and waits; training begins; then it goes on."""
    times = StepTimes()
    times.training_begins(10.0)
    assert times.reported(9.99, last=False)["wall_s"] == 0.0
    assert times.reported(12.5, last=False)["wall_s"] == 2.5
