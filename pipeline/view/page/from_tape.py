"""The page of a run of which only the tape is left: merges, refusals, and the learners in them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import Committed, Rejected, TapeRecord
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.units import count, counted, duration
from diloco.pipeline.view.page.model import Model, PageModel, Poll
from diloco.pipeline.view.page.past import grown
from diloco.pipeline.view.page.verdict import make_verdict
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus, Status, build_status

NOTE = (
    "Made from the tape, which shows a learner only from its first merged delta to its last. Losses, unpublished "
    "training, bytes and memory are not on a tape."
)


@dataclass(slots=True)
class _Life:
    """One incarnation of a learner, as known from its contributions."""

    learner: str
    incarnation: str
    began_s: float
    ended_s: float
    merges: int = 0
    version: int = 0


def _lives(merges: Sequence[Committed]) -> list[_Life]:
    lives: dict[tuple[str, str], _Life] = {}
    for merge in merges:
        for part in merge.contributions:
            began_s = merge.unix_s - merge.merge_s - merge.upload_s - merge.grace_s
            new = _Life(part.learner, part.incarnation, began_s, merge.unix_s)
            life = lives.setdefault((part.learner, part.incarnation), new)
            life.ended_s, life.version = max(life.ended_s, merge.unix_s), merge.version
            life.merges += 1
    return sorted(lives.values(), key=lambda one: one.ended_s)


def _learner(life: _Life, last: bool, now_s: float) -> LearnerStatus:
    return {
        "id": life.learner,
        "incarnation": life.incarnation,
        "live": False,
        "left": last,  # a tape does not say that it died
        "step": life.merges,  # not 0: it has made steps, but the tape does not say how many
        "tokens": 0,
        "tokens_per_s": 0.0,
        "loss": None,
        "step_s": 0.0,
        "wall_s": life.ended_s - life.began_s,
        "versions": [life.version],
        "age_s": now_s - life.ended_s,
    }


def _fragment(last: Committed) -> FragmentStatus:
    return {
        "id": last.fragment,
        "version": last.version,
        "interval": last.interval,
        "asked_interval": 0,
        "digest": last.digest.hex(),
        "merged_deltas": 0,
        "merged_tokens": 0,
        "rejected_tokens": 0,
        "refused": {},
        "averaged": False,
        "window": {
            "state": "idle",
            "attempt": 0,
            "members": [],
            "expected": 0,
            "quorum": 0,
            "reason": last.reason,
            "suspected": [],
            "deadline_in_s": None,
            "merge_s": last.merge_s,
            "outer_s": 0.0,
        },
    }


def model_of_tape(name: str, records: Sequence[TapeRecord], layout: Layout | None) -> Model | None:
    """Return the page's model; None if nothing was merged.

    records: each fragment's in order. layout: None if unknown; then all fragments count alike.
    """
    merges = [one for one in records if isinstance(one, Committed) and one.contributions]
    if not merges:
        return None
    last = {one.fragment: one for one in merges}
    lives = _lives(merges)
    newest = {life.learner: life for life in lives}
    now_s, begun_s = max(one.unix_s for one in records), min(one.began_s for one in lives)
    shares = _shares(layout, last)
    sums = {kind: sum(by for _, by in steps) for kind, steps in grown(records, (), shares).items()}
    status: Status = build_status(name, None, None, [], [], None, [], now_s)
    refused: dict[str, int] = {}
    for record in records:
        if isinstance(record, Rejected):
            refused[record.reason.value] = refused.get(record.reason.value, 0) + 1
    status |= {
        "phase": Phase.FINISHED.value,
        "reason": "according to its tape",
        "tokens": round(sums["merged"] + sums["rejected"]),
        "merged_tokens": round(sums["merged"]),
        "tokens_lost": {"overwritten": 0, "rejected": round(sums["rejected"]), "died": 0, "pending": 0},
        "outer_steps": int(sums["merges"]),
        "refused": refused,
        "elapsed_s": now_s - begun_s,
        "learners": [_learner(life, life is newest[life.learner], now_s) for life in lives],
        "fragments": [_fragment(last[p]) for p in sorted(last)],
    }
    model = PageModel(name)
    model.see(Poll(now_s=now_s, status=status, shares=shares, began_s=begun_s, records=records))
    model.patch()
    text = (
        f"According to its tape, the run made {counted(len(merges), 'merge')} of {counted(len(newest), 'learner')} in "
        f"{duration(now_s - begun_s)}: {count(sums['merged'])} tokens merged, {count(sums['rejected'])} rejected."
    )
    return model.snapshot() | {"notes": [NOTE], "sentence": make_verdict("over", text)}


def _shares(layout: Layout | None, last: Mapping[int, Committed]) -> dict[int, float]:
    """Return each fragment's share of the model."""
    if layout is None:
        return {fragment: 1 / len(last) for fragment in last}
    return {one.id: one.elements / layout.elements for one in layout.fragments}
