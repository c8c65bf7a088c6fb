"""Metrics of the whole run for `/metrics`. Only the lead shows them, so that a sum over syncers counts them once.

They come from the page collector's last reading (`pipeline.view.page.last_poll`), so a scrape reads nothing from Redis.
Their names begin with `diloco_run_`, `diloco_learner_`, `diloco_fragment_` or `diloco_redis_`; all other metrics are of
one syncer. A separate process that serves the page of a run shows them too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diloco.pipeline.bus.ports import BusInfo, Clock
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.view.goodput import summed
from diloco.pipeline.view.page.last_poll import Reading
from diloco.pipeline.view.page.model import Poll
from diloco.pipeline.view.status import FragmentStatus, LearnerStatus
from diloco.syncer.times import TIMES

# (values of the labels, value); None for a value that is not known.
Values = Iterator[tuple[tuple[str, ...], float | None]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of the run."""

    name: str
    text: str
    values: Callable[[Reading, Poll, float], Values]
    """Returns the values, from the reading, its poll, and the Unix time."""
    labels: tuple[str, ...] = ()
    counter: bool = False

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return the metric's family, without samples."""
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        return kind(self.name, self.text, labels=self.labels)


def _one(value: Callable[[Poll], float | None]) -> Callable[[Reading, Poll, float], Values]:
    def values(_: Reading, poll: Poll, __: float) -> Values:
        yield (), value(poll)

    return values


def _of_server(value: Callable[[BusInfo], float | None]) -> Callable[[Reading, Poll, float], Values]:
    return _one(lambda poll: None if poll.info is None else value(poll.info))


def _of_learners(
    value: Callable[[Reading, LearnerStatus], float | None],
) -> Callable[[Reading, Poll, float], Values]:
    def values(reading: Reading, _: Poll, __: float) -> Values:
        for learner in reading.learners():
            yield (learner["id"],), value(reading, learner)

    return values


def _of_fragments(value: Callable[[FragmentStatus], float | None]) -> Callable[[Reading, Poll, float], Values]:
    def values(_: Reading, poll: Poll, __: float) -> Values:
        for fragment in poll.status["fragments"]:
            yield (str(fragment["id"]),), value(fragment)

    return values


def _of_merges(value: Callable[[Committed], float | None]) -> Callable[[Reading, Poll, float], Values]:
    def values(reading: Reading, _: Poll, __: float) -> Values:
        for p, merge in sorted(reading.merges.items()):
            yield (str(p),), value(merge)

    return values


def _phase(_: Reading, poll: Poll, __: float) -> Values:
    for phase in Phase:
        yield (phase.value,), poll.status["phase"] == phase


def _fates(_: Reading, poll: Poll, __: float) -> Values:
    lost = poll.status["tokens_lost"]
    yield ("merged",), poll.status["merged_tokens"]
    yield ("overwritten",), lost["overwritten"]
    yield ("rejected",), lost["rejected"]
    yield ("died",), lost["died"]
    yield ("pending",), lost["pending"]


def _badput(_: Reading, poll: Poll, __: float) -> Values:
    yield from (((cause,), one) for cause, one in poll.status["goodput"]["since_start"]["badput"].items())


def _seconds(reading: Reading, _: Poll, __: float) -> Values:
    yield from (((activity,), one) for activity, one in summed(reading.time).items())


def _seconds_of_learners(reading: Reading, _: Poll, __: float) -> Values:
    for learner in reading.learners():
        for activity, one in reading.time.get(learner["id"], {}).items():
            yield (learner["id"], activity), one


def _states(reading: Reading, _: Poll, __: float) -> Values:
    yield from (((state,), count) for state, count in reading.counted().items())


def _quorum(poll: Poll) -> float | None:
    running = poll.status["phase"] == Phase.RUNNING
    return max((one["window"]["quorum"] for one in poll.status["fragments"]), default=None) if running else None


def _silent_s(reading: Reading, poll: Poll, now_s: float) -> Values:
    for learner in reading.learners():
        yield (learner["id"],), learner["age_s"] + max(0.0, now_s - poll.now_s)


def _rounds_s(reading: Reading, poll: Poll, _: float) -> Values:
    step_s = reading.step_s()
    for one in poll.status["fragments"]:
        yield (str(one["id"]),), None if step_s is None else one["interval"] * step_s


def _unmerged_s(reading: Reading, poll: Poll, now_s: float) -> Values:
    for one in poll.status["fragments"]:
        yield (str(one["id"]),), max(0.0, now_s - reading.merged_unix_s.get(one["id"], now_s))


def _rewound_s(reading: Reading, _: Poll, now_s: float) -> Values:
    yield (), max(0.0, now_s - reading.rewound_unix_s)


def _loss(poll: Poll) -> float | None:
    return None if poll.status["evaluation"] is None else poll.status["evaluation"]["loss"]


def _loss_tokens(poll: Poll) -> float | None:
    return None if poll.status["evaluation"] is None else poll.status["evaluation"]["tokens"]


LEARNER, FRAGMENT = ("learner",), ("fragment",)
FIGURES = (
    Figure("diloco_run_phase", "1 for the run's current phase", _phase, ("phase",)),
    Figure(
        "diloco_run_trained_tokens",
        "Tokens trained, including earlier parts of the run",
        _one(lambda at: at.status["tokens"]),
    ),
    Figure("diloco_run_budget_tokens", "The run's token budget", _one(lambda at: at.status["budget_tokens"])),
    Figure(
        "diloco_run_tokens",
        "Trained tokens by fate: merged, overwritten, rejected, died, pending (the ledger)",
        _fates,
        ("fate",),
    ),
    Figure(
        "diloco_run_merged_share",
        "Merged share of the trained tokens",
        _one(lambda at: at.status["merged_share"]["since_start"]),
    ),
    Figure(
        "diloco_run_merged_share_recent",
        "Merged share of the tokens merged or lost in the last five minutes",
        _one(lambda at: at.status["merged_share"]["recent"]),
    ),
    Figure(
        "diloco_run_goodput",
        "Goodput since the start: share of the learners' time that trained tokens which are not lost",
        _one(lambda at: at.status["goodput"]["since_start"]["goodput"]),
    ),
    Figure("diloco_run_badput", "Shares of the rest of that time, by cause", _badput, ("cause",)),
    Figure(
        "diloco_run_learner_seconds",
        "Time of all learners by activity: training, blocked, joining, rejoining, away",
        _seconds,
        ("activity",),
        counter=True,
    ),
    Figure("diloco_run_outer_steps", "Outer steps of all fragments", _one(lambda at: at.status["outer_steps"])),
    Figure(
        "diloco_run_rewound_seconds",
        "Since Redis was last found to have lost merges, according to the tape; +Inf if the tape has no such entry",
        _rewound_s,
    ),
    Figure(
        "diloco_run_loss",
        "The evaluator's last held-out loss of the global parameters, in nats per token",
        _one(_loss),
    ),
    Figure("diloco_run_loss_tokens", "Tokens trained when the evaluator read these parameters", _one(_loss_tokens)),
    Figure("diloco_run_learners", "Learners: live, silent, left", _states, ("state",)),
    Figure("diloco_run_quorum", "Learners that a merge needs; only while the run is training", _one(_quorum)),
    Figure("diloco_run_syncers", "Syncers of the run", _one(lambda at: len(at.status["syncers"]))),
    Figure(
        "diloco_learner_steps",
        "Inner steps; the rate is the learner's step rate",
        _of_learners(lambda _, one: one["step"]),
        LEARNER,
        counter=True,
    ),
    Figure(
        "diloco_learner_tokens",
        "Tokens that the learner has trained since its process started",
        _of_learners(lambda _, one: one["tokens"]),
        LEARNER,
        counter=True,
    ),
    Figure(
        "diloco_learner_seconds",
        "Its time by activity, since it first began to join: training, blocked, joining, rejoining, away",
        _seconds_of_learners,
        ("learner", "activity"),
        counter=True,
    ),
    Figure(
        "diloco_learner_step_seconds",
        "Time of its inner step, smoothed",
        _of_learners(lambda _, one: one["step_s"]),
        LEARNER,
    ),
    Figure(
        "diloco_learner_loss", "Its training loss in nats per token", _of_learners(lambda _, one: one["loss"]), LEARNER
    ),
    Figure(
        "diloco_learner_cosine",
        "Cosine of its last merged delta with the others in its window (sampled): below 0 it opposes them",
        _of_learners(lambda reading, one: reading.cosines.get(one["id"])),
        LEARNER,
    ),
    Figure(
        "diloco_learner_stale_versions",
        "Versions between its base and the head, for the fragment that is furthest behind",
        _of_learners(Reading.behind),
        LEARNER,
    ),
    Figure("diloco_learner_silent_seconds", "Time since its last report", _silent_s, LEARNER),
    Figure(
        "diloco_fragment_version", "Outer steps of the fragment", _of_fragments(lambda one: one["version"]), FRAGMENT
    ),
    Figure(
        "diloco_fragment_unmerged_seconds",
        "Time since its last merge that this syncer saw; 0 while the run is not training",
        _unmerged_s,
        FRAGMENT,
    ),
    Figure(
        "diloco_fragment_round_seconds",
        "Its sync interval in force times a typical learner's step time",
        _rounds_s,
        FRAGMENT,
    ),
    Figure(
        "diloco_fragment_delta_norm",
        "L2 norm of its last merged delta, before the outer optimizer",
        _of_merges(lambda merge: merge.norm),
        FRAGMENT,
    ),
    Figure(
        "diloco_fragment_step_norm",
        "L2 norm of its last outer step: new values minus old ones",
        _of_merges(lambda merge: merge.step_norm),
        FRAGMENT,
    ),
    Figure(
        "diloco_fragment_outer_rate",
        "Effective outer learning rate of its last merge: norm of the step over norm of the merged delta",
        _of_merges(lambda merge: merge.outer_rate),
        FRAGMENT,
    ),
    Figure(
        "diloco_fragment_rho",
        "Cosine of its last merged delta with the one before (sampled); absent for one merge after a change of syncer",
        _of_merges(lambda merge: merge.rho),
        FRAGMENT,
    ),
    Figure("diloco_redis_used_bytes", "Memory that Redis uses", _of_server(lambda info: info.used_bytes)),
    Figure(
        "diloco_redis_max_bytes",
        "Memory that Redis may use; absent if there is no limit",
        _of_server(lambda info: info.maxmemory_bytes or None),
    ),
    Figure(
        "diloco_redis_nearly_full",
        "1 if less memory is free than a round of the run uploads (at least a tenth of its memory, at most a quarter)",
        _one(lambda at: at.nearly_full),
    ),
    Figure(
        "diloco_redis_received_bytes",
        "Bytes received from all clients since Redis started",
        _of_server(lambda info: info.received_bytes),
        counter=True,
    ),
    Figure(
        "diloco_redis_sent_bytes",
        "Bytes sent to all clients since Redis started",
        _of_server(lambda info: info.sent_bytes),
        counter=True,
    ),
)


class RunMetrics(Collector):
    """Creates the metrics again for each scrape."""

    def __init__(self, reading: Reading, clock: Clock, leads: Callable[[], bool]) -> None:
        self._reading, self._clock, self._leads = reading, clock, leads

    def describe(self) -> Iterable[Metric]:
        """Return the families of all metrics, whether or not they have samples now."""
        return [one.family() for one in FIGURES]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics if this syncer leads and has read the run lately; otherwise nothing."""
        poll, now_s = self._reading.poll, self._clock.unix()
        if poll is None or not self._leads() or now_s - poll.now_s > TIMES.reading_s:
            return
        for one in FIGURES:
            family = one.family()
            try:
                for labels, value in one.values(self._reading, poll, now_s):
                    if value is not None:
                        family.add_metric(labels, value)
            except Exception as error:  # a bug in one metric must not remove the others
                structlog.get_logger().error("figure_failed", figure=one.name, exc_info=error)
                continue
            if family.samples:
                yield family
