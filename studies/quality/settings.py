"""What an experiment is: a TOML file with settings, in which a list means a sweep. Pure: pydantic only.

`SKELETON` is such a file. `LabRun` is one run, all of it decided. What is None is switched off, and no part of a run's
digest: so a new option that is off by default leaves the results of earlier runs valid.
"""

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec, GlobalCodec, MergeName, WeightsName
from diloco.pipeline.messages.wire import OuterName as Production
from diloco.pipeline.methods import METHODS, RunMethod
from diloco.pipeline.settings import SyncSettings, TrainerSettings, defaults
from diloco.pipeline.sources import meant
from diloco.pipeline.wrong_values import told
from diloco.workers.trainer.models.sizes import SIZES

Method = Literal[RunMethod, "single"]
Turned = Literal["muon-3", "halves", "gram-schmidt", "clipped", "by-turns", "by-turns-clipped"]
"""Research that turns matrices (`turns`)."""
OuterName = Literal[Production, Turned, "delayed", "agreement", "extrapolated", "schedule-free"]
Packing = Literal["contiguous", "strided"]
PoisonName = Literal["flipped", "flipped-3", "random", "shuffled", "turns", "weak", "seldom", "mixed"]
TEXT = ("text", "keywords")
"""Tasks of the GPT alone."""
VIT_SIZES = ("tiny", "small", "base")
"""Sizes of what tells classes of images apart; torch would be loaded to look them up."""
MOST_RUNS = 10_000
SKELETON = """\
question = "Which outer optimizer?"    # heads the report; all but the variants' names may be left out
reference = "data-parallel"            # the variant that the others are compared with
best_of = ["lr"]                       # the report also shows each row at its best of these

[settings]                             # of every run; lists are swept, crossed with each other
lr = [8e-3, 16e-3]
seed = [0, 1, 2]                       # seeds of one row are its error bars

[[variants]]                           # settings that belong together; they have the last word
name = "data-parallel"
method = "data-parallel"

[[variants]]
name = "Nesterov's"
outer = "nesterov"
"""
"""An experiment file, as short as it can be with everything in it."""

_WAITING: dict[str, dict[str, Any]] = {"diloco": {"wait": True}, "streaming": {"adopt": "blend"}}
"""What the papers' learners do and those of `diloco run` do not."""
PRESETS: dict[str, dict[str, Any]] = {
    **{name: {**method.settings, **_WAITING.get(name, {})} for name, method in METHODS.items()},
    "single": {},
}
"""What a method means where a file does not say otherwise."""
USUAL = defaults(SyncSettings) | defaults(TrainerSettings)
"""A real run's defaults, which are the lab's."""


class LabRun(BaseModel):
    """One run: what is trained, by which method, in which world. Names that `diloco run` has mean the same here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # --- what is trained -----------------------------------------------------------------------------
    task: Literal["text", "digits", "images", "captions", "keywords"] = Field("text", description="What is learnt")
    model: str = Field(
        USUAL["model"], description=f"Size: {', '.join(SIZES)}; of digits and images {', '.join(VIT_SIZES)}"
    )
    experts: int | None = Field(None, ge=1, le=1024, description="Experts of each layer, where there are any")
    experts_a_token: int = Field(2, ge=1, description="Experts that a token goes through")
    balance: float = Field(0.01, ge=0, description="Weight of the balancing loss")
    data: str = Field(
        USUAL["data"],
        description="Text file or folder, or 'stdlib'; for images a folder with a folder of them for each class",
    )
    image_size: int = Field(32, ge=8, le=1024, description="What images are made to be, pixels a side")
    patch_size: int = Field(4, ge=1, description="Pixels a side of what the ViT sees as one token")
    seq_len: int = Field(USUAL["seq_len"], ge=8, le=65536, description="Tokens in a sequence")
    eval_tokens: int = Field(65_536, ge=1, description="Size of the held-out slice")
    evaluations: int = Field(20, ge=1, le=10_000, description="Points of the curve")
    seed: int = Field(
        USUAL["seed"], ge=0, le=2**63 - 1, description="Of the parameters, the data's order and the world"
    )
    after: "LabRun | None" = Field(
        None,
        description="A row above in the file: this run begins with the final parameters of that row's run of its seed",
    )
    # --- by whom, and for how long -------------------------------------------------------------------
    method: Method = Field("decoupled", description="How learners come together")
    learners: int = Field(4, ge=1, le=256, description="M")
    steps: int = Field(400, ge=1, description="Inner steps of each learner: the budget is M x steps x batch")
    batch: int = Field(USUAL["batch"], ge=1, description="Examples in an inner step of one learner")
    # --- inner optimizer -----------------------------------------------------------------------------
    lr: float = Field(USUAL["lr"], gt=0, description="Peak inner learning rate")
    min_lr_ratio: float = Field(
        USUAL["min_lr_ratio"], ge=0, le=1, description="Learning rate at the end, as share of the peak"
    )
    warmup: float = Field(USUAL["warmup"], ge=0, lt=1, description="Warm-up, as share of the run's progress")
    weight_decay: float = Field(USUAL["weight_decay"], ge=0, description="AdamW weight decay on matrices")
    clip: float = Field(USUAL["clip"], gt=0, allow_inf_nan=True, description="Gradient clipping norm; inf: no clipping")
    beta2: float | None = Field(None, gt=0, lt=1, description="Adam's second decay; off: 0.95, as a learner's")
    eps: float | None = Field(None, gt=0, description="Adam's epsilon; off: 1e-8, as a learner's")
    # --- synchronisation -----------------------------------------------------------------------------
    fragments: int = Field(USUAL["fragments"], ge=1, le=4096, description="P")
    sync_interval: int = Field(USUAL["sync_interval"], ge=1, description="H, once it has grown from first_interval")
    quorum: int | Literal["all"] = Field(USUAL["quorum"], description="K; 'all': M")
    overlap_steps: int = Field(USUAL["overlap_steps"], ge=0, description="tau")
    grace_gamma: float = Field(
        USUAL["grace_gamma"], ge=0, lt=1, description="Share of the slack used as grace; 0: no grace"
    )
    codec: Codec = Field(USUAL["codec"], description="Deltas on the wire; quantized ones with error feedback")
    global_codec: GlobalCodec | None = Field(
        None, description="Globals as learners pull them; off: bf16. int8: updates"
    )
    merge: MergeName = Field(
        USUAL["merge"],
        description="rda: RDA of tensors, the mean on embeddings; rda-row: of rows; rda-all: no exception; mean",
    )
    weights: WeightsName | None = Field(None, description="Merge weights; off: by tokens")
    outer_lr: float = Field(USUAL["outer_lr"], gt=0, le=100, description="Outer learning rate")
    outer_momentum: float = Field(USUAL["outer_momentum"], ge=0, lt=1, description="Outer Nesterov momentum")
    outer_warmup: int = Field(
        USUAL["outer_warmup"], ge=0, description="First outer steps of each fragment that average only"
    )
    outer: OuterName = Field(
        USUAL["outer"],
        description="Outer optimizer: production's nesterov, muon or halley, or one for research "
        "(studies/quality/outer.py)",
    )
    packing: Packing | None = Field(
        None,
        description="How tensors are shared among fragments. off: balanced; contiguous: neighbours together; strided: "
        "neighbours apart",
    )
    outer_delay: int = Field(4, ge=1, description="Outer steps between two of outer='delayed' with momentum")
    stale: Literal["keep", "drop"] | None = Field(
        None,
        description="What becomes of a delta whose base is the one before the present one. off: its learner's values "
        "are merged, measured from the present base; keep: merged as it is; drop: left out of the merge",
    )
    first_interval: int = Field(
        USUAL["first_interval"], ge=0, description="H at the start, doubled again and again; 0: H from the start"
    )
    doubling: int = Field(USUAL["doubling"], ge=1, description="Outer steps after which it doubles")
    wait: bool = Field(False, description="A learner that has published waits for the merge (DiLoCo)")
    delta_clip: float | None = Field(None, ge=1, description="Longest delta, in medians of its window; off: any")
    leave_out: bool | None = Field(None, description="Learners at odds with all others are left out of merges")
    poison: PoisonName | None = Field(
        None,
        description="What the first learners send in place of what they learned. flipped: minus it; flipped-3: minus "
        "three times it; random: as long in a random direction; shuffled: what they learn of shuffled text; turns: "
        "flipped, one at a time; weak: minus 0.3 times it; seldom: flipped, three times of ten; mixed: half of it and "
        "a random direction",
    )
    poisoners: int | None = Field(None, ge=1, le=256, description="How many; off: 1")
    apart: bool | None = Field(None, description="Each learner trains on a stretch of the text of its own")
    odd_data: str | None = Field(None, description="Text that the last learner trains on instead")
    adopt: Literal["overwrite", "blend", "carry"] = Field(
        "overwrite",
        description="What becomes of a learner's fragment when a newer global arrives. overwrite: the global; blend: "
        "mixed with it (Streaming DiLoCo); carry: the global and the steps made since the snapshot",
    )
    mixing: float = Field(0.5, ge=0, lt=1, description="Share of the local fragment that blend keeps")
    # --- the world -----------------------------------------------------------------------------------
    step_s: float = Field(1.0, gt=0, description="Virtual time of an inner step")
    slowdown: float = Field(0.0, ge=0, le=100, description="Every second learner's steps take longer by this share")
    jitter: float = Field(0.0, ge=0, le=100, description="Each step takes longer by up to this share, at random")
    latency_s: float = Field(0.01, ge=0, description="Time of a call to the bus")
    link_mb_s: float | None = Field(None, gt=0, description="Megabytes a second between a party and the bus")
    fail_every_s: float | None = Field(None, gt=0, description="Mean time between failures of one learner")
    fail_down_s: float = Field(60.0, gt=0, description="Time until a failed learner is back")
    moments: Literal["own", "peer", "fresh"] = Field("peer", description="Whose moments a learner comes back with")
    resize_s: float = Field(10.0, ge=0, description="Pause of data-parallel when its size changes; one for all in it")
    elastic: bool = Field(True, description="Data-parallel goes on with fewer; if not, it stops until all are back")
    late_join_s: float | None = Field(None, gt=0, description="When the last learner joins")
    scavengers: int | None = Field(
        None, ge=1, le=256, description="Learners besides the M, there for a part of the run: the budget stays"
    )
    scavenge_from_s: float = Field(0.0, ge=0, description="When they come")
    scavenge_s: float | None = Field(None, gt=0, description="How long they stay, then killed; off: to the end")

    @field_validator("model")
    @classmethod
    def _is_a_size(cls, model: str, info: ValidationInfo) -> str:
        task = info.data.get("task")
        known = VIT_SIZES if task in ("digits", "images") else tuple(SIZES)
        if model not in known:
            raise ValueError(f"task={task!r} has no such size{meant(model, known)}")
        return model

    @model_validator(mode="after")
    def _fits(self) -> "LabRun":
        if self.quorum == "all":
            object.__setattr__(self, "quorum", self.learners)
        elif self.quorum > self.learners:
            raise ValueError(f"quorum={self.quorum} of {self.learners} learners: there would never be a merge")
        if self.after is not None and self._architecture() != self.after._architecture():
            raise ValueError("after: it has another model, whose parameters do not fit")
        if self.experts is not None and self.task != "text":
            raise ValueError("experts are for task='text'")
        if self.task == "images" and self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is no multiple of patch_size={self.patch_size}")
        if self.task != "text" and (self.poison == "shuffled" or self.apart or self.odd_data is not None):
            raise ValueError("poison='shuffled', apart and odd_data are for task='text'")
        if not self.decoupled and (self.poison is not None or self.apart or self.odd_data is not None):
            raise ValueError(f"poison, apart and odd_data are for decoupled learners: method={self.method!r} has none")
        if self.poisoners is not None and (self.poison is None or self.poisoners > self.learners):
            raise ValueError(f"poisoners={self.poisoners} of {self.learners} learners with poison={self.poison!r}")
        if self.late_join_s is not None and self.learners < 2:
            raise ValueError("late_join_s needs 2 learners or more")
        if self.global_codec == "int8" and self.outer not in get_args(Production):
            raise ValueError("global_codec='int8' publishes production's outer step: it goes with no other 'outer'")
        if self.scavengers is not None and not self.elastic:
            raise ValueError("scavengers come and go: a job that is not elastic has no use for them")
        return self

    @property
    def decoupled(self) -> bool:
        """It runs the protocol; else it is one loop."""
        return self.method not in ("data-parallel", "single")

    @property
    def scavenge_until_s(self) -> float:
        """When scavengers are taken away."""
        return math.inf if self.scavenge_s is None else self.scavenge_from_s + self.scavenge_s

    @property
    def members(self) -> int:
        """Learners that are ever there, failures aside."""
        return 1 if self.method == "single" else self.learners + (self.scavengers or 0)

    @property
    def budget_examples(self) -> int:
        """Examples of all learners together."""
        return self.steps * self.batch * (1 if self.method == "single" else self.learners)

    def sync_spec(self, tokens: int) -> SyncSpec:
        """The protocol's constants, with a budget in tokens."""
        assert isinstance(self.quorum, int)  # noqa: S101  # by the validator
        return SyncSpec(
            fragments=self.fragments,
            sync_interval=self.sync_interval,
            quorum=self.quorum,
            overlap_steps=self.overlap_steps,
            grace_gamma=self.grace_gamma,
            codec=self.codec,
            global_codec=self.global_codec or USUAL["global_codec"],
            merge=self.merge,
            weights=self.weights or USUAL["weights"],
            outer=self._production(),
            delta_clip=self.delta_clip or USUAL["delta_clip"],
            leave_out=self.leave_out or USUAL["leave_out"],
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            outer_warmup=self.outer_warmup,
            first_interval=self.first_interval,
            doubling=self.doubling,
            tokens=tokens,
            groups=1,
            chunk_bytes=USUAL["chunk_bytes"],
        )

    def _architecture(self) -> tuple[object, ...]:
        """Two runs whose models have the same tensors agree in it."""
        return self.task in TEXT or self.task, self.model, self.experts

    def _production(self) -> Production:
        """The outer optimizer that is nearest: what turns matrices must know them."""
        if self.outer in get_args(Turned):
            return "halley"
        return next((name for name in get_args(Production) if name == self.outer), "nesterov")

    def relevant(self) -> dict[str, Any]:
        """The settings that decide this run's result: those its method looks at, without what is off."""
        given = self.model_dump(exclude_none=True)
        left_out = set() if self.decoupled else set(PROTOCOL)
        if self.after is not None:
            given["after"] = self.after.relevant()
        if self.task not in TEXT:
            left_out.add("seq_len")
        if self.task in ("digits", "captions"):
            left_out |= {"data", "eval_tokens"}
        if self.task != "images":
            left_out |= {"image_size", "patch_size"}
        if self.experts is None:
            left_out |= {"experts_a_token", "balance"}
        if self.method == "single":
            left_out |= {*LEARNERS_ONLY, "slowdown"}
        if self.fail_every_s is None:
            left_out.add("fail_down_s")
        if self.scavengers is None:
            left_out.add("scavenge_from_s")
        alike = self.fail_every_s is None and self.late_join_s is None and self.scavengers is None
        if alike:
            left_out.add("moments")
        if alike or self.decoupled:
            left_out |= {"resize_s", "elastic"}
        if not self.first_interval:
            left_out.add("doubling")
        if self.outer != "delayed":
            left_out.add("outer_delay")
        if self.adopt != "blend":
            left_out.add("mixing")
        return {name: value for name, value in given.items() if name not in left_out}


PROTOCOL = (
    *("fragments", "sync_interval", "quorum", "overlap_steps", "grace_gamma", "codec", "merge", "outer_lr"),
    *("outer_momentum", "wait", "adopt", "mixing", "latency_s", "link_mb_s", "moments"),
    *("outer_warmup", "first_interval", "doubling", "weights", "global_codec", "outer", "outer_delay", "stale"),
    *("delta_clip", "leave_out", "poison", "poisoners", "packing"),
)
"""Settings that a single loop does not look at."""
LEARNERS_ONLY = (
    *("learners", "fail_every_s", "fail_down_s", "resize_s", "elastic"),
    *("scavengers", "scavenge_from_s", "scavenge_s", "late_join_s"),
)


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
            raise UsageError(f"{path}: {name} must be a {known[name].__name__}, and is {value!r}")
    settings, variants = table.get("settings", {}), table.get("variants", [{"name": path.stem}])
    if not variants:
        raise UsageError(f"{path}: variants is an empty list: there is nothing to run; leave it out, or give one")
    rows: list[Row] = []
    for number, given in enumerate(variants):
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise UsageError(f"{path}: variant {number + 1} needs a name")
        variant = dict(given)
        rows += _rows(path, variant.pop("name"), {**settings, **variant}, rows)
    names = [given["name"] for given in variants]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"{path}: two variants are named {twice[0]!r}: rename one")
    if twice := [label for label, count in Counter(row.label for row in rows).items() if count > 1]:
        raise UsageError(f"{path}: two rows are {twice[0]!r}: rename a variant, or leave out what a sweep has twice")
    reference, best_of = table.get("reference"), table.get("best_of", [])
    if reference is not None and reference not in names:
        raise UsageError(f"{path}: reference={reference!r} is no variant{_told(reference, names)}")
    if wrong := [name for name in best_of if name not in list(LabRun.model_fields)]:
        raise UsageError(f"{path}: best_of names {wrong[0]!r}, which is no setting")
    measured = {"text" if run.task in TEXT else run.task for row in rows for run in row.runs}
    if len(measured) > 1 and (reference is not None or best_of):
        raise UsageError(
            f"{path}: tasks {', '.join(sorted(measured))} measure different things, which reference and best_of would "
            "compare: leave these out, or make a file for each task"
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


def _rows(path: Path, variant: str, given: Mapping[str, Any], above: Sequence[Row]) -> Iterator[Row]:
    """A variant's sweeps crossed with each other, in the file's order; seeds stay together."""
    where = f"{path}, variant {variant!r}"
    for name, value in given.items():
        if name not in LabRun.model_fields:
            raise UsageError(f"{where}: unknown setting {name!r}{_told(name, sorted(LabRun.model_fields))}")
        if value == []:
            raise UsageError(f"{where}: {name} is an empty list: there is nothing to run")
        if wrong := [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, list | dict)]:
            raise UsageError(f"{where}: {name}={wrong[0]!r}: give one value, or a plain list of values to sweep")
    swept = {name: value for name, value in given.items() if isinstance(value, list) and name != "seed"}
    seeds = given["seed"] if isinstance(given.get("seed"), list) else [given.get("seed", 0)]
    if sum(len(row.runs) for row in above) + math.prod(map(len, swept.values())) * len(seeds) > MOST_RUNS:
        raise UsageError(f"{path}: more than {MOST_RUNS} runs; make the sweeps smaller")
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        runs = [_lab_run(where, {**given, **chosen, "seed": seed}, above) for seed in dict.fromkeys(seeds)]
        yield Row(variant=variant, swept=chosen, runs=tuple(dict.fromkeys(runs)))


def _lab_run(where: str, given: dict[str, Any], above: Sequence[Row]) -> LabRun:
    if (after := given.get("after")) is not None:
        found = [run for row in above if row.label == after for run in row.runs if run.seed == given["seed"]]
        if not found:
            raise UsageError(
                f"{where}: after={after!r} is no row above with seed {given['seed']}; above are "
                f"{', '.join(row.label for row in above) or 'none'}"
            )
        given = given | {"after": found[0]}
    method = given.get("method", LabRun.model_fields["method"].default)
    preset = dict(PRESETS.get(method, {})) if isinstance(method, str) else {}
    dense = given.get("task", "text") == "text" and given.get("experts") is None
    if dense and method == "paper" and (size := SIZES.get(given.get("model", USUAL["model"]))):
        preset["fragments"] = min(preset["fragments"], size.tensors)
    try:
        run = LabRun(**{**preset, **given})
        run.sync_spec(tokens=1)  # which has bounds of its own
        return run
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            shown = f"{name}={problem['input']!r}: " if name else ""
            known = name in LabRun.model_fields
            about = f" ({LabRun.model_fields[name].description})" if known else ""
            lines.append(f"{where}: {shown}{told(problem)}{about}")
        raise UsageError("\n".join(dict.fromkeys(lines))) from error


def settings_help() -> str:
    """An experiment file, and all settings with defaults and meaning, one a line."""
    lines = ["An experiment file:", "", SKELETON, "What may stand among its settings, and in a variant:", ""]
    for name, info in LabRun.model_fields.items():
        choices = [part for choice in get_args(info.annotation) for part in (choice, *get_args(choice))]
        words = [choice for choice in choices if isinstance(choice, str)]
        allowed = f" [{', '.join(words)}]" if words else ""
        lines.append(f"{name} = {'off' if info.default is None else info.default}{allowed}: {info.description}")
    return "\n".join(lines)
