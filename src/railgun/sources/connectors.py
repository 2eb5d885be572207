"""Let programs outside push streams of messages into a flow, exactly once.

Each worker listens. A program (`railgun.ingest`) connects to any of them, names the streams it wants to send, sends
their messages with ascending IDs, and is told which of them a committed snapshot has. Rules and reasons:
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
MIN_SECRET_BYTES: Final = 16


class ConnectorMessage(NamedTuple):
    """A message with its metadata (`decode="message"`)."""

    stream: str
    id: int
    time: int | None
    """The event time that the connector has sent (µs)."""
    key: str | None
    payload: bytes


_DECODE: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": from_json, "text": bytes.decode, "bytes": bytes, "msgpack": from_msgpack,
}  # fmt: skip


class Connectors(Pushed[Any]):
    """A source of messages that programs outside push; they find it by `name`, if a flow has several.

    >>> Connectors("orders", decode="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Connectors('orders'): decode is 'json', 'text', 'bytes', 'msgpack', ...

    `decode`: how to decode a payload, in one word or as a function of the bytes. A message that cannot be decoded is
    refused, and its stream waits until a correct one is sent; with `on_error="dead_letter"` the message becomes a dead
    letter, and the stream goes on. `event_time`: records have the times of their messages. `port`: where worker 0
    listens, worker 1 at the next port, and so on; by default workers choose ports, and programs ask the job for them.
    `secret` (hexadecimal digits or bytes): for programs that cannot ask the job; by default a new secret each time.
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
            raise ConnectorError(
                f"Connectors needs a name, by which programs find it, not {name!r}"
            )
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
        """Decode the payloads of a batch, and append the items to `into`."""
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
            # Not `map`, which a StopIteration raised by `decode` would end
            for payload in batch.payloads:
                into.append(decode(payload))

    def as_of_now(self) -> NoReturn:
        """Raise `ConnectorError`: pushed messages cannot be read again."""
        raise ConnectorError(
            f"{self} is pushed to, and cannot be read as a whole: give its records as an input"
        )


def _secret(source: Connectors, secret: bytes | str | None) -> bytes:
    if secret is None:
        return secrets.token_bytes(32)
    try:
        key = bytes.fromhex(secret) if isinstance(secret, str) else bytes(secret)
    except (ValueError, TypeError) as error:
        raise ConnectorError(
            f"{source}: a secret is bytes, or hexadecimal digits: {error}"
        ) from error
    if len(key) < MIN_SECRET_BYTES:
        raise ConnectorError(f"{source}: a secret has at least {MIN_SECRET_BYTES} bytes")
    return key
