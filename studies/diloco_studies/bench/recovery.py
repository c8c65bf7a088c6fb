"""How a killed learner comes back, by where its moments come from: real runs, a picture and a table.

In each run of `diloco demo` the last learner is killed with SIGKILL and started again later. What differs is what it
may recover from. Runs whose report is in the output folder already, with the same settings, are not run again.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tomli_w
import typer

from diloco.pipeline.files.strict_json import number
from diloco.pipeline.settings import TrainerSettings, defaults
from diloco.pipeline.units import parse_duration
from diloco_studies.bench.recovery_plot import draw

WAYS: dict[str, dict[str, Any]] = {
    "checkpoint": {"recover": "auto"},
    "peer": {"recover": "peer"},
    "fresh": {"recover": "fresh"},
    "fresh, no ramp": {"recover": "fresh", "ramp_steps": 0},
}
"""Settings of each way; its first word is where the moments come from if all goes well."""
LR: float = defaults(TrainerSettings)["lr"]
SPANS = ((1, 5), (6, 10), (11, 20), (21, 50), (51, 80))
"""Steps after the restart over which the table averages."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run's restarted learner."""

    way: str
    seed: int
    source: str
    """What its log says its moments came from."""
    before: tuple[float, ...]
    """Its training loss at each step until it was killed."""
    after: tuple[float, ...]
    """And at each step from its restart on."""
    other: tuple[float, ...]
    """That of a learner that was never killed, from the same moment on."""
    join_s: float
    """From having the run's parameters to the end of its first step."""
    evaluations: tuple[tuple[int, float], ...]
    """(trained tokens, held-out loss) of the run's global parameters."""
    killed_tokens: int
    restarted_tokens: int

    @property
    def final_loss(self) -> float:
        """Held-out loss at the run's end."""
        return self.evaluations[-1][1]


def read_trial(folder: Path, way: str, seed: int, learner: str) -> Trial:
    """What a finished run in `folder` has left about its restarted learner."""
    mine, others = _losses(folder, learner), _losses(folder, "learner-0")
    first, last = mine[0]["incarnation"], mine[-1]["incarnation"]
    if first == last:
        raise ValueError(f"{learner} in {folder} made no step after its restart: give more --tokens")
    after = [line for line in mine if line["incarnation"] == last]
    began = after[0]["unix_s"]
    log = [json.loads(line) for line in (folder / f"logs/{learner}.log").read_text().splitlines() if line[:1] == "{"]
    joined = [one for one in log if one["event"] == "learner_joined"][-1]["timestamp"]
    report = json.loads((folder / "report.json").read_text())
    events = {(event["name"], event["who"]): event["tokens"] for event in report["events"]}
    return Trial(
        way=way,
        seed=seed,
        source=[one for one in log if one["event"] == "moments_recovered"][-1]["source"],
        before=tuple(number(line["loss"]) for line in mine if line["incarnation"] == first),
        after=tuple(number(line["loss"]) for line in after),
        other=tuple(number(line["loss"]) for line in others if line["unix_s"] >= began),
        join_s=began - datetime.fromisoformat(joined).timestamp(),
        evaluations=tuple((one["tokens"], number(one["loss"])) for one in report["evaluations"]),
        killed_tokens=events["learner_killed", learner],
        restarted_tokens=events["learner_started", learner],
    )


def _losses(folder: Path, learner: str) -> list[dict[str, Any]]:
    lines = (folder / f"learners/{learner}/losses.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # SIGKILL may cut the last one


def span_mean(losses: Sequence[float], first: int, last: int) -> float | None:
    """Mean over steps first..last, counted from 1; None where there are fewer."""
    return fmean(losses[first - 1 : last]) if len(losses) >= last else None


def table(trials: Iterable[Trial]) -> str:
    """Means over the seeds, as Markdown."""
    heads = [f"{first}-{last}" for first, last in SPANS]
    lines = [
        "| way | loss before the kill | "
        + " | ".join(f"steps {head}" for head in heads)
        + " | joining | held-out, end |",
        "|---" * (len(SPANS) + 4) + "|",
    ]
    by_way: dict[str, list[Trial]] = {}
    for trial in trials:
        by_way.setdefault(trial.way, []).append(trial)
    for way, mine in by_way.items():
        strays = [trial.source for trial in mine if trial.source != way.split(",")[0]]
        label = (
            f"{way} ({len(strays)} of {len(mine)} not, but from {', '.join(sorted(set(strays)))})" if strays else way
        )
        cells = [_mean([fmean(trial.before[-20:]) for trial in mine])]
        cells += [_mean([span_mean(trial.after, *span) for trial in mine]) for span in SPANS]
        cells += [_mean([trial.join_s for trial in mine], " s"), _mean([trial.final_loss for trial in mine])]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    spans = [_mean([span_mean(trial.other, *span) for mine in by_way.values() for trial in mine]) for span in SPANS]
    lines.append("| the other learner meanwhile | | " + " | ".join(spans) + " | | |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None], unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}{unit}" if known else "-"


def differences(folder: Path, asked: Mapping[str, Any]) -> list[str]:
    """In what the settings of the run in `folder` are not those asked for."""
    made: dict[str, Any] = json.loads((folder / "report.json").read_text())["settings"]
    return [f"{name}={made.get(name)!r}, not {value!r}" for name, value in asked.items() if made.get(name) != value]


def make_run(folder: Path, asked: Mapping[str, Any]) -> None:
    """One run, unless its report is there, and of the same settings."""
    if (folder / "report.json").is_file():
        if others := differences(folder, asked):
            typer.echo(f"{folder} holds a run with {'; '.join(others)}: give another --out, or delete it", err=True)
            raise typer.Exit(2)
        typer.echo(f"{folder}: there already")
        return
    config = folder.with_name(f"{folder.name}.toml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(tomli_w.dumps(asked))
    command = [sys.executable, "-m", "diloco", "demo", "--config", str(config)]
    typer.echo(f"{folder}: {asked}")
    done = subprocess.run([*command, "--out", str(folder), "--overwrite"], capture_output=True, text=True, check=False)
    if done.returncode:
        typer.echo(done.stdout + done.stderr, err=True)
        raise typer.Exit(done.returncode)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs")] = Path("runs/recovery"),
    picture: Annotated[Path, typer.Option(help="PNG to write")] = Path("runs/recovery/recovery.png"),
    tokens: Annotated[int, typer.Option(help="Budget of each run")] = 400_000,
    learners: Annotated[int, typer.Option(min=2, help="Learners; the last one is killed")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each way, with seeds 0, 1 ...")] = 1,
    kill_at: Annotated[float, typer.Option(help="Share of the budget at which it is killed")] = 0.4,
    restart_at: Annotated[float, typer.Option(help="Share at which it is started again")] = 0.5,
    state_every: Annotated[str, typer.Option(help="Time between a learner's own checkpoints")] = "2s",
    lr: Annotated[float, typer.Option(help="Peak inner learning rate")] = LR,
) -> None:
    """Kill a learner, start it again, and compare what its moments come from."""
    settings: dict[str, Any] = {"learners": learners, "tokens": tokens, "kill_learner": learners - 1}
    settings |= {"kill_at": kill_at, "restart_at": restart_at, "state_every": float(parse_duration(state_every))}
    settings |= {"log_losses": True, "lr": lr, "eval_every": 3.0}
    trials = []
    for seed in range(seeds):
        for way in WAYS:
            folder = out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
            make_run(folder, {"seed": seed, **settings, **WAYS[way]})
            trial = read_trial(folder, way, seed, f"learner-{learners - 1}")
            trials.append(trial)
            typer.echo(f"  moments from: {trial.source}; held-out loss at the end {trial.final_loss:.3f}")
    typer.echo("\n" + table(trials))
    draw(trials, picture)
    typer.echo(f"\npicture {picture}")


if __name__ == "__main__":
    typer.run(main)
