"""Promises about wire formats: what a later one has is left out of a run of an earlier one, and refused there."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import msgpack
import pytest
from pydantic import Field, ValidationError

from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages import formats, wire
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import FORMAT, Count, Message, Since
from diloco.pipeline.payload.codec import decode, encode
from tests import samples

Colour = Annotated[Literal["red", "blue", "green"], Since(2, ("green",)), Since(3, ("blue",))]


class Part(Message):
    size: Count
    weight: Annotated[Count, Since(2)] = 1


class Whole(Message):
    name: str
    colour: Colour = "red"
    parts: tuple[Part, ...] = ()
    nested: tuple[tuple[Part, int], ...] = ()
    best: Part | None = None
    note: Annotated[str, Since(3)] = ""


FULL = Whole(
    name="n",
    parts=(Part(size=1, weight=5), Part(size=2)),
    nested=((Part(size=3, weight=6), 4),),
    best=Part(size=5, weight=7),
    note="later",
)


def packed(format: int) -> dict[str, object]:
    found: dict[str, object] = msgpack.unpackb(encode(FULL, format), use_list=False)
    return found


def test_what_a_format_does_not_have_is_left_out_at_any_depth() -> None:
    small = {"size": 5, "weight": 7}
    assert packed(3)["note"] == "later"
    assert "note" not in packed(2)
    assert packed(2)["best"] == small
    assert packed(1) == {
        "name": "n",
        "colour": "red",
        "parts": ({"size": 1}, {"size": 2}),
        "nested": (({"size": 3}, 4),),
        "best": {"size": 5},
    }


@pytest.mark.parametrize("format", [1, 2, 3])
def test_what_was_written_in_a_format_is_read_in_it(format: int) -> None:
    read = decode(Whole, encode(FULL, format), format=format)
    assert encode(read, format) == encode(FULL, format)
    assert (read == FULL) is (format == 3)


@pytest.mark.parametrize(
    ("change", "format", "what"),
    [
        ({"note": ""}, 2, "note needs wire format 3, and the run has 2"),
        ({"best": {"size": 1, "weight": 1}}, 1, "best.weight needs wire format 2, and the run has 1"),
        ({"nested": [[{"size": 1, "weight": 1}, 4]]}, 1, "nested.weight needs wire format 2"),
        ({"colour": "green"}, 1, "colour 'green' needs wire format 2"),
        ({"colour": "blue"}, 2, "colour 'blue' needs wire format 3"),
        ({"colour": "pink"}, 3, "colour 'pink' is unknown to this build: a later release may have it"),
        ({"other": 1}, 3, "other is unknown to this build: a later release may have written it"),
    ],
)
def test_what_a_format_does_not_have_is_refused_where_it_comes(
    change: dict[str, object], format: int, what: str
) -> None:
    """Also at its default: a party of the earlier release refuses it, so all do."""
    with pytest.raises(BadMessage, match=what):
        decode(Whole, msgpack.packb({"name": "n", **change}), format=format)


def test_a_value_that_a_format_does_not_have_is_never_written_in_it() -> None:
    """Nothing could stand for it: whoever chooses it has to know the run's format."""
    green = Whole(name="n", colour="green")
    assert decode(Whole, encode(green, 2), format=2) == green
    with pytest.raises(ValueError, match="colour 'green' needs wire format 2, and the run has 1"):
        encode(green, 1)


def test_a_later_field_needs_a_default() -> None:
    """Without one, a message of an earlier format could not be read."""

    class Bare(Message):
        size: Annotated[Count, Since(2)]

    with pytest.raises(TypeError, match=r"Bare\.size is since format 2, and has no default"):
        encode(Bare(size=1), 1)


@pytest.fixture
def two_formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a build that speaks this release's format and the next."""
    monkeypatch.setattr(wire, "SPOKEN", range(FORMAT, FORMAT + 2))
    yield
    formats.declared.cache_clear()


class Agreed(Message):
    """As the spec is."""

    says_format: ClassVar[bool] = True

    format: wire.WireFormat = FORMAT
    mark: Annotated[int, Field(ge=0), Since(FORMAT + 1)] = 0


@pytest.mark.usefixtures("two_formats")
def test_a_message_that_says_its_format_is_written_and_read_in_it() -> None:
    for format, has in ((FORMAT, False), (FORMAT + 1, True)):
        data = encode(Agreed(format=format, mark=7))
        assert ("mark" in msgpack.unpackb(data)) is has
        assert decode(Agreed, data).mark == 7 * has
    with pytest.raises(BadMessage, match=f"mark needs wire format {FORMAT + 1}, and the run has {FORMAT}"):
        decode(Agreed, msgpack.packb({"format": FORMAT, "mark": 7}))
    with pytest.raises(BadMessage, match=f"has wire format {FORMAT + 1}, its run has {FORMAT}"):
        decode(Agreed, encode(Agreed(format=FORMAT + 1)), format=FORMAT)


@pytest.mark.parametrize("said", [FORMAT + 1, 0, -1, True, "1", None, [1], 10**30 % 2**63])
def test_a_spec_of_a_format_that_is_not_spoken_is_refused_with_both(said: object) -> None:
    tree = {**samples.spec().model_dump(), "format": said}
    with pytest.raises(BadMessage, match=r"Spec has wire format .*, this build speaks 1: take a release that"):
        decode(Spec, msgpack.packb(tree))


def test_a_spec_without_a_format_is_refused() -> None:
    """Two releases would take it for two formats."""
    tree = samples.spec().model_dump()
    del tree["format"]
    with pytest.raises(BadMessage, match="Spec has wire format None"):
        decode(Spec, msgpack.packb(tree))


def test_a_spec_says_no_more_than_its_format_can() -> None:
    with pytest.raises(ValidationError, match="wire format 9, this build speaks 1"):
        Spec(format=9, sync=samples.sync_spec(), tensors=samples.spec().tensors, trainer={})
