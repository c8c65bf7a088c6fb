"""What is measured on a GPU, piece by piece; the same at a small size for a rehearsal. Pure.

A piece is commands of this program, or pytest, which leave files in the piece's folder. Its figures are read there.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import tomli_w

from diloco.pipeline.errors import DilocoError
from diloco.pipeline.settings import LearnerSettings

FOLDER = "FOLDER"
"""Stands in a command for the piece's folder."""
DILOCO = ("-m", "diloco")
SHARDINGS = get_args(LearnerSettings.model_fields["sharding"].annotation)
Figures = dict[str, float | int | str]


class NoFigures(DilocoError):
    """A piece's commands ended well, and what they left says that nothing was measured."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work, at most `LIMIT_S` long."""

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of Python, one command after the other."""
    figures: Callable[[Path], Figures]
    """Those of its folder, once all commands have ended well."""
    files: Mapping[str, str] = field(default_factory=dict)
    """To be in its folder before: name -> text."""

    def command(self, number: int, folder: Path) -> list[str]:
        """With the folder's path in its place."""
        return [argument.replace(FOLDER, str(folder)) for argument in self.commands[number]]


def plan(rehearsal: bool, gpus: int) -> list[Piece]:
    """All pieces, in order: what is short and says most comes first. gpus: how many there are."""
    device = "cpu" if rehearsal else "cuda"
    return [
        _tests(rehearsal),
        _encoding(device, rehearsal),
        _speed("fp32", device, rehearsal),
        _speed("bf16", device, rehearsal),
        _kill(rehearsal),
        _ranks(rehearsal, gpus),
        *(_quality(size, way, device, rehearsal) for size in ("10m", "30m") for way in WAYS),
    ]


def to_do(pieces: list[Piece], results: Mapping[str, Mapping[str, Any]]) -> list[Piece]:
    """Those that have not ended well yet, in their order. results: of earlier calls, by a piece's name."""
    return [piece for piece in pieces if results.get(piece.name, {}).get("status") != "ok"]


def summary(pieces: list[Piece], results: Mapping[str, Mapping[str, Any]], rehearsal: bool) -> str:
    """A page in Markdown: a line for each piece, with its figures, its reason or that it is still to be done."""
    devices = dict.fromkeys(str(one["device"]) for one in results.values())
    lines = ["# What needs a GPU", ""]
    if rehearsal:
        lines += ["**A rehearsal, on the CPU and at a small size: these figures say nothing about a GPU.**", ""]
    lines += [f"Device: {', '.join(devices)}.", ""] if devices else []
    lines += ["| piece | is | seconds | figures |", "|---|---|---|---|"]
    for piece in pieces:
        one = results.get(piece.name)
        took = "" if one is None else f"{one['seconds']:.0f}"
        lines.append(f"| {piece.name} | {piece.about} | {took} | {'to do' if one is None else _cell(one)} |")
    return "\n".join([*lines, ""])


def said(result: Mapping[str, Any]) -> str:
    """What came of a piece, in a line."""
    if result["status"] != "ok":
        return f"failed: {result['reason']}"
    return ", ".join(f"{name} {_shown(value)}" for name, value in result["figures"].items())


def _cell(result: Mapping[str, Any]) -> str:
    return " ".join(said(result).split()).replace("|", "\\|")


def _shown(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- the pieces -----------------------------------------------------------------------------------------------


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
        return {name: "not known" if value is None else value for name, value in found.items()} | {
            "held-out loss": report["global_val_loss"]
        }

    size = ("--devices", "cpu", "--model", "nano", "--seq-len", "64", "--batch", "4", "--tokens", "400k")
    if not rehearsal:
        size = ("--devices", "cuda:0", "--model", "10m", "--seq-len", "512", "--batch", "16", "--tokens", "60M")
    command = (*DILOCO, "demo", "--learners", "2", *size, "--out", f"{FOLDER}/run")
    about = "two learners on one device; one is killed at 40 % and comes back at 60 %: the other one's step rate"
    return Piece("kill", about, (command,), figures)


def _ranks(rehearsal: bool, gpus: int) -> Piece:
    about = "one learner on all GPUs at 124m in bf16, with DDP and with fully_shard: tokens/s"
    if gpus == 1 and not rehearsal:
        return Piece("ranks", about, (), lambda folder: {"skipped": "there is one GPU"})

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


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("data-parallel with AdamW", {"method": "data-parallel"}),
    "data-parallel-outer": ("data-parallel with the default outer step: one learner, the whole batch", {"learners": 1}),
    "decoupled": ("decoupled, as by default", {"method": "decoupled"}),
    "paper": ("decoupled, with the paper's settings", {"method": "paper"}),
}
"""What is compared at each size, at equal tokens."""


def _quality(size: str, way: str, device: str, rehearsal: bool) -> Piece:
    def figures(folder: Path) -> Figures:
        (result,) = map(_json, (folder / "lab").glob("*.json"))
        return {"held-out loss": result["final"]["value"], "tokens": result["tokens"], "wall_s": result["wall_s"]}

    about, told = WAYS[way]
    settings: dict[str, Any] = {"model": size, "learners": 4, "batch": 16, "seq_len": 512, "steps": 1000, "lr": 2e-3}
    settings |= told
    if rehearsal:
        settings |= {"model": "nano", "batch": 2, "seq_len": 64, "steps": 12, "evaluations": 2, "eval_tokens": 4096}
    if settings["learners"] == 1:
        settings["batch"] *= 4
    experiment = {"question": about, "settings": settings, "variants": [{"name": way}]}
    command = (*DILOCO, "lab", "run", f"{FOLDER}/experiment.toml", "--out", f"{FOLDER}/lab", "--jobs", "1")
    return Piece(
        name=f"quality-{size}-{way}",
        about=f"{size}: {about}",
        commands=((*command, "--device", device),),
        figures=figures,
        files={"experiment.toml": tomli_w.dumps(experiment)},
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
