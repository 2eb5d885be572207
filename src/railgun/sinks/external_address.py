"""Where a sink outside of a flow is, and what it takes to be let in.

A sink says in its directory where it listens. It may come later than the flow, and on another port after a restart: so
that is read whenever a connection is made. What was known when the flow was made goes with it to other machines.
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
    """A sink as it is found.

    >>> Whereabouts("10.0.0.7:7373", secret="00ff").find()
    SinkAddress(host='10.0.0.7', port=7373)
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """What its certificate is checked with (PEM)."""

    def tls(self) -> ssl.SSLContext | None:
        """How to speak to it."""
        if self.certificate is None:
            return None
        return ssl.create_default_context(cadata=self.certificate)


class Whereabouts:
    """How a sink is looked for: by its address and secret, or by the directory it works in."""

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
        self._known: SinkAddress | None = None
        if address is not None and not address.rpartition(":")[2].isdigit():
            raise ConnectorError(f"{address!r} is no address of a sink: host:port")
        with contextlib.suppress(OSError):
            self.find()

    def __str__(self) -> str:
        return self.address or str(self.data)

    def find(self) -> SinkAddress:
        """Where it is; `OSError` if nobody knows yet."""
        try:
            self._known = self._look()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self._known is None:
                raise ConnectionRefusedError(
                    f"no sink works in {self.data}: start one (railgun sink), or say where it is and its secret"
                ) from error
        assert self._known is not None
        return self._known

    def _look(self) -> SinkAddress:
        secret, certificate = self._secret, self._certificate
        if secret is None:
            secret = bytes.fromhex((self.data / SECRET).read_text("ascii").strip())
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
        else:
            told = json.loads((self.data / ADDRESS).read_text("utf-8"))
            host, port = str(told["host"]), str(told["port"])
            if certificate is None and told.get("certificate"):
                certificate = Path(told["certificate"]).read_text("ascii")
        return SinkAddress(host or "127.0.0.1", int(port), secret, certificate)


def _secret(told: bytes | str | None) -> bytes | None:
    if told is None or isinstance(told, bytes):
        return told
    try:
        return bytes.fromhex(told)
    except ValueError as error:
        raise ConnectorError(f"the secret of a sink is hexadecimal: {error}") from error
