"""The syncer's Prometheus metrics, in a registry of their own, which `http` serves and the other modules feed."""

import math
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from typing_extensions import override

from diloco.pipeline.messages.fragment import Committed, RefusalReason

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class _Labelled(CollectorRegistry):
    """A registry that adds the same labels to each sample."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._labels = dict(labels)

    @override
    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [one._replace(labels=self._labels | one.labels) for one in family.samples]
            yield family


def registry_of(run: str) -> CollectorRegistry:
    """Return a registry whose samples all have a label for the run; with "" they have none."""
    return _Labelled({"run": run}) if run else CollectorRegistry()


class Metrics:
    """All metrics of one syncer. Counters start at 0 with the process; totals that outlive it are in heads and tape."""

    def __init__(self, run: str = "") -> None:
        """Make the metrics; run is a label of all samples, or "" for none."""
        self.registry = registry = registry_of(run)
        self.merges = Counter("diloco_merges", "Merges committed", ["fragment"], registry=registry)
        self.contributions = Counter("diloco_contributions", "Contributions merged", registry=registry)
        self.refusals = Counter("diloco_refusals", "Deltas refused", ["reason"], registry=registry)
        for reason in RefusalReason:
            self.refusals.labels(reason=reason.value)  # starts at 0, so that Prometheus sees the first increment
        self.merged_tokens = Counter(
            "diloco_merged_tokens", "Tokens of merged contributions", ["fragment"], registry=registry
        )
        self.open_windows = Gauge("diloco_open_windows", "Windows in progress", registry=registry)
        self.suspected_learners = Gauge(
            "diloco_suspected_learners",
            "Learners that merges do not wait for: their last deltas were refused, too slow or missing",
            registry=registry,
        )
        self.leads = Gauge(
            "diloco_leads",
            "1 for the leading syncer (it serves fragment 0), 0 for others, NaN while it is waiting or shutting down",
            registry=registry,
        )
        self.leads.set(math.nan)
        self.checkpoint_unix = Gauge(
            "diloco_checkpoint_timestamp_seconds",
            "Unix time at which this syncer last saved a checkpoint, or found nothing new to save; before that, its "
            "start; NaN if it saves none while the run lasts",
            registry=registry,
        )
        self.checkpoint_unix.set(math.nan)
        self.served_fragments = Gauge("diloco_served_fragments", "Fragments that this syncer serves", registry=registry)
        self.lease_losses = Counter(
            "diloco_lease_losses", "Leases lost, by expiry or to another syncer", registry=registry
        )
        self.sums_restarted = Counter(
            "diloco_sums_restarted",
            "Running sums restarted because a summed delta had left its window",
            registry=registry,
        )
        self.rewinds = Counter(
            "diloco_rewinds",
            "Times that a fragment's head was restored because the bus had lost later commits",
            registry=registry,
        )
        self.bus_errors = Counter("diloco_bus_errors", "Calls to the bus that failed", registry=registry)
        self.quorum_seconds = self._seconds("quorum", "From a window's opening until its quorum")
        self.grace_seconds = self._seconds("grace", "From quorum until the set of contributions is fixed")
        self.upload_seconds = self._seconds("upload", "From then until the last upload of the set")
        self.merge_seconds = self._seconds("merge", "Merge, outer step and staging")
        self.outer_seconds = self._seconds(
            "outer_step",
            "Part of merge_seconds: summing and the outer step, for fragments whose outer step is not a plain mean",
        )
        self.outer_room = Gauge(
            "diloco_outer_step_budget_seconds",
            "How long an outer step may take before more than a quarter of the training is overwritten",
            registry=registry,
        )
        self.outer_share = Gauge(
            "diloco_outer_step_share",
            "The longest outer step of a fragment relative to this budget: above 1 it exceeds the budget",
            registry=registry,
        )
        self.interval = Gauge(
            "diloco_interval_steps",
            "Inner steps of a round: the requested number, and the longest in force among the fragments that this "
            "syncer serves",
            ["which"],
            registry=registry,
        )
        self.merge_share = Gauge(
            "diloco_merge_share",
            "The longest merge of a fragment relative to the time that its round allows: above 1 learners lose more",
            registry=registry,
        )
        for one in (self.outer_room, self.outer_share, self.merge_share):
            one.set(math.nan)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"diloco_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def merged(self, record: Committed, outer_s: float | None = None) -> None:
        """Count a committed merge; outer_s is the time of its sum and outer step, or None if it only averaged."""
        fragment = str(record.fragment)
        self.merges.labels(fragment=fragment).inc()
        self.contributions.inc(len(record.contributions))
        self.merged_tokens.labels(fragment=fragment).inc(sum(c.tokens for c in record.contributions))
        self.quorum_seconds.observe(record.quorum_s)
        self.grace_seconds.observe(record.grace_s)
        self.upload_seconds.observe(record.upload_s)
        self.merge_seconds.observe(record.merge_s)
        if outer_s is not None:
            self.outer_seconds.observe(outer_s)
