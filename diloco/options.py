"""Command-line options made from settings classes, so that a setting is described and checked in one place.

Options are plain text here: `pipeline.settings.load` validates them together with the environment and the
TOML file, so a bad value gets the same message wherever it came from.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BeforeValidator, Field, SecretStr
from typer.core import TyperCommand

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import Address
from diloco.pipeline.methods import METHODS, RunMethod
from diloco.pipeline.settings import (
    PARTIES,
    BusSettings,
    EvaluatorSettings,
    HttpSettings,
    LearnerSettings,
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
from diloco.pipeline.units import parse_count, parse_duration, parse_rate, parse_span, written
from diloco.pipeline.wrong_values import allowed
from diloco.workers.trainer.models.sizes import SIZES

S = TypeVar("S", bound=Settings)
R = TypeVar("R", bound="RunProcess")


class RedisSettings(Settings):
    """A Redis that is started here."""

    section = "Redis"

    redis_port: int | None = Field(
        None, ge=1, le=65535, description="Port on which the embedded Redis listens too, so that others can join"
    )
    redis_bind: str = Field(
        "127.0.0.1", description="Address for --redis-port; another one than this needs DILOCO_REDIS_PASSWORD"
    )
    redis_password: SecretStr | None = Field(None, description="Password of the embedded Redis")

    def secret(self) -> str | None:
        """The password, if there is one."""
        return None if self.redis_password is None else self.redis_password.get_secret_value()


def reached_at(settings: RedisSettings) -> str:
    """How others reach it, for people: its password is theirs to fill in."""
    users = isinstance(settings, RedisProcess) and settings.redis_users is not None
    secret = "USER:PASSWORD@" if users else "" if settings.redis_password is None else ":PASSWORD@"
    everywhere = settings.redis_bind in ("0.0.0.0", "::", "*")  # noqa: S104  # asked for, not listened on here
    where = "<this machine>" if everywhere else settings.redis_bind
    where = f"[{where}]" if ":" in where else where
    return f"redis://{secret}{where}:{settings.redis_port}"


class RedisProcess(RedisSettings):
    """`diloco redis`."""

    redis_port: int = Field(6379, ge=1, le=65535, description="Port on which it listens")
    redis_users: Path | None = Field(
        None, description="File of its users, made by `diloco acl`, in place of a password"
    )


class WatchProcess(BusSettings, HttpSettings):
    """`diloco watch`."""

    http_port: int = Field(0, ge=0, le=65535, description="Port of the page; 0 takes a free one")


class RunSettings(Settings):
    """The one-machine launcher."""

    section = "This run"

    learners: int = Field(4, ge=1, le=256, description="Number of learner processes")
    devices: str = Field(
        "auto",
        description="Where learners train, in turn: cuda:0,cuda:1 ..., all (GPUs, divided among the learners), cpu or "
        "mps; 0+1,2+3: a learner on each set, with a rank on each device; auto: a GPU for each, or else what it finds",
    )
    syncers: int = Field(1, ge=1, le=64, description="Number of syncer processes; they share the fragments")
    out: Path | None = Field(
        None, description="Output folder; a run that was stopped or killed goes on in its own (default: runs/<time>)"
    )
    json_report: Path | None = Field(None, description="Also write the report to this file")
    prompt: str = expert("def ", description="Start of the text that the trained model writes at the end")


class DemoSettings(Settings):
    """What `diloco demo` does to its run."""

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
    """`diloco run`: the launcher's own settings and those that it hands on to its processes."""

    method: RunMethod = Field(  # type: ignore[assignment]  # one more, that has no syncer
        "decoupled", description="What other settings are where they are not given (docs/reference/methods.md)"
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis to use instead of an embedded one. Secrets belong in DILOCO_REDIS_URL"
    )
    threads: int | None = Field(
        None, ge=1, le=4096, description="Torch threads of each learner, or rank (default: cores // their number)"
    )
    http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the syncer's HTTP side, of several syncers the first one's; 0 takes free ones",
    )
    record_deltas: Path | None = Field(
        None,
        description="New folder in which all merged deltas are kept, for `diloco tape --replay`; a bare name is one in "
        "the output folder. Large: for each merge as many bytes as its learners uploaded",
    )
    resume: Address | None = Field(
        None, description="Output folder or checkpoint of an earlier run to go on from, or s3://bucket/path"
    )
    overwrite: bool = Field(False, description="Begin anew: empty an output folder that is in use")


class DemoProcess(RunProcess, DemoSettings):
    """`diloco demo`: a run of its own, and what is done to it."""


OF_DEMO = dict.fromkeys(DemoSettings.model_fields, "it is of `diloco demo`, which kills a learner: leave it out here")
"""Settings that are no other command's, and what is said of one that is given there."""
OF_ONE_LEARNER = {
    "device": "it is of one learner; where all of a run train is said by --devices cuda:0,cuda:1 ...",
    "redis_users": "it is of `diloco redis`: start one by that, and name it by --redis-url",
}
"""Settings that belong to one of a run's processes, and how the run is told of it."""

CHOSEN_BY_LAUNCHER = frozenset({"learner_id", "state_dir", "syncer_id", "checkpoint_dir", "tape_dir"})
"""Fields of `RunProcess` that nobody gives: the launcher sets them for each process."""

ALL_FIELDS = PARTIES | frozenset({**DemoProcess.model_fields, **RedisProcess.model_fields})
"""What a settings file may hold: it can serve all parties of a run."""


def with_preset(settings: R) -> R:
    """Settings with those of the method where nothing else was asked for."""
    size = SIZES.get(settings.model)
    return settings.with_method(settings.learners, None if size is None else size.tensors)


def method_notes(settings: RunProcess) -> list[str]:
    """What is said of the method at the start; `settings` with those that it means."""
    method, notes = METHODS[settings.method], []
    wanted = method.settings.get("fragments")
    if method.unpublished:
        notes.append(f"method {settings.method}: not published: {method.unpublished}")
    if wanted is not None and settings.fragments != wanted:
        notes.append(f"method {settings.method}: P = {settings.fragments} instead of {wanted} (model {settings.model})")
    return notes


NOT_OF_BASELINE = (
    *("redis_url", "redis_ca", "redis_cert", "redis_key", "redis_port", "redis_bind", "syncers"),
    *(name for name in SyncSettings.model_fields if name not in ("tokens", "method")),
    *("recover", "ramp_steps", "leave_s", "log_losses", "state_every", "encode_on"),
    *("lease_s", "liveness_s", "drain_s", "shutdown_s", "http_host", "http_port", "checkpoint_every", "record_deltas"),
    "eval_device",
)
"""Fields of `RunProcess` that mean nothing without a Redis and a syncer."""


def unused_by_baseline(settings: RunProcess) -> list[str]:
    """How those were set that were given, are not as usual, and mean nothing to the data-parallel baseline."""
    kind = type(settings)
    usual, told = defaults(kind), settings.model_fields_set
    strange = [name for name in NOT_OF_BASELINE if name in told and getattr(settings, name) != usual[name]]
    return [way_to_set(kind, name) for name in strange]


def _section(kind: type[Settings], name: str) -> str:
    """Heading under which a field is listed: that of the class which brought it in."""
    bases = (base for base in reversed(kind.__mro__) if issubclass(base, Settings))
    return next(base.section for base in bases if name in vars(base).get("__annotations__", {}))


def way_to_set(kind: type[Settings], name: str) -> str:
    """How a setting is set: its flag, or the variable and the key of one that has none."""
    return flag_of(name) if has_flag(kind, name) else f"{ENV_PREFIX}{name.upper()}, or {name} in a file for --config"


def as_written(kind: type[Settings], name: str) -> Any:
    """A field's default as people write it."""
    info = kind.model_fields[name]
    read = {rule.func for rule in info.metadata if isinstance(rule, BeforeValidator)}
    if not read & {parse_count, parse_rate}:
        return info.default
    rate = written(info.default, "TGMk") + "bps"
    return rate if parse_rate in read else written(info.default)


def help_of(kind: type[Settings], name: str) -> str:
    """Description, default and allowed values of a field."""
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
    if read & {parse_duration, parse_span}:
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
    """A command made by `takes`: it knows the settings that are no flags of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The flag of a setting that is none says where it is set, before it is taken for an unknown one.

        Raises:
            UsageError: there is one.
        """
        elsewhere: Mapping[str, str] = getattr(self.callback, "elsewhere", {})
        for given in args:
            flag = given.split("=")[0]
            if given == "--":
                break
            if flag in elsewhere:
                raise UsageError(f"{flag} is no flag: {elsewhere[flag]}")
        return super().parse_args(ctx, args)


SAID_ANYWHERE = {"device": "auto"}
"""Of settings of other commands: what is so anyway, and may be said."""


def takes(
    kind: type[S], omit: frozenset[str] = frozenset(), moved: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of `function(settings, ...)`: one option per field of `kind`, and --config.

    Expert settings and secrets are no options: they come from variables and the file. The function's further
    parameters keep their own typer declarations. The command is a `SettingsCommand`'s.

    Args:
        kind: the settings.
        omit: fields that are the command's own business: given by a variable or the file, they are ignored, with a
            warning.
        moved: settings of other commands that this one refuses, with what to do instead.
    """
    moved = moved or {}
    shown = [name for name in kind.model_fields if name not in omit and name not in moved and has_flag(kind, name)]
    unseen = [name for name in kind.model_fields if name not in omit and name not in shown]
    elsewhere = {flag_of(name): f"set it by {way_to_set(kind, name)}" for name in unseen}
    elsewhere |= {f"--no-{flag_of(name)[2:]}": elsewhere[flag_of(name)] for name in unseen if _is_switch(kind, name)}
    elsewhere |= {flag_of(name): instead for name, instead in moved.items()}
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            None, "--config", help="TOML file with settings: names as of the flags with _ for -, and expert settings"
        ),
        annotation=Path | None,
    )

    def settle(flags: Mapping[str, Any], file: Path | None) -> S:
        """The settings, of all sources."""
        known = ALL_FIELDS | kind.model_fields.keys()
        warnings = check_variables(known) if kind.from_environment else []
        outside = given_outside({*omit, *moved}, file) if kind.from_environment else {}
        for name, given in outside.items():
            if name in omit:
                warnings.append(f"{given.where} is ignored: this command chooses it, or has no use for it")
            elif given.value != SAID_ANYWHERE.get(name):
                raise UsageError(f"{given.where}: {moved[name]}")
        for warning in warnings:
            sys.stderr.write(f"warning: {warning}\n")
        return load(kind, flags, file, known=known, ignored=omit)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        others = list(inspect.signature(function).parameters.values())[1:]

        def command(*args: Any, **given: Any) -> None:
            flags = {name: given.pop(name) for name in shown}
            function(settle(flags, given.pop("config")), *args, **given)

        parameters = [*others, *(_option(kind, name) for name in shown), config]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.kind, command.elsewhere, command.cls = kind, elsewhere, SettingsCommand  # type: ignore[attr-defined]
        return command

    return decorate
