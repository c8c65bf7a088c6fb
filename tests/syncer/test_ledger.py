"""The ledger: trained = merged + overwritten + rejected + died + pending, to the token-element, whatever happens."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rewound, TapeRecord
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.ledger import Account, accounts, not_merged_by_fragment, problems, surviving, totals
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.tape import read_archive
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import samples
from tests.diloco.test_report import LAYOUT, A, B, C, committed, ledger_inputs, rejected, report
from tests.syncer.test_bus_recovery import flush
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec

# --- accounts ----------------------------------------------------------------------------------------


def test_every_token_of_a_clean_run_is_merged_overwritten_or_rejected() -> None:
    """Nothing is unaccounted for when each fragment's tokens arrived or were overwritten."""
    records = [committed(0, 1, (*A, 80)), committed(1, 1, (*A, 60)), rejected(1, *A, tokens=40, lost=40)]
    overwritten = 20 * 3  # fragment 0: 100 trained, 80 merged
    parts = accounts(records, ledger_inputs(report(*A, tokens=100, overwritten=overwritten)), LAYOUT)
    sums = totals(parts, LAYOUT)
    assert problems(parts) == []
    assert sums.lost == {"overwritten": 6, "rejected": 28, "died": 0, "pending": 0, "unaccounted": 0}
    assert sums.merged == 66  # (80 * 3 + 60 * 7) / 10
    assert sums.elements["merged"] == 660


def test_what_a_killed_learner_had_not_delivered_died() -> None:
    records = [committed(0, 1, (*B, 50)), committed(1, 1, (*B, 30))]
    published = 50 * 3 + 70 * 7  # the delta of fragment 1 never arrived, and 50 tokens of fragment 0 were not published
    parts = accounts(records, ledger_inputs(report(*B, tokens=100, left=False, published=published)), LAYOUT)
    sums = totals(parts, LAYOUT)
    assert sums.lost["died"] == (50 * 3 + 70 * 7) // 10
    assert problems(parts) == []
    assert not_merged_by_fragment(parts[0], LAYOUT) == {"0": 50, "1": 70}


def test_what_a_live_learner_has_not_delivered_is_pending() -> None:
    records = [committed(0, 1, (*B, 50)), committed(1, 1, (*B, 30))]
    given = ledger_inputs(report(*B, tokens=100, left=False), live=frozenset({B}), finished=False)
    assert totals(accounts(records, given, LAYOUT), LAYOUT).lost["pending"] == (50 * 3 + 70 * 7) // 10


def test_a_header_on_a_stream_is_pending_also_when_its_learner_is_dead_or_has_left() -> None:
    """Of a dead learner: fragment 0 has arrived, fragment 1 has not."""
    header = samples.header(B[0], incarnation=B[1], fragment=0, base_version=0, tokens=100)
    given = ledger_inputs(report(*B, tokens=100, left=False), offers=(header, header), finished=False)
    assert totals(accounts([], given, LAYOUT), LAYOUT).lost == {
        "overwritten": 0,
        "rejected": 0,
        "died": 70,
        "pending": 30,
        "unaccounted": 0,
    }
    left = ledger_inputs(report(*B, tokens=100), offers=(header,), finished=False)
    parts = accounts([committed(1, 1, (*B, 100))], left, LAYOUT)
    assert problems(parts) == []
    assert totals(parts, LAYOUT).lost["pending"] == 30


def test_what_was_refused_is_late_unless_it_was_unsound_too() -> None:
    """Of the same training, a later attempt was late: what it adds to the unsound one is late."""
    late = [rejected(0, *A, tokens=60, lost=60, base=base) for base in (7, 8)]
    unsound = rejected(0, *A, tokens=40, lost=40, base=8).model_copy(update={"reason": RefusalReason.NON_FINITE})
    merged = committed(1, 1, (*A, 120))
    (part,) = accounts([merged, *late, unsound], ledger_inputs(report(*A, tokens=120)), LAYOUT)
    assert (part.rejected, part.late) == ((60 + 60) * 3, (60 + 20) * 3)
    header = samples.header(A[0], incarnation=A[1], fragment=0, base_version=0, tokens=100)
    (part,) = accounts([committed(1, 1, (*A, 100))], ledger_inputs(report(*A, tokens=100), offers=(header,)), LAYOUT)
    assert part.late == part.rejected == 300, "it came after the end"


def test_a_header_that_came_after_the_end_is_as_good_as_rejected() -> None:
    header = samples.header(A[0], incarnation=A[1], fragment=0, base_version=0, tokens=100)
    parts = accounts([committed(1, 1, (*A, 100))], ledger_inputs(report(*A, tokens=100), offers=(header,)), LAYOUT)
    assert problems(parts) == []
    assert totals(parts, LAYOUT).lost["rejected"] == 30


def test_a_header_that_is_offered_again_beside_its_merge_is_not_counted_twice() -> None:
    header = samples.header(A[0], incarnation=A[1], fragment=0, base_version=0, tokens=100)
    records = [committed(0, 1, (*A, 100)), committed(1, 1, (*A, 100))]
    [one] = accounts(records, ledger_inputs(report(*A, tokens=100), offers=(header,), finished=False), LAYOUT)
    assert (one.merged, one.offered, one.unaccounted) == (1000, 0, 0)


def test_a_gap_of_a_learner_that_left_in_order_is_a_bug_that_shows() -> None:
    """Even less than a token's worth of it, and also when more arrived than was published."""
    short = accounts(
        [committed(0, 1, (*A, 100)), committed(1, 1, (*A, 99))], ledger_inputs(report(*A, tokens=100)), LAYOUT
    )
    assert totals(short, LAYOUT).lost["unaccounted"] == 1
    assert len(problems(short)) == 1
    records = [committed(0, 1, (*A, 101)), committed(1, 1, (*A, 100))]
    over = accounts(records, ledger_inputs(report(*A, tokens=100)), LAYOUT)
    sums = totals(over, LAYOUT)
    assert sums.lost["unaccounted"] == -1
    assert sums.tokens == 100 == sums.merged + sum(sums.lost.values())
    assert len(problems(over)) == 1


def test_two_gaps_that_cancel_each_other_out_show_all_the_same() -> None:
    """Seven token-elements were never published, and seven more arrived than were published."""
    records = [committed(0, 1, (*A, 100)), committed(1, 1, (*A, 100))]
    parts = accounts(records, ledger_inputs(report(*A, tokens=100, published=993)), LAYOUT)
    assert len(problems(parts)) == 2


def test_the_same_gap_where_the_bus_was_away_died_with_it() -> None:
    records = [committed(0, 1, (*A, 100)), committed(1, 1, (*A, 60))]
    seen = ledger_inputs(report(*A, tokens=100, outages=1))
    rewound = Rewound(fragment=0, version=0, was_version=1, unix_s=1.0)
    for given, tape in ((seen, records), (ledger_inputs(report(*A, tokens=100)), [rewound, *records])):
        parts = accounts(tape, given, LAYOUT)
        assert problems(parts) == []
        assert totals(parts, LAYOUT).lost["died"] == 28
    never_published = accounts(records, ledger_inputs(report(*A, tokens=100, published=999, outages=1)), LAYOUT)
    assert len(problems(never_published)) == 1, "no fault of the bus excuses what a learner did not publish"


def test_a_killed_learner_trained_at_least_what_arrived_of_it() -> None:
    """The bus has lost its last report; where the bus lost nothing, such a gap is a bug."""
    records = [committed(0, 1, (*B, 120)), committed(1, 1, (*B, 110))]
    [one] = accounts(records, ledger_inputs(report(*B, tokens=100, left=False, outages=1)), LAYOUT)
    assert one.tokens == 120
    assert one.died == 10 * 7
    assert problems(accounts(records, ledger_inputs(report(*B, tokens=100, left=False)), LAYOUT))


def test_one_that_never_reported_still_has_an_account() -> None:
    [one] = accounts([rejected(0, *C, tokens=30, lost=30)], ledger_inputs(), LAYOUT)
    assert (one.tokens, one.rejected, problems([one])) == (30, 90, [])


def test_a_refusal_that_lost_nothing_costs_nothing() -> None:
    """The same training came with another delta."""
    [one] = accounts([rejected(0, *A, tokens=50, lost=0)], ledger_inputs(report(*A, tokens=0)), LAYOUT)
    assert (one.rejected, one.unaccounted) == (0, 0)


def test_a_refused_delta_that_came_again_is_counted_once() -> None:
    """The first attempt was refused with 40 tokens, the second merged with 50: nothing is lost by it."""
    records = [rejected(0, *A, tokens=40, lost=40, base=0), committed(0, 1, (*A, 50)), committed(1, 1, (*A, 50))]
    [one] = accounts(records, ledger_inputs(report(*A, tokens=50)), LAYOUT)
    assert (one.rejected, one.unaccounted) == (0, 0)


@pytest.mark.parametrize(("whose", "closes"), [(A, True), (B, False)])
def test_what_the_tape_no_longer_tells_of_is_rejected(whose: tuple[str, str], closes: bool) -> None:
    """Of the learner alone whose refusals became too many: another's gap is a bug."""
    last = rejected(0, *whose, tokens=40, lost=40, base=0).model_copy(update={"last_told": True})
    records = [last, committed(0, 1, (*A, 50))]
    left = ledger_inputs(report(*A, tokens=100), *([] if whose == A else [report(*B, tokens=40)]))
    one = next(part for part in accounts(records, left, LAYOUT) if part.learner == A[0])
    assert (one.unaccounted == 0, problems([one]) == []) == (closes, closes)
    assert not closes or one.trained == one.merged + one.rejected


def test_incarnations_have_accounts_of_their_own() -> None:
    records = [committed(0, 1, (*B, 10)), committed(0, 2, (*C, 20))]
    found = accounts(records, ledger_inputs(report(*B, tokens=10, left=False), report(*C, tokens=20)), LAYOUT)
    assert [(one.incarnation, one.merged) for one in found] == [(B[1], 30), (C[1], 60)]


def test_the_sums_add_up_in_whole_tokens() -> None:
    records = [committed(0, 1, (*A, 33), (*B, 17)), committed(1, 1, (*A, 7)), rejected(1, *B, tokens=11, lost=11)]
    given = ledger_inputs(report(*A, tokens=33, overwritten=26 * 7), report(*B, tokens=40, left=False))
    sums = totals(accounts(records, given, LAYOUT), LAYOUT)
    assert sums.tokens == 73 == sums.merged + sum(sums.lost.values())
    exact = {"merged": sums.merged} | sums.lost
    assert all(abs(10 * tokens - sums.elements[cause]) < 10 for cause, tokens in exact.items())
    assert sums.elements["trained"] == 730 == sum(sums.elements.values()) - 730


# --- the surviving history ---------------------------------------------------------------------------


def versions(records: list[TapeRecord], *heads: tuple[int, int, bytes]) -> tuple[list[tuple[int, int]], bool]:
    commits, lost = surviving(records, heads)
    return [(c.fragment, c.version) for c in commits], lost


def test_a_merge_that_the_bus_lost_is_no_merge() -> None:
    """Whether the tape says so, or the version was made again, or the head is below it at the end."""
    tape: list[TapeRecord] = [committed(0, v, (*A, 10), unix_s=v) for v in (1, 2, 3)]
    again = committed(0, 2, (*B, 10), unix_s=9)
    assert versions(tape) == ([(0, 1), (0, 2), (0, 3)], False)
    rewound = Rewound(fragment=0, version=1, was_version=3, unix_s=4.0)
    assert versions([*tape, rewound]) == ([(0, 1)], True)
    assert versions([*tape, again]) == ([(0, 1), (0, 2)], True)
    assert surviving([*tape, again])[0][-1] == again
    assert versions(tape, (0, 2, bytes(16))) == ([(0, 1), (0, 2)], True)
    assert versions(tape, (0, 3, bytes(15) + b"1")) == ([(0, 1), (0, 2)], True), "the head is another version 3"
    assert versions(tape, (0, 4, bytes(16)), (1, 5, bytes(16))) == ([(0, 1), (0, 2), (0, 3)], False)


def test_of_two_servers_histories_the_one_that_leads_to_the_head_holds_whatever_came_later() -> None:
    """One was cut off and still served some: archives of both syncers, by time, have both between each other."""

    def made(version: int, of: tuple[str, str], server: bytes, base: bytes, unix_s: float) -> Committed:
        one = committed(0, version, (*of, 10), unix_s=unix_s)
        return one.model_copy(update={"digest": server * 16, "base_digest": base * 16})

    first = made(1, A, b"0", b"0", 1)
    old = [made(2, A, b"a", b"0", 2), made(3, A, b"b", b"a", 4), made(4, A, b"c", b"b", 5)]
    new = [made(2, B, b"d", b"0", 3), made(3, B, b"e", b"d", 4.5)]
    tape = sorted([first, *old, *new], key=lambda one: one.unix_s)
    assert surviving(tape, [(0, 3, b"e" * 16)]) == ([first, *new], True)
    assert surviving(tape, [(0, 4, b"c" * 16)]) == ([first, *old], True)
    rewound = Rewound(fragment=0, version=1, was_version=4, unix_s=6.0)
    assert surviving([*tape, rewound], [(0, 3, b"e" * 16)]) == ([first, *new], True)
    assert surviving([first, *new], [(0, 3, b"e" * 16)]) == ([first, *new], False)


def test_an_archive_begun_anew_loses_nothing() -> None:
    tape: list[TapeRecord] = [committed(0, v, (*A, 10), unix_s=v) for v in (1, 2, 3)]
    commits, lost = surviving([*tape, tape[2]])
    assert (len(commits), lost) == (3, False)


# --- whole runs ----------------------------------------------------------------------------------------


class Run:
    """A run in virtual time whose tape is archived, and its books."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.world = VirtualRun(sync_spec(**{"tokens": 10**9} | spec), tape_dir=folder, drain_s=5.0)
        self.world.start_syncer()
        self.folder = folder
        self.layout = layout_of(self.world.spec.tensors)

    def learner(self, number: int, step_s: float = 0.1) -> VirtualLearner:
        return VirtualLearner(f"l{number}", self.world, step_s, f"{number:016x}").start()

    async def drain(self, *learners: VirtualLearner) -> None:
        state = await self.world.bus.read_state()
        await self.world.bus.write_state(state.model_copy(update={"phase": Phase.DRAINING}))
        await self.world.finish(*learners)

    async def books(self) -> list[Account]:
        """Accounts that close: in token-elements one by one, and in whole tokens all together."""
        tape = read_archive(self.folder)
        given = await read_ledger_inputs(self.world.bus, len(self.layout.fragments), 5.0)
        parts = accounts(tape, given, self.layout)
        assert problems(parts) == []
        for one in parts:
            assert one.trained == one.merged + one.overwritten + one.rejected + one.died + one.pending
        sums = totals(parts, self.layout)
        assert sums.tokens == sum(r.tokens for r in given.reports) == sums.merged + sum(sums.lost.values())
        heads = await self.world.heads()
        for head in heads:
            if not any(isinstance(r, Rewound) for r in tape):
                assert head.merged_tokens == sum(one.merged_by_fragment.get(head.fragment, 0) for one in parts)
        return parts


@in_virtual_time
async def test_a_run_without_faults_leaves_nothing_but_overwritten_and_merged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learners = [run.learner(i, 0.1 + 0.03 * i) for i in range(3)]
    await run.world.until_version(5)
    await run.drain(*learners)
    parts = await run.books()
    assert sum(one.died + one.pending for one in parts) == 0
    assert all(one.left and one.merged for one in parts)


@in_virtual_time
async def test_while_a_run_goes_on_the_rest_is_pending(tmp_path: Path) -> None:
    """Until a learner is dead: then what it had not delivered died, and what is on the streams is pending still."""
    run = Run(tmp_path, quorum=2)
    learners = [run.learner(i) for i in range(2)]
    await run.world.until_version(3)
    await asyncio.sleep(0.35)
    parts = await run.books()
    assert all(one.pending > 0 and one.died == 0 for one in parts)
    await run.world.kill_syncer()
    await asyncio.sleep(2.0)
    await end(*learners)
    await asyncio.sleep(6.0)
    parts = await run.books()
    assert all(one.offered == one.pending > 0 for one in parts)
    assert all(one.died > 0 for one in parts)


@pytest.mark.parametrize("told", [True, False])
@in_virtual_time
async def test_a_bus_that_loses_its_last_second(tmp_path: Path, told: bool) -> None:
    """Merges that it lost do not count, what went with them died; also when a new syncer never knew of them."""
    run = Run(tmp_path)
    world = run.world
    learners = [run.learner(i) for i in range(2)]
    await world.until_version(3)
    saved, before = world.store.snapshot(), await world.versions()
    await asyncio.sleep(1.5)
    assert await world.versions() > before
    if not told:
        await world.kill_syncer()
    world.store.restart(saved)
    if not told:
        world.start_syncer()
    await asyncio.sleep(10.0)
    await run.drain(*learners)
    tape = read_archive(run.folder)
    assert any(isinstance(r, Rewound) for r in tape) == told
    everything = sum(len(r.contributions) for r in tape if isinstance(r, Committed))
    commits, lost = surviving(tape)
    assert lost
    assert sum(len(commit.contributions) for commit in commits) < everything
    parts = await run.books()
    assert sum(one.died for one in parts) > 0
    for head in await world.heads():
        assert head.merged_tokens == sum(one.merged_by_fragment[head.fragment] for one in parts)


@pytest.mark.parametrize("syncer_too", [False, True])
@in_virtual_time
async def test_a_bus_that_loses_all_while_everybody_stays(tmp_path: Path, syncer_too: bool) -> None:
    """What was put back counts as merged once; what a new syncer never knew of died; nothing is unaccounted."""
    run = Run(tmp_path)
    world = run.world
    learners = [run.learner(i) for i in range(2)]
    await world.until_version(5)
    if syncer_too:
        await world.kill_syncer()
    flush(world)
    if syncer_too:
        world.start_syncer()
    await asyncio.sleep(40.0)
    await run.drain(*learners)
    tape = read_archive(run.folder)
    assert any(isinstance(r, Rewound) for r in tape)
    everything = sum(len(r.contributions) for r in tape if isinstance(r, Committed))
    commits, lost = surviving(tape)
    assert lost
    assert (sum(len(commit.contributions) for commit in commits) < everything) is syncer_too
    await run.books()


@in_virtual_time
async def test_a_header_that_comes_after_the_end(tmp_path: Path) -> None:
    """The drain's deadline passes a learner by: what it published is not merged, and has a name."""
    run = Run(tmp_path)
    first, late = run.learner(0), run.learner(1)
    await run.world.until_version(2)
    offer = late.bus.offer
    over = asyncio.Event()

    async def much_later(header: Any, renews: str = "") -> str:
        await over.wait()
        answer: str = await offer(header, renews)
        return answer

    late.bus.offer = much_later  # type: ignore[method-assign]
    await asyncio.sleep(1.0)
    state = await run.world.bus.read_state()
    await run.world.bus.write_state(state.model_copy(update={"phase": Phase.DRAINING}))
    await run.world.syncer
    over.set()
    await asyncio.gather(first.task, late.task)
    assert late.left
    parts = {one.learner: one for one in await run.books()}
    assert parts["l1"].rejected > 0
    assert parts["l1"].died == parts["l1"].pending == 0
