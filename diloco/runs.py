"""`diloco runs` and `diloco finish`: list, finish, extend and delete the runs of a Redis."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from pydantic import Field, TypeAdapter, ValidationError
from rich.console import Console

from diloco.cli import CommandGroup, new_app
from diloco.launcher.display import Fitting
from diloco.launcher.locate import locate, no_redis
from diloco.options import AsJson, takes
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis.run_list import Taken, connect_runs
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BadMessage, BusFull, BusUnavailable, DilocoError, UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_TOKENS
from diloco.pipeline.payload.codec import decode, encode
from diloco.pipeline.process import signals
from diloco.pipeline.settings import BusSettings, ServerSettings
from diloco.pipeline.units import as_bytes, count, counted, duration, parse_count
from diloco.pipeline.view.status import Status, present
from diloco.pipeline.view.status_reader import read_status
from diloco.pipeline.view.trouble import AWAITED
from diloco.pipeline.waiting import first_of
from diloco.workers.exchange.redis_access import read_run

LOOK_S = 1.0
UNREADABLE = "unreadable"
NOT_PERMITTED = "not permitted"


class RunRow(TypedDict):
    """A run in the list."""

    run: str
    phase: str
    """A value of `Phase`; "waiting": the reason says for what; "unreadable": damaged, or of another wire format; "not
    permitted": this user may not read it."""
    reason: str
    """Reason of the phase; for an unreadable run, what is wrong and what to do."""
    tokens: int
    budget_tokens: int
    age_s: float | None
    """Time since the run began; None if it has not."""
    quiet_s: float | None
    """Time since the last report of any learner; None if there was none."""
    learners: int
    """Number of live learners."""
    syncers: int
    """Number of syncers that are present."""
    keys: int
    bytes: int
    """Memory that the run's keys take in Redis."""


class _ListByDefault(CommandGroup):
    """A group whose command `list` is the default."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = new_app(
    cls=_ListByDefault,
    help="List the runs of a Redis (the default), extend a finished one, or delete a dead one.",
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the run", show_default=False)]


# --- list ---------------------------------------------------------------------------------------------


@app.command("list")
@takes(ServerSettings)
def list_runs(
    settings: ServerSettings,
    as_json: AsJson = False,
) -> None:
    """List all runs that a Redis holds: the progress of each, its learners and syncers, and its memory."""
    rows = asyncio.run(_rows(settings.need_url()))
    if as_json:
        typer.echo(dumps(rows))
    elif not rows:
        typer.echo("no runs on this Redis")
    else:
        Console().print(_table(rows))
        for row in rows:
            if row["phase"] == UNREADABLE:
                typer.echo(f"run {row['run']!r} is {UNREADABLE}: {row['reason']}")
            elif row["reason"].startswith(AWAITED):
                typer.echo(f"run {row['run']!r} is {row['reason']}")


async def _rows(url: str) -> list[RunRow]:
    async with connect_runs(url) as runs:
        taken = await runs.taken()
    return [await _row(url, run, taken[run]) for run in sorted(taken)]


async def _row(url: str, run: str, taken: Taken) -> RunRow:
    row: RunRow = {
        "run": run,
        "phase": UNREADABLE if taken.permitted else NOT_PERMITTED,
        "reason": "",
        "tokens": 0,
        "budget_tokens": 0,
        "age_s": None,
        "quiet_s": None,
        "learners": 0,
        "syncers": 0,
        "keys": taken.keys,
        "bytes": taken.bytes,
    }
    if not taken.permitted:
        return row
    async with open_bus(url, run) as bus:
        try:
            status, state = await read_status(bus, bus.clock), await bus.read_state()
        except BadMessage as error:
            row["reason"], row["syncers"] = str(error), await _syncers_at_work(bus)
            return row
    row["phase"], row["reason"] = status["phase"], status["reason"]
    row["tokens"], row["budget_tokens"] = status["tokens"], status["budget_tokens"]
    row["age_s"] = None if state is None else max(0.0, bus.clock.unix() - state.started_unix_s)
    row["quiet_s"] = min((one["age_s"] for one in status["learners"]), default=None)
    row["learners"] = sum(one["live"] for one in present(status["learners"]))
    row["syncers"] = len(status["syncers"])
    return row


async def _syncers_at_work(bus: Bus) -> int:
    """Count the syncers of an unreadable run, which another release may serve. Its learners cannot be counted."""
    held = sum(holder is not None for holder in await bus.read_leases([0]))
    with suppress(BadMessage):
        return max(held, len(await bus.read_syncers()))
    return held


def _table(rows: list[RunRow]) -> Fitting:
    tokens = [
        f"{count(row['tokens'])} of {count(row['budget_tokens'])}" if row["budget_tokens"] else "-" for row in rows
    ]
    columns = {
        "run": [row["run"] for row in rows],
        "phase": [row["phase"] for row in rows],
        "tokens": tokens,
        "learners": [str(row["learners"]) for row in rows],
        "syncers": [str(row["syncers"]) for row in rows],
        "age": [duration(row["age_s"]) for row in rows],
        "last report": [duration(row["quiet_s"]) for row in rows],
        "memory": [as_bytes(row["bytes"]) for row in rows],
    }
    return Fitting(columns, left=("run", "phase"), spare=("syncers", "age", "tokens"))


# --- delete -------------------------------------------------------------------------------------------


@app.command()
@takes(ServerSettings)
def delete(
    settings: ServerSettings,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Free the memory that a dead or finished run takes in Redis. Its checkpoints and folders stay.

    This is refused while any party works on the run. Only a checkpoint can restore what is deleted.
    """
    asyncio.run(_delete(settings.need_url(), name, yes))


async def _delete(url: str, name: str, yes: bool) -> None:
    async with connect_runs(url) as runs:
        taken = (await runs.taken()).get(name)
        if taken is None:
            raise DilocoError(_no_run(name))
        row = await _idle(url, name, taken)
        unseen = " (by this build, so it is not known whether it has learners)" if row["phase"] == UNREADABLE else ""
        what = f"run {name!r}, {row['phase']}{unseen}: {count(row['tokens'])} tokens, {as_bytes(taken.bytes)} in Redis"
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(f"{what}: there is no terminal to ask for confirmation; pass --yes to delete it")
            if not typer.confirm(f"Delete {what}?"):
                raise DilocoError("nothing was deleted")
            await _idle(url, name, taken)  # a party may have joined while the user was asked
        freed = await runs.free(name)
    typer.echo(
        f"deleted {what}, {freed} keys. A party that was only paused or cut off would restore it: stop such parties"
    )


async def _idle(url: str, name: str, taken: Taken) -> RunRow:
    """Return the row of a run after checking that no party works on it.

    Raises:
        UsageError: a party does, or this user may not read the run.
    """
    row = await _row(url, name, taken)
    if row["phase"] == NOT_PERMITTED:
        raise UsageError(f"run {name!r} has keys that this user may not read: use the operator of that run")
    here = {"learner": row["learners"], "syncer": row["syncers"]}
    if at_work := [counted(number, kind) for kind, number in here.items() if number]:
        by = f"`diloco finish --run {name}`{' with a build that can read it' if row['phase'] == UNREADABLE else ''}"
        raise UsageError(
            f"run {name!r} is {row['phase']}, {' and '.join(at_work)} working on it: end it first with {by}, or stop "
            "its parties"
        )
    return row


# --- extend -------------------------------------------------------------------------------------------


@app.command()
@takes(ServerSettings)
def extend(
    settings: ServerSettings,
    name: Name,
    tokens: Annotated[str, typer.Option(help="New budget: trained tokens, including the earlier ones", metavar="N")],
) -> None:
    """Continue a finished run under its name to a larger budget, from its own globals and outer momentum.

    Start its syncers and learners again afterwards, as before; they need no --tokens.

    Example: diloco runs extend my-run --tokens 5M
    """
    asyncio.run(_extend(settings.need_url(), name, _count(tokens)))


def _count(tokens: str) -> int:
    try:
        return TypeAdapter(Annotated[int, Field(ge=1, le=MAX_TOKENS)]).validate_python(parse_count(tokens))
    except ValidationError:
        raise UsageError(f"--tokens {tokens}: use a whole number below 2^62, such as 5000000 or 5M") from None


async def _extend(url: str, name: str, tokens: int) -> None:
    async with open_bus(url, name) as bus:
        if (encoded := await bus.read_spec()) is None:
            raise DilocoError(_no_run(name))
        spec = decode(Spec, encoded)
        bus.use_spec(spec)
        if (state := await bus.read_state()) is None:
            raise DilocoError(_no_run(name))
        if state.phase is not Phase.FINISHED:
            raise UsageError(f"run {name!r} is {state.phase.value}: only a finished run can be extended")
        if tokens <= (trained := state.counted_tokens):
            raise UsageError(f"--tokens {tokens}: run {name!r} has already trained {trained}; give more")
        if await bus.read_syncers() or any(await bus.read_leases(range(spec.sync.fragments))):
            raise UsageError(f"syncers of run {name!r} are still shutting down; try again once they have exited")
        longer = spec.model_copy(update={"sync": spec.sync.model_copy(update={"tokens": tokens})})
        # The spec is written first: if this process dies between the two writes, the run is still finished, only with a
        # larger budget, and the same command can be given again.
        if not await bus.replace_spec(encode(longer), encoded):
            raise DilocoError(f"run {name!r} was just extended or deleted by someone else")
        update = {"phase": Phase.RUNNING, "budget_tokens": tokens, "manifest": (), "problem": ""}
        update["reason"] = f"extended from {state.tokens} tokens"
        if not await bus.begin_again(state.model_copy(update=update)):
            raise DilocoError(f"run {name!r} was just extended or deleted by someone else")
    typer.echo(
        f"run {name!r} continues from {count(state.tokens)} to {count(tokens)} tokens as soon as a syncer and "
        f"learners are started. If any of them sets --tokens, DILOCO_TOKENS or tokens=, it must now be {tokens}"
    )


# --- finish -------------------------------------------------------------------------------------------


@takes(BusSettings)
def finish(
    settings: BusSettings,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Output folder of a `diloco run` in progress")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the run is finished")] = True,
) -> None:
    """End a run in order, from anywhere: learners publish once more, all is merged, and a last checkpoint is saved.

    Ctrl-C on `diloco run` does the same. Ctrl-C on this command only stops waiting.
    """
    place = locate(settings, folder)
    if place.redis_url is None:
        raise UsageError(no_redis(place))
    asyncio.run(_finish(place.redis_url, place.run, wait))


async def _finish(url: str, run: str, wait: bool) -> None:
    stop = signals.stop_event()
    async with open_bus(url, run) as bus:
        await read_run(bus)
        state = await bus.read_state()
        if state is None:
            raise DilocoError(f"run {run!r} has not started, or is not on this Redis (`diloco runs` lists its runs)")
        if state.phase is Phase.FINISHED:
            typer.echo(f"run {run!r} is already finished, with {count(state.tokens)} tokens")
            return
        await _finished(bus, run, stop, typer.echo, wait)


async def _finished(bus: Bus, run: str, stop: asyncio.Event, tell: Callable[[str], None], wait: bool) -> None:
    """Ask a run to finish and report what it waits for, until it has finished or `stop` is set.

    The request is a phase in Redis: if Redis loses it (the phase reads RUNNING again), it is made again.

    wait: if False, return as soon as the run was asked.
    """
    told, first = "", None
    later = "it finishes on its own; `diloco status` shows its progress"
    while not stop.is_set():
        try:
            state = await bus.read_state()
            if state is None:
                raise DilocoError("the run is no longer on this Redis: it was deleted, or Redis has lost it")
            if first is not None and not first.same_part(state):
                raise DilocoError(f"run {run!r} was finished, and has since been extended or restarted")
            if state.phase is Phase.RUNNING:
                wish = {"phase": Phase.DRAINING, "reason": "requested by `diloco finish`"}
                await bus.write_state(state.model_copy(update=wish))
                what = "was asked to finish again, since Redis had lost the request" if first else "was asked to finish"
                tell(f"run {run!r} {what}, at {count(state.tokens)} of {count(state.budget_tokens)} tokens")
            first = state
            if not wait:
                tell(later)
                return
            status = await read_status(bus, bus.clock)
        except (BusUnavailable, BusFull) as error:
            line = f"{error}; retrying every {LOOK_S:g} s"
        else:
            if state.phase is Phase.FINISHED:
                merged = count(status["merged_tokens"])
                tell(f"finished: {count(status['tokens'])} tokens, {merged} of them merged")
                return
            line = _awaited(status)
        if line != told:
            tell(line)
            told = line
        await first_of(stop, timeout_s=LOOK_S)
    tell(later if first else f"run {run!r} was not asked to finish")


def _awaited(status: Status) -> str:
    """Return what a run that is ending waits for."""
    if not status["syncers"]:
        return "waiting for a syncer: the run has none, and only a syncer can end it"
    live = [one["id"] for one in present(status["learners"]) if one["live"]]
    return f"waiting for the last deltas of {', '.join(live)}" if live else "waiting for the last merges"


# --- shared ---------------------------------------------------------------------------------------------


def _no_run(name: str) -> str:
    return f"no run {name!r} on this Redis: `diloco runs` lists its runs"
