"""What a release leaves behind: its files, and what its wire format has. Later releases are held to both.

`wire.json`: the fields of each message, which of them are required, and the words that they may have; the SHA-1 of
each Redis script, by which parties call it. `run/`: an output folder with checkpoint, tape, recorded deltas and report.
`learner/`: what a learner saves of its moments.
"""

import enum
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from diloco.pipeline.bus import stored_values
from diloco.pipeline.bus.redis import calls
from diloco.pipeline.messages import delta, head, moments, payload, run, shards, spec, tape
from diloco.pipeline.messages.formats import declared
from diloco.pipeline.messages.wire import FORMAT, Message
from diloco.pipeline.testing.virtual_time import run_virtual
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WIRE_FILE = "wire.json"
SCRIPTS = ROOT / "pipeline" / "bus" / "redis" / "lua"
REPORTED = ("report.json", "run.json", "settings.toml")


def kinds() -> Iterator[type[Message]]:
    """All messages that cross the bus."""
    for module in (spec, delta, payload, head, run, tape, moments, shards, stored_values):
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, Message) and one.__module__ == module.__name__:
                yield one


def _words(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (str(one.value) for one in annotation)
    else:
        for part in get_args(annotation):
            yield from _words(part)


def wire(format: int) -> dict[str, dict[str, list[str]]]:
    """Message -> field -> the words that it may have, as a wire format has them; required fields end with a `!`."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind in kinds():
        later, fields = declared(kind), dict[str, list[str]]()
        for name, field in kind.model_fields.items():
            if later.fields.get(name, 0) <= format:
                since = later.values.get(name, {})
                words = [one for one in _words(field.annotation) if since.get(one, 0) <= format]
                fields[name + "!" * field.is_required()] = sorted(set(words))
        found[kind.__name__] = fields
    return found


def loaded_scripts() -> set[str]:
    """SHA-1 of all scripts that a syncer of this build gives a server."""
    names = {path.stem for path in SCRIPTS.glob("[a-z]*.lua")}
    earlier = {hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest() for path in SCRIPTS.glob("*/*.lua")}
    return {calls.script(name).sha for name in names} | earlier


def write_frozen(folder: Path) -> None:
    """What this build's newest wire format has, and its scripts."""
    names = sorted(path.stem for path in SCRIPTS.glob("[a-z]*.lua"))
    scripts = {name: calls.script(name).sha for name in names}
    told = {"format": FORMAT, "messages": wire(FORMAT), "scripts": scripts}
    (folder / WIRE_FILE).write_text(json.dumps(told, indent=1) + "\n")


def check_frozen(folder: Path) -> str:
    """Where this build's messages differ from what a release said that its format has; "" if nowhere."""
    then = json.loads((folder / WIRE_FILE).read_text())
    now = wire(then["format"])
    differing = [
        f"{kind}: then {then['messages'].get(kind)}, now {now.get(kind)}"
        for kind in sorted({*then["messages"], *now})
        if then["messages"].get(kind) != now.get(kind)
    ]
    if not differing:
        return ""
    told = "is no more what it released: what is new needs `Since` (CONTRIBUTING.md, 'A new field')"
    return "\n".join([f"{folder.name}: wire format {then['format']} {told}", *differing])


def format_of(folder: Path) -> int:
    """The newest wire format that a release spoke."""
    found: int = json.loads((folder / WIRE_FILE).read_text())["format"]
    return found


def lost_scripts(folder: Path) -> list[str]:
    """Scripts of a release that a syncer of this build does not load: learners of that release could not go on."""
    there = loaded_scripts()
    scripts: dict[str, str] = json.loads((folder / WIRE_FILE).read_text())["scripts"]
    return [name for name, sha in scripts.items() if sha not in there]


def write_files(folder: Path) -> None:
    """A small run's output, and a learner's state."""
    out = folder / "run"
    out.mkdir()

    async def main() -> None:
        sync = sync_spec(tokens=600, quorum=2)
        folders = {
            "checkpoint_dir": str(out / "checkpoints"),
            "tape_dir": out / "tape",
            "record_deltas": out / "deltas",
        }
        world = VirtualRun(sync, **folders)
        world.start_syncer()
        await world.finish(*(VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)))

    run_virtual(main())
    import torch

    from diloco.workers.moments.state_folder import LOCK_FILE
    from tests.workers.test_recovery import Party

    torch.manual_seed(0)
    random.seed(0)
    party = Party(folder / "learner", steps=3)
    party.join()
    party.train(2)
    party.leave()
    (folder / "learner" / LOCK_FILE).unlink()
    small = ("--learners", "1", "--tokens", "2000", "--model", "nano", "--seq-len", "16", "--batch", "4")
    command = [
        sys.executable,
        "-m",
        "diloco",
        "run",
        *small,
        "--fragments",
        "2",
        "--sync-interval",
        "4",
        "--out",
        "whole",
    ]
    with tempfile.TemporaryDirectory() as elsewhere:  # a report names folders
        subprocess.run(command, cwd=elsewhere, check=True, stdout=subprocess.DEVNULL)
        for name in REPORTED:
            shutil.copyfile(Path(elsewhere) / "whole" / name, out / name)


def releases() -> list[Path]:
    """Folders of releases, this one's included."""
    return sorted(path.parent for path in FOLDER.glob(f"*/{WIRE_FILE}"))
