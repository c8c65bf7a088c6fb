"""The state of a Redis server, by its own report, and the judgement of what is wrong with it. Pure.

The same rules serve the bus, when it connects and warns, the syncer before it begins, and `diloco doctor`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.findings import Finding, error, ok, warning
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.redis_memory import MACHINE_TIMES, redis_bytes, redis_holds, round_bytes
from diloco.pipeline.units import as_bytes, as_maxmemory, counted

# First version that has what scripts and streams need.
OLDEST = (6, 2)
# First major version with separate rights to read and to write a key.
USERS_FROM = 7
# A warning is due if less memory is free than one round of the run needs, but the threshold always lies between these
# shares of maxmemory.
MIN_FREE, MAX_FREE = 0.1, 0.25
# Memory is planned for at least this many learners, or a quorum: nobody knows how many will join.
MIN_LEARNERS = 4
KEEPS_KEYS = "noeviction"
# Name prefix of the folders of servers that this project starts itself.
OWN_PREFIX = "diloco_redis_"
# Setting of a cluster's node; if it is on, the node serves nothing while any slot has no node.
FULL_COVERAGE = "cluster-require-full-coverage"
# Setting with three limits for each class of clients; replicas are such a class.
BUFFER_LIMIT = "client-output-buffer-limit"
# Defaults of Redis and Valkey: the lower of the two limits, and the larger of the two products' backlogs.
SMALL_BUFFER_BYTES, SMALL_BACKLOG_BYTES = 64 * 2**20, 10 * 2**20


class Address(NamedTuple):
    """The address of a server, from its URL, without secrets."""

    where: str
    own_machine: bool
    """True for a unix socket or a loopback address."""
    tls: bool
    password: bool
    user: str
    """"" if the URL names no user."""
    certificate: Literal["", "shown", "asked for"] = ""
    """Client certificate: none; shown to a server that does not require one; or required by the server."""


@dataclass(frozen=True, slots=True)
class Server:
    """The state of one node, from INFO, and from CONFIG (if this user may read it) what INFO does not report."""

    version: str
    used_bytes: int = 0
    maxmemory_bytes: int = 0
    """0: no limit."""
    machine_bytes: int = 0
    """Memory of its machine; 0 if unknown."""
    policy: str = KEEPS_KEYS
    append_only: bool = False
    disk_fails: bool = False
    """True if the last write of the append-only file or of a snapshot failed."""
    follows: bool = False
    """True for a replica, which refuses writes."""
    replicas: int = 0
    """Number of connected replicas."""
    known_replicas: int = 0
    """Number of replicas that its sentinels know; 0 if unknown."""
    waits: bool = False
    """True if it refuses writes while it has no connected replica: by min-replicas-to-write, or as a cluster's node."""
    cut_off: bool = False
    """True if it refuses writes now because it has no connected replica."""
    save: str | None = None
    """Schedule of snapshots, "" for never; None if unknown."""
    protected: bool | None = None
    """Protected mode; None if unknown."""
    at: str = ""
    """Its address, if there are several nodes."""
    cluster: bool = False
    """True for a node of a cluster."""
    full_coverage: bool | None = None
    """True if it serves nothing while any slot of its cluster has no node; None if unknown."""
    buffer_bytes: int | None = None
    """How far a replica may fall behind before it is disconnected; 0: no limit, None: unknown."""
    backlog_bytes: int | None = None
    """How much a disconnected replica may miss without a full resynchronisation; None if unknown."""
    keeps_backlog: bool = False
    """True if it has replicas, or had some lately: then the backlog comes to take its size of `maxmemory_bytes`."""
    own: bool = False
    """True if this project started the server (`embedded`): it lasts as long as the command that started it."""

    @classmethod
    def of(
        cls, info: Mapping[str, Any], config: Mapping[str, str] | None = None, at: str = "", known_replicas: int = 0
    ) -> Self:
        """Make it from a node's INFO as redis-py parses it, and its CONFIG values if they are known."""
        config = config or {}
        mode, coverage = config.get("protected-mode"), config.get(FULL_COVERAGE)
        return cls(
            version=str(info["redis_version"]),
            used_bytes=int(info.get("used_memory", 0)),
            maxmemory_bytes=int(info.get("maxmemory", 0)),
            machine_bytes=int(info.get("total_system_memory", 0)),
            policy=str(info.get("maxmemory_policy", KEEPS_KEYS)),
            append_only=bool(info.get("aof_enabled", 0)),
            disk_fails="err" in (info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")),
            follows=info.get("role") == "slave",
            replicas=int(info.get("connected_slaves", 0)),
            known_replicas=known_replicas,
            waits="min_slaves_good_slaves" in info or bool(info.get("cluster_enabled")),
            cut_off=info.get("min_slaves_good_slaves") == 0,
            save=config.get("save"),
            protected=None if mode is None else mode == "yes",
            at=at,
            cluster=bool(info.get("cluster_enabled")),
            full_coverage=None if coverage is None else coverage == "yes",
            buffer_bytes=_of_replicas(config.get(BUFFER_LIMIT)),
            backlog_bytes=info.get("repl_backlog_size"),
            keeps_backlog=bool(info.get("connected_slaves") or info.get("repl_backlog_active") or known_replicas),
            own=f"/{OWN_PREFIX}" in str(info.get("config_file", "")),
        )


def _of_replicas(limits: str | None) -> int | None:
    """Return the lower of the hard and soft limits for replicas in `client-output-buffer-limit`; 0: no limit."""
    found = re.search(r"(?:slave|replica) (\d+) (\d+)", limits or "")
    return None if found is None else min(filter(None, map(int, found.groups())), default=0)


def backlogs_bytes(nodes: Iterable[Server]) -> int:
    """Return how much of the nodes' `maxmemory_bytes` the replication backlogs take once they are full."""
    return sum(node.backlog_bytes or 0 for node in nodes if node.keeps_backlog)


def version(server: Server) -> Finding:
    """Check that the version is new enough."""
    parts = tuple(map(int, server.version.split(".")[:2]))
    if parts < OLDEST:
        return error("Redis version", f"version {server.version}", "install 6.2 or newer")
    if parts[0] < USERS_FROM:
        said = f"version {server.version} is enough for a run; `diloco acl` needs {USERS_FROM}, or Valkey"
        return ok("Redis version", said)
    return ok("Redis version", f"version {server.version}")


def eviction(server: Server) -> Finding:
    """Check that the server does not evict keys when its memory is full."""
    if server.maxmemory_bytes and server.policy != KEEPS_KEYS:
        return warning(
            "eviction",
            f"maxmemory-policy is {server.policy}: keys may be evicted",
            to_set(f"maxmemory-policy {KEEPS_KEYS}"),
        )
    return ok(
        "eviction", f"maxmemory-policy is {server.policy}" if server.maxmemory_bytes else "none without maxmemory"
    )


def to_set(setting: str) -> str:
    """Return the remedy of changing a setting, for the running server and permanently."""
    return (
        f'redis-cli -u "$DILOCO_REDIS_URL" CONFIG SET {setting}, and set it in its configuration too (if there are '
        "users or sentinels: on each server, as a user with that right)"
    )


def to_maxmemory(amount: float, each: str = "") -> str:
    """Return the remedy for a maxmemory below `amount` bytes. each: appended to name the nodes, if several."""
    wanted = as_maxmemory(amount)
    return f"raise maxmemory to {wanted}{each}: {to_set(f'maxmemory {wanted}')}"


def fill(used_bytes: int, maxmemory_bytes: int, a_round: float = 0.0) -> Finding:
    """Check how full a node is. Log, status, web page, alert and doctor all use this rule.

    a_round: bytes that a round of the run uploads to it (`redis_memory.round_bytes`); 0 if unknown.
    """
    free = maxmemory_bytes - used_bytes
    least = min(max(MIN_FREE * maxmemory_bytes, a_round), MAX_FREE * maxmemory_bytes)
    if maxmemory_bytes and free <= least:
        return warning(
            "Redis fill",
            f"Redis uses {used_bytes / maxmemory_bytes:.0%} of its maxmemory, and should have {as_maxmemory(least)} "
            "free",
            f"{to_maxmemory(max(used_bytes + a_round, used_bytes / (1 - MAX_FREE)) + 1)}; deltas are refused once it "
            "is full",
        )
    return ok("Redis fill", f"{as_bytes(used_bytes)} in use")


def fill_of_run(info: BusInfo, elements: float, learners: int, sync: SyncSpec) -> Finding:
    """Check the `fill` of the fullest node of a run's bus. learners: live ones; a quorum is the minimum assumed."""
    each = round_bytes(elements, max(learners, sync.quorum), sync.codec) / info.nodes
    return fill(*info.fullest, each)


def disk(server: Server) -> Finding:
    """Check that the server can write to its disk."""
    if server.disk_fails:
        return warning(
            "Redis disk",
            "Redis cannot write to its disk",
            "free disk space where it keeps its data; until then it may refuse all writes",
        )
    return ok("Redis disk", "its last writes succeeded")


def persistence(server: Server, checkpoints: bool = False) -> Finding:
    """Check what a restart of the server loses. checkpoints: True if the run keeps checkpoints elsewhere."""
    if server.append_only:
        return ok("persistence", "append-only file: a restart loses at most a second")
    if server.own and not checkpoints:
        return warning(
            "persistence",
            "the servers of `diloco redis` and `diloco run` keep nothing on disk: a restart loses everything, and "
            "syncers and learners can restore it only if some of them are still running",
            "save checkpoints (--checkpoint-dir on each syncer), or use your own server with appendonly yes",
        )
    lost = "the last minutes" if server.save else "everything"
    if server.save is None:
        lost = "everything since its last snapshot, if it takes any"
    if checkpoints:
        return ok("persistence", f"no append-only file: a restart loses {lost}, but checkpoints are saved")
    return warning(
        "persistence",
        f"no append-only file: a restart loses {lost}, and syncers and learners can restore it only if some are still "
        "running",
        f"{to_set('appendonly yes')}, on a machine with twice its memory; or save checkpoints (--checkpoint-dir on "
        "each syncer)",
    )


def role(server: Server) -> Finding:
    """Check that the server is a primary, which takes writes."""
    if server.follows:
        return error("Redis role", "this server is a replica, which refuses writes", "use the primary's address")
    return ok("Redis role", "primary")


def replicas(server: Server) -> Finding:
    """Check that the server refuses writes once it is cut off from its replicas, and that it is not cut off now.

    A primary that keeps serving while one of its replicas has been promoted accepts writes that are lost later.
    """
    if server.cut_off:
        return error(
            "replicas",
            "Redis refuses all writes: no replica is connected to it (min-replicas-to-write)",
            "start its replicas, and check that they are allowed to follow it (masteruser, masterauth, their log) and, "
            "with sentinels, their login to each of them (auth-pass: SENTINEL REPLICAS shows s_down if it is refused)",
        )
    if server.replicas and not server.waits:
        return warning(
            "replicas",
            "Redis has replicas and min-replicas-to-write 0: if it is cut off from them, it accepts writes that are "
            "lost once another server becomes primary",
            f"on all of them: {to_set('min-replicas-to-write 1')}, with min-replicas-max-lag 10 or less",
        )
    if server.replicas < server.known_replicas:
        known = counted(server.known_replicas, "replica")
        found = f"{server.replicas} of the {known} that its sentinels know are connected to this primary"
        last = server.waits and server.replicas == 1
        return warning(
            "replicas",
            f"{found}{' (once one more server is lost, all writes are refused)' if last else ''}",
            "start the others again; to drop one permanently, run SENTINEL RESET on each sentinel",
        )
    return ok("replicas", str(server.replicas) if server.replicas else "none")


def replaced(server: Server) -> Finding:
    """Check that a replica can take over if a cluster loses this primary."""
    if server.cluster and not server.replicas:
        return warning(
            "replicas",
            "this primary has no replica: if its machine fails, its fragments stop until it is back",
            "add one: start a server with cluster-enabled yes, then run (redis-cli of Redis) redis-cli --cluster "
            f"add-node NEW_HOST:PORT {server.at} --cluster-slave (with users, add --user setup --pass PASSWORD; with "
            "TLS, --tls --cacert ca.pem --cert FILE --key FILE)",
        )
    return replicas(server)


def buffers(server: Server) -> Finding:
    """Check that a replica may fall behind by some payloads, or disconnect briefly, without a full resync."""
    limit, backlog = server.buffer_bytes, server.backlog_bytes
    small = []
    if limit and limit <= SMALL_BUFFER_BYTES:
        small.append(f"is disconnected once it is {as_maxmemory(limit)} behind ({BUFFER_LIMIT})")
    if backlog and backlog <= SMALL_BACKLOG_BYTES:
        small.append(f"must copy everything again once it has missed {as_maxmemory(backlog)} (repl-backlog-size)")
    if small:
        return warning(
            "buffers of replicas",
            f"a replica {', and '.join(small)}, and may never catch up during a run",
            f"""on all of them: {to_set(f"{BUFFER_LIMIT} 'replica 0 0 0'")}, with repl-backlog-size 256mb""",
        )
    told = f"not known ({BUFFER_LIMIT} should be replica 0 0 0)"
    return ok(
        "buffers of replicas",
        told if limit is None else "large enough for a replica to fall behind by several payloads",
    )


def coverage(server: Server) -> Finding:
    """Check that the loss of one primary does not stop the others of its cluster."""
    if server.full_coverage:
        return warning(
            "coverage",
            f"{FULL_COVERAGE} is yes: while any primary is down, the whole cluster stops",
            f"on each node: {to_set(f'{FULL_COVERAGE} no')}",
        )
    return ok(
        "coverage",
        "a primary that is down stops only its own fragments"
        if server.full_coverage is False
        else f"not known ({FULL_COVERAGE} should be no)",
    )


def warnings(nodes: Sequence[Server]) -> Iterator[str]:
    """Yield the problems that can be fixed while the run continues, except `fill`, which depends on the run.

    If no primary of a cluster has a replica, that is taken to be intended: only the doctor mentions it.
    """
    for node in nodes:
        spent = node.cluster and not node.replicas and any(one.replicas for one in nodes)
        for found in (eviction(node), disk(node), replaced(node) if spent else replicas(node)):
            if found.level != "ok":
                yield f"{node.at}: {found}" if spent and found.about == "replicas" else str(found)


def room(
    maxmemory_bytes: int,
    elements: float,
    sync: SyncSpec,
    learners: int = 0,
    machine_bytes: int = 0,
    nodes: int = 1,
    backlogs: int = 0,
    used: int = 0,
) -> Finding:
    """Check that the memory can hold a run, by the same estimate as `diloco plan`.

    Args:
        maxmemory_bytes: of all nodes together; 0: no limit.
        elements: of the model.
        sync: the run's settings.
        learners: expected number; at least `MIN_LEARNERS` and a quorum are assumed.
        machine_bytes: memory of the servers' machines, used if there is no limit; 0 if unknown.
        nodes: number of nodes that hold keys.
        backlogs: bytes of maxmemory that the replication backlogs take.
        used: bytes that something other than this run takes.
    """
    learners = max(MIN_LEARNERS, sync.quorum, learners)
    needed = redis_bytes(elements, learners, sync.codec) + backlogs
    limit, written = maxmemory_bytes or machine_bytes, as_maxmemory if maxmemory_bytes else as_bytes
    backlog = f", repl-backlog-size of {as_maxmemory(backlogs)}" if backlogs else ""
    needs = f"this model needs at least {written(needed)} ({redis_holds(learners)}{backlog})"
    has = f"Redis has maxmemory {written(limit)}" if maxmemory_bytes else "Redis has no maxmemory"
    if not maxmemory_bytes and machine_bytes:
        has += f", on a machine of {as_bytes(machine_bytes)}"
    if used:
        has += f", of which other data take {written(used)}"
    if 0 < limit < needed + used:
        each = f" on each of the {nodes} nodes" if nodes > 1 else ""
        larger = f"run it on a machine with {as_bytes(MACHINE_TIMES * needed)} of memory"
        remedy = to_maxmemory((needed + used) / nodes, each) if maxmemory_bytes else larger
        return error("Redis memory", f"{has}; {needs}", remedy)
    return ok("Redis memory", f"{has}; {needs}")
