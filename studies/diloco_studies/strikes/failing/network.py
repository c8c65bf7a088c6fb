"""Machines of their own on one network, which can be cut off from each other. Linux, with the right to make networks.

    this process ── gateway ──┐
                              ├─ bridge `near` ─┬─ redis-1 ── learner-0 ── ...
    (namespace of the switch) │                 │
                              └─ bridge `far` ──┴─ redis-0 ── learner-2 ...      those that are cut off

A machine is a network namespace with an address. `cut_off` moves machines' cables to the other bridge: they reach each
other and nobody else, and what is sent to them is lost, as on a torn cable. No connection is reset.

The namespaces have no names. Each lives as long as a process that holds it, which the kernel kills with this one. So
nothing is left behind, however this process ends.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from diloco.pipeline.errors import UsageError
from diloco.pipeline.process import signals

CLONE_NEWNET = 0x40000000  # linux/sched.h
START_S = 5.0
NEAR, FAR = "near", "far"
NETWORKS = 256
"""From 198.18.0.0/16, which is set aside for tests of networks (RFC 2544)."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine."""

    name: str
    address: str
    namespace: str
    """Path of its network namespace."""
    cable: str
    """Name of the switch's end."""

    def inside(self) -> list[str]:
        """What stands before a command that is to run there."""
        return [_program("nsenter"), f"--net={self.namespace}"]


class Network:
    """A switch with the machines at it; leaving the block takes all away."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._holders: list[subprocess.Popen[bytes]] = []
        self._hosts: dict[str, Host] = {}
        self._switch = self._prefix = ""
        self._far: set[str] = set()

    def __enter__(self) -> Self:
        with self._ends:
            self._switch = self._hold()
            for bridge in (NEAR, FAR):
                self._at_switch("ip", "link", "add", bridge, "type", "bridge")
                self._at_switch("ip", "link", "set", bridge, "up")
            taken = _run("ip", "-o", "-4", "addr")
            number = next(one for one in range(os.getpid(), os.getpid() + NETWORKS) if f" {_of(one)}." not in taken)
            self._prefix = _of(number)
            gateway = f"dlc{os.getpid()}"[:15]
            _run("ip", "link", "add", gateway, "type", "veth", "peer", "name", "gateway", "netns", self._pid(-1))
            _run("ip", "addr", "add", f"{self._prefix}.1/24", "dev", gateway)
            _run("ip", "link", "set", gateway, "up")
            self._plug("gateway", NEAR)
            self._ends = self._ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def add(self, name: str) -> Host:
        """A machine of this name, at the switch."""
        number = len(self._hosts) + 2
        namespace, cable, address = self._hold(), f"port{number}", f"{self._prefix}.{number}"
        host = Host(name, address, namespace, cable)
        self._at_switch("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self._pid(-1))
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            _run(*host.inside(), "ip", *words)
        self._plug(cable, NEAR)
        self._hosts[name] = host
        return host

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __contains__(self, name: str) -> bool:
        return name in self._hosts

    def cut_off(self, names: Iterable[str]) -> None:
        """From all others, but not from each other and from those that are cut off already."""
        for name in names:
            self._far.add(name)
            self._plug(self._hosts[name].cable, FAR)

    def heal(self) -> None:
        """All reach each other again."""
        for name in self._far:
            self._plug(self._hosts[name].cable, NEAR)
        self._far.clear()

    def _plug(self, cable: str, bridge: str) -> None:
        self._at_switch("ip", "link", "set", cable, "master", bridge, "up")

    def _at_switch(self, *words: str) -> None:
        _run(_program("nsenter"), f"--net={self._switch}", *words)

    def _pid(self, which: int) -> str:
        return str(self._holders[which].pid)

    def _hold(self) -> str:
        """Path of a new namespace."""
        bound = [sys.executable, "-P", signals.__file__, str(os.getpid())]
        holder = subprocess.Popen(
            [*bound, _program("unshare"), "--net", _program("sleep"), "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders.append(holder)
        self._ends.callback(_end, holder)
        path = Path(f"/proc/{holder.pid}/ns/net")
        ours, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + START_S
        while holder.poll() is None and time.monotonic() < deadline:
            if path.readlink() != ours:
                return str(path)
            time.sleep(0.002)
        said = holder.stderr.read().decode(errors="replace").strip() if holder.poll() and holder.stderr else "no answer"
        raise UsageError(
            f"cannot create a separate network here ({said}): run as root, or in a user namespace: unshare --user "
            "--map-root-user --net sh -c 'ip link set lo up; COMMAND'"
        )


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    if holder.stderr is not None:
        holder.stderr.close()


def enter(namespace: str) -> None:
    """Have this process, which has no other threads, on that machine from now on.

    Raises:
        OSError: it may not.
    """
    with Path(namespace).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _of(number: int) -> str:
    return f"198.18.{number % NETWORKS}"


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise UsageError(f"a separate network needs the program {name}: install it (Debian: iproute2, util-linux)")
    return found


def _run(program: str, *words: str) -> str:
    command = [program if "/" in program else _program(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
