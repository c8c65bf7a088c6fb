"""`diloco redis`: a Redis for parties on several machines, for as long as the command runs."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis as redis_py

from diloco import cli
from diloco.options import RedisProcess, reached_at
from diloco.pipeline.bus.acl import NOBODY
from diloco.pipeline.bus.embedded import EmbeddedRedis, free_port
from tests import HANGING_S
from tests.parties import environment, wait_for


@pytest.mark.redis
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_it_says_how_it_is_reached_and_serves_until_it_is_ended(number: int, status: int) -> None:
    """However it is ended, no server is left behind (SIGKILL: on Linux)."""
    port, password = free_port(), "letters-and-digits"
    command = [sys.executable, "-u", "-m", "diloco", "redis", "--redis-port", str(port)]
    given = environment(DILOCO_REDIS_PASSWORD=password)
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert f"export DILOCO_REDIS_URL=redis://:PASSWORD@127.0.0.1:{port}" in said
            assert password not in said
            client = redis_py.Redis(port=port, password=password)
            assert client.ping()
            with pytest.raises(redis_py.AuthenticationError):
                redis_py.Redis(port=port).ping()
            process.send_signal(number)
            assert process.wait(HANGING_S) == status
        finally:
            process.kill()

    def gone() -> bool:
        try:
            return not redis_py.Redis(port=port, password=password).ping()
        except redis_py.ConnectionError:
            return True

    wait_for(gone)


def test_it_listens_to_others_only_with_a_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DILOCO_REDIS_PASSWORD", raising=False)
    assert cli.main(["redis", "--redis-bind", "0.0.0.0"]) == 2  # noqa: S104
    assert "without a password: set DILOCO_REDIS_PASSWORD" in capsys.readouterr().err


@pytest.mark.redis
def test_a_file_of_users_is_taken_in_place_of_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has not logged in may do nothing, also from elsewhere; one that lets everybody in is refused."""
    monkeypatch.setenv("REDIS_VIEWER_PASSWORD", "letters-and-digits")
    assert cli.main(["acl", "--run", "my-run", "--passwords", str(tmp_path / "secrets.env")]) == 0
    users = tmp_path / "users.acl"
    users.write_text(capsys.readouterr().out)
    with EmbeddedRedis(port=0, users=users) as server:
        viewer = redis_py.Redis(port=server.port, username="viewer", password="letters-and-digits")  # noqa: S106
        if int(viewer.info()["redis_version"].split(".")[0]) < 7:
            pytest.skip("ACL selectors need Redis 7")
        assert viewer.get("diloco:{my-run}:spec") is None
        viewer.close()
        nobody = redis_py.Redis(port=server.port)
        with pytest.raises(redis_py.exceptions.AuthenticationError):
            nobody.get("diloco:{my-run}:spec")
        nobody.close()
        health = redis_py.Redis(port=server.port, username="health", password="")
        assert health.ping()
        with pytest.raises(redis_py.exceptions.NoPermissionError):
            health.get("diloco:{my-run}:spec")
        health.close()
    for opened in (
        "user anna on nopass ~* +@all",
        "user default on nopass ~* &* -@all +@all",
        "user default off on ~* &* +@all",
        "user default OFF ON NOPASS ~* &* +@all",
        "user default off",
        "user Default off ~* &* +@all",
        "user default on nopass sanitize-payload resetchannels -@all +ping",
        f"{NOBODY}\nuser health on nopass ~* +@all",
        "user default on nopass -@all +ping (~* +@all)",
        f"{NOBODY}\nuser anna on nopass ~* +@all",
        f"{NOBODY}\nuser default on nopass ~* +@all",
    ):
        users.write_text(opened + "\n")
        assert cli.main(["redis", "--redis-users", str(users)]) == 2
        assert "create it with `diloco acl`" in capsys.readouterr().err
    assert cli.main(["redis", "--redis-users", str(tmp_path / "nosuch")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.redis
@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("user anna on +nosuch", "line 3, user anna: Error in applying operation '+nosuch': Unknown command"),
        ("user anna on >eve hunter2 ~*", "line 3, user anna: Syntax error;"),
        ("user anna on ~*\nuser bert on ~a.b (+nosuch ~a.b)\nuser eve on +this", "line 4, user bert: Error in "),
        ("user anna on #aa ~*", "line 3, user anna: The password hash must be exactly 64 characters"),
        ("user anna on (~x +nosuch >hunter2)", "line 3, user anna: Error in applying operation '***'"),
        ("user anna on >pa(ss (+get ~x", "line 3, user anna: a parenthesis is not closed"),
        ("anna on +get", "line 3: should start with user keyword"),
        ("user anna on\nuser anna on", "Duplicate user 'anna' found"),
    ],
)
def test_a_rule_that_the_server_does_not_know_is_named_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, wrong: str
) -> None:
    """In one line, without the server's log."""
    users = tmp_path / "users.acl"
    users.write_text(f"{NOBODY}\n{lines}\n")
    assert cli.main(["redis", "--redis-port", str(free_port()), "--redis-users", str(users)]) == 2
    said = capsys.readouterr().err
    assert said.startswith((f"error: {users}, {wrong}", f"error: {users}: {wrong}"))
    assert said.count("\n") == 1
    assert "with `diloco acl`" in said
    assert "WARNING" not in said
    assert "eve" not in said
    assert "hunter2" not in said


def test_a_password_may_have_parentheses(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(f"{NOBODY}\nuser anna on >pa(ss ~* +get\nuser bert on >pass) ~* (+get ~x)\n")
    with EmbeddedRedis(users=users) as server:
        assert server.pid


def test_an_address_of_all_is_nobodys() -> None:
    """What is printed is for other machines to type."""
    assert reached_at(RedisProcess(redis_bind="0.0.0.0")) == "redis://<this machine>:6379"  # noqa: S104
    assert reached_at(RedisProcess(redis_bind="192.168.1.10", redis_port=7000)) == "redis://192.168.1.10:7000"
    assert reached_at(RedisProcess(redis_bind="::1")) == "redis://[::1]:6379"
