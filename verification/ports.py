"""Ports for servers that are told where to listen before they do, and find the same port free when they start again.

Systems give connections ports from 32768 on: one of those may be taken by any connection before a server listens on it.
So ports are drawn from below, and by chance: no two processes draw alike.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

LOWEST: Final = 10_000
HIGHEST: Final = 32_000
_CHANCE: Final = random.SystemRandom()  # whatever the process was seeded with


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different ports of `host` that nobody listens on, and that no connection gets as its own.

    Raises `OSError` if `host` is not an address of this machine.
    """
    with socket.socket() as any_port:
        any_port.bind((host, 0))
    found: list[int] = []
    while len(found) < count:
        port = _CHANCE.randrange(LOWEST, HIGHEST)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind((host, port))
            if port not in found:
                found.append(port)
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port of `host`, as `free_ports` does."""
    return free_ports(1, host)[0]
