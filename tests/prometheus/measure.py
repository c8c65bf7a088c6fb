"""What a scrape takes at 200 learners and 64 fragments: the processor time of a syncer's event loop, and the bytes.

`python -m tests.prometheus.measure` (--learners, --fragments, --scrapes). No test: what a machine takes is no promise.
"""

import argparse
import time
from statistics import median

from prometheus_client import generate_latest

from diloco.pipeline.view.reading import Reading
from diloco.syncer.metrics import Metrics
from diloco.syncer.run_metrics import RunMetrics
from tests import samples
from tests.browser.measure import Large


class _At:
    """A clock that stands still."""

    def __init__(self, unix_s: float) -> None:
        self._unix_s = unix_s

    def now(self) -> float:
        return self._unix_s

    def unix(self) -> float:
        return self._unix_s


def measure(learners: int, fragments: int, scrapes: int) -> None:
    """Print it."""
    run, reading, metrics = Large(learners, fragments), Reading(), Metrics("large")
    for p in range(fragments):
        metrics.merged(samples.committed(fragment=p, version=1))
    looks_s, scrapes_s, size, lines = [], [], 0, 0
    for number in range(scrapes):
        look = run._next()
        began_s = time.thread_time()
        reading.see(look)
        looks_s.append(time.thread_time() - began_s)
        if not number:
            metrics.registry.register(RunMetrics(reading, _At(look.now_s), lambda: True))
        began_s = time.thread_time()
        text = generate_latest(metrics.registry)
        scrapes_s.append(time.thread_time() - began_s)
        size, lines = len(text), sum(not line.startswith(b"#") for line in text.splitlines())
    print(
        f"{learners} learners, {fragments} fragments: {1e3 * median(scrapes_s):.1f} ms a scrape (processor time, "
        f"median of {scrapes}), {lines} series, {size / 1024:.0f} KiB; {1e3 * median(looks_s):.1f} ms more for each "
        "look that the page takes anyway"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=200)
    parser.add_argument("--fragments", type=int, default=64)
    parser.add_argument("--scrapes", type=int, default=30)
    measure(**vars(parser.parse_args()))
