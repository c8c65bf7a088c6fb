"""What a message has in which wire format: what is declared `Since` a later one is not in the earlier ones. Pure.

A run keeps the format that it began with. Whoever speaks a later one too leaves the later fields out there, and
refuses them where they come: so all of its parties take the same bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError

from diloco.pipeline.messages.wire import Message, Since

LATER = "a later release may"
"""How a complaint ends of what this build does not know."""


@dataclass(frozen=True, slots=True)
class Later:
    """Something of a message that its run's format does not have."""

    holder: dict[str, Any]
    """The map that it lies in, under `name`."""
    name: str
    path: str
    since: int
    default: Any
    is_field: bool
    """False: the field is there, its value is not."""

    def __str__(self) -> str:
        what = self.path if self.is_field else f"{self.path} {self.holder[self.name]!r:.80}"
        return f"{what} needs wire format {self.since}"


@dataclass(frozen=True, slots=True)
class Declared:
    """What a kind of message declares, by field."""

    fields: Mapping[str, int]
    values: Mapping[str, Mapping[Any, int]]
    inside: Mapping[str, type[Message]]


def _parts(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of, metadata too."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


@cache
def declared(kind: type[Message]) -> Declared:
    """What a kind of message has that not all formats have."""
    fields, values, inside = {}, dict[str, dict[Any, int]](), dict[str, type[Message]]()
    for name, field in kind.model_fields.items():
        for part in [*field.metadata, *_parts(field.annotation)]:
            if isinstance(part, Since) and part.values:
                values.setdefault(name, {}).update(dict.fromkeys(part.values, part.format))
            elif isinstance(part, Since):
                fields[name] = part.format
                if field.is_required():
                    raise TypeError(f"{kind.__name__}.{name} is since format {part.format}, and has no default")
            elif isinstance(part, type) and issubclass(part, Message):
                inside[name] = part
    return Declared(fields, values, inside)


@cache
def _any(kind: type[Message], format: int) -> bool:
    """Whether a kind has anything later than a format: mostly not, and then no message is looked through."""
    here = declared(kind)
    since = [*here.fields.values(), *(n for values in here.values.values() for n in values.values())]
    return any(one > format for one in since) or any(_any(inner, format) for inner in here.inside.values())


def later(tree: Any, kind: type[Message], format: int, path: str = "") -> Iterator[Later]:
    """What a message has that a format does not.

    Args:
        tree: the message as nested maps; what is no map yields nothing.
        kind: of message.
        format: the run's.
        path: where it lies.
    """
    if not _any(kind, format):
        return
    here = declared(kind)
    for one in tree if isinstance(tree, list | tuple) else [tree]:
        if isinstance(one, list | tuple):
            yield from later(one, kind, format, path)
        if not isinstance(one, dict):
            continue
        for name in [name for name in kind.model_fields if name in one]:
            where = f"{path}.{name}" if path else name
            default = kind.model_fields[name].get_default(call_default_factory=True)
            if (since := here.fields.get(name, 0)) > format:
                yield Later(one, name, where, since, default, True)
            elif name in here.values and (since := _since(here.values[name], one[name])) > format:
                yield Later(one, name, where, since, default, False)
            elif name in here.inside:
                yield from later(one[name], here.inside[name], format, where)


def _since(values: Mapping[Any, int], value: Any) -> int:
    return values.get(value, 0) if isinstance(value, str | int) else 0


def fields(message: Message, format: int, mode: str = "python") -> dict[str, Any]:
    """A message as nested maps, as it is in a format.

    Args:
        message: what it has of later formats is left out.
        format: the run's.
        mode: as `model_dump`.

    Raises:
        ValueError: it has a value that nothing of the format can stand for.
    """
    tree = message.model_dump(mode=mode)
    for one in list(later(tree, type(message), format)):
        if not one.is_field:
            raise ValueError(f"{type(message).__name__}: {one}, and the run has {format}")
        del one.holder[one.name]
    return tree


def complaint(error: ValidationError) -> str:
    """What is wrong with a message or a file; of what a later release may have written, that it may."""
    first = error.errors(include_url=False)[0]
    where, what = ".".join(str(part)[:80] for part in first["loc"]), first["msg"][:400].removeprefix("Value error, ")
    if first["type"] == "literal_error" and where.endswith("format"):
        expected = first.get("ctx", {}).get("expected")
        return f"{where} {first['input']!r:.20} is not {expected}, which this build reads: {LATER} have it"
    if first["type"] in ("literal_error", "enum", "union_tag_invalid"):
        value = first.get("ctx", {}).get("tag", first["input"])
        return f"{where or 'message'} {value!r:.40} is unknown to this build: {LATER} have it"
    if first["type"] == "extra_forbidden":
        return f"{where or 'message'} is unknown to this build: {LATER} have written it"
    return f"{where or 'message'}: {what}"


def beyond(message: Message, format: int) -> Later | None:
    """Something of a message that says what its format cannot: a later field that is not at its default."""
    if not _any(type(message), format):
        return None
    found = later(message.model_dump(), type(message), format)
    return next((one for one in found if not one.is_field or one.holder[one.name] != one.default), None)
