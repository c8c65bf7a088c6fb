"""Names of parties to which nobody has given one."""

import os
import re
import socket


def own_name(nonce: str) -> str:
    """Of this process: host, process id, some of a nonce. A host's name may have characters that a party's has not."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host[:40]}-{os.getpid()}-{nonce[:6]}"
