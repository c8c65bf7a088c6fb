"""Where every trained token went: merged, overwritten, rejected, died. Pure.

Counted in token-elements (tokens times elements of the fragment they trained), because a delta carries one
fragment only; divided by the elements of the model at the end. For one incarnation of a learner:

    trained = merged + overwritten + rejected + residual

`trained` and `overwritten` are its own last words, `merged` and `rejected` stand on the tape. What is left over
went down with a learner that was killed ("died"); a learner that left in order leaves nothing over, so a
residual of such a one is called "unaccounted" and means a bug.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.fragments import Layout, layout_of
from pipeline.messages import Committed, LearnerReport, Rejected, TapeRecord, TensorSpec


@dataclass(slots=True)
class Account:
    """One incarnation of a learner, in token-elements."""

    learner: str
    incarnation: str
    left: bool = False
    """It left in order, so its report is complete."""
    tokens: int = 0
    """Trained, in tokens."""
    trained: int = 0
    merged: int = 0
    overwritten: int = 0
    rejected: int = 0
    seen_by_fragment: dict[int, int] = field(default_factory=dict)
    """Tokens of each fragment that arrived at the syncer: merged or rejected."""
    merged_by_fragment: dict[int, int] = field(default_factory=dict)

    @property
    def residual(self) -> int:
        """Neither merged nor counted as overwritten or rejected."""
        return self.trained - self.merged - self.overwritten - self.rejected


def accounts(records: Iterable[TapeRecord], reports: Sequence[LearnerReport], layout: Layout) -> list[Account]:
    """The account of every incarnation that reported or stands on the tape."""
    elements = {fragment.id: fragment.elements for fragment in layout.fragments}
    found: dict[tuple[str, str], Account] = {}
    merged: dict[tuple[str, str, int, int], int] = {}
    refused: dict[tuple[str, str, int, int], int] = {}
    """(learner, incarnation, fragment, base version) -> tokens."""

    def account(learner: str, incarnation: str) -> Account:
        return found.setdefault((learner, incarnation), Account(learner, incarnation))

    for record in records:
        if isinstance(record, Committed):
            for part in record.contributions:
                one = account(part.learner, part.incarnation)
                one.merged += part.tokens * elements[record.fragment]
                for column in (one.merged_by_fragment, one.seen_by_fragment):
                    column[record.fragment] = column.get(record.fragment, 0) + part.tokens
                key = (part.learner, part.incarnation, record.fragment, part.base_version)
                merged[key] = part.tokens
        elif isinstance(record, Rejected) and record.lost_tokens:
            key = (record.learner, record.incarnation, record.fragment, record.base_version)
            refused[key] = max(refused.get(key, 0), record.tokens)
    for key, tokens in refused.items():
        # A delta that was refused may have come again with the next attempt: the same training, counted once.
        lost = max(0, tokens - merged.get(key, 0))
        learner, incarnation, fragment, _ = key
        one = account(learner, incarnation)
        one.rejected += lost * elements[fragment]
        one.seen_by_fragment[fragment] = one.seen_by_fragment.get(fragment, 0) + lost
    for report in reports:
        one = account(report.learner, report.incarnation)
        one.left, one.tokens, one.overwritten = report.left, report.tokens, report.overwritten
    for one in found.values():
        if not one.left:
            # A killed learner's last report is up to a second old: what arrived of it since counts as trained too.
            arrived = -(-(one.merged + one.rejected + one.overwritten) // layout.elements)
            one.tokens = max(one.tokens, arrived, *one.seen_by_fragment.values(), 0)
        one.trained = one.tokens * layout.elements
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over accounts, in tokens: tokens = merged + overwritten + rejected + died + unaccounted."""

    tokens: int
    merged: int
    lost: dict[str, int]


def totals(parts: Iterable[Account], layout: Layout) -> Totals:
    """Sum up; rounding goes to `merged`, but an unaccounted token-element shows as at least one token."""
    parts = list(parts)
    unaccounted = sum(part.residual for part in parts if part.left)
    in_elements = {
        "overwritten": sum(part.overwritten for part in parts),
        "rejected": sum(part.rejected for part in parts),
        "died": sum(part.residual for part in parts if not part.left),
    }
    lost = {cause: round(value / layout.elements) for cause, value in in_elements.items()}
    size = -(-abs(unaccounted) // layout.elements)
    lost["unaccounted"] = size if unaccounted > 0 else -size
    tokens = sum(part.tokens for part in parts)
    return Totals(tokens, min(tokens, tokens - sum(lost.values())), lost)


def not_merged_by_fragment(part: Account, layout: Layout) -> dict[str, int]:
    """Tokens of one incarnation that no merge of each fragment holds, whatever the cause."""
    return {
        str(fragment.id): part.tokens - part.merged_by_fragment.get(fragment.id, 0) for fragment in layout.fragments
    }


def share_of_tokens(by_fragment: Sequence[int], tensors: Sequence[TensorSpec]) -> int:
    """Tokens of the whole model that tokens of each fragment (by id) amount to."""
    layout = layout_of(tensors)
    return sum(by_fragment[fragment.id] * fragment.elements for fragment in layout.fragments) // layout.elements
