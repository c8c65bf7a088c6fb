"""A live run is patched: each party is replaced by one of another release with the same wire format."""

import asyncio
import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from diloco.acl import acl_file, variable
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import FORMAT
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.ledger import accounts, problems
from diloco.pipeline.view.ledger_inputs import LedgerInputs, read_ledger_inputs
from diloco.pipeline.view.status_reader import read_status
from tests import HANGING_S
from tests.parties import ROOT, environment, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OLD, NEW = "this", "patched"
RUN = "run"
SMALL = ("--model", "nano", "--seq-len", "16", "--batch", "1", "--fragments", "2", "--sync-interval", "4")
LEARNER = ("learner", "--device", "cpu", "--threads", "1", "--pace", "50ms")


def merges(tape: list[Any]) -> Iterator[Committed]:
    return (record for record in tape if isinstance(record, Committed))


@dataclass
class Place:
    """A Redis whose users have no more rights than they need, and who takes part in its run."""

    port: int
    folder: Path
    trees: dict[str, Path]
    """Version -> the tree of that release."""
    popen: Callable[..., Any]
    parties: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Incarnations of learners that were replaced."""

    def url(self, user: str) -> str:
        return f"redis://{user}:pw-{user}-1234@127.0.0.1:{self.port}"

    def command(self, release: str, user: str, *arguments: str) -> dict[str, Any]:
        kept = environment(DILOCO_REDIS_URL=self.url(user), DILOCO_RUN=RUN, PYTHONPATH=str(self.trees[release]))
        # A machine that does much else: no party is to give up while another one starts.
        kept |= {"DILOCO_LEASE_S": "15"}
        kept |= {"OMP_NUM_THREADS": "1", "DILOCO_EVAL_EVERY": "500ms", "DILOCO_EVAL_TOKENS": "256"}
        return {"args": [sys.executable, "-m", "diloco", *arguments], "env": kept, "cwd": self.trees[release]}

    def done(self, release: str, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        given = self.command(release, user, *arguments)
        return subprocess.run(**given, capture_output=True, text=True, timeout=HANGING_S, check=False)

    def start(self, name: str, release: str) -> None:
        """A syncer `s..`, a learner `l..`, or the evaluator."""
        if name.startswith("s"):
            folders = ("--tape-dir", str(self.folder / f"tape-{name}"), "--checkpoint-dir", str(self.folder / "saved"))
            given = self.command(release, "syncer", "syncer", "--syncer-id", name, "--http-port", "0", *folders)
        elif name.startswith("l"):
            given = self.command(release, "learner", *LEARNER, *SMALL, "--learner-id", name, "--tokens", "100M")
        else:
            given = self.command(release, "evaluator", "evaluator")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.parties[name] = self.popen(given.pop("args"), **given, stdout=log, stderr=log)

    def replace(self, name: str, release: str) -> None:
        """End a party in order, and start the other release's in its place."""
        self.parties[name].send_signal(signal.SIGTERM)
        assert self.parties[name].wait(HANGING_S) in (0, 75), self.said(name)
        _, tape, _, _ = wait_for(self.read_if_there)
        self.gone |= {one.incarnation for record in merges(tape) for one in record.contributions if one.learner == name}
        self.start(name, release)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def read(self) -> tuple[dict[str, Any], list[Any], Spec, int]:
        """Status, tape, spec and number of evaluations, by a user who may not load scripts."""

        async def read() -> tuple[dict[str, Any], list[Any], Spec, int]:
            async with open_bus(self.url("viewer"), RUN) as bus:
                status = await read_status(bus, LoopClock())
                tape = [entry.record for entry in await bus.read_tape({0: START}, limit=100_000)]
                data = await bus.read_spec()
                return status, tape, decode(Spec, data), len(await bus.read_evaluations())

        return asyncio.run(read())

    def read_if_there(self) -> tuple[dict[str, Any], list[Any], Spec, int] | None:
        """The same; None: a machine that does much else did not answer in time."""
        with contextlib.suppress(BusUnavailable):
            return self.read()
        return None

    def begun(self) -> None:
        """Wait for the first merge."""

        def merged() -> bool:
            with redis.Redis.from_url(self.url("admin"), protocol=2) as client:
                return bool(client.exists(f"diloco:{{{RUN}:0}}:tape"))

        wait_for(merged)

    def goes_on(self) -> None:
        """Both syncers merge, every fragment is merged from both learners, and evaluated, by whoever is there now."""
        for name, process in self.parties.items():
            assert process.poll() is None, self.said(name)
        _, tape, _, evaluated = wait_for(self.read_if_there)
        seen = len(tape)

        def merged() -> bool:
            if (found := self.read_if_there()) is None:
                return False
            _, tape, _, evaluations = found
            new = list(merges(tape[seen:]))
            both = {
                (record.fragment, one.learner)
                for record in new
                for one in record.contributions
                if one.incarnation not in self.gone
            }
            return len(both) == 4 and {record.syncer for record in new} == {"s0", "s1"} and evaluations > evaluated

        wait_for(merged)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This tree, and a copy of another version in which a syncer looks after scripts more often."""
    folder = tmp_path_factory.mktemp("patched") / "tree"
    for top in ("pipeline", "syncer", "workers", "diloco"):
        shutil.copytree(ROOT / top, folder / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    service = folder / "syncer/times.py"
    text, found = re.subn(
        r"^    scripts_s: float = .*$", "    scripts_s: float = 0.7", service.read_text(), flags=re.MULTILINE
    )
    assert found == 1
    service.write_text(text)
    (folder / "diloco-9.9.9.dist-info").mkdir()
    (folder / "diloco-9.9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: diloco\nVersion: 9.9.9\n")
    return {OLD: ROOT, NEW: folder}


@pytest.fixture
def place(tmp_path: Path, trees: dict[str, Path], redis_binary: Path | None, popen: Callable[..., Any]) -> Place:
    port = free_port()
    passwords = {variable(user.name): f"pw-{user.name}-1234" for user in acl.users(RUN)}
    admin = "user admin on >pw-admin-1234 ~* &* +@all\n"
    (tmp_path / "users.acl").write_text(acl_file(acl.users(RUN), passwords) + admin)
    command = [str(redis_binary or find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--dir", str(tmp_path), "--aclfile", str(tmp_path / "users.acl")]
    with (tmp_path / "redis.log").open("wb") as log:
        popen(command, stdout=log, stderr=log)
    wait_for(lambda: "Ready to accept connections" in (tmp_path / "redis.log").read_text())
    return Place(port, tmp_path, trees, popen)


TOO_LATE = {
    RefusalReason.RUN_FINISHED,
    RefusalReason.TOO_STALE,
    RefusalReason.DUPLICATE,
    RefusalReason.ALREADY_MERGED,
}
"""Reasons of refusals that say when a delta came, not what it is. A handover makes some."""
PARTIES = ("s0", "s1", "l0", "l1", "evaluator")


def test_each_party_of_a_live_run_is_replaced_by_one_of_another_release_with_the_same_number(place: Place) -> None:
    """Redis loses its scripts in the middle. The run finishes, no delta is refused for what it is, and all tokens are
    accounted for.
    """
    said = [place.done(release, "viewer", "--version").stdout.split(", ") for release in (OLD, NEW)]
    assert [number for _, number in said] == [f"wire format {FORMAT}\n"] * 2
    assert said[1][0] == "diloco 9.9.9" != said[0][0]
    for name in PARTIES:
        place.start(name, OLD)
    place.begun()
    place.goes_on()
    for name in PARTIES:
        place.replace(name, NEW)
        place.goes_on()
        if name == "s1":
            with redis.Redis.from_url(place.url("admin"), protocol=2) as client:
                client.script_flush()  # as a restart of Redis does
    done = place.done(NEW, "operator", "finish")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, process in place.parties.items():
        assert process.wait(HANGING_S) == 0, place.said(name)
    status, tape, spec, _ = place.read()
    assert status["phase"] == "finished"
    assert {one.reason for one in tape if isinstance(one, Rejected)} <= TOO_LATE
    parts = accounts(tape, asyncio.run(ledger_inputs(place, spec)), layout_of(spec.tensors))
    assert problems(parts) == []
    assert {part.learner for part in parts} == {"l0", "l1"}
    assert [part.unaccounted for part in parts] == [0] * len(parts)


async def ledger_inputs(place: Place, spec: Spec) -> LedgerInputs:
    async with open_bus(place.url("viewer"), RUN) as bus:
        bus.use_spec(spec)
        return await read_ledger_inputs(bus, spec.sync.fragments, 5.0)
