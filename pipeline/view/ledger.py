"""Where every trained token went: merged, overwritten, rejected, died, or pending. Pure.

Counted in token-elements (tokens times elements of the fragment they trained), because a delta carries one
fragment only; divided by the elements of the model at the end. For one incarnation of a learner:

    trained   = overwritten + published + unpublished
    published = merged + rejected + offered + missing

`trained`, `overwritten` and `published` are its own last words; `merged` and `rejected` stand on the tape, `offered`
are the headers still on the streams. What is left over in the two lines has an honest name or none:

    rejected     as the tape tells; and `missing`, where refusals became so many that it tells of them no more
    pending      offered; and all that is left over of a live learner, which may still publish it
    died         lost with a learner that was killed, or with the last second of a bus that came back without it
    unaccounted  anything else: published more than trained, merged more than published, or a gap of a learner that
                 left in order while nothing was lost by a fault. It means a bug; the ledger closes if there is none.

Only the surviving history counts: a merge that the bus lost, and that was made again or never, is no merge.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.tape import Committed, Rejected, Rewound, TapeRecord
from diloco.pipeline.view.ledger_inputs import Incarnation, LedgerInputs

CAUSES = ("overwritten", "rejected", "died", "pending", "unaccounted")
"""Why tokens are not merged, as reports name them."""


@dataclass(slots=True)
class Account:
    """One incarnation of a learner, in token-elements unless a name says otherwise."""

    learner: str
    incarnation: str
    left: bool = False
    """It left in order, so its report is complete."""
    live: bool = False
    """The run goes on, and so does it."""
    bus_lost: bool = False
    """The bus was away, or came back at an earlier state: it may have lost what it had acknowledged."""
    tokens: int = 0
    """Trained, in tokens."""
    trained: int = 0
    overwritten: int = 0
    published: int = 0
    merged: int = 0
    rejected: int = 0
    offered: int = 0
    arrived_by_fragment: dict[int, int] = field(default_factory=dict)
    """Tokens of each fragment that arrived at the syncer: merged, rejected, or still on the stream."""
    merged_by_fragment: dict[int, int] = field(default_factory=dict)

    @property
    def unpublished(self) -> int:
        """Trained, and neither overwritten nor published."""
        return self.trained - self.overwritten - self.published

    @property
    def missing(self) -> int:
        """Published, and neither merged nor rejected nor on a stream."""
        return self.published - self.merged - self.rejected - self.offered

    @property
    def pending(self) -> int:
        """May still be merged."""
        rest = max(0, self.unpublished) + max(0, self.missing)
        return self.offered + (rest if self.live and not self.left else 0)

    @property
    def died(self) -> int:
        """Lost with the learner or with the bus."""
        if self.left:
            return max(0, self.missing) if self.bus_lost else 0
        return 0 if self.live else max(0, self.unpublished) + max(0, self.missing)

    @property
    def unaccounted(self) -> int:
        """What the causes leave over; 0 unless there is a bug (two that cancel out still show in `problems`)."""
        known = self.merged + self.overwritten + self.rejected + self.died + self.pending
        return self.trained - known


# --- the surviving history ---------------------------------------------------------------------------


def surviving(
    records: Iterable[TapeRecord], heads: Iterable[tuple[int, int, bytes]] = ()
) -> tuple[list[Committed], bool]:
    """The merges that hold, and whether any was lost with the bus.

    Where a server was replaced while others still wrote to it, records of both histories stand between each other.
    So the merges that lead to a head are followed back from it; only where that is not known their order decides.

    Args:
        records: each fragment's in the order of its tape. One may stand there again: an archive that was begun anew.
        heads: (fragment, version, digest) at the end, as far as known: what does not lead there is lost, also if the
            tape ends before it says so.
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
            if record.base_digest is not None or made_as not in made:  # else it was put back, which is no merge
                made[made_as] = record
            put_back = there is not None and record.base_digest is None and record.digest == there.digest
            if not put_back and there != record:
                cut(record.fragment, record.version)
                histories[record.fragment][record.version] = record
    for fragment, version, digest in heads:
        last = histories.get(fragment, {}).get(version)
        cut(fragment, version + 1 if last is None or last.digest == digest else version)
        if leads := _back_from(made, (fragment, version, digest)):
            history = histories.setdefault(fragment, {})
            lost = lost or any(history.get(at) != one for at, one in leads.items())
            history |= leads
    return [history[version] for _, history in sorted(histories.items()) for version in sorted(history)], lost


def _back_from(made: Mapping[tuple[int, int, bytes], Committed], head: tuple[int, int, bytes]) -> dict[int, Committed]:
    """By version: the merges that led to a head, as far back as they are known without a gap."""
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
    """The account of every incarnation that reported, stands on the tape or has a header on a stream.

    records: the tape of this part of the run, lost history included. In a finished run what is on the streams came too
    late, and is as good as rejected.
    """
    records = list(records)
    commits, lost = surviving(records, ledger_inputs.heads)
    books = _Books(layout)
    for commit in commits:
        for part in commit.contributions:
            books.merge(commit.fragment, part.learner, part.incarnation, part.base_version, part.tokens)
    put = books.refuse if ledger_inputs.finished else books.offer
    for header in ledger_inputs.offers:
        put(header.fragment, header.learner, header.incarnation, header.base_version, header.tokens)
    untold = {record.learner for record in records if isinstance(record, Rejected) and record.last_told}
    for record in records:
        if isinstance(record, Rejected) and record.lost_tokens:
            books.refuse(record.fragment, record.learner, record.incarnation, record.base_version, record.tokens)
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
        # The bus may have lost a report that a killed learner does not repeat: what arrived was trained.
        if key not in reported or (bus_lost and not one.left):
            one.bus_lost = True
            one.published = max(one.published, one.merged + one.rejected + one.offered)
            arrived = -(-(one.overwritten + one.published) // layout.elements)
            one.tokens = max(one.tokens, arrived, *one.arrived_by_fragment.values(), 0)
        one.trained = one.tokens * layout.elements
        if one.learner in untold and one.left and not one.bus_lost:
            one.rejected += max(0, one.missing)
    return [found[key] for key in sorted(found)]


class _Books:
    """What became of the deltas of each incarnation, fragment and base. All deltas on one base are one training:
    a later one holds all that an earlier one did, so only the most that came of it counts."""

    def __init__(self, layout: Layout) -> None:
        self._elements = {fragment.id: fragment.elements for fragment in layout.fragments}
        self._merged: dict[tuple[int, str, str, int], int] = {}
        self._offered: dict[tuple[int, str, str, int], int] = {}
        self._refused: dict[tuple[int, str, str, int], int] = {}

    def merge(self, fragment: int, learner: str, incarnation: str, base: int, tokens: int) -> None:
        """Tokens of a delta on a base are in a merge that holds."""
        self._merged[fragment, learner, incarnation, base] = tokens

    def offer(self, fragment: int, learner: str, incarnation: str, base: int, tokens: int) -> None:
        """A delta's header is on a stream."""
        self._most(self._offered, (fragment, learner, incarnation, base), tokens)

    def refuse(self, fragment: int, learner: str, incarnation: str, base: int, tokens: int) -> None:
        """A delta was refused; another of the same training may have been merged, or may still be."""
        self._most(self._refused, (fragment, learner, incarnation, base), tokens)

    @staticmethod
    def _most(column: dict[tuple[int, str, str, int], int], key: tuple[int, str, str, int], tokens: int) -> None:
        column[key] = max(column.get(key, 0), tokens)

    def close(self) -> dict[Incarnation, Account]:
        """Accounts with what arrived of them."""
        found: dict[Incarnation, Account] = {}
        for key in sorted({*self._merged, *self._offered, *self._refused}):
            fragment, learner, incarnation, _ = key
            merged = self._merged.get(key, 0)
            offered = max(0, self._offered.get(key, 0) - merged)
            rejected = max(0, self._refused.get(key, 0) - merged - offered)
            one = found.setdefault((learner, incarnation), Account(learner, incarnation))
            elements = self._elements[fragment]
            one.merged += merged * elements
            one.offered += offered * elements
            one.rejected += rejected * elements
            for column, tokens in (
                (one.merged_by_fragment, merged),
                (one.arrived_by_fragment, merged + offered + rejected),
            ):
                column[fragment] = column.get(fragment, 0) + tokens
        return found


def problems(parts: Iterable[Account]) -> list[str]:
    """Why the ledger does not close, one line each; empty: every token-element is accounted for."""
    found = []
    for one in parts:
        who = f"{one.learner}/{one.incarnation}"
        if one.unpublished < 0:
            found.append(f"{who}: {-one.unpublished} token-elements overwritten or published more than trained")
        elif one.unpublished > 0 and one.left:
            found.append(f"{who}: {one.unpublished} token-elements neither overwritten nor published, and it has left")
        if one.missing < 0:
            found.append(f"{who}: {-one.missing} token-elements arrived more than it published")
        elif one.missing > 0 and one.left and not one.bus_lost:
            found.append(f"{who}: {one.missing} token-elements published and neither merged nor rejected nor pending")
    return found


# --- sums --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over accounts: tokens = merged + all of lost, in whole tokens; the same in `elements` without rounding."""

    tokens: int
    merged: int
    lost: dict[str, int]
    """By cause (`CAUSES`)."""
    elements: dict[str, int] = field(default_factory=dict)
    """Token-elements: trained, merged and each cause."""


def totals(parts: Iterable[Account], layout: Layout) -> Totals:
    """Sum up, rounded as the status rounds. Each number is less than a token from its exact value, where the ledger
    closes; an unaccounted token-element shows as a token."""
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
    """Tokens of one incarnation that no merge of each fragment holds, whatever the cause."""
    return {
        str(fragment.id): part.tokens - part.merged_by_fragment.get(fragment.id, 0) for fragment in layout.fragments
    }


def in_whole_tokens(exact: Sequence[int], elements: int, most: int) -> list[int]:
    """Token-elements of each kind in tokens of a model of so many elements, all together `most` of them at most.

    Their sums are rounded, not each of them: of what is all accounted for no token is left over.
    """
    sums = [min(most, part // elements) for part in accumulate(exact)]
    return [b - a for a, b in pairwise((0, *sums))]


def whole_tokens(by_fragment: Sequence[int] | Mapping[int, int], layout: Layout) -> int:
    """Tokens of the whole model that tokens of each fragment (by id) amount to."""
    return sum(by_fragment[fragment.id] * fragment.elements for fragment in layout.fragments) // layout.elements
