"""`diloco invite`, `join` and `revoke`: the word, and the user that it names, on a real Redis."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from diloco.cli import main
from diloco.invitations import PREFIX, Invitation, _address, _invite
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.redis.nodes import Nodes
from diloco.pipeline.bus.redis.users import RedisUsers
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable, NotPermitted, UsageError
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.view.status_reader import read_status
from diloco_studies.strikes.failing.servers import Node
from tests import samples
from tests.backdoor import RedisBackdoor
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


def here(invitation: Invitation, server: str) -> str:
    """URL of a server as its learner."""
    return server.replace("://", f"://{invitation.url.removeprefix('redis://').partition('@')[0]}@", 1)


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
    assert "nobody is invited as" in capsys.readouterr().err


@pytest.mark.redis
def test_a_user_of_the_file_is_neither_revoked_nor_invited_but_named(
    guests: str, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes from the file of users, so it has to go there too; it is let in until then."""
    name = f"anna-{secrets.token_hex(3)}"
    user = f"learner-{name}"
    admin: Any = redis_py.Redis.from_url(redis_server, protocol=2, decode_responses=True)
    invited(guests, capsys, name)
    admin.execute_command("ACL", "SETUSER", user, "on", "nopass")
    try:
        assert main(["revoke", name, "--redis-url", guests]) == 1
        assert f"{name!r} is cut off, but it is {user!r} of the file of users" in capsys.readouterr().err
        assert main(["invite", name, "--redis-url", guests, "--at", "redis://h"]) == 2
        refused = capsys.readouterr().err
        assert f"{name!r} needs no invitation" in refused
        assert f"ACL DELUSER {user}" in refused
        assert f"invited-{name}" not in admin.acl_users()
        assert main(["revoke", name, "--redis-url", guests]) == 2
        said = capsys.readouterr().err
        assert user in admin.acl_users()
    finally:
        admin.execute_command("ACL", "DELUSER", user)
        admin.close()
    assert f"ACL DELUSER {user}" in said
    assert "file of users" in said
    assert main(["revoke", name, "--redis-url", guests]) == 2
    assert "DELUSER" not in capsys.readouterr().err


@pytest.mark.redis
def test_nobody_is_invited_twice_under_one_name(guests: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A second invitation would end the first one's password without a word. One for no run is said to be so."""
    name = f"bert-{secrets.token_hex(3)}"
    assert main(["invite", name, "--redis-url", guests, "--at", "redis://h", "--run", "nosuch"]) == 0
    assert "there is no run 'nosuch' on this Redis yet" in capsys.readouterr().err
    assert main(["invite", name, "--redis-url", guests, "--at", "redis://h"]) == 2
    assert f"`diloco revoke {name}` first" in capsys.readouterr().err


@pytest.mark.redis
def test_an_invitation_says_what_its_run_waits_for(
    guests: str, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A syncer that is here alone; then a first learner; a run that is under way needs no word; a finished one does."""
    run = f"r-{secrets.token_hex(3)}"

    def told(name: str) -> str:
        assert main(["invite", f"{name}-{run}", "--redis-url", guests, "--at", "rediss://h", "--run", run]) == 0
        said = capsys.readouterr().err.splitlines()
        return next((line for line in said if f"run {run!r}" in line), "")

    async def make(step: int) -> None:
        async with open_bus(redis_server, run) as bus:
            if step == 0:
                await bus.announce_syncer("0" * 16, "syncer-a", 60)
            elif step == 1:
                await bus.propose_spec(encode(samples.spec()))
            else:
                await bus.write_state(samples.run_state(phase=Phase.RUNNING if step == 2 else Phase.FINISHED))

    asyncio.run(make(0))
    assert told("a").startswith(f"note: run '{run}' has not begun, with 1 syncer and 0 learners there: waiting for")
    asyncio.run(make(1))
    assert told("b").startswith(f"note: run '{run}' has not begun, with 1 syncer and 0 learners there: ")
    asyncio.run(make(2))
    assert told("c") == ""
    asyncio.run(make(3))
    assert f"run '{run}' is finished: `diloco runs extend {run} --tokens NUMBER`" in told("d")
    admin: Any = redis_py.Redis.from_url(redis_server, protocol=2)
    admin.delete(*admin.keys(f"diloco:{{{run}*"))
    admin.close()


@pytest.mark.redis
def test_who_invites_to_a_run_that_its_own_user_was_not_made_for_is_refused(
    redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the operator of another run who has left out --run: whoever was invited would begin a run of its own."""
    admin: Any = redis_py.Redis.from_url(redis_server, protocol=2)
    if int(admin.info()["redis_version"].split(".")[0]) < 7:
        pytest.skip("ACL selectors need Redis 7")
    user, name = acl.operator("another-run"), f"ida-{secrets.token_hex(3)}"
    admin.execute_command("ACL", "SETUSER", user.name, "on", f">pw-{user.name}", *rules_of(user))
    try:
        url = as_user(redis_server, user.name)
        assert main(["invite", name, "--redis-url", url, "--at", "redis://h"]) == 2
        assert f"{acl.INVITED}-{name}" not in admin.execute_command("ACL", "USERS")
    finally:
        admin.execute_command("ACL", "DELUSER", user.name)
        admin.close()
    said = capsys.readouterr().err
    assert "this user may make learners of run 'another-run' alone, not of 'run'; give --run another-run" in said


@pytest.mark.redis
def test_of_two_invitations_under_one_name_at_a_time_each_lets_in_and_one_revocation_ends_both(
    guests: str, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either makes the user: no word is printed whose password does not work."""
    name, looked = f"gina-{secrets.token_hex(3)}", asyncio.Barrier(2)
    exists = RedisUsers.exists

    async def both_look_first(users: RedisUsers, user: str) -> bool:
        found = await exists(users, user)
        await looked.wait()
        return found

    async def twice() -> list[Any]:
        return await asyncio.gather(*(_invite(guests, "r", name, "redis://127.0.0.1:1") for _ in range(2)))

    with monkeypatch.context() as patched:
        patched.setattr(RedisUsers, "exists", both_look_first)
        words = {word for word, _ in asyncio.run(twice())}
    assert len(words) == 2
    urls = [here(Invitation.read(word), redis_server) for word in words]
    invited_ones: list[Any] = [redis_py.Redis.from_url(url, protocol=2) for url in urls]
    for one in invited_ones:
        assert one.ping()
    assert main(["revoke", name, "--redis-url", guests]) == 0
    for one in invited_ones:
        with pytest.raises((redis_py.exceptions.AuthenticationError, redis_py.exceptions.ConnectionError)):
            one.ping()
        one.close()


@pytest.mark.redis
def test_the_run_hears_whose_invitation_was_taken_back(
    guests: str, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its page would else call a dead learner what was cut off on purpose. A run that has not begun hears nothing."""
    run, begun, waits = f"r-{secrets.token_hex(3)}", f"ida-{secrets.token_hex(3)}", f"jo-{secrets.token_hex(3)}"
    invited(guests, capsys, waits, "--run", run)
    assert main(["revoke", waits, "--redis-url", guests]) == 0
    invited(guests, capsys, begun, "--run", run)

    async def hears() -> list[tuple[str, bool]]:
        async with open_bus(redis_server, run) as bus:
            assert await bus.read_events() == []
            await bus.propose_spec(encode(samples.spec()))
            assert await asyncio.to_thread(main, ["revoke", begun, "--redis-url", guests]) == 0
            assert [(event.name, event.who) for _, event in await bus.read_events()] == [("learner_revoked", begun)]
            for who in (begun, "kim"):
                await bus.put_back_report(samples.seen(who, age_s=20.0))
            return [(one["id"], one["revoked"]) for one in (await read_status(bus, LoopClock()))["learners"]]

    assert sorted(asyncio.run(hears())) == [(begun, True), ("kim", False)]
    RedisBackdoor(run, redis_server).free_memory()


@pytest.mark.redis
def test_a_run_that_cannot_be_told_keeps_nobody_in(
    guests: str, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever lies there in the place of the run's spec, which any learner could write first."""
    name, run = f"kim-{secrets.token_hex(3)}", f"r-{secrets.token_hex(3)}"
    invited(guests, capsys, name, "--run", run)
    backdoor = RedisBackdoor(run, redis_server)
    backdoor.client.set(f"diloco:{{{run}}}:spec", b"garbage")
    assert main(["revoke", name, "--redis-url", guests]) == 0
    assert main(["revoke", name, "--redis-url", guests]) == 2
    backdoor.free_memory()


@pytest.mark.redis
def test_an_invited_learner_is_told_what_its_invitation_is_for_and_that_it_may_have_been_revoked(
    guests: str, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under another's name it hears whose the invitation is, while it has joined that it is let in no more."""
    name, run = f"hans-{secrets.token_hex(3)}", f"r-{secrets.token_hex(3)}"
    url = here(invited(guests, capsys, name, "--run", run), redis_server)

    async def as_learner() -> None:
        async with open_bus(redis_server, run):  # loads the scripts
            pass
        async with open_bus(url, run) as bus:
            assert await bus.write_report(samples.report(name)) is None
            with pytest.raises(NotPermitted, match=f"is for learner '{name}' .* leave out --learner-id") as other:
                await bus.write_report(samples.report("other"))
            assert "diloco acl" not in str(other.value)
            await asyncio.to_thread(main, ["revoke", name, "--redis-url", guests])

            async def report_until_refused() -> None:
                while True:  # the connection's end may be noticed first
                    with suppress(BusUnavailable):
                        await bus.write_report(samples.report(name, number=2))

            told = f"refuses the login of user.*revoked the invitation of learner '{name}'"
            with pytest.raises(UsageError, match=told) as cut:
                await report_until_refused()
            assert f"`diloco invite {name}`" in str(cut.value)
            assert "set user and password" not in str(cut.value)

    asyncio.run(as_learner())
    backdoor = RedisBackdoor(run, redis_server)
    backdoor.free_memory()
    backdoor.client.close()


@pytest.mark.redis
def test_who_may_make_no_users_is_told_who_may(guests: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"cleo-{secrets.token_hex(3)}"
    theirs = invited(guests, capsys, name).url.removeprefix("redis://").partition("@")[0]
    url = f"{guests.partition('://')[0]}://{theirs}@{guests.rpartition('@')[2]}"
    assert main(["invite", "dora", "--redis-url", url, "--at", "redis://h"]) == 2
    assert "does not let user" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "at", "told"),
    [
        ("redis://127.0.0.1:6379", None, "this machine alone"),
        ("redis+sentinel://127.0.0.1/main", None, "--at redis+sentinel://127.0.0.1/main"),
        ("unix:///tmp/r.sock", None, "--at is needed"),
        ("redis://h", "h:6380", "give rediss://HOST:PORT"),
        ("redis://h", "rediss://h:a", "give rediss://HOST:PORT"),
        ("redis://h", "rediss://me:pw@h", "an address alone"),
        ("redis://h", "rediss://h:6380/3", "an address alone"),
        ("redis://h", "redis+sentinel://a,b,c", "names no service"),
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


@pytest.mark.redis
def test_a_server_that_did_not_answer_does_not_keep_the_others_from_remembering_a_revocation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again, they keep the learner out."""
    monkeypatch.setattr(Nodes, "replicas", down)
    address = ("127.0.0.1", free_port("127.0.0.1"))
    users = tmp_path / "users.acl"
    users.write_text("user default on nopass ~* &* +@all\n")
    server = Node("redis", tmp_path / "redis", [str(find_server()), str(tmp_path / "redis" / "redis.conf")], address)
    server.configure("aclfile " + str(users), 'save ""')
    url = f"redis://127.0.0.1:{address[1]}"
    try:
        server.start()
        until_up(server)
        assert main(["invite", "anna", "--redis-url", url, "--at", url]) == 0
        assert "invited-anna" in users.read_text()
        assert "127.0.0.1:1 did not answer and does not know the learner" in capsys.readouterr().err
        assert main(["revoke", "anna", "--redis-url", url]) == 1
        assert "is cut off, but 127.0.0.1:1 did not answer" in capsys.readouterr().err
        assert "invited-anna" not in users.read_text()
    finally:
        server.kill()


async def down(nodes: Nodes) -> list[HostPort]:
    """Replicas that are known, and away."""
    return [HostPort("127.0.0.1", 1)]


def until_up(server: Node) -> None:
    deadline = time.monotonic() + 20.0
    while True:
        try:
            assert server.ask("PING") == "PONG"
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return
