"""The page's commands that add a learner to a live Redis and remove it, on real servers."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.bus.redis_streams import connect, open_bus
from diloco.pipeline.errors import BusUnavailable, DilocoError, UsageError
from diloco_studies.strikes.failing.servers import Node, SentinelServers
from tests import HANGING_S, samples
from tests.parties import environment
from tests.pipeline.test_failover import moved, until_answered

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(sys.platform != "linux", reason="servers die with this process"),
]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "users-tls-tokens.md"
SECTION = "## Add or remove a learner while the run goes on\n"
REDIS_CLI = """\
#!{python}
import os, shlex, sys
import redis
host, port, user = (sys.argv[sys.argv.index(option) + 1] for option in ("-h", "-p", "--user"))
client = redis.Redis(host, int(port), username=user, password=os.environ["REDISCLI_AUTH"], protocol=2)
for line in sys.stdin:
    print(client.execute_command(*shlex.split(line)))
"""
"""What stands in for `redis-cli` where there is none."""


class Operator:
    """Who does as the page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = environment()
        binaries = folder / "bin"
        binaries.mkdir()
        scripts = {"diloco": f'#!/bin/sh\nexec {sys.executable} -m diloco "$@"\n'}
        if shutil.which("redis-cli") is None:
            scripts["redis-cli"] = REDIS_CLI.format(python=sys.executable)
        for name, text in scripts.items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o700)
        self._environment["PATH"] = f"{binaries}:{os.environ['PATH']}"
        self._add, self._remove = re.findall(r"```sh\n(.*?)```", PAGE.read_text().partition(SECTION)[2], re.DOTALL)[:2]
        self.run("diloco acl --run my-run --passwords secrets.env > users.acl")

    def run(self, script: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-ec", script],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _at(self, ports: Sequence[int], script: str) -> str:
        assert "192.168.1.10" in script
        script = script.replace("192.168.1.10", " ".join(map(str, ports)))
        return self.run(script.replace("-h $host", "-h 127.0.0.1 -p $host"))

    def adds_carl(self, *ports: int) -> None:
        assert "rror" not in self._at(ports, self._add)

    def removes_carl(self, *ports: int) -> None:
        assert "rror" not in self._at(ports, self._remove)

    def login(self, variable: str) -> str:
        passwords = dict(line.split("=") for line in (self.folder / "secrets.env").read_text().splitlines())
        return passwords[f"REDIS_{variable}_PASSWORD"]

    @contextmanager
    def party(self, name: str, url: str, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
        environment = self._environment | {"DILOCO_REDIS_URL": url, "DILOCO_RUN": "my-run", "DILOCO_HTTP_PORT": "0"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "diloco", *command], env=environment, stdout=log, stderr=log, cwd=self.folder
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def carl(self, url: str) -> str:
        return url.replace("://", f"://learner-carl:{self.login('LEARNER_CARL')}@", 1)


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


@pytest.fixture
def server(operator: Operator) -> Iterator[Node]:
    folder, address = operator.folder / "redis", ("127.0.0.1", free_port())
    node = Node("redis", folder, [str(find_server()), str(folder / "redis.conf")], address)
    node.configure(f"aclfile {operator.folder}/users.acl", 'save ""', "appendonly yes")
    node.start()
    yield node
    node.kill()


async def until_refused(url: str) -> str:
    """Why it is let in no more, once its server answers."""
    async with asyncio.timeout(HANGING_S):
        while True:
            with suppress(BusUnavailable):
                try:
                    bus = await connect(url, "my-run")
                except UsageError as error:
                    return str(error)
                await bus.close()
            await asyncio.sleep(0.1)


async def test_a_learner_is_added_and_removed_and_each_outlives_a_restart(operator: Operator, server: Node) -> None:
    """It trains as itself. Once removed it ends within seconds, and says why; nobody else notices."""
    port = server.address[1]
    url = f"redis://127.0.0.1:{port}"
    syncer_url = url.replace("://", f"://syncer:{operator.login('SYNCER')}@")
    syncer = None
    while syncer is None:
        with suppress(BusUnavailable):
            syncer = await connect(syncer_url, "my-run")
    await syncer.ensure_scripts()
    await asyncio.to_thread(operator.adds_carl, port)
    carl = await connect(operator.carl(url), "my-run")
    assert await carl.write_report(samples.report("carl")) is None
    with pytest.raises(DilocoError, match="'anna' does not match user 'learner-carl'"):
        await carl.write_report(samples.report("anna"))
    server.kill()
    server.start()
    await until_answered(syncer.ensure_scripts)
    await until_answered(lambda: carl.write_report(samples.report("carl", number=2)))

    await asyncio.to_thread(operator.removes_carl, port)
    with pytest.raises(UsageError, match=r"user 'learner-carl': .* or the user was deleted"):
        await until_answered(lambda: carl.write_report(samples.report("carl", number=3)))
    await carl.close()
    assert [seen.report.learner for seen in await syncer.read_reports()] == ["carl"]
    server.kill()
    server.start()
    assert "refuses the login of user 'learner-carl'" in await until_refused(operator.carl(url))
    await syncer.close()


@pytest.mark.slow
async def test_a_learner_that_trains_and_is_removed_ends_and_says_why(operator: Operator, server: Node) -> None:
    port = server.address[1]
    url = f"redis://127.0.0.1:{port}"
    await asyncio.to_thread(operator.adds_carl, port)
    sizes = ("--model", "nano", "--fragments", "4", "--sync-interval", "6", "--seq-len", "64", "--batch", "4")
    learner = ("learner", "--learner-id", "carl", *sizes, "--tokens", "100M", "--threads", "1")
    with (
        operator.party("syncer", url.replace("://", f"://syncer:{operator.login('SYNCER')}@"), "syncer"),
        operator.party("carl", operator.carl(url), *learner) as carl,
    ):
        viewer = url.replace("://", f"://viewer:{operator.login('VIEWER')}@")
        async with asyncio.timeout(HANGING_S), open_bus(viewer, "my-run") as bus:
            while not any(seen.report.step > 20 for seen in await bus.read_reports()):
                await asyncio.sleep(0.2)
        await asyncio.to_thread(operator.removes_carl, port)
        status = await asyncio.to_thread(carl.wait, HANGING_S)
    said = (operator.folder / "carl.log").read_text()
    assert status not in (0, 75), said
    assert "refuses the login of user 'learner-carl'" in said


@pytest.mark.slow
async def test_whoever_is_told_to_every_server_is_known_to_those_that_take_over(operator: Operator) -> None:
    """One that comes back from the dead still knows whom it knew: its own file says so."""
    with SentinelServers(password=operator.login("OPERATOR")) as servers:
        nodes = [node for name, node in servers.nodes.items() if name.startswith("redis")]
        for node in nodes:
            for line in (operator.folder / "users.acl").read_text().splitlines():
                if not line.startswith("user default"):
                    node.ask("ACL", "SETUSER", *re.findall(r"\([^)]*\)|\S+", line)[1:])
        ports = [node.address[1] for node in nodes]
        syncer = await connect(servers.url.replace("://", f"://syncer:{operator.login('SYNCER')}@"), "my-run")
        await syncer.ensure_scripts()
        await asyncio.to_thread(operator.adds_carl, *ports)
        url = operator.carl(servers.url)
        carl = await connect(url, "my-run")
        (lost,) = servers.primaries()
        servers.kill(lost)
        await moved(servers, lost)
        await until_answered(syncer.ensure_scripts)
        await until_answered(lambda: carl.write_report(samples.report("carl", number=2)))
        servers.start(lost)
        await asyncio.to_thread(servers.wait_until, lambda: lost in servers.replicas())
        assert servers.nodes[lost].ask("ACL", "GETUSER", "learner-carl") is not None

        await asyncio.to_thread(operator.removes_carl, *ports)
        with pytest.raises(UsageError, match="refuses the login of user 'learner-carl'"):
            await until_answered(lambda: carl.write_report(samples.report("carl", number=9)))
        await carl.close()
        (lost,) = servers.primaries()
        servers.kill(lost)
        await moved(servers, lost)
        assert "refuses the login of user 'learner-carl'" in await until_refused(url)
        servers.start(lost)
        await asyncio.to_thread(servers.wait_until, lambda: lost in servers.replicas())
        for node in nodes:
            assert node.ask("ACL", "GETUSER", "learner-carl") is None
        await syncer.close()
