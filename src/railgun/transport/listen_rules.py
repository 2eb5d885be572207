"""Rules of all listeners: keep the secret in a file, and listen without TLS only on loopback.

Rules:

1. The secret is generated at the first start, in a file that only its owner can read, and stays the same.
2. Without TLS a process listens on loopback addresses only.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path
from typing import ClassVar, Final

from railgun.errors import RailgunError

MIN_SECRET_BYTES: Final = 16  # bytes


class OpenListenError(RailgunError):
    """A listener without TLS would be reachable from other machines."""

    code: ClassVar[str] = "NO_TLS"


class BadSecretError(RailgunError):
    """The secret's file does not contain a valid secret."""

    code: ClassVar[str] = "BAD_SECRET"


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable only from this machine.

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
    """Return the secret in the file `path`; generate it if there is no file. Raises `BadSecretError`."""
    if not path.exists():
        keep_secret(path, secrets.token_bytes(32))
    text = path.read_text("ascii", errors="replace").strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < MIN_SECRET_BYTES:
        raise BadSecretError(
            f"{path} holds no secret: {2 * MIN_SECRET_BYTES} hexadecimal digits at least. Mend it, or take it away, "
            "and a new one is made at the next start."
        )
    return secret


def keep_secret(path: Path, secret: bytes) -> None:
    """Write the secret to a file that only its owner can read, completely or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.hex())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
