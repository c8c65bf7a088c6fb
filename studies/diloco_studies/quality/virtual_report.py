"""What a learner of virtual time says about itself: its counts, and none of what only real time has. Pure."""

from diloco.pipeline.messages.run import LearnerReport
from diloco.workers.rounds import Rounds


def virtual_report(
    rounds: Rounds, learner: str, incarnation: str, step_s: float, left: bool, tokens_per_s: float = 0.0
) -> LearnerReport:
    """A report whose step time, in virtual seconds, is that of every step."""
    counts = rounds.counts
    return LearnerReport(
        learner=learner,
        incarnation=incarnation,
        step=counts.steps,
        tokens=counts.tokens,
        overwritten=counts.overwritten,
        published=counts.published,
        versions=rounds.versions,
        loss=None,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        step_s_median=step_s,
        blocked_s=0.0,
        wall_s=0.0,
        left=left,
        host="",
        device="cpu",
    )
