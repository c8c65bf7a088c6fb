"""`diloco doctor` and the places that a run writes to: it believes none that it has not tried."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco import cli
from diloco.doctor import checks, measure
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.findings import Finding
from diloco.pipeline.payload.codec import encode
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.saving import run_folder
from tests import samples

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture(scope="module")
def forgetful(redis_binary: Path | None) -> Iterator[EmbeddedRedis]:
    """A server without an append-only file, which a run survives by its checkpoints only."""
    with EmbeddedRedis(binary=redis_binary, appendonly=False, port=0) as server:
        yield server


Look = Callable[..., tuple[int, dict[str, Finding]]]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Exit status and findings by what they are about."""

    def run(*arguments: str) -> tuple[int, dict[str, Finding]]:
        status = cli.main(["doctor", "--json", *arguments])
        found = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
        return status, {one.about: one for one in found}

    return run


@pytest.mark.redis
def test_a_store_that_cannot_be_written_is_named_and_does_not_count_as_checkpoints(
    forgetful: EmbeddedRedis, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried as the syncer tries it: nothing answers there, or the package that speaks to it is missing."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "of-a-test",
        "AWS_SECRET_ACCESS_KEY": "of-a-test",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    place = "s3://bucket/run"
    status, found = look("--redis-url", forgetful.url, "--checkpoint-dir", place)
    assert status == 1
    assert found["disk of checkpoint-dir"].level == "error"
    assert found["disk of checkpoint-dir"].found.startswith(f"{place} ")
    assert any(why in found["disk of checkpoint-dir"].found for why in ("s3fs", "the store cannot be reached"))
    assert found["persistence"].level == "warning"
    assert "checkpoints are saved" not in found["persistence"].found


@pytest.mark.redis
def test_a_store_that_can_be_written_is_in_order_and_is_left_as_it_was(forgetful: EmbeddedRedis, look: Look) -> None:
    pytest.importorskip("fsspec")
    place = "memory://doctor/run"
    _, found = look("--redis-url", forgetful.url, "--checkpoint-dir", place, "--params", "1B")
    assert found["disk of checkpoint-dir"] == Finding("ok", "disk of checkpoint-dir", f"{place} can be written")
    assert found["persistence"].level == "ok"
    assert place_of(place).names() == frozenset()


@pytest.mark.redis
def test_a_folder_that_cannot_be_written_is_no_comfort_for_a_server_that_forgets(
    forgetful: EmbeddedRedis, look: Look, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    _, found = look("--redis-url", forgetful.url, "--checkpoint-dir", str(tmp_path / "taken"))
    assert (found["disk of checkpoint-dir"].level, found["persistence"].level) == ("error", "warning")
    _, found = look("--redis-url", forgetful.url, "--checkpoint-dir", str(tmp_path / "new"))
    assert (found["disk of checkpoint-dir"].level, found["persistence"].level) == ("ok", "ok")


def test_a_folder_that_is_not_there_yet_is_said_to_be_made_or_not_to_be(look: Look, tmp_path: Path) -> None:
    """It is tried by making it elsewhere in the same folder: a link to nothing, or a name too long, is not a folder."""
    _, found = look("--tape-dir", str(tmp_path / "new" / "tape"))
    assert found["disk of tape-dir"].level == "ok"
    assert "which will be created" in found["disk of tape-dir"].found
    (tmp_path / "there").mkdir()
    assert "will be created" not in look("--tape-dir", str(tmp_path / "there"))[1]["disk of tape-dir"].found
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("link", "link/below", "x" * 300):
        status, found = look("--tape-dir", str(tmp_path / name))
        assert (status, found["disk of tape-dir"].level) == (1, "error"), name
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}


@pytest.mark.redis
def test_what_a_run_has_saved_already_is_not_asked_of_the_disk_again(
    forgetful: EmbeddedRedis, look: Look, tmp_path: Path
) -> None:
    """Three checkpoints stay, and one is made: beside those of the run that are there only what will be added."""
    spec, state = samples.spec(), samples.run_state(started_unix_s=1.7e9)

    async def begin() -> None:
        async with open_bus(forgetful.url, "saved") as bus:
            await bus.propose_spec(encode(spec))
            await bus.write_state(state)

    asyncio.run(begin())
    one = 8 * 800  # bytes of a parameter, parameters

    def needed() -> str:
        arguments = ["--redis-url", forgetful.url, "--run", "saved", "--checkpoint-dir", str(tmp_path)]
        return look(*arguments)[1]["disk of checkpoint-dir"].found.rpartition(", ")[2]

    assert needed() == "25.6kB needed"
    for folder, files in (("another-20231114-221320-000000", 9), (run_folder("saved", state), 2)):
        for number in range(files):
            (tmp_path / folder / f"checkpoint-{number}").mkdir(parents=True)
            (tmp_path / folder / f"checkpoint-{number}" / "fragment").write_bytes(bytes(one))
    assert needed() == "12.8kB needed", "another run's are nobody's to remove"
    for number in range(2, 5):
        (tmp_path / run_folder("saved", state) / f"fragment-{number}").write_bytes(bytes(one))
    assert needed() == "6.4kB needed", "one is always being made"


def test_a_place_is_tried_alike_by_doctor_and_syncer(tmp_path: Path) -> None:
    """So that neither begins what the other would refuse."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="is not a folder") as refused:
        place_of(tmp_path / "taken" / "run").check()
    found = measure.look_at_folder("checkpoint-dir", tmp_path / "taken" / "run")
    assert found.problem == str(refused.value)
    assert found.problem in checks.folder(found).found
