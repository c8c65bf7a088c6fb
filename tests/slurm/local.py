"""A Slurm of one node on this machine, for tests and for trying: its own munged, slurmctld and slurmd, in a folder.

    python -m tests.slurm.local FOLDER      # until Ctrl-C; prints what to export

Debian's package slurm-wlm has all of it. It runs as root, since slurmd starts jobs as their users. Nothing of a Slurm
that is installed here is touched: sockets, keys, ports and logs are its own.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.parties import ends_of_logs, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
ENDS_S = 60.0
"""For jobs that were killed, before their Slurm ends too."""
NODE = "here"
CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=30
MinJobAge=300
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes={node} Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""


def why_not() -> str:
    """What is missing for it here; empty: nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class LocalSlurm:
    """It runs inside the block."""

    def __init__(self, folder: Path) -> None:
        """folder: of its own; jobs find their logs where they say."""
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def environ(self) -> dict[str, str]:
        """For Slurm's commands."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            ports = {"controller": one.getsockname()[1], "daemon": other.getsockname()[1]}
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(folder=self.folder, host=host, node=NODE, **ports)
        (self.folder / "slurm.conf").write_text(conf)
        try:
            files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "socket": "socket"}
            own = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
            self._start("munged", "--foreground", "--force", *own)
            self._until(lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "-D", "-i")
            self._until(lambda: "UP" in self.ask("scontrol", "ping"))
            self._start("slurmd", "-D", "-N", NODE)
            self._until(lambda: "idle" in self.ask("sinfo", "--noheader", "-o", "%t"))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Its jobs, then itself."""
        if len(self._processes) == 3:
            self.ask("scancel", "--user=root")  # what has yet to begin
            self.ask("scancel", "--user=root", "--signal=KILL", "--full")
            ended = time.monotonic() + ENDS_S
            while self.ask("squeue", "--noheader") and time.monotonic() < ended:
                time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, *command: str, environ: Mapping[str, str] = os.environ) -> str:
        """What a command of Slurm says, errors too. environ: a job's is that of its `sbatch`."""
        environ = {**environ, **self.environ}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, env=environ, text=True, check=False, **output).stdout

    def told(self) -> str:
        """The ends of its logs."""
        return ends_of_logs(self.folder)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out.log").open("wb") as log:
            environ = os.environ | self.environ
            self._processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))

    def _until(self, true: Callable[[], bool]) -> None:
        def there() -> bool:
            ended = [process.args for process in self._processes if process.poll() is not None]
            assert not ended, f"{ended} ended\n{self.told()}"
            return true()

        wait_for(there, shown=self.told)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    with LocalSlurm(Path(sys.argv[1]).resolve()) as slurm:
        print(*(f"export {name}={value}" for name, value in slurm.environ.items()), sep="\n", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
