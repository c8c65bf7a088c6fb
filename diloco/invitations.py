"""`diloco invite`, `join` and `revoke`: a learner comes to a run under way by one line, and is cut off by another.

An invitation is one word: where the Redis is, its authority, the run, the learner's name, its user and password. It is
as secret as the password that is in it.
"""

import asyncio
import base64
import binascii
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.cli import main
from diloco.launcher.locate import server_url
from diloco.options import takes
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.hosts import SENTINEL_SCHEMES, SENTINELS_LOGIN, Hosts
from diloco.pipeline.bus.redis.address import parse
from diloco.pipeline.bus.redis.users import RedisUsers, connect_users
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.bus.server import USERS_FROM
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusError, DilocoError, NotPermitted, PeerError, UsageError
from diloco.pipeline.messages.run import LEARNER_REVOKED, Event, Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import PartyId, party_name
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.process import logs
from diloco.pipeline.settings import BusSettings, ServerSettings
from diloco.pipeline.units import counted
from diloco.pipeline.view.status_reader import read_status

PREFIX = "diloco1."
VARIABLE = "DILOCO_INVITATION"
MOST = 65_536
"""Characters of an invitation; one with an authority has about 3,000."""
MOST_TYPED = 4095
"""That a terminal gives in one line."""
_HERE = {"localhost", "127.0.0.1", "::1", "[::1]", ""}


class Invitation(BaseModel):
    """What is in the word."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    url: Annotated[str, Field(pattern=r"^rediss?(\+sentinel)?://")]
    """With user, password and authority."""
    run: PartyId
    learner: PartyId

    def word(self) -> str:
        """As one word."""
        return PREFIX + base64.urlsafe_b64encode(self.model_dump_json().encode()).decode().rstrip("=")

    @classmethod
    def read(cls, word: str) -> Self:
        """That of a word.

        Raises:
            UsageError: it is none, or not whole; never shows it.
        """
        word = "".join(word.split())  # as it may come out of a mail
        if not word:
            raise UsageError("there is no invitation: paste the word that `diloco invite NAME` has printed")
        if not word.startswith(PREFIX) or len(word) > MOST:
            raise UsageError(f"this is no invitation: one begins with {PREFIX!r}, and `diloco invite NAME` makes it")
        body = word.removeprefix(PREFIX)
        try:
            return cls.model_validate_json(base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True))
        except (binascii.Error, ValidationError):
            raise UsageError("the invitation is damaged, or a part of it is missing: copy all of it") from None

    def environment(self) -> dict[str, str]:
        """What a learner reads from its environment."""
        return {"DILOCO_REDIS_URL": self.url, "DILOCO_RUN": self.run, "DILOCO_LEARNER_ID": self.learner}


# --- invite -------------------------------------------------------------------------------------------


@takes(BusSettings)
def invite(
    settings: BusSettings,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The learner's name", show_default=False)],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="ADDRESS",
            help="How the learner reaches Redis: rediss://HOST:PORT (default: as this command)",
        ),
    ] = None,
) -> None:
    """Let a learner take part in a run: make it a user on the live Redis, and print the line that it joins with.

    The line is a secret: whoever has it can train as NAME. It is printed once. `diloco revoke NAME` ends it. It needs
    Redis 7 or Valkey, and a user who may make others: `operator`, or one without limits.

    Example: diloco invite anna --run my-run --at rediss://my.host:6380
    """
    logs.configure(settings.log_level)
    url = server_url(settings)
    word, notes = asyncio.run(_invite(url, settings.run, _name(name), at))
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(f"diloco join {word}")


async def _invite(url: str, run: str, name: str, at: str | None) -> tuple[str, list[str]]:
    user, password = acl.invited(run, name), secrets.token_hex(24)
    invitation = Invitation(url=_address(url, at, user.name, password), run=run, learner=name)
    notes = []
    if not invitation.url.startswith("rediss"):
        notes.append("note: no TLS: whoever can read the network reads the password, and all that is trained")
    elif "ssl_ca_data" not in invitation.url:
        notes.append(
            "note: no certificate authority is in it: the learner's machine must know the server's. An address of your "
            "own with rediss:// and DILOCO_REDIS_CA puts it in"
        )
    if len(word := invitation.word()) > MOST:
        raise UsageError(
            f"DILOCO_REDIS_CA is too long for an invitation ({len(word)} characters): give the server's alone"
        )
    async with _users(url) as users:
        its = await users.run_of(urlsplit(url).username or "default")
        if its not in (None, run):
            raise UsageError(f"this user may make learners of run {its!r} alone, not of {run!r}", f"give --run {its}")
        if await users.exists(user.name):
            raise UsageError(f"{name!r} is invited already: `diloco revoke {name}` first, or take another name")
        if of_file := await _of_file(users, name):
            raise UsageError(f"{name!r} needs no invitation, and to revoke it would not keep it out: {of_file}")
        await users.make(user, password)
        if await users.keep() != "kept":
            notes.append(
                "note: this Redis has no ACL file that it may write: started again, it does not know the learner"
            )
        if users.away:
            notes.append(
                f"note: {', '.join(sorted(users.away))} did not answer and does not know the learner: once it is back, "
                f"`diloco revoke {name}`, and invite anew"
            )
    if note := await _run_now(url, run):
        notes.append(f"note: {note}")
    return word, notes


async def _run_now(url: str, run: str) -> str:
    """What whoever is invited will find; "": a run that is under way."""
    try:
        async with open_bus(url, run) as bus:
            status = await read_status(bus, LoopClock())
    except NotPermitted as error:
        return (
            f"who invites may not look into run {run!r}, so neither may its syncer, if its users were made for another "
            f"run: {error.remedy}"
        )
    except (PeerError, BusError) as error:
        return f"run {run!r} cannot be read: {error}"
    if status["phase"] == Phase.FINISHED:
        return f"run {run!r} is finished: `diloco runs extend {run} --tokens NUMBER` has it go on"
    if status["phase"] != "waiting":
        return ""
    syncers, learners = len(status["syncers"]), sum(one["live"] for one in status["learners"])
    if not (status["fragments"] or syncers or status["learners"]):
        return f"there is no run {run!r} on this Redis yet: --run says which one it is for"
    there = f"{counted(syncers, 'syncer')} and {counted(learners, 'learner')} there"
    waits = "waits" if status["fragments"] or status["tokens"] else "has not begun"
    return f"run {run!r} {waits}, with {there}: {status['reason']}"


def _address(url: str, at: str | None, user: str, password: str) -> str:
    """The URL of the invited user.

    Raises:
        UsageError: nobody elsewhere could reach it.
    """
    ours = urlsplit(url)
    there = urlsplit(at) if at is not None else ours
    try:
        hosts = Hosts.of(there).hosts
    except ValueError:
        hosts = ()
    if there.scheme not in ("redis", "rediss", *SENTINEL_SCHEMES) or not hosts:
        raise UsageError(f"--at {at if at is not None else 'is needed'}: give rediss://HOST:PORT, or redis://HOST:PORT")
    service = there.scheme in SENTINEL_SCHEMES
    if service and not there.path.strip("/"):
        raise UsageError(f"--at names no service: give {there.scheme}://HOST,HOST,HOST/SERVICE")
    if at is None and any(host in _HERE for host, _ in hosts):
        here = f"{ours.scheme}://{ours.netloc.rpartition('@')[2]}{ours.path if service else ''}"
        raise UsageError(
            f"{hosts[0].host} is this machine alone: say how the learner reaches it, with --at rediss://HOST:PORT, or, "
            f"for one on this machine, --at {here}"
        )
    named = there.username or there.password or there.query or (there.path.strip("/") and not service)
    if at is not None and named:
        raise UsageError("--at takes an address alone: the invitation gets a user and a password of its own")
    options = dict(parse_qsl(ours.query, keep_blank_values=True))
    kept = {name: value for name, value in options.items() if service and name in SENTINELS_LOGIN}
    if there.scheme.startswith("rediss"):
        kept |= {name: value for name, value in options.items() if name == "ssl_ca_data"}
        if authority := options.get("ssl_ca_certs"):
            kept["ssl_ca_data"] = Path(authority).read_text()
    place = there.netloc.rpartition("@")[2]
    database = parse(url).options.get("db", 0)
    path = "/" + there.path.split("/")[1] if service else ""
    path += f"/{database}" if database else ""
    netloc = f"{quote(user)}:{quote(password)}@{place}"
    return urlunsplit((there.scheme, netloc, path, urlencode(kept), ""))


# --- revoke -------------------------------------------------------------------------------------------


@takes(ServerSettings)
def revoke(
    settings: ServerSettings,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The learner's name", show_default=False)],
) -> None:
    """Take an invitation back: the learner's user is gone, and its connections end at once.

    What it has published before is merged as ever.
    """
    logs.configure(settings.log_level)
    asyncio.run(_revoke(server_url(settings), _name(name)))
    typer.echo(f"{name!r} is cut off")


async def _revoke(url: str, name: str) -> None:
    async with _users(url) as users:
        user = f"{acl.INVITED}-{name}"
        run = await users.run_of(user)
        there = await users.take_away(user)
        kept = await users.keep()
        of_file = await _of_file(users, name)
        if there and run is not None:
            await _say_revoked(url, run, name)
        if not there and kept != "failed":
            if of_file:
                raise UsageError(f"{name!r} is not invited: {of_file}")
            named = acl.learner(learner_id=name).name
            raise UsageError(f"nobody is invited as {name!r} on this Redis, and it has no user {named!r} either")
        but = [of_file] if of_file else []
        if users.away:
            but.append(
                f"{', '.join(sorted(users.away))} did not answer, and may still know it: once that is back, "
                f"`diloco revoke {name}` again"
            )
        if kept == "failed":
            but.append(
                "this Redis cannot write its ACL file, which still has the learner: started again, it lets it in. Let "
                f"it write there, then `diloco revoke {name}` again"
            )
        if but:
            raise DilocoError(f"{name!r} is cut off, but {'; and '.join(but)}")


async def _of_file(users: RedisUsers, name: str) -> str:
    """What to do about a learner that has a user of its own, which `diloco acl` has made; "": it has none."""
    named = acl.learner(learner_id=name).name
    if not await users.exists(named):
        return ""
    return (
        f"it is {named!r} of the file of users, which is not taken back like an invitation. Delete its line there, and "
        f'cut it off now: redis-cli -u "$DILOCO_REDIS_URL" ACL DELUSER {named}'
    )


async def _say_revoked(url: str, run: str, name: str) -> None:
    """Tell who watches the run that nobody misses the learner, if there is such a run that can be told."""
    with suppress(DilocoError):
        async with open_bus(url, run) as bus:
            if (data := await bus.read_spec()) is not None:
                bus.use_spec(decode(Spec, data))
                await bus.add_event(Event(name=LEARNER_REVOKED, who=name, detail="", unix_s=LoopClock().unix()))


# --- join ---------------------------------------------------------------------------------------------


join = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@join.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # what comes after WORD is the learner's
        "help_option_names": ["-h", "--help"],
    }
)
def _join(
    ctx: typer.Context,
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help=f"The invitation; `-`: it is asked for, or read from the input; `env`: {VARIABLE} has it",
            show_default=False,
        ),
    ],
) -> None:
    """Train in a run as the learner that `diloco invite` has invited, with the built-in trainer or an own loop.

    After WORD come options of `diloco learner`, or `--` and a command: its Learner(model, optimizer) says neither
    run nor redis_url nor learner_id. The invitation leaves the list of processes at once; `-` keeps it out of the
    shell's history too.

    Examples: diloco join WORD --threads 4; diloco join WORD -- python train.py
    """
    if word.strip().startswith(PREFIX):  # other users of the machine see arguments, not the environment: begin anew
        os.environ[VARIABLE] = word
        os.execv(sys.executable, [sys.executable, "-P", "-m", "diloco", "join", "env", *ctx.args])  # noqa: S606  # ourselves
    match word:
        case "env":
            said = os.environ.pop(VARIABLE, "")
        case "-":
            typed = sys.stdin.isatty()
            said = typer.prompt("invitation", hide_input=True) if typed else sys.stdin.readline()
            if typed and len(said) >= MOST_TYPED:
                raise UsageError("the invitation is longer than a line of a terminal: diloco join - < FILE that has it")
        case _:
            said = word
    os.environ.pop("DILOCO_REDIS_CA", None)  # the word brings its own
    os.environ.update(Invitation.read(said).environment())
    if ctx.args[:1] != ["--"]:
        raise typer.Exit(main(["learner", *ctx.args]))
    if not ctx.args[1:]:
        raise UsageError("-- takes a command: diloco join WORD -- python train.py")
    try:
        os.execvp(ctx.args[1], ctx.args[1:])  # noqa: S606  # what the user names
    except OSError as error:
        raise UsageError(f"{ctx.args[1]}: {error.strerror}") from None


# --- shared ---------------------------------------------------------------------------------------------


def _name(name: str) -> str:
    try:
        return party_name(name)
    except ValueError as error:
        raise UsageError(f"{name!r} {error}") from None


@asynccontextmanager
async def _users(url: str) -> AsyncIterator[RedisUsers]:
    users = await connect_users(url)
    try:
        if await users.version() < USERS_FROM:
            raise UsageError(f"users with rights of their own need Redis {USERS_FROM} or Valkey; this Redis is older")
        yield users
    finally:
        await users.close()
