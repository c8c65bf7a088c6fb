"""Three Redis nodes as a cluster: a fragment's steps stay in its slot, the run's fragments spread over nodes."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
import redis.exceptions as rx
from redis.crc import key_slot

from diloco.cli import main
from diloco.pipeline.bus import cluster_slots
from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.ports import START, Bus
from diloco.pipeline.bus.redis.node_connections import Lanes
from diloco.pipeline.bus.redis.nodes import ClusterNodes
from diloco.pipeline.bus.redis.redis_url import parse
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import BusUnavailable, HeadMoved, UsageError
from diloco.pipeline.messages.fragment import WindowChanged
from diloco_studies.strikes.failing.servers import Clustered, Node
from tests import HANGING_S, samples
from tests.pipeline.test_bus_contract import SHARDS
from tests.pipeline.test_commit_cases import NONCE, commit_on, first_head, rejected, stage
from tests.samples import IDLE


class Primaries(Clustered):
    """Three of them, none with a replica."""

    shares = 3

    def _set_up(self) -> None:
        self._join(3, 'save ""')
        self.wait_until(self._ok)


@pytest.fixture(scope="module")
def servers(redis_binary: Path | None) -> Iterator[Primaries]:
    with Primaries(binary=redis_binary) as servers:
        yield servers


@pytest.fixture
def cluster(servers: Primaries) -> list[str]:
    """URLs of the nodes."""
    return ["redis://{}:{}".format(*node.address) for node in servers.nodes.values()]


@pytest.mark.redis
async def test_three_groups_live_on_three_nodes_and_go_through_all_steps(cluster: list[str]) -> None:
    bus = await connect(cluster[0], "run")
    bus.use_spec(samples.spec(groups=3))
    info = await bus.info()
    assert info.cluster
    assert info.server_id.count("+") == 2
    await everything(bus)
    clients = [redis_py.Redis.from_url(url) for url in cluster]
    assert sum(client.dbsize() > 0 for client in clients) > 1, "all keys are on one node"
    for client in clients:
        client.close()
    await bus.close()


async def everything(bus: Bus, groups: int = 3) -> None:
    """Each kind of step, on fragments of every group."""
    assert await bus.propose_spec(b"spec") == b"spec"
    await bus.write_state(samples.run_state())
    assert await bus.write_report(samples.report()) is not None
    assert len(await bus.read_reports()) == 1
    assert await bus.fill_shards(0, SHARDS)
    claimed = await bus.claim_shard("l0.00", 10)
    await bus.save_position("l0.00", claimed.entry_id, 4)
    await bus.release_shards("l0.00")
    assert await bus.claim_shard("l1.00", 10) == claimed.model_copy(update={"position": 4})
    await bus.finish_shard("l1.00", claimed.entry_id)
    assert await bus.claim_initial(NONCE, 10)
    for p in range(6):
        expected = await first_head(bus, p)
        delta = bus.keys.delta_payload(p, "l0", "0" * 8, 0)
        await stage(bus, delta)
        entry = await bus.offer(samples.header("l0", fragment=p))
        bad = await bus.offer(samples.header("l1", fragment=p))
        assert [o.entry_id for o in await bus.read_offers(p, block_s=1)] == [entry, bad]
        await bus.refuse(
            p, Refusal(NONCE, expected, (bad,), (), (rejected("l1", 5).model_copy(update={"fragment": p}),), 5)
        )
        commit = await commit_on(bus, expected, p, entries=(entry,), delta_payloads=(delta,))
        await bus.commit(commit)
        with pytest.raises(HeadMoved):
            await bus.commit(commit)
        assert await bus.read_chunks(commit.published.payload.key, 0, 10, 2**20, extend_s=5) == [b"chunk"] * 2
        assert await bus.count_chunks(delta) == 0
    heads = await bus.read_heads(range(6))
    assert [(h.fragment, h.version, h.rejected_tokens) for h in heads if h] == [(p, 1, 5) for p in range(6)]
    ends = await bus.tape_end()
    assert set(ends) == set(range(groups))
    entries = await bus.read_tape(dict.fromkeys(range(groups), START))
    told = sorted((p % groups, p) for p in range(6) for _ in "123")
    assert sorted((e.group, e.record.fragment) for e in entries) == told
    read = asyncio.ensure_future(bus.read_tape(ends, block_s=10))
    await asyncio.sleep(0.05)
    opened = WindowChanged(fragment=4, version=1, attempt=1, reason="opened", unix_s=0.0)
    (head,) = await bus.read_heads([4])
    await bus.write_window(4, NONCE, (1, head.digest), IDLE, opened)
    group = 4 % groups
    assert [(e.group, e.record) for e in await read] == [(group, opened)]
    assert await bus.read_tape(ends | {group: (await bus.tape_end())[group]}, block_s=0.1) == []


@pytest.mark.redis
def test_the_doctor_names_the_node_that_a_line_is_about_and_what_one_lost_node_would_stop(
    cluster: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Primaries without a replica, a cluster that serves nothing without one of them, a policy of one node alone."""

    def look() -> dict[str, list[dict[str, str]]]:
        main(["doctor", "--json", "--redis-url", cluster[0]])
        found: dict[str, list[dict[str, str]]] = {}
        for one in json.loads(capsys.readouterr().out):
            found.setdefault(one["about"], []).append(one)
        return found

    addresses = [url.removeprefix("redis://") for url in cluster]
    clients: list[Any] = [redis_py.Redis.from_url(url, protocol=2) for url in cluster]
    for client in clients[:2]:
        client.config_set("cluster-require-full-coverage", "no")
    clients[1].config_set("maxmemory", 2**30)
    clients[1].config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = look()
        for client in clients:
            client.config_set("cluster-require-full-coverage", "no")
        covered = look()["coverage"]
    finally:
        clients[1].config_set("maxmemory", 0)
        clients[1].config_set("maxmemory-policy", "noeviction")
        for client in clients:
            client.close()
    assert {one["level"] for one in found["replicas"]} == {"warning"}
    assert {one["found"].partition(": ")[0] for one in found["replicas"]} == set(addresses)
    for one in found["replicas"]:
        assert f"add-node NEW_HOST:PORT {one['found'].partition(': ')[0]}" in one["remedy"]
    (wrong,) = [one for one in found["coverage"] if one["level"] == "warning"]
    assert wrong["found"].startswith(f"{addresses[2]}: cluster-require-full-coverage is yes")
    assert "CONFIG SET cluster-require-full-coverage no" in wrong["remedy"]
    (evicts,) = [one for one in found["eviction"] if one["level"] == "warning"]
    assert evicts["found"].startswith(f"{addresses[1]}: maxmemory-policy is allkeys-lru")
    assert "CONFIG SET maxmemory-policy noeviction," in evicts["remedy"]
    assert [one["level"] for one in covered] == ["ok"]
    assert "127.0.0.1" not in covered[0]["found"], "of all nodes alike it is said once"
    assert len(found["Redis version"]) == 1


@pytest.mark.redis
async def test_a_cluster_that_lost_a_node_is_unavailable_in_part_and_says_so(
    servers: Primaries, cluster: list[str]
) -> None:
    """The last of the tests that use the nodes: it kills one."""
    bus = await connect(cluster[0], "lossy")
    bus.use_spec(samples.spec(groups=12))
    for p in range(12):
        await bus.acquire_lease(p, NONCE, 60)
    servers.kill("redis-2")

    async def renew(p: int) -> object:
        try:
            return await bus.acquire_lease(p, NONCE, 60)
        except BusUnavailable as error:
            return error

    outcomes = [await renew(p) for p in range(12)]
    assert any(isinstance(outcome, BusUnavailable) for outcome in outcomes)
    await bus.close()


def test_all_keys_of_a_group_share_a_slot_its_tape_included() -> None:
    keys = RunKeys("run", groups=5)
    for p in range(20):
        of_fragment = {
            keys.deltas(p, "l0"),
            keys.senders(keys.group(p)),
            keys.arrivals(keys.group(p)),
            keys.delta_payload(p, "l0", "0" * 8, 1),
            keys.head(p),
            keys.lease(p),
            keys.global_payload(p, 3, "0" * 8),
            keys.rest_payload(p, 3, "0" * 8),
            keys.momentum_payload(p, 3, "0" * 8),
            keys.initial_payload(p, "0" * 8),
            keys.tape(keys.group(p)),
        }
        assert len({key_slot(key.encode()) for key in of_fragment}) == 1
    of_run = {keys.spec, keys.state, keys.learners, keys.seen, keys.events, keys.evaluations, keys.init_claim}
    of_run |= {keys.initial, keys.shards, keys.shard_positions, keys.shard_epoch, keys.data_order, keys.syncers}
    of_run |= {keys.moments_wish, keys.moments_claim, keys.moments_offer, keys.moments_payload(3, "exp_avg", "0" * 8)}
    assert len({key_slot(key.encode()) for key in of_run}) == 1


def test_scripts_touch_no_key_that_was_not_declared() -> None:
    """No script builds a key name: each key it hands to Redis is KEYS[...] or a local that was set from it."""
    checked = 0
    for path in (resources.files("diloco.pipeline.bus.redis") / "lua").iterdir():
        text = path.read_text()
        declared = {"KEYS", "key", "args"}  # the prelude's functions are handed keys
        for names, values in re.findall(r"local ([\w, ]+?) = (KEYS\[.*)", text):
            pairs = zip(names.split(", "), values.split(", "), strict=False)
            declared |= {name for name, value in pairs if re.fullmatch(r"KEYS\[\d+\]", value)}
        for names in re.findall(r"local ([\w, ]+?) = unpack\(KEYS\)", text):
            declared |= set(names.split(", "))
        declared |= set(re.findall(r"(\w+), at = KEYS\[", text))
        for command, argument in re.findall(r"redis\.call\('(\w+)'(?:, ('GROUP'|'GROUPS'|'CREATE'|[\w\[\]]+))?", text):
            if command in ("TIME", "XREADGROUP"):
                continue
            if command == "XREAD":
                (argument,) = re.findall(r"'XREAD', 'COUNT', \w+, 'STREAMS', ([\w\[\]]+)", text)
            if argument.startswith("'"):
                (argument,) = re.findall(rf"'{command}', {argument}, ([\w\[\]]+)", text)
            assert argument.split("[")[0] in declared, f"{path.name}: {command} {argument}"
            checked += 1
        assert ".." not in re.sub(r"--.*|\{\.\.\.\}|\(\.\.\.\)", "", text), f"{path.name} builds strings"
    assert checked > 30


SLOT = cluster_slots.slot("key")


@pytest.mark.parametrize(
    "error",
    [rx.MovedError(f"{SLOT} :7001"), rx.ResponseError(f"MOVED {SLOT} :7001"), rx.ResponseError(f"MOVED {SLOT} ?:7001")],
    ids=str,
)
async def test_a_node_that_does_not_name_the_other_ones_host_means_its_own(error: rx.RedisError) -> None:
    place = parse("redis://10.0.0.1:7000,10.0.0.2:7000")
    nodes, told_by = ClusterNodes(place), HostPort("10.0.0.1", 7000)

    async def found(_: object) -> None:
        pass

    lanes = Lanes(place, nodes, found)
    lanes.notice(error, told_by)
    assert nodes.of("key") == HostPort("10.0.0.1", 7001)
    await lanes.close()


async def test_a_login_that_a_node_that_came_later_refuses_is_no_reason_to_end() -> None:
    """It was taken before: the new one has not been given the users. Of the first one it is as wrong as ever."""
    place = parse("redis://learner:secret@10.0.0.1:7000")
    first, came = HostPort("10.0.0.1", 7000), HostPort("10.0.0.9", 7000)

    async def found(_: object) -> None:
        pass

    class Moving(ClusterNodes):
        async def refresh(self) -> None:
            self.there = [came]

        def all(self) -> list[HostPort | None]:
            return list(getattr(self, "there", [first]))

    lanes = Lanes(place, Moving(place), found)
    refused = rx.AuthenticationError("WRONGPASS invalid username-password pair or user is disabled.")
    assert isinstance(lanes.translate(refused, came), UsageError)
    lanes.notice(rx.ConnectionError("gone"), first)
    await asyncio.sleep(0.05)
    told = lanes.translate(refused, came)
    assert isinstance(told, BusUnavailable)
    assert "10.0.0.9:7000 has been the server since a failover" in str(told)
    assert "give it the same users' file" in str(told)
    assert "secret" not in str(told)
    assert isinstance(lanes.translate(refused, first), UsageError)
    async with lanes.call("control", 1.0, came):
        pass  # it answers
    assert isinstance(lanes.translate(refused, came), UsageError), "whose user is deleted later has to end"
    lanes.notice(rx.MovedError(f"{SLOT} 10.0.0.7:7000"), came)
    assert isinstance(lanes.translate(refused, HostPort("10.0.0.7", 7000)), BusUnavailable)
    await lanes.close()


@pytest.mark.redis
async def test_a_cluster_that_nobody_has_made_is_said_to_be_so(tmp_path: Path) -> None:
    address = ("127.0.0.1", free_port())
    node = Node("node", tmp_path / "node", [str(find_server()), str(tmp_path / "node" / "redis.conf")], address)
    node.configure("cluster-enabled yes", f"cluster-port {free_port()}")
    try:
        node.start()
        deadline = time.monotonic() + HANGING_S
        while True:
            with pytest.raises(BusUnavailable) as told:
                await connect(f"redis://127.0.0.1:{address[1]}", "r")
            if "serves no slots: it has not been created yet" in str(told.value):
                break
            assert time.monotonic() < deadline, told.value
            await asyncio.sleep(0.05)
    finally:
        node.kill()
