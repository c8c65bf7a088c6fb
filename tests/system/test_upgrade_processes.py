"""One run, two releases: every party is replaced by one of the next release, and back, while the run goes on."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from diloco.acl import acl_file, variable
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis.calls import scripts
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected
from diloco.pipeline.payload.codec import decode
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.checkpoints.loading import load_checkpoint
from tests.releases import next_release
from tests.releases.next_release import MARK, NEXT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUN = "run"
SMALL = ("--model", "nano", "--seq-len", "16", "--batch", "1", "--fragments", "2", "--sync-interval", "4")
LEARNER = ("learner", "--device", "cpu", "--threads", "1", "--pace", "50ms")


LIMIT_S = 300.0
"""For what follows a start, on a machine that does much else: with fifteen busy processes a core one took 137 s."""
STOP_S = 60.0
"""For a stop in order."""


def wait_for(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    until = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.2)
    return found


def merges(tape: list[Any]) -> Iterator[Committed]:
    return (record for record in tape if isinstance(record, Committed))


@dataclass
class Place:
    """A Redis whose users have no more rights than they need, and who takes part in its run."""

    port: int
    folder: Path
    trees: dict[int, Path]
    """Wire format -> the tree of the release that begins runs of it."""
    parties: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Incarnations of learners that were replaced."""

    def url(self, user: str) -> str:
        return f"redis://{user}:pw-{user}-1234@127.0.0.1:{self.port}"

    def command(self, release: int, user: str, *arguments: str) -> dict[str, Any]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        kept |= {"DILOCO_REDIS_URL": self.url(user), "DILOCO_RUN": RUN, "PYTHONPATH": str(self.trees[release])}
        # A machine that does much else: no party is to give up while another one starts.
        kept |= {"DILOCO_LEASE_S": "15"}
        kept |= {"OMP_NUM_THREADS": "1", "DILOCO_EVAL_EVERY": "500ms", "DILOCO_EVAL_TOKENS": "256"}
        return {"args": [sys.executable, "-m", "diloco", *arguments], "env": kept, "cwd": self.trees[release]}

    def done(self, release: int, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        given = self.command(release, user, *arguments)
        return subprocess.run(**given, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def start(self, name: str, release: int) -> None:
        """A syncer `s..`, a learner `l..`, or the evaluator."""
        if name.startswith("s"):
            folders = ("--tape-dir", str(self.folder / f"tape-{name}"), "--checkpoint-dir", str(self.folder / "saved"))
            given = self.command(release, "syncer", "syncer", "--syncer-id", name, "--http-port", "0", *folders)
        elif name.startswith("l"):
            given = self.command(release, "learner", *LEARNER, *SMALL, "--learner-id", name, "--tokens", "100M")
        else:
            given = self.command(release, "evaluator", "evaluator")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.parties[name] = subprocess.Popen(**given, stdout=log, stderr=log)

    def replace(self, name: str, release: int) -> None:
        """End a party in order, and start the other release's in its place."""
        self.parties[name].send_signal(signal.SIGTERM)
        assert self.parties[name].wait(STOP_S) in (0, 75), self.said(name)
        _, tape, _, _ = wait_for(self.read_if_there)
        self.gone |= {one.incarnation for record in merges(tape) for one in record.contributions if one.learner == name}
        self.start(name, release)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def read(self) -> tuple[dict[str, Any], list[Any], Spec, int]:
        """Status, tape, spec and number of evaluations, as this release reads them.

        By a user who may not load scripts: this release's would be there, and the next one's syncers miss none.
        """

        async def read() -> tuple[dict[str, Any], list[Any], Spec, int]:
            async with open_bus(self.url("viewer"), RUN) as bus:
                status = await read_status(bus, LoopClock())
                tape = [entry.record for entry in await bus.read_tape({0: START}, limit=100_000)]
                data = await bus.read_spec()
                assert data is not None
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

    def lose_scripts(self) -> None:
        """A restart of Redis, after which a syncer of the earlier release was the first to see it."""
        with redis.Redis.from_url(self.url("admin"), protocol=2) as client, client.pipeline() as pipeline:
            pipeline.execute_command("SCRIPT FLUSH")
            for one in scripts()[0]:
                pipeline.execute_command("SCRIPT LOAD", one.text)
            pipeline.execute()

    def holds(self, what: bytes) -> list[bytes]:
        """Keys of this Redis whose stored bytes have something in them."""
        with redis.Redis.from_url(self.url("admin"), protocol=2) as client:
            return [key for key in client.scan_iter() if what in (client.dump(key) or b"")]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Both releases."""
    tree = next_release.make(tmp_path_factory.mktemp("next") / "release")
    told = subprocess.run(
        [sys.executable, "-c", "import diloco; print(diloco.__file__)"],
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == str(tree / "diloco/__init__.py")
    return {NEXT - 1: ROOT, NEXT: tree}


@pytest.fixture
def place(tmp_path: Path, trees: dict[int, Path], redis_binary: Path | None) -> Iterator[Place]:
    with ExitStack() as stack:
        port = free_port("127.0.0.1")
        passwords = {variable(user.name): f"pw-{user.name}-1234" for user in acl.users(RUN)}
        admin = "user admin on >pw-admin-1234 ~* &* +@all\n"
        (tmp_path / "users.acl").write_text(acl_file(acl.users(RUN), passwords) + admin)
        command = [str(redis_binary or find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        # Not compressed: what is stored is looked through for a name.
        command += ["--dir", str(tmp_path), "--aclfile", str(tmp_path / "users.acl"), "--rdbcompression", "no"]
        with (tmp_path / "redis.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.kill)
        wait_for(lambda: "Ready to accept connections" in (tmp_path / "redis.log").read_text())
        place = Place(port, tmp_path, trees)
        stack.callback(end_all, place)
        yield place


def end_all(place: Place) -> None:
    for process in place.parties.values():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


TOO_LATE = {
    RefusalReason.RUN_FINISHED,
    RefusalReason.TOO_STALE,
    RefusalReason.DUPLICATE,
    RefusalReason.ALREADY_MERGED,
}
"""Reasons of refusals that say when a delta came, not what it is. A handover makes some."""
OLD = NEXT - 1
FORWARD = ("s0", "s1", "l0", "l1", "evaluator")
"""Syncers first: they load the scripts of their release's learners, who may not."""


def test_every_party_is_replaced_by_the_next_release_and_back_while_the_run_goes_on(place: Place) -> None:
    """The run keeps its format: what the next release adds is nowhere in it, and no delta is refused for it."""
    for name in FORWARD:
        place.start(name, OLD)
    place.begun()
    place.goes_on()
    for name in FORWARD[:2]:
        place.replace(name, NEXT)
        place.goes_on()
    with redis.Redis.from_url(place.url("admin"), protocol=2) as client:
        client.script_flush()  # as a restart does: the next release's syncers load those of this one's learners
    place.goes_on()
    for name in FORWARD[2:]:
        place.replace(name, NEXT)
        place.goes_on()
    assert place.holds(MARK.encode()) == []
    for name in reversed(FORWARD):
        place.replace(name, OLD)
        place.goes_on()
    done = place.done(NEXT, "operator", "finish")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, process in place.parties.items():
        assert process.wait(STOP_S) == 0, place.said(name)
    status, tape, spec, _ = place.read()
    assert spec.format == OLD
    assert status["phase"] == "finished"
    assert {one.reason for one in tape if isinstance(one, Rejected)} <= TOO_LATE
    assert place.holds(MARK.encode()) == []
    saved = b"".join(path.read_bytes() for path in place.folder.rglob("*") if path.suffix in (".msgpack", ".json"))
    assert b"committed" in saved
    assert MARK.encode() not in saved
    assert load_checkpoint(str(place.folder / "saved")).spec == spec


def test_a_learner_of_the_next_release_waits_for_a_syncer_of_it_and_one_of_two_syncers_is_enough(place: Place) -> None:
    """It has not joined meanwhile: nobody waits for it. Log and status say what is to be done."""
    for name in ("s0", "s1", "l0", "evaluator"):
        place.start(name, OLD)
    place.begun()
    place.start("l1", NEXT)

    def waits() -> list[str]:
        found = place.read_if_there()
        warnings = found[0]["warnings"] if found else []
        return [one for one in warnings if "scripts of the release of l1" in one]

    (warning,) = wait_for(waits)
    assert "start a syncer of that release" in warning
    assert "scripts_missing" in place.said("l1")
    assert "start a syncer of this release" in place.said("l1")
    status, _, _, _ = wait_for(place.read_if_there)
    assert [one["id"] for one in status["learners"]] == ["l0"]
    merged = status["outer_steps"]
    wait_for(lambda: (found := place.read_if_there()) and found[0]["outer_steps"] > merged)
    place.replace("s0", NEXT)
    place.goes_on()
    assert waits() == []
    for _ in range(3):
        place.lose_scripts()
        place.goes_on()
    place.replace("s0", OLD)
    place.lose_scripts()  # now nobody has them who may load them
    (warning,) = wait_for(waits)
    place.replace("s1", NEXT)
    place.goes_on()
    wait_for(lambda: not waits())


def test_a_run_of_the_next_format_refuses_who_does_not_speak_it_at_once(place: Place) -> None:
    """With both formats, and what to do. The next release's parties go on meanwhile."""
    for name in FORWARD:
        place.start(name, NEXT)
    wait_for(lambda: place.holds(MARK.encode()))
    for user, *arguments in (
        ("syncer", "syncer", "--http-port", "0"),
        ("learner", *LEARNER),
        ("evaluator", "evaluator"),
        ("viewer", "status"),
    ):
        done = place.done(OLD, user, *arguments)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode not in (0, 75), (user, said)
        assert f"wire format {NEXT}, this build speaks {OLD}" in said, (user, said)
        assert "take a release that speaks both" in said, (user, said)
    for name, process in place.parties.items():
        assert process.poll() is None, place.said(name)


def test_a_setting_that_needs_the_next_format_is_refused_in_a_run_of_this_one(place: Place) -> None:
    for name in ("s0", "l0"):
        place.start(name, OLD)
    place.begun()
    done = place.done(NEXT, "learner", *LEARNER, *SMALL, "--trial-mark", "3", "--tokens", "100M")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode not in (0, 75), said
    assert f"{MARK} needs wire format {NEXT}, and the run has {OLD}" in said, said
