"""Wire types of a run: its state, its learners' reports, its events and evaluations, and the upload of version 0."""

from enum import StrEnum
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from diloco.pipeline.errors import RunReplaced
from diloco.pipeline.messages.wire import (
    MAX_FRAGMENTS,
    Count,
    Loss,
    Measure,
    Message,
    Nonce,
    PartyId,
    Samples,
    Seconds,
    Shown,
    StepSeconds,
    Text,
    TokenElements,
    UnixSeconds,
)

Adopted = Annotated[int, Field(ge=-1, le=2**48)]
# A learner's loss curve has at most this many points; once there are more, each point covers twice the time.
MAX_CURVE = 128


class InitialUpload(Message):
    """A complete upload of version 0 by the learner that held the claim `nonce`."""

    max_bytes: ClassVar[int] = 2**10

    learner: PartyId
    nonce: Nonce
    began_unix_s: UnixSeconds | None = None
    """When the run that trained these values began; None: they are a fresh model's."""
    tokens: Count = 0
    """Tokens trained in that run, as far as this learner knows."""
    merged_tokens: Count = 0
    """The part of `tokens` that was merged into the values."""


class LearnerReport(Message):
    """A learner's last report about itself; one per incarnation, kept for the whole run."""

    max_bytes: ClassVar[int] = 2**16
    """`write_report.lua` repeats this number and unpacks nothing larger."""

    learner: PartyId
    incarnation: Nonce
    step: Count
    tokens: Count
    """Tokens that this incarnation has trained in the part of the run that `part_unix_s` names."""
    overwritten: TokenElements
    """Token-elements (tokens x elements of the fragment, summed) trained after a snapshot and lost when the adopted
    global replaced them."""
    published: TokenElements
    """Token-elements in this incarnation's deltas; of several deltas on one base, only the largest counts."""
    versions: Annotated[tuple[Adopted, ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Adopted version of each fragment; -1 before the first."""
    loss: Loss | None
    """Of the newest step."""
    tokens_per_s: Measure
    step_s: StepSeconds
    """Smoothed compute step time."""
    step_s_median: StepSeconds
    blocked_s: Seconds
    """Time the training thread has spent inside `Learner.step`. It leaves out the time that the learner's other threads
    take from training through the GIL and the shared core; `diloco bench cost` measures that too."""
    wall_s: Seconds
    """Time since the first step."""
    joining_s: Seconds = 0.0
    """Time that this incarnation took to join, from `Learner.open` until `wall_s` began to count."""
    earlier: tuple[Seconds, Seconds] = (0.0, 0.0)
    """`wall_s` and `blocked_s` as they were about five minutes before this report; zeros if it was still joining."""
    left: bool
    """True in the last report of a clean leave."""
    host: Shown
    device: Shown
    number: Count = 0
    """Number of this report within the incarnation, so that an older report never replaces a newer one."""
    outages: Count = 0
    """Number of failed calls to the bus: after each the bus may have lost writes that it had acknowledged."""
    threads: tuple[Count, Count] = (0, 0)
    """(Torch threads that train on the CPU, cores that they may use); zeros if another device trains."""
    generation: Count = 0
    """Lower bound on the number of incarnations that have had this learner's id, this one included. The greatest
    generation holds the id."""
    pull_s: StepSeconds = 0.0
    """Smoothed time from the first sight of a head to its pulled global, for a fragment of mean size; 0 if the learner
    has pulled none since it joined."""
    ranks: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Number of processes that train together as this learner."""
    moments: Annotated[str, Field(pattern=r"^[a-z]{0,16}$")] = ""
    """Source of the optimizer's moments, with the values of `Learner.recovered`; "" if not yet reported."""
    curve_s: StepSeconds = 0.0
    """Length of the buckets of `curve`, in seconds."""
    curve: Annotated[str, Field(max_length=6 * MAX_CURVE)] = ""
    """Mean loss in each bucket of time since the first step, as little-endian float32; NaN where there is none. It is
    in each report, so that the curve does not depend on who has read earlier ones. In base64, since
    `write_report.lua` cannot unpack msgpack's binary strings."""
    part_unix_s: UnixSeconds | None = None
    """`RunState.started_unix_s` of the part of the run to which tokens, overwritten and published belong; None if the
    learner has seen no state of the run yet."""


class SeenReport(Message):
    """A report with its age by the server's clock."""

    report: LearnerReport
    age_s: Seconds

    def counts_in(self, state: "RunState | None") -> bool:
        """Return whether its tokens belong to this part of the run; the state already has those of earlier parts."""
        return state is None or self.report.part_unix_s in (None, state.started_unix_s)


class Evaluation(Message):
    """Held-out loss of the global parameters (not of one learner's parameters)."""

    loss: Loss
    """Nats per token."""
    tokens: Count
    """Trained tokens of the run when the heads were read."""
    versions: Annotated[tuple[Adopted, ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    unix_s: UnixSeconds
    elapsed_s: Seconds
    """Seconds since the run's first step."""
    final: bool


# Events of a learner: Redis lacks the scripts that it calls, and Redis has them again.
SCRIPTS_MISSING, SCRIPTS_FOUND = "scripts_missing", "scripts_found"
# Event: a server that had none of the run's keys has some now, because it has taken over or was restarted.
REDIS_CHANGED = "redis_changed"


class Event(Message):
    """Something that happened to a party: `learner_joined`, `learner_left`, `learner_killed` ..."""

    max_bytes: ClassVar[int] = 2**13

    name: Annotated[str, Field(pattern=r"^[a-z_]{1,64}$")]
    who: Shown
    detail: Shown
    unix_s: UnixSeconds


class Phase(StrEnum):
    """The phases of a run, in order; a run moves only forward through them."""

    RUNNING = "running"
    DRAINING = "draining"
    """Learners publish their last deltas, which are merged."""
    CLOSING = "closing"
    """No merge begins any more: the syncers give their fragments back, and one of them ends the run."""
    FINISHED = "finished"

    @property
    def rank(self) -> int:
        """Position of the phase: a state of lower rank never replaces one of higher rank."""
        return list(Phase).index(self)


def moment(unix_s: float) -> str:
    """Format a time like '2026-01-31 12:00:00 UTC'."""
    return f"{np.datetime64(int(unix_s), 's')} UTC".replace("T", " ", 1)


class RunState(Message):
    """The state of the run; written by the lead syncer (owner of fragment 0), or by anyone who asks for a drain."""

    phase: Annotated[Phase, Field(strict=False)]
    tokens: Count
    """Trained tokens of all learners, earlier parts of a resumed run included."""
    base_tokens: Count
    """The part of `tokens` that was trained before this run was resumed."""
    base_merged: Count = 0
    """The part of `base_tokens` that was merged."""
    base_overwritten: TokenElements = 0
    """Token-elements overwritten in the earlier parts of the run."""
    base_rejected: TokenElements = 0
    """Token-elements rejected in the earlier parts of the run."""
    budget_tokens: Count
    started_unix_s: UnixSeconds
    reason: Text
    manifest: Annotated[tuple[tuple[int, bytes], ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Once finished: (version, digest) of every fragment."""
    samples: Samples = ()
    liveness_s: Seconds | None = None
    """Time without a report after which a learner is not waited for; None until the lead has set it."""
    checkpoint: Annotated[str, Field(pattern=r"^(checkpoint-[0-9]{1,19}-[0-9a-f]{8})?$")] = ""
    """Name of the checkpoint that was begun last: syncers save their fragments in a folder of this name."""
    problem: Text = ""
    """Description of what the lead cannot write to a disk or a store; "" if there is no problem."""
    origin_unix_s: UnixSeconds | None = None
    """When the first part of a resumed run began. Learners may load what they saved in any part of the run."""

    set_aside: Count = 0
    """The part of `tokens` from learners whose deltas are repeatedly not finite: it does not count for the budget."""

    @property
    def counted_tokens(self) -> int:
        """Number of tokens that count for the budget."""
        return max(0, self.tokens - self.set_aside)

    @property
    def began_unix_s(self) -> float:
        """When the run's first part began; it distinguishes runs of the same name."""
        return self.origin_unix_s or self.started_unix_s

    def is_done(self, budget_tokens: int | None) -> bool:
        """Return whether the run is finished and `budget_tokens` (None: no budget given) does not extend it."""
        return self.phase is Phase.FINISHED and (budget_tokens or 0) <= self.counted_tokens

    @property
    def has_merged(self) -> bool:
        """True if the heads have trained values, by what syncers have measured rather than by what learners claim."""
        return self.base_tokens > 0 or any(merged for _, _, merged in self.samples)

    def check_same_run(self, known: "RunState | None", name: str, has: str) -> None:
        """Check that this is the run that a party has known until now.

        Args:
            known: the state as that party last saw it; None if it has seen none.
            name: the run's name.
            has: what that party has of the known run, in words for the message.

        Raises:
            RunReplaced: it is another run.
        """
        if known is not None and self.began_unix_s != known.began_unix_s:
            raise RunReplaced(
                f"another run has begun under the name {name!r}, {moment(self.began_unix_s)}, from different "
                f"parameters. {has} the run that began {moment(known.began_unix_s)}, and does not continue in the new "
                "one on its own. To join the new one, restart this party. To get the earlier one back, stop all "
                "parties, delete the new one with `diloco runs delete`, and start a syncer with the --checkpoint-dir "
                "of the earlier one"
            )

    def same_part(self, other: "RunState") -> bool:
        """Return whether both states are of one run that was neither extended nor started from scratch in between."""
        return (self.started_unix_s, self.budget_tokens) == (other.started_unix_s, other.budget_tokens)
