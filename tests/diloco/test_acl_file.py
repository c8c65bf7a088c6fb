"""`diloco acl`: whose passwords, where they are kept, and that the file that is shipped is what it prints."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import redis as redis_py

from diloco import cli
from diloco.acl import MIN_PASSWORD_CHARS, make, template, variable
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import EmbeddedRedis, find_server
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import NotPermitted, UsageError
from tests import HANGING_S, samples
from tests.parties import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in acl.users(learners=["l0", "l1"]):
        monkeypatch.delenv(variable(user.name), raising=False)


def test_the_file_that_is_shipped_is_what_the_program_prints() -> None:
    """`diloco acl --template > deploy/users.acl` after a change of `pipeline/bus/acl.py`."""
    assert (ROOT / "deploy" / "users.acl").read_text() == template()


def test_passwords_are_made_once_and_kept_where_only_their_owner_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed holds hashes; asking again, with one more learner, adds what is missing and changes nothing."""
    file = tmp_path / "secrets.env"
    assert cli.main(["acl", "--run", "r", "--passwords", str(file)]) == 0
    printed = capsys.readouterr().out
    assert file.stat().st_mode & 0o777 == 0o600
    passwords = dict(line.split("=") for line in file.read_text().splitlines())
    assert set(passwords) == {
        f"REDIS_{user}_PASSWORD" for user in ("SYNCER", "LEARNER", "EVALUATOR", "VIEWER", "OPERATOR")
    }
    assert len(set(passwords.values())) == len(passwords)
    for password in passwords.values():
        assert password not in printed
        assert hashlib.sha256(password.encode()).hexdigest() in printed
    assert cli.main(["acl", "--run", "r", "--learner", "l-0", "--passwords", str(file)]) == 0
    again = dict(line.split("=") for line in file.read_text().splitlines())
    assert again.items() >= passwords.items()
    assert again.keys() - passwords.keys() == {"REDIS_LEARNER_L_0_PASSWORD"}
    assert set(printed.splitlines()) <= set(capsys.readouterr().out.splitlines())


def test_a_file_is_not_made_anew_without_the_users_that_servers_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that take over from each other would lock each other out."""
    file = tmp_path / "passwords.env"
    assert cli.main(["acl", "--run", "r", "--failover", "--passwords", str(file)]) == 0
    assert "user replica on #" in capsys.readouterr().out
    assert cli.main(["acl", "--run", "r", "--passwords", str(file)]) == 2
    assert re.search(r"REDIS_REPLICA_PASSWORD.*pass --failover", capsys.readouterr().err, re.DOTALL)


def test_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "from-the-environment"  # noqa: S105  # made up
    monkeypatch.setenv("REDIS_SYNCER_PASSWORD", secret)
    file = tmp_path / "secrets.env"
    assert hashlib.sha256(secret.encode()).hexdigest() in make("r", [], file)
    assert "SYNCER" not in file.read_text()


def test_what_is_wrong_with_passwords_or_names_is_said_without_showing_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"REDIS_SYNCER_PASSWORD.*--passwords"):
        make("r", [], None)
    file = tmp_path / "secrets.env"
    monkeypatch.setenv("REDIS_VIEWER_PASSWORD", "x" * (MIN_PASSWORD_CHARS - 1))
    with pytest.raises(UsageError, match="REDIS_VIEWER_PASSWORD is shorter") as refused:
        make("r", [], file)
    assert "xxx" not in str(refused.value)
    for name in ("REDIS_VIEWER_PASSWORD", "REDIS_SYNCER_PASSWORD"):
        monkeypatch.setenv(name, "x" * MIN_PASSWORD_CHARS)
    with pytest.raises(UsageError, match="the same password"):
        make("r", [], file)
    assert not file.exists()
    for learners in (["l*"], ["a:b"], [""], ["a", "a"], ["a.b", "a-b"]):
        with pytest.raises(UsageError):
            make("r", learners, file)
    for run in ("r*", "a}b", ""):
        with pytest.raises(UsageError, match="cannot be a name"):
            make(run, [], file)
    with pytest.raises(UsageError, match="--learner a is given twice"):
        make("r", ["a", "b", "a"], file)
    tmp_path.chmod(0o755)
    for path, found in (
        (tmp_path, "a folder, not a file"),
        (Path("/dev/null"), "a device or pipe, not a file"),
        (tmp_path / "nothing" / "passwords", "nothing does not exist"),
    ):
        with pytest.raises(UsageError, match=found):
            make("r", [], path)
    file.touch(mode=0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        make("r", [], file)


def test_no_password_is_taken_from_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Every user of a machine can read a process's arguments."""
    assert cli.main(["acl", "--password", "x" * MIN_PASSWORD_CHARS]) == 2
    for command in ("syncer", "run", "learner", "evaluator", "status"):
        assert cli.main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "--http-token" not in shown
        assert "--redis-password" not in shown


@pytest.fixture
def redis_7(redis_binary: Path | None) -> Path:
    """A server that knows selectors."""
    binary = redis_binary or find_server()
    version = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=True, timeout=HANGING_S)
    if int(version.stdout.partition("v=")[2].split(".")[0]) < 7:
        pytest.skip(f"ACL selectors need Redis 7, this is {version.stdout}")
    return binary


@pytest.mark.redis
@pytest.mark.parametrize("name", ["redis-server", ""])
def test_a_server_with_users_reads_all_of_its_append_only_file_again(tmp_path: Path, name: str) -> None:
    """Redis 7.0 threw away what scripts had written, which it reads again as a user who was not allowed to."""
    found = shutil.which(name) if name else find_server()
    if found is None:
        pytest.skip(f"there is no {name} on PATH")
    users = tmp_path / "users.acl"
    users.write_text(make("r", [], tmp_path / "secrets.env"))
    password = (tmp_path / "secrets.env").read_text().partition("REDIS_SYNCER_PASSWORD=")[2].split()[0]
    with EmbeddedRedis(appendonly=True, fsync="always", port=0, users=users, binary=Path(found)) as server:
        client = redis_py.Redis(port=server.port, username="syncer", password=password)
        for key, value in (("state", "this"), ("spec", "that")):
            client.set(f"diloco:{{r}}:{key}", value)
        script = client.script_load("redis.call('SET', KEYS[1], 'a'); return redis.call('SET', KEYS[2], 'b')")
        client.evalsha(script, 2, "diloco:{r}:state", "diloco:{r}:spec")
        server.kill()
        server.start()
        wait_for(server.answers)
        assert [client.get(f"diloco:{{r}}:{key}") for key in ("state", "spec")] == [b"a", b"b"]
        client.close()


@pytest.mark.redis
async def test_a_server_takes_the_file_and_knows_its_users(redis_7: Path, tmp_path: Path) -> None:
    """From the first moment on: nobody is let in without a password but to ask whether it is there."""
    (tmp_path / "users.acl").write_text(make("r", ["l0"], tmp_path / "secrets.env"))
    passwords = dict(line.split("=") for line in (tmp_path / "secrets.env").read_text().splitlines())
    with EmbeddedRedis(port=0, users=tmp_path / "users.acl", binary=redis_7) as server:
        with redis_py.Redis(port=server.port, protocol=2, username="health", password="") as stranger:
            assert stranger.ping()
        with pytest.raises(UsageError, match="requires a login; set user and password in DILOCO_REDIS_URL"):
            await connect(f"redis://127.0.0.1:{server.port}", "r")
        syncer, learner = [
            await connect(f"redis://{user}:{passwords[variable(user)]}@127.0.0.1:{server.port}", "r")
            for user in ("syncer", "learner-l0")
        ]
        assert await learner.offer(samples.header("l0"))
        assert len(await syncer.read_offers(0)) == 1
        with pytest.raises(NotPermitted):
            await learner.acquire_lease(0, "aa" * 8, 1)
        await learner.close()
        await syncer.close()


def test_the_users_of_servers_that_take_over_are_those_of_the_compose_files(tmp_path: Path) -> None:
    shipped = (ROOT / "deploy" / "failover.acl").read_text().splitlines()[1:]
    assert shipped == [user.line(f"{{{variable(user.name)}}}") for user in acl.servers()]
    made = make("run", [], tmp_path / "secrets.env", failover=True)
    assert [line.split()[1] for line in made.splitlines()][-3:] == ["replica", "sentinel", "setup"]
