"""Digests of all that parties of a run have to agree on: messages, keys, and the texts of the Redis scripts."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

from diloco.pipeline.bus import keys, schema
from diloco.pipeline.bus.redis.calls import scripts
from diloco.pipeline.messages import fragment, moments, payload, run, shards, spec
from diloco.pipeline.messages.wire import FORMAT, Message
from diloco.pipeline.payload.codec import digest_of
from tests.recorded import FOLDER

WIRE_FILE = FOLDER / "wire.json"
COMMAND = "python -m tests.recorded"


def kinds() -> Iterator[type[Message]]:
    """All messages that cross the bus."""
    for module in (spec, payload, fragment, run, moments, shards, schema):
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, Message) and one.__module__ == module.__name__:
                yield one


def _bare(form: Any) -> Any:
    """A JSON schema without its texts for people."""
    if isinstance(form, dict):
        texts = {name for name in ("title", "description") if isinstance(form.get(name), str)}
        return {name: _bare(one) for name, one in form.items() if name not in texts}
    return [_bare(one) for one in form] if isinstance(form, list) else form


def _digest(what: Any) -> str:
    return digest_of(json.dumps(what, sort_keys=True).encode()).hex()


def _keys() -> Iterator[tuple[str, str]]:
    """Each key's name in a run of two groups: its parameters' names stand for texts, and ones for numbers."""
    made = keys.RunKeys("run", 2)
    for name, member in vars(keys.RunKeys).items():
        if isinstance(member, property):
            yield name, getattr(made, name)
        elif inspect.isfunction(member) and not name.startswith("_") and name != "group":
            of = list(inspect.signature(member).parameters.values())[1:]
            yield name, member(made, *(1 if one.annotation is int else one.name for one in of))


def found() -> dict[str, dict[str, str]]:
    """Of this tree: digests of messages and scripts by name, and the names of keys."""
    return {
        "messages": {kind.__name__: _digest(_bare(kind.model_json_schema())) for kind in kinds()},
        "keys": dict(_keys()),
        "scripts": {name: script.sha for name, script in scripts().items()},
    }


def write() -> None:
    """Record what this tree has beside its number."""
    WIRE_FILE.write_text(json.dumps({"format": FORMAT, **found()}, indent=1) + "\n")


def changes() -> list[str]:
    """What differs between this tree and what was recorded, in words."""
    recorded = json.loads(WIRE_FILE.read_text())
    told = [] if recorded["format"] == FORMAT else [f"the number: recorded {recorded['format']}, here {FORMAT}"]
    for part, here in found().items():
        there = recorded[part]
        told += [f"{part}: {name}" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    return told
