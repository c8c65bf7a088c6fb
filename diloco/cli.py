"""The command line: one table of commands. The modules of a command are imported when that command is called."""

import sys
from collections.abc import Callable, Sequence
from errno import EDQUOT, ENOSPC
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import typer
from safetensors import SafetensorError
from typer.core import TyperGroup
from typer.main import get_command

from diloco.extras import STUDIES, load_extra
from diloco.pipeline.errors import REFUSED_STATUS, DilocoError, UsageError, exit_status
from diloco.pipeline.files.writable import error_text
from diloco.pipeline.process.interrupts import restore_keyboard_interrupt


class Entry(NamedTuple):
    """A row of the command table: one subcommand."""

    where: str
    """Place of the command as "module:attribute": a function that typer can read, or a group (`typer.Typer`)."""
    about: str
    """Line of the command in the list of commands; empty if only other commands call it, so that it is not listed."""


COMMANDS: dict[str, Entry] = {
    "run": Entry(
        "diloco.launcher.run:command", "Train on this machine: an embedded Redis, a syncer, learners, an evaluator."
    ),
    "demo": Entry(
        "diloco.launcher.demo:command", "Train like `run`, but kill a learner on the way and start it again."
    ),
    "plan": Entry(
        "diloco.plan:command", "Show what a run needs for a model and a link: H, P, codec, memory, bytes, cores."
    ),
    "doctor": Entry("diloco.doctor.command:command", "Check this machine and its Redis before a run."),
    "data": Entry("diloco.data:app", "Turn text of any size into token shards for --data, and check them: a group."),
    "learner": Entry("diloco.commands:learner", "Join a run as a learner, with the built-in trainer."),
    "redis": Entry("diloco.commands:redis", "Start a Redis for the parties of a run, on this and other machines."),
    "syncer": Entry("diloco.commands:syncer", "Serve a run as its syncer: gather deltas, merge, publish globals."),
    "evaluator": Entry("diloco.commands:evaluator", "Measure the held-out loss of a run's global parameters."),
    "status": Entry("diloco.status:command", "Show a live run, or the report of a finished one."),
    "watch": Entry("diloco.watch:command", "Serve the page of any run: timelines of its learners, loss, tokens."),
    "runs": Entry("diloco.runs:app", "List the runs of a Redis, extend a finished one, delete a dead one: a group."),
    "finish": Entry("diloco.runs:finish", "End a run in order, from anywhere."),
    "report": Entry("diloco.report:command", "Print the report of a finished run, or write its page as one file."),
    "tape": Entry("diloco.tape:command", "Print a run's event tape, or recompute its merges and compare."),
    "export": Entry("diloco.commands:export", "Write the global parameters of a checkpoint as a safetensors file."),
    "sample": Entry("diloco.commands:sample", "Generate text with the global parameters of a checkpoint."),
    "acl": Entry("diloco.commands:acl", "Print an ACL file for Redis: a user for each party."),
    "chaos": Entry(
        "diloco_studies.strikes.command:command", "Strike a real run on this machine, then audit it. Linux only."
    ),
    "simulate": Entry(
        "diloco_studies.goodput.commands.simulate:app",
        "Simulate goodput, uptime and bandwidth of runs on up to millions of chips: a group.",
    ),
    "lab": Entry(
        "diloco_studies.quality.command:app",
        "Run quality experiments with real gradients in virtual time: a group.",
    ),
    "bench": Entry(
        "diloco_studies.bench.command:app",
        "Run benchmarks on this machine, next to the best that it could do: a group.",
    ),
    "rank": Entry("diloco.commands:rank", ""),
}


class CommandGroup(TyperGroup):
    """A group of commands whose list has the first sentence of each one's help, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands. typer's own cuts each line at the width of the terminal."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(10_000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def new_app(cls: type[CommandGroup] = CommandGroup, **more: Any) -> typer.Typer:
    """Return an app, such as a group of commands, that behaves as all of this program; `more`: see `typer.Typer`."""
    return typer.Typer(
        cls=cls,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # frames leave few columns for the text, and long words are cut in them
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **more,
    )


def load_command(name: str) -> typer.Typer:
    """Import a command of the table.

    Raises:
        UsageError: the command needs a package that is not installed.
    """
    module, _, attribute = COMMANDS[name].where.partition(":")
    found = getattr(load_extra(module, name), attribute)
    if isinstance(found, typer.Typer):
        return found
    made = new_app()
    made.command(cls=getattr(found, "cls", None))(found)
    return made


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from diloco import __version__
    from diloco.pipeline.messages.wire import FORMAT

    typer.echo(f"diloco {__version__}, wire format {FORMAT}")
    raise typer.Exit


def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _list() -> typer.Typer:
    """Return the app that lists the commands without importing any of them."""
    made = new_app(help="Decoupled DiLoCo: learners that never wait, one syncer, one Redis.")
    made.callback()(_root)
    installed = find_spec(STUDIES) is not None
    for name, entry in COMMANDS.items():
        # A command that is not listed is not added, since typer would suggest it for a misspelled name.
        if entry.about and (installed or not entry.where.startswith(STUDIES)):
            made.command(name, help=entry.about)(_listed)
    return made


def _listed() -> None:
    """Stand in for a command in the list."""


def _call(command: typer.Typer, arguments: list[str], name: str) -> None:
    """Call a command, which always ends by raising SystemExit.

    Raises:
        UsageError: the value of an option is wrong. Without this, typer would print pydantic's message.
    """
    made: Any = get_command(command)
    made.make_context, made.invoke = _refusing(made.make_context), _refusing(made.invoke)
    made(args=arguments, prog_name=name)


def _refusing(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step of a command or group, so that it refuses a wrong value with a message of this program."""

    def refuse(*args: Any, **more: Any) -> Any:
        try:
            return step(*args, **more)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from diloco.pipeline.wrong_values import format_problem

            if not isinstance(error.__cause__, ValidationError) or error.param is None:
                raise
            problem = error.__cause__.errors()[0]
            raise UsageError(
                f"{max(error.param.opts, key=len)} {problem['input']}: {format_problem(problem)}"
            ) from error

    return refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 if a person has to correct something, 1 for any other failure."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        name = given[0] if given and given[0] in COMMANDS else ""
        command = load_command(name) if name else _list()
        restore_keyboard_interrupt()
        _call(command, given[1:] if name else given, f"diloco {name}".rstrip())
    except DilocoError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_status(error)
    except PermissionError as error:
        sys.stderr.write(f"error: {error_text(error)}\n")
        return REFUSED_STATUS
    except (OSError, SafetensorError) as error:  # a full disk, a damaged file
        full = isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT) and error.filename is None
        remedy = "; free some space on the disks that this command writes to" if full else ""  # no file is named
        sys.stderr.write(f"error: {type(error).__name__}: {error}{remedy}\n")
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0
