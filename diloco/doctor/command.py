"""`diloco doctor`: look at this machine and its Redis, and say what is wrong before a run fails because of it."""

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from diloco.doctor import checks, measure
from diloco.doctor.facts import Folder, Link, Machine, Run
from diloco.doctor.start import checkpoints_bytes, look_at_folders
from diloco.launcher.display import say
from diloco.options import AsJson, RunSettings, takes
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis.inspection import address_of, examine, takes_without_certificate, unhealthy_sentinels
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import BusError, DilocoError, PeerError, UsageError
from diloco.pipeline.files.address import Address
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.findings import Finding, error, ok, warning
from diloco.pipeline.messages.wire import MAX_MEMBERS, PartyName
from diloco.pipeline.redis_memory import MOMENTS, VALUE_BYTES
from diloco.pipeline.settings import BusSettings, Settings, SyncSettings, defaults
from diloco.pipeline.site import MAX_PARAMS, MIN_PARAMS
from diloco.pipeline.units import Amount, Span, counted
from diloco.pipeline.wrong_values import format_problem
from diloco.syncer.times import TIMES
from diloco.workers.trainer.models.sizes import SIZES, size_table

# Time limit for all that is asked of Redis, so that the doctor ends even if a server answers slowly or never.
MAX_S = 120.0
LEARNERS: int = defaults(RunSettings)["learners"]
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


class MachineSettings(Settings):
    """Settings with which parties on this machine would be started, as far as the checks use them."""

    section = "This machine"

    learner_id: PartyName | None = Field(None, description="Name of the learner on this machine")
    threads: int | None = Field(None, ge=1, le=4096, description="Torch threads of a learner on this machine")
    model: str | None = Field(None, description="Size of the built-in model, instead of --params")
    checkpoint_dir: Address | None = Field(None, description="Folder of a syncer's checkpoints")
    tape_dir: Path | None = Field(None, description="Folder of a syncer's tape")
    state_dir: Path | None = Field(None, description="Folder of a learner's own state")


class DoctorSettings(MachineSettings, BusSettings, SyncSettings):
    """`diloco doctor`."""


Party = Literal["all", "learner", "syncer"]
Checked = tuple[Run | None, Link | None, str]  # the run, the network to its Redis, and the run's name


class Report:
    """Collects findings, and shows each at once."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self.findings: list[Finding] = []
        self._tell = tell

    def add(self, *findings: Finding) -> None:
        """Add findings and show them."""
        for finding in findings:
            self.findings.append(finding)
            self._tell(finding)

    @property
    def status(self) -> int:
        """Exit status of the process: 1 if any finding is an error."""
        return int(any(finding.level == "error" for finding in self.findings))


REACH = "start it, or set a different one with --redis-url or DILOCO_REDIS_URL; its port must be open to this machine"


def _refused(failure: DilocoError) -> Finding:
    return error("Redis", failure.problem.removeprefix("Redis "), failure.remedy or REACH)


async def run_checks(
    settings: DoctorSettings,
    report: Report,
    run: Run | None,
    step_s: float | None,
    party: Party,
    checkpoints: bool = False,
) -> Checked:
    """Check all that needs the server, and report it.

    Args:
        settings: name the Redis and the run.
        report: takes the findings.
        run: the planned run, if one was described.
        step_s: time of an inner step; None: as the run's learners report it.
        party: the party that this machine will be.
        checkpoints: True if a syncer here has a place for checkpoints.

    Returns:
        The run that is on the Redis, otherwise the planned one; the network; the run's name.
    """
    url = settings.bus_url()
    if url is None:
        return run, None, settings.run
    address = await asyncio.to_thread(address_of, url)  # resolving a host name may take seconds
    line, memory = None, list[Finding]()
    try:
        examination = await examine(url)
    except (UsageError, BusError) as failure:
        report.add(_refused(failure), *checks.sentinels(await unhealthy_sentinels(url)))
        return run, None, settings.run
    try:
        if address.certificate:
            strict = not await takes_without_certificate(url)
            address = address._replace(certificate="asked for" if strict else "shown")
            if not address.password:
                address = address._replace(user=await examination.user())
        name = settings.learner_id or _learner_of(address.user)
        if address.user and "run" not in settings.model_fields_set and (its := await examination.run_of(address.user)):
            report.add(ok("run", f"user {address.user} has rights only in run {its}, so that run is checked"))
            settings = settings.model_copy(update={"run": its})
        async with open_bus(url, settings.run) as bus:
            nodes = await examination.nodes()
            report.add(*map(_refused, examination.away))
            report.add(*checks.server(nodes), *checks.sentinels(await unhealthy_sentinels(url)))
            report.add(*checks.transport(address, nodes))
            lacks = await examination.lacks(bus.keys, name)
            as_party, named = None if party == "all" else party, "run" in settings.model_fields_set
            report.add(checks.rights(address, lacks, settings.run, settings.learner_id, as_party, named))
            run = await _there(bus, report, run, step_s)
            report.add(*checks.persistence(nodes, checkpoints or (run is not None and run.saves)))
            writes = not (lacks["learner"] and lacks["syncer"])
            memory += checks.fills(nodes, run)
            line, ahead_s = await measure.look_at_line(bus, examination, nodes, writes)
            memory += [*checks.link(line), *([] if run is None else [checks.memory(nodes, run)])]
            report.add(checks.clock(ahead_s, TIMES.abandoned_s))
    except (UsageError, BusError) as failure:
        report.add(_refused(failure))
    finally:
        report.add(*checks.one_maxmemory(memory))
        await examination.close()
    return run, line, settings.run


def _learner_of(user: str) -> str:
    """Return the learner's name in the name of a user `learner-NAME`, otherwise an unused name."""
    party, _, learner = user.partition("-")
    return learner if party == "learner" and learner else f"doctor-{secrets.token_hex(2)}"


async def _there(bus: Bus, report: Report, planned: Run | None, step_s: float | None) -> Run | None:
    """Return the run of this name if it is on the bus, otherwise the planned one."""
    try:
        found = await measure.read_run(bus, step_s)
    except UsageError:  # this user has no right to read it, which checks.rights has reported
        return planned
    except PeerError as failure:
        remedy = failure.remedy or "use the release with which the run was started"
        report.add(error("run", failure.problem, remedy))
        return planned
    if found is not None and planned is not None:
        why = f"{found.name} is in progress there, so it is checked, and --params, --model and --learners are ignored"
        report.add(warning("run", why, "to check a planned run instead, pass its name with --run"))
    return found or planned


def of_machine(
    settings: DoctorSettings, machine: Machine, folders: Iterable[Folder], run: Run | None, party: Party
) -> Iterator[Finding]:
    """Yield the findings that need no server."""
    yield from checks.software(machine, party)
    if party != "syncer":
        yield checks.threads(machine.cores, machine.processes, machine.threads, machine.threads_from)
    if party != "learner":
        yield checks.blas(
            machine.cores, machine.blas_threads, settings.fragments if run is None else run.sync.fragments
        )
    params = 0.0 if run is None else run.params
    for folder in folders:
        needed = 0.0
        if folder.setting == "checkpoint-dir" and math.isfinite(folder.free_bytes):
            needed = checkpoints_bytes(params, measure.saved_bytes(folder.path, run.folder if run else ""))
        elif folder.setting == "state-dir":
            needed = 2 * MOMENTS * VALUE_BYTES * params  # the saved state is kept until the next one is complete
        yield checks.folder(folder, needed)


def of_run(run: Run, machine: Machine, line: Link | None, party: Party) -> Iterator[Finding]:
    """Yield the findings on what the run needs from the machine and the network."""
    site = checks.site_of(run, machine, line)
    if run.finished:
        yield checks.finished(run.name)
    elif run.live is not None:
        yield checks.quorum(run.live, run.sync.quorum)
    yield checks.plan(run, site)
    yield from checks.machine_memory(run, machine, party)
    if run.step_s is None:
        return
    if line is not None and line.up_bytes_per_s is not None and party != "syncer":
        yield checks.load(run, site)
    if party != "learner":
        yield checks.merges(run, site, machine)
        if run.merge_s:
            yield checks.merges_of_run(run, site, machine)


def _number(kind: Any, flag: str, given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return float(TypeAdapter(kind).validate_python(given))
    except ValidationError as failure:
        raise UsageError(
            f"{flag} {given}: {format_problem(failure.errors()[0], FieldInfo.from_annotation(kind))}"
        ) from None


def _params(settings: DoctorSettings, params: float | None) -> float | None:
    if params is not None and not MIN_PARAMS <= params <= MAX_PARAMS:
        raise UsageError(f"--params {params:g}: use a number from {MIN_PARAMS:g} to {MAX_PARAMS:g}")
    if params is not None and settings.model is not None:
        raise UsageError(f"--params {params:g} and --model {settings.model}: leave out one of them")
    if params is not None or settings.model is None:
        return params
    if settings.model not in SIZES:
        raise UsageError(f"--model {settings.model}: unknown; pass --params instead, or one of {size_table()}")
    return float(SIZES[settings.model].parameters())


@takes(DoctorSettings)
def command(
    settings: DoctorSettings,
    params: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Parameters of the model, e.g. 1B, if the run does not exist yet"),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time of an inner step (default: as reported by the run's learners)"),
    ] = None,
    learners: Annotated[int, typer.Option(min=1, max=MAX_MEMBERS, help="Learners of the planned run")] = LEARNERS,
    here: Annotated[int, typer.Option(min=1, max=4096, help="Learners that train on this machine's CPU")] = 1,
    party: Annotated[
        Party, typer.Option("--as", metavar="all|learner|syncer", help="Planned role of this machine")
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Check this machine and its Redis before a run, and say what is wrong and what to do about it.

    The exit status is 1 if an error was found, and 0 if there are at most warnings. It takes seconds and changes
    nothing: what it writes to Redis and to folders as a test is deleted at once.

    Example: diloco doctor --redis-url redis://HOST:6379 --params 1B --step-time 3s --learners 8
    """
    step_s = _number(Span, "--step-time", step_time) or None
    planned = _params(settings, _number(Amount, "--params", params))
    console = Console(stderr=as_json)
    report = Report((lambda finding: None) if as_json else (lambda finding: show(console, finding)))
    run = None
    if planned is not None:
        run = measure.planned_run(settings.run, settings.with_method(learners).sync_spec(), planned, learners, step_s)
    with console.status("checking this machine") as status:
        machine = measure.look_at_machine(here, settings.threads)
        status.update("checking folders and stores")
        folders = list(look_at_folders(settings, ("checkpoint_dir", "tape_dir", "state_dir")))
        kept = any(folder.setting == "checkpoint-dir" and not folder.problem for folder in folders)
        status.update("checking Redis")
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            checking = run_checks(settings, report, run, step_s, party, kept)
            run, line, name = runner.run(_in_time(checking, report, (run, None, settings.run)))
    report.add(*of_machine(settings, machine, folders, run, party))
    if settings.redis_url is None:
        report.add(ok("Redis", "not checked: pass --redis-url or set DILOCO_REDIS_URL to check it too"))
    if run is not None:
        report.add(*of_run(run, machine, line, party))
    elif not any(
        one.about == "run" and one.level == "error" for one in report.findings
    ):  # in that case there is a run that cannot be read
        seen = f"there is no run {name!r}" if line is not None else "no run is known"
        report.add(ok("run", f"{seen}, and neither --params nor --model was given, so no planned run is checked"))
    if as_json:
        typer.echo(dumps([finding._asdict() for finding in report.findings]))
    else:
        console.print(closing(report.findings))
    raise typer.Exit(report.status)


async def _in_time(checking: Coroutine[Any, Any, Checked], report: Report, otherwise: Checked) -> Checked:
    try:
        async with asyncio.timeout(MAX_S):
            return await checking
    except TimeoutError:
        remedy = "check the network between this machine and Redis"
        report.add(error("Redis", f"it did not answer all requests within {MAX_S:g} s", remedy))
        return otherwise


def show(console: Console, finding: Finding) -> None:
    """Print a line with the finding, and another with the remedy."""
    line = Text.assemble((f"{finding.level:8}", COLOURS[finding.level]), f"{finding.about}: {finding.found}")
    say(line, console)
    if finding.remedy:
        say(Text(f"{'':8}-> {finding.remedy}"), console)


def closing(findings: list[Finding]) -> str:
    """Return the closing line: how many findings of each level there are."""
    count = {level: sum(finding.level == level for finding in findings) for level in COLOURS}
    if not count["error"] and not count["warning"]:
        return f"all {count['ok']} findings are ok"
    words = [counted(n, level) for level, n in count.items() if n and level != "ok"]
    return f"{' and '.join(words)}, {count['ok']} ok"
