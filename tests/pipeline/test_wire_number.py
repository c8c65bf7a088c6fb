"""Promises about the wire format: one number, which rises with what parties have to agree on, and who has another."""

from pathlib import Path

import msgpack
import pytest

from diloco import cli
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import FORMAT
from diloco.pipeline.payload.codec import decode
from tests import samples
from tests.recorded import wire


def test_who_changes_messages_keys_or_scripts_raises_the_number() -> None:
    assert wire.changes() == [], (
        "the wire format is not what was recorded for its number: raise FORMAT in pipeline/messages/wire.py if a "
        f"release has the present number, then record it with `{wire.COMMAND}` ('A new field', CONTRIBUTING.md)"
    )


def test_a_change_of_a_message_a_key_or_a_script_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against what this tree has, whatever was recorded."""
    monkeypatch.setattr(wire, "WIRE_FILE", tmp_path / "wire.json")
    wire.write()
    found = wire.found()
    changed = {part: {**digests, min(digests): "other"} for part, digests in found.items()}
    monkeypatch.setattr(wire, "found", lambda: changed)
    assert wire.changes() == [f"{part}: {min(digests)}" for part, digests in found.items()]


@pytest.mark.parametrize("said", [FORMAT + 1, 0, -1, True, "1", None, [1], 10**30 % 2**63])
def test_a_spec_of_another_number_is_refused_with_both_and_with_what_to_do(said: object) -> None:
    tree = {**samples.spec().model_dump(), "format": said, "of_that_build": 1}
    said_so = rf"wire format .*, but this build speaks {FORMAT} .*continue from the run's checkpoint"
    with pytest.raises(BadMessage, match=said_so):
        decode(Spec, msgpack.packb(tree))


def test_a_spec_with_a_choice_of_a_later_build_is_refused_by_name() -> None:
    """So a new codec or rule needs no new number."""
    tree = samples.spec().model_dump()
    tree["sync"]["codec"] = "int2"
    with pytest.raises(BadMessage, match=r"sync.codec 'int2' is unknown to this build: .* may have written it$"):
        decode(Spec, msgpack.packb(tree))


def test_the_version_says_the_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f", wire format {FORMAT}\n")
