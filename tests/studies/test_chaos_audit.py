"""The audit of a struck run finds each broken promise, and nothing where all were kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import NOTHING_MERGED, Committed, Contribution, Rewound
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.messages.shards import Shard, ShardQueue
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco_studies.strikes.audit import CHECKS, Ending, Evidence, ShardNote, audit
from diloco_studies.strikes.footprint import MORE, Life
from diloco_studies.strikes.growth import KeyUsage, KindUsage, Scale, bounds
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.schedule import Manner, Party
from tests import samples

LAYOUT = layout_of([TensorSpec(name="a", shape=(10,), dtype="float32", rule="rda", fragment=0)])
A, B = ("a", "a" * 8), ("b", "b" * 8)
SCALE = Scale(learners=2, fragments=1, chunks=1, lives=3, syncer_lives=2, replaced=4, shards=2)


def digest(version: int, branch: int = 0) -> bytes:
    return bytes([version, branch]) + bytes(14)


def merged(version: int, *parts: tuple[tuple[str, str], int, int], at: float, branch: int = 0) -> Committed:
    """parts: (learner and incarnation, base version, tokens)."""
    who = {"reason": "", "syncer": "s", "unix_s": at}
    installed = Committed(fragment=0, version=version, digest=digest(version, branch), **who, **NOTHING_MERGED)
    told = tuple(
        Contribution(
            learner=who[0],
            incarnation=who[1],
            base_version=base,
            attempt=0,
            steps=1,
            tokens=tokens,
            weight=1 / len(parts),
            norm=1.0,
        )
        for who, base, tokens in parts
    )
    return installed.model_copy(update={"contributions": told, "base_digest": digest(version - 1) if version else None})


def report(who: tuple[str, str], tokens: int) -> LearnerReport:
    return samples.report(
        who[0], incarnation=who[1], tokens=tokens, published=tokens * 10, versions=(2,), left=True, step=tokens
    )


def note(index: int, who: tuple[str, str], read: bool, at: float) -> ShardNote:
    return ShardNote(unix_s=at, consumer=".".join(who), epoch=0, index=index, read=read)


HISTORY = (merged(0, at=10.0), merged(1, (A, 0, 50), (B, 0, 50), at=11.0), merged(2, (A, 1, 30), (B, 1, 20), at=12.0))
GOOD = Evidence(
    layout=LAYOUT,
    records=HISTORY,
    tape=HISTORY,
    ledger_inputs=LedgerInputs(reports=(report(A, 80), report(B, 70)), heads=((0, 2, digest(2)),)),
    shards=(note(0, A, False, 10), note(1, B, False, 10), note(0, A, True, 12)),
    queue=ShardQueue(epochs=1, open=((Shard(epoch=0, index=1, start=8, stop=16), 3),)),
    shards_per_epoch=2,
    key_usage=(KeyUsage(11.0, 1000, {"deltas": KindUsage(1, 2, 300), "head": KindUsage(1, 12, 300)}),),
    scale=SCALE,
)


def killed(party: Party, name: str, began_s: float, ended_s: float) -> Struck:
    return Struck(Manner.KILL, party, name, began_s, ended_s)


def broken(**given: Any) -> list[str]:
    """Promises that evidence which differs in this breaks."""
    return [violation.promise for violation in audit(replace(GOOD, **given))]


def lived(**took: Callable[[float], float]) -> Life:
    """A process of ten minutes, that takes the same all the time unless told otherwise (by its age in s)."""
    flat = {what: (lambda at: 100.0) for what in MORE} | took
    return Life("syncer", [(at, {what: of(at) for what, of in flat.items()}) for at in range(0, 605, 5)])


def test_nothing_is_found_where_every_promise_was_kept() -> None:
    assert audit(GOOD) == []


def _ledger_inputs(**given: Any) -> LedgerInputs:
    return replace(GOOD.ledger_inputs, **given)


AGAIN = (merged(2, (A, 1, 30), at=13.0, branch=1), *HISTORY[3:])
REWOUND = Rewound(fragment=0, version=1, was_version=2, unix_s=12.6)

BROKEN: dict[str, list[Callable[[], list[str]]]] = {
    "a version rises by exactly 1": [
        lambda: broken(records=(HISTORY[0], HISTORY[2])),
        lambda: broken(records=(*HISTORY, merged(2, at=13.0, branch=1)), ledger_inputs=_ledger_inputs(heads=())),
        lambda: broken(records=(*HISTORY, REWOUND), ledger_inputs=_ledger_inputs(heads=((0, 1, digest(1)),))),
        lambda: broken(ledger_inputs=_ledger_inputs(heads=((0, 3, digest(3)),))),
        lambda: broken(ledger_inputs=_ledger_inputs(heads=((0, 2, digest(2, 1)),))),
        lambda: broken(records=(*HISTORY[:2], HISTORY[2].model_copy(update={"base_digest": digest(1, 1)}))),
    ],
    "a version has one digest on the tape that survived": [
        lambda: broken(tape=(*HISTORY, merged(2, (A, 1, 30), at=13.0, branch=1))),
        lambda: broken(  # whatever the servers went through
            tape=(*HISTORY, merged(1, at=13.0, branch=1)), strikes=(killed(Party.PRIMARY, "redis-0", 11.5, 13.5),)
        ),
    ],
    "nothing is merged twice": [
        lambda: broken(records=(*HISTORY[:2], merged(2, (A, 0, 50), (B, 1, 20), at=12.0))),
    ],
    "every token is accounted for": [
        lambda: broken(ledger_inputs=_ledger_inputs(reports=(report(A, 90), report(B, 70)))),
        lambda: broken(ledger_inputs=_ledger_inputs(reports=(report(A, 70), report(B, 70)))),
    ],
    "every shard is read to its end, once but for strikes": [
        lambda: broken(shards=GOOD.shards[:2]),
        lambda: broken(shards=(*GOOD.shards, note(0, B, True, 13))),
        lambda: broken(shards=(*GOOD.shards, note(1, B, True, 13))),
    ],
    "no key or stream grows without bound": [
        lambda: broken(key_usage=(KeyUsage(11.0, 0, {"deltas": KindUsage(1, 10_000, 0)}),)),
        lambda: broken(key_usage=(*GOOD.key_usage, KeyUsage(12.0, 0, {"delta": KindUsage(500, 500, 0)}))),
        lambda: broken(key_usage=(KeyUsage(11.0, 0, {"forgotten": KindUsage(1, 1, 0)}),)),
    ],
    "no process grows without bound": [
        lambda: broken(lives=(lived(MB=lambda at: 100 + at / 10),)),
        lambda: broken(lives=(lived(descriptors=lambda at: 20 + at / 15),)),
        lambda: broken(lives=(lived(), lived(threads=lambda at: 9 * (1 + (at > 500))))),
    ],
    "nobody ends but by a strike or in order": [lambda: broken(endings=(Ending("learner-0", "ended with status 1"),))],
    "no process is left over": [lambda: broken(left_running=("python (pid 1)",))],
    "the run comes to its end": [lambda: broken(ledger_inputs=_ledger_inputs(finished=False))],
}


def test_every_promise_of_the_audit_can_be_broken_here() -> None:
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize(
    ("promise", "number"), [(promise, number) for promise, ways in BROKEN.items() for number in range(len(ways))]
)
def test_a_broken_promise_is_found_and_no_other_one_is_named(promise: str, number: int) -> None:
    assert set(BROKEN[promise][number]()) >= {promise}
    if promise not in ("a version rises by exactly 1", "nothing is merged twice"):  # the ledger misses those tokens
        assert set(BROKEN[promise][number]()) == {promise}


# --- what a lost second excuses ------------------------------------------------------------------------


RESTARTED = killed(Party.REDIS, "redis", 12.2, 12.5)
LOST = (*HISTORY, REWOUND, merged(2, (A, 1, 35), (B, 1, 20), at=13.0, branch=1))
OTHER = LedgerInputs(
    reports=tuple(one.model_copy(update={"outages": 1}) for one in (report(A, 85), report(B, 70))),
    heads=((0, 2, digest(2, 1)),),
)


def test_a_version_may_be_made_again_when_the_bus_lost_its_last_second() -> None:
    """With the record of the rewind, and without: the owner that saw the lost version may have died too."""
    for records in (LOST, tuple(one for one in LOST if one is not REWOUND)):
        assert broken(records=records, ledger_inputs=OTHER, strikes=(RESTARTED,), tail_lost=True) == []


@pytest.mark.parametrize(
    ("strikes", "tail_lost"),
    [((RESTARTED,), False), ((), True), ((killed(Party.REDIS, "redis", 13.2, 13.5),), True)],
    ids=["all was synced", "Redis was not killed", "it was killed later"],
)
def test_a_version_is_not_made_again_for_any_other_reason(strikes: tuple[Struck, ...], tail_lost: bool) -> None:
    found = broken(records=LOST, ledger_inputs=OTHER, strikes=strikes, tail_lost=tail_lost)
    assert found == ["a version rises by exactly 1"]


def test_what_only_a_lost_history_merged_may_be_merged_again() -> None:
    """And what survived may not, whatever was lost after it."""
    records = (*LOST[:-1], merged(2, (A, 0, 50), at=13.0, branch=1))
    found = broken(records=records, ledger_inputs=OTHER, strikes=(RESTARTED,), tail_lost=True)
    assert "nothing is merged twice" in found


# --- what a failover excuses ---------------------------------------------------------------------------


def cut_off(began_s: float, ended_s: float) -> Struck:
    return Struck(Manner.PARTITION, Party.PRIMARY, "redis-0", began_s, ended_s)


@pytest.mark.parametrize(
    ("strike", "excused"),
    [
        (killed(Party.PRIMARY, "redis-0", 12.2, 14.5), True),
        (cut_off(11.5, 14.0), True),  # both sides made version 2 while it lasted
        (killed(Party.PRIMARY, "redis-0", 13.2, 15.5), False),
        (killed(Party.PRIMARY, "redis-0", 5.0, 6.0), False),
        (killed(Party.SENTINEL, "sentinel-0", 12.2, 14.5), False),
    ],
    ids=["killed between", "cut off meanwhile", "killed later", "killed long before", "a sentinel"],
)
def test_a_version_may_be_made_again_where_the_new_primary_did_not_have_it(strike: Struck, excused: bool) -> None:
    found = broken(records=LOST, tape=(*HISTORY[:2], *LOST[3:]), ledger_inputs=OTHER, strikes=(strike,))
    assert found == ([] if excused else ["a version rises by exactly 1"])


# --- what a strike excuses for shards --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strike", "excused"),
    [
        (killed(Party.LEARNER, "a", 12.5, 13.5), True),
        (killed(Party.REDIS, "redis", 11.0, 12.0), True),
        (killed(Party.PRIMARY, "redis-1", 11.0, 12.0), True),
        (killed(Party.SENTINEL, "sentinel-1", 11.0, 12.0), False),
        (killed(Party.LEARNER, "a", 5.0, 6.0), False),
        (killed(Party.LEARNER, "a", 40.0, 41.0), False),
        (killed(Party.LEARNER, "c", 12.5, 13.5), False),
        (killed(Party.SYNCER, "s", 12.5, 13.5), False),
    ],
)
def test_a_shard_is_read_twice_only_if_it_was_in_hand_at_a_strike(strike: Struck, excused: bool) -> None:
    shards = (*GOOD.shards, note(0, B, False, 25), note(0, B, True, 26))
    assert (broken(shards=shards, strikes=(strike,)) == []) is excused


def test_a_shard_that_was_in_hand_at_a_kill_is_still_read_to_its_end() -> None:
    strike = killed(Party.LEARNER, "a", 11.0, 12.0)
    assert broken(shards=GOOD.shards[:2], strikes=(strike,)) == ["every shard is read to its end, once but for strikes"]


def test_a_process_that_takes_more_only_while_it_starts_is_well() -> None:
    assert broken(lives=(lived(MB=lambda at: 100 + min(at, 100)),)) == []


# --- growth ----------------------------------------------------------------------------------------------


def test_every_key_of_a_run_has_a_bound() -> None:
    keys = RunKeys("r", 1)
    fixed = [getattr(keys, name) for name, kind in vars(RunKeys).items() if isinstance(kind, property)]
    made = [keys.deltas(0, "l"), keys.delta_payload(0, "l", "0" * 8, 1), keys.head(0), keys.lease(0), keys.tape(0)]
    made += [keys.global_payload(0, 1, "n"), keys.momentum_payload(0, 1, "n"), keys.initial_payload(0, "n")]
    made += [
        keys.rest_payload(0, 1, "n"),
        keys.moments_payload(0, "exp_avg", "n"),
        keys.senders(0),
        keys.arrivals(0),
        keys.holder("l"),
    ]
    assert {key.split("}:")[1].split(":")[0] for key in (*fixed, *made)} == set(bounds(SCALE))
