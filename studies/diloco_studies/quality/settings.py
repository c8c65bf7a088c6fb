"""One run of an experiment, all of it decided: `LabRun`. Pure: pydantic only.

What is None is switched off, and no part of a run's digest: so a new option that is off by default leaves the results
of earlier runs valid.
"""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import MAX_FRAGMENTS, Codec, GlobalCodec, MergeName, OuterName, WeightsName
from diloco.pipeline.methods import METHODS, RunMethod
from diloco.pipeline.settings import SyncSettings, TrainerSettings, defaults
from diloco.pipeline.sources import meant
from diloco.workers.trainer.models.sizes import SIZES

Method = Literal[RunMethod, "single"]
VIT_SIZES = ("tiny", "small", "base")
"""Sizes of what tells classes of images apart; torch would be loaded to look them up."""
MIN_DONE = 0.01
"""Of the steps, where learners fail: with less, a run would have no end."""
PATIENCE = 100
"""A run is given up after so many times what its steps take."""
JOINING_S = 10.0
"""Virtual seconds that joining may take besides: its polls do not shrink with the steps."""
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
    task: Literal["text", "digits", "captions"] = Field("text", description="What is learnt")
    model: str = Field(USUAL["model"], description=f"Model size: {', '.join(SIZES)}; for digits {', '.join(VIT_SIZES)}")
    experts: int | None = Field(None, ge=1, le=1024, description="Experts per layer, if the model has any")
    experts_a_token: int = Field(2, ge=1, le=1024, description="Experts per token")
    balance: float = Field(0.01, ge=0, description="Weight of the balancing loss")
    data: str = Field(USUAL["data"], description="Text file or folder, token shards, or 'stdlib'")
    seq_len: int = Field(USUAL["seq_len"], ge=8, le=65536, description="Tokens in a sequence")
    eval_tokens: int = Field(65_536, ge=1, description="Size of the held-out slice in tokens or examples")
    evaluations: int = Field(20, ge=1, le=10_000, description="Number of points of the curve")
    seed: int = Field(
        USUAL["seed"], ge=0, le=2**63 - 1, description="Seed of the parameters, the data order and the world"
    )
    # --- by whom, and for how long -------------------------------------------------------------------
    method: Method = Field("decoupled", description="Training method")
    learners: int = Field(4, ge=1, le=256, description="M")
    steps: int = Field(400, ge=1, le=10**9, description="Inner steps of each learner: the budget is M x steps x batch")
    batch: int = Field(USUAL["batch"], ge=1, le=2**20, description="Examples in an inner step of one learner")
    # --- inner optimizer -----------------------------------------------------------------------------
    optimizer: Literal["muon"] | None = Field(
        None, description="Inner optimizer of hidden matrices, at AdamW's rate; off: AdamW, as for everything else"
    )
    lr: float = Field(USUAL["lr"], gt=0, description="Peak inner learning rate")
    min_lr_ratio: float = Field(
        USUAL["min_lr_ratio"], ge=0, le=1, description="Learning rate at the end, as share of the peak"
    )
    warmup: float = Field(USUAL["warmup"], ge=0, lt=1, description="Warm-up, as share of the run's progress")
    weight_decay: float = Field(USUAL["weight_decay"], ge=0, description="AdamW weight decay on matrices")
    clip: float = Field(USUAL["clip"], gt=0, allow_inf_nan=True, description="Gradient clipping norm; inf: no clipping")
    beta2: float | None = Field(None, gt=0, lt=1, description="Adam's beta2; off: 0.95, as in a learner")
    eps: float | None = Field(None, gt=0, description="Adam's epsilon; off: 1e-8, as in a learner")
    # --- synchronisation -----------------------------------------------------------------------------
    fragments: int = Field(USUAL["fragments"], ge=1, le=MAX_FRAGMENTS, description="P")
    sync_interval: int = Field(USUAL["sync_interval"], ge=1, description="H, once it has grown from first_interval")
    quorum: int | Literal["all"] = Field(USUAL["quorum"], description="K; 'all': M")
    overlap_steps: int = Field(USUAL["overlap_steps"], ge=0, description="tau")
    grace_gamma: float = Field(
        USUAL["grace_gamma"], ge=0, lt=1, description="Share of the slack used as grace; 0: no grace"
    )
    codec: Codec = Field(USUAL["codec"], description="Deltas on the wire; quantized ones with error feedback")
    global_codec: GlobalCodec | None = Field(None, description="Globals that learners pull; off: bf16")
    merge: MergeName = Field(
        USUAL["merge"],
        description="rda: RDA of tensors, with the mean on embeddings; rda-row: RDA of rows; mean: the mean everywhere",
    )
    weights: WeightsName | None = Field(None, description="Merge weights; off: by tokens")
    outer_lr: float = Field(USUAL["outer_lr"], gt=0, le=100, description="Outer learning rate")
    outer_momentum: float = Field(USUAL["outer_momentum"], ge=0, lt=1, description="Outer Nesterov momentum")
    outer_warmup: int = Field(
        USUAL["outer_warmup"], ge=0, description="Outer steps at the start of each fragment that only average"
    )
    outer: OuterName = Field(USUAL["outer"], description="Outer optimizer")
    first_interval: int = Field(
        USUAL["first_interval"], ge=0, description="Initial interval, doubled until it reaches H; 0: H from the start"
    )
    doubling: int = Field(USUAL["doubling"], ge=1, description="Outer steps after which that interval doubles")
    stretch: bool | None = Field(None, description="Lengthen H if round trips take long; off: true")
    wait: bool = Field(False, description="A learner that has published waits for the merge (DiLoCo)")
    adopt: Literal["overwrite", "blend", "carry"] = Field(
        "overwrite",
        description="How a learner's fragment adopts a newer global. overwrite: take the global; blend: mix with it "
        "(Streaming DiLoCo); carry: take the global and add the steps since the snapshot",
    )
    mixing: float = Field(0.5, ge=0, lt=1, description="Share of the local fragment that blend keeps")
    # --- the world -----------------------------------------------------------------------------------
    step_s: float = Field(1.0, gt=0, le=1e6, description="Virtual time of an inner step")
    slowdown: float = Field(0.0, ge=0, le=100, description="Share by which every second learner's steps take longer")
    jitter: float = Field(0.0, ge=0, le=100, description="Maximum random lengthening of each step, as share")
    latency_s: float = Field(0.01, ge=0, description="Time of a call to the bus")
    fail_every_s: float | None = Field(None, gt=0, description="Mean time between failures of one learner")
    fail_down_s: float = Field(60.0, gt=0, description="Time until a failed learner is back")
    resize_s: float = Field(
        10.0, ge=0, description="Pause of data-parallel when its size changes; changes during the pause share it"
    )
    late_join_s: float | None = Field(None, gt=0, description="When the last learner joins")
    scavengers: int | None = Field(
        None, ge=1, le=256, description="Additional learners for part of the run; the budget does not change"
    )
    scavenge_from_s: float = Field(0.0, ge=0, description="When the additional learners join")
    scavenge_s: float | None = Field(None, gt=0, description="Time after which they are killed; off: at the end")

    @field_validator("model")
    @classmethod
    def _is_a_size(cls, model: str, info: ValidationInfo) -> str:
        task = info.data.get("task")
        known = VIT_SIZES if task == "digits" else tuple(SIZES)
        if model not in known:
            raise ValueError(f"task={task!r} does not have this size{meant(model, known)}")
        return model

    @field_validator("stretch")
    @classmethod
    def _is_usual(cls, stretch: bool | None) -> bool | None:
        return None if stretch else stretch

    @model_validator(mode="after")
    def _fits(self) -> "LabRun":
        if self.quorum == "all":
            object.__setattr__(self, "quorum", self.learners)
        elif self.quorum > self.learners:
            raise ValueError(
                f"quorum={self.quorum} of {self.learners} learners: there would never be a merge; use a smaller quorum"
            )
        if self.experts is not None and self.task != "text":
            raise ValueError("experts are for task='text'")
        if self.experts is not None and self.experts_a_token > self.experts:
            raise ValueError(f"experts_a_token={self.experts_a_token} is more than experts={self.experts}")
        dense = self.task == "text" and self.experts is None
        if self.decoupled and dense and self.fragments > (tensors := SIZES[self.model].tensors):
            raise ValueError(f"fragments={self.fragments} of the {tensors} tensors of model={self.model!r}")
        fails = self.fail_every_s is not None and self.method != "single"
        if fails and (done := self._steps_done()) < MIN_DONE:
            raise ValueError(
                f"fail_every_s={self.fail_every_s:g}: with {self.learners} learners, steps of {self.step_s:g} s and "
                f"{self.fail_down_s:g} s until one is back, one step of {1 / max(done, 1e-99):.3g} would be done"
            )
        if self.late_join_s is not None and self.learners < 2:
            raise ValueError("late_join_s needs 2 learners or more")
        return self

    @property
    def decoupled(self) -> bool:
        """It runs the protocol; else it is one loop."""
        return self.method not in ("data-parallel", "single")

    def _steps_done(self) -> float:
        """Share of the steps that no failure interrupts. Failures are Poisson; of data-parallel any learner's counts,
        those that come back too."""
        every_s = self.fail_every_s or math.inf
        steps = self.step_s * (1 + self.slowdown) * (1 + self.jitter / 2) / every_s
        there = 1 / (1 + self.fail_down_s / every_s)
        if self.decoupled:
            return math.exp(-steps)
        return math.exp(-2 * max(1.0, self.learners * there) * steps)

    @property
    def patience_s(self) -> float:
        """Virtual time after which it is given up: what joining may take, and `PATIENCE` times what its steps take."""
        return JOINING_S + PATIENCE * self.steps * self.step_s * (1 + self.slowdown) * (1 + self.jitter)

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
            outer=self.outer,
            delta_clip=USUAL["delta_clip"],
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            outer_warmup=self.outer_warmup,
            first_interval=self.first_interval,
            doubling=self.doubling,
            stretch=self.stretch is None,
            tokens=tokens,
            groups=1,
            chunk_bytes=USUAL["chunk_bytes"],
        )

    def relevant(self) -> dict[str, Any]:
        """The settings that decide this run's result: those its method looks at, without what is off."""
        given = self.model_dump(exclude_none=True)
        left_out = set() if self.decoupled else set(PROTOCOL)
        if self.task != "text":
            left_out |= {"seq_len", "data", "eval_tokens"}
        if self.experts is None:
            left_out |= {"experts_a_token", "balance"}
        if self.method == "single":
            left_out |= {*LEARNERS_ONLY, "slowdown"}
        if self.fail_every_s is None:
            left_out.add("fail_down_s")
        if self.scavengers is None:
            left_out.add("scavenge_from_s")
        alike = self.fail_every_s is None and self.late_join_s is None and self.scavengers is None
        if alike or self.decoupled:
            left_out.add("resize_s")
        if not self.first_interval:
            left_out.add("doubling")
        if self.adopt != "blend":
            left_out.add("mixing")
        return {name: value for name, value in given.items() if name not in left_out}


PROTOCOL = (
    *("fragments", "sync_interval", "quorum", "overlap_steps", "grace_gamma", "codec", "merge", "outer_lr"),
    *("outer_momentum", "wait", "adopt", "mixing", "latency_s"),
    *("outer_warmup", "first_interval", "doubling", "weights", "global_codec", "outer", "stretch"),
)
"""Settings that a single loop does not look at."""
LEARNERS_ONLY = (
    *("learners", "fail_every_s", "fail_down_s", "resize_s"),
    *("scavengers", "scavenge_from_s", "scavenge_s", "late_join_s"),
)
