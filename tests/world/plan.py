"""What a seed means: the run's settings, its parties, and the faults that will be tried on them. Pure.

Two kinds of faults: planned ones strike a party or the bus at a time, or at a point of its code (before or
after its next call of one method takes effect); those of messages strike single calls, drawn as they are made.
Each has an id by which a shrunk world can leave it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from diloco.pipeline.messages.spec import Spec, SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import MergeRule
from diloco.pipeline.payload.codec import DTYPES
from diloco.pipeline.payload.quantize import KINDS
from diloco.pipeline.settings import SyncSettings
from diloco_studies.virtual.chance import Chance

FRAGMENTS = 2
LEASE_S = 0.5
LIVENESS_S = 0.8
HANGS_S = (0.3, 2 * LEASE_S)
"""How long a call waits for an answer that does not come: shorter or longer than a lease lasts.

A real call waits for as long as the adapter's limit is, which is two lease times as the settings stand (10 s and 5 s);
a broken connection ends it earlier. Which of the two it is makes different parts of the code give up first.
"""
FAULTS_UNTIL_S = 12.0
"""Planned faults begin before this, in virtual seconds."""
END_FAULTS_S = 4.0
"""Where faults go on to the end, the last ones begin so long after the run was asked to drain."""
FAILS_OVER = 0.4
"""Share of worlds in which another server takes over."""
LEARNERS, SYNCERS = 4, 3
BLOCKS, SHARD_BLOCKS = 60, 7
"""Data blocks of an epoch, and of a shard."""
STEPS_A_BLOCK = 4
RULES: tuple[MergeRule, ...] = ("rda", "rda", "mean", "rda-row")
AVERAGED_RULES: tuple[MergeRule, ...] = ("average", "variance")


class Kind(StrEnum):
    """Every kind of fault there is; `world` counts each one that really happened."""

    LEARNER_KILLED = "learner_killed"
    LEARNER_PAUSED = "learner_paused"
    LEARNER_JOINED = "learner_joined"
    LEARNER_LEFT = "learner_left"
    SYNCER_KILLED = "syncer_killed"
    SYNCER_PAUSED = "syncer_paused"
    SYNCER_REPLACED = "syncer_replaced"
    PARTITION = "partition"
    BUS_RESTARTED = "bus_restarted"
    BUS_REWOUND = "bus_rewound"
    BUS_FULL = "bus_full"
    BUS_FAILED_OVER = "bus_failed_over"
    BUS_SPLIT = "bus_split"
    SLOW_MERGE = "slow_merge"
    DELTA_POISONED = "delta_poisoned"
    MESSAGE_DELAYED = "message_delayed"
    MESSAGE_LOST = "message_lost"
    REPLY_LOST = "reply_lost"
    MESSAGE_DUPLICATED = "message_duplicated"
    MESSAGE_LATE = "message_late"
    # Of learners of several ranks.
    RANK_KILLED = "rank_killed"
    RANK_TRAINING_LAGGED = "rank_training_lagged"
    RANK_EXCHANGE_LAGGED = "rank_exchange_lagged"
    RANK_CUT_OFF = "rank_cut_off"
    RANK_BUS_SLOW = "rank_bus_slow"
    RANK_LINKS_SLOW = "rank_links_slow"
    # What follows from the others, and is counted because it must be seen to happen.
    OTHER_RANKS = "other_ranks"
    MESSAGES_REORDERED = "messages_reordered"
    LEASE_EXPIRED_IN_MERGE = "lease_expired_in_merge"
    TWO_HOLDERS = "two_holders"


MESSAGE_KINDS = (
    Kind.MESSAGE_DELAYED,
    Kind.MESSAGE_LOST,
    Kind.REPLY_LOST,
    Kind.MESSAGE_DUPLICATED,
    Kind.MESSAGE_LATE,
)
"""The last one: a call that takes effect after its caller gave up, even if it is dead by then."""
FAILOVERS = (Kind.BUS_FAILED_OVER, Kind.BUS_FAILED_OVER, Kind.BUS_SPLIT)
PLANNED = tuple(kind for kind in tuple(Kind)[: tuple(Kind).index(Kind.SLOW_MERGE)] if kind not in FAILOVERS)
RANK_KINDS = (
    *(Kind.RANK_KILLED,) * 4,
    *(
        Kind.RANK_TRAINING_LAGGED,
        Kind.RANK_EXCHANGE_LAGGED,
        Kind.RANK_CUT_OFF,
        Kind.RANK_BUS_SLOW,
        Kind.RANK_LINKS_SLOW,
    ),
)

_OF_A_LEARNER = (
    *("claim_initial", "write_chunks", "finish_initial", "write_report", "offer", "read_heads", "read_chunks"),
    *("claim_shard", "save_position", "finish_shard", "release_shards", "fill_shards", "read_tape", "tape_end"),
)
_OF_A_SYNCER = (
    *("acquire_lease", "write_chunks", "commit", "commit", "refuse", "write_window", "read_offers", "read_heads"),
    *("read_chunks", "write_state", "release_lease", "read_reports", "announce_syncer", "read_leases"),
    "withdraw_syncer",
)
_OF_A_RANK = (
    *(
        "ask_take",
        "ask_upload",
        "ask_pull",
        "ask_give",
        "ask_snapshot",
        "ask_recover",
        "ask_enter",
        "ask_bye",
        "ask_go",
    ),
    *("decided", "decided", "write_chunks", "read_chunks", "offer", "claim_initial", "ask_initial", "ask_merged"),
)
"""Its questions to other ranks, a decision that it is about to do, and its calls to the bus."""
CRASH_POINTS = {
    Kind.RANK_KILLED: _OF_A_RANK,
    Kind.LEARNER_KILLED: _OF_A_LEARNER,
    Kind.LEARNER_PAUSED: _OF_A_LEARNER,
    Kind.SYNCER_KILLED: _OF_A_SYNCER,
    Kind.SYNCER_PAUSED: (*("commit",) * 24, *("write_chunks",) * 8, *_OF_A_SYNCER),
}
"""Calls at which a party can be killed or paused, just before or just after they take effect on the bus. Syncers are
paused at their commits above all: so leases end in the middle of merges."""
PAUSES = (Kind.LEARNER_PAUSED, Kind.SYNCER_PAUSED)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault."""

    id: str
    kind: Kind
    at_s: float
    party: int
    """Which learner or syncer (modulo those there are)."""
    lasts_s: float
    method: str = ""
    """For a kill or a pause: strike when this method is called next (empty: at once)."""
    after: bool = False
    """Strike after the call took effect, before its answer arrives; else before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One world."""

    seed: int
    spec: Spec
    step_s: tuple[float, ...]
    """Mean inner step time of each learner."""
    step_tokens: tuple[int, ...]
    skew_s: tuple[float, ...]
    """How far each party's wall clock is ahead; learners first."""
    syncers: int
    latency_s: float
    hangs_s: float
    """How long a call waits for an answer that does not come."""
    message_fault_rate: float
    """Share of calls that meet with a fault of their own."""
    slow_merge_rate: float
    poison_rate: float
    piece_bytes: int
    """How much of a payload one call carries."""
    has_little_room: bool
    """Whether a learner has no room for snapshots of all fragments at a time (`workers.rounds`)."""
    faults: tuple[Fault, ...]
    calm_end: bool
    """Whether faults end, and all are back, before the run drains; else they go on until it is finished."""
    end_faults: tuple[Fault, ...]
    """Planned ones of the drain and the closing, at times since the drain began."""
    together: tuple[bool, ...]
    """Of each learner: it is of several ranks; of how many is drawn for each life (`ranks`)."""

    fails_over: bool = False
    """Whether another server takes over in it, once or more."""

    @property
    def learners(self) -> int:
        """Learners at the start."""
        return len(self.step_s)


def ranks(chance: Chance, learner: int, life: int) -> int:
    """How many processes a learner of several ranks has this time; one with shards of its own is a rank too."""
    return chance.one_of((2, 3, 2, 3, 2, 3, 1), "ranks", learner, life)


def _tensors(chance: Chance, sync: SyncSpec) -> tuple[TensorSpec, ...]:
    """Per fragment 1 to 3 tensors, 4 to 18 numbers together; those of the last are now and then average-only.

    Now and then each fragment has a row of one more tensor, 2 numbers.
    """
    found, averaged = [], chance.share("averaged") < 0.2
    for p in range(FRAGMENTS):
        for t in range(chance.one_of((1, 2, 3), "tensors", p)):
            rule: MergeRule = "mean" if sync.merge == "mean" else chance.one_of(RULES, "rule", p, t)
            if averaged and p == FRAGMENTS - 1:
                rule = chance.one_of(AVERAGED_RULES, "averaged rule", p, t)
            shape: tuple[int, ...] = (2, 2) if rule == "rda-row" else (chance.one_of((4, 5), "size", p, t),)
            matrix = sync.outer != "nesterov" and rule not in AVERAGED_RULES and chance.share("matrix", p, t) < 0.7
            if matrix:
                shape = chance.one_of(((2, 2), (2, 3), (3, 2)), "rows and columns", p, t)
            tensor = TensorSpec(name=f"t{p}.{t}", shape=shape, dtype="float32", rule=rule, fragment=p, matrix=matrix)
            found.append(tensor)
    if not averaged and chance.share("parts") < 0.2:
        part = TensorSpec(name="parts", shape=(FRAGMENTS, 2), dtype="float32", rule="mean", fragment=0)
        found += [part.model_copy(update={"fragment": p, "rows": (p, p + 1)}) for p in range(FRAGMENTS)]
    return tuple(found)


def _sync(chance: Chance, learners: int) -> SyncSpec:
    momentum = chance.one_of((0.0, 0.6), "outer momentum")
    quorum = chance.one_of((1, 1, 2, 2, learners - 1, learners), "K")
    settings = SyncSettings(
        fragments=FRAGMENTS,
        sync_interval=chance.one_of((2, 3, 4), "H"),
        quorum=quorum,
        delta_clip=chance.one_of((0.0, 0.0, 1.0, 1.5), "delta clip"),
        codec=chance.one_of((None,) * 4 + KINDS, "quantized") or chance.one_of(tuple(DTYPES), "codec"),
        global_codec=chance.one_of(("fp32", "bf16"), "global codec"),
        merge=chance.one_of(("rda", "rda", "mean"), "merge"),
        weights=chance.one_of(("tokens", "tokens", "tokens", "equal"), "weights"),
        outer=chance.one_of(("nesterov", "halley"), "outer") if momentum else "nesterov",
        outer_lr=chance.one_of((1.0, 0.7), "outer lr"),
        outer_momentum=momentum,
        outer_warmup=chance.one_of((0, 0, 1, 3), "outer warm-up"),
        first_interval=chance.one_of((0, 0, 1, 2), "first interval"),
        doubling=chance.one_of((1, 2, 5), "doubling"),
        stretch=chance.one_of((True, True, False), "stretch"),
        tokens=10**9,
    )
    return settings.sync_spec().model_copy(update={"chunk_bytes": chance.one_of((16, 32, 1024), "chunk")})


def _fault(
    chance: Chance, number: int | str, until_s: float = FAULTS_UNTIL_S, kinds: Sequence[Kind] = PLANNED
) -> Fault:
    def draw(low: float, high: float, what: str) -> float:
        return chance.between(low, high, what, number)

    kind = chance.one_of(kinds, "kind", number)
    method, after = "", False
    if kind in CRASH_POINTS and chance.share("point", number) < 0.8:
        method = chance.one_of(CRASH_POINTS[kind], "method", number)
        after = chance.share("after", number) < 0.5
    lasts_s = draw(0.2, 1.8, "lasts")
    party = chance.integer("party", number) % 64
    return Fault(f"plan-{number}", kind, draw(0.0, until_s, "at"), party, lasts_s, method, after)


def plan(seed: int) -> Plan:
    """The world of a seed."""
    chance = Chance(seed)
    learners = chance.one_of((3, 4), "learners")
    together = tuple(chance.share("together", i) < 0.5 for i in range(learners))
    together = together if chance.share("worlds together") < 0.5 else (False,) * learners
    sync = _sync(chance, learners)
    if any(together):  # ranks agree some steps ahead
        sync = sync.model_copy(update={"sync_interval": chance.one_of((sync.sync_interval, 6, 9), "H of ranks")})
    faults = [_fault(chance, number) for number in range(chance.one_of((0, 3, 6, 9, 12), "faults"))]
    calm_end = chance.share("calm end") < 0.5
    at_the_end = 0 if calm_end else chance.one_of((1, 3, 5), "end faults")
    end_faults = [_fault(chance, f"end-{number}", END_FAULTS_S) for number in range(at_the_end)]
    if any(together):
        count = chance.one_of((0, 3, 6, 9), "rank faults")
        faults += [_fault(chance, f"rank-{number}", kinds=RANK_KINDS) for number in range(count)]
        count = 0 if calm_end else chance.one_of((0, 1, 3), "rank end faults")
        end_faults += [_fault(chance, f"rank-end-{i}", END_FAULTS_S, RANK_KINDS) for i in range(count)]
    fails_over = chance.share("fails over") < FAILS_OVER
    if fails_over:  # as in a cluster, in most of them
        sync = sync.model_copy(update={"groups": chance.one_of((1, FRAGMENTS, FRAGMENTS), "groups")})
        faults += [
            _fault(chance, f"failover-{number}", kinds=FAILOVERS)
            for number in range(chance.one_of((1, 2, 3), "failovers"))
        ]
        count = 0 if calm_end else chance.one_of((0, 0, 1), "end failovers")
        end_faults += [_fault(chance, f"failover-end-{number}", END_FAULTS_S, FAILOVERS) for number in range(count)]
    stormy = chance.one_of((0.0, 0.002, 0.005, 0.015), "storm")
    return Plan(
        seed=seed,
        spec=Spec(sync=sync, tensors=_tensors(chance, sync), trainer={}),
        step_s=tuple(chance.between(0.01, 0.05, "step", i) for i in range(learners)),
        step_tokens=tuple(chance.one_of((1, 7, 16), "tokens", i) for i in range(learners)),
        skew_s=tuple(chance.between(-0.5, 0.5, "skew", i) for i in range(LEARNERS + SYNCERS)),
        syncers=chance.one_of((2, 3), "syncers"),
        latency_s=chance.one_of((0.0002, 0.001, 0.004), "latency"),
        hangs_s=chance.one_of(HANGS_S, "hangs"),
        message_fault_rate=stormy,
        slow_merge_rate=chance.one_of((0.0, 0.002, 0.01), "slow"),
        poison_rate=chance.one_of((0.0, 0.002, 0.01), "poison"),
        piece_bytes=chance.one_of((16, 32, 4096, 4096, 4096, 4096), "piece"),
        has_little_room=chance.share("room") < 0.5,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        calm_end=calm_end,
        end_faults=tuple(sorted(end_faults, key=lambda fault: fault.at_s)),
        together=together,
        fails_over=fails_over,
    )


def without(faults: Sequence[Fault], only: frozenset[str] | None) -> list[Fault]:
    """The planned faults that a shrunk world keeps."""
    return [fault for fault in faults if only is None or fault.id in only]
