"""Command-line options made from settings classes, so that a setting is described and checked in one place.

Options stay plain text here: `pipeline.settings.load` validates them together with the environment and the TOML file,
so that a bad value gets the same message wherever it came from.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator, Field, SecretStr
from typer.core import TyperCommand

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import Address
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.methods import METHODS, RunMethod
from diloco.pipeline.process import logs
from diloco.pipeline.settings import (
    PARTIES,
    BusSettings,
    EvaluatorSettings,
    HttpSettings,
    LearnerSettings,
    LogSettings,
    ServerSettings,
    Settings,
    SyncerSettings,
    SyncSettings,
    TrainerSettings,
    defaults,
    expert,
    flag_of,
    has_flag,
    load,
)
from diloco.pipeline.sources import ENV_PREFIX, check_variables, given_outside
from diloco.pipeline.units import parse_count, parse_rate, parse_span, written
from diloco.pipeline.wrong_values import allowed
from diloco.workers.trainer.models.sizes import SIZES

S = TypeVar("S", bound=Settings)
R = TypeVar("R", bound="RunProcess")

RunFolder = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Output folder of `diloco run` (default: the newest in runs/)")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text")]
Price = Annotated[
    float | None,
    typer.Option(metavar="AMOUNT", min=0, max=1e9, help="Price of a learner's hour: show what run and failures cost"),
]


class RedisSettings(Settings):
    """Settings of a Redis that this command starts."""

    section = "Redis"

    redis_port: int | None = Field(
        None, ge=1, le=65535, description="Port for the embedded Redis, so that others can join"
    )
    redis_bind: str = Field(
        "127.0.0.1", description="Address for --redis-port; any but the default needs DILOCO_REDIS_PASSWORD"
    )
    redis_password: SecretStr | None = Field(None, description="Password of the embedded Redis")

    def secret(self) -> str | None:
        """Return the password, or None if there is none."""
        return None if self.redis_password is None else self.redis_password.get_secret_value()


def reached_at(settings: RedisSettings) -> str:
    """Return the URL at which other machines reach this Redis, for display: a placeholder stands for its password."""
    users = isinstance(settings, RedisProcess) and settings.redis_users is not None
    secret = "USER:PASSWORD@" if users else "" if settings.redis_password is None else ":PASSWORD@"
    everywhere = settings.redis_bind in ("0.0.0.0", "::", "*")  # noqa: S104  # asked for, not listened on here
    where = "<this machine>" if everywhere else settings.redis_bind
    where = f"[{where}]" if ":" in where else where
    return f"redis://{secret}{where}:{settings.redis_port}"


class RedisProcess(RedisSettings):
    """`diloco redis`."""

    redis_port: int = Field(6379, ge=1, le=65535, description="Port to listen on")
    redis_users: Path | None = Field(
        None, description="ACL file with its users, written by `diloco acl`, instead of a password"
    )


class ViewSettings(BusSettings):
    """Redis server and run of a command that only reads."""

    run: PartyName = Field(
        default_factory=lambda: "run", description="Name of the run on that Redis (default: the only one there)"
    )


class WatchProcess(ViewSettings, HttpSettings):
    """`diloco watch`."""

    http_port: int = Field(0, ge=0, le=65535, description="Port of the page; 0: any free port")


class RunSettings(Settings):
    """Settings of the one-machine launcher."""

    section = "This run"

    learners: int = Field(4, ge=1, le=256, description="Number of learner processes")
    devices: str = Field(
        "auto",
        description="Devices of the learners, assigned in turn: cuda:0,cuda:1 ..., all (GPUs, divided among the "
        "learners), cpu or mps; 0+1,2+3: one learner per set, one rank per device; auto: one GPU per learner if "
        "there are enough, otherwise whatever is available",
    )
    syncers: int = Field(1, ge=1, le=64, description="Number of syncer processes; they share the fragments")
    out: Path | None = Field(
        None, description="Output folder; give that of a stopped or killed run to continue it (default: runs/<time>)"
    )
    json_report: Path | None = Field(None, description="Also write the report to this file")
    prompt: str = expert("def ", description="Start of the text that the trained model generates at the end")


class DemoSettings(Settings):
    """Settings of what `diloco demo` does to its run."""

    section = "The demonstration"

    kill_learner: int = Field(1, ge=0, le=255, description="Learner that is killed with SIGKILL (0, 1 ...)")
    kill_at: float = Field(0.4, ge=0, lt=1, description="Share of the budget at which it is killed")
    restart_at: float = Field(0.6, ge=0, lt=1, description="Share of the budget at which it is started again")


class RunProcess(
    BusSettings,
    RedisSettings,
    SyncSettings,
    TrainerSettings,
    LearnerSettings,
    SyncerSettings,
    EvaluatorSettings,
    RunSettings,
):
    """`diloco run`: the launcher's own settings and those that it passes on to its processes."""

    method: RunMethod = Field(  # type: ignore[assignment]  # it has one more value: the baseline without a syncer
        "decoupled", description="Preset for settings that are not given (docs/reference/methods.md)"
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis to use instead of an embedded one. Set DILOCO_REDIS_URL instead if it has a password"
    )
    threads: int | None = Field(
        None, ge=1, le=4096, description="Torch threads of each learner or rank (default: cores // their number)"
    )
    http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the syncer's HTTP server (with several syncers, of the first); 0: any free ports",
    )
    record_deltas: Path | None = Field(
        None,
        description="New folder in which all merged deltas are kept, for `diloco tape --replay`; a bare name is "
        "created in the output folder. Large: each merge takes as many bytes as its learners uploaded",
    )
    resume: Address | None = Field(
        None, description="Output folder or checkpoint of an earlier run to continue from, or s3://bucket/path"
    )
    overwrite: bool = Field(False, description="Start from scratch: empty an output folder that is in use")


class DemoProcess(RunProcess, DemoSettings):
    """`diloco demo`: the settings of a run, and of the kill that is demonstrated in it."""


# Settings that only `diloco demo` has, each with the message for other commands that are given it.
OF_DEMO = dict.fromkeys(
    DemoSettings.model_fields, "it is only for `diloco demo`, which kills a learner: leave it out here"
)
# Settings that only one of a run's processes has, each with the message for a run that is given it.
OF_ONE_LEARNER = {
    "device": "it is for a single learner; set the devices of a run with --devices cuda:0,cuda:1 ...",
    "redis_users": "it is for `diloco redis`: start a Redis with it, and pass its address with --redis-url",
}

# Fields of `RunProcess` that users cannot give: the launcher sets them for each process.
CHOSEN_BY_LAUNCHER = frozenset({"learner_id", "state_dir", "syncer_id", "checkpoint_dir", "tape_dir"})

# Fields that a settings file may hold: those of all commands, since one file can serve all parties of a run.
ALL_FIELDS = PARTIES | frozenset({**DemoProcess.model_fields, **RedisProcess.model_fields})


def with_preset(settings: R) -> R:
    """Return the settings, with the values of the method's preset for all that were not given."""
    size = SIZES.get(settings.model)
    return settings.with_method(settings.learners, None if size is None else size.tensors)


def method_notes(settings: RunProcess) -> list[str]:
    """Return the notes on the method that are shown at the start; `settings` must have its preset applied."""
    method, notes = METHODS[settings.method], []
    wanted = method.settings.get("fragments")
    if method.unpublished:
        notes.append(f"method {settings.method}: not published: {method.unpublished}")
    if wanted is not None and settings.fragments != wanted:
        notes.append(f"method {settings.method}: P = {settings.fragments} instead of {wanted} (model {settings.model})")
    return notes


# Fields of `RunProcess` that mean nothing without a Redis and a syncer.
NOT_OF_BASELINE = (
    *("redis_url", "redis_ca", "redis_cert", "redis_key", "redis_port", "redis_bind", "syncers"),
    *(name for name in SyncSettings.model_fields if name not in ("tokens", "method")),
    *("recover", "ramp_steps", "leave_s", "log_losses", "state_every", "encode_on"),
    *("lease_s", "liveness_s", "drain_s", "shutdown_s", "http_host", "http_port", "checkpoint_every", "record_deltas"),
    "eval_device",
)


def unused_by_baseline(settings: RunProcess) -> list[str]:
    """Return how to set each field that was given, is not its default, and has no use in the data-parallel baseline."""
    kind = type(settings)
    usual, told = defaults(kind), settings.model_fields_set
    strange = [name for name in NOT_OF_BASELINE if name in told and getattr(settings, name) != usual[name]]
    return [how_to_set(kind, name) for name in strange]


def _section(kind: type[Settings], name: str) -> str:
    """Return the heading under which a field is listed: the section of the class that declares it."""
    bases = (base for base in reversed(kind.__mro__) if issubclass(base, Settings))
    return next(base.section for base in bases if name in vars(base).get("__annotations__", {}))


def how_to_set(kind: type[Settings], name: str) -> str:
    """Return how a setting is set: its flag, or its variable and its key in a settings file if it has no flag."""
    return flag_of(name) if has_flag(kind, name) else f"{ENV_PREFIX}{name.upper()}, or {name} in a file for --config"


def as_written(kind: type[Settings], name: str) -> Any:
    """Return a field's default in the notation in which people give it."""
    info = kind.model_fields[name]
    read = {rule.func for rule in info.metadata if isinstance(rule, BeforeValidator)}
    if not read & {parse_count, parse_rate}:
        return info.default
    rate = written(info.default, "TGMk") + "bps"
    return rate if parse_rate in read else written(info.default)


def help_of(kind: type[Settings], name: str) -> str:
    """Return the help text of a field: description, default and allowed values."""
    info = kind.model_fields[name]
    default = repr(info.default) if str(info.default) != str(info.default).strip() else as_written(kind, name)
    known = default is not None and info.default_factory is None
    notes = [f"default {default}"] if known and info.annotation is not bool else []
    rule = allowed(info)
    notes += [rule] if rule and get_origin(info.annotation) is not Literal else []
    return f"{info.description} ({'; '.join(notes)})" if notes else str(info.description)


def _metavar(kind: type[Settings], name: str) -> str:
    info = kind.model_fields[name]
    annotation = info.annotation
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    read = {rule.func for rule in info.metadata if isinstance(rule, BeforeValidator)}
    if parse_span in read:
        return "DURATION"
    if parse_rate in read:
        return "RATE"
    given = next((part for part in get_args(annotation) if part is not type(None)), annotation)
    return "NUMBER" if given in (int, float) else "PATH" if given is Path else "TEXT"


def _is_switch(kind: type[Settings], name: str) -> bool:
    return kind.model_fields[name].annotation is bool


def _option(kind: type[Settings], name: str) -> inspect.Parameter:
    is_switch, flag = _is_switch(kind, name), flag_of(name)
    option = typer.Option(
        None,
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        help=help_of(kind, name),
        metavar=None if is_switch else _metavar(kind, name),
        show_default=False,
        rich_help_panel=_section(kind, name),
    )
    annotation = (bool if is_switch else str) | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


class SettingsCommand(TyperCommand):
    """A command made by `takes`: its help lists options by section, and it knows the settings that have no flag."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of arguments and options, those of each section under its heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(row)
        for heading, rows in sorted(sections.items(), key=lambda one: one[0] == LogSettings.section):
            with formatter.section(heading):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse the flag of a setting that has no flag here with how to set it, before typer calls it unknown.

        Raises:
            UsageError: there is such a flag.
        """
        elsewhere: Mapping[str, str] = getattr(self.callback, "elsewhere", {})
        for given in args:
            flag = given.split("=")[0]
            if given == "--":
                break
            if flag in elsewhere:
                raise UsageError(f"this command does not have {flag}: {elsewhere[flag]}")
        return super().parse_args(ctx, args)


# Values of other commands' settings that change nothing, so that a variable or a shared file may give them anywhere.
SAID_ANYWHERE = {"device": "auto"}


def takes(
    kind: type[S], omit: frozenset[str] = frozenset(), moved: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of `function(settings, ...)`: one option per field of `kind`, and --config.

    Expert settings and secrets have no options: they come from variables and the file. The function's further
    parameters keep their own typer declarations. The command is made as a `SettingsCommand`. It sets up logging, if
    `kind` has a log level.

    Args:
        kind: class of the settings.
        omit: fields that the command sets itself: if a variable or the file gives one, it is ignored with a warning.
        moved: settings of other commands that this one refuses, each with what to do instead.
    """
    moved = moved or {}
    shown = [name for name in kind.model_fields if name not in omit and name not in moved and has_flag(kind, name)]
    unseen = [name for name in kind.model_fields if name not in omit and name not in shown]
    elsewhere = {flag_of(name): f"set it by {how_to_set(kind, name)}" for name in unseen}
    elsewhere |= {f"--no-{flag_of(name)[2:]}": elsewhere[flag_of(name)] for name in unseen if _is_switch(kind, name)}
    elsewhere |= {flag_of(name): instead for name, instead in moved.items()}
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            None,
            "--config",
            metavar="FILE",
            help="TOML file with settings, including expert ones: named like the flags, with _ for -",
        ),
        annotation=Path | None,
    )

    def settle(flags: Mapping[str, Any], file: Path | None) -> S:
        """Return the settings from all sources: flags, environment and file."""
        known = ALL_FIELDS | kind.model_fields.keys()
        warnings = check_variables(known) if kind.from_environment else []
        outside = given_outside({*omit, *moved}, file) if kind.from_environment else {}
        for name, given in outside.items():
            if name in omit:
                warnings.append(f"{given.where} is ignored: this command sets it itself or does not use it")
            elif given.value != SAID_ANYWHERE.get(name):
                raise UsageError(f"{given.where}: {moved[name]}")
        for warning in warnings:
            sys.stderr.write(f"warning: {warning}\n")
        return load(kind, flags, file, known=known, ignored=omit)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        others = list(inspect.signature(function).parameters.values())[1:]

        def command(*args: Any, **given: Any) -> None:
            flags = {name: given.pop(name) for name in shown}
            settings = settle(flags, given.pop("config"))
            if isinstance(settings, ServerSettings):
                logs.configure(settings.log_level)
            function(settings, *args, **given)

        parameters = [*others, *(_option(kind, name) for name in shown), config]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.kind, command.elsewhere, command.cls = kind, elsewhere, SettingsCommand  # type: ignore[attr-defined]
        return command

    return decorate
