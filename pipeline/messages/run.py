"""Wire types of a run: its state, its learners' reports, events, evaluations, the upload of version 0."""

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


class InitialUpload(Message):
    """A complete upload of version 0 by the learner that held the claim `nonce`."""

    max_bytes: ClassVar[int] = 2**10

    learner: PartyId
    nonce: Nonce
    began_unix_s: UnixSeconds | None = None
    """When the run began that these values are of; None: they are a fresh model's."""
    tokens: Count = 0
    """Trained in that run, as far as this learner knows."""
    merged_tokens: Count = 0
    """Of these, tokens merged into the values."""


class LearnerReport(Message):
    """A learner's last word about itself; one per incarnation, kept for the run."""

    max_bytes: ClassVar[int] = 2**16
    """Also in `write_report.lua`, which unpacks nothing larger."""

    learner: PartyId
    incarnation: Nonce
    step: Count
    tokens: Count
    """Tokens that this incarnation has trained in the part of the run that `part_unix_s` names."""
    overwritten: TokenElements
    """Token-elements (tokens x elements of the fragment, summed) trained past a snapshot and replaced."""
    published: TokenElements
    """Token-elements in deltas of this incarnation; of several on one base, the most."""
    versions: Annotated[tuple[Adopted, ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Adopted version of each fragment; -1 before the first."""
    loss: Loss | None
    tokens_per_s: Measure
    step_s: StepSeconds
    """Smoothed compute step time."""
    step_s_median: StepSeconds
    blocked_s: Seconds
    """Time the training thread has spent inside `Learner.step`. What other threads of the learner take from it, by the
    interpreter's lock and on its core, is not in here: `diloco bench cost` measures that too."""
    wall_s: Seconds
    """Time since the first step."""
    left: bool
    """True in the last report of a clean leave."""
    host: Shown
    device: Shown
    number: Count = 0
    """Counts this incarnation's reports, so that an older one never replaces a newer."""
    outages: Count = 0
    """Calls to the bus that failed: it may have lost what it had acknowledged."""
    threads: tuple[Count, Count] = (0, 0)
    """Torch threads that train on the CPU, and cores that they may use; zeros where another device trains."""
    generation: Count = 0
    """How many have had this learner's id, this incarnation included, at least: the greatest one holds it."""
    pull_s: StepSeconds = 0.0
    """Smoothed time from its first sight of a head to that global pulled, of a fragment of mean size; 0: it has pulled
    none since it joined."""
    ranks: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Processes that train as this learner."""
    moments: Annotated[str, Field(pattern=r"^[a-z]{0,16}$")] = ""
    """Where its optimizer's came from, as `Learner.recovered`; "": it has not said."""
    part_unix_s: UnixSeconds | None = None
    """`RunState.started_unix_s` of the part of the run that tokens, overwritten and published are of; None: it has
    seen no state of the run yet."""


class SeenReport(Message):
    """A report with its age by the server's clock."""

    report: LearnerReport
    age_s: Seconds

    def counts_in(self, state: "RunState | None") -> bool:
        """Whether its tokens are of this part of the run: those of an earlier part are in the state's already."""
        return state is None or self.report.part_unix_s in (None, state.started_unix_s)


class Evaluation(Message):
    """Held-out loss of the global parameters (not of one learner's)."""

    loss: Loss
    """Nats per token."""
    tokens: Count
    """Trained tokens of the run when the heads were read."""
    versions: Annotated[tuple[Adopted, ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    unix_s: UnixSeconds
    elapsed_s: Seconds
    """Since the run's first step."""
    final: bool


SCRIPTS_MISSING, SCRIPTS_FOUND = "scripts_missing", "scripts_found"
"""Events of a learner that does not find the scripts at Redis that it calls, and that does again."""
REDIS_CHANGED = "redis_changed"
"""Event: a server has some of the run's keys that had none: another one has taken over, or one was restarted."""


class Event(Message):
    """Something that happened to a party: `learner_joined`, `learner_left`, `learner_killed` ..."""

    max_bytes: ClassVar[int] = 2**13

    name: Annotated[str, Field(pattern=r"^[a-z_]{1,64}$")]
    who: Shown
    detail: Shown
    unix_s: UnixSeconds


class Phase(StrEnum):
    """A run only moves forward through these."""

    RUNNING = "running"
    DRAINING = "draining"
    """Learners publish their last deltas, which are merged."""
    CLOSING = "closing"
    """No merge begins any more: the syncers give their fragments back, and one of them ends the run."""
    FINISHED = "finished"

    @property
    def rank(self) -> int:
        """Order: a state of lower rank never replaces one of higher rank."""
        return list(Phase).index(self)


def moment(unix_s: float) -> str:
    """'2026-01-31 12:00:00 UTC'."""
    return f"{np.datetime64(int(unix_s), 's')} UTC".replace("T", " ", 1)


class RunState(Message):
    """Where the run stands; written by the lead syncer (owner of fragment 0), or to ask for a drain."""

    phase: Annotated[Phase, Field(strict=False)]
    tokens: Count
    """Trained tokens of all learners, earlier parts of a resumed run included."""
    base_tokens: Count
    """Of those, tokens trained before this run was resumed."""
    base_merged: Count = 0
    """Of these, tokens merged."""
    base_overwritten: TokenElements = 0
    base_rejected: TokenElements = 0
    """Of the earlier parts, both in token-elements."""
    budget_tokens: Count
    started_unix_s: UnixSeconds
    reason: Text
    manifest: Annotated[tuple[tuple[int, bytes], ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Once finished: (version, digest) of every fragment."""
    samples: Samples = ()
    liveness_s: Seconds | None = None
    """A learner not heard from for this long is not waited for; None: the lead has not said yet."""
    checkpoint: Annotated[str, Field(pattern=r"^(checkpoint-[0-9]{1,19}-[0-9a-f]{8})?$")] = ""
    """Name of the checkpoint that was begun last: syncers save their fragments in a folder of this name."""
    problem: Text = ""
    """What the lead cannot write to a disk or a store, in words; "": it can."""
    origin_unix_s: UnixSeconds | None = None
    """Of a resumed run: when its first part began. What learners saved in any of its parts is their own."""

    set_aside: Count = 0
    """Of `tokens`, those of learners whose deltas are not finite, again and again: they bring the run no further."""

    @property
    def counted_tokens(self) -> int:
        """Those that do: of the budget."""
        return max(0, self.tokens - self.set_aside)

    @property
    def began_unix_s(self) -> float:
        """When the run's first part began: other runs of the same name have another."""
        return self.origin_unix_s or self.started_unix_s

    def is_done(self, budget_tokens: int | None) -> bool:
        """Whether the run is finished, and no larger budget than it has trained is given; None: none is."""
        return self.phase is Phase.FINISHED and (budget_tokens or 0) <= self.counted_tokens

    @property
    def has_merged(self) -> bool:
        """Whether its heads have trained values: by what syncers have seen, not by what learners say."""
        return self.base_tokens > 0 or any(merged for _, _, merged in self.samples)

    def check_same_run(self, known: "RunState | None", name: str, has: str) -> None:
        """See that this is the run that a party has known until now.

        known: its state as that party last saw it; None: it has seen none. has: what that party has of it, in words.

        Raises:
            RunReplaced: it is another one.
        """
        if known is not None and self.began_unix_s != known.began_unix_s:
            raise RunReplaced(
                f"another run has begun under the name {name!r}, {moment(self.began_unix_s)}, from other parameters. "
                f"{has} the run that began {moment(known.began_unix_s)}, and does not go on in the new one by itself. "
                "To take part in the new one, start it again. To have the earlier one back: end everybody, `diloco "
                "runs delete` the new one, and start a syncer with the --checkpoint-dir of the earlier one"
            )

    def same_part(self, other: "RunState") -> bool:
        """Whether both are of one run that was neither extended nor begun anew in between."""
        return (self.started_unix_s, self.budget_tokens) == (other.started_unix_s, other.budget_tokens)
