"""The same work through this program and through others, side by side: two learners on this machine, loopback.

Each system is started, makes rounds that do not count and rounds that do, and ends; then the next one, and all of
that again. So what drifts on the machine meets all of them, and none stands in another's way. One that cannot be had,
or fails, is named with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import Codec, OuterName
from diloco.pipeline.settings import SyncSettings, defaults
from diloco_studies.bench.beside.crew import Crew
from diloco_studies.bench.beside.environments import PEERS, Peer, Unavailable, python_of
from diloco_studies.bench.beside.party import shapes_of
from diloco_studies.bench.end_to_end import Case, Fleet, one_round, server
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.machine import need_memory, peaks_mb, reset_peak
from diloco_studies.bench.plain import Plain

LEARNERS = 2
OUTER_LR = 0.7
OURS = "ours, the default outer step"
WAYS: dict[str, tuple[Codec, OuterName]]
WAYS = {
    OURS: (defaults(SyncSettings)["codec"], defaults(SyncSettings)["outer"]),
    "ours, fp32, nesterov": ("fp32", "nesterov"),
    "ours, bf16, nesterov": ("bf16", "nesterov"),
}
"""Codec of deltas and outer step of each row of ours."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and into how many fragments it is cut; with several, one at a time is synchronised."""

    params: int
    fragments: int = 1

    @property
    def name(self) -> str:
        """As a person would say it."""
        whole = f"{self.params / 1e6:g}M"
        return whole if self.fragments == 1 else f"a {self.params / self.fragments / 1e6:g}M fragment of {whole}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is measured."""

    sizes: tuple[Size, ...]
    momentum: float = 0.9
    rounds: int = 3
    """Of each system in each pass."""
    passes: int = 2
    warm: int = 3
    """Rounds before them that do not count, at least; and two for each fragment: memory is touched for the first time
    in these, which takes longer than all else."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Another program with one choice of its settings."""

    name: str
    peer: Peer
    processes: int = LEARNERS
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    """Of several fragments it holds one alone."""
    bytes_a_parameter: float = 70.0
    """Of memory at most, all processes together."""


RIVALS = (
    Rival("gradientmail", PEERS["gradientmail"], processes=1, bytes_a_parameter=150.0),
    Rival("torchft", PEERS["torchft"]),
    Rival("torchft, buckets", PEERS["torchft"], options={"buckets": True}),
    Rival("hivemind", PEERS["hivemind"], alone=True),
)


class Running(Protocol):
    """A system between its start and its end."""

    hello: dict[str, Any]
    turns: int
    """After so many rounds the first fragment is due again."""

    def warm_up(self) -> None:
        """A round that does not count."""

    def round(self) -> dict[str, float]:
        """Synchronise once; the figures."""


class Ours:
    """Redis, the production syncer and learners, for the time of a `with` block."""

    def __init__(self, case: Case) -> None:
        self._case, self._stack, self.turns = case, ExitStack(), case.fragments
        self.hello: dict[str, Any] = {}

    def __enter__(self) -> Self:
        need_memory(self._case.memory_bytes(), "this program")
        with ExitStack() as stack:
            url = stack.enter_context(server(None, aof=False))
            with Plain(url) as redis:
                self._redis, version = int(redis.info("process_id")), redis.server()
            self._fleet = stack.enter_context(Fleet(self._case, url))
            case = self._case
            self.hello = {
                "versions": {"redis": version},
                "settings": f"Redis on a unix socket, no append-only file; deltas {case.wire}, "
                f"globals {case.global_codec}, outer step {case.outer}",
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm_up(self) -> None:
        """A round that does not count."""
        one_round(self._case, self._fleet, self._redis)

    def round(self) -> dict[str, float]:
        """As `bench end-to-end` makes it, in the figures of this comparison."""
        learners = self._case.learners
        reset_peak(self._redis)
        one = one_round(self._case, self._fleet, self._redis)
        fleet = self._fleet
        largest, together = peaks_mb([fleet.syncer.pid, *(learner.pid for learner in fleet.learners), self._redis])
        syncer_s = one["syncer_cpu_s_per_gb"] * self._case.delta_bytes / 1e9
        return {
            "publish_to_adopted_s": one["publish_to_adopted_s"],
            "trainer_blocked_s": one["trainer_blocked_s"],
            "server_cpu_s_per_gb": one["syncer_cpu_s_per_gb"],
            "cpu_s_per_learner": (syncer_s + one["redis_cpu_s"]) / learners + one["learner_cpu_s"],
            "largest_process_mb": largest,
            "all_processes_mb": together,
        }


Start = Callable[[Size], AbstractContextManager[Running]]
Found = dict[str, dict[str, dict[str, list[float]]]]
"""By size, system and figure."""


@dataclass(slots=True)
class Outcome:
    """What came of it; a system is in `missing` for a size, or in `found`."""

    found: Found = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    """By size and system: why."""
    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Versions and settings of each."""

    def report(self) -> dict[str, Any]:
        """For JSON."""
        sizes: dict[str, Any] = {}
        for size, systems in self.found.items():
            sizes[size] = {system: spreads(figures) for system, figures in systems.items()}
            sizes[size] |= {system: {"not_available": why} for system, why in self.missing.get(size, {}).items()}
        return {"systems": self.systems, "sizes": sizes}


def spreads(figures: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Of each figure."""
    return {name: spread(values) for name, values in figures.items()}


def systems(
    given: Comparison, folder: Path, rivals: Sequence[Rival] = RIVALS
) -> tuple[dict[str, Start], dict[str, str]]:
    """How to start each, ours first; and why some cannot be."""
    starts: dict[str, Start] = {}
    for name, (wire, outer) in WAYS.items():
        starts[name] = partial(_ours, given, wire, outer)
    missing: dict[str, str] = {}
    pythons: dict[str, Path | str] = {}
    for rival in rivals:
        peer = rival.peer
        if peer.name not in pythons:
            try:
                pythons[peer.name] = python_of(peer, folder)
            except Unavailable as error:
                pythons[peer.name] = str(error)
        python = pythons[peer.name]
        if isinstance(python, str):
            missing[rival.name] = python
        else:
            starts[rival.name] = _starter(rival, python, given)
    return starts, missing


def _ours(given: Comparison, wire: Codec, outer: OuterName, size: Size) -> Ours:
    return Ours(_case(size, given, wire, outer))


def _case(size: Size, given: Comparison, wire: Codec, outer: OuterName = "nesterov") -> Case:
    return Case(size.params, size.fragments, LEARNERS, wire, given.momentum, in_turn=size.fragments > 1, outer=outer)


def _starter(rival: Rival, python: Path, given: Comparison) -> Start:
    def start(size: Size) -> Crew:
        need_memory(rival.bytes_a_parameter * size.params, rival.name)
        fragments = shapes(size)[: 1 if rival.alone else None]
        told = {"learners": LEARNERS, "fragments": fragments, "outer_lr": OUTER_LR, "momentum": given.momentum}
        delta_bytes = _case(size, given, "fp32").delta_bytes
        return Crew(rival.name, python, rival.peer.driver, told | dict(rival.options), rival.processes, delta_bytes)

    return start


def shapes(size: Size) -> list[dict[str, list[int]]]:
    """Of the tensors of each fragment, as our own learners have them here."""
    embedding, *matrices = shapes_of(size.params, size.fragments)
    sizes = {"embedding": embedding} | {f"matrix_{n}": shape for n, shape in enumerate(matrices)}
    found: list[dict[str, list[int]]] = [{} for _ in range(size.fragments)]
    for name, (height, width) in sorted(sizes.items(), key=lambda one: -one[1][0]):
        min(found, key=lambda one: sum(shape[0] for shape in one.values()))[name] = [height, width]
    return found


def measure(given: Comparison, starts: Mapping[str, Start], missing: Mapping[str, str], console: Console) -> Outcome:
    """All systems, at all sizes, in turn."""
    outcome = Outcome()
    with progress(console) as bar:
        task = bar.add_task("", total=len(given.sizes) * given.passes * len(starts))
        for size in given.sizes:
            found = outcome.found[size.name] = {}
            gone = outcome.missing[size.name] = dict(missing)
            for _ in range(given.passes):
                for name, start in starts.items():
                    bar.update(task, description=f"{size.name}: {name}")
                    if name not in gone:
                        try:
                            _rounds(
                                given, size, start, found.setdefault(name, {}), outcome.systems.setdefault(name, {})
                            )
                        except (Unavailable, UsageError) as error:
                            gone[name] = str(error)
                            del found[name]
                    bar.advance(task)
    return outcome


def _rounds(given: Comparison, size: Size, start: Start, found: dict[str, list[float]], hello: dict[str, Any]) -> None:
    with start(size) as running:
        hello |= {name: running.hello[name] for name in ("versions", "settings") if name in running.hello}
        for _ in range(max(given.warm, 2 * running.turns)):
            running.warm_up()
        for _ in range(given.rounds):
            for name, value in running.round().items():
                found.setdefault(name, []).append(value)
