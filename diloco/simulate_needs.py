"""What a run needs, and how it fares on mixed hardware: bandwidth, a plan, two studies of the paper."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.goodput import bandwidth as links
from chaos.goodput import studies
from chaos.goodput.constants import Constants
from chaos.goodput.plan import plan as make_plan
from pipeline.errors import UsageError

from .simulate_tables import check_files, pictures, write


def bandwidth(params: float, step_time: float, layers: int, json_file: Path | None, plot: Path | None) -> None:
    """`diloco simulate bandwidth`."""
    console = Console()
    check_files(json_file, plot)
    model = links.Model(params, step_time, layers or links.layers_of(params))
    found = links.table(model)
    shown = Table(
        title=f"Gbit/s for so much compute utilisation: {params / 1e9:g}B parameters, {model.layers} layers, "
        f"{step_time:g} s a step, H = {links.INTERVAL}"
    )
    for name in ("", *(f"{target} %" for target in links.TARGETS)):
        shown.add_column(name, justify="right" if name else "left")
    for name, needs in found.items():
        shown.add_row(name, *("more" if rate is None else f"{rate:.1f}" for rate in needs.values()))
    console.print(shown)
    regions = {f"{link:g}": links.speed_up(links.REGIONS, link * 1e9) for link in links.REGION_LINKS_GBIT_S}
    times = ", ".join(f"{times:.0f} at {link} Gbit/s" for link, times in regions.items())
    console.print(f"12B over 4 regions, decoupled 4-bit against data-parallel, times faster: {times} (paper: over 20)")
    rows = [{"method": name, "gbit_s": {str(t): rate for t, rate in needs.items()}} for name, needs in found.items()]
    if json_file:
        about = {"params": params, "step_time_s": step_time, "layers": model.layers, "interval": links.INTERVAL}
        data = {**about, "rows": rows, "regions_12b_times_faster": regions}
        json_file.write_text(json.dumps(data, indent=1) + "\n")
    if plot:
        series = {}
        for name, method in links.METHODS.items():
            shares = [100 * links.utilisation(model, method, rate * 1e9) for rate in links.GRID_GBIT_S]
            series[name] = (list(links.GRID_GBIT_S), shares)
        title = f"{params / 1e9:g}B parameters, {step_time:g} s a step"
        pictures().lines(series, ("Gbit/s", "compute utilisation (%)"), title, plot, ("log", "linear"))


def plan(constants: Constants, chips: float, json_file: Path | None) -> None:
    """`diloco simulate plan`."""
    console = Console()
    check_files(json_file)
    if chips != int(chips):
        raise UsageError(f"--chips {chips}: a whole number")
    try:
        made = make_plan(constants, int(chips))
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    shown = Table(title=f"{int(chips):,} chips, {constants.params / 1e9:g}B parameters", show_lines=True)
    for name in ("choose", "", "why"):
        shown.add_column(name)
    for name, flag in (
        ("learners", "M"),
        ("sync_interval", "H"),
        ("fragments", "P"),
        ("codec", "codec"),
        ("syncers", "syncers"),
        ("redis_nodes", "Redis nodes"),
    ):
        shown.add_row(flag, str(getattr(made, name)), made.why[name])
    console.print(shown)
    console.print(
        f"goodput {made.goodput:.1%}, uptime {made.uptime:.2%}, longest stall {made.longest_stall_s:.0f} s, "
        f"{made.mean_participants:.1f} learners a merge, {made.overwritten:.1%} of the steps overwritten\n"
        f"link of a learner: {made.link_load:.0%} busy, a fragment's round trip {made.round_trip_s:.1f} s\n"
        f"syncers together: {made.syncer_cores:.2f} cores merging, {made.syncer_memory_bytes / 1e9:.0f} GB; "
        f"Redis: {made.redis_memory_bytes / 1e9:.0f} GB, {made.redis_bytes_per_s / 1e9:.2f} GB/s"
    )
    for warning in made.warnings:
        console.print(f"warning: {warning}")
    if json_file:
        json_file.write_text(json.dumps(made.as_dict(), indent=1) + "\n")


def mixed(
    constants: Constants, learners: int, seeds: int, days: float, json_file: Path | None, plot: Path | None
) -> None:
    """`diloco simulate mixed`."""
    console = Console()
    check_files(json_file, plot)
    given = constants.model_fields_set
    world = constants.model_copy(update={k: v for k, v in studies.MIXED.items() if k not in given})
    runs = [studies.mixed(world, learners, days, seed) for seed in range(seeds)]
    means = {
        name: studies.Mixed(*(sum(values) / seeds for values in zip(*(run[name] for run in runs), strict=True)))
        for name in runs[0]
    }
    shown = Table(title=f"{learners} learners, {round(world.older_learners * learners)} of them slower")
    for name in ("", "goodput", "the paper's", "learners a merge", "overwritten", "grace"):
        shown.add_column(name)
    for name, m in means.items():
        paper = f"{studies.MIXED_PAPER[name]:.0%}"
        grace = f"{m.mean_grace_s:.2f} s"
        shown.add_row(name, f"{m.goodput:.1%}", paper, f"{m.mean_participants:.2f}", f"{m.overwritten:.1%}", grace)
    console.print(shown)
    rows = [{"way": name, **m._asdict(), "paper": studies.MIXED_PAPER[name]} for name, m in means.items()]
    write(rows, {"constants": world.model_dump(mode="json"), "learners": learners}, json_file, None)
    if plot:
        series = {
            "goodput": {name: m.goodput for name, m in means.items()},
            "learners in a merge / M": {name: m.mean_participants / learners for name, m in means.items()},
        }
        pictures().bars(series, ("", "share"), "Mixed hardware", plot)


def scavenge(json_file: Path | None, plot: Path | None) -> None:
    """`diloco simulate scavenge`."""
    check_files(json_file, plot)
    rows = studies.rows()
    shown = Table(title="time of a run relative to one without extra compute (in brackets: the paper's)")
    for name in ("extra compute", "data-parallel", "decoupled"):
        shown.add_column(name, justify="right")
    for row in rows:
        texts = (f"{row[name]:.2f} ({row[f'paper, {name}']:.2f})" for name in ("data-parallel", "decoupled"))
        shown.add_row(f"+{row['extra']:.0%}", *texts)
    Console().print(shown)
    write(rows, {"share": studies.SCAVENGED_SHARE, "comm": studies.DATA_PARALLEL_COMM}, json_file, None)
    if plot:
        x = [100 * row["extra"] for row in rows]
        series = {name: (x, [row[name] for row in rows]) for name in rows[0] if name != "extra"}
        pictures().lines(series, ("extra compute (%)", "relative time"), "Scavenging", plot)
