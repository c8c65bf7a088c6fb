"""A Prometheus of a test's own on this machine, with the files of `deploy/monitoring`. Debian's package has all."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests import HANGING_S

FILES = Path(__file__).parents[2] / "deploy/monitoring"
PROGRAMS = ("prometheus", "promtool")


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"no {', '.join(missing)} here (Debian: the package prometheus)" if missing else ""


def promtool(*arguments: object, given: bytes = b"") -> str:
    """What it says; a failure is one of the test's."""
    done = subprocess.run(
        [shutil.which("promtool") or "", *map(str, arguments)], input=given, capture_output=True, check=False
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def config_for(folder: Path, targets: Sequence[str], token: str) -> Path:
    """The shipped configuration, with these targets in place of the name that containers have, and a second for 15."""
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "token").write_text(token)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def sooner(rules: str) -> str:
    """The shipped alerts for scrapes of a second: `for` is 3 s, and ranges that bridge a minute bridge 5 s."""
    return re.sub(r"for: \d+m", "for: 3s", rules).replace("[1m]", "[5s]")


class LocalPrometheus:
    """Runs for as long as the `with` block; in a folder of its own, on a port of loopback."""

    def __init__(self, folder: Path, port: int, targets: Sequence[str], token: str = "") -> None:
        self._folder, self._address = folder, f"127.0.0.1:{port}"
        folder.mkdir()
        self.config = config_for(folder, targets, token)
        (folder / "rules.yml").write_text(sooner((FILES / "rules.yml").read_text()))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    shutil.which("prometheus") or "",
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + HANGING_S
        while True:
            try:
                self.ask("/-/ready")
                return self
            except OSError:
                assert self._process.poll() is None, self.said()
                assert time.monotonic() < until, self.said()
                time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def said(self) -> str:
        """Its log."""
        return (self._folder / "log").read_text()[-3000:]

    def ask(self, path: str, **query: str) -> bytes:
        """An answer of its HTTP side."""
        with urllib.request.urlopen(f"http://{self._address}{path}?{urllib.parse.urlencode(query)}", timeout=10) as got:
            found: bytes = got.read()
            return found

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series that an expression has now."""
        try:
            answer = json.loads(self.ask("/api/v1/query", query=expr))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Pending and firing ones, by name."""
        found = json.loads(self.ask("/api/v1/alerts"))["data"]["alerts"]
        return {one["labels"]["alertname"]: one for one in found}

    def targets(self) -> dict[str, str]:
        """Last error of each target ("": none), by its address."""
        found = json.loads(self.ask("/api/v1/targets"))["data"]["activeTargets"]
        return {one["labels"]["instance"]: one["lastError"] for one in found}
