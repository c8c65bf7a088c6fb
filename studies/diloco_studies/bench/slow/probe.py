"""How long a small call to Redis takes on a line that others fill: PING twice a second, until the input ends.

    python -P probe.py HOST PORT

The password is the first line of its input. It says a line for each call: when it began, and how long it took. It
imports nothing of ours, so that it weighs nothing beside what is measured.
"""

import json
import select
import socket
import sys
import time

EVERY_S = 0.5


def main() -> None:
    """Until its standard input ends."""
    host, port, password = sys.argv[1], int(sys.argv[2]), sys.stdin.readline().strip()
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = connection.makefile("rb")

        def ask(text: str) -> float:
            began = time.monotonic()
            connection.sendall(text.encode() + b"\r\n")
            answers.readline()
            return time.monotonic() - began

        ask(f"AUTH {password}")
        while not select.select([0], [], [], EVERY_S)[0]:
            at = time.monotonic()
            print(json.dumps([at, ask("PING")]), flush=True)


if __name__ == "__main__":
    main()
