"""What a region's line carries: learners behind one line to the run's Redis, with a cache beside them and without.

Real processes: built-in learners that train, a syncer beside the run's Redis, and a Redis of the region. The line is a
proxy that counts, and carries so many bytes a second in each direction for all learners together.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.run import LearnerReport
from diloco_studies.bench.end_to_end import PYTHONPATH, Process
from diloco_studies.bench.figures import progress
from diloco_studies.bench.lines import one_line
from diloco_studies.bench.plain import Plain
from diloco_studies.strikes.proxy import Door

RUN = "bench-region"
LOOK_S = 0.01
JOIN_S = 180.0
INTERVAL = 16
"""Inner steps between two deltas of a fragment."""
AWAY_S = 8.0
"""For so long a cache that was killed is away."""
LATE = 0.6
"""Share of the time after which what was struck should be as before."""
MB = 1e6

Strike = Literal["", "claimant", "cache"]
Reports = dict[tuple[str, str], LearnerReport]
"""By learner and incarnation."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    model: str = "small"
    learners: int = 4
    fragments: int = 4
    global_codec: str = "fp32"
    line_bytes_s: float = 8e6
    seconds: float = 40.0
    """After all have joined."""
    pace_s: float = 0.25
    """Of a step at least."""
    cached: bool = True
    strike: Strike = ""


class Place:
    """A region: its learners, its cache, its line."""

    def __init__(self, case: Case, folder: Path, main: EmbeddedRedis, line: str, cache: EmbeddedRedis | None) -> None:
        self._case, self._folder, self._main, self._cache = case, folder, main, cache
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        path = os.pathsep.join(filter(None, (PYTHONPATH, kept.get("PYTHONPATH"))))
        self.environ = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DILOCO_REDIS_URL": line}
        if cache is not None:
            self.environ["DILOCO_REGION_REDIS_URL"] = cache.tcp_url or ""
        self.learners: dict[str, Process] = {}

    def start(self, name: str) -> None:
        """A learner, with nothing of an earlier one's."""
        case = self._case
        given = {
            **{"--run": RUN, "--learner-id": name, "--model": case.model, "--device": "cpu", "--threads": 1},
            **{"--fragments": case.fragments, "--sync-interval": INTERVAL, "--global-codec": case.global_codec},
            **{"--tokens": 10**12, "--batch": 1, "--seq-len": 64, "--pace": case.pace_s, "--log-level": "debug"},
        }
        words = [str(word) for pair in given.items() for word in pair]
        words += ["--state-dir", str(self._folder / f"state-{name}")]  # else one that is back has a peer's moments
        environ = self.environ | {"DILOCO_STATE_EVERY": "2"}
        self.learners[name] = Process(name, ["-m", "diloco", "learner", *words], self._folder, environ, False)

    def reports(self) -> Reports:
        """Of all incarnations so far, by learner and incarnation."""

        async def read() -> Reports:
            async with open_bus(self._main.url, RUN) as bus:
                found = [seen.report for seen in await bus.read_reports()]
            return {(one.learner, one.incarnation): one for one in found}

        return asyncio.run(read())

    def wait_for(self, there: Callable[[Reports], bool], what: str) -> None:
        """Until reports say so.

        Raises:
            UsageError: a process has ended, or it takes too long.
        """
        until = time.monotonic() + JOIN_S
        while not there(self.reports()):
            for learner in self.learners.values():
                learner.check()
            if time.monotonic() > until:
                raise UsageError(f"{what} took more than {JOIN_S:g} s on this machine")
            time.sleep(0.2)

    def kill_claimant(self) -> str:
        """SIGKILL the learner that brings a payload, while it does; its name."""
        assert self._cache is not None  # noqa: S101  # only then
        keys = RunKeys(RUN)
        pattern, until = keys.region_claim("*").replace("{", "[{]").replace("}", "[}]"), time.monotonic() + JOIN_S
        with Plain(self._cache.url) as redis:
            while time.monotonic() < until:
                _, claims = redis.ask("SCAN", 0, "MATCH", pattern, "COUNT", 1000)
                for claim in claims:
                    nonce, name = redis.ask("GET", claim.decode()), claim.decode().rsplit(":", 1)[1]
                    if nonce is None or redis.ask("EXISTS", keys.region_payload(name)):
                        continue
                    for learner, incarnation in self.reports():
                        if incarnation == nonce.decode() and not redis.ask("EXISTS", keys.region_payload(name)):
                            self.learners.pop(learner).end()
                            return learner
                time.sleep(LOOK_S)
        raise UsageError("nobody was seen to bring a payload")

    def kill_cache(self) -> None:
        """SIGKILL the region's Redis, and start it again after a while, empty."""
        if self._cache is None or self._cache.pid is None:
            raise UsageError("the region's Redis has ended by itself")
        self._cache.kill()
        time.sleep(AWAY_S)
        self._cache.start()

    def said(self, event: str) -> int:
        """How often the learners' logs tell of an event."""
        return sum(path.read_text(errors="replace").count(event) for path in self._folder.glob("l*.log"))


def _between(before: Reports, after: Reports) -> tuple[float, float, float]:
    """Bytes of globals from the run's Redis and from the region's, of all; and of the learner that pulled the most.

    One that was killed has pulled less: what it had not reported yet is in none of these.
    """
    found = []
    for who, one in after.items():
        had = before[who].pulled_bytes if who in before else (0, 0)
        found.append((one.pulled_bytes[0] - had[0], one.pulled_bytes[1] - had[1]))
    return sum(one[0] for one in found), sum(one[1] for one in found), max(map(sum, found))


def _cpu_s(url: str) -> float:
    with Plain(url) as redis:
        return float(redis.info("used_cpu_user")) + float(redis.info("used_cpu_sys"))


@contextmanager
def _place(case: Case) -> Iterator[tuple[Place, Door, EmbeddedRedis, EmbeddedRedis | None]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
        main = stack.enter_context(EmbeddedRedis(dies_with_us=True))
        cache = stack.enter_context(EmbeddedRedis(port=0, dies_with_us=True)) if case.cached else None
        url, door = stack.enter_context(one_line(main.socket_path, case.line_bytes_s))
        place = Place(case, folder, main, url, cache)
        environ = {**place.environ, "DILOCO_REDIS_URL": main.url}
        serving = ["-m", "diloco", "syncer", "--run", RUN, "--http-port", "0", "--log-level", "warning"]
        syncer = Process("syncer", serving, folder, environ, False)
        stack.callback(syncer.end)
        try:
            yield place, door, main, cache
        finally:
            for learner in place.learners.values():
                learner.end()


def measure(case: Case, console: Console) -> dict[str, float]:
    """Bytes on the line and figures beside them; of all learners together where nothing else is said."""
    with _place(case) as (place, door, main, cache), progress(console) as bar:
        task = bar.add_task("joining", total=case.seconds)
        names = [f"l{number}" for number in range(case.learners)]
        for name in names:
            place.start(name)
        place.wait_for(
            lambda reports: {one.learner for one in reports.values() if min(one.versions) >= 0} >= set(names), "joining"
        )
        time.sleep(1.0)  # the last reports of joining
        first, joined = door.back.passed_bytes, place.reports()
        up, began = door.there.passed_bytes, time.monotonic()
        bar.reset(task, description=f"{case.global_codec}, {case.strike or 'undisturbed'}")
        strikes, late, late_reports = 0, 0, joined
        while (passed := time.monotonic() - began) < case.seconds:
            bar.update(task, completed=passed)
            if case.strike and passed > case.seconds / 4 and not strikes:
                strikes = 1
                if case.strike == "cache":
                    place.kill_cache()
                else:
                    place.start(place.kill_claimant())
            if passed > LATE * case.seconds and not late:
                late, late_reports = door.back.passed_bytes, place.reports()
            time.sleep(LOOK_S)
        reports = place.reports()
        down, sent = door.back.passed_bytes - first, door.there.passed_bytes - up
        live = [
            max((one for one in reports.values() if one.learner == name), key=lambda one: one.generation)
            for name in names
        ]
        found = {
            "first_load_mb": first / MB,
            "down_mb": down / MB,
            "up_mb": sent / MB,
            "outer_steps": float(sum(max(one.versions[p] for one in live) for p in range(case.fragments))),
            "pull_s": fmean(one.pull_s for one in live),
            "main_redis_cpu_s": _cpu_s(main.url),
        }
        if cache is not None:
            of_main, of_region, one_pull = _between(joined, reports)
            one_load, late_pull = _between({}, joined)[2], _between(late_reports, reports)[2]
            found |= {
                "from_main_mb": of_main / MB,
                "from_region_mb": of_region / MB,
                "one_pull_mb": one_pull / MB,
                "one_first_load_mb": one_load / MB,
                "down_over_one_pull": down / one_pull,
                "late_down_over_one_pull": (down + first - late) / (late_pull or 1.0),
                "first_load_over_one": first / one_load,
                "not_waited_for": float(place.said("region_not_waited_for")),
                "warned": float(place.said("region_unavailable") + place.said("region_entry_refused")),
                "found_again": float(place.said("region_found")),
                "region_redis_cpu_s": _cpu_s(cache.url),
            }
        return found
