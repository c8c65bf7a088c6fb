"""`diloco doctor`: planted faults are each named with what to do, and a healthy set-up has none of them."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis as redis_py

from diloco import cli
from diloco.doctor import checks, measure
from diloco.doctor.facts import Folder, Link, Machine, Run
from diloco.doctor.start import wrong_for_run
from diloco.pipeline.bus import acl
from diloco.pipeline.bus import server as of_server
from diloco.pipeline.bus.embedded import EmbeddedRedis, free_port
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.redis.inspection import examine
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.bus.schema import MergedBases
from diloco.pipeline.bus.server import Address, Server
from diloco.pipeline.errors import UsageError
from diloco.pipeline.findings import Finding
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.outer_cost import Speed
from diloco.pipeline.party_memory import LEARNER_PROCESS_BYTES
from diloco.pipeline.payload.codec import encode
from diloco.pipeline.process import cores as cores_module
from diloco.pipeline.process.cgroup import Limits
from diloco.pipeline.process.cores import usable_cores
from diloco.pipeline.redis_memory import redis_bytes
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.units import as_bytes
from diloco.syncer.times import TIMES
from diloco_studies.strikes.proxy import Proxy
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, run_virtual
from tests import samples
from tests.parties import python
from tests.pipeline.conftest import as_user, known, rules_of

PASSWORD = "letters-and-digits"  # noqa: S105  # of a server that lives for a test


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, own_environment: None) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture(scope="module")
def healthy(redis_binary: Path | None) -> Iterator[EmbeddedRedis]:
    """A server as a run would want it."""
    with EmbeddedRedis(binary=redis_binary, appendonly=True, port=0) as server:
        yield server


@pytest.fixture
def client(healthy: EmbeddedRedis) -> Iterator[Any]:
    with redis_py.Redis(unix_socket_path=str(healthy.socket_path)) as client:
        yield client


Look = Callable[..., tuple[int, list[Finding]]]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Exit status and findings of the command."""

    def run(*arguments: str) -> tuple[int, list[Finding]]:
        status = cli.main(["doctor", "--json", *arguments])
        return status, [Finding(**one) for one in json.loads(capsys.readouterr().out)]

    return run


def bad(findings: list[Finding]) -> dict[str, Finding]:
    return {one.about: one for one in findings if one.level != "ok"}


# --- all is well ----------------------------------------------------------------------------------------


@pytest.mark.redis
def test_a_healthy_set_up_has_no_finding(healthy: EmbeddedRedis, look: Look, client: Any, tmp_path: Path) -> None:
    """Of no kind; and what each fault below would be found under was looked at."""
    folders = ["--checkpoint-dir", str(tmp_path / "new"), "--state-dir", str(tmp_path)]
    with config(client, maxmemory=2**30):
        status, findings = look("--redis-url", healthy.url, "--model", "nano", "--step-time", "1s", *folders)
    assert bad(findings) == {}
    assert status == 0
    assert {one.about for one in findings} >= {
        *("software", "threads", "BLAS", "disk of checkpoint-dir", "disk of state-dir"),
        *("Redis version", "Redis role", "eviction", "Redis fill", "Redis disk", "persistence", "Redis memory"),
        *("transport", "rights", "clock", "distance", "line", "link and run", "merges", "plan"),
    }
    assert not (tmp_path / "new").exists()


@pytest.mark.redis
def test_nothing_is_left_on_the_server_and_a_run_there_is_as_it_was(
    healthy: EmbeddedRedis, look: Look, client: Any
) -> None:
    """Every key has the bytes that it had, and there are no others one."""

    async def begin() -> None:
        async with open_bus(healthy.url, "seen") as bus:
            await bus.propose_spec(encode(samples.spec()))
            await bus.write_report(samples.report("anna", step_s=2.0, step_s_median=2.0))

    asyncio.run(begin())
    before = {key: client.dump(key) for key in client.scan_iter()}
    status, findings = look("--redis-url", healthy.url, "--run", "seen")
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    assert before
    assert status == 0
    assert "quorum" in {one.about for one in findings}
    (plan,) = [one for one in findings if one.about == "plan"]
    assert plan.found.startswith("the run of")
    assert "link and run" in {one.about for one in findings}  # its learner has said how long a step takes
    status, findings = look("--redis-url", healthy.url, "--run", "seen", "--params", "1B")
    assert "seen is in progress there, so it is checked" in bad(findings)["run"].found
    client.flushall()


@pytest.mark.redis
def test_a_run_of_another_release_is_named_beside_all_else(healthy: EmbeddedRedis, look: Look, client: Any) -> None:
    async def begin() -> None:
        async with open_bus(healthy.url, "newer") as bus:
            await bus.propose_spec(b"of another release")

    asyncio.run(begin())
    status, findings = look("--redis-url", healthy.url, "--run", "newer")
    client.flushall()
    assert status == 1
    assert set(bad(findings)) == {"run"}
    assert [one.level for one in findings if one.about == "run"] == ["error"]
    assert {"line", "clock", "threads"} <= {one.about for one in findings}


@pytest.mark.redis
def test_a_finished_run_waits_for_nobody(healthy: EmbeddedRedis, look: Look, client: Any) -> None:
    async def end() -> None:
        async with open_bus(healthy.url, "over") as bus:
            await bus.propose_spec(encode(samples.spec()))
            await bus.write_state(samples.run_state(phase=Phase.FINISHED))

    asyncio.run(end())
    status, findings = look("--redis-url", healthy.url, "--run", "over")
    client.flushall()
    assert status == 0
    found = bad(findings)["run"]
    assert "'over' is finished" in found.found
    assert "`diloco runs extend over --tokens NUMBER`" in found.remedy
    assert "quorum" not in {one.about for one in findings}


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (None, "a run of 250k parameters, 1 learner, has "),
        (1, "the run of 250k parameters, 1 learner live, has "),
        (0, "the run of 250k parameters, 1 learner (none is live yet), has "),
    ],
)
def test_a_plan_says_for_how_many_learners_it_is(live: int | None, said: str) -> None:
    run = Run("r", SyncSettings().sync_spec(), 0.25e6, 1, None, (), live=live)
    site = checks.site_of(run, machine(Speed(1e10, 8)), None)
    assert checks.plan(run, site).found.startswith(said)


def test_settings_with_which_the_link_is_too_slow_do_not_read_as_a_solution() -> None:
    run = Run("r", SyncSettings().sync_spec(), 1e9, 2, 1.0, (1e9,) * 8)
    for rate, fits in ((1e9, True), (1e5, False)):
        site = checks.site_of(run, machine(Speed(1e10, 8)), Link(0.001, rate, rate, 2**20))
        assert ("too slow" in checks.plan(run, site).found) is not fits
        assert ("no codec or H is enough" in checks.load(run, site).remedy) is not fits
        assert ("busy (too slow)" in checks.needs(run, site).lines()) is not fits


def test_a_quorum_that_is_not_there_is_named() -> None:
    assert checks.quorum(2, 2).level == "ok"
    assert checks.quorum(1, 2) == checks.warning(
        "quorum",
        "a merge needs 2 learners; 1 live: nothing is merged",
        "start the missing ones, with the run's name",
    )


def test_a_user_is_judged_by_what_this_machine_is_to_be() -> None:
    """Whatever it is named for: a viewer cannot be a learner."""
    viewer = {"syncer": "XADD", "learner": "XADD", "evaluator": "XADD", "viewer": ""}
    address = Address("h:6379", False, True, True, "viewer")
    assert checks.rights(address, viewer, "run").level == "ok"
    assert checks.rights(address, viewer, "run", party="viewer").level == "ok"
    found = checks.rights(address, viewer, "run", party="learner")
    assert (found.level, "cannot be a learner of run 'run': XADD" in found.found) == ("error", True)
    assert "diloco acl --run run --passwords FILE > new-users.acl" in found.remedy


@pytest.mark.redis
def test_it_needs_no_torch(healthy: EmbeddedRedis) -> None:
    """On a syncer's machine, where there is none: it says so, and that a learner would need it."""
    block = "import sys; sys.modules['torch'] = None; from diloco import cli; sys.exit(cli.main(sys.argv[1:]))"
    hide = "import diloco.doctor.measure as m; m.PACKAGES = m.PACKAGES[:-1]; "
    for party, status in (("syncer", 0), ("learner", 1)):
        arguments = ["doctor", "--redis-url", healthy.url, "--model", "nano", "--as", party]
        done = python("-c", block.replace("from diloco", hide + "from diloco", 1), *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        assert "no torch" in done.stdout
        assert ("pip install 'diloco[learner]'" in done.stdout) is (party == "learner")


# --- the server's settings ----------------------------------------------------------------------------


@contextmanager
def config(client: Any, **values: Any) -> Iterator[None]:
    before = {name: client.config_get(name)[name] for name in (one.replace("_", "-") for one in values)}
    for name, value in values.items():
        client.config_set(name.replace("_", "-"), value)
    try:
        yield
    finally:
        for name, value in reversed(before.items()):
            client.config_set(name, value)


@pytest.mark.redis
def test_a_memory_too_small_for_the_model_is_an_error_and_a_smaller_model_is_none(
    healthy: EmbeddedRedis, look: Look, client: Any
) -> None:
    """By the figure that `diloco plan` has, and a syncer refuses by."""
    with config(client, maxmemory=2**30):
        status, findings = look("--redis-url", healthy.url, "--params", "1B", "--as", "learner")
        assert "Redis memory" not in bad(look("--redis-url", healthy.url, "--params", "10M")[1])
    found = bad(findings)["Redis memory"]
    assert status == 1
    assert found.level == "error"
    assert "maxmemory 1024mb" in found.found
    mb = int(re.search(r"CONFIG SET maxmemory ([0-9]+)mb", found.remedy)[1])
    with config(client, maxmemory=mb * 2**20):
        assert "Redis memory" not in bad(look("--redis-url", healthy.url, "--params", "1B", "--as", "learner")[1])
    with config(client, maxmemory=(mb - 1) * 2**20):
        assert "Redis memory" in bad(look("--redis-url", healthy.url, "--params", "1B", "--as", "learner")[1])


def test_a_server_of_ours_is_not_told_to_keep_what_it_drops_at_its_end() -> None:
    """`diloco redis` cannot keep anything, so an append-only file is no remedy there; in another one it is."""
    theirs = Server.of(INFO | {"aof_enabled": 0, "config_file": "/etc/redis/redis.conf"}, {"save": ""})
    found = of_server.persistence(theirs)
    assert found.found.startswith("no append-only file: a restart loses everything")
    assert found.remedy.startswith(
        'redis-cli -u "$DILOCO_REDIS_URL" CONFIG SET appendonly yes, and set it in its configuration too ('
    )
    found = of_server.persistence(Server.of(INFO | {"aof_enabled": 0, "config_file": "/tmp/diloco_redis_x/redis.conf"}))
    assert "`diloco redis`" in found.found
    assert "CONFIG SET" not in found.remedy


@pytest.mark.redis
def test_a_run_whose_syncers_save_checkpoints_outlives_its_server(
    healthy: EmbeddedRedis, look: Look, client: Any
) -> None:
    """Whether they are on this machine or not: the run's state says so."""

    async def save(checkpoint: str) -> None:
        async with open_bus(healthy.url, "saved") as bus:
            await bus.propose_spec(encode(samples.spec(quorum=1)))
            await bus.write_report(samples.report("anna"))
            await bus.write_state(samples.run_state(checkpoint=checkpoint))

    with config(client, appendonly="no"):
        found = []
        for checkpoint in ("", "checkpoint-12-0123abcd"):
            asyncio.run(save(checkpoint))
            found.append("persistence" in bad(look("--redis-url", healthy.url, "--run", "saved")[1]))
            client.flushall()
    assert found == [True, False]


def test_a_machine_has_twice_what_its_redis_holds_wherever_one_is_asked_for() -> None:
    """While an append-only file is rewritten, what a round replaces is there twice."""
    found = of_server.room(0, 1e9, SyncSettings().sync_spec(), machine_bytes=2**30)
    needed = redis_bytes(1e9, of_server.MIN_LEARNERS, "bf16")
    assert found.remedy == f"run it on a machine with {as_bytes(2 * needed)} of memory"
    assert "twice its memory" in of_server.persistence(Server.of(INFO | {"aof_enabled": 0})).remedy


def test_what_a_server_holds_already_is_not_free_for_a_planned_run() -> None:
    """For a live run it is, which holds it itself; and an empty server holds a little, too."""
    info = INFO | {"maxmemory": 200 * 2**20}
    run = Run("r", SyncSettings().sync_spec(), 0.25e6, 2, None, ())
    full = Server.of(info | {"used_memory": 169 * 2**20})
    found = checks.memory([full], run)
    assert (found.level, "of which other data take 169mb" in found.found) == ("error", True)
    needed = int(re.search(r"CONFIG SET maxmemory ([0-9]+)mb", found.remedy)[1])  # type: ignore[index]
    assert checks.memory([replace(full, maxmemory_bytes=needed * 2**20)], run).level == "ok"
    assert checks.memory([full], replace(run, live=2)).level == "ok"
    alone = checks.memory([Server.of(info | {"used_memory": 2**20})], run).found
    assert "other data" not in alone


def test_of_several_that_ask_for_a_larger_maxmemory_the_largest_is_asked_for() -> None:
    """Once it is set none of them says anything; what else they say stays."""
    small, large = of_server.fill(95 * 2**20, 100 * 2**20), of_server.room(2**30, 1e9, SyncSettings().sync_spec())
    other = checks.warning("threads", "8 on 4", "--threads 1")
    said = checks.one_maxmemory([small, other, large])
    assert small.remedy != said[0].remedy
    assert said[1:] == [other, large]
    figures = {figure for one in said for figure in re.findall(r"maxmemory (?:to )?([0-9]+)mb", one.remedy)}
    assert figures == {re.search(r"SET maxmemory ([0-9]+)mb", large.remedy)[1]}
    assert "GB" not in str([*said[0], *said[2]])
    assert checks.one_maxmemory([other]) == [other]


INFO = {"redis_version": "7.2.4", "maxmemory": 0, "used_memory": 10**6, "aof_enabled": 1, "role": "master"}


def test_an_old_server_is_named_and_one_without_users_is_said() -> None:
    """The bus refuses the first one by the same judgement."""
    found = of_server.version(Server.of(INFO | {"redis_version": "6.0.16"}))
    assert (found.level, found.remedy) == ("error", "install 6.2 or newer")
    assert "6.0.16" in found.found
    assert of_server.version(Server.of(INFO | {"redis_version": "6.2.14"})).level == "ok"
    assert "`diloco acl`" in of_server.version(Server.of(INFO | {"redis_version": "6.2.14"})).found
    assert of_server.version(Server.of(INFO)) == Finding("ok", "Redis version", "version 7.2.4")


@pytest.mark.redis
def test_a_replica_is_named(healthy: EmbeddedRedis, look: Look, client: Any) -> None:
    """One whose primary cannot be reached refuses writes all the same."""
    client.replicaof("127.0.0.1", free_port())
    try:
        status, findings = look("--redis-url", healthy.url)
    finally:
        client.replicaof("NO", "ONE")
    assert status == 1
    found = bad(findings)["Redis role"]
    assert "replica" in found.found
    assert "primary" in found.remedy


def test_a_disk_that_the_server_cannot_write_to_is_named() -> None:
    assert of_server.disk(Server.of(INFO | {"aof_last_write_status": "err"})).level == "warning"
    assert {one.level for one in checks.server([Server.of(INFO)])} == {"ok"}


def test_a_cluster_whose_primaries_have_no_replicas_is_said_by_the_doctor_and_a_single_one_by_all() -> None:
    """The first is meant so, and a status need not warn of it for as long as the run goes on."""
    node = Server.of(INFO | {"cluster_enabled": 1}, at="10.0.0.1:7000")
    found = of_server.replaced(node)
    assert (found.level, "add-node NEW_HOST:PORT 10.0.0.1:7000" in found.remedy) == ("warning", True)
    assert "--user setup --pass PASSWORD" in found.remedy
    assert "--tls --cacert" in found.remedy
    assert not list(of_server.warnings([node, node]))
    other = Server.of(INFO | {"cluster_enabled": 1, "connected_slaves": 1}, at="10.0.0.2:7000")
    (said,) = of_server.warnings([node, other])
    assert said.startswith("10.0.0.1:7000: this primary has no replica")


@pytest.mark.parametrize(("replicas", "waits", "last"), [(1, True, True), (1, False, None), (2, True, None)])
def test_a_replica_that_sentinels_miss_is_named_with_what_the_next_loss_does(
    replicas: int, waits: bool, last: bool | None
) -> None:
    """By doctor and status, as long as the primary takes writes; with all of them there, nothing is said."""
    good = {"min_slaves_good_slaves": replicas} if waits else {}
    node = Server.of(INFO | {"connected_slaves": replicas} | good, known_replicas=2)
    said = [one.found for one in checks.server([node]) if one.about == "replicas" and one.level == "warning"]
    assert len(said) == len(list(of_server.warnings([node]))) == (replicas < 2 or not waits)
    assert any("once one more server is lost, all writes are refused" in one for one in said) is bool(last)


@pytest.mark.parametrize(
    ("limits", "backlog", "said"),
    [
        ("normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60", 2**20, " 64mb behind .* missed 1mb"),
        ("normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60", 2**28, " 64mb behind"),
        ("normal 0 0 0 replica 0 0 0 pubsub 33554432 8388608 60", 10 * 2**20, "missed 10mb"),
        ("normal 0 0 0 slave 0 0 0 pubsub 33554432 8388608 60", 2**28, None),
        ("normal 0 0 0 slave 4294967296 2147483648 60 pubsub 33554432 8388608 60", 2**28, None),
        (None, 2**28, None),
    ],
)
def test_a_server_whose_replicas_may_not_fall_behind_by_payloads_is_named(
    limits: str | None, backlog: int, said: str | None
) -> None:
    """As any is that nobody has set; but only where there are replicas."""
    config = {} if limits is None else {"client-output-buffer-limit": limits}
    for replicas in (0, 1):
        info = INFO | {"connected_slaves": replicas, "repl_backlog_size": backlog, "min_slaves_good_slaves": replicas}
        found = [one for one in checks.server([Server.of(info, config)]) if one.about == "buffers of replicas"]
        assert len(found) == replicas
        for one in found:
            assert one.level == ("warning" if said else "ok")
            assert re.search(said or "not known|to fall behind", one.found)
            assert ("CONFIG SET client-output-buffer-limit 'replica 0 0 0'" in one.remedy) is bool(said)


def test_what_replicas_may_have_missed_takes_its_part_of_the_memory() -> None:
    """Before it is there, or a small server would be full only minutes later; also while the replica is away."""
    info = INFO | {"maxmemory": 200 * 2**20, "used_memory": 50 * 2**20, "repl_backlog_size": 256 * 2**20}
    run = Run("r", SyncSettings().sync_spec(), 0.25e6, 2, None, ())
    assert checks.memory([Server.of(info)], run).level == "ok"
    replicated = [Server.of(info | {"connected_slaves": 1}), Server.of(info | {"repl_backlog_active": 1})]
    for server in (*replicated, Server.of(info, known_replicas=1)):
        found = checks.memory([server], run)
        assert found.level == "error"
        assert "repl-backlog-size of 256mb" in found.found
        needed = int(re.search(r"CONFIG SET maxmemory ([0-9]+)mb", found.remedy)[1])  # type: ignore[index]
        assert checks.memory([replace(server, maxmemory_bytes=needed * 2**20)], run).level == "ok"


@pytest.mark.parametrize(("takes_writes", "live"), [(True, 0), (False, 1)])
def test_who_cannot_report_since_redis_refuses_writes_is_not_missed(takes_writes: bool, live: int) -> None:
    async def main() -> Run | None:
        bus = MemoryBus("r", VirtualClock())
        await bus.propose_spec(encode(samples.spec()))
        await bus.write_report(samples.report())
        await asyncio.sleep(30)
        bus.info = AsyncMock(return_value=replace(await bus.info(), takes_writes=takes_writes))  # type: ignore[method-assign]
        return await measure.read_run(bus, None)

    found = run_virtual(main())
    assert found is not None
    assert found.live == live


# --- who may come -------------------------------------------------------------------------------------


@pytest.mark.redis
def test_a_wrong_password_is_named_without_showing_it(look: Look, redis_binary: Path | None) -> None:
    with EmbeddedRedis(binary=redis_binary, appendonly=True, port=0, password=PASSWORD) as server:
        url = f"redis://:{{}}@127.0.0.1:{server.port}"
        status, findings = look("--redis-url", url.format("hunter2"))
        assert bad(look("--redis-url", url.format(PASSWORD))[1]) == {}
    found = bad(findings)["Redis"]
    assert status == 1
    assert "refuses the login: name or password is wrong" in found.found
    assert "hunter2" not in str(findings)
    assert found.remedy.startswith("set user and password in DILOCO_REDIS_URL")


@pytest.mark.redis
def test_a_learner_whose_user_may_run_no_script_is_named_and_each_partys_own_user_is_not(
    healthy: EmbeddedRedis, look: Look, client: Any
) -> None:
    """What is missing is said in the server's words; users of `diloco acl` may be what they are called."""
    users = {user.name: user for user in acl.users("run", ["anna", "bert"])}
    less = " ".join(rule for rule in rules_of(users["learner-bert"]) if "evalsha" not in rule)
    users["learner-bert"] = acl.User("learner-bert", less)
    found, lines = {}, {}
    with known(client, users.values()):
        for name in users:
            status, findings = look("--redis-url", as_user(f"redis://127.0.0.1:{healthy.port}", name))
            (found[name],) = [one for one in findings if one.about == "rights"]
            lines[name] = [one for one in findings if one.about == "line"]
            assert status == (found[name].level == "error")
    assert {name for name, one in found.items() if one.level != "ok"} == {"learner-bert"}
    assert found["learner-anna"].found == "user learner-anna may be: learner"
    assert found["viewer"].found == "user viewer may be: viewer"
    assert found["syncer"].found.startswith("user syncer may be: syncer")
    assert {one.level for name in users for one in lines[name]} == {"ok"}
    for name, tried in (("viewer", False), ("evaluator", False), ("learner-anna", True), ("syncer", True)):
        assert ["Mbit/s" in one.found or "Gbit/s" in one.found for one in lines[name]] == [tried]
    lost = found["learner-bert"]
    assert "EVALSHA" in lost.found
    assert "diloco acl" in lost.remedy
    assert list(client.scan_iter()) == []


@pytest.mark.redis
def test_a_user_of_one_run_need_not_name_it_or_is_told_to(healthy: EmbeddedRedis, look: Look, client: Any) -> None:
    """An operator may ask what its user is for. A learner may not, so the run has to be named."""
    operator, learner = (as_user(f"redis://127.0.0.1:{healthy.port}", name) for name in ("operator", "learner-anna"))
    with known(client, acl.users("theirs", ["anna"])):
        status, findings = look("--redis-url", operator)
        assert (status, bad(findings)) == (0, {})
        assert "user operator has rights only in run theirs, so that run is checked" in {one.found for one in findings}
        assert any(one.found.startswith("there is no run 'theirs'") for one in findings)
        status, findings = look("--redis-url", learner)
        found = bad(findings)["rights"]
        assert (status, set(bad(findings))) == (1, {"rights"})
        assert "of run 'run', which was checked because no run was given: " in found.found
        assert found.remedy.startswith("pass --run NAME with this user's run; or, if that is 'run': diloco acl")
        assert bad(look("--redis-url", learner, "--run", "theirs")[1]) == {}
        asked = bad(look("--redis-url", operator, "--run", "run")[1])["rights"]
        assert "diloco acl --run run" in asked.remedy


@pytest.mark.redis
async def test_a_user_that_may_not_ask_for_its_name_is_told_it_by_the_refusal(
    healthy: EmbeddedRedis, client: Any
) -> None:
    """Users of `diloco acl` may run few commands; who has come by a certificate is not in the URL."""
    with known(client, [acl.User("anna", "~* +@all -acl|whoami")]):
        examination = await examine(as_user(f"redis://127.0.0.1:{healthy.port}", "anna"))
        found = await examination.user()
        await examination.close()
    assert found in ("anna", ""), "servers before 7.2 do not say it"
    assert found or not client.info().get("valkey_version")


def test_who_shows_a_client_certificate_is_not_nobody() -> None:
    """Logged in by it; or let in by it alone; or it is not asked for, and anybody may come."""
    shown = Address("10.0.0.1:6379", False, tls=True, password=False, user="learner-anna", certificate="asked for")
    nodes = [Server.of(INFO)]
    (_, access) = checks.transport(shown, nodes)
    assert access == checks.ok("access", "10.0.0.1:6379 accepts this client certificate as the login of learner-anna")
    assert checks.rights(shown, dict.fromkeys(checks.PARTIES, ""), "run").found.startswith("user learner-anna may be")
    (_, access) = checks.transport(shown._replace(user="default"), nodes)
    assert access.level == "ok"
    assert "requires a client certificate, and gives everyone who has one all rights" in access.found
    assert "tls-auth-clients-user" in access.found
    (_, access) = checks.transport(shown._replace(user="default", certificate="shown"), nodes)
    assert access.level == "warning"
    assert "accepts connections without a client certificate" in access.found
    (transport,) = checks.transport(shown._replace(password=True), nodes)
    assert transport.about == "transport"
    (here,) = checks.transport(shown._replace(own_machine=True), nodes)
    assert here.found == "10.0.0.1:6379, on the same machine, with TLS"


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.mark.redis
def test_an_open_line_to_another_machine_is_named(look: Look, redis_binary: Path | None) -> None:
    address = own_address()
    with EmbeddedRedis(
        binary=redis_binary, appendonly=True, port=free_port(address), host=address, password=PASSWORD
    ) as server:
        found = bad(look("--redis-url", f"redis://:{PASSWORD}@{address}:{server.port}")[1])
    assert set(found) == {"transport"}
    assert "not encrypted" in found["transport"].found
    assert "rediss://" in found["transport"].remedy


def test_a_server_elsewhere_without_a_password_is_named_and_one_with_tls_and_a_user_is_not() -> None:
    open_to_all = Address("10.0.0.1:6379", own_machine=False, tls=True, password=False, user="")
    (_, access) = checks.transport(open_to_all, [Server.of(INFO, {"protected-mode": "no"})])
    assert access.level == "warning"
    assert "not in protected mode" in access.found
    assert "diloco acl" in access.remedy
    guarded = open_to_all._replace(password=True, user="syncer")
    assert {one.level for one in checks.transport(guarded, [Server.of(INFO)])} == {"ok"}


@pytest.mark.redis
def test_a_port_without_tls_that_is_addressed_with_it_is_named(healthy: EmbeddedRedis, look: Look) -> None:
    """The other way round; without TLS on both sides it is in order."""
    status, findings = look("--redis-url", f"rediss://127.0.0.1:{healthy.port}")
    assert status == 1
    found = bad(findings)["Redis"]
    assert found.remedy == "use its TLS port, or redis://"
    assert "it does not speak TLS" in found.found
    assert "no server answers" not in found.found, "it does"
    assert bad(look("--redis-url", f"redis://127.0.0.1:{healthy.port}")[1]) == {}


# --- the line, the clock ------------------------------------------------------------------------------


@pytest.mark.redis
async def test_a_line_too_slow_for_the_run_is_named_with_what_helps(healthy: EmbeddedRedis, look: Look) -> None:
    """Its rate is measured, by payloads; the same run on the line as it is has no such finding."""
    run = ["--model", "10m", "--step-time", "100ms"]
    async with Proxy(healthy.socket_path, bytes_per_s=4e6) as proxy:
        await proxy.add("a")
        status, findings = await asyncio.to_thread(look, "--redis-url", proxy.url("a"), *run)
    found = bad(findings)["link and run"]
    (line,) = [one for one in findings if one.about == "line"]
    assert "Mbit/s up" in line.found
    assert 20 < float(line.found.partition("Mbit/s")[0]) < 40
    assert status == 1
    assert "of the link" in found.found
    assert "--codec" in found.remedy
    assert "link and run" not in bad((await asyncio.to_thread(look, "--redis-url", healthy.url, *run))[1])


def test_a_clock_that_is_wrong_is_named_by_how_much_it_matters() -> None:
    """From an hour on, a syncer takes what others save for left over."""
    assert checks.clock(-0.5, TIMES.abandoned_s).found == "this machine's clock is 0.5 s behind the server's"
    assert checks.clock(4.6e-7, TIMES.abandoned_s).found == "this machine's clock agrees with the server's to 1 ms"
    behind, hours = checks.clock(-75.0, TIMES.abandoned_s), checks.clock(2 * TIMES.abandoned_s, TIMES.abandoned_s)
    assert (behind.level, hours.level) == ("warning", "error")
    assert "75.0 s behind" in behind.found
    assert "NTP" in behind.remedy


@pytest.mark.redis
def test_the_clock_is_compared_with_the_servers(
    healthy: EmbeddedRedis, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this machine it is put back by a minute and more."""
    now = time.time
    monkeypatch.setattr("diloco.pipeline.bus.redis.inspection.time.time", lambda: now() - 75.0)
    status, findings = look("--redis-url", healthy.url)
    assert set(bad(findings)) == {"clock"}
    assert "75.0 s behind" in bad(findings)["clock"].found
    assert status == 0


@pytest.mark.redis
def test_what_would_end_every_party_is_an_error_also_if_only_the_payload_shows_it(
    healthy: EmbeddedRedis, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "push", AsyncMock(side_effect=UsageError("it does not have EVALSHA", "use another")))
    status, findings = look("--redis-url", healthy.url)
    (found,) = [one for one in findings if "EVALSHA" in one.found]
    assert (status, found.level) == (1, "error")


def test_a_payload_that_could_not_be_tried_is_said() -> None:
    assert [one.level for one in checks.link(Link(0.001, problem="Redis is nearly full"))] == ["ok", "warning"]
    assert [one.level for one in checks.link(Link(2.0, 1e6, 1e6, 2**20))] == ["warning", "ok"]


# --- this machine -------------------------------------------------------------------------------------


def test_more_threads_than_cores_are_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many learners as cores have one each; the variable counts where no setting does."""
    cores = usable_cores()
    found = bad(look("--here", str(2 * cores))[1])["threads"]
    assert f"on {cores} cores" in found.found
    assert "--threads 1" in found.remedy
    assert "threads" not in bad(look("--here", str(cores), "--threads", "1")[1])
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 1))
    assert f"OMP_NUM_THREADS={cores + 1}" in bad(look()[1])["threads"].found
    assert "threads" not in bad(look("--as", "syncer")[1])


def test_more_learners_than_cores_are_named_also_where_each_has_one_thread() -> None:
    """No number of threads helps them: fewer do. As many as there are cores are in order."""
    found = checks.threads(2, 8, 1, "as set")
    assert found == checks.warning(
        "threads",
        "8 learners have 8 torch threads on 2 cores (as set), and have to take turns: a step takes 4 times as long as "
        "on its own core",
        "start at most 2 learners here, and the others elsewhere",
    )
    assert "start at most 2 learners here, each with --threads 1" in checks.threads(2, 8, 2, "as set").remedy
    assert checks.threads(2, 2, 1, "as set").level == "ok"
    assert "start each with --threads 2" in checks.threads(4, 2, 4, "as set").remedy


def test_a_learners_memory_has_the_process_itself_in_it_as_the_plans_has() -> None:
    """Python and torch are nearly all that a learner of a small model takes."""
    here = machine(Speed(1e10, 8))
    run = Run("run", SyncSettings().sync_spec(), 1e5, 4, 0.1, (0.0,) * 8)
    site = checks.site_of(run, here, None)
    (found,) = checks.machine_memory(run, here, "learner")
    planned = next(one for one in checks.needs(run, site).parties if one.name == "learner")
    assert found.level == "ok"
    assert found.found.startswith(f"a learner here takes {as_bytes(planned.memory_bytes)} of 64GB")
    assert planned.memory_bytes > LEARNER_PROCESS_BYTES
    (found,) = checks.machine_memory(run, replace(here, processes=8, memory_bytes=3e9), "learner")
    assert found.level == "warning"
    assert found.found.startswith("8 learners here take 3.2")
    assert "3.2GB of it before any model" in found.found


def test_a_folder_that_may_not_be_entered_or_asked_is_named(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the doctor end by it: below a parent of another user, and on a disk that does not answer."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for of, name, said in (
        (tempfile, "mkdtemp", f"has no permission to use {tmp_path / 'tape'}: {tmp_path} is "),
        (measure.shutil, "disk_usage", "Permission denied"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(of, name, refuses)
            found = measure.look_at_folder("tape-dir", tmp_path / "tape")
        assert said in found.problem
        assert "cannot be written: " in checks.folder(found).found


def test_a_containers_limits_are_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that torch takes by itself are those of all cores, and stall each other in a container of one."""
    whole = measure.look_at_machine(1, None)
    for module in (measure, cores_module):
        monkeypatch.setattr(module, "limits", lambda: Limits(2.0**30, 1.5))
    small = measure.look_at_machine(1, None)
    assert (small.cores, small.memory_bytes, small.threads) == (1, 2.0**30, whole.threads)
    if whole.threads > 1:
        assert checks.threads(small.cores, 1, small.threads, small.threads_from).level == "warning"


def test_a_host_is_not_looked_up_where_all_else_would_wait_for_it(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is gone holds up nothing but the answer."""
    looked = []
    ask = socket.getaddrinfo

    def noted(*arguments: Any, **given: Any) -> Any:
        looked.append(threading.current_thread() is threading.main_thread())
        return ask(*arguments, **given)

    monkeypatch.setattr("diloco.pipeline.bus.redis.inspection.socket.getaddrinfo", noted)
    look("--redis-url", f"redis://127.0.0.1:{free_port('127.0.0.1')}")
    assert looked
    assert not any(looked)


def test_a_disk_too_small_for_the_checkpoints_is_named(look: Look, tmp_path: Path) -> None:
    """Three of them stay while a fourth is made, of 8 bytes a parameter each."""
    params = shutil.disk_usage(tmp_path).free / 16
    status, findings = look("--checkpoint-dir", str(tmp_path), "--params", f"{params:.0f}")
    found = bad(findings)["disk of checkpoint-dir"]
    assert status == 1
    assert "needed" in found.found
    assert "free some space" in found.remedy
    assert "disk of checkpoint-dir" not in bad(look("--checkpoint-dir", str(tmp_path), "--params", "1M")[1])
    assert checks.folder(Folder("tape-dir", tmp_path, "", 1e6)).level == "error"


def machine(speed: Speed) -> Machine:
    return Machine("3.12", {}, (), 8, 64e9, 1, 8, "as set", 1, speed, 3e9)


def test_a_model_whose_outer_step_is_too_slow_here_is_named(look: Look) -> None:
    """By what this machine multiplies; a longer step has room for it."""
    status, findings = look("--params", "1B", "--step-time", "10ms", "--outer", "halley", "--as", "syncer")
    found = bad(findings)["merges"]
    assert status == 0
    assert "merges are too slow for the learners' rounds" in found.found
    assert "outer step" in found.found
    assert found.remedy.startswith("start the run with --outer nesterov"), "a fifth of it would be too long too"
    assert "merges" not in bad(look("--params", "1M", "--step-time", "10s", "--as", "syncer")[1])


@pytest.mark.redis
def test_a_live_runs_merges_are_judged_beside_those_that_would_be_made_here(
    healthy: EmbeddedRedis, look: Look, client: Any
) -> None:
    """By what its syncers have measured, and by how its intervals have grown."""

    def said(merge_s: float, interval: int) -> Finding | None:
        async def begin() -> None:
            async with open_bus(healthy.url, "judged") as bus:
                await bus.propose_spec(encode(samples.spec(sync_interval=24)))
                await bus.write_report(samples.report("anna", step_s=0.1, step_s_median=0.1))
                window = samples.IDLE.model_copy(update={"merge_s": merge_s})
                fields = {"version": 40, "digest": bytes(16), "payload": "p", "chunks": 1, "momentum": ""}
                fields |= {
                    "previous_digest": b"",
                    "window": encode(window),
                    "merged": encode(MergedBases(merged=(), norms=())),
                }
                fields |= {"merged_deltas": 0, "merged_tokens": 0, "rejected_tokens": 0, "interval": interval}
                fields |= {"rest": "", "payload_digest": b""}
                client.hset(bus.keys.head(0), mapping=fields)

        client.flushall()
        asyncio.run(begin())
        _, findings = look("--redis-url", healthy.url, "--run", "judged")
        client.flushall()
        return next((one for one in findings if one.about == "merges of the run"), None)

    assert said(0.0, 24) is None, "its syncers have not said"
    small, slow, stretched = said(0.5, 24), said(5.0, 24), said(0.5, 96)
    assert small
    assert slow
    assert stretched
    assert small.level == "ok"
    assert "a merge takes 0.5 s as measured by the run's syncers" in small.found
    assert "times as long, as usual for such a small model" in small.found
    assert "as measured here" in small.found
    assert (slow.level, "`diloco status`" in slow.remedy) == ("warning", True)
    assert stretched.level == "warning"
    assert "intervals are 4 times as long as planned, because round trips were slow" in stretched.found
    both = said(5.0, 96)
    assert both
    assert "as planned, because merges are slow" in both.found


def test_figures_within_twice_of_each_other_agree_and_others_are_said_to_be_far() -> None:
    """Which one is slower is in the words."""
    here = machine(Speed(1e11, 8))
    run = Run("run", SyncSettings().sync_spec(), 1e9, 4, 3.0, (1e11,) * 8, live=4)
    site = checks.site_of(run, here, Link(0.001, 1e8, 1e8, 2**24))

    def said(merge_s: float) -> str:
        return checks.merges_of_run(replace(run, merge_s=merge_s), site, here).found

    here_s = float(said(1.0).partition(", and ")[2].partition(" s")[0])
    assert 1.0 < here_s < 20.0
    assert ", which agrees" in said(1.9 * here_s)
    assert ", which agrees" in said(here_s / 1.9)
    assert "3 times as long, so they have fewer or busier cores" in said(3 * here_s)
    assert "3 times as fast, so they have more cores" in said(here_s / 3)
    assert "computed from the cores and the link as measured here" in said(here_s)
    unmeasured = checks.merges_of_run(replace(run, merge_s=1.0), checks.site_of(run, here, None), here).found
    assert "computed from the cores as measured here, assuming a link of 100Gbit/s" in unmeasured


def test_more_blas_threads_than_cores_are_named() -> None:
    """A variable that a job's script sets for other programs; each of several merges at a time would take so many."""
    cores = usable_cores()
    if cores == 1:
        pytest.skip("on one core BLAS takes one thread whatever it is told")
    done = python("-m", "diloco", "doctor", "--as", "syncer", OPENBLAS_NUM_THREADS=str(cores))
    assert f"warning BLAS: a merge multiplies matrices with {cores} threads on {cores} cores" in done.stdout
    assert "-> unset OPENBLAS_NUM_THREADS" in done.stdout
    assert "1 warning, " in done.stdout
    assert checks.blas(32, 4, 8).level == "ok"


def test_a_model_or_a_number_that_nobody_knows_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--model", "huge"], ["--params", "many"], ["--params", "3"], ["--step-time", "soon"]):
        assert cli.main(["doctor", *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err


# --- what parties say at their start --------------------------------------------------------------------


def until_it_waits(arguments: list[str]) -> list[dict[str, Any]]:
    """The log of a syncer from its start until it waits for its run."""
    command = [sys.executable, "-m", "diloco", "syncer", "--http-port", "0", *arguments]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "waiting_for_spec":
                process.terminate()
    return lines


@pytest.mark.redis
def test_a_syncer_says_once_at_its_start_what_is_wrong_with_its_machine(healthy: EmbeddedRedis, tmp_path: Path) -> None:
    """And serves all the same: one that comes back beside a full disk is needed. A healthy one says nothing of it."""
    well = ["--redis-url", healthy.url, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    assert [line["event"] for line in until_it_waits(well) if line["level"] != "info"] == []
    (tmp_path / "taken").write_text("")
    told = until_it_waits([*well[:2], "--tape-dir", str(tmp_path / "taken" / "tape")])
    wrong = [line for line in told if line["event"] == "machine_warning"]
    assert [line["about"] for line in wrong] == ["disk of tape-dir", "checkpoints"]
    assert "cannot be written" in wrong[0]["detail"]
    assert "--tape-dir" in wrong[0]["detail"]
    assert "--checkpoint-dir" in wrong[1]["detail"]
    assert told[-1]["event"] != "machine_warning"


def test_a_run_says_at_its_start_what_is_wrong_with_its_machine(tmp_path: Path) -> None:
    """Threads that were asked for, a disk and a Redis too small; nothing where all is well."""
    cores = usable_cores()

    def wrong(model: str, out: Path, threads: int, maxmemory_bytes: int) -> list[str]:
        info = BusInfo("one", "7.2.4", maxmemory_bytes, 0)
        return [one.about for one in wrong_for_run(SyncSettings(), model, out, 4, cores, threads, info)]

    assert wrong("nano", tmp_path / "run", 1, 0) == []
    assert wrong("nano", tmp_path / "run", 1, 2**30) == []
    assert wrong("hf:a/b", tmp_path / "run", 1, 2**30) == []
    (tmp_path / "taken").write_text("")
    assert wrong("1b", tmp_path / "taken" / "run", 2, 2**30) == ["threads", "disk of out", "Redis memory"]


@pytest.mark.redis
def test_a_run_shows_it(healthy: EmbeddedRedis, client: Any, tmp_path: Path) -> None:
    """With the remedy, before its processes have come up: here none is started, so that the run ends at once."""
    starts_none = """
import sys
from diloco.cli import main
from diloco.launcher import run
async def watch(*_):
    raise run.ChildDied("none was started")
run.Launcher.start, run.Launcher.watch = lambda _: None, watch
sys.exit(main())
"""
    with config(client, maxmemory=4 * 2**20):
        small = ["--model", "10m", "--learners", "1", "--http-port", "0", "--out", tmp_path / "out"]
        done = python("-c", starts_none, "run", "--redis-url", healthy.url, "--run", "shown", *small)
    client.flushall()
    assert done.returncode == 1
    shown = " ".join(done.stdout.split())
    assert shown.count("warning: Redis has maxmemory 4mb; this model needs at least") == 1
    assert "CONFIG SET maxmemory" in shown


@pytest.mark.redis
def test_a_party_whose_redis_refuses_it_or_is_away_is_sent_to_the_doctor(
    healthy: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (f"redis://nobody:wrong@127.0.0.1:{healthy.port}", f"redis://127.0.0.1:{free_port('127.0.0.1')}"):
        assert cli.main(["status", "--redis-url", url]) in (1, 2)
        assert "`diloco doctor`" in capsys.readouterr().err
