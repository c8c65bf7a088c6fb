"""Default names of parties."""

import os
import re
import socket


def own_name(nonce: str) -> str:
    """Return a name for this process: host, process id, and a part of the nonce.

    Characters of the host name that a party's name may not have become "-".
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host[:40]}-{os.getpid()}-{nonce[:6]}"
