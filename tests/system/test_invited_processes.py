"""Whoever pastes an invitation trains: over TLS, from another network, with the built-in trainer and an own loop."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diloco.acl import acl_file, variable
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import free_port
from tests.certificates import make_authority, tls_binary

pytestmark = [pytest.mark.slow]

NAMESPACE, HERE, THERE = "diloco-guest", "10.213.77.1", "10.213.77.2"
OWN_LOOP = """
import torch
from diloco import Learner
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Learner(model, optimizer, tokens="100M") as learner:
    while not learner.finished:
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=32, loss=loss)
raise SystemExit(learner.exit_status)
"""


@dataclass(frozen=True)
class Place:
    """A Redis with users and TLS, and where learners come from."""

    port: int
    plain: int
    folder: Path
    elsewhere: tuple[str, ...]
    """What begins a command of a learner: `ip netns exec ...`, or nothing."""
    host: str

    def environment(self, user: str | None = None) -> dict[str, str]:
        """Of a party; None: of a guest, who knows nothing."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        kept |= {"OMP_NUM_THREADS": "1"}
        if user is not None:
            kept["DILOCO_REDIS_URL"] = f"redis://{user}:pw-{user}-1234@127.0.0.1:{self.plain}"
        return kept

    def runs(self, user: str, *arguments: str) -> str:
        command = [sys.executable, "-m", "diloco", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(user), check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    @contextlib.contextmanager
    def party(self, name: str, user: str | None, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        elsewhere = self.elsewhere if user is None else ()
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([*elsewhere, *command], env=self.environment(user), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def merged_of(self, learner: str) -> Callable[[], bool]:
        def merged() -> bool:
            status: dict[str, Any] = json.loads(self.runs("viewer", "status", "--json"))
            return any(one["id"] == learner and one["step"] > 40 for one in status["learners"]) and any(
                line.startswith("{") and learner in line for line in self.runs("viewer", "tape", "--json").splitlines()
            )

        return merged


def wait_for(condition: Callable[[], bool], limit_s: float = 90.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.3)


@contextlib.contextmanager
def another_network() -> Iterator[tuple[tuple[str, ...], str]]:
    """A network namespace with one wire to this one: what begins commands there, and this side's address."""
    ip = shutil.which("ip")
    made = ip is not None and os.getuid() == 0
    if made:
        made = subprocess.run([str(ip), "netns", "add", NAMESPACE], capture_output=True, check=False).returncode == 0
    if not made:
        yield (), "127.0.0.1"  # no rights to make one: the same by loopback
        return
    inside = ("netns", "exec", NAMESPACE, str(ip))
    try:
        for line in (
            ("link", "add", "diloco-here", "type", "veth", "peer", "name", "diloco-there"),
            ("link", "set", "diloco-there", "netns", NAMESPACE),
            ("addr", "add", f"{HERE}/30", "dev", "diloco-here"),
            ("link", "set", "diloco-here", "up"),
            (*inside, "addr", "add", f"{THERE}/30", "dev", "diloco-there"),
            (*inside, "link", "set", "diloco-there", "up"),
        ):
            subprocess.run([str(ip), *line], check=True, capture_output=True)
        yield (str(ip), "netns", "exec", NAMESPACE), HERE
    finally:
        subprocess.run([str(ip), "link", "del", "diloco-here"], check=False, capture_output=True)
        subprocess.run([str(ip), "netns", "del", NAMESPACE], check=False, capture_output=True)


@pytest.fixture
def place(tmp_path: Path, redis_binary: Path | None) -> Iterator[Place]:
    binary = tls_binary(redis_binary)
    with another_network() as (elsewhere, host), ExitStack() as stack:
        authority = make_authority(tmp_path / "ours", host)
        port, plain = free_port(host), free_port("127.0.0.1")
        passwords = {variable(user.name): f"pw-{user.name}-1234" for user in acl.users("run")}
        (tmp_path / "users.acl").write_text(acl_file(acl.users("run"), passwords))
        command = [
            str(binary),
            "--tls-port",
            str(port),
            "--port",
            str(plain),
            "--bind",
            host,
            "127.0.0.1",
        ]
        command += [word for line in authority.lines() for word in f"--{line}".split(" ", 1)]
        command += ["--save", "", "--dir", str(tmp_path)]
        command += ["--aclfile", str(tmp_path / "users.acl"), "--protected-mode", "no"]
        with (tmp_path / "redis.log").open("wb") as log:
            redis = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(redis.wait)
        stack.callback(redis.kill)
        place = Place(port, plain, tmp_path, elsewhere, host)
        said = (tmp_path / "redis.log").read_text
        wait_for(lambda: "Ready to accept connections" in said() or redis.poll() is not None)
        assert redis.poll() is None, said()
        syncer = place.party("syncer", "syncer", sys.executable, "-m", "diloco", "syncer", "--http-port", "0")
        stack.enter_context(syncer)
        yield place


def invite(place: Place, name: str) -> str:
    """The word of an invitation, with the server's authority in it."""
    url = f"rediss://operator:pw-operator-1234@{place.host}:{place.port}?ssl_ca_certs={place.folder}/ours/ca.pem"
    command = [sys.executable, "-m", "diloco", "invite", name]
    environment = place.environment() | {"DILOCO_REDIS_URL": url}
    at = ["--at", f"rediss://{place.host}:{place.port}"] if place.host == "127.0.0.1" else []
    done = subprocess.run([*command, *at], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "note: there is no run 'run' on this Redis yet: --run says which one it is for\n"
    begin, word = done.stdout.strip().rsplit(" ", 1)
    assert begin == "diloco join"
    return word


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_text(errors="replace"))
    return "\n".join(lines)


SMALL = ("--model", "nano", "--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4")


@pytest.mark.parametrize("loop", ["built-in", "own"])
def test_who_pastes_an_invitation_trains_and_is_cut_off_at_once(place: Place, loop: str) -> None:
    """From another network, by TLS, knowing nothing but the word; which is in no list of processes and no log."""
    word = invite(place, "anna")
    (place.folder / "own.py").write_text(OWN_LOOP)
    more = (*SMALL, "--tokens", "100M") if loop == "built-in" else ("--", sys.executable, str(place.folder / "own.py"))
    with place.party("anna", None, sys.executable, "-m", "diloco", "join", word, *more) as anna:
        wait_for(place.merged_of("anna"))
        shown = command_lines()
        assert word[:60] not in shown
        assert place.runs("operator", "revoke", "anna") == "'anna' is cut off"
        revoked = time.monotonic()
        status = anna.wait(60)
        print(f"ended {time.monotonic() - revoked:.1f} s after it was revoked")  # with -s
    log = (place.folder / "anna.log").read_text()
    assert status not in (0, 75), log
    assert re.search("refuses the login", log), log
    assert word[:60] not in log
    assert "invited-anna:" not in log
    assert "invited-anna" not in (place.folder / "users.acl").read_text()
