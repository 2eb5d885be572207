"""Connectors: programs outside push streams of messages into a flow, exactly once.

Each worker listens. A program (`railgun.ingest`) connects to any of them, says which streams it wants to send, sends
their messages with ids that go up, and hears what is in a committed snapshot. Rules and reasons:
docs/design/connectors.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, NoReturn

from railgun.client.payloads import from_json, from_msgpack
from railgun.engine.operators.functions import reason_to_refuse
from railgun.flows.errors import ConnectorError
from railgun.flows.source import Pushed
from railgun.transport import ingest_batch as outside

Decode = Literal["json", "text", "bytes", "msgpack", "message"] | Callable[[bytes], Any]
LEAST_SECRET: Final = 16  # bytes


class ConnectorMessage(NamedTuple):
    """A message with all there is to it (`decode="message"`)."""

    stream: str
    id: int
    time: int | None
    """What the connector says (µs)."""
    key: str | None
    payload: bytes


_DECODE: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": from_json, "text": bytes.decode, "bytes": bytes, "msgpack": from_msgpack,
}  # fmt: skip


class Connectors(Pushed[Any]):
    """What programs outside push. `name` is by what they find it, if a flow has several.

    >>> Connectors("orders", decode="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Connectors('orders'): decode is 'json', 'text', 'bytes', 'msgpack', ...

    `decode`: what becomes of a payload, in one word or as a function of the bytes. A message that cannot be decoded is
    refused, and its stream stands still until it is sent right; with `on_error="dead_letter"` it becomes one, and
    the stream goes on. `event_time`: records have the times of their messages. `port`: where worker 0 listens, worker
    1 at the next one; without, anywhere, and programs ask the job. `secret` (hexadecimal digits or bytes) is for those
    who cannot ask it; without, there is a new one each time.
    """

    def __init__(
        self,
        name: str = "connectors",
        decode: Decode = "json",
        *,
        event_time: bool = False,
        port: int | None = None,
        secret: bytes | str | None = None,
    ) -> None:
        self.name = name
        if not isinstance(name, str) or not name:
            raise ConnectorError(f"Connectors are found by a name, which {name!r} is not")
        if not callable(decode) and decode not in (*_DECODE, "message"):
            raise ConnectorError(
                f"{self}: decode is 'json', 'text', 'bytes', 'msgpack', 'message' or a function, not {decode!r}"
            )
        if callable(decode) and (why := reason_to_refuse(decode)):
            raise ConnectorError(f"{self}: decode: {why}")
        if port is not None and (isinstance(port, bool) or not 0 < port < 1 << 16):
            raise ConnectorError(f"{self}: a port is a number from 1 to 65535, not {port!r}")
        self.decode = decode
        self.event_time = event_time
        self.port = port
        self.secret = _secret(self, secret)

    def __str__(self) -> str:
        return f"Connectors({self.name!r})"

    def items(self, stream: str, batch: outside.Pushed, into: list[Any]) -> None:
        """Decode payloads."""
        if self.decode == "message":
            times = [None] * len(batch.payloads) if batch.times is None else batch.times.tolist()
            keys = batch.keys or [None] * len(batch.payloads)
            into.extend(
                ConnectorMessage(stream, *row)
                for row in zip(batch.ids.tolist(), times, keys, batch.payloads, strict=True)
            )
        elif self.decode == "bytes":
            into.extend(batch.payloads)
        else:
            decode = self.decode if callable(self.decode) else _DECODE[self.decode]
            for payload in batch.payloads:  # to `map`, a StopIteration of `decode` would be the end
                into.append(decode(payload))

    def as_of_now(self) -> NoReturn:
        """There is nothing to be read again."""
        raise ConnectorError(
            f"{self} is pushed to, and cannot be read as a whole: give its records as an input"
        )


def _secret(source: Connectors, told: bytes | str | None) -> bytes:
    if told is None:
        return secrets.token_bytes(32)
    try:
        known = bytes.fromhex(told) if isinstance(told, str) else bytes(told)
    except (ValueError, TypeError) as error:
        raise ConnectorError(
            f"{source}: a secret is bytes, or hexadecimal digits: {error}"
        ) from error
    if len(known) < LEAST_SECRET:
        raise ConnectorError(f"{source}: a secret has at least {LEAST_SECRET} bytes")
    return known
