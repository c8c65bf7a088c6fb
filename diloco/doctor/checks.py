"""Judge the facts: return findings, each with the measured figure, and with a remedy if something is wrong. Pure."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from diloco.doctor.facts import Folder, Link, Machine, Run
from diloco.pipeline.bus import server as of_server
from diloco.pipeline.bus.acl import acl_command
from diloco.pipeline.bus.server import Address, Server
from diloco.pipeline.findings import Finding, error, ok, warning
from diloco.pipeline.needs import GLOBALS, LINK_SHARE, Needs, Pace, needs_of, pace_of, round_trip_s
from diloco.pipeline.pacing import Pace as MergePace
from diloco.pipeline.pacing import as_time, full_budget_steps, slow_merges
from diloco.pipeline.party_memory import LEARNER_PROCESS_BYTES, TRAINING_BYTES, learner_bytes, syncer_bytes
from diloco.pipeline.redis_memory import CODECS, round_bytes
from diloco.pipeline.site import MIN_PARAMS, Site
from diloco.pipeline.units import as_bytes, as_rate, counted, written

PARTIES = ("syncer", "learner", "evaluator", "viewer")
# A difference between two clocks from which on a warning says that displayed times are wrong.
MAX_SKEW_S = 10.0
# A round trip from which on there is a warning: calls that are given up after a part of a lease have no time to spare.
FAR_S = 1.0
# The user of connections that do not log in.
DEFAULT_USER = "default"
# A measured and a computed figure agree if neither is more than this many times the other.
FAR = 2.0
SMALL_PARAMS = 1e7
SEE_STATUS = "see `diloco status` for what helps; run the doctor on the syncers' machine to check that machine"
# The remedy that `server.to_maxmemory` writes.
_MAXMEMORY = re.compile(r"(maxmemory (?:to )?)([0-9]+)mb")
# An empty server takes less than this.
EMPTY_BYTES = 4 * 2**20
# Free bytes that every disk needs, for a tape or a log.
LITTLE_BYTES = 100e6


# --- this machine -----------------------------------------------------------------------------------------


def software(machine: Machine, party: str) -> Iterator[Finding]:
    """Report versions, and packages that are not installed."""
    if machine.missing:
        yield error("packages", f"not installed: {', '.join(machine.missing)}", "pip install diloco")
    there = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    if "torch" in machine.packages:
        yield ok("software", f"Python {machine.python}, {there}")
    elif party == "learner":
        yield error("software", f"Python {machine.python}, {there}, no torch", "pip install 'diloco[learner]'")
    else:
        yield ok("software", f"Python {machine.python}, {there}; no torch, which a syncer does not need")


def threads(cores: int, processes: int, each: int, said: str) -> Finding:
    """Check that every torch thread here has a core. each: threads of one learner; said: where that number is from."""
    wanted, fit = processes * each, max(1, cores // processes)
    who = "a learner has" if processes == 1 else f"{processes} learners have"
    found = f"{who} {counted(wanted, 'torch thread')} on {counted(cores, 'core')} ({said})"
    if wanted <= cores:
        return ok("threads", found)
    fewer = f"with --threads {fit} (in your own loop: OMP_NUM_THREADS={fit})" if each > fit else ""
    if processes > cores:
        found = (
            f"{found}, and have to take turns: a step takes {processes / cores:.2g} times as long as on its own core"
        )
        remedy = f"start at most {cores} learners here{f', each {fewer}' if fewer else ''}, and the others elsewhere"
        return warning("threads", found, remedy)
    return warning("threads", f"{found}, and slow each other down", f"start each {fewer}")


def blas(cores: int, each: int, fragments: int) -> Finding:
    """Check that merges at the same time use no more BLAS threads than cores. each: BLAS threads of one merge."""
    found = f"a merge multiplies matrices with {counted(each, 'thread')} on {counted(cores, 'core')}"
    if each > 1 and min(fragments, cores) * each > cores:
        fit = max(1, cores // fragments)
        why = f"{found}, and up to {fragments} merges run at a time: threads that wait for others keep cores busy"
        return warning("BLAS", why, f"unset OPENBLAS_NUM_THREADS and similar variables, or set them to {fit}")
    return ok("BLAS", found)


def folder(one: Folder, needed_bytes: float = 0.0) -> Finding:
    """Check that a folder can be written and has space. needed_bytes: what will be added; 0: not known, or little."""
    about = f"disk of {one.setting}"
    if one.problem:
        remedy = f"fix this, or set a different location with --{one.setting}"
        return error(about, f"{one.path} cannot be written: {one.problem}", remedy)
    if math.isinf(one.free_bytes):
        return ok(about, f"{one.path} can be written")
    found = f"{as_bytes(one.free_bytes)} free in {one.path}{'' if one.there else ', which will be created'}"
    if one.free_bytes < max(needed_bytes, LITTLE_BYTES):
        remedy = f"free some space, or set a different folder with --{one.setting}"
        return error(about, f"{found}, {as_bytes(max(needed_bytes, LITTLE_BYTES))} needed", remedy)
    return ok(about, found + (f", {as_bytes(needed_bytes)} needed" if needed_bytes else ""))


# --- the server -------------------------------------------------------------------------------------------


def server(nodes: Iterable[Server]) -> Iterator[Finding]:
    """Check the version, role and settings of each node of the server."""
    nodes = list(nodes)
    for look in (of_server.version, of_server.role, of_server.eviction, of_server.disk):
        yield from _of_each(nodes, look)
    replicated = [one for one in nodes if one.replicas or one.known_replicas or one.cut_off or one.cluster]
    yield from _of_each(replicated, of_server.replaced)
    yield from _of_each([one for one in nodes if one.replicas], of_server.buffers)
    yield from _of_each([one for one in nodes if one.cluster], of_server.coverage)


def sentinels(unwell: Sequence[str]) -> Iterator[Finding]:
    """Warn about sentinels that could not help to replace a primary. unwell: these sentinels, each with the reason."""
    if unwell:
        yield warning(
            "sentinels",
            f"{'; '.join(unwell)}: a majority must work and reach the replicas, or a failed primary is not replaced",
            "start those that are down; check that they all have the same files and passwords. A replica that was "
            "removed on purpose stays in their lists until you run SENTINEL RESET NAME on each of them",
        )


def persistence(nodes: Iterable[Server], checkpoints: bool) -> Iterator[Finding]:
    """Report what a restart of each node loses. checkpoints: a syncer here or of the run saves checkpoints."""
    yield from _of_each(nodes, partial(of_server.persistence, checkpoints=checkpoints))


def _of_each(nodes: Iterable[Server], look: Callable[[Server], Finding]) -> Iterator[Finding]:
    """Yield the findings on nodes, each once, with the nodes that it is about unless it is about all of them."""
    about: dict[Finding, list[str]] = {}
    for node in nodes:
        about.setdefault(look(node), []).append(node.at)
    for finding, at in about.items():
        said = finding.found if len(about) == 1 and len(at) != 1 else f"{', '.join(at)}: {finding.found}"
        yield finding._replace(found=said if any(at) else finding.found)


def fills(nodes: Iterable[Server], run: Run | None) -> Iterator[Finding]:
    """Check how full each node is."""
    nodes = list(nodes)
    learners = 0 if run is None else max(run.sync.quorum, run.learners if run.live is None else run.live)
    a_round = 0.0 if run is None else round_bytes(run.params, learners, run.sync.codec) / len(nodes)
    yield from _of_each(nodes, lambda one: of_server.fill(one.used_bytes, one.maxmemory_bytes, a_round))


def memory(nodes: Iterable[Server], run: Run) -> Finding:
    """Check that the run fits into the memory of its server."""
    nodes = list(nodes)
    limits = [node.maxmemory_bytes for node in nodes]
    limit = sum(limits) if all(limits) else 0
    machines = 0 if len(nodes) > 1 else nodes[0].machine_bytes  # several nodes may share a machine
    backlogs = of_server.backlogs_bytes(nodes)
    others = sum(node.used_bytes for node in nodes) - backlogs if limit and run.live is None else 0
    others = others if others > EMPTY_BYTES * len(nodes) else 0
    return of_server.room(limit, run.params, run.sync, run.learners, machines, len(nodes), backlogs, others)


def one_maxmemory(findings: Iterable[Finding]) -> list[Finding]:
    """Make all findings that ask for a larger maxmemory ask for the largest one, since it is set once."""
    findings = list(findings)
    asked = [int(mb) for one in findings for _, mb in _MAXMEMORY.findall(one.remedy)]
    return [one._replace(remedy=_MAXMEMORY.sub(rf"\g<1>{max(asked, default=0)}mb", one.remedy)) for one in findings]


def transport(address: Address, nodes: Iterable[Server]) -> Iterator[Finding]:
    """Check that the connection is encrypted, and that the server does not let everybody in."""
    if address.own_machine:
        yield ok("transport", f"{address.where}, on the same machine{', with TLS' if address.tls else ''}")
        return
    if address.tls:
        yield ok("transport", f"TLS to {address.where}")
    else:
        yield warning(
            "transport",
            f"redis:// to {address.where}, which is not this machine: password, headers and payloads are not encrypted",
            "use rediss:// and DILOCO_REDIS_CA, or a network that is encrypted or private",
        )
    if address.password:
        return
    if address.certificate and address.user not in ("", DEFAULT_USER):
        yield ok("access", f"{address.where} accepts this client certificate as the login of {address.user}")
    elif address.certificate == "asked for":
        yield ok(
            "access",
            f"{address.where} requires a client certificate, and gives everyone who has one all rights: Redis 8.6, "
            "Valkey 9.0 and newer can tell users apart by it (tls-auth-clients-user CN), older servers by passwords",
        )
    elif address.certificate:
        yield warning(
            "access",
            f"{address.where} does not require a password, and accepts connections without a client certificate: "
            "anyone who can reach it has all rights",
            "set tls-auth-clients yes, or give each party a user (`diloco acl`)",
        )
    else:
        unprotected = any(node.protected is False for node in nodes)
        yield warning(
            "access",
            f"{address.where} does not require a password{' and is not in protected mode' if unprotected else ''}: "
            "anyone who can reach it has all rights",
            "give each party a user (`diloco acl`), or set requirepass",
        )


def rights(
    address: Address,
    lacks: dict[str, str],
    run: str,
    learner: str | None = None,
    party: str | None = None,
    asked: bool = True,
) -> Finding:
    """Check which parties this user has the rights of.

    Args:
        address: how the user is connected, and its name.
        lacks: by party, the right that is missing; empty if none is.
        run: the run in which the rights were tried.
        learner: the learner's name that was given; None: the name in the user's name.
        party: the party that this machine will be; None: the party in the user's name, if any.
        asked: whether the run was named, and not the default one was tried.
    """
    who = f"user {address.user}" if address.user not in ("", DEFAULT_USER) else "the default user"
    may = [party for party in PARTIES if not lacks[party]]
    named = next((party for party in PARTIES if address.user.partition("-")[0] == party), None)
    meant = party or named
    if not may or (meant is not None and meant not in may):
        missing = lacks[meant or "learner"]
        what = f"{meant or 'party'} of run {run!r}{f' as {learner!r}' if learner and meant == 'learner' else ''}"
        if not asked:
            found = f"{who} cannot be a {what}, which was checked because no run was given: {missing}"
            anew = acl_command(run, address.user)
            return error("rights", found, f"pass --run NAME with this user's run; or, if that is {run!r}: {anew}")
        remedy = (
            "each user is for one party in one run: put this party's user in DILOCO_REDIS_URL, and pass its run "
            "(--run) and, for a learner, its name (--learner-id). If this run has no users yet, create them, and "
            f"start Redis with them: {acl_command(run, address.user)}"
        )
        return error("rights", f"{who} cannot be a {what}: {missing}", remedy)
    if meant is None and may == ["viewer"]:
        return warning("rights", f"{who} may only read runs", "to take part, put a different user in DILOCO_REDIS_URL")
    return ok("rights", f"{who} may be: {', '.join(may)}")


def clock(ahead_s: float, too_far_s: float) -> Finding:
    """Compare this machine's clock with the server's.

    too_far_s: difference from which on a checkpoint that another syncer is saving looks like a remnant.
    """
    away, which = abs(ahead_s), "ahead of" if ahead_s > 0 else "behind"
    found = f"this machine's clock is {as_time(away)} {which} the server's"
    if away < 1e-3:
        return ok("clock", "this machine's clock agrees with the server's to 1 ms")
    if away >= too_far_s:
        why = "a syncer would mistake a checkpoint that another one is saving for an abandoned one"
        return error("clock", f"{found}: {why}, and certificates may be refused", "synchronise both clocks with NTP")
    if away >= MAX_SKEW_S:
        return warning(
            "clock",
            f"{found}: displayed ages and event times are wrong by that much",
            "synchronise both clocks with NTP",
        )
    return ok("clock", found)


# --- the link, and what the run asks of it ------------------------------------------------------------------


def link(line: Link) -> Iterator[Finding]:
    """Check the round trip to the server, and report the rates of the network."""
    found = f"a round trip takes {as_time(line.round_trip_s)}"
    if line.round_trip_s > FAR_S:
        yield warning("distance", found, "use a nearer Redis, or longer leases (--lease-s) on all syncers")
    else:
        yield ok("distance", found)
    if line.problem:
        yield warning("line", f"not measured: {line.problem}", line.remedy or "run the doctor again later")
    elif line.up_bytes_per_s is None or line.down_bytes_per_s is None:
        yield ok("line", "bandwidth was not measured, because this user is not allowed to write a payload")
    else:
        up, down = as_rate(line.up_bytes_per_s), as_rate(line.down_bytes_per_s)
        yield ok("line", f"{up} up and {down} down, with a payload of {as_bytes(line.bytes)}")


def site_of(run: Run, machine: Machine, line: Link | None) -> Site:
    """Return the site to plan with: the run's model, and what was measured here."""
    given: dict[str, float] = {"params": max(run.params, MIN_PARAMS), "merge_rate": machine.merge_bytes_per_s}
    if run.step_s is not None:
        given["step_time"] = run.step_s
    if line is not None:
        given["latency"] = line.round_trip_s / 2
        if line.up_bytes_per_s is not None and line.down_bytes_per_s is not None:
            given["link"] = 8 * min(line.up_bytes_per_s, line.down_bytes_per_s)
    return Site(**given, syncer_cores=machine.cores)  # type: ignore[arg-type]  # its fields are numbers


def needs(run: Run, site: Site, outer_s: float = 0.0) -> Needs:
    """Compute what `diloco plan` says of the run at its own pace. outer_s: outer step of the slowest fragment."""
    sync = run.sync
    wire, pulled = CODECS[sync.codec], GLOBALS[sync.global_codec].pulled
    trip_s = round_trip_s(site, run.learners, sync.fragments, wire, pulled, outer_s)
    pace = Pace(sync.sync_interval, sync.fragments, sync.codec, sync.global_codec, 1, outer_s, trip_s, {}, [])
    return needs_of(site, pace, run.learners, sync.overlap_steps, sync.outer)


def quorum(live: int, needed: int) -> Finding:
    """Check that as many learners are live as a merge needs."""
    found = f"a merge needs {counted(needed, 'learner')}; {live} live"
    if live < needed:
        return warning("quorum", f"{found}: nothing is merged", "start the missing ones, with the run's name")
    return ok("quorum", found)


def finished(run: str) -> Finding:
    """Return the warning about a run that is finished."""
    return warning(
        "run",
        f"run {run!r} is finished, so it does not train any more",
        f"to continue it, run `diloco runs extend {run} --tokens NUMBER` and start its parties again",
    )


def load(run: Run, site: Site) -> Finding:
    """Check that the network carries the traffic of the run with its H."""
    sync, asked = run.sync, needs(run, site)
    found = (
        f"a round of {sync.sync_interval} steps ({as_time(asked.round_s)}) needs {asked.link_load:.0%} of the link as "
        f"measured here: {as_bytes(asked.up_bytes)} up, {as_bytes(asked.down_bytes)} down"
    )
    if asked.link_load <= LINK_SHARE:
        return ok("link and run", found)
    planned = pace_of(site, run.learners, sync.overlap_steps, "auto", "bf16", sync.outer)
    remedy = (
        f"start the run with --codec {planned.codec} --global-codec bf16 --sync-interval {planned.interval}"
        if planned.fits
        else "use a faster link or a smaller model: no codec or H is enough (`diloco plan`)"
    )
    return (error if asked.link_load > 1 else warning)("link and run", found, remedy)


def merges(run: Run, site: Site, machine: Machine) -> Finding:
    """Check that merge and outer step on this machine take no longer than a round allows."""
    speed, sync = machine.speed, run.sync
    outer_s = max(run.operations) / speed.flops
    together_s = math.fsum(run.operations) / speed.flops / speed.at_once
    asked = needs(run, site, outer_s)
    at_full_interval = sync.doubling * sync.sync_interval.bit_length()
    each_s = [operations / speed.flops for operations in run.operations]
    paces = [
        MergePace(p, at_full_interval, asked.round_trip_s - outer_s + own_s, own_s) for p, own_s in enumerate(each_s)
    ]
    slow = slow_merges(sync, paces, [site.step_time], 1, together_s=together_s, speed=speed)
    if slow is not None:
        return warning("merges", f"{slow.found} ({basis(site)})", slow.helps)
    room_s = full_budget_steps(sync) * site.step_time
    return ok(
        "merges",
        f"a fragment's round trip takes {as_time(asked.round_trip_s)} with this machine as the syncer, "
        f"{as_time(outer_s)} of it for the outer step; a round allows {as_time(room_s)} ({basis(site)})",
    )


def basis(site: Site) -> str:
    """Return which inputs of a computed figure were measured, and which were assumed."""
    line = "line" if "link" in site.model_fields_set else ""
    assumed = "" if line else f", assuming a link of {written(site.link, 'TGMk')}bit/s"
    return f"computed from the cores{' and the link' if line else ''} as measured here{assumed}"


def merges_of_run(run: Run, site: Site, machine: Machine) -> Finding:
    """Compare the time of the run's merges with the computed one, and check that they fit into its rounds.

    A syncer measures a merge from the decision to the commit: the sum, the outer step, and writing the result.
    """
    sync, elements = run.sync, run.params / run.sync.fragments
    written_bytes = math.fsum(GLOBALS[sync.global_codec]) * elements
    sum_s = run.learners * elements * CODECS[sync.codec] / site.merge_rate / site.syncer_cores
    here_s = sum_s + max(run.operations) / machine.speed.flops + 8 * written_bytes / site.link + 2 * site.latency
    times = run.merge_s / here_s
    found = (
        f"a merge takes {as_time(run.merge_s)} as measured by the run's syncers, and {as_time(here_s)} {basis(site)}"
    )
    if times > FAR:
        small = run.params < SMALL_PARAMS
        why = (
            "as usual for such a small model: most of it is Redis calls and waiting for a thread, which the "
            "computed time leaves out"
        )
        slower = "so they have fewer or busier cores, or a slower network, than this machine"
        found += f": {times:.2g} times as long, {why if small else slower}"
    elif times < 1 / FAR:
        found += f": {1 / times:.2g} times as fast, so they have more cores, or a faster network, than this machine"
    else:
        found += ", which agrees"
    room_s = full_budget_steps(sync) * site.step_time
    slow = run.merge_s > room_s
    if run.stretched >= FAR:
        why = "merges are slow" if slow else "round trips were slow, for example in an outage, after which they recover"
        found += f"; intervals are {run.stretched:.2g} times as long as planned, because {why}"
    if slow or run.stretched >= FAR:
        return warning("merges of the run", f"{found}; a round allows {as_time(room_s)}", SEE_STATUS)
    return ok("merges of the run", f"{found}; a round allows {as_time(room_s)}")


def machine_memory(run: Run, machine: Machine, party: str) -> Iterator[Finding]:
    """Check that the parties fit into memory: for learners only process and exchange, since training may use a GPU."""
    if not machine.memory_bytes:
        return
    sync = run.sync
    wants = {
        "syncer": syncer_bytes(run.params, run.learners, sync.codec, sync.outer),
        "learner": machine.processes * learner_bytes(run.params, sync.fragments, sync.codec),
    }
    for name, wanted in wants.items():
        if party not in (name, "all"):
            continue
        several = name == "learner" and machine.processes > 1
        who = f"{machine.processes} learners here take" if several else f"a {name} here takes"
        found = f"{who} {as_bytes(wanted)} of {as_bytes(machine.memory_bytes)}"
        if name == "learner":
            training = machine.processes * TRAINING_BYTES["fp32"] * run.params
            found += (
                f", {as_bytes(machine.processes * LEARNER_PROCESS_BYTES)} of it before any model; training takes "
                f"{as_bytes(training)} more without activations, on the CPU or a GPU"
            )
        if wanted > machine.memory_bytes:
            remedy = (
                "start several syncers, which share the fragments"
                if name == "syncer"
                else "use a machine with more memory"
            )
            yield warning(f"memory of a {name}", found, remedy)
        else:
            yield ok(f"memory of a {name}", found)


def plan(run: Run, site: Site) -> Finding:
    """Report the settings of the run next to those that `diloco plan` would choose for it here."""
    sync = run.sync
    has = f"H = {sync.sync_interval}, P = {sync.fragments}, {sync.codec} deltas"
    name = "a run" if run.live is None else "the run"
    who = counted(run.learners, "learner")
    who += "" if run.live is None else " live" if run.live else " (none is live yet)"
    found = f"{name} of {written(float(f'{run.params:.3g}'))} parameters, {who}, has {has}"
    if run.step_s is None:
        return ok("plan", f"{found}; pass --step-time to check whether the link and the merges keep up")
    planned = pace_of(site, run.learners, sync.overlap_steps, "auto", sync.global_codec, sync.outer)
    choice = f"H = {planned.interval}, P = {planned.fragments}, {planned.codec}"
    found += f"; `diloco plan` would choose {choice} ({basis(site)})"
    return ok("plan", found if planned.fits else f"{found}, with which the link is too slow as well")
