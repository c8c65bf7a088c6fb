"""What a run needs, and how it fares on mixed hardware: bandwidth, a plan, two studies of the paper."""

from dataclasses import asdict
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.site import layers_of
from diloco.pipeline.units import Amount, Span, written
from diloco.plan import choices, show
from diloco_studies.goodput import bandwidth as links
from diloco_studies.goodput import studies
from diloco_studies.goodput.commands.options import Files, one, one_whole
from diloco_studies.goodput.constants import Constants
from diloco_studies.goodput.plan import Plan
from diloco_studies.goodput.plan import plan as make_plan
from diloco_studies.goodput.table import standard_error


def bandwidth(params: str, step_time: str, layers: int, run: links.Run, files: Files) -> None:
    """`diloco simulate bandwidth`."""
    console = Console()
    files.check()
    size, step_s = one(params, Amount, "params"), one(step_time, Span, "step-time")
    model, kinds = links.Model(size, step_s, layers or layers_of(size)), links.methods(run)
    found = links.table(model, kinds)
    about = f"{size / 1e9:g}B parameters, {step_s:g} s per step, {model.layers} layers"
    shown = Table(title=f"Gbit/s for so much compute utilisation: {about}", padding=0)
    for name in ("", "H", "on the wire", *(f"{target} %" for target in links.TARGETS)):
        shown.add_column(name, justify="right" if "%" in name else "left", no_wrap=True)
    for name, needs in found.items():
        shown.add_row(name, *_for_what(kinds[name]), *("more" if at is None else f"{at:.3g}" for at in needs.values()))
    console.print(shown)
    console.print(links.how_to_read(run))
    regions = {
        name: {link: links.speed_up(links.REGIONS, method, link * 1e9) for link in links.REGION_LINKS_GBIT_S}
        for name, method in kinds.items()
        if method is not links.DATA_PARALLEL
    }
    across = Table(title="12B over 4 regions: times faster than data-parallel in bf16 (paper: over 20 on 2-5 Gbit/s)")
    for name in ("", "H", "on the wire", *(f"{link:g} Gbit/s" for link in links.REGION_LINKS_GBIT_S)):
        across.add_column(name, justify="right" if "Gbit" in name else "left")
    for name, times in regions.items():
        across.add_row(name, *_for_what(kinds[name]), *(f"{one:.0f}" for one in times.values()))
    console.print(across)
    rows = [
        {"method": name, "every_steps": kinds[name].every, "wire": kinds[name].wire}
        | {"gbit_s": {str(t): rate for t, rate in needs.items()}}
        for name, needs in found.items()
    ]
    given = {"params": size, "step_time_s": step_s, "layers": model.layers, **asdict(run)}
    faster = {name: {f"{link:g}": one for link, one in times.items()} for name, times in regions.items()}
    files.write(rows, {**given, "regions_12b_times_faster": faster})


def _for_what(method: links.Method) -> tuple[str, str]:
    """Of a row: how often, and what travels."""
    return "-" if method is links.DATA_PARALLEL else str(method.every), method.wire


def plan(
    constants: Constants,
    chips: str,
    learners: int | None,
    codec: Literal["auto", Codec],
    global_codec: str,
    files: Files,
) -> None:
    """`diloco simulate plan`."""
    console = Console()
    files.check()
    count = one_whole(chips, "chips")
    made = make_plan(constants, count, codec, global_codec, learners)
    console.print(choices(made, f"{count:,} chips, {written(constants.params)} parameters"))
    console.print(
        f"goodput {made.goodput:.1%}, uptime {made.uptime:.2%}, longest stall {made.longest_stall_s:.0f} s, "
        f"{made.mean_participants:.1f} learners a merge\n"
        f"{made.lines()}"
    )
    show(console, made)
    if files.json_file:
        files.json_file.write_text(dumps(asdict(made), indent=1) + "\n")
    Files(None, files.csv_file).write([_row(made)], {})


def _row(made: Plan) -> dict[str, Any]:
    """A plan as one row of a table."""
    parties = {party.name: party._asdict() for party in made.parties}
    each = {f"{name}: {key}": one for name, party in parties.items() for key, one in party.items() if key != "name"}
    return {**asdict(made), **each, "warnings": "; ".join(made.warnings), "parties": ", ".join(parties)}


def mixed(constants: Constants, learners: int, seeds: int, days: float, files: Files) -> None:
    """`diloco simulate mixed`."""
    console = Console()
    files.check()
    given = constants.model_fields_set
    world = constants.model_copy(update={k: v for k, v in studies.MIXED.items() if k not in given})
    runs = [studies.mixed(world, learners, days, seed) for seed in range(seeds)]
    shown = Table(title=f"{learners} learners, {round(world.older_learners * learners)} of them slower")
    for name in ("", "goodput", "the paper's", "of all learners' time", "learners a merge", "overwritten", "grace"):
        shown.add_column(name)
    rows = []
    for name, paper in studies.MIXED_PAPER.items():
        mine = [run[name] for run in runs]
        m = studies.Mixed(*map(fmean, zip(*mine, strict=True)))
        errors = {"goodput_stderr": standard_error([r.goodput for r in mine])}
        errors["mean_participants_stderr"] = standard_error([r.mean_participants for r in mine])
        rows.append({"way": name, **m._asdict(), **errors, "paper": paper})
        texts = [f"{m.goodput:.1%}", f"{paper:.0%}", f"{m.trained:.1%}"]
        texts += [f"{m.mean_participants:.2f}", f"{m.overwritten:.1%}"]
        shown.add_row(name, *texts, f"{m.mean_grace_s:.2f} s")
    console.print(shown)
    files.write(rows, {"constants": world.model_dump(mode="json"), "learners": learners, "days": days, "seeds": seeds})


def scavenge(files: Files) -> None:
    """`diloco simulate scavenge`."""
    files.check()
    rows = studies.rows()
    shown = Table(title="time of a run relative to one without extra compute (in brackets: the paper's)")
    names = ("data-parallel", "decoupled")
    for name in ("extra compute", *names, "share by this row", "comm by this row"):
        shown.add_column(name, justify="right")
    for row in rows:
        texts = [f"{row[name]:.3f} ({row[f'paper, {name}']:.2f})" for name in names]
        texts += [f"{row[f'its own {name}']:.2f}" for name in ("share", "comm")]
        shown.add_row(f"+{row['extra']:.0%}" + " (fitted)" * row["fitted"], *texts)
    Console().print(shown)
    files.write(rows, studies.scavenged(studies.FITTED_EXTRA)._asdict())
