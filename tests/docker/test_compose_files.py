"""What can be said about the compose files without an engine."""

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions as rx
import yaml
from redis import Redis

from diloco.pipeline.bus.embedded import find_server, free_port
from diloco.pipeline.settings import (
    EvaluatorProcess,
    LearnerProcess,
    LearnerSettings,
    SyncerProcess,
    SyncerSettings,
    SyncSettings,
    TrainerSettings,
    defaults,
    load,
)
from tests import HANGING_S

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "compose.yaml", *sorted((ROOT / "deploy" / "compose").glob("*.yaml"))]
KNOWN = {
    f"DILOCO_{name.upper()}" for kind in (SyncerProcess, LearnerProcess, EvaluatorProcess) for name in kind.model_fields
}


def variables(path: Path) -> set[str]:
    return set(re.findall(r"DILOCO_[A-Z_]+", path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_a_setting(path):
    """A setting that is renamed or removed is noticed here, not by a container that ignores its variable."""
    assert variables(path) <= KNOWN


def test_every_setting_of_the_run_can_be_given():
    """A run in containers can be given each setting that its parties must agree on; groups are for Redis Cluster."""
    agreed = {f"DILOCO_{name.upper()}" for kind in (SyncSettings, TrainerSettings) for name in kind.model_fields}
    assert agreed - variables(ROOT / "compose.yaml") == {"DILOCO_GROUPS"}


def test_containers_are_stopped_later_than_their_processes_give_up():
    """`docker compose stop` leaves a syncer the time to checkpoint and a learner the time to publish."""
    grace_s = {
        int(seconds) for seconds in re.findall(r"stop_grace_period: (\d+)s", (ROOT / "compose.yaml").read_text())
    }
    given_up_s = (defaults(SyncerSettings)["shutdown_s"], defaults(LearnerSettings)["leave_s"])
    assert min(grace_s) > max(given_up_s)


def test_builds_need_nothing_that_an_old_builder_lacks():
    """The Dockerfile is one for the classic builder too: no frontend line, no mounts, no heredocs."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert not re.search(r"^#\s*syntax\s*=|--mount|<<", text, re.MULTILINE | re.IGNORECASE)


def test_images_have_the_wheel_and_not_the_checkout():
    """Only the stage that builds the wheel copies the sources."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM .* AS (\w+)\n((?:(?!FROM ).*\n)*)", text, re.MULTILINE))
    assert [name for name, lines in stages.items() if "COPY . ." in lines] == ["wheel"]
    for name in ("syncer", "learner"):
        assert "COPY --from=wheel /dist /dist\nRUN pip install --no-deps /dist/*.whl\n" in stages[name]


def service(name: str) -> str:
    """The lines of one service in compose.yaml."""
    found = re.search(rf"^  {name}:\n((?: {{4}}.*\n|\n)+)", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    assert found, f"there is no service {name}"
    return found[1]


@pytest.mark.parametrize("name", ["syncer", "learner"])
def test_what_is_scaled_has_nothing_that_only_one_container_can_have(name):
    """No name of its own, and no single port of this machine but one that a variable, named in the head of the file,
    makes a range: `--scale` must work."""
    text, head = service(name), (ROOT / "compose.yaml").read_text()
    assert "container_name" not in text
    assert "DILOCO_SYNCER_ID" not in text
    for line in re.findall(r"^ *ports:.*", text, re.MULTILINE):
        (variable,) = re.findall(r"127\.0\.0\.1:\$\{(\w+):-\d+\}:\d+\"", line)
        first, last = map(int, re.findall(rf"# .* {variable}=(\d+)-(\d+) docker compose up .*--scale {name}=", head)[0])
        assert last - first >= 10


@pytest.mark.parametrize("name", ["syncer", "learner", "evaluator"])
def test_each_party_logs_in_as_its_own_redis_user(name):
    """With a password from the environment; the default, which is no secret, is the one that Redis is started with."""
    (url,) = re.findall(r"DILOCO_REDIS_URL: (.*)", service(name))
    given = f"${{REDIS_{name.upper()}_PASSWORD:-{name}-inside}}"
    assert url == f"redis://{name}:{given}@redis:6379/0"
    assert f"REDIS_{name.upper()}_PASSWORD: {given}\n" in service("redis")


def test_redis_starts_with_the_users_that_are_shipped_and_gets_a_port_only_with_passwords_of_ones_own():
    """In lan.yaml a missing password is an error that names its variable."""
    redis, lan = service("redis"), (ROOT / "deploy/compose/lan.yaml").read_text()
    assert "./deploy/users.acl" in redis
    assert "ports:" not in redis
    for name in set(re.findall(r"REDIS_[A-Z]+_PASSWORD", (ROOT / "deploy" / "users.acl").read_text())):
        assert re.search(rf"^      {name}: \$\{{{name}:\?.+\}}$", lan, re.MULTILINE)
        assert f"{name}: " in redis
    script = (ROOT / "deploy" / "redis.sh").read_text()
    for option in ("--appendonly yes", "--maxmemory-policy noeviction", "--proto-max-bulk-len 64mb", "--aclfile"):
        assert option in script


def test_redis_knows_after_a_restart_whom_the_file_names_and_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "given.acl").write_text("# users\nuser syncer on #{REDIS_SYNCER_PASSWORD} +ping\n")
    (tmp_path / "users.acl").write_text("user syncer on #00 +ping\nuser learner-bert on #11\n")
    script, environment = server_script(tmp_path, "")
    script = script.replace(f"{ROOT}/deploy/users.acl", f"{tmp_path}/given.acl")
    environment |= {"REDIS_SYNCER_PASSWORD": "secret", "MORE_USERS": ""}
    for _ in range(2):
        subprocess.run(["/bin/sh", "-c", script], env=environment, check=True)
        digest = hashlib.sha256(b"secret").hexdigest()
        known = f"user syncer on #{digest} +ping\n"
        assert (tmp_path / "users.acl").read_text() == known
        subprocess.run(["/bin/sh", "-c", script], env=environment | {"REDIS_SYNCER_PASSWORD": ""}, check=False)
        assert (tmp_path / "users.acl").read_text() == known, "a start that fails forgets nobody"


def test_all_syncers_share_one_volume_for_checkpoints_and_tape():
    """Whoever takes the lead saves where the one before did; each archives the tape into files of its own."""
    text = service("syncer")
    (folder,) = re.findall(r'volumes: \["checkpoints:(.*)"\]', text)
    for name in ("DILOCO_CHECKPOINT_DIR", "DILOCO_TAPE_DIR"):
        assert re.search(rf"{name}: {folder}/", text)


def gpus_of(profile: str | None) -> dict[str, list[str]]:
    """Services that gpu.yaml starts under a profile -> the GPUs that each may use."""
    found = {}
    for name, one in yaml.safe_load((ROOT / "deploy/compose/gpu.yaml").read_text())["services"].items():
        if "profiles" not in one or profile in one["profiles"]:
            (device,) = one["deploy"]["resources"]["reservations"]["devices"]
            assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
            assert "count" not in device
            found[name] = device["device_ids"]
    return found


def test_each_gpu_learner_has_gpus_of_its_own():
    """A profile for each number of GPUs, and for each way to make equal sets of 8; without one there is no learner, not
    one on a GPU of somebody else's."""
    assert gpus_of(None) == {}
    for count in range(1, 9):
        assert list(gpus_of(f"gpus-{count}").values()) == [[str(number)] for number in range(count)]
    for learners, size in ((4, 2), (2, 4), (1, 8)):
        sets = list(gpus_of(f"gpus-{learners}x{size}").values())
        assert list(map(len, sets)) == [size] * learners
        assert [number for one in sets for number in one] == list(map(str, range(8)))


def test_a_gpu_learner_is_the_learner_of_the_other_file():
    """Nothing of it is said again: it is extended. Its device is a setting's: one, or a set with a rank on each. A
    profile's name is one that Compose takes."""
    services = yaml.safe_load((ROOT / "deploy/compose/gpu.yaml").read_text())["services"]
    learner = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["learner"]
    assert set(services["learner"]) == {"environment", "profiles", "deploy"}
    for name, one in services.items():
        (gpus,) = one["deploy"]["resources"]["reservations"]["devices"]
        here = range(len(gpus["device_ids"]))
        asked = "cuda" if len(here) == 1 else "+".join(f"cuda:{number}" for number in here)
        assert one["environment"] == {"DILOCO_DEVICE": asked}
        assert load(LearnerProcess, {"device": asked}).device == asked
        if name != "learner":
            assert one["extends"] == {"file": "compose.yaml", "service": "learner"}
            assert one["depends_on"] == learner["depends_on"]
            more = {"shm_size"} if len(here) > 1 else set()
            assert set(one) == {"extends", "environment", "depends_on", "profiles", "deploy"} | more
            assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", profile) for profile in one["profiles"])


# --- servers that fail over ------------------------------------------------------------------------------

FAILOVER = ("deploy/compose/sentinel.yaml", "deploy/compose/cluster.yaml")


def overlay(name: str) -> dict[str, dict[str, Any]]:
    """Services of one of them, which adds to compose.yaml's."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / name).read_text())["services"]
    return found


@pytest.mark.parametrize("name", FAILOVER)
def test_each_server_knows_the_users_that_follow_it_and_watch_it(name):
    """Their passwords come from the environment, and from no command line."""
    users = (ROOT / "deploy" / "failover.acl").read_text()
    servers = {key: one for key, one in overlay(name).items() if re.fullmatch("redis(-[0-9])?", key)}
    assert len(servers) in (3, 6)
    for key, one in servers.items():
        assert set(re.findall(r"REDIS_\w+_PASSWORD", users)) < set(one["environment"])
        assert one["environment"]["MORE_USERS"] == "/etc/diloco/failover.acl"
        assert "./deploy/failover.acl:/etc/diloco/failover.acl:ro" in one["volumes"]
        assert not re.search("PASSWORD|masterauth", " ".join(one["command"]))
        if key != "redis":
            assert one["extends"] == {"file": "compose.yaml", "service": "redis"}
            assert f"{key}:/data" in one["volumes"], "each has a volume of its own"
    addresses = [one["networks"]["default"]["ipv4_address"] for one in overlay(name).values() if "networks" in one]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("name", FAILOVER)
@pytest.mark.parametrize("party", ["syncer", "learner", "evaluator"])
def test_a_party_reaches_all_that_know_who_is_primary_as_its_own_user(name, party):
    services = overlay(name)
    url = services[party]["environment"]["DILOCO_REDIS_URL"]
    login = f"{party}:${{REDIS_{party.upper()}_PASSWORD:-{party}-inside}}@"
    assert login in url
    asked = [
        one
        for key, one in services.items()
        if re.fullmatch("sentinel-[0-9]" if "sentinel" in name else "redis(-[0-9])?", key)
    ]
    port = 26379 if "sentinel" in name else 6379
    wanted = [one["networks"]["default"]["ipv4_address"] for one in asked]
    hosts = url.partition("@")[2].partition("/")[0]
    net = "${REDIS_NET:-172.30.75}"
    assert hosts.replace(net, "N").split(",") == [
        f"{address.replace(net, 'N')}{'' if port == 26379 else f':{port}'}" for address in wanted
    ]


def server_script(folder: Path, entrypoint: str) -> tuple[str, dict[str, str]]:
    """deploy/redis.sh with its volume in a folder, and its environment. entrypoint: what the image's is here."""
    (folder / "docker-entrypoint.sh").write_text(f"#!/bin/sh\n{entrypoint}\n")
    (folder / "docker-entrypoint.sh").chmod(0o700)
    script = (ROOT / "deploy" / "redis.sh").read_text().replace("/data/", f"{folder}/")
    script = script.replace("/etc/diloco/", f"{ROOT}/deploy/")
    names = set(re.findall(r"REDIS_\w+_PASSWORD", "".join(p.read_text() for p in (ROOT / "deploy").glob("*.acl"))))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "MORE_USERS": f"{ROOT}/deploy/failover.acl"}
    return script, environment | {name: f"secret-of-{name}" for name in names}


def test_the_redis_that_follows_another_one_has_its_password_in_a_file(tmp_path: Path) -> None:
    """Also though the passwords of users are taken out of its environment. One that was changed holds at the next
    start, and whom it follows is as it was."""
    script, environment = server_script(tmp_path, 'echo "$@"')
    command = ["/bin/sh", "-c", script, "sh", "--min-replicas-to-write", "1"]
    for password, other in (("secret-one", "10.0.0.1 6379"), ("secret-two", "10.0.0.7 6379")):
        environment |= {"REDIS_REPLICA_PASSWORD": password, "REPLICA_OF": other}
        said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        assert "secret" not in said
        assert said.split()[:2] == ["redis-server", f"{tmp_path}/following.conf"]
        assert said.endswith("--min-replicas-to-write 1\n")
        lines = (tmp_path / "following.conf").read_text().splitlines()
        assert {f"masterauth {password}", "replicaof 10.0.0.1 6379"} < set(lines)
        assert "client-output-buffer-limit replica 0 0 0" in lines, "a chunk of payloads cuts no replica off"
        assert len([line for line in lines if line.startswith("masterauth")]) == 1
        assert (tmp_path / "following.conf").stat().st_mode & 0o077 == 0


def test_no_role_is_on_a_command_line() -> None:
    """Whenever a container starts, it would be again what it was at first."""
    servers = overlay("deploy/compose/sentinel.yaml")
    assert "replicaof" not in (ROOT / "deploy/compose/sentinel.yaml").read_text()
    assert "REPLICA_OF" not in servers["redis"]["environment"]
    first = f"{servers['redis']['networks']['default']['ipv4_address']} 6379"
    assert [servers[name]["environment"]["REPLICA_OF"] for name in ("redis-1", "redis-2")] == [first] * 2


class Containers:
    """The three servers of sentinel.yaml, without an engine."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, [free_port() for _ in range(3)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._users = folder / "given.acl"
        shipped = (ROOT / "deploy" / "users.acl").read_text()
        self._users.write_text(f"{shipped}user tester on nopass ~* &* +@all\n")

    def start(self, *numbers: int) -> None:
        for number in numbers:
            folder = self._folder / f"redis-{number}"
            folder.mkdir(exist_ok=True)
            script, environment = server_script(folder, f'shift; exec "{find_server()}" "$@"')
            script = script.replace(f"{ROOT}/deploy/users.acl", str(self._users))
            options = ("--bind", "127.0.0.1", "--port", str(self._ports[number]), "--repl-diskless-sync-delay", "0")
            if number:
                environment["REPLICA_OF"] = f"127.0.0.1 {self._ports[0]}"
            command = ["/bin/sh", "-c", script, "sh", *options, "--logfile", "log"]
            self._running[number] = subprocess.Popen(command, env=environment, cwd=folder)

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self._running[number].kill()
            self._running.pop(number).wait()

    def ask(self, number: int, *words: str, user: str = "tester") -> Any:
        """Its answer, once it is up."""
        at, password = self._ports[number], f"secret-of-REDIS_{user.upper()}_PASSWORD"
        deadline = time.monotonic() + HANGING_S
        while True:
            try:
                with Redis(port=at, username=user, password=password, decode_responses=True, protocol=2) as client:
                    return client.execute_command(*words)
            except (rx.ConnectionError, rx.BusyLoadingError):
                assert time.monotonic() < deadline, (self._folder / f"redis-{number}" / "log").read_text()
                time.sleep(0.02)

    def follow(self, number: int, other: int | None) -> None:
        """As sentinels have it done. other: None makes it primary."""
        whom = ("NO", "ONE") if other is None else ("127.0.0.1", str(self._ports[other]))
        self.ask(number, "SLAVEOF", *whom, user="sentinel")
        self.ask(number, "CONFIG REWRITE", user="sentinel")

    def follows(self, number: int) -> int | None:
        """Whom; None: it is primary."""
        role = self.ask(number, "ROLE")
        return None if role[0] == "master" else self._ports.index(int(role[2]))

    def end(self) -> None:
        self.kill(*self._running)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    found = Containers(tmp_path)
    yield found
    found.end()


@pytest.mark.redis
def test_servers_that_start_again_are_what_sentinels_have_made_of_them(containers: Containers) -> None:
    """Else the first primary comes back as one with what it had when it died, and the others throw away all since."""
    containers.start(0, 1, 2)
    assert [containers.follows(number) for number in range(3)] == [None, 0, 0]
    containers.ask(0, "SET", "version", "10")
    containers.kill(0)
    containers.follow(1, None)
    containers.follow(2, 1)
    containers.ask(1, "SET", "version", "900")
    containers.kill(1)
    containers.start(1)
    assert containers.follows(1) is None, "the new primary was killed too, and is back before anybody takes its place"
    containers.kill(1, 2)
    containers.start(0, 1, 2)
    assert [containers.follows(number) for number in range(3)] == [None, None, 1]
    assert [containers.ask(number, "GET", "version") for number in (0, 1)] == ["10", "900"]
    containers.follow(0, 1)
    containers.kill(0)
    containers.start(0)
    assert containers.follows(0) == 1


def test_a_sentinel_takes_a_changed_password_and_forgets_nothing_that_it_has_found_out(tmp_path: Path) -> None:
    """With the old one no server lets it in, and nobody would take a dead primary's place."""
    environment = server_script(tmp_path, "")[1] | {"PRIMARY": "10.0.0.1"}
    script, config = (ROOT / "deploy" / "sentinel.sh").read_text(), tmp_path / "sentinel.conf"
    script = script.replace("/data", str(tmp_path))
    for password in ("secret-one", "secret-two"):
        command = ["/bin/sh", "-c", script]
        subprocess.run(command, env=environment | {"REDIS_SENTINEL_PASSWORD": password}, check=True)
        lines = config.read_text().splitlines()
        assert len(lines) == len(set(lines))
        assert {f"sentinel sentinel-pass {password}", f"sentinel auth-pass diloco {password}"} < set(lines)
        assert [line for line in lines if "secret" in line and password not in line] == []
        assert [line.split()[3] for line in lines if line.startswith("sentinel monitor")] == ["10.0.0.1"]
        config.write_text(config.read_text() + "sentinel known-replica diloco 10.0.0.2 6379\n")
        environment["PRIMARY"] = "10.0.0.9"
    assert "sentinel known-replica diloco 10.0.0.2 6379" in lines
