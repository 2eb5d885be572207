"""What all who listen have in common: the secret they keep, and where they dare to listen.

Rules:

1. A secret is made at the first start, in a file that only its owner can read, and stays the same.
2. Without TLS one listens on loopback only.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path
from typing import ClassVar, Final

from railgun.errors import RailgunError

LEAST_SECRET: Final = 16  # bytes


class OpenListenError(RailgunError):
    """Somebody would listen where strangers can reach it, without TLS."""

    code: ClassVar[str] = "NO_TLS"


class BadSecretError(RailgunError):
    """The file of the secret holds none."""

    code: ClassVar[str] = "BAD_SECRET"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secret_in(path: Path) -> bytes:
    """The secret in this file, made if there is none."""
    if not path.exists():
        keep_secret(path, secrets.token_bytes(32))
    told = path.read_text("ascii", errors="replace").strip()
    try:
        secret = bytes.fromhex(told)
    except ValueError:
        secret = b""
    if len(secret) < LEAST_SECRET:
        raise BadSecretError(
            f"{path} holds no secret: {2 * LEAST_SECRET} hexadecimal digits at least. Mend it, or take it away, and "
            "a new one is made at the next start."
        )
    return secret


def keep_secret(path: Path, secret: bytes) -> None:
    """Let this file hold this secret; only its owner can read it."""
    new = path.with_name(f"{path.name}.new")  # so that it is there wholly or not at all
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.hex())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
