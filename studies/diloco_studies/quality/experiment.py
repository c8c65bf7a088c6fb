"""An experiment: a TOML file with settings, in which a list means a sweep. Pure: pydantic only.

`SKELETON` is such a file; what one of its runs is, `settings` says.
"""

import itertools
import math
import reprlib
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.sources import meant
from diloco.pipeline.wrong_values import format_problem
from diloco.workers.trainer.models.sizes import SIZES
from diloco_studies.quality.settings import PRESETS, USUAL, LabRun

MAX_RUNS = 10_000
SKELETON = """\
question = "Which outer optimizer?"    # title of the report; only the names of the variants are required
reference = "data-parallel"            # the variant to compare with
best_of = ["lr"]                       # the report also shows the best of these for each row

[settings]                             # of every run; lists are swept in all combinations
lr = [8e-3, 16e-3]
seed = [0, 1, 2]                       # the seeds of a row give its error bars

[[variants]]                           # settings that belong together; they override [settings]
name = "data-parallel"
method = "data-parallel"

[[variants]]
name = "Nesterov's"
outer = "nesterov"
"""
"""An experiment file, as short as it can be with everything in it."""


class Row(BaseModel):
    """Runs that differ in their seeds only."""

    model_config = ConfigDict(frozen=True)

    variant: str
    swept: dict[str, Any]
    """What its sweeps gave it, but for the seed."""
    runs: tuple[LabRun, ...]

    @property
    def label(self) -> str:
        """For tables and legends."""
        return ", ".join([self.variant, *(f"{name}={value}" for name, value in self.swept.items())])


class Experiment(BaseModel):
    """A file, read and checked."""

    model_config = ConfigDict(frozen=True)

    name: str
    question: str
    reference: str | None
    best_of: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def runs(self) -> list[LabRun]:
        """All runs, each once."""
        return list(dict.fromkeys(run for row in self.rows for run in row.runs))


def read_experiment(path: Path) -> Experiment:
    """An experiment file.

    Raises:
        UsageError: not readable, an unknown name, a value out of bounds, two rows of one label, or rows to compare
            whose tasks measure different things: says where, and what is allowed.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # no TOML, a number of 5,000 digits, 5,000 brackets
        raise UsageError(f"cannot read experiment {path}: {error}") from error
    known = {"question": str, "reference": str, "best_of": list, "settings": dict, "variants": list}
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{path}: unknown {name!r} at the top{_told(name, known)} (settings go below)")
        if not isinstance(value, known[name]):
            raise UsageError(f"{path}: {name} must be a {known[name].__name__}, but is {value!r}")
    settings, variants = table.get("settings", {}), table.get("variants", [{"name": path.stem}])
    if not variants:
        raise UsageError(
            f"{path}: variants is an empty list, so there is nothing to run; leave it out, or add a variant"
        )
    rows: list[Row] = []
    for number, given in enumerate(variants):
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise UsageError(f"{path}: variant {number + 1} needs a name")
        variant = dict(given)
        rows += _rows(path, variant.pop("name"), {**settings, **variant}, sum(len(row.runs) for row in rows))
    if odd := next((name for name in (path.stem, *(row.label for row in rows)) if not name.isprintable()), None):
        raise UsageError(f"{path}: the name {odd!r} cannot be shown in a table: remove its unprintable characters")
    names = [given["name"] for given in variants]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{path}: two variants are named {twice[0]!r}: rename one")
    if twice := [label for label, count in Counter(row.label for row in rows).items() if count > 1]:
        raise UsageError(
            f"{path}: two rows are {twice[0]!r}: rename a variant, or remove duplicate values from a sweep"
        )
    reference, best_of = table.get("reference"), table.get("best_of", [])
    if reference is not None and reference not in names:
        raise UsageError(f"{path}: reference={reference!r} is not a variant{_told(reference, names)}")
    if wrong := [name for name in best_of if name not in list(LabRun.model_fields)]:
        raise UsageError(f"{path}: best_of names {wrong[0]!r}, which is not a setting")
    measured = {run.task for row in rows for run in row.runs}
    if len(measured) > 1 and (reference is not None or best_of):
        raise UsageError(
            f"{path}: tasks {', '.join(sorted(measured))} measure different things, which reference and best_of would "
            "compare: leave these out, or use one file per task"
        )
    return Experiment(
        name=path.stem,
        question=table.get("question", ""),
        reference=reference,
        best_of=tuple(best_of),
        rows=tuple(rows),
    )


def _told(name: str, known: Iterable[str]) -> str:
    """What to add to a name that is not known: the nearest, or all."""
    return meant(name, known) or f"; known are {', '.join(known)}"


def _rows(path: Path, variant: str, given: Mapping[str, Any], above: int) -> Iterator[Row]:
    """A variant's sweeps crossed with each other, in the file's order; seeds stay together. above: runs before it."""
    where = f"{path}, variant {variant!r}"
    for name, value in given.items():
        if name not in LabRun.model_fields:
            raise UsageError(f"{where}: unknown setting {name!r}{_told(name, sorted(LabRun.model_fields))}")
        if value == []:
            raise UsageError(f"{where}: {name} is an empty list, so there is nothing to run")
        if wrong := [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, list | dict)]:
            raise UsageError(f"{where}: {name}={wrong[0]!r}: give one value, or a plain list of values to sweep")
    swept = {name: value for name, value in given.items() if isinstance(value, list) and name != "seed"}
    seeds = given["seed"] if isinstance(given.get("seed"), list) else [given.get("seed", 0)]
    if above + math.prod(map(len, swept.values())) * len(seeds) > MAX_RUNS:
        raise UsageError(f"{path}: more than {MAX_RUNS} runs; make the sweeps smaller")
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        runs = [_lab_run(where, {**given, **chosen, "seed": seed}) for seed in dict.fromkeys(seeds)]
        yield Row(variant=variant, swept=chosen, runs=tuple(dict.fromkeys(runs)))


def _lab_run(where: str, given: dict[str, Any]) -> LabRun:
    method = given.get("method", LabRun.model_fields["method"].default)
    preset = dict(PRESETS.get(method, {})) if isinstance(method, str) else {}
    dense = given.get("task", "text") == "text" and given.get("experts") is None
    if dense and method == "paper" and (size := SIZES.get(given.get("model", USUAL["model"]))):
        preset["fragments"] = min(preset["fragments"], size.tensors)
    try:
        run = LabRun(**{**preset, **given})
        run.sync_spec(run.budget_examples * run.seq_len)  # which has bounds of its own
        return run
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            name = "steps x batch x learners x seq_len" if name == "tokens" else name
            shown = f"{name}={reprlib.repr(problem['input'])}: " if name else ""
            known = name in LabRun.model_fields
            about = f" ({LabRun.model_fields[name].description})" if known else ""
            lines.append(f"{where}: {shown}{format_problem(problem)}{about}")
        raise UsageError("\n".join(dict.fromkeys(lines))) from error


def settings_help() -> str:
    """An experiment file, and all settings with defaults and meaning, one a line."""
    lines = ["An experiment file:", "", SKELETON, "Settings that it and its variants may have:", ""]
    for name, info in LabRun.model_fields.items():
        choices = [part for choice in get_args(info.annotation) for part in (choice, *get_args(choice))]
        words = [choice for choice in choices if isinstance(choice, str)]
        allowed = f" [{', '.join(words)}]" if words else ""
        lines.append(f"{name} = {'off' if info.default is None else info.default}{allowed}: {info.description}")
    return "\n".join(lines)
