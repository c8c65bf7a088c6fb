"""Certificates of an authority of our own, and a server that can use them."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import find_server
from tests import HANGING_S


def _binaries(named: Path | None) -> Iterator[Path]:
    if named is not None:
        yield named
        return
    yield find_server()
    yield from (Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name)))


def tls_binary(named: Path | None) -> Path:
    """A server that speaks TLS: the one that is named for tests; else the embedded one, or one from PATH.

    The test is skipped where none does, or the openssl program is missing, which makes certificates.
    """
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program, to make certificates")
    tried = list(_binaries(named))
    for binary in tried:
        # Without a certificate none starts; each says whether that is all that it lacks.
        asked = [str(binary), "--port", "0", "--tls-port", "1", "--save", ""]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=HANGING_S, check=False)
        if "No tls-cert-file" in done.stdout:
            return binary
    pytest.skip(f"built without TLS: {', '.join(map(str, tried))}")


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and what it issued."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issued(self, name: str) -> tuple[Path, Path]:
        """Certificate and key."""
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def lines(self, clients: str = "no") -> list[str]:
        """Of a server's configuration. clients: yes, no or optional: whether it wants their certificates."""
        certificate, key = self.issued("server")
        files = [f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {self.ca}"]
        return [*files, f"tls-auth-clients {clients}"]


def make_authority(folder: Path, host: str = "127.0.0.1") -> Authority:
    """An authority, a certificate of a server's address, and one of a client."""
    folder.mkdir()
    program = shutil.which("openssl") or "openssl"

    def openssl(*args: str) -> None:
        subprocess.run([program, *args], cwd=folder, check=True, capture_output=True, timeout=HANGING_S)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(*new, "-subj", f"/CN={folder.name}", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        issue = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{host}")
        openssl(*new, *issue, *names, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    return Authority(folder)
