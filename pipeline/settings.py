"""Settings from flags, `DILOCO_*` variables and a TOML file, validated once.

Precedence: flag, environment, TOML file, default. One flat namespace: one file may hold every party's settings, and
each party reads its own. Whatever a party is not given, it takes from the run's spec (`agree`).

Each setting is declared once, with its default: lab, simulator and benchmarks take theirs from here (`defaults`).
An `expert` setting has no flag: it is set by a variable or in the file (`is_expert`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import Address
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import (
    MAX_FRAGMENTS,
    MAX_LEASE_S,
    MAX_MEMBERS,
    MAX_STEPS,
    Codec,
    GlobalCodec,
    MergeName,
    OuterName,
    PartyName,
    WeightsName,
)
from diloco.pipeline.methods import NESTEROV, SyncMethod, settings_of
from diloco.pipeline.sources import ENV_PREFIX, given_outside, meant, place_in, read_file
from diloco.pipeline.tls import OPTIONS, with_tls
from diloco.pipeline.units import Span, parse_whole
from diloco.pipeline.wrong_values import format_problem

S = TypeVar("S", bound="Settings")
# Key in a field's `json_schema_extra` that marks an expert setting.
EXPERT = "expert"
# Default lease length; times derived from the lease are tuned for it.
LEASE_S = 5.0
CHUNK_BYTES = 512 * 1024
LEAVE_S, STATE_S = 20.0, 30.0
EncodeOn = Literal["auto", "cpu", "device"]
DEVICE = r"^(auto|cpu|cuda(:\d+)?|mps)$"
DEVICES = r"^(auto|mps|cpu(\+cpu)*|cuda(:\d+)?|cuda:\d+(\+cuda:\d+)+)$"  # or a set: a rank on each


def expert(default: Any = ..., **rules: Any) -> Any:
    """Declare a setting that hardly anybody changes (pydantic's `Field`): it gets no flag."""
    return Field(default, json_schema_extra={EXPERT: True}, **rules)


def _following(lease: float, min_s: float) -> Any:
    """Return a `default_factory` for a time of `lease` leases, at least `min_s`."""
    return lambda given: max(min_s, lease * given.get("lease_s", LEASE_S))


_file_values: ContextVar[Mapping[str, Any] | None] = ContextVar("file_values", default=None)
# Names of settings whose variables are ignored.
_ignored: ContextVar[Collection[str]] = ContextVar("ignored", default=())


def _types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) or (annotation,)


class Settings(BaseSettings):
    """Base class. `model_fields_set` has the fields that were given on purpose."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    from_environment: ClassVar[bool] = True
    """False: `DILOCO_*` variables are ignored."""
    section: ClassVar[str]
    """Heading of the class's settings in `--help` and in docs/reference/settings.md."""

    def __init__(self, **values: Any) -> None:
        """Take values from flags or a program; the environment and the settings file fill in the others.

        Raises:
            UsageError: names the field, the value and what is allowed.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            if _file_values.get() is not None:
                raise  # `load` says where each value came from
            wrong = (f"{type(self).__name__}: {name}={shown}: {why}" for name, shown, why in _wrong(type(self), error))
            raise UsageError("\n".join(wrong)) from None

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Show what was given: a method replaces the defaults of the rest (`SyncSettings.with_method`)."""
        return [(name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set]

    __str__ = BaseSettings.__repr__

    @field_validator("*", mode="before")
    @classmethod
    def _as_people_write(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept whole numbers such as '2.5M' or '4e3'; refuse text that cannot be written to a file."""
        if isinstance(value, bool) and bool not in _types(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("true and false are not allowed")
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("not UTF-8")
            if "\0" in value:
                raise ValueError("has a NUL character")
            annotation = cls.model_fields[str(info.field_name)].annotation
            if not value and (Path in _types(annotation) or info.field_name == "data"):
                raise ValueError("empty")  # as a path it would be the current folder
            if annotation in (int, int | None):
                return parse_whole(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: flags, the environment unless it is ignored, the TOML file."""
        from_file = InitSettingsSource(settings_cls, init_kwargs=dict(_file_values.get() or {}))
        if not cls.from_environment:
            return init_settings, from_file
        if not (ignored := _ignored.get()):
            return init_settings, env_settings, from_file
        variables = {name: value for name, value in env_settings().items() if name not in ignored}
        return init_settings, InitSettingsSource(settings_cls, init_kwargs=variables), from_file


class LogSettings(Settings):
    """How to log."""

    section = "Logging"

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum severity of log lines")


class ServerSettings(LogSettings):
    """Address of a Redis server, and how to log."""

    section = "Redis"

    redis_url: SecretStr | None = Field(
        None,
        description="Redis to use: redis://HOST:6379 (of a cluster, any of its nodes); rediss:// with TLS; "
        "redis+sentinel://HOST,HOST,HOST/SERVICE; unix:///PATH. Set DILOCO_REDIS_URL instead if it has a "
        "password",
    )
    redis_ca: Path | None = expert(None, description="For rediss://: CA file of the issuer of its certificate")
    redis_cert: Path | None = expert(None, description="For rediss://: client certificate, if the server requires one")
    redis_key: Path | None = expert(None, description="For rediss://: key of the client certificate")

    def bus_url(self) -> str | None:
        """Return the Redis URL with its password and certificate files; None if no Redis was named.

        Raises:
            UsageError: certificates for a URL without TLS.
        """
        if self.redis_url is None:
            return None
        return with_tls(self.redis_url.get_secret_value(), {name: getattr(self, name) for name in OPTIONS})

    def need_url(self, hint: str = "") -> str:
        """Return the URL of `bus_url`.

        Raises:
            UsageError: no Redis was named; the message ends with the hint. Or as `bus_url`.
        """
        if (url := self.bus_url()) is None:
            raise UsageError(
                "no Redis is set: pass --redis-url redis://HOST:6379, or set DILOCO_REDIS_URL (required for a URL with "
                "a password)",
                hint,
            )
        return url


class BusSettings(ServerSettings):
    """Redis server and name of a run."""

    run: PartyName = Field("run", description="Name of the run on that Redis")


class SyncSettings(Settings):
    """The protocol's constants; equal for all parties, kept in the run's spec."""

    section = "Synchronisation (equal for all parties)"

    method: SyncMethod = Field(
        "decoupled", description="Preset for settings that are not given (docs/reference/methods.md)"
    )
    fragments: int = Field(8, ge=1, le=MAX_FRAGMENTS, description="Number of fragments P, at most one per tensor")
    sync_interval: int = Field(24, ge=1, le=MAX_STEPS, description="Inner steps H between two syncs of one fragment")
    quorum: int = Field(1, ge=1, le=MAX_MEMBERS, description="Minimum number of learners K for a merge")
    overlap_steps: int = Field(
        2, ge=0, le=MAX_STEPS, description="Inner steps tau that a sync may take in the background"
    )
    grace_gamma: float = expert(0.9, ge=0, lt=1, description="Share of the slack that the grace window may use")
    codec: Codec = Field(
        "bf16",
        description="Encoding of deltas: bf16, fp32, int8 (half of bf16's bytes) or int4 (a quarter); the last two "
        "with error feedback",
    )
    global_codec: GlobalCodec = Field(
        "bf16",
        description="Encoding of the globals that learners pull: bf16 (the syncer keeps fp32) or fp32 (twice the "
        "bytes)",
    )
    merge: MergeName = Field(
        "mean",
        description="rda: RDA of each tensor, with the weighted mean on embeddings; rda-row: RDA of each row of a "
        "matrix instead; mean: the weighted mean everywhere",
    )
    weights: WeightsName = expert(
        "tokens", description="Merge weights. tokens: tokens x tokens per step; equal: the same for all learners"
    )
    delta_clip: float = expert(
        0, ge=0, le=1e6, description="Clip each delta to this many times the median norm of its window; 0: no clipping"
    )
    outer: OuterName = Field(
        "halley",
        description="Outer optimizer. nesterov: SGD with Nesterov momentum; halley: the same, with each matrix's step "
        "orthogonalised and kept at its norm, which costs the syncer matrix products "
        "(docs/results/outer-step.md)",
    )
    outer_lr: float = Field(1.0, gt=0, le=100, description="Outer learning rate")
    outer_momentum: float = Field(
        0.7, ge=0, lt=1, description="Outer Nesterov momentum; with outer=nesterov the default is 0.5"
    )
    outer_warmup: int = expert(
        6,
        ge=0,
        le=10**6,
        description="Outer steps at the start of each fragment that only average (rate 1, no momentum); with "
        "outer=nesterov the default is 24",
    )
    first_interval: int = expert(
        2,
        ge=0,
        le=MAX_STEPS,
        description="Initial interval, doubled until it reaches H; 0: H from the start",
    )
    doubling: int = expert(
        8, ge=1, le=10**6, description="Outer steps of each fragment after which a growing interval doubles"
    )
    stretch: bool = expert(True, description="Lengthen H if a round trip takes many steps")
    tokens: int = Field(
        2_500_000, ge=1, le=2**62, description="Budget: trained tokens of all learners together, e.g. 2.5M"
    )
    groups: int | None = expert(
        None,
        ge=1,
        le=MAX_FRAGMENTS,
        description="Fragment groups (default: one per fragment on a Redis Cluster, otherwise 1)",
    )
    # Nobody decides this one. It stays a setting: tests, worlds and benches run with others, and a run's spec says it:
    # what is on the bus, in checkpoints and in recorded deltas was made with it.
    chunk_bytes: int = expert(CHUNK_BYTES, ge=1024, le=16 * 2**20, description="Size of a payload's chunks")

    def sync_spec(self, cluster: bool = False) -> SyncSpec:
        """Return the settings as a wire type. cluster: True if the run's Redis is a cluster."""
        told = {name: getattr(self, name) for name in SyncSpec.model_fields}
        return SyncSpec(**told | {"groups": self.groups or groups_on(cluster, self.fragments)})

    def with_method(self, learners: int | None = None, tensors: int | None = None) -> Self:
        """Return a copy in which the method's values replace defaults; they count as given then.

        The number of fragments does not count as given, since the model may have too few tensors for it. Nor do the
        defaults that differ with outer=nesterov, where neither the method nor anybody else sets these fields.

        Args:
            learners: number of learners of the run; None: where a method has all in each merge, the quorum says how
            many they are.
            tensors: as `settings_of`.

        Raises:
            UsageError: as `settings_of`.
        """
        told = self.model_fields_set
        everyone = self.quorum if learners is None and "quorum" in told else learners
        meant = settings_of(self.method, everyone, tensors)
        settled = self.model_copy(update={name: value for name, value in meant.items() if name not in told})
        if "fragments" not in told:
            settled.model_fields_set.discard("fragments")
        if settled.outer != "nesterov":
            return settled
        of_nesterov = {name: value for name, value in NESTEROV.items() if name not in settled.model_fields_set}
        settled = settled.model_copy(update=of_nesterov)
        settled.model_fields_set.difference_update(of_nesterov)
        return settled


def groups_on(cluster: bool, fragments: int) -> int:
    """Return the default number of groups: on a cluster one per fragment, so that nodes may come and go."""
    return fragments if cluster else 1


def check_outer(sync: SyncSettings | SyncSpec) -> None:
    """Check that the outer step can be taken.

    Raises:
        UsageError: it could never be orthogonalised.
    """
    if sync.outer == "halley" and not sync.outer_momentum:
        raise UsageError(
            f"outer={sync.outer} needs an outer momentum above 0: a step without momentum is never orthogonalised. To "
            "only average, set outer=nesterov too"
        )


class TrainerSettings(Settings):
    """The built-in trainer; equal for all learners, kept in the run's spec."""

    section = "Training (equal for all learners)"

    model: str = Field(
        "tiny",
        description="Model size: nano (0.2M), deep (0.9M), tiny (0.9M), 2m (2.0M), small (4.9M), 10m (10.0M), base "
        "(14.3M), 30m (30.3M), medium (49.7M), large (100.5M), 124m (123.9M), 350m (349.6M), 1b (996.7M); or a "
        "transformers model: hf:FOLDER with its config.json, weights and tokenizer, hf:FILE.json (only a config), or "
        "hf:OWNER/NAME on the hub",
    )
    data: str = Field(
        "stdlib",
        description="Text file or folder; 'stdlib': Python's own source text; token shards, a folder written by "
        "`diloco data prepare`; a .npy file of tokens; a .parquet file; or hf:OWNER/NAME, a data set on the Hugging "
        "Face hub",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of the initial parameters and the data order")
    seq_len: int = Field(128, ge=8, le=65536, description="Tokens in a sequence")
    batch: int = Field(8, ge=1, le=10**6, description="Sequences in a micro-batch")
    accumulate: int = Field(1, ge=1, le=10**6, description="Micro-batches in an inner step")
    lr: float = Field(4e-3, gt=0, description="Peak inner learning rate")
    min_lr_ratio: float = expert(0.1, ge=0, le=1, description="Learning rate at the end, as share of the peak")
    warmup: float = expert(0.03, ge=0, lt=1, description="Warm-up, as share of the run's progress")
    weight_decay: float = expert(0.1, ge=0, description="AdamW weight decay on matrices")
    clip: float = expert(1.0, gt=0, allow_inf_nan=True, description="Gradient clipping norm; inf: no clipping")

    def trainer_spec(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as the spec keeps them."""
        return {name: getattr(self, name) for name in TrainerSettings.model_fields}


class LearnerSettings(Settings):
    """One learner process."""

    section = "Learners"

    learner_id: PartyName | None = Field(None, description="Name of this learner, unique in its run (default: random)")
    device: str = Field(
        "auto",
        pattern=DEVICES,
        description="auto, cpu, cuda, cuda:N, mps; for a learner with several ranks, cuda:0+cuda:1",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Torch threads (default: all usable cores, shared in `diloco run`)",
    )
    compile: bool = Field(
        False, description="torch.compile: slow first step; needs a C++ compiler, and Triton with CUDA"
    )
    precision: Literal["fp32", "bf16"] = expert(
        "fp32", description="fp32 (on CUDA with bf16 autocast), or bf16 parameters with fp32 master weights"
    )
    checkpoint_activations: bool = expert(
        False, description="Recompute activations in the backward pass instead of keeping them"
    )
    sharding: Literal["ddp", "fsdp"] = expert(
        "ddp", description="ddp: each rank has the whole model; fsdp: parameters, gradients and moments are sharded"
    )
    encode_on: EncodeOn = expert(
        "auto",
        description="Where deltas are encoded and their bases and residuals are kept: host memory (cpu) or the model's "
        "device (4 bytes per parameter, 8 to 16 with quantized deltas). auto: a CUDA device if the model is on one",
    )
    pace: Span = Field(0.0, le=86_400, description="Pad each inner step to this length, e.g. 200ms")
    leave_s: Span = expert(LEAVE_S, description="Time to flush unpublished training when the learner leaves")
    state_dir: Path | None = Field(
        None, description="Folder for this learner's moments, counters and random state (default: none)"
    )
    state_every: Span = expert(STATE_S, gt=0, description="Time between saves to --state-dir")
    recover: Literal["auto", "peer", "fresh"] = Field(
        "auto",
        description="Optimizer moments with which a learner joins a running run. auto: its own saved ones, otherwise a "
        "peer's, otherwise fresh ones; peer: do not use its own; fresh: use neither",
    )
    ramp_steps: int = expert(
        20, ge=0, le=10**9, description="Steps of learning-rate ramp after joining with fresh moments"
    )
    log_losses: bool = expert(False, description="Append each step's training loss to losses.jsonl in --state-dir")


class HttpSettings(Settings):
    """An HTTP side."""

    section = "HTTP server"

    http_host: str = expert(
        "127.0.0.1", description="Address the HTTP server binds to (page, /healthz, /readyz, /status, /metrics)"
    )
    http_token: SecretStr | None = Field(
        None, min_length=8, description="Token that the HTTP server requires (DILOCO_HTTP_TOKEN)"
    )
    http_port: int = Field(8080, ge=0, le=65535, description="Port of the HTTP server; 0: any free port")


class SyncerSettings(HttpSettings):
    """One syncer process."""

    section = "Syncer"

    syncer_id: PartyName | None = Field(None, description="Name of this syncer (default: random)")
    lease_s: Span = Field(LEASE_S, gt=0.1, le=MAX_LEASE_S, description="How long a lease lasts unless it is renewed")
    liveness_s: Span = expert(
        default_factory=_following(1, LEASE_S),
        gt=0,
        description="Merges do not wait for a learner that has been silent for this long (default: one lease, at "
        "least 5 s)",
    )
    drain_s: Span = expert(
        default_factory=_following(6, 30.0),
        description="Maximum time to gather the last deltas at the end of a run (default: six leases, at least 30 s)",
    )
    shutdown_s: Span = expert(
        default_factory=_following(4, 20.0),
        description="On shutdown, time allowed to commit and start a checkpoint, and again for each fragment saved "
        "(default: four leases, at least 20 s)",
    )
    checkpoint_dir: Address | None = Field(
        None, description="Folder or s3://bucket/path for checkpoints (default: none are saved)"
    )
    checkpoint_every: Span = Field(
        300.0, description="Time between checkpoints; the newest three are kept; 0: only at the end"
    )
    tape_dir: Path | None = Field(
        None, description="Folder for the event tape's archive; set it on all syncers, or on none"
    )
    record_deltas: Path | None = Field(
        None,
        description="Folder in which all merged deltas are kept, for `diloco tape --replay`. Large: each merge takes "
        "as many bytes as its learners uploaded",
    )
    resume: Address | None = Field(None, description="Checkpoint of another run to start from, or s3://bucket/path")
    overwrite: bool = Field(
        False, description="Start from scratch if Redis has no such run, ignoring its checkpoints in --checkpoint-dir"
    )


class EvaluatorSettings(Settings):
    """The evaluator process."""

    section = "Evaluator"

    eval_every: Span = expert(5.0, description="Minimum time between evaluations")
    eval_tokens: int = expert(16_384, ge=1, le=10**12, description="Tokens in the fixed validation slice")
    eval_device: str = expert(
        "cpu",
        pattern=DEVICE,
        description="Device for evaluation: auto, cpu, cuda, cuda:N, mps. Use cpu when learners share the machine",
    )


class SyncerProcess(BusSettings, SyncSettings, SyncerSettings):
    """`diloco syncer`."""


class LearnerProcess(BusSettings, SyncSettings, TrainerSettings, LearnerSettings):
    """`diloco learner`."""


class EvaluatorProcess(BusSettings, EvaluatorSettings):
    """`diloco evaluator`."""

    section = "Evaluator"

    threads: int = Field(1, ge=1, le=4096, description="Torch threads")
    data: str | None = Field(
        None, description="Text file or folder, or 'stdlib': the run's text (default: the location in the run's spec)"
    )
    model: str | None = Field(
        None,
        description="hf:FOLDER of the run's model, needed if its tokenizer reads the text (default: the spec's model)",
    )


class RankProcess(LearnerProcess, EvaluatorSettings):
    """One process of the data-parallel baseline."""


# Settings of all parties; the launcher has some of its own.
PARTIES = frozenset(
    name for kind in (SyncerProcess, LearnerProcess, EvaluatorProcess, RankProcess) for name in kind.model_fields
)


def is_expert(kind: type[Settings], name: str) -> bool:
    """Return whether a setting has no flag; it is set by its variable or in a settings file."""
    extra = kind.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(EXPERT))


def defaults(kind: type[Settings]) -> dict[str, Any]:
    """Return the default of each setting, without flags, variables or a file.

    Defaults that depend on other settings are computed from the defaults of these.
    """
    values: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        values[name] = info.get_default(call_default_factory=True, validated_data=values)
    return values


# Settings whose values are never shown.
SECRETS = frozenset({"redis_url", "redis_password", "http_token"})
# Secrets, which cannot be flags, since every user of a machine can read a process's arguments.
NO_FLAG = frozenset({"http_token", "redis_password"})


def flag_of(name: str) -> str:
    """Return a setting's flag."""
    return "--" + name.replace("_", "-")


def has_flag(kind: type[Settings], name: str) -> bool:
    """Return whether a setting has a flag: it is neither an expert setting nor secret."""
    return name in kind.model_fields and name not in NO_FLAG and not is_expert(kind, name)


def load(
    kind: type[S],
    flags: Mapping[str, Any] | None = None,
    config: Path | None = None,
    known: frozenset[str] = frozenset(),
    ignored: Collection[str] = (),
) -> S:
    """Load the settings of one party.

    flags: None means not given. known: further keys allowed in the file, of other parties. ignored: settings that
    neither variables nor the file give.

    Raises:
        UsageError: naming the field, the value and what is allowed.
    """
    fields = kind.model_fields
    table = read_file(config)
    names = known.union(fields)
    if unknown := sorted(table.keys() - names):
        where, hint = place_in(config, unknown[0]), meant(unknown[0], names)
        raise UsageError(f"{where}: unknown setting {unknown[0]!r}{hint}; known are {', '.join(sorted(names))}")
    flags = flags or {}
    file_token = _file_values.set({name: table[name] for name in fields if name in table and name not in ignored})
    ignored_token = _ignored.set(ignored)
    try:
        return kind(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        in_file = {name: place_in(config, name) for name in table.keys() - set(ignored)}
        raise UsageError("\n".join(_complaints(kind, error, flags, in_file))) from error
    finally:
        _file_values.reset(file_token)
        _ignored.reset(ignored_token)


def _complaints(
    kind: type[Settings], error: ValidationError, flags: Mapping[str, Any], in_file: Mapping[str, str]
) -> list[str]:
    """Describe what is wrong, one line per setting.

    flags: the command's flags and their values. in_file: name -> its place in the settings file.
    """
    lines = []
    before = {name for name, value in flags.items() if value is not None}
    before |= given_outside(in_file, None).keys() if kind.from_environment else set()
    for name, shown, wrong in _wrong(kind, error):
        ways = [flag_of(name)] if name in flags and has_flag(kind, name) else []
        ways += [f"{ENV_PREFIX}{name.upper()}"] if kind.from_environment else []
        where = f" in {in_file[name]}" if name in in_file and name not in before else ""
        ways.append("that file" if where else "the settings file")
        lines.append(f"{name}={shown}{where}: {wrong}; set it with {' or '.join(ways)}")
    return lines


def _wrong(kind: type[Settings], error: ValidationError) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each setting that is wrong, its value as text, and what is wrong with it."""
    for problem in error.errors():
        if problem["type"] == "default_factory_not_called":
            continue  # the setting that it would follow from is named next to it
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        hint = meant(name, kind.model_fields) if problem["type"] == "extra_forbidden" else ""
        shown = "***" if name in SECRETS else repr(problem["input"])
        yield name, shown, format_problem(problem, kind.model_fields.get(name)) + hint
