"""`diloco bench`: the commands and their options. What they measure is in `bench`, loaded by that command alone."""

import importlib
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from diloco.cli import new_app
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.writable import check_files
from diloco.pipeline.messages.wire import MAX_FRAGMENTS, Codec, GlobalCodec, OuterName
from diloco.pipeline.payload.codec import DTYPES
from diloco.pipeline.process.output import survive_closed_pipes
from diloco.pipeline.process.signals import end_signals, ignore_hangup
from diloco.pipeline.settings import CHUNK_BYTES, SyncSettings, defaults
from diloco.pipeline.units import counted
from diloco_studies.bench import codec
from diloco_studies.bench.beside import command as bench_compare
from diloco_studies.bench.figures import Spread, show_machine, shown, table, write_json
from diloco_studies.bench.gpu import command as bench_gpu
from diloco_studies.bench.kills import command as bench_kills
from diloco_studies.bench.machine import describe, unusual
from diloco_studies.goodput.commands.options import one_whole, whole

app = new_app(
    no_args_is_help=True,
    help="Benchmarks on this machine: median, minimum and maximum of several rounds, next to what the machine could "
    "do.",
)


@app.callback()
def _stop_cleanly() -> None:
    """Ctrl-C, SIGTERM or SIGHUP ends the processes that were started and removes what they left."""

    def hang_up(*_: object) -> None:
        ignore_hangup()  # it comes again
        raise KeyboardInterrupt

    for number in end_signals():
        signal.signal(number, hang_up if number.name == "SIGHUP" else signal.default_int_handler)
    survive_closed_pipes()  # an hour's measurements may go to files too


Params = Annotated[str, typer.Option(metavar="N", help="Parameters of the model, e.g. 100e6")]
Fragments = Annotated[int, typer.Option(min=1, max=MAX_FRAGMENTS, help="Number of fragments P")]
Learners = Annotated[int, typer.Option(min=1, max=64, help="Number of learners M")]
USUAL = defaults(SyncSettings)
Wire = Annotated[str, typer.Option(help="Deltas on the wire: fp32, bf16, int8 or int4")]
Globals = Annotated[str, typer.Option(help="Globals that learners pull: fp32 or bf16")]
Momentum = Annotated[float, typer.Option(min=0.0, max=0.999, help="Outer Nesterov momentum; 0: no momentum is kept")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measurements per figure")]
Aofs = Annotated[
    Literal["off", "on", "both"],
    typer.Option(
        "--aof",
        help="Whether the embedded Redis keeps an append-only file (synced every second); both: measure "
        "with and without",
    ),
]
Url = Annotated[
    str | None, typer.Option("--redis-url", metavar="URL", help="Your own Redis instead of an embedded one")
]
Server = Annotated[Path | None, typer.Option(metavar="FILE", help="Server program to use instead of the embedded one")]
Chunk = Annotated[int, typer.Option(min=4096, max=16 * 2**20, help="Size of a payload's chunks in bytes")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write everything as JSON")]


def _wire(name: str, allowed: Sequence[str] = get_args(Codec), option: str = "wire") -> str:
    if name not in allowed:
        raise UsageError(f"--{option} {name}: use one of {', '.join(allowed)}")
    return name


class _Out:
    """Where a benchmark's figures go: the console, and the file that was asked for."""

    def __init__(self, json_file: Path | None) -> None:
        """Before anything is measured, since a mistake shows here."""
        check_files(json_file)
        self.console, self._json = Console(), json_file

    def write(self, kind: str, given: Any, redis: str, found: Mapping[str, Any], **more: Any) -> None:
        """The machine, and all as JSON."""
        machine = describe(redis)
        show_machine(self.console, machine)
        report = {"benchmark": kind, "settings": asdict(given), "machine": machine, **more, **found}
        write_json(self._json, report)

    def show(self, title: str, by_way: Mapping[str, Mapping[str, Spread]]) -> None:
        """A column for each way in which the same was measured; one may lack figures that another has."""
        names = dict.fromkeys(name for found in by_way.values() for name in found)
        rows = ((name, *(shown(one[name]) if name in one else "-" for one in by_way.values())) for name in names)
        ways = list(by_way) if len(by_way) > 1 else ["median (least - most)"]
        self.console.print(table(title, ("", *ways), rows))


@app.command("end-to-end")
def end_to_end(
    params: Params = "10e6",
    fragments: Fragments = 1,
    learners: Learners = 2,
    wire: Wire = "bf16",
    outer: Annotated[OuterName, typer.Option(help="Outer optimizer, with its usual momentum")] = USUAL["outer"],
    momentum: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.999, help="Outer momentum (default: as in a run, but none with nesterov)", show_default=False
        ),
    ] = None,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="One fragment at a time (default: all fragments at once)")
    ] = False,
    rounds: Rounds = 5,
    chunk_bytes: Chunk = CHUNK_BYTES,
    spread: Annotated[
        float, typer.Option(min=0.0, max=60.0, help="Seconds over which the learners publish, one after another")
    ] = 0.0,
    global_codec: Globals = USUAL["global_codec"],
    link: Annotated[
        float, typer.Option(min=0.0, help="Gbit/s of each party's link to Redis in each direction; 0: no limit")
    ] = 0.0,
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Type of the learners' parameters; globals are fp32 in any case")
    ] = "fp32",
    warm_up: Annotated[
        int | None,
        typer.Option(min=1, help="Warm-up rounds (default: two per fragment)", show_default=False),
    ] = None,
    aof: Aofs = "off",
    redis_url: Url = None,
    server: Server = None,
    json_file: Json = None,
) -> None:
    """Time from the last publish until all have adopted the global: real Redis, syncer and learners (without training).

    redis_floor_ratio: the time relative to the floor of the same round: the same bytes through the same server with a
    C client, and the merge's memory traffic at the speed of copies on all cores.

    The state of the machine is shown next to it, with a warning if it is unusual: cores that other processes took
    (others_share, steal_share), the cost of fresh memory (fresh_page_us). Independent of other processes are
    redis_cpu_ratio (CPU of Redis relative to its CPU with the C client), redis_fresh_pages and all_cpu_s.

    Example: diloco bench end-to-end --params 100e6 --fragments 1 --learners 2 --wire fp32 --json FILE
    """
    out = _Out(json_file)
    if momentum is None:
        momentum = 0.0 if outer == "nesterov" else USUAL["outer_momentum"]
    measuring = importlib.import_module("diloco_studies.bench.end_to_end")
    case = measuring.Case(
        *(one_whole(params, "params"), fragments, learners, _wire(wire), momentum, in_turn, rounds),
        *(chunk_bytes, spread, _wire(global_codec, get_args(GlobalCodec), "global-codec"), link, dtype, warm_up, outer),
    )
    ways = {"off": ("off",), "on": ("on",), "both": ("off", "on")}[aof]
    passes = {way: measuring.measure(case, out.console, redis_url, way == "on", server) for way in ways}
    by_way: dict[str, dict[str, Spread]] = {f"append-only file {way}": passes[way][0].spreads() for way in ways}
    found, note = next(iter(by_way.values())), passes[ways[0]][1]
    what = (
        f"{case.params / 1e6:g}M parameters, {counted(fragments, 'fragment')}, {counted(learners, 'learner')}, {wire}"
    )
    what += f", {outer}, globals in {global_codec}" + (f", {link:g} Gbit/s" if link else "")
    what += ", parameters in bf16" if dtype == "bf16" else ""
    title = f"End to end: {', '.join((what, *(by_way if aof == 'on' else ()), f'{rounds} rounds'))}"
    out.show(title, by_way)
    share = "not known" if note["merged_share"] is None else f"{note['merged_share']:.0%}"
    out.console.print(f"floor: {note['floor_client']}; merged share of what was trained: {share}", highlight=False)
    for way, figures in by_way.items():
        if said := unusual(figures):
            rest = "compare CPU times, counts and redis_cpu_ratio, not seconds"
            out.console.print(f"[yellow]not the code's, {way}: {'; '.join(said)}: {rest}[/yellow]", highlight=False)
    if link:
        out.console.print(f"on these links a round takes at least {case.lines_s:.3g} s", highlight=False)
    more = {"with_aof": {**passes["on"][1], **by_way["append-only file on"]}} if aof == "both" else {}
    out.write("end-to-end", case, note["server"], found, aof=aof, **note, **more)


@app.command()
def merge(
    params: Annotated[str, typer.Option(metavar="N", help="Elements of the fragment")] = "8e6",
    learners: Learners = 8,
    wire: Wire = "bf16",
    momentum: Momentum = 0.9,
    rounds: Rounds = 7,
    side: Annotated[int, typer.Option(min=2, help="Rows of the matrices of the default step")] = 768,
    columns: Annotated[
        int | None, typer.Option(min=2, help="Columns of these matrices (default: as many as rows)", show_default=False)
    ] = None,
    json_file: Json = None,
) -> None:
    """Merge and outer step in memory on one core, in GB/s of deltas, next to whole-array numpy and plain copies.

    The first line has a run's default outer step. Seconds are core time.
    """
    out = _Out(json_file)
    measuring = importlib.import_module("diloco_studies.bench.merging")
    sizes = measuring.Sizes(
        one_whole(params, "params"), learners, _wire(wire, tuple(DTYPES)), momentum, rounds, side, columns
    )
    found = measuring.measure(sizes, out.console)
    title = f"Merge: {learners} {wire} deltas of {sizes.elements / 1e6:g}M elements, one core"
    out.show(title, {"": found})
    out.write("merge", sizes, "not used", found)


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Named model size, as for --model of a run")] = "large",
    fragments: Fragments = 8,
    interval: Annotated[int, typer.Option("--sync-interval", min=1, help="Inner steps H between two syncs")] = 24,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens per sequence")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per training step")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Like DILOCO_PRECISION of a learner")] = "fp32",
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Like DILOCO_CHECKPOINT_ACTIVATIONS of a learner")
    ] = False,
    wire: Wire = "bf16",
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of blocks of H steps, each with and without the learner")
    ] = 3,
    compiled: Annotated[bool, typer.Option("--compile", help="Also measure with a torch.compile'd model")] = False,
    redis_url: Url = None,
    json_file: Json = None,
) -> None:
    """What learner.step() adds to a training step: one learner, with nothing else on the training cores."""
    out = _Out(json_file)
    measuring = importlib.import_module("diloco_studies.bench.stepping")
    if model not in measuring.MODELS:
        raise UsageError(f"--model {model}: use one of {', '.join(measuring.MODELS)}")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: use cpu or cuda")
    given = measuring.Training(
        *(model, interval, fragments, _wire(wire), tokens, rounds, False),
        *(batch, device, precision, checkpoint_activations),
    )
    by_way = {"as it is": measuring.measure(given, out.console, redis_url)}
    if compiled:
        by_way["compiled"] = measuring.measure(replace(given, compile=True), out.console, redis_url)
    found, more = by_way["as it is"], {"compiled": by_way["compiled"]} if compiled else {}
    title = (
        f"learner.step(): model {model}, P = {fragments}, H = {interval}, {batch * tokens} tokens per step, {device}"
    )
    out.show(title, by_way)
    out.write("step", given, "embedded" if redis_url is None else "given", found, **more)


@app.command()
def cost(
    steps: Annotated[str, typer.Option(metavar="MS,MS,...", help="Lengths of a step in ms")] = "1,10,100",
    model: Annotated[
        str, typer.Option(help="Size that is synchronised: tiny, small, base, medium or large (100M)")
    ] = "tiny",
    fragments: Fragments = 8,
    interval: Annotated[int, typer.Option("--sync-interval", min=1, help="Inner steps H between two syncs")] = 24,
    wire: Wire = "bf16",
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of blocks of a second, each with and without the learner")
    ] = 15,
    redis_url: Url = None,
    json_file: Json = None,
) -> None:
    """What a learner costs in wall-clock time, including all its threads: one loop with and without it."""
    out = _Out(json_file)
    lengths = tuple(map(float, whole(steps, "steps")))
    measuring = importlib.import_module("diloco_studies.bench.cost")
    if model not in measuring.MODELS:
        raise UsageError(f"--model {model}: use one of {', '.join(measuring.MODELS)}")
    given = measuring.Loops(model, interval, fragments, _wire(wire), lengths, rounds)
    found = measuring.measure(given, out.console, redis_url)
    title = (
        f"Cost of a learner for a loop: model {model}, P = {fragments}, H = {interval}, shares of the loop without it"
    )
    figures = {"added_share": "added", "blocked_share": "inside step()", "deltas_per_s": "deltas a second"}
    rows = ((case, *(shown(one[name]) for name in figures)) for case, one in found.items())
    out.console.print(table(title, ("loop", *figures.values()), rows))
    out.write("cost", given, "embedded" if redis_url is None else "given", {"by_loop": found})


app.command("codec")(codec.main)
app.command("compare")(bench_compare.main)
app.command("kills")(bench_kills.main)
app.command("gpu")(bench_gpu.main)
