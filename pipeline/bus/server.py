"""What a Redis server says of itself, and what is wrong with it. Pure.

One judgement for all who ask: the bus as it connects and warns, the syncer before it begins, `diloco doctor`.
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

OLDEST = (6, 2)
"""Version from which on a server has what scripts and streams need."""
USERS_FROM = 7
"""Major version from which on a user's rights to read and to write are apart."""
LEAST_FREE, MOST_FREE = 0.1, 0.25
"""Shares of maxmemory between which lies what must be free, or it is warned of: room for a round of the run."""
LEAST_LEARNERS = 4
"""A Redis must have room for the deltas of so many, or of a quorum: nobody knows how many learners will come."""
KEEPS_KEYS = "noeviction"
OWN_PREFIX = "diloco_redis_"
"""Of the folders of servers that we start ourselves."""
FULL_COVERAGE = "cluster-require-full-coverage"
"""Setting of a cluster's node: it serves nothing while any slot has no node."""
BUFFER_LIMIT = "client-output-buffer-limit"
"""Setting of three limits for each kind of client; replicas are a kind."""
SMALL_BUFFER_BYTES, SMALL_BACKLOG_BYTES = 64 * 2**20, 10 * 2**20
"""What Redis and Valkey have unless it is set (the lower of two limits, the larger of two backlogs)."""


class Address(NamedTuple):
    """How a server is reached, as its URL says it; without secrets."""

    where: str
    own_machine: bool
    """By a unix socket, or at an address of loopback."""
    tls: bool
    password: bool
    user: str
    """"" where the URL names none."""
    certificate: Literal["", "shown", "asked for"] = ""
    """A client's: shown to a server that takes connections without one too, or to one that takes none without."""


@dataclass(frozen=True, slots=True)
class Server:
    """One node, by its own INFO; and by its CONFIG what INFO does not have, where this user may ask."""

    version: str
    used_bytes: int = 0
    maxmemory_bytes: int = 0
    """0: no limit."""
    machine_bytes: int = 0
    """Memory of its machine; 0: not told."""
    policy: str = KEEPS_KEYS
    append_only: bool = False
    disk_fails: bool = False
    """Its last write of the append-only file or of a snapshot failed."""
    follows: bool = False
    """A replica, which refuses writes."""
    replicas: int = 0
    """Those that follow it."""
    known_replicas: int = 0
    """Those that should, as its sentinels know them; 0: nobody tells."""
    waits: bool = False
    """It refuses writes while no replica is in touch with it, as min-replicas-to-write says or a cluster's rules do."""
    cut_off: bool = False
    """None is in touch with it, so it refuses writes."""
    save: str | None = None
    """When it takes snapshots, "" for never; None: not told."""
    protected: bool | None = None
    """Protected mode; None: not told."""
    at: str = ""
    """Its address, where there are several."""
    cluster: bool = False
    """It is a node of one."""
    full_coverage: bool | None = None
    """It serves nothing while any slot of its cluster is without a node; None: not told."""
    buffer_bytes: int | None = None
    """By how much a replica may be behind, or it is cut off; 0: no limit, None: not told."""
    backlog_bytes: int | None = None
    """Of how much a replica that was away need not take all again; None: not told."""
    keeps_backlog: bool = False
    """It has replicas, or had some of late: so as many of its `maxmemory_bytes` are the backlog's, sooner or later."""
    own: bool = False
    """One of ours, which lasts as long as the command that has started it (`embedded`)."""

    @classmethod
    def of(
        cls, info: Mapping[str, Any], config: Mapping[str, str] | None = None, at: str = "", known_replicas: int = 0
    ) -> Self:
        """Of a node's INFO, as a client library reads it."""
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
    """The lowest limit of theirs, hard or soft; 0: none."""
    found = re.search(r"(?:slave|replica) (\d+) (\d+)", limits or "")
    return None if found is None else min(filter(None, map(int, found.groups())), default=0)


def backlogs_bytes(nodes: Iterable[Server]) -> int:
    """What their replicas' backlogs take of `maxmemory_bytes` once they are full."""
    return sum(node.backlog_bytes or 0 for node in nodes if node.keeps_backlog)


def version(server: Server) -> Finding:
    """Whether it is new enough."""
    parts = tuple(map(int, server.version.split(".")[:2]))
    if parts < OLDEST:
        return error("Redis version", f"version {server.version}", "6.2 or newer is needed")
    if parts[0] < USERS_FROM:
        said = f"version {server.version}: runs; `diloco acl` needs {USERS_FROM}, or Valkey"
        return ok("Redis version", said)
    return ok("Redis version", f"version {server.version}")


def eviction(server: Server) -> Finding:
    """Whether it drops keys where its memory is full."""
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
    """How a server that is up is set otherwise, and stays so."""
    return (
        f'redis-cli -u "$DILOCO_REDIS_URL" CONFIG SET {setting}, and the same in its configuration (where there are '
        "users or sentinels: at each server, by a user who may)"
    )


def to_maxmemory(amount: float, each: str = "") -> str:
    """What to do where a node has less. each: of which nodes, if of several."""
    wanted = as_maxmemory(amount)
    return f"raise maxmemory to {wanted}{each}: {to_set(f'maxmemory {wanted}')}"


def fill(used_bytes: int, maxmemory_bytes: int, a_round: float = 0.0) -> Finding:
    """How full a node is: the one rule, by which log, status, page, alert and doctor go.

    a_round: bytes that a round of the run uploads to it (`redis_memory.round_bytes`); 0: not known.
    """
    free = maxmemory_bytes - used_bytes
    least = min(max(LEAST_FREE * maxmemory_bytes, a_round), MOST_FREE * maxmemory_bytes)
    if maxmemory_bytes and free <= least:
        return warning(
            "Redis fill",
            f"Redis should have {as_maxmemory(least)} free, and uses {used_bytes / maxmemory_bytes:.0%} of its "
            "maxmemory",
            f"{to_maxmemory(max(used_bytes + a_round, used_bytes / (1 - MOST_FREE)) + 1)}; deltas are refused where it "
            "is full",
        )
    return ok("Redis fill", f"{as_bytes(used_bytes)} in use")


def fill_of_run(info: BusInfo, elements: float, learners: int, sync: SyncSpec) -> Finding:
    """`fill` of the fullest node of a run's bus. learners: that are live; a quorum at least is reckoned with."""
    each = round_bytes(elements, max(learners, sync.quorum), sync.codec) / info.nodes
    return fill(*info.fullest, each)


def disk(server: Server) -> Finding:
    """Whether it can write what it keeps."""
    if server.disk_fails:
        return warning(
            "Redis disk",
            "Redis cannot write to its disk",
            "free space where it keeps its data; until then it may refuse all writes",
        )
    return ok("Redis disk", "its last writes went well")


def persistence(server: Server, checkpoints: bool = False) -> Finding:
    """What a restart of it loses. checkpoints: some are kept elsewhere."""
    if server.append_only:
        return ok("persistence", "append-only file: a restart loses a second at most")
    if server.own and not checkpoints:
        return warning(
            "persistence",
            "`diloco redis` and `diloco run` have theirs keep nothing on disk: a restart loses all, which syncers and "
            "learners put back only if some outlive it",
            "keep checkpoints (--checkpoint-dir of each syncer), or use a server of your own with appendonly yes",
        )
    lost = "the last minutes" if server.save else "all"
    if server.save is None:
        lost = "all since its last snapshot, if it takes any"
    if checkpoints:
        return ok("persistence", f"no append-only file: a restart loses {lost}, but checkpoints are kept")
    return warning(
        "persistence",
        f"no append-only file: a restart loses {lost}, which syncers and learners put back only if some outlive it",
        f"{to_set('appendonly yes')}, on a machine with twice its memory; or keep checkpoints (--checkpoint-dir of "
        "each syncer)",
    )


def role(server: Server) -> Finding:
    """Whether it takes writes."""
    if server.follows:
        return error("Redis role", "this server is a replica, which refuses writes", "name the primary's address")
    return ok("Redis role", "primary")


def replicas(server: Server) -> Finding:
    """Whether it stops where it is cut off from its replicas, of which one may be primary by then; or has stopped."""
    if server.cut_off:
        return error(
            "replicas",
            "Redis refuses all writes: no replica is in touch with it (min-replicas-to-write)",
            "start its replicas, and see that they may follow it (masteruser, masterauth, their log)",
        )
    if server.replicas and not server.waits:
        return warning(
            "replicas",
            "Redis has replicas and min-replicas-to-write 0: cut off from them it takes writes that are lost when "
            "another one has become primary",
            f"on all of them: {to_set('min-replicas-to-write 1')}, with min-replicas-max-lag 10, or less",
        )
    if server.replicas < server.known_replicas:
        known = counted(server.known_replicas, "replica")
        found = f"in touch with this primary: {server.replicas} of the {known} that its sentinels know"
        last = server.waits and server.replicas == 1
        return warning(
            "replicas",
            f"{found}{' (once one more server is lost, all writes are refused)' if last else ''}",
            "start the others again; one that is gone for good is forgotten by SENTINEL RESET on each sentinel",
        )
    return ok("replicas", str(server.replicas) if server.replicas else "none")


def replaced(server: Server) -> Finding:
    """Whether another one takes over where a cluster loses it."""
    if server.cluster and not server.replicas:
        return warning(
            "replicas",
            "this primary has no replica: should its machine be lost, its fragments stand still until it is back",
            "give it one: start a server with cluster-enabled yes, then, with redis-cli of Redis: redis-cli --cluster "
            f"add-node NEW_HOST:PORT {server.at} --cluster-slave (where there are users with --user setup --pass "
            "PASSWORD, with TLS with --tls --cacert ca.pem --cert FILE --key FILE)",
        )
    return replicas(server)


def buffers(server: Server) -> Finding:
    """Whether a replica may fall behind by payloads, and be away for a moment, and need not take all again."""
    limit, backlog = server.buffer_bytes, server.backlog_bytes
    small = []
    if limit and limit <= SMALL_BUFFER_BYTES:
        small.append(f"cut off once it is {as_maxmemory(limit)} behind ({BUFFER_LIMIT})")
    if backlog and backlog <= SMALL_BACKLOG_BYTES:
        small.append(f"to take all again once it has missed {as_maxmemory(backlog)} (repl-backlog-size)")
    if small:
        return warning(
            "buffers of replicas",
            f"a replica is {', and '.join(small)}: while a run writes it may never come back",
            f"""on all of them: {to_set(f"{BUFFER_LIMIT} 'replica 0 0 0'")}, with repl-backlog-size 256mb""",
        )
    told = f"not told ({BUFFER_LIMIT} is to be replica 0 0 0)"
    return ok("buffers of replicas", told if limit is None else "a replica may fall behind by payloads")


def coverage(server: Server) -> Finding:
    """Whether one primary that is lost stops all others of its cluster."""
    if server.full_coverage:
        return warning(
            "coverage",
            f"{FULL_COVERAGE} is yes: while any primary is away, all of the cluster serves nothing",
            f"on each node: {to_set(f'{FULL_COVERAGE} no')}",
        )
    return ok(
        "coverage",
        "a primary that is away stops its own fragments alone"
        if server.full_coverage is False
        else f"not told ({FULL_COVERAGE} is to be no)",
    )


def warnings(nodes: Sequence[Server]) -> Iterator[str]:
    """What somebody should mend while a run goes on; besides, each one's `fill`, for which the run is to be known.

    A cluster of which no primary has a replica is meant so: that is told once, by the doctor.
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
) -> Finding:
    """Whether its memory can hold a run, by what `diloco plan` says for as many learners.

    Args:
        maxmemory_bytes: of all nodes together; 0: no limit.
        elements: of the model.
        sync: the run's.
        learners: that are expected; no fewer than `LEAST_LEARNERS`, or a quorum, are reckoned with.
        machine_bytes: memory of the servers' machines, which counts where there is no limit; 0: not known.
        nodes: that hold keys.
        backlogs: bytes that their replicas' backlogs take of it.
    """
    learners = max(LEAST_LEARNERS, sync.quorum, learners)
    needed = redis_bytes(elements, learners, sync.codec, sync.global_codec, sync.key_frame_interval) + backlogs
    limit, written = maxmemory_bytes or machine_bytes, as_maxmemory if maxmemory_bytes else as_bytes
    backlog = f", repl-backlog-size of {as_maxmemory(backlogs)}" if backlogs else ""
    needs = f"this model needs at least {written(needed)} ({redis_holds(learners, sync.global_codec)}{backlog})"
    has = f"Redis has maxmemory {written(limit)}" if maxmemory_bytes else "Redis has no maxmemory"
    if not maxmemory_bytes and machine_bytes:
        has += f", on a machine of {as_bytes(machine_bytes)}"
    if 0 < limit < needed:
        each = f" on each of the {nodes} nodes" if nodes > 1 else ""
        larger = f"give it a machine with {as_bytes(MACHINE_TIMES * needed)} of memory"
        remedy = to_maxmemory(needed / nodes, each) if maxmemory_bytes else larger
        return error("Redis memory", f"{has}; {needs}", remedy)
    return ok("Redis memory", f"{has}; {needs}")
