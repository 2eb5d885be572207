"""Find the address of a sink outside of the flow, and the secret and certificate to connect with.

A sink writes its address to its directory. It may start later than the flow, and have another port after a restart, so
the address is read for each connection. The address that was known when the flow was made is sent to other machines.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from railgun.flows.errors import ConnectorError

DATA: Final = "railgun-sink"
ADDRESS: Final = "sink.json"
SECRET: Final = "secret"


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """The address of a sink, with all that is needed to connect.

    >>> SinkLocator("10.0.0.7:7373", secret="00ff").find()
    SinkAddress(host='10.0.0.7', port=7373)
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """The certificate to trust (PEM)."""

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for connections, or None without TLS."""
        if self.certificate is None:
            return None
        return ssl.create_default_context(cadata=self.certificate)


class SinkLocator:
    """Finds a sink by its address and secret, or by the directory it works in."""

    def __init__(
        self,
        address: str | None = None,
        *,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
        certificate: str | Path | None = None,
    ) -> None:
        self.address = address
        self.data = Path(data).absolute()
        self._secret = _secret(secret)
        self._certificate = None if certificate is None else Path(certificate).read_text("ascii")
        self._last_address: SinkAddress | None = None
        if address is not None and not address.rpartition(":")[2].isdigit():
            raise ConnectorError(f"{address!r} is not the address of a sink: it is host:port")
        with contextlib.suppress(OSError):
            self.find()

    def __str__(self) -> str:
        return self.address or str(self.data)

    def find(self) -> SinkAddress:
        """Return the sink's address; raise `OSError` if it was never known."""
        try:
            self._last_address = self._look()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self._last_address is None:
                raise ConnectionRefusedError(
                    f"no sink works in {self.data}: start one (railgun sink), or set its address and secret"
                ) from error
        assert self._last_address is not None
        return self._last_address

    def _look(self) -> SinkAddress:
        secret, certificate = self._secret, self._certificate
        if secret is None:
            secret = bytes.fromhex((self.data / SECRET).read_text("ascii").strip())
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
        else:
            settings = json.loads((self.data / ADDRESS).read_text("utf-8"))
            host, port = str(settings["host"]), str(settings["port"])
            if certificate is None and settings.get("certificate"):
                certificate = Path(settings["certificate"]).read_text("ascii")
        return SinkAddress(host or "127.0.0.1", int(port), secret, certificate)


def _secret(secret: bytes | str | None) -> bytes | None:
    if secret is None or isinstance(secret, bytes):
        return secret
    try:
        return bytes.fromhex(secret)
    except ValueError as error:
        raise ConnectorError(f"the secret of a sink is hexadecimal: {error}") from error
