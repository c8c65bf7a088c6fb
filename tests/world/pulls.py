"""Whether learners report their pulls as long as they are, measured by what they read and adopt.

A pull lasts from the first look at heads that showed the global to its adoption at most: that comes at the next step
boundary. It takes the time of two calls at least. Both hold for their smoothed mean, but for how the sizes of the
fragments differ from the mean one's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import LearnerReport
from diloco.workers.rounds import Base
from tests.world.link import Link

QUICKEST = 0.5
"""A call takes this share of the mean latency at least."""


@dataclass(slots=True)
class _Life:
    """One incarnation."""

    link: Link
    shown: dict[int, dict[tuple[int, bytes], float]] = field(default_factory=dict)
    """Fragment -> heads that are not adopted yet -> when the look was sent that first showed them."""
    passed: dict[int, dict[tuple[int, bytes], float]] = field(default_factory=dict)
    """The same of those that were not newer than what was adopted: ranks may have some under way by then, and after a
    rewind an older one comes again."""
    longest_s: float = 0.0
    adopted: dict[int, int] = field(default_factory=dict)
    """Fragment -> how many globals."""
    pulled_s: float = math.inf
    """When the first one was adopted that did not come with joining."""
    pulled: bool = False
    """Whether a report was made since."""


class Pulls:
    """Those of one run's learners."""

    def __init__(self, layout: Layout, latency_s: float, now: Callable[[], float]) -> None:
        sizes = [fragment.elements for fragment in layout.fragments]
        mean = sum(sizes) / len(sizes)
        self._highest, self._lowest = mean / min(sizes), mean / max(sizes)
        self._averaged = {fragment.id for fragment in layout.fragments if fragment.averaged}
        """Of no mean size: their pulls are not reported."""
        self._call_s, self._now = QUICKEST * latency_s, now
        self._lives: dict[str, _Life] = {}

    def looked(self, link: Link, heads: Sequence[Head | None]) -> None:
        """A party has read heads."""
        if link.late:
            return
        life = self._lives.get(link.party)
        if life is None or life.link is not link:
            life = self._lives[link.party] = _Life(link)
        for head in heads:
            if head is not None:
                life.shown.setdefault(head.fragment, {}).setdefault((head.version, head.digest), link.sent_s)

    def adopted(self, learner: str, base: Base) -> None:
        """A learner put a global into its model."""
        life = self._lives[learner]
        shown = life.shown[base.fragment]
        key = base.version, base.digest
        since = shown[key] if key in shown else life.passed[base.fragment][key]
        life.longest_s = max(life.longest_s, self._now() - min([since, *shown.values()]))
        life.shown[base.fragment] = {head: at for head, at in shown.items() if at > since}
        passed = life.passed.setdefault(base.fragment, {})
        passed |= {head: at for head, at in shown.items() if at <= since}
        life.adopted[base.fragment] = life.adopted.get(base.fragment, 0) + 1
        if life.adopted[base.fragment] > 1 and base.fragment not in self._averaged:
            life.pulled_s = min(life.pulled_s, self._now())

    def reported(self, link: Link) -> None:
        """A learner's report was written; what it says was so when it was sent."""
        if (life := self._lives.get(link.party)) is not None and life.link is link:
            life.pulled = life.pulled or life.pulled_s < link.sent_s

    def rewound(self) -> None:
        """The bus may have a learner's earlier report again, until the next one comes."""
        for life in self._lives.values():
            life.pulled = False

    def wrong(self, report: LearnerReport) -> str | None:
        """What does not hold of what a learner has reported by now; None: nothing."""
        life = self._lives[report.learner]
        pending = [self._now() - at for heads in life.shown.values() for at in heads.values()]
        max_s = max([life.longest_s, *pending])
        if report.pull_s > self._highest * max_s * (1 + 1e-9):
            return f"{report.pull_s:.4f} s, and the longest took {max_s:.4f} s"
        if life.pulled and not report.outages and report.pull_s < self._lowest * 2 * self._call_s * (1 - 1e-9):
            return f"{report.pull_s:.6f} s, and one call takes {self._call_s:.6f} s"
        return None
