"""Tables of the pages on quality and of the quality lab's page are those of the CSV.

The CSV holds nothing that its experiments do not ask for.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import pytest

from diloco.pipeline.ramps import interval_at
from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results.store import told_digest
from diloco_studies.quality.results.summary import Mark, RunName, RunSummary, decode, encode

ROOT = Path(__file__).resolve().parents[2]
CSV = ROOT / "docs" / "quality" / "results.csv"
PAGES = tuple(
    ROOT / "docs" / page for page in ("results/quality.md", "results/quality-choices.md", "explanation/quality-lab.md")
)
SUMMARIES = decode(CSV.read_text())


# --- figures, as the page writes them ---------------------------------------------------------------------


def summaries(run: str) -> list[RunSummary]:
    """Of all seeds of an "experiment/row of its report", seed 0 first."""
    experiment, label = run.split("/", 1)
    found = {name.seed: one for name, one in SUMMARIES.items() if name[:2] == (experiment, label)}
    assert found, f"{run} is not in the CSV"
    return [found[seed] for seed in sorted(found)]


def values(run: str) -> list[float]:
    return [one.value for one in summaries(run)]


def percent(value: float, other: float) -> float:
    return 100 * (value / other - 1)


def first(*runs: str) -> list[float]:
    """Values of seed 0."""
    return [values(run)[0] for run in runs]


def mid(run: str) -> list[float]:
    """Median and standard deviation over three seeds."""
    assert len(values(run)) == 3
    return [median(values(run)), stdev(values(run))]


def change(run: str, other: str) -> float:
    """Of the median."""
    return percent(median(values(run)), median(values(other)))


def changes(run: str, other: str) -> list[float]:
    """Seed by seed."""
    return [percent(a, b) for a, b in zip(values(run), values(other), strict=False)]


def with_changes(*pairs: tuple[str, str]) -> list[float]:
    """Of each pair the first one's value of seed 0, and how it differs from the other's."""
    return list(chain.from_iterable([*first(run), changes(run, other)[0]] for run, other in pairs))


def merged(run: str) -> float:
    """Percent of the tokens, median over the seeds."""
    return 100 * median(one.merged_share or 0.0 for one in summaries(run))


def exact(run: str) -> float:
    """Percent of the answers, median over the seeds."""
    return 100 * median(one.exact or 0.0 for one in summaries(run))


def time_s(run: str) -> float:
    """Of seed 0."""
    return summaries(run)[0].virtual_s


def between(run: str, virtual_s: float) -> list[float]:
    """Of each seed, at a time between two marks of its curve."""

    def at(curve: Sequence[Mark]) -> float:
        return float(np.interp(virtual_s, [mark.virtual_s for mark in curve], [mark.value for mark in curve]))

    return [at(one.curve) for one in summaries(run)]


def best(run: str, *rates: str) -> str:
    """The row of a run at the best of its rates, by the median."""
    return min((f"{run}, lr={rate}" for rate in rates), key=lambda one: median(values(one)))


# --- the pages --------------------------------------------------------------------------------------------

FIGURE = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?![\d.]*[Me])|\d+(?= [%s]\b| %)")
HISTORY = "Post-training"
"""A section whose runs only an earlier commit can make."""
WITHOUT_DATA = {
    # its run is older than the results that were kept
    "From scratch: the defaults": [["1.416", "+2.2"]],
    # of rules that no commit has
    "Where round trips are long": [
        ["1.482", "84.6", "1.572", "68.5"],
        ["1.482", "84.6", "1.573", "67.9"],
        ["1.489", "64.5", "1.572", "63.6"],
        ["1.497", "55.7", "1.612", "39.3"],
    ],
    # of `diloco run`
    "Few bits with the default outer step": [
        ["2.2624"],
        ["2.2696", "+0.5", "+1.3", "+0.7", "+1.5", "-1.8", "-0.2", "+1.6", "+1.9", "-0.3", "-0.9", "+0.7", "-1.0"],
    ],
    "Virtual time and real time": [["2.091", "2.119", "2.115", "2.115", "0.015"]],
}
"""Rows that are no summary of a lab's run in the CSV."""


def page_tables() -> dict[str, list[list[str]]]:
    """Figures of a section's tables by row, but for heads, the first column, and what is said of flags."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    for line, below in pairwise([*lines, ""]):
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif (
            section != HISTORY
            and line.startswith("|")
            and not line.startswith("| `--")
            and not below.startswith("|---")
        ):
            cells = line.removeprefix("|").removesuffix("|").split("|")
            figures = FIGURE.findall(" | ".join(cells[1:]))
            if figures:
                found.setdefault(section, []).append(figures)
    return found


def defaults() -> Iterator[list[float]]:
    small, large = "guard/data-parallel", "guard-tiny/data-parallel"
    yield [*mid(small), *mid(large)]
    ours = ("guard/decoupled", "guard-tiny/decoupled")
    by_seed = [
        [*mid(one), change(one, base), *changes(one, base)] for one, base in zip(ours, (small, large), strict=True)
    ]
    yield [*by_seed[0], *by_seed[1]]
    others = ("decoupled, RDA of rows", "decoupled, RDA", "decoupled, Nesterov", "RDA, no momentum", "one learner")
    for label in others:
        a, b = f"guard/{label}", f"guard-tiny/{label}"
        yield [*mid(a), change(a, small), *mid(b), change(b, large)]
    base, other, long = "confirm/data-parallel", "confirm/data-parallel, another rate", "confirm/decoupled"
    yield [*values(base), *first(other), *mid(base)]
    yield [*values(long), *mid(long), change(long, base), *changes(long, base)]
    yield from inner_rates()


def inner_rates() -> Iterator[list[float]]:
    dp = [f"methods/data-parallel, lr={lr}" for lr in (0.008, 0.016, 0.024, 0.032)]
    yield first("tried/data-parallel, lr=0.004", *dp)
    yield first(*(f"methods/decoupled, lr={lr}" for lr in (0.008, 0.016, 0.024)))
    yield first("tried/RDA, lr 4e-3", "guard/RDA, no momentum", "tried/RDA, lr 16e-3")
    yield first(*(f"methods/one learner, lr={lr}" for lr in (0.008, 0.016)))
    # With 0.9M parameters results were kept of one rate, guard-tiny's; the other's loss stands here as the page has it.
    yield [*first("guard-tiny/data-parallel"), 1.655]
    yield [*first("guard-tiny/RDA, no momentum"), 1.770]
    yield [1.717, *first("guard-tiny/decoupled, Nesterov")]


def lengths_and_batches() -> Iterator[list[float]]:
    dp = [*(f"steps/data-parallel, steps={n}" for n in (100, 200, 800, 1600))]
    dp.insert(2, "guard/data-parallel")
    yield first(*dp)
    for label in ("decoupled", "decoupled, Nesterov"):
        runs = [*(f"steps/{label}, steps={n}" for n in (100, 200, 800, 1600))]
        runs.insert(2, f"guard/{label}")
        yield with_changes(*zip(runs, dp, strict=True))
    dp = [*(f"batches/data-parallel, batch={n}" for n in (2, 4, 16, 32))]
    dp.insert(2, "guard/data-parallel")
    yield first(*dp)
    for label, batches in (("decoupled", (2, 4, 16, 32)), ("decoupled, Nesterov", (2, 4, 16))):
        runs = [*(f"batches/{label}, batch={n}" for n in batches)]
        runs.insert(2, f"guard/{label}")
        yield with_changes(*zip(runs, dp[: len(runs)], strict=True))
    runs = [*(f"batches/one learner, batch={n}" for n in (2, 4, 16, 32))]
    runs.insert(2, "guard/one learner")
    yield first(*runs)


def methods() -> Iterator[list[float]]:
    same = "data-parallel, the same outer step"
    rates = {same: (4, 8, 16, 24), "decoupled": (8, 16, 24), "data-parallel": (8, 16, 24, 32)}
    rates |= {"decoupled, Nesterov": (8, 16, 24), "DiLoCo": (4, 8), "Streaming DiLoCo": (4, 8)}
    rates |= {"the paper's": (4, 8), "one learner": (8, 16)}
    bests = {label: best(f"methods/{label}", *(f"{n / 1000:.3f}" for n in tried)) for label, tried in rates.items()}
    for run in bests.values():
        yield against(run, bests[same])


def tried() -> Iterator[list[float]]:
    for labels in (
        ("RDA, lr 16e-3", "H = 24, RDA, no momentum", "RDA, lr 4e-3", "H from 2, RDA", "H = 6, RDA"),
        ("mean", "H from 2, mean", "H = 6, mean"),
        (
            *("mean, 1.0/0.5 after 4", "mean, 1.0/0.5 after 4, lr 8e-3", "H from 2, mean, 1.0/0.5 after 24"),
            *("the same, lr 8e-3", "the same, lr 24e-3"),
        ),
        ("mean, 1.0/0.7 after 4", "H from 2, mean, 1.0/0.7 after 24"),
        ("the same, RDA, lr 8e-3",),
        (
            *("RDA, Nesterov 0.7/0.9 after 6 outer steps", "RDA, Nesterov 0.7/0.9 after 4, lr 16e-3"),
            "H from 2, RDA, 0.7/0.9 after 24",
        ),
    ):
        yield first(*(f"tried/{label}" for label in labels))
    yield first("tried/RDA, Nesterov 0.7/0.9 from the start", "methods/one learner, lr=0.008")
    for labels in (
        ("H from 2, mean, carry", "H = 6, mean, carry"),
        ("H = 24, mean, waits", "H = 6, mean, waits"),
        ("H = 6, RDA, waits",),
        ("averaged at every step, waits",),
    ):
        yield first(*(f"tried/{label}" for label in labels))


def outer_steps() -> Iterator[list[float]]:
    yield first("research/orthogonalised, 0.5")
    warm, large = (
        "research/orthogonalised, 0.7, warm-up 24",
        "research/0.9M parameters, orthogonalised, 0.7, outer_warmup=24",
    )
    yield [
        *first("research/orthogonalised, 0.7, outer_warmup=0", "research/orthogonalised (Muon), 0.7, warm-up 6"),
        *first("research/orthogonalised, 0.7, outer_warmup=12", warm),
        change(warm, "research/data-parallel"),
        change(large, "research/0.9M parameters, data-parallel"),
    ]
    yield first(*(f"research/orthogonalised, 0.8, outer_warmup={n}" for n in (12, 24)))
    yield first("research/orthogonalised, 0.9, warm-up 6")
    for label in (
        *("guard rails", "delayed Nesterov, every 4", "extrapolated", "momentum 0.9 by agreement", "schedule-free 0.9"),
        *("H from 4, doubling every 16", "learners that wait"),
    ):
        yield first(f"research/{label}")


def inner_optimizer() -> Iterator[list[float]]:
    for label in ("", ", beta2, beta2=0.9", ", beta2, beta2=0.99", ", last rate 0"):
        base, run = f"inner/data-parallel{label}", f"inner/guard rails{label}"
        yield [*first(base, run), changes(run, base)[0]]


def stale_deltas() -> Iterator[list[float]]:
    for label in ("kept", "dropped", "rebased"):
        yield [*first(f"stale/without grace, {label}"), merged(f"stale/without grace, {label}")]
    kept, rebased = "stale-grace/kept", "stale-grace/rebased"
    for run in (kept, rebased):
        yield [*values(run), merged(run)]
    yield changes(rebased, kept)


def longer_interval() -> Iterator[list[float]]:
    base = "intervals/H = 24"
    for run in (base, "intervals/H = 48", "intervals/H = 96"):
        against = [] if run == base else [percent(mean(values(run)), mean(values(base))), *changes(run, base)]
        syncer_s = mean(one.syncer_s or 0.0 for one in summaries(run))
        yield [mean(values(run)), *values(run), *against, merged(run), syncer_s]
    base = f"{base}, no warm-up"
    for run in (base, "intervals/H = 48, no warm-up", "intervals/H = 96, no warm-up"):
        against = [] if run == base else changes(run, base)
        yield [*values(run), *against, merged(run), mean(one.syncer_s or 0.0 for one in summaries(run))]


def round_trips() -> Iterator[list[float]]:
    for run in ("round-trips/round trips of 4 steps", "round-trips/round trips of 13 steps"):
        yield [mean(values(run)), *values(run), merged(run)]


def interval() -> Iterator[list[float]]:
    base = "H = 24, P = 4, tau = 2"
    for label in (
        *("H, sync_interval=6", base, "H, sync_interval=48", "P, fragments=1", base, "P, fragments=8"),
        *("tau, overlap_steps=0", base, "tau, overlap_steps=8"),
    ):
        yield [*first(f"interval/{label}"), merged(f"interval/{label}")]


def paper_rates() -> Iterator[list[float]]:
    for rate in (0.7, 0.4, 0.2):
        rda, mean_ = (
            [f"paper-rates/the paper's{kind}, outer_lr={rate}, outer_momentum={m}" for m in (0.9, 0.7, 0.5)]
            for kind in ("", ", the mean everywhere")
        )
        yield first(*rda, *mean_)


def merge_rules() -> Iterator[list[float]]:
    for run in (
        *("merging/decoupled", "merging/merge, merge=rda", "merging/RDA of rows", "merging/merge, merge=rda-all"),
        *("merging/adopt, adopt=carry", "merging/adopt, adopt=blend", "merging/joins after a quarter of the time"),
        *("speeds/K = 1 with grace", "merging/equal weights, mixed speeds", "merging/other grace, mixed speeds"),
    ):
        yield first(run)


def carrying() -> Iterator[list[float]]:
    orthogonalised = ("orthogonalised, H = 24", "orthogonalised, H = 6", "the defaults, H from 2")
    for label in ("averaged, H = 24", "averaged, H = 6", *orthogonalised):
        yield [*values(f"carry/{label}"), *values(f"carry/{label}, carried"), merged(f"carry/{label}")]


def mean_or_rda() -> Iterator[list[float]]:
    def pair(label: str, more: str = "") -> list[float]:
        return changes(f"rows/{label}, merge=rda-row{more}", f"rows/{label}, merge=mean{more}")

    yield from map(pair, ("M = 4", "0.9M parameters", "mixture of experts"))
    points = zip(values("digits/decoupled, RDA of rows"), values("digits/decoupled"), strict=True)
    yield [a - b for a, b in points]
    yield from map(pair, ("M = 2", "M = 8", "M = 16"))
    steps = [(f"rows/steps, steps={n}, merge=rda-row", f"rows/steps, steps={n}, merge=mean") for n in (100, 200, 800)]
    yield [changes(*one)[0] for one in steps]
    yield pair("1,600 steps")
    yield [pair("tokens a step", f", batch={n}")[0] for n in (2, 4, 16, 32)]
    yield [*pair("the longest"), *first("rows/the longest, merge=rda-row", "rows/the longest, merge=mean")]
    yield changes("paper-cell/decoupled, RDA of rows", "paper-cell/decoupled")
    none, some = "rows/M = 8, merge=rda-row", "rows/M = 8, failures, merge=rda-row"
    yield [change(some, none), *changes(some, none)]
    for label in ("K = 1 with grace", "K = M", "K = 1 without grace"):
        yield mid(f"rows/mixed speeds, {label}, merge=rda-row")
    yield changes("rows/int4, merge=rda-row", "rows/M = 4, merge=rda-row")


def mixed_speeds() -> Iterator[list[float]]:
    for label in ("K = M", "K = 1 with grace", "K = 1 without grace"):
        yield against(f"speeds/{label}", "speeds/K = M")


def learners() -> Iterator[list[float]]:
    for of in (", M = 2", "", ", M = 8", ", M = 16"):
        where = "learners" if of else "guard"
        base = "learners/data-parallel" if of == ", M = 2" else f"{where}/data-parallel{of}"
        three = [f"{where}/{label}{of}" for label in ("decoupled", "decoupled, RDA of rows", "decoupled, RDA")]
        one = [f"{where}/{label}{of}" for label in ("decoupled, Nesterov", "RDA, no momentum")]
        with_change = chain.from_iterable([*mid(run), change(run, base)] for run in three)
        yield [*mid(base), *with_change, *with_changes(*((run, base) for run in one))]


def cost(run: str) -> list[float]:
    """Value of seed 0, bytes per token and merged percent."""
    return [*first(run), *costs(run)[:2]]


def costs(run: str) -> list[float]:
    """Bytes per token, merged percent and the syncer's seconds, medians over the seeds."""
    found = summaries(run)
    bytes_, seconds = ([getattr(one, name) or 0.0 for one in found] for name in ("bytes_a_token", "syncer_s"))
    return [median(bytes_), merged(run), median(seconds)]


def many() -> Iterator[list[float]]:
    short, long, most, last = (f"many-{name}/" for name in ("8", "8-long", "16", "16-long"))
    base, same, ramp = "data-parallel", "data-parallel, the same outer step", ", ramp of 12, warm-up"
    yield first(f"{short}{base}, lr=0.024", f"{long}{base}", f"{most}{base}, lr=0.016", f"{last}{base}")
    others = first(f"{long}{same}{ramp} 3", f"{most}{same}, lr=0.016", f"{last}{same}, a lower rate")
    yield [*first(f"{short}{same}, lr=0.016"), 100.0, *others]
    yield cost(f"{short}mean")
    yield [*cost(f"{short}rows, lr=0.016"), *first(f"{long}rows", f"{most}rows, lr=0.024", f"{last}rows")]
    yield [*cost(f"{short}rows{ramp}, outer_warmup=3"), *first(f"{long}rows{ramp} 3, lr=0.016", f"{last}rows{ramp} 3")]
    halved = f"{long}rows{ramp} 3, half the batch"
    yield [
        *cost(f"{short}rows, half the batch, lr=0.016"),
        *first(halved, f"{most}rows, half the batch", f"{last}rows{ramp} 3, half the batch"),
    ]
    yield first(f"{short}{base}, half the batch")
    yield [*first(f"{short}{same}, half the batch"), 100.0]
    yield first(f"{short}rows, lr=0.016")
    yield first(f"{short}rows, lr=0.024")
    yield first(*(f"{short}rows, ramp, doubling={n}" for n in (4, 12)))
    for label in ("H from 1", "H up to 12", "warm-up 3", "outer momentum 0.8", "P = 8"):
        yield first(f"{short}rows, {label}")
    yield first(*(f"{short}rows{ramp}, outer_warmup={n}" for n in (0, 3)))
    yield first(f"{short}rows{ramp} 3, H from 4")
    yield first(*(f"{short}mean, outer rate, outer_lr={n}" for n in (1.2, 1.4)))
    yield first(f"{short}mean, rate")
    yield first(f"{short}mean{ramp} 3")
    usual, slower = f"{short}rows", f"{short}rows{ramp} 3"
    done = f"{short}rows, lr=0.016", f"{short}rows{ramp}, outer_warmup=3"
    yield first(done[0], f"{usual}, steps carried", f"{usual}, learners wait")
    yield first(done[1], f"{slower}, steps carried", f"{slower}, learners wait")
    yield [*(merged(run) for run in (*done, f"{usual}, steps carried", f"{slower}, steps carried")), 100.0]


def fair() -> Iterator[list[float]]:
    rates = {"defaults": (("0.008", "0.016"), ""), "defaults-deep": (("0.004", "0.008"), ", lr=0.008")}
    for name, (of_same, of_plain) in rates.items():
        base = best(f"{name}/data-parallel, the same outer step", *of_same)
        yield [*mid(base), *values(base), 100.0]
        nesterov = ("decoupled, Nesterov",) if name == "defaults" else ()
        for label in ("decoupled", "decoupled, RDA of rows", *nesterov):
            run = f"{name}/{label}"
            yield [*mid(run), *values(run), *cost(run)[1:], change(run, base), *changes(run, base)]
        run = f"{name}/data-parallel{of_plain}"
        yield [*mid(run), *values(run), change(run, base), *changes(run, base)]


def against(run: str, base: str) -> list[float]:
    """A row: median and seeds, or the one seed; its costs if it merges; how it differs from the row `base`."""
    of = [*mid(run), *values(run)] if len(values(run)) > 1 else first(run)
    if summaries(run)[0].syncer_s is not None:
        of += costs(run)
    if run == base:
        return of
    if len(values(run)) == 1:
        return [*of, *changes(run, base)]
    return [*of, change(run, base), *changes(run, base)]


def paper_cell() -> Iterator[list[float]]:
    rates = ("0.004", "0.008")
    base = best("paper-cell/data-parallel, the same outer step", *rates)
    for run in (
        *(base, "paper-cell/decoupled", "paper-cell/decoupled, RDA of rows"),
        *(best("paper-cell/data-parallel", *rates), "paper-cell/the paper's"),
        best("paper-cell/the paper's, with the ramp", *rates),
        *("paper-cell/DiLoCo, lr=0.008", "paper-cell/Streaming DiLoCo, lr=0.008"),
    ):
        yield against(run, base)
    base = best("paper-cell-2m/data-parallel, the same outer step", *rates)
    for run in (base, "paper-cell-2m/decoupled", best("paper-cell-2m/data-parallel", *rates)):
        yield against(run, base)
    yield from struck()


def struck() -> Iterator[list[float]]:
    """The paper's cell under failures, and with slow learners."""

    def row(label: str, at_s: float | None = None) -> list[float]:
        run = f"paper-cell/{label}"
        one = summaries(run)[0]
        then = [] if at_s is None else between(run, at_s)
        shares = [merged(run)] if one.merged_share is not None else []
        return [one.value, time_s(run), *then, 100 * one.goodput, *shares]

    yield row("decoupled")
    yield row("decoupled, failures", 2370)
    yield row("elastic data-parallel, failures", 2370)
    yield row("decoupled, four slow, K = 1 with grace")
    for run in ("K = M", "K = 1 with grace"):
        yield against(f"slow-half/{run}", "slow-half/K = M")


def sizes() -> Iterator[list[float]]:
    for size, of_ours, rates in (("10m", "0.004", ("0.004", "0.008")), ("30m", "0.002", ("0.002", "0.004"))):
        base = best(f"sizes-{size}/data-parallel, the same outer step", *rates)
        plain = best(f"sizes-{size}/data-parallel", *rates)
        yield against(base, base)
        yield against(f"sizes-{size}/decoupled, lr={of_ours}", base)
        alone = len(values(base)) == 1  # as many seeds of the one alone
        yield [*mid(plain), *values(plain), *changes(plain, base)] if alone else against(plain, base)


def codecs() -> Iterator[list[float]]:
    def row(label: str) -> list[float]:
        return first(f"codec/{label}")

    def against(label: str) -> float:
        return changes(f"codec/{label}", "codec/bf16")[0]

    yield [*row("fp32"), against("fp32")]
    yield [*row("bf16"), *mid("codec/bf16")]
    yield [1.01, *row("int8"), against("int8")]
    four = ("codec/int4", "codec/bf16")
    yield [0.51, *row("int4"), *mid("codec/int4"), change(*four), *changes(*four)]
    yield [0.51, *row("e3m0"), against("e3m0")]
    yield [*row("bf16, globals in bf16"), against("bf16, globals in bf16")]


def few_bits() -> Iterator[list[float]]:
    labels = ("fp32", "bf16, globals in bf16", "int8, globals in int8", "int4", "int2")
    places = ("bits-short/", "bits-short/Nesterov, ", "bits-short/M = 2, H = 6, ", "bits-tiny-short/")
    short = [(place, label) for place in places for label in labels]
    for place, label in [*short, *(("bits/", label) for label in ("fp32", "bf16", "int4"))]:
        if RunName(*f"{place}{label}".split("/"), 0) not in SUMMARIES:
            continue  # not run, and not on the page: rows are counted
        found = changes(f"{place}{label}", f"{place}fp32") if label != "fp32" else []
        yield [*values(f"{place}{label}"), *found, *([mean(found)] if len(found) > 1 else [])]


def digits() -> Iterator[list[float]]:
    fast = "other rates, lr=0.004"
    for label in ("data-parallel, the same outer step", "decoupled"):
        yield points(f"digits/{label}, {fast}")
    yield points("digits/decoupled, RDA of rows")
    yield points(f"digits/data-parallel, {fast}")
    for label in ("DiLoCo", "Streaming DiLoCo", "the paper's"):
        yield points(f"digits/{label}")
    yield points("digits/one learner")
    for label in ("data-parallel, the same outer step", "decoupled", "data-parallel"):
        yield [*first(f"digits/{label}, other rates, lr=0.001"), *mid(f"digits/{label}")]


def points(run: str) -> list[float]:
    """Accuracy: median and seeds, or the one seed; percent merged where it merges."""
    shares = [merged(run)] if summaries(run)[0].syncer_s is not None else []
    return [*(mid(run) if len(values(run)) > 1 else []), *values(run), *shares]


def experts() -> Iterator[list[float]]:
    main = ("data-parallel, the same outer step", "decoupled", "data-parallel")
    usual, ours, plain = (f"experts/{label}" for label in main)
    base = f"{usual}, other rates, lr=0.008"
    for run in (base, ours, plain):
        yield against(run, base)
    for label in ("DiLoCo", "Streaming DiLoCo", "the paper's", "one learner"):
        yield against(f"experts/{label}", base)
    for run in (usual, ours):
        yield first(f"{run}, other rates, lr=0.008", run, f"{run}, other rates, lr=0.024")
    yield first(f"{plain}, other rates, lr=0.008", plain)


def vision_language() -> Iterator[list[float]]:
    base = "vision-language/data-parallel"
    yield [*mid(base), *values(base), exact(base)]
    for label in ("decoupled", "one learner, a quarter of the tokens"):
        run = f"vision-language/{label}"
        yield [*mid(run), *values(run), change(run, base), exact(run)]
    for label in ("data-parallel", "decoupled"):
        yield first(*(f"vision-language/{label}, rates, lr={lr}" for lr in (0.002, 0.004, 0.008)))


def failures() -> Iterator[list[float]]:
    same = "failures/data-parallel with the same outer step, no failures"
    none, some = "failures/decoupled, no failures", "failures/decoupled, failures"
    base, elastic = "failures/data-parallel, no failures", "failures/elastic data-parallel, failures"

    def row(run: str) -> list[float]:
        times = [one.virtual_s for one in summaries(run)]
        shares = costs(run)[:2] if run in (same, none, some) else []
        return [*mid(run), *values(run), median(times), median(between(run, 215)), *shares]

    for run in (same, none, some, base, elastic):
        yield row(run)


def scavenging() -> Iterator[list[float]]:
    def row(run: str, base: str) -> list[float]:
        several = len(values(run)) > 1
        found = [*mid(run), *values(run)] if several else values(run)
        if run != base:
            found += [change(run, base), *changes(run, base)] if several else changes(run, base)
        return [*found, median(one.virtual_s for one in summaries(run)), *([merged(run)] if merged(run) else [])]

    half = "RDA of rows, half the batch"
    for base, with_more in (
        ("scavenging/decoupled", "decoupled"),
        ("defaults/decoupled, RDA of rows", "RDA of rows"),
        ("scavenging/RDA of rows, slower ramp", "RDA of rows, slower ramp"),
        (f"scavenging/{half}", half),
        ("scavenging/data-parallel", "elastic data-parallel"),
    ):
        for run in (base, f"scavenging/{with_more}, four more for a part"):
            yield row(run, base)


def agreement() -> Iterator[list[float]]:
    yield [*values("agreement/the lab"), *mid("agreement/the lab")]


def trial() -> Iterator[list[float]]:
    for label in ("data-parallel", "decoupled, defaults", "decoupled 0.7/0.9"):
        yield first(f"trial/{label}")


def packing() -> Iterator[list[float]]:
    for label in ("balanced", "contiguous", "strided"):
        *losses, _bytes, share, syncer_s = (row := against(f"packing/{label}", "packing/balanced"))[:8]
        yield [*losses, share, syncer_s, *row[8:]]


def muon_inside() -> Iterator[list[float]]:
    base = best("muon-first/data-parallel, Muon", "0.008", "0.016", "0.024")
    for run in (base, best("muon-first/decoupled, Muon", "0.008", "0.016", "0.024", "0.032", "0.048")):
        yield against(run, base)


def field() -> Iterator[list[float]]:
    of = "field/data-parallel, Muon"
    for label in ("data-parallel, Muon", "data-parallel, AdamW", "decoupled", "MuLoCo", "DiLoCo", "the paper's"):
        row = []
        for learners in (1, 4, 8, 16):
            run, base = f"field/{label}, M = {learners}", f"{of}, M = {learners}"
            row += [median(values(run))] if label in of else [median(values(run)), change(run, base)]
        run = f"field/{label}, M = 8"
        yield [*row, *(costs(run) if summaries(run)[0].syncer_s is not None else []), *PUBLISHED.get(label, [])]


def field_long() -> Iterator[list[float]]:
    rates = {
        4: {"data-parallel, Muon": (12, 24, 48), "data-parallel, AdamW": (4, 8, 16), "decoupled": (4, 8, 16)},
        8: {"data-parallel, Muon": (24,), "data-parallel, AdamW": (8,), "decoupled": (8, 16)},
    }
    rates[4]["MuLoCo"] = (16, 32)
    for learners, by_label in rates.items():
        base = f"field-long/data-parallel, Muon, M = {learners}, lr=0.024"
        for label, tried in by_label.items():
            runs = [f"field-long/{label}, M = {learners}, lr={rate / 1000:.3f}" for rate in tried]
            found = min(runs, key=lambda run: values(run)[0])
            yield [*first(*runs), *(changes(found, base) if found != base else [])]


def field_tokens() -> Iterator[list[float]]:
    base = "field-tokens/data-parallel, Muon"
    for label in ("data-parallel, Muon", "data-parallel, AdamW", "decoupled", "MuLoCo", "DiLoCo", "the paper's"):
        yield against(f"field-tokens/{label}", base)


def cell_muon() -> Iterator[list[float]]:
    muon = "cell-muon/data-parallel, Muon, M = {}, lr=0.016"
    yield [value for m in (4, 8) for value in values(muon.format(m))]
    runs = {m: f"cell-muon/decoupled, M = {m}, lr=0.008" for m in (4, 8)}
    losses = [value for m, run in runs.items() for value in (*values(run), *changes(run, muon.format(m)))]
    yield [*losses, merged(runs[8]), *(one.syncer_s or 0.0 for one in summaries(runs[8]))]


def summary() -> Iterator[list[float]]:
    """The table that opens the page: how the defaults differ from what the sections below compare them with."""

    def apart(run: str, base: str, *rates: str) -> float:
        """Percent from the base at the best of its rates; a run of one seed from the base's seed 0."""
        base = best(base, *rates) if rates else base
        return change(run, base) if len(values(run)) > 1 else changes(run, base)[0]

    def later(run: str, base: str) -> float:
        """Percent of the base's median time."""
        return percent(*(median(one.virtual_s for one in summaries(label)) for label in (run, base)))

    cells: dict[str, tuple[str, ...]] = {
        "paper-cell/decoupled": ("0.004", "0.008"),
        "paper-cell-2m/decoupled": ("0.004", "0.008"),
        "sizes-10m/decoupled, lr=0.004": ("0.004", "0.008"),
        "sizes-30m/decoupled, lr=0.002": ("0.002", "0.004"),
    }
    for label in ("data-parallel", "data-parallel, the same outer step"):
        yield [apart(run, f"{run.split('/')[0]}/{label}", *rates) for run, rates in cells.items()]
    for inner, learners in (("Muon", (4, 8, 16)), ("AdamW", (1, 4, 8, 16))):
        row = [apart(f"field/decoupled, M = {m}", f"field/data-parallel, {inner}, M = {m}") for m in learners]
        cell = [("cell-muon/decoupled, M = {}, lr=0.008", "cell-muon/data-parallel, Muon, M = {}, lr=0.016")]
        at_deep = [apart(run.format(m), muon.format(m)) for run, muon in cell for m in (4, 8) if inner == "Muon"]
        yield [*row, *at_deep]
    lengths = []
    for base, rate in (("data-parallel, Muon", "0.024"), ("data-parallel, AdamW", "0.008")):
        for m in (4, 8):
            long = f"field-long/decoupled, M = {m}, lr=0.008", f"field-long/{base}, M = {m}, lr={rate}"
            lengths += [changes(f"field/decoupled, M = {m}", f"field/{base}, M = {m}")[0], apart(*long)]
    yield lengths
    same = "data-parallel, the same outer step"
    yield [
        apart("defaults/decoupled", f"defaults/{same}", "0.008", "0.016"),
        apart("defaults-deep/decoupled", f"defaults-deep/{same}", "0.004", "0.008"),
    ]
    struck, elastic = "failures/decoupled, failures", "failures/elastic data-parallel, failures"
    costs = ((struck, "failures/decoupled, no failures"), (elastic, "failures/data-parallel, no failures"))
    yield list(chain.from_iterable([apart(*pair), later(*pair)] for pair in costs))
    yield [-apart("speeds/K = 1 with grace", "speeds/K = M")]
    yield [mean(changes(f"bits-short/{one}", "bits-short/fp32")) for one in ("bf16, globals in bf16", "int4")]
    tuned = [f"post-training/{one}, then {one}" for one in ("decoupled", "data-parallel")]
    same_start = apart("post-training/data-parallel, then decoupled", tuned[1])
    yield [same_start, apart(*(f"{one}, 16 examples a step" for one in tuned))]
    fast = (f"digits/{label}, other rates, lr=0.004" for label in ("decoupled", same, "data-parallel"))
    yield [*(median(values(one)) for one in fast), apart("experts/decoupled", f"experts/{same}, other rates, lr=0.008")]
    yield [apart("paper-cell/the paper's", "paper-cell/data-parallel", "0.004", "0.008")]


PUBLISHED = {"MuLoCo": [3.1, 1.7, 3.1], "DiLoCo": [5.3, 3.3, 3.1, 3.9, 1.1, 2.4]}
"""Percent, as papers have it, and billions of parameters."""

TABLES = {
    "Quality": summary,
    "Six methods, 1 to 16 learners": field,
    "Four times as long": field_long,
    "At 0.9M parameters": cell_muon,
    "In tokens": field_tokens,
    "From scratch: the defaults": defaults,
    "The gap at other lengths and batches": lengths_and_batches,
    "The defaults, and data-parallel with the same outer step": fair,
    "The paper's cell": paper_cell,
    "Sizes": sizes,
    "Methods": methods,
    "Muon inside": muon_inside,
    "What was tried with Nesterov's outer step": tried,
    "Outer steps": outer_steps,
    "The inner optimizer": inner_optimizer,
    "Stale deltas": stale_deltas,
    "A longer H": longer_interval,
    "Where round trips are long": round_trips,
    "H, P and tau": interval,
    "The paper's outer rate and momentum": paper_rates,
    "Merge rules, weights, overlapped steps, late learners": merge_rules,
    "Carrying steps over an adoption": carrying,
    "The mean, or RDA?": mean_or_rda,
    "Mixed speeds": mixed_speeds,
    "Learners": learners,
    "Many learners": many,
    "Bytes of a delta, and of a global": codecs,
    "Few bits with the default outer step": few_bits,
    "Handwritten digits": digits,
    "Mixture of experts": experts,
    "Vision and language": vision_language,
    "Failures": failures,
    "More learners for a part of the run": scavenging,
    "Virtual time and real time": agreement,
    "What it costs": trial,
    "Fragment packing": packing,
}
"""Section of a page -> figures of its tables' rows, from the CSV."""


def agrees(figure: str, value: float) -> bool:
    """Rounded to its digits, directly or by way of the report's four decimals."""
    unit = 10.0 ** -len(figure.partition(".")[2])
    return abs(float(figure) - value) <= 0.55 * unit


@pytest.mark.parametrize("section", TABLES)
def test_a_table_of_the_page_is_that_of_the_csv(section):
    """Row by row and figure by figure; the first column, which names the row, aside."""
    rows = list(TABLES[section]())
    written = [figures for figures in page_tables()[section] if figures not in WITHOUT_DATA.get(section, [])]
    assert [len(figures) for figures in written] == [len(row) for row in rows]
    wrong = [
        f"{figure} is {value:.6g} in {row}"
        for figures, row in zip(written, rows, strict=True)
        for figure, value in zip(figures, row, strict=True)
        if not agrees(figure, value)
    ]
    assert wrong == []


def test_another_figure_does_not_agree():
    """One that is off by one in its last digit is wrong."""
    assert agrees("1.769", 1.76847)
    assert agrees("+0.2", 0.2217)
    assert agrees("84", 83.66)
    assert not agrees("1.769", 1.76801)
    assert not agrees("-0.2", 0.2217)
    assert not agrees("0.5", 0.5556)


def test_no_table_of_the_pages_is_left_out():
    """A section with figures in a table is one of those above."""
    assert set(page_tables()) == TABLES.keys() | WITHOUT_DATA.keys()


@pytest.mark.parametrize("section", WITHOUT_DATA)
def test_a_row_without_data_is_on_a_page(section):
    """And so are all rows of a section that has no other."""
    written = page_tables()[section]
    assert [figures for figures in WITHOUT_DATA[section] if figures not in written] == []
    assert section in TABLES or written == WITHOUT_DATA[section]


# --- sentences that no table has --------------------------------------------------------------------------


def last_interval(label: str) -> int:
    """H of a row of "Learners" at its end."""
    rows = read_experiment(CSV.with_name("learners.toml")).rows
    run = next(row.runs[0] for row in rows if row.label == label)
    sync, version, step = run.sync_spec(tokens=1), 0, 0
    while (step := step + interval_at(sync, version)) <= run.steps:
        version += 1
    return interval_at(sync, version)


def longer_by_waiting() -> list[float]:
    pairs = (("rows, lr=0.016", "rows"), ("rows, ramp of 12, warm-up, outer_warmup=3", "rows, ramp of 12, warm-up 3"))
    return [percent(time_s(f"many-8/{waits}, learners wait"), time_s(f"many-8/{run}")) for run, waits in pairs]


def spread_of_int4() -> list[float]:
    found = changes("codec/int4", "codec/bf16")
    return [mean(found), stdev(found)]


SENTENCES: dict[str, Callable[[], bool]] = {
    "Waiting takes 3 to 4 % longer here": lambda: [round(one) for one in longer_by_waiting()] == [3, 4],
    "the mean of three pairs is +0.01 %, at a spread of 0.8 %": lambda: all(
        map(agrees, ("0.01", "0.8"), spread_of_int4())
    ),
    "H is 24 in neither: it ends at 16 and at 8.": lambda: (
        [last_interval(f"decoupled, Nesterov, M = {learners}") for learners in (8, 16)] == [16, 8]
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_of_the_pages_is_true(sentence):
    """By the CSV, or by the experiment's file."""
    assert sentence in " ".join("\n".join(page.read_text() for page in PAGES).split())
    assert SENTENCES[sentence]()


# --- the CSV ----------------------------------------------------------------------------------------------


def test_each_line_is_a_run_that_its_experiment_asks_for():
    """With the settings that the file has now: so that `diloco lab report --from` shows it, and `diloco lab run` would
    make it anew. Or it says which commit is the last that can, and no experiment asks for it."""
    asked = {
        RunName(experiment.name, row.label, run.seed): told_digest(run)
        for experiment in map(read_experiment, CSV.parent.glob("*.toml"))
        for row in experiment.rows
        for run in row.runs
    }
    wrong = {
        name: one.settings
        for name, one in SUMMARIES.items()
        if (name in asked if re.fullmatch("commit [0-9a-f]{8}", one.settings) else asked.get(name) != one.settings)
    }
    assert wrong == {}


def test_the_csv_is_as_the_code_writes_it():
    """Nobody rounds by hand, and a new summary changes no other line."""
    assert encode(SUMMARIES) == CSV.read_text()


def test_results_in_the_tree_stay_small():
    """One CSV, no raw results: those stay in the folder where they were computed."""
    assert [path.name for path in CSV.parent.iterdir() if path.suffix != ".toml"] == ["results.csv"]
    assert CSV.stat().st_size < 300_000


def test_a_curve_ends_where_its_run_does():
    """The last mark is the final value; time and tokens go up."""
    for name, one in SUMMARIES.items():
        assert one.curve[-1].value == pytest.approx(one.value, rel=1e-4), name
        tokens, times, *_ = zip(*(Mark(*mark) for mark in one.curve), strict=True)
        assert sorted(set(tokens)) == list(tokens), name
        assert sorted(times) == list(times), name
