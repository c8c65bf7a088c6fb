"""Script time of one update of the page at 200 learners and 64 fragments, in Chromium; and the server's part of it.

`python -m tests.browser.measure` (--learners, --fragments, --updates). No test: what a machine takes is no promise.
"""

import argparse
import asyncio
import random
import time
from statistics import median

from diloco.pipeline.messages.head import WindowView
from diloco.pipeline.messages.run import SeenReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.tape import Contribution
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.page.model import Look
from diloco.pipeline.view.status import build_status
from tests import samples
from tests.browser.chromium import tab
from tests.browser.stage import page_of

RUN_S = 600.0
"""Then both timelines are as long as they get."""
LOOK_S = 0.5


class Large(Collector):
    """Follows a made up run: each look is of half a second more of it."""

    def __init__(self, learners: int, fragments: int) -> None:
        self._names = [f"learner-{n}" for n in range(learners)]
        self._fragments, self._chance = fragments, random.Random(1)
        self._spec = self._make_spec()
        self._versions = [0] * fragments
        self._begun_s = self._unix_s = 1_700_000_000.0
        self.looks_s: list[float] = []
        super().__init__(_Named(), None, "e1")  # type: ignore[arg-type]  # it reads nothing
        self._reader = self  # type: ignore[assignment]  # it is asked for looks

    def _make_spec(self) -> Spec:
        tensors = tuple(samples.tensor(f"t{p}", (10, 10), p) for p in range(self._fragments))
        return samples.spec(tensors=tensors, fragments=self._fragments, quorum=2)

    def pass_by(self, seconds: float) -> None:
        """Let so much of the run go by, in steps of half a second."""
        end_s = self._unix_s + seconds
        while self._unix_s < end_s:
            self.model.see(self._next())
        self.model.patch()

    async def look(self) -> None:
        """One more, and how long it took."""
        began_s = time.thread_time()
        self.model.see(self._next())
        self._publish(self.model.patch())
        self.looks_s.append(time.thread_time() - began_s)

    def _next(self) -> Look:
        self._unix_s += LOOK_S
        now_s, chance, records = self._unix_s, self._chance, []
        for p in chance.sample(range(self._fragments), max(1, self._fragments // 16)):
            self._versions[p] += 1
            parts = tuple(
                Contribution(
                    learner=name,
                    incarnation="0" * 8,
                    base_version=0,
                    attempt=0,
                    steps=4,
                    tokens=40,
                    weight=0.0,
                    norm=1.0,
                )
                for name in self._names
            )
            records.append(
                samples.committed(
                    fragment=p,
                    version=self._versions[p],
                    base_digest=bytes(16),
                    contributions=parts,
                    unix_s=now_s - 0.1,
                    quorum_s=0.4,
                    grace_s=0.3,
                    upload_s=0.2,
                    merge_s=0.2,
                )
            )
        heads = [self._head(p) for p in range(self._fragments)]
        state = samples.run_state(started_unix_s=self._begun_s, budget_tokens=10**12)
        status = build_status(
            "large", self._spec, state, [self._report(n) for n in range(len(self._names))], heads, None, [], now_s, 5.0,
            {"0": "syncer"}, ["0"] * self._fragments,
        )  # fmt: skip
        return Look(now_s=now_s, status=status, records=records, began_s=self._begun_s)

    def _head(self, p: int) -> object:
        states = ("idle", "collecting", "grace", "uploading", "merging")
        window = WindowView(
            state=self._chance.choice(states),  # type: ignore[arg-type]  # one of them
            attempt=0,
            members=tuple(self._chance.sample(self._names, 8)),
            expected=len(self._names),
            reason=f"grace: {self._chance.randrange(99)} in, waiting for others",
            deadline_unix_s=self._unix_s + 1,
        )
        return samples.head(p, version=self._versions[p], merged_tokens=40 * self._versions[p], window=window)

    def _report(self, number: int) -> SeenReport:
        elapsed_s = self._unix_s - self._begun_s
        dead = number % 20 == 7 and int(elapsed_s / 60) % 5 == 2
        return samples.seen(
            self._names[number],
            age_s=elapsed_s % 60 if dead else self._chance.random() * 0.3,
            step=round(elapsed_s * 10) + number,
            tokens=round(elapsed_s * 1000),
            versions=tuple(self._versions),
            wall_s=elapsed_s,
            loss=self._chance.random(),
        )


class _Named:
    """A bus of which only the run's name is asked."""

    class keys:  # noqa: N801  # as a bus names it
        run = "large"


async def measure(learners: int, fragments: int, updates: int) -> None:
    """Print what an update takes."""
    collector = Large(learners, fragments)
    collector.pass_by(RUN_S)
    await collector.look()
    snapshot = len(collector._event("snapshot", collector.model.snapshot()))
    async with page_of(collector) as address, tab() as page:
        await page.size(1400, 1000)
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0")
        await page.call("Performance.disable")
        await page.call("Performance.enable", timeDomain="threadTicks")  # whatever else the machine does
        for button, span in ((2, "whole run"), (0, "last 2 minutes")):
            await page.value(f"document.querySelectorAll('#spans button')[{button}].click()")
            sizes, before = [], (await page.metrics())["ScriptDuration"]
            for _ in range(updates):
                there = await page.value("diloco.took.updates")
                await collector.look()
                sizes.append(len(collector._updates[-1].data))
                await page.until(f"diloco.took.updates > {there}")
                await asyncio.sleep(LOOK_S)
            script_s = (await page.metrics())["ScriptDuration"] - before
            print(
                f"{learners} learners, {fragments} fragments, {span}: {1e3 * script_s / updates:.1f} ms of script each "
                f"(processor time, mean of {updates}, charts and this measuring included); "
                f"{median(sizes) / 1024:.0f} KiB sent for each"
            )
    print(f"the server: {1e3 * median(collector.looks_s):.1f} ms a look; a snapshot is {snapshot / 1024:.0f} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=200)
    parser.add_argument("--fragments", type=int, default=64)
    parser.add_argument("--updates", type=int, default=40)
    asyncio.run(measure(**vars(parser.parse_args())))
