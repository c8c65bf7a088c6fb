"""`diloco invite`, `join` and `revoke`: the word, and the user that it names, on a real Redis."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from diloco.cli import main
from diloco.invitations import PREFIX, Invitation, _address
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.redis.users import RedisUsers
from diloco.pipeline.errors import UsageError
from tests.pipeline.test_acl import as_user, rules_of

INVITATION = Invitation(url="rediss://invited-anna:secret@h:6380?ssl_ca_data=x", run="my-run", learner="anna")


def test_an_invitation_is_one_word_which_may_come_broken_into_lines() -> None:
    word = INVITATION.word()
    assert word.startswith(PREFIX)
    assert len(word.split()) == 1
    assert Invitation.read(f"  {word[:40]}\n {word[40:]}\n") == INVITATION


@pytest.mark.parametrize(
    "spoil", [lambda w: w[:-7], lambda w: w[:30] + "!" + w[31:], lambda w: w + "AAAA", lambda w: PREFIX]
)
def test_a_damaged_invitation_is_refused_without_being_shown(spoil: Any) -> None:
    with pytest.raises(UsageError, match="copy all of it") as refused:
        Invitation.read(spoil(INVITATION.word()))
    assert "secret" not in str(refused.value)
    assert INVITATION.word()[20:40] not in str(refused.value)


def test_what_is_no_invitation_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "anna"]) == 2
    assert "`diloco invite NAME` makes it" in capsys.readouterr().err


@pytest.fixture
def guests(redis_server: str) -> Iterator[str]:
    """URL of a Redis as its operator; users that are made on it go again."""
    admin: Any = redis_py.Redis.from_url(redis_server, protocol=2, decode_responses=True)
    if int(admin.info()["redis_version"].split(".")[0]) < 7:
        pytest.skip("ACL selectors need Redis 7")
    user = acl.operator()
    admin.execute_command("ACL", "SETUSER", user.name, "on", f">pw-{user.name}", *rules_of(user))
    yield as_user(redis_server, user.name)
    made = [name for name in admin.acl_users() if name.startswith(acl.INVITED)]
    admin.execute_command("ACL", "DELUSER", user.name, *made)
    admin.close()


def invited(guests: str, capsys: pytest.CaptureFixture[str], name: str, *more: str) -> Invitation:
    capsys.readouterr()
    assert main(["invite", name, "--redis-url", guests, "--at", "redis://127.0.0.1:1", *more]) == 0
    begin, word = capsys.readouterr().out.rsplit(" ", 1)
    assert begin == "diloco join"
    return Invitation.read(word)


@pytest.mark.redis
def test_the_operator_invites_who_may_publish_under_that_name_in_that_run_alone(
    guests: str, capsys: pytest.CaptureFixture[str], redis_server: str
) -> None:
    name, run = f"anna-{secrets.token_hex(3)}", f"r-{secrets.token_hex(3)}"
    invitation = invited(guests, capsys, name, "--run", run)
    assert (invitation.run, invitation.learner) == (run, name)
    user, password = invitation.url.removeprefix("redis://").partition("@")[0].split(":")
    assert user == f"{acl.INVITED}-{name}"
    guest: Any = redis_py.Redis.from_url(redis_server.replace("://", f"://{user}:{password}@", 1), protocol=2)
    guest.xadd(f"diloco:{{{run}:0}}:deltas:0:{name}", {"h": "x"})
    for key in (f"diloco:{{{run}:0}}:deltas:0:other", f"diloco:{{other:0}}:deltas:0:{name}"):
        with pytest.raises(redis_py.exceptions.NoPermissionError):
            guest.xadd(key, {"h": "x"})
    assert main(["runs", "delete", run, "--yes", "--redis-url", guests]) == 0
    assert main(["revoke", name, "--redis-url", guests]) == 0
    with pytest.raises((redis_py.exceptions.AuthenticationError, redis_py.exceptions.ConnectionError)):
        guest.ping()
    guest.close()
    assert main(["revoke", name, "--redis-url", guests]) == 2
    assert "nobody was invited as" in capsys.readouterr().err


@pytest.mark.redis
def test_nobody_is_invited_twice_under_one_name(guests: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A second invitation would end the first one's password without a word. One for no run is said to be so."""
    name = f"bert-{secrets.token_hex(3)}"
    assert main(["invite", name, "--redis-url", guests, "--at", "redis://h", "--run", "nosuch"]) == 0
    assert "there is no run 'nosuch' on this Redis yet" in capsys.readouterr().err
    assert main(["invite", name, "--redis-url", guests, "--at", "redis://h"]) == 2
    assert f"`diloco revoke {name}` first" in capsys.readouterr().err


@pytest.mark.redis
def test_who_may_make_no_users_is_told_who_may(guests: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"cleo-{secrets.token_hex(3)}"
    theirs = invited(guests, capsys, name).url.removeprefix("redis://").partition("@")[0]
    url = f"{guests.partition('://')[0]}://{theirs}@{guests.rpartition('@')[2]}"
    assert main(["invite", "dora", "--redis-url", url, "--at", "redis://h"]) == 2
    assert "does not permit this user" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "at", "told"),
    [
        ("redis://127.0.0.1:6379", None, "this machine alone"),
        ("unix:///tmp/r.sock", None, "--at is needed"),
        ("redis://h", "h:6380", "give rediss://HOST:PORT"),
        ("redis://h", "rediss://h:a", "give rediss://HOST:PORT"),
        ("redis://h", "rediss://me:pw@h", "an address alone"),
        ("redis://h", "rediss://h:6380/3", "an address alone"),
    ],
)
def test_an_address_that_nobody_could_use_is_refused_before_anything_is_made(
    url: str, at: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invite", "anna", "--redis-url", url, *(("--at", at) if at else ())]) == 2
    assert told in capsys.readouterr().err


def test_the_path_of_the_operators_socket_goes_to_nobody() -> None:
    assert _address("unix:///tmp/r.sock", "rediss://h:6380", "u", "p") == "rediss://u:p@h:6380"
    assert _address("unix:///tmp/r.sock?db=2", "rediss://h:6380/", "u", "p") == "rediss://u:p@h:6380/2"
    assert _address("redis://h/3", "rediss://there:6380", "u", "p") == "rediss://u:p@there:6380/3"


@pytest.mark.redis
def test_who_is_cut_off_until_redis_starts_again_is_said_so(
    guests: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ACL file, which it could not write, still has the learner."""
    name = f"emil-{secrets.token_hex(3)}"
    invited(guests, capsys, name)

    async def full(users: RedisUsers) -> str:
        return "failed"

    monkeypatch.setattr(RedisUsers, "keep", full)
    assert main(["revoke", name, "--redis-url", guests]) == 1
    assert "is cut off, but this Redis cannot write its ACL file" in capsys.readouterr().err
