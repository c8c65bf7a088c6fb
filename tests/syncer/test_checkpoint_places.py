"""Checkpoints in object stores, on fsspec's memory and a server of S3 (moto): as in a folder, or it is said why not."""

import asyncio
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy
import structlog

from diloco import cli
from diloco.export import export
from diloco.pipeline.errors import UsageError
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco_studies.virtual.virtual_time import inline, run_virtual
from tests import samples
from tests.saving import save_checkpoint
from tests.syncer.test_checkpoint import MOMENTUM, THETA, globals_of, momenta_of, restore, trained
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "of-a-test",
    "AWS_SECRET_ACCESS_KEY": "of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server of S3 with one bucket, named `bucket`."""
    moto = pytest.importorskip("moto.server", reason="it comes with the extra `stores`")
    pytest.importorskip("s3fs", reason="it comes with the extra `stores`")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3 = pytest.importorskip("boto3")
    session = boto3.session.Session("of-a-test", "of-a-test", region_name="us-east-1")
    session.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    yield url
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that nothing lies at yet."""
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return f"memory://{secrets.token_hex(4)}/run"
    return on_s3(request, monkeypatch)


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return on_s3(request, monkeypatch)


def on_s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("endpoint"))
    forget_clients()
    request.addfinalizer(forget_clients)  # another module's test would go to this server, without credentials even
    return f"s3://bucket/{secrets.token_hex(4)}/run"


def forget_clients() -> None:
    """The environment is read when a client is made, and clients are kept."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def save(address: str, times: int = 1) -> list[str]:
    async def main() -> list[str]:
        spec = samples.spec()
        bus = await trained(spec)
        return [str(await save_checkpoint(bus, spec, place_of(address), inline)) for _ in range(times)]

    return run_virtual(main())


def test_what_was_saved_at_an_address_is_loaded_restored_and_exported(address: str, tmp_path: Path) -> None:
    """Bit for bit, from its own address or the place's."""
    (folder,) = save(address)
    for where in (folder, address):
        loaded = load_checkpoint(where)
        assert globals_of(loaded) == [values.tobytes() for values in THETA]
        assert momenta_of(loaded) == [MOMENTUM.tobytes(), None]
    again = restore(loaded, samples.spec(tokens=20_000))
    assert [head.version for head in run_virtual(again.read_heads([0, 1]))] == [3, 5]
    export(address, tmp_path / "model.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert found["a"].tobytes() == THETA[0].tobytes()
    assert found["c"].tobytes() == THETA[1][150:].tobytes()


def test_the_newest_three_are_kept_at_an_address(address: str) -> None:
    names = [folder.rpartition("/")[2] for folder in save(address, times=5)]
    assert place_of(address).names() == {"latest", *names[-3:]}
    assert load_checkpoint(address).folder_name == names[-1]


def test_one_without_its_manifest_is_not_taken_for_whole(address: str) -> None:
    """As a syncer leaves it that is killed before its last request."""
    first, second = save(address, times=2)
    name = second.rpartition("/")[2]
    place_of(address).below(name).remove("state.json")
    with pytest.raises(UsageError, match=f"choose one of {first.rpartition('/')[2]}"):
        load_checkpoint(address)
    load_checkpoint(first)


def test_a_file_that_breaks_off_is_not_there(address: str) -> None:
    """Nor is what was there before it replaced by half of it."""
    place = place_of(address)
    place.write("one", [b"whole"])

    def broken() -> Iterator[bytes]:
        yield bytes(12 * 2**20)
        raise OSError("the disk that it came from is gone")

    if address.startswith("s3"):
        with pytest.raises(OSError, match="gone"):
            place.write("one", broken())
        assert place.read("one") == b"whole"


def fails(place: str) -> tuple[str, list[str]]:
    """What the status says of a place that cannot be written, and what it says once it can."""

    async def main() -> tuple[str, list[str]]:
        world = VirtualRun(sync_spec(tokens=10**9), checkpoint_dir=place, checkpoint_every=5.0)
        service = world.start_syncer()
        learner = VirtualLearner("l", world).start()
        await world.until_version(3)
        version = min(await world.versions())
        with structlog.testing.capture_logs() as log:
            await asyncio.sleep(11.0)
        assert sum(line["event"] == "checkpoint_failed" for line in log) == 2, "it is tried again"
        assert min(await world.versions()) > version + 10, "merging goes on"
        (warning,) = (await service.status())["warnings"]
        boto3 = pytest.importorskip("boto3")
        if "absent" in place:
            boto3.client("s3").create_bucket(Bucket=place.split("/")[2])
            await asyncio.sleep(5.0)
        after = (await service.status())["warnings"]
        await learner.kill()
        return warning, after

    return run_virtual(main())


def test_a_bucket_that_is_absent_is_said_until_it_is_there(s3: str) -> None:
    """The run goes on, and the next try that finds it ends the warning."""
    address = f"s3://absent-{secrets.token_hex(4)}/run"
    warning, after = fails(address)
    assert f"could not be saved in {address}" in warning
    assert "no such bucket" in warning
    assert after == []


def test_a_store_that_is_away_is_said(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    forget_clients()
    warning, _ = fails(s3)
    assert "the network or the store cannot be reached" in warning
    with pytest.raises(UsageError, match="away"):
        load_checkpoint(s3)


def test_a_bucket_that_is_absent_is_said_before_anything_is_saved(s3: str) -> None:
    place = place_of("s3://nowhere/run")
    with pytest.raises(OSError, match="bucket"):
        place.check()
    place_of(s3).check()
    assert place_of(s3).names() == frozenset()


def test_missing_credentials_are_said(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They come from the environment, and from nowhere else."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    forget_clients()
    warning, _ = fails(s3)
    assert "there are no credentials in the environment" in warning


@pytest.mark.parametrize("address", ["nonsense://x", "sftp://host/x", "local://x", "simplecache::s3://bucket/x"])
def test_a_store_where_half_a_file_might_lie_is_refused_at_once(address: str) -> None:
    """fsspec knows some of these; with what to give in their place."""
    with pytest.raises(UsageError, match=rf"{address}: .*use a folder, s3://bucket/path or gs://"):
        place_of(address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3:/oops", r"two slashes, s3://oops, or a folder as \./s3:/oops"),
        ("s3:///oops/x", "names no bucket"),
        ("file:///tmp/x", "give only the folder, /tmp/x"),
        ("file:/tmp/x", "two slashes"),
        ("file://", "give only the folder, /path"),
    ],
)
def test_what_is_nearly_an_address_makes_no_folder_of_that_name(
    address: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before anything is done, by all who take a place."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        place_of(address)
    given = ["syncer", "--redis-url", "redis://127.0.0.1:9"]
    for command in ([*given, "--checkpoint-dir", address], [*given, "--resume", address], ["export", address, "x"]):
        assert cli.main(command) == 2
        assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert cli.main(["run", "--resume", address]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_have_the_name_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place_of("./s3:/oops").write("one", [b"here"])
    assert (tmp_path / "s3:" / "oops" / "one").read_bytes() == b"here"


def test_a_store_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"needs s3fs, which is not installed: pip install 'diloco\[s3\]'"):
        place_of("s3://bucket/x")
