"""What is measured on a GPU, piece by piece; the same at a small size for a rehearsal.

A piece is commands of this program, or pytest, which leave files in the piece's folder. Its figures are read there,
also where time ran out, so a piece keeps what it has.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import tomli_w

from diloco.launcher.launch import PROGRAM
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.settings import LearnerSettings
from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results.report import table_of
from diloco_studies.quality.results.store import Store
from diloco_studies.quality.results.summary import encode

FOLDER = "FOLDER"
"""Stands in a command for the piece's folder."""
DILOCO = ("-m", "diloco")
EXPERIMENTS = PROGRAM / "docs" / "quality"
TEXT = "packages-text"
"""Folder of the text that experiments learn, in the repository's root."""
LAB_JOBS = 8
"""Runs at a time. Half of an experiment, so that the first half is kept where time runs out in the second."""
SHARDINGS = get_args(LearnerSettings.model_fields["sharding"].annotation)
Figures = dict[str, float | int | str]


class NoFigures(DilocoError):
    """A piece's commands left nothing that was measured."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work, at most `LIMIT_S` long."""

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of Python, one command after the other."""
    figures: Callable[[Path], Figures]
    """Those of its folder: all of them once its commands have ended well, or those that there are."""
    files: Mapping[str, str] = field(default_factory=dict)
    """To be in its folder before: name -> text."""
    goes_on: bool = False
    """Its commands find in the folder what an earlier call left, and do the rest."""
    waits_for: str = ""
    """What is missing, where it cannot be done yet."""

    def command(self, number: int, folder: Path) -> list[str]:
        """With the folder's path in its place."""
        return [argument.replace(FOLDER, str(folder)) for argument in self.commands[number]]


def plan(rehearsal: bool, gpus: int) -> list[Piece]:
    """All pieces, those that say most first. gpus: how many there are."""
    device = "cpu" if rehearsal else "cuda"
    return [
        _text(rehearsal),
        *(_experiment(name, about, device, rehearsal) for name, about in LAB.items()),
        _kill(rehearsal),
        _speed("bf16", device, rehearsal),
        _speed("fp32", device, rehearsal),
        _encoding(device, rehearsal),
        _tests(rehearsal),
        _ranks(rehearsal, gpus),
    ]


def to_do(pieces: list[Piece], results: Mapping[str, Mapping[str, Any]]) -> list[Piece]:
    """Those that can be done and have not ended well yet, in their order. results: of earlier calls, by name."""
    return [one for one in pieces if not one.waits_for and results.get(one.name, {}).get("status") != "ok"]


def summary(pieces: list[Piece], results: Mapping[str, Mapping[str, Any]], rehearsal: bool) -> str:
    """A page in Markdown: a line for each piece, with its figures, its reason or that it is still to be done."""
    devices = dict.fromkeys(str(one["device"]) for one in results.values())
    lines = ["# What needs a GPU", ""]
    if rehearsal:
        lines += ["**A rehearsal on the CPU at a small size: these figures say nothing about a GPU.**", ""]
    lines += [f"Device: {', '.join(devices)}.", ""] if devices else []
    lines += ["| piece | is | seconds | figures |", "|---|---|---|---|"]
    for piece in pieces:
        one = results.get(piece.name)
        took = "" if one is None else f"{one['seconds']:.0f}"
        left = f"waits for {piece.waits_for}" if piece.waits_for else "to do"
        lines.append(f"| {piece.name} | {piece.about} | {took} | {left if one is None else _cell(one)} |")
    return "\n".join([*lines, ""])


def said(result: Mapping[str, Any]) -> str:
    """What came of a piece, in a line."""
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in result["figures"].items())
    if result["status"] == "ok":
        return figures
    return f"failed: {result['reason']}" + (f"; until then: {figures}" if figures else "")


def _cell(result: Mapping[str, Any]) -> str:
    return " ".join(said(result).split()).replace("|", "\\|")


def _shown(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- the pieces -----------------------------------------------------------------------------------------------


def _text(rehearsal: bool) -> Piece:
    """What a rehearsal writes is not read: its runs learn the standard library's text."""
    there = not rehearsal and (PROGRAM / TEXT).is_dir()
    place = f"{FOLDER}/{TEXT}" if rehearsal else TEXT

    def figures(folder: Path) -> Figures:
        files = list((folder / TEXT if rehearsal else PROGRAM / TEXT).glob("*.txt"))
        return {"MB": sum(one.stat().st_size for one in files) / 1e6, "files": len(files)}

    command = (*DILOCO, "lab", "packages", "--out", place)
    return Piece("text", "the text of all installed packages", () if there else (command,), figures)


LAB = {
    "gpu-intervals": "intervals H of 24 to 384 in the paper's cell",
    "gpu-paper-outer": "outer rate and momentum of the paper's method in its cell",
    "gpu-muon-1m": "Muon as the inner optimizer at 0.9M",
    "gpu-muon-10m": "the same at 10M",
    "gpu-muon-30m": "the same at 30M",
    "gpu-rates-10m": "inner rates at 10M",
    "gpu-rates-30m": "inner rates at 30M",
}
"""Experiments of docs/quality, in their order."""
SMALL = {"model": "nano", "batch": 2, "seq_len": 64, "steps": 12, "fragments": 4, "eval_tokens": 4096}


def _experiment(name: str, about: str, device: str, rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        store = Store(folder / "lab")
        table = table_of(read_experiment(folder / file), lambda _, run: store.summary(run))
        if not (found := dict(table.named())):
            raise NoFigures("no run has ended")
        (folder / "results.csv").write_text(encode(found))
        return {f"{run.run}, seed {run.seed}": one.value for run, one in found.items()}

    file = f"{name}.toml"
    text = (EXPERIMENTS / file).read_text("utf-8")
    jobs = "1" if rehearsal else str(LAB_JOBS)
    command = (*DILOCO, "lab", "run", f"{FOLDER}/{file}", "--out", f"{FOLDER}/lab", "--jobs", jobs)
    return Piece(
        name=name,
        about=about,
        commands=((*command, "--device", device),),
        figures=figures,
        files={file: _small(text) if rehearsal else text},
        goes_on=True,
    )


def _small(text: str) -> str:
    """An experiment with the same variants, one run each, of a few steps."""
    experiment = tomllib.loads(text)
    kept = ("name", "method", "optimizer", "outer", "wait", "learners", "first_interval", "merge", "sync_interval")
    settings = {name: value for name, value in experiment["settings"].items() if name in kept}
    variants = [{name: one[name] for name in kept if name in one} for one in experiment["variants"]]
    for told in variants:
        told |= {name: value[0] for name, value in told.items() if isinstance(value, list)}
    return tomli_w.dumps(experiment | {"settings": settings | SMALL | {"evaluations": 2}, "variants": variants})


def _tests(rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        suite = ElementTree.parse(folder / "tests.xml").getroot()  # noqa: S314  # pytest wrote it just now
        one = suite.find("testsuite")
        assert one is not None  # noqa: S101  # pytest writes one
        count, skipped = int(one.attrib["tests"]), int(one.attrib["skipped"])
        if not rehearsal and skipped == count:
            raise NoFigures(f"all {count} tests were skipped")
        return {"passed": count - skipped, "skipped": skipped}

    # As `make test-gpu`.
    return Piece(
        "tests", "`make test-gpu`", (("-m", "pytest", "-m", "gpu", f"--junitxml={FOLDER}/tests.xml"),), figures
    )


def _encoding(device: str, rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        largest = _json(folder / "codec.json")["sizes"][-1]
        codecs = (name for name in largest if name != "elements")
        return {f"{name} GB/s": largest[name]["device_gb_s"]["median"] for name in codecs}

    size = ("--params", "1e6", "--rounds", "2") if rehearsal else ("--params", "12.5e6,100e6", "--rounds", "3")
    command = (*DILOCO, "bench", "codec", *size, "--link", "0", "--device", device, "--json", f"{FOLDER}/codec.json")
    return Piece("encoding", "deltas encoded on the device, GB/s of float32", (command,), figures)


def _speed(precision: str, device: str, rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        found = _json(folder / "step.json")
        names = {"tokens/s": "tokens_per_s_with", "alone": "tokens_per_s_without", "step() ms": "step_call_ms"}
        names |= {"GB": "device_gb"} if "device_gb" in found else {}
        return {shown: found[name]["median"] for shown, name in names.items()}

    size = ("nano", "--tokens", "64", "--batch", "2", "--sync-interval", "6", "--rounds", "1")
    if not rehearsal:
        size = ("124m", "--tokens", "1024", "--batch", "16", "--sync-interval", "24", "--rounds", "5")
    command = (*DILOCO, "bench", "step", "--model", *size, "--device", device, "--precision", precision)
    about = f"the trainer at {size[0]} in {precision}, with a `Learner` and without"
    return Piece(f"speed-{precision}", about, ((*command, "--json", f"{FOLDER}/step.json"),), figures)


def _kill(rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        report = _json(folder / "run" / "report.json")
        rates = {"rate while away": "ratio_while", "rate after": "ratio_after"}
        found = {name: report["demo"][key] for name, key in rates.items()}
        found |= {
            "held-out loss": report["global_val_loss"],
            "merged share": report["merged_tokens"] / report["tokens"],
        }
        return {name: "not known" if value is None else value for name, value in found.items()}

    size = ("--devices", "cpu", "--model", "nano", "--seq-len", "64", "--batch", "4", "--tokens", "400k")
    told: dict[str, Any] = {"precision": "bf16"}
    if not rehearsal:  # 7 minutes at 320k tokens a second, which an H200 makes with two learners on it
        size = ("--devices", "cuda:0", "--model", "124m", "--seq-len", "1024", "--batch", "16", "--tokens", "135M")
        told |= {"data": TEXT, "eval_device": "cuda:0", "eval_every": "60s"}
    command = (*DILOCO, "demo", "--learners", "2", *size, "--config", f"{FOLDER}/run.toml", "--out", f"{FOLDER}/run")
    about = "two learners at 124m in bf16 on one GPU and real text; one is killed at 40 % and comes back at 60 %"
    return Piece("kill", about, (command,), figures, {"run.toml": tomli_w.dumps(told)})


def _ranks(rehearsal: bool, gpus: int) -> Piece:
    about = "one learner on all GPUs at 124m in bf16, with DDP and with fully_shard: tokens/s"
    if gpus == 1 and not rehearsal:
        return Piece("ranks", about, (), lambda folder: {}, waits_for="a machine with several GPUs")

    def figures(folder: Path) -> Figures:
        reports = {way: _json(folder / way / "report.json") for way in SHARDINGS}
        rates = {way: report["learners"][0]["tokens_per_s"] for way, report in reports.items()}
        return {"ranks": 2 if rehearsal else gpus} | rates

    size = "--devices cpu+cpu --model nano --seq-len 64 --batch 4 --tokens 40k"
    if not rehearsal:
        size = f"--devices all --model 124m --seq-len 1024 --batch {16 * gpus} --tokens {8 * gpus}M"
    command = (*DILOCO, "run", "--learners", "1", "--quorum", "1", *size.split())
    return Piece(
        name="ranks",
        about=about,
        commands=tuple((*command, "--config", f"{FOLDER}/{way}.toml", "--out", f"{FOLDER}/{way}") for way in SHARDINGS),
        figures=figures,
        files={f"{way}.toml": tomli_w.dumps({"sharding": way, "precision": "bf16"}) for way in SHARDINGS},
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
