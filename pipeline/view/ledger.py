"""The token ledger: whether each trained token was merged, overwritten, rejected, died, or is pending. Pure.

The unit is token-elements, and the balance is for one incarnation of a learner (docs/explanation/ledger.md):

    trained   = overwritten + published + unpublished
    published = merged + rejected + offered + missing

The two remainders, `unpublished` and `missing`, are explained: as pending, if their learner lives; as died; as
rejected, if there were too many refusals for the tape to list; else they are `unaccounted`, which means a bug.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import LATE, Committed, Contribution, DeltaHeader, Rejected, Rewound, TapeRecord
from diloco.pipeline.view.ledger_inputs import Incarnation, LedgerInputs

# Why tokens are not merged, by the names in reports.
CAUSES = ("overwritten", "rejected", "died", "pending", "unaccounted")
Fate = Literal["merged", "offered", "refused", "late"]


@dataclass(slots=True)
class Account:
    """The account of one incarnation of a learner, in token-elements unless stated otherwise."""

    learner: str
    incarnation: str
    left: bool = False
    """It left in order, so its last report is complete."""
    live: bool = False
    """The run is not finished, and the learner is still in it."""
    bus_lost: bool = False
    """The bus was unavailable, or came back at an earlier state, so it may have lost acknowledged writes."""
    tokens: int = 0
    """Trained, in tokens."""
    trained: int = 0
    overwritten: int = 0
    published: int = 0
    merged: int = 0
    rejected: int = 0
    late: int = 0
    """Part of `rejected`: refused only because it came too late (`LATE`)."""
    offered: int = 0
    arrived_by_fragment: dict[int, int] = field(default_factory=dict)
    """By fragment: tokens that reached the syncer, that is, were merged, rejected, or are still on the stream."""
    merged_by_fragment: dict[int, int] = field(default_factory=dict)

    @property
    def unpublished(self) -> int:
        """Trained, but neither overwritten nor published."""
        return self.trained - self.overwritten - self.published

    @property
    def missing(self) -> int:
        """Published, but neither merged nor rejected nor on a stream."""
        return self.published - self.merged - self.rejected - self.offered

    @property
    def pending(self) -> int:
        """Part that may still be merged."""
        rest = max(0, self.unpublished) + max(0, self.missing)
        return self.offered + (rest if self.live and not self.left else 0)

    @property
    def died(self) -> int:
        """Part that was lost with the learner or with the bus."""
        if self.left:
            return max(0, self.missing) if self.bus_lost else 0
        return 0 if self.live else max(0, self.unpublished) + max(0, self.missing)

    @property
    def unaccounted(self) -> int:
        """The remainder after all causes: 0 unless there is a bug. (Bugs that cancel out still show in `problems`.)"""
        known = self.merged + self.overwritten + self.rejected + self.died + self.pending
        return self.trained - known


# --- the surviving history ---------------------------------------------------------------------------


def surviving(
    records: Iterable[TapeRecord], heads: Iterable[tuple[int, int, bytes]] = ()
) -> tuple[list[Committed], bool]:
    """Return the merges that are part of the current history, and whether the bus lost any.

    When a server was replaced while parties still wrote to the old one, records of both histories are interleaved on
    the tape. So the merges that lead to a head are followed backwards from it. Only where a head is unknown, the order
    decides.

    Args:
        records: each fragment's in the order of its tape. Repeated records are possible, if an archive was started
            again.
        heads: (fragment, version, digest) at the end, as far as known. Merges that do not lead there are lost, even if
            the tape ends before it says so.
    """
    histories: dict[int, dict[int, Committed]] = {}
    made: dict[tuple[int, int, bytes], Committed] = {}
    lost = False

    def cut(fragment: int, version: int) -> None:
        nonlocal lost
        history = histories.setdefault(fragment, {})
        for late in [at for at in history if at >= version]:
            del history[late]
            lost = True

    for record in records:
        if isinstance(record, Rewound):
            cut(record.fragment, record.version + 1)
            lost = True
        elif isinstance(record, Committed):
            there = histories.setdefault(record.fragment, {}).get(record.version)
            made_as = record.fragment, record.version, record.digest
            # A repeated record without a base comes from a syncer that put the version back, which is not a merge.
            if record.base_digest is not None or made_as not in made:
                made[made_as] = record
            put_back = there is not None and record.base_digest is None and record.digest == there.digest
            if not put_back and there != record:
                cut(record.fragment, record.version)
                histories[record.fragment][record.version] = record
    for fragment, version, digest in heads:
        last = histories.get(fragment, {}).get(version)
        cut(fragment, version + 1 if last is None or last.digest == digest else version)
        if leads := _merges_to(made, (fragment, version, digest)):
            history = histories.setdefault(fragment, {})
            lost = lost or any(history.get(at) != one for at, one in leads.items())
            history |= leads
    return [history[version] for _, history in sorted(histories.items()) for version in sorted(history)], lost


def _merges_to(made: Mapping[tuple[int, int, bytes], Committed], head: tuple[int, int, bytes]) -> dict[int, Committed]:
    """Return by version the merges that led to a head, as far back as they are known without a gap."""
    found: dict[int, Committed] = {}
    fragment, version, digest = head
    while (one := made.get((fragment, version, digest))) is not None:
        found[version] = one
        if one.base_digest is None:
            break
        version, digest = version - 1, one.base_digest
    return found


# --- accounts ----------------------------------------------------------------------------------------


def accounts(records: Iterable[TapeRecord], ledger_inputs: LedgerInputs, layout: Layout) -> list[Account]:
    """Return the account of every incarnation that has a report, a record on the tape, or a header on a stream.

    records: the tape of this part of the run, lost history included. In a finished run, the headers on the streams came
    too late and count as rejected.
    """
    records = list(records)
    commits, lost = surviving(records, ledger_inputs.heads)
    books = _DeltaFates(layout)
    for commit in commits:
        for part in commit.contributions:
            books.note("merged", commit.fragment, part)
    for header in ledger_inputs.offers:
        books.note("late" if ledger_inputs.finished else "offered", header.fragment, header)
    untold = {record.learner for record in records if isinstance(record, Rejected) and record.last_told}
    for record in records:
        if isinstance(record, Rejected) and record.lost_tokens:
            books.note("late" if record.reason in LATE else "refused", record.fragment, record)
    found = books.close()
    bus_lost = lost or any(report.outages for report in ledger_inputs.reports)
    reported = set()
    for report in ledger_inputs.reports:
        key = report.learner, report.incarnation
        one = found.setdefault(key, Account(*key))
        reported.add(key)
        one.left, one.live = report.left, key in ledger_inputs.live
        one.tokens, one.overwritten, one.published = report.tokens, report.overwritten, report.published
        one.bus_lost = lost or report.outages > 0
    for key, one in found.items():
        # The bus may have lost a report, and a killed learner does not repeat it. At least what arrived was trained.
        if key not in reported or (bus_lost and not one.left):
            one.bus_lost = True
            one.published = max(one.published, one.merged + one.rejected + one.offered)
            arrived = -(-(one.overwritten + one.published) // layout.elements)
            one.tokens = max(one.tokens, arrived, *one.arrived_by_fragment.values(), 0)
        one.trained = one.tokens * layout.elements
        if one.learner in untold and one.left and not one.bus_lost:
            one.rejected += max(0, one.missing)
    return [found[key] for key in sorted(found)]


class _DeltaFates:
    """The fate of deltas by fragment, incarnation and base.

    All deltas of an incarnation on one base contain the same training: a later one includes an earlier one. So only the
    largest number of tokens counts, and merged takes precedence over offered, and offered over rejected.
    """

    def __init__(self, layout: Layout) -> None:
        self._elements = {fragment.id: fragment.elements for fragment in layout.fragments}
        self._tokens: defaultdict[tuple[int, str, str, int], Counter[Fate]] = defaultdict(Counter)

    def note(self, fate: Fate, fragment: int, delta: Contribution | DeltaHeader | Rejected) -> None:
        """Count a delta as part of a surviving merge, as a header on a stream, or as refused."""
        found = self._tokens[fragment, delta.learner, delta.incarnation, delta.base_version]
        found[fate] = max(found[fate], delta.tokens)

    def close(self) -> dict[Incarnation, Account]:
        """Return the accounts, with what arrived from each incarnation."""
        found: dict[Incarnation, Account] = {}
        for (fragment, learner, incarnation, _), tokens_by_fate in sorted(self._tokens.items()):
            merged = tokens_by_fate["merged"]
            offered = max(0, tokens_by_fate["offered"] - merged)
            refused = max(0, tokens_by_fate["refused"] - merged - offered)
            rejected = max(refused, tokens_by_fate["late"] - merged - offered)
            one = found.setdefault((learner, incarnation), Account(learner, incarnation))
            elements = self._elements[fragment]
            one.merged += merged * elements
            one.offered += offered * elements
            one.rejected += rejected * elements
            one.late += (rejected - refused) * elements
            for column, tokens in (
                (one.merged_by_fragment, merged),
                (one.arrived_by_fragment, merged + offered + rejected),
            ):
                column[fragment] = column.get(fragment, 0) + tokens
        return found


def problems(parts: Iterable[Account]) -> list[str]:
    """Return why the ledger does not close, one line each; empty if every token-element is accounted for."""
    found = []
    for one in parts:
        who = f"{one.learner}/{one.incarnation}"
        if one.unpublished < 0:
            found.append(f"{who}: {-one.unpublished} more token-elements overwritten or published than trained")
        elif one.unpublished > 0 and one.left:
            found.append(
                f"{who}: {one.unpublished} token-elements neither overwritten nor published, although it has left"
            )
        if one.missing < 0:
            found.append(f"{who}: {-one.missing} more token-elements arrived than it published")
        elif one.missing > 0 and one.left and not one.bus_lost:
            found.append(f"{who}: {one.missing} token-elements published, but neither merged nor rejected nor pending")
    return found


# --- sums --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over accounts in whole tokens, with tokens = merged + all of lost; in `elements` without rounding."""

    tokens: int
    merged: int
    lost: dict[str, int]
    """By cause (`CAUSES`)."""
    elements: dict[str, int] = field(default_factory=dict)
    """Token-elements: trained, merged and each cause."""


def totals(parts: Iterable[Account], layout: Layout) -> Totals:
    """Sum up accounts, rounded in the same way as the status.

    If the ledger closes, each number is less than a token from its exact value. A single unaccounted token-element
    shows as one token.
    """
    parts, size = list(parts), layout.elements
    tokens = sum(part.tokens for part in parts)
    exact = {cause: sum(getattr(part, cause) for part in parts) for cause in ("merged", *CAUSES)}
    gap = exact["unaccounted"]
    shown = -(-abs(gap) // size) * (1 if gap > 0 else -1)
    *known, _, _ = exact.values()
    merged, *lost = in_whole_tokens(known, size, tokens - shown)
    pending = tokens - shown - merged - sum(lost)
    return Totals(
        tokens,
        merged,
        dict(zip(CAUSES, (*lost, pending, shown), strict=True)),
        {"trained": tokens * size, **exact},
    )


def not_merged_by_fragment(part: Account, layout: Layout) -> dict[str, int]:
    """Return for each fragment the tokens of one incarnation that no merge holds, whatever the cause."""
    return {
        str(fragment.id): part.tokens - part.merged_by_fragment.get(fragment.id, 0) for fragment in layout.fragments
    }


def in_whole_tokens(exact: Sequence[int], elements: int, most: int) -> list[int]:
    """Convert token-elements of several kinds to tokens of a model with `elements` elements, at most `most` together.

    The running sums are rounded, not each number, so no token is left over where everything is accounted for.
    """
    sums = [min(most, part // elements) for part in accumulate(exact)]
    return [b - a for a, b in pairwise((0, *sums))]


def whole_tokens(by_fragment: Sequence[int] | Mapping[int, int], layout: Layout) -> int:
    """Return how many tokens of the whole model the tokens of each fragment (by id) amount to."""
    return sum(by_fragment[fragment.id] * fragment.elements for fragment in layout.fragments) // layout.elements
