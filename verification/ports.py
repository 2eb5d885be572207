"""Free ports for servers that are told their port before they listen, and that find it free after a restart.

Systems give connections ports from 32768 on: any connection may take one of those before a server listens on it. So
ports are drawn at random from below that range: no two processes draw the same.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

LOWEST_PORT: Final = 10_000
HIGHEST_PORT: Final = 32_000
_CHANCE: Final = random.SystemRandom()  # does not depend on the seed of the process


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different ports of `host` on which no program listens, and which no connection is given.

    Raises `OSError` if `host` is not an address of this machine.
    """
    with socket.socket() as any_port:
        any_port.bind((host, 0))
    ports: list[int] = []
    while len(ports) < count:
        port = _CHANCE.randrange(LOWEST_PORT, HIGHEST_PORT)
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind((host, port))
            if port not in ports:
                ports.append(port)
    return ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port of `host`, as `free_ports` does."""
    return free_ports(1, host)[0]
