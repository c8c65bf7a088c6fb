"""`diloco runs` and `diloco finish`, on a real Redis with what runs leave there."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest

from diloco import runs
from diloco.cli import main
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.redis_streams import RedisBus, open_bus
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import FORMAT
from diloco.pipeline.payload.codec import decode, encode
from tests import samples
from tests.backdoor import RedisBackdoor
from tests.pipeline.conftest import as_user, known

pytestmark = pytest.mark.redis

T = TypeVar("T")


class Held:
    """A run on a Redis, of which parts are there."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"held-{secrets.token_hex(4)}"
        self.backdoor = RedisBackdoor(self.name, url)

    def on(self, call: Callable[[RedisBus], Awaitable[T]]) -> T:
        async def run() -> T:
            async with open_bus(self.url, self.name) as bus:
                return await call(bus)

        return asyncio.run(run())

    def begin(self, phase: Phase = Phase.RUNNING, tokens: int = 900) -> None:
        self.on(lambda bus: bus.propose_spec(encode(samples.spec())))
        self.on(lambda bus: bus.write_state(samples.run_state(phase=phase, tokens=tokens)))

    @property
    def state(self) -> RunState:
        state = self.on(lambda bus: bus.read_state())
        assert state is not None
        return state

    def diloco(self, *arguments: str) -> int:
        return main([*arguments, "--redis-url", self.url])


@pytest.fixture
def held(redis_server: str) -> Iterator[Held]:
    run = Held(redis_server)
    yield run
    run.backdoor.free_memory()
    run.backdoor.client.close()


def rows(held: Held, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert held.diloco("runs", "--json") == 0
    return {row["run"]: row for row in json.loads(capsys.readouterr().out)}


def test_the_list_says_of_each_run_how_far_it_is_who_is_there_and_what_it_takes(
    held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    held.begin()
    held.on(lambda bus: bus.announce_syncer("aa" * 8, "s0", 30))
    held.on(lambda bus: bus.write_report(samples.report("l0", tokens=900)))
    row = rows(held, capsys)[held.name]
    assert (row["phase"], row["tokens"], row["learners"], row["syncers"]) == ("waiting", 900, 1, 1)
    assert row["keys"] == len(held.backdoor.dump())
    assert row["bytes"] > 500
    assert row["quiet_s"] < 600
    assert held.diloco("runs") == 0
    assert held.name in capsys.readouterr().out


def test_a_run_that_cannot_be_read_is_listed_and_can_be_freed(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    held.on(lambda bus: bus.propose_spec(b"of another release"))
    assert rows(held, capsys)[held.name]["phase"] == "unreadable"
    assert held.diloco("runs", "delete", held.name, "--yes") == 0
    assert held.name not in rows(held, capsys)


def test_a_run_of_another_wire_format_is_told_of_with_both_numbers_and_what_works(
    held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is sent to a command that refuses that run."""
    theirs = msgpack.packb({**samples.spec().model_dump(), "format": FORMAT + 1, "of_that_build": 1})
    held.on(lambda bus: bus.propose_spec(theirs))
    both = f"wire format {FORMAT + 1}, but this build speaks {FORMAT} (`diloco --version`)"
    does = (
        f"; use a build that speaks {FORMAT + 1}, or stop all parties, update them, and continue from the run's checkp"
    )
    assert rows(held, capsys)[held.name]["reason"].startswith(both + does)
    assert held.diloco("runs") == 0
    assert f"run {held.name!r} is unreadable: {both}{does}" in capsys.readouterr().out
    held.on(lambda bus: bus.acquire_lease(0, "a", 60.0))
    assert held.diloco("runs", "delete", held.name, "--yes") == 2
    said = capsys.readouterr().err
    assert "1 syncer working on it" in said
    assert (
        f"end it first with `diloco finish --run {held.name}` with a build that can read it, or stop its parties"
        in said
    )
    watching = ("watch", "--run", held.name, "--http-port", "0")
    for command in (("finish", "--run", held.name), ("runs", "extend", held.name, "--tokens", "5M"), watching):
        assert held.diloco(*command) == 2
        assert capsys.readouterr().err.startswith(f"error: {both}{does}")


def test_deleting_a_run_leaves_no_key_of_it_and_all_of_others(
    held: Held, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = Held(redis_server)
    beside.name = held.name + ".longer"  # a pattern that is too wide would take it too
    for run in (held, beside):
        run.begin(Phase.FINISHED)
        run.on(lambda bus: bus.offer(samples.header()))
    before = rows(held, capsys)
    assert before[held.name]["keys"] == before[beside.name]["keys"] == 5
    assert held.diloco("runs", "delete", held.name, "--yes") == 0
    after = rows(held, capsys)
    assert held.name not in after
    assert after[beside.name]["keys"] == 5
    assert beside.diloco("runs", "delete", beside.name, "--yes") == 0
    assert set(rows(held, capsys)) == set(before) - {held.name, beside.name}


def test_a_run_at_work_is_not_deleted(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    held.begin()
    held.on(lambda bus: bus.write_report(samples.report("l0")))
    before = held.backdoor.dump()
    assert held.diloco("runs", "delete", held.name, "--yes") == 2
    assert f"1 learner working on it: end it first with `diloco finish --run {held.name}`" in capsys.readouterr().err
    assert held.backdoor.dump() == before


def test_nothing_is_deleted_unasked(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal nobody can be asked."""
    held.begin(Phase.FINISHED)
    assert held.diloco("runs", "delete", held.name) == 2
    assert "pass --yes to delete it" in capsys.readouterr().err
    assert held.state.phase is Phase.FINISHED


@pytest.mark.parametrize("command", [("runs", "delete", "--yes"), ("runs", "extend", "--tokens", "5M"), ("finish",)])
def test_a_run_that_is_not_there_is_named(
    held: Held, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    name = ("--run", "nobody") if command == ("finish",) else ("nobody",)
    assert held.diloco(*command, *name) == 1
    assert "'nobody'" in (told := capsys.readouterr().err)
    assert "`diloco runs`" in told


def test_a_finished_run_is_extended_to_a_larger_budget(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    held.begin(Phase.FINISHED, tokens=900)
    assert held.diloco("runs", "extend", held.name, "--tokens", "2k") == 0
    state = held.state
    assert (state.phase, state.tokens, state.budget_tokens) == (Phase.RUNNING, 900, 2000)
    assert state.reason == "extended from 900 tokens"
    spec = decode(Spec, held.on(lambda bus: bus.read_spec()) or b"")
    assert spec == samples.spec().model_copy(update={"sync": samples.spec().sync.model_copy(update={"tokens": 2000})})
    assert held.diloco("runs", "extend", held.name, "--tokens", "3k") == 2
    assert "is running: only a finished run can be extended" in capsys.readouterr().err


def test_an_extended_run_that_nobody_has_started_again_is_waiting(
    held: Held, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the list it says for whom, as `diloco status` does."""
    held.begin(Phase.FINISHED, tokens=900)

    async def first_versions(bus: RedisBus) -> None:
        for p, size in enumerate((600, 200)):
            await samples.commit(bus, p, 0, np.zeros(size, np.float32))
            await bus.release_lease(p, "ab" * 8)

    held.on(first_versions)
    assert held.diloco("runs", "extend", held.name, "--tokens", "2k") == 0
    row = rows(held, capsys)[held.name]
    assert (row["phase"], row["reason"]) == ("waiting", "waiting for a syncer and learners")
    monkeypatch.setenv("COLUMNS", "80")
    assert held.diloco("runs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"run {held.name!r} is waiting for a syncer and learners" in lines
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith("run '"))]
    assert len([line for line in table if line.strip()]) == 1 + len(rows(held, capsys))  # none takes two lines
    assert held.diloco("status", "--json", "--run", held.name) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["phase"], status["reason"]) == (row["phase"], row["reason"])


def test_the_operator_of_one_run_sees_that_there_are_others_and_frees_its_own(
    held: Held, redis_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another's run it learns that it is there, and how many keys it has."""
    other = Held(redis_server)
    for run in (held, other):
        run.begin(Phase.FINISHED)
    user = acl.operator(held.name)
    held.url = as_user(redis_server, user.name)
    with known(held.backdoor.client, [user]):
        found = rows(held, capsys)
        assert (found[held.name]["phase"], found[held.name]["tokens"]) == ("finished", 900)
        assert (found[other.name]["phase"], found[other.name]["tokens"]) == ("not permitted", 0)
        assert found[other.name]["keys"] == len(other.backdoor.dump())
        assert held.diloco("runs", "delete", other.name, "--yes") == 2
        assert "use the operator of that run" in capsys.readouterr().err
        assert other.state.phase is Phase.FINISHED
        assert held.diloco("runs", "delete", held.name, "--yes") == 0
    other.backdoor.client.close()


def test_an_extension_that_was_killed_between_its_two_writes_is_made_again(held: Held) -> None:
    held.begin(Phase.FINISHED)
    sync = samples.spec().sync.model_copy(update={"tokens": 5000})
    longer = encode(samples.spec().model_copy(update={"sync": sync}))
    assert held.on(lambda bus: bus.replace_spec(longer, encode(samples.spec())))
    assert held.diloco("runs", "extend", held.name, "--tokens", "5k") == 0
    assert held.state.phase is Phase.RUNNING


def test_a_budget_that_is_used_up_already_extends_nothing(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    held.begin(Phase.FINISHED, tokens=900)
    said = {"900": "has already trained 900", "-1": "whole number", "much": "whole number", "5000000T": "below 2^62"}
    for tokens, told in said.items():
        assert held.diloco("runs", "extend", held.name, "--tokens", tokens) == 2
        assert told in capsys.readouterr().err
    assert held.state.phase is Phase.FINISHED


def test_nothing_is_extended_while_a_syncer_is_there(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be about to write that the run is finished."""
    held.begin(Phase.FINISHED)
    held.on(lambda bus: bus.announce_syncer("aa" * 8, "s0", 30))
    assert held.diloco("runs", "extend", held.name, "--tokens", "5k") == 2
    assert "try again once they have exited" in capsys.readouterr().err


def test_finish_drains_a_run_and_says_what_it_waits_for(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    held.begin()
    assert held.diloco("finish", "--no-wait", "--run", held.name) == 0
    assert held.state.phase is Phase.DRAINING
    held.on(lambda bus: bus.write_state(samples.run_state(phase=Phase.FINISHED)))
    assert held.diloco("finish", "--run", held.name) == 0
    assert "is already finished" in capsys.readouterr().out


def test_finish_asks_again_when_redis_loses_that_it_was_asked(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    """As a failover to a replica that has not heard of it: nobody else asks."""
    held.begin()
    key, told = f"diloco:{{{held.name}}}:state", []
    before = held.backdoor.client.hgetall(key)

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            held.backdoor.client.hset(key, mapping=before)
        elif "again" in line:
            held.backdoor.client.hset(key, mapping=finished)

    held.on(lambda bus: bus.write_state(samples.run_state(phase=Phase.FINISHED)))
    finished = held.backdoor.client.hgetall(key)
    held.backdoor.client.hset(key, mapping=before)
    held.on(lambda bus: runs._finished(bus, held.name, asyncio.Event(), tell, True))
    assert told[0].startswith(f"run '{held.name}' was asked to finish, at ")
    assert any("was asked to finish again, since Redis had lost the request" in line for line in told)
    assert told[-1].startswith("finished: ")


def test_finish_leaves_a_run_alone_that_was_extended_meanwhile(held: Held, capsys: pytest.CaptureFixture[str]) -> None:
    """It had finished while nobody looked."""
    held.begin()
    key = f"diloco:{{{held.name}}}:state"
    before = held.backdoor.client.hgetall(key)
    held.on(lambda bus: bus.write_state(samples.run_state().model_copy(update={"budget_tokens": 10**9})))
    extended, told = held.backdoor.client.hgetall(key), []
    held.backdoor.client.hset(key, mapping=before)

    def tell(line: str) -> None:
        told.append(line)
        held.backdoor.client.hset(key, mapping=extended)

    with pytest.raises(DilocoError, match="has since been extended or restarted"):
        held.on(lambda bus: runs._finished(bus, held.name, asyncio.Event(), tell, True))
    assert held.state.phase is Phase.RUNNING
