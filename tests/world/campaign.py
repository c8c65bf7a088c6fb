"""Many seeds over all cores, resumable: results go to a file as they come, under a digest of the code they are of."""

import gc
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.process.cores import one_blas_thread
from tests import quiet
from tests.world.oracle import Violation
from tests.world.world import Result, run_seed

ROOT = Path(__file__).resolve().parents[2]

OURS = ("diloco", "tests")

Line = dict[str, Any]


def code_digest() -> str:
    """Digest of all code that a world runs, which is what it imports: results of other code are not counted."""
    modules = (module for name, module in sys.modules.items() if name.partition(".")[0] in OURS)
    files = {Path(file).resolve() for module in modules if (file := getattr(module, "__file__", None))}
    digest = xxhash.xxh3_128()
    for file in sorted(files | set((ROOT / "pipeline").rglob("*.lua"))):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def run_one(seed: int) -> Line:
    """One seed as a line of the result file."""
    began = time.process_time()
    gc.collect()
    try:
        result = run_seed(seed)
    except Exception as error:  # a fault of the world itself must not end a campaign, nor be overlooked
        broken = Violation("a world ends without an error of its own", repr(error))
        result = Result(seed, "", 0, 0.0, Counter(), Counter(), frozenset(), broken)
    return {
        "seed": seed,
        "digest": result.digest,
        "merges": result.merges,
        "virtual_s": result.virtual_s,
        "seconds": time.process_time() - began,
        "fired": dict(result.fired),
        "crashed": dict(result.crashed),
        "violation": None if result.violation is None else str(result.violation),
    }


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it keeps what is done
    one_blas_thread()
    gc.freeze()
    gc.disable()  # a world's garbage is small: it goes between worlds
    quiet()


@dataclass(slots=True)
class Summary:
    """Sums over seeds."""

    seeds: int = 0
    merges: int = 0
    seconds: float = 0.0
    """Of one core."""
    virtual_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """Take in one seed."""
        self.seeds += 1
        self.merges += line["merges"]
        self.seconds += line["seconds"]
        self.virtual_s += line["virtual_s"]
        self.fired.update(line["fired"])
        self.crashed.update(line["crashed"])
        if line["violation"]:
            self.violations[line["seed"]] = line["violation"]


def done_before(file: Path) -> list[Line]:
    """Results of an earlier, interrupted campaign; a line cut short is left out."""
    found = []
    if file.exists():
        for text in file.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return found


def campaign(seeds: Iterable[int], jobs: int, file: Path) -> Iterator[Line]:
    """Run the seeds that are not in `file` yet; yields each result once it is in the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (
        multiprocessing.get_context("spawn").Pool(jobs, initializer=_begin) as pool,
        file.open("a", encoding="utf-8") as out,
    ):
        for line in pool.imap_unordered(run_one, seeds, chunksize=4):
            out.write(dumps(line) + "\n")
            out.flush()
            yield line
