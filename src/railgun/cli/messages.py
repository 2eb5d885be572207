"""Read messages for commands that print them, and turn them into JSON."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, Final

from railgun.cli.output import Output
from railgun.client.client import Client
from railgun.client.errors import StreamsError, refuse_damaged
from railgun.client.message import Message
from railgun.client.subscription import Subscription

IDLE_S: Final = 1.0
"""Seconds without a message after which a group has nothing more, though members still work on messages."""
POLL_S: Final = 0.05
"""Seconds without a message after which a reader checks whether it is at the end."""
READ_MESSAGES: Final = 1000


async def messages_of(
    client: Client, subscription: Subscription, out: Output, count: int | None, follow: bool
) -> AsyncIterator[list[Message]]:
    """Yield batches of messages, at most `count` in all; without `follow`, end at the current end of the stream.

    Warn if that end was reported by a replica that may be out of date.
    """
    left = count
    position = subscription.offset
    end: int | None = None
    if not follow and not subscription.group:
        description = await client.describe(subscription.stream)
        end = description["end"]
        if description.get("from_copy"):
            out.warn(f"the end of {subscription.stream} is {description['from_copy']}", end=end)
    quiet_s = 0.0
    while (left is None or left) and (end is None or position < end):
        try:
            batch_messages = min(
                READ_MESSAGES,
                left or READ_MESSAGES,
                READ_MESSAGES if end is None else end - position,
            )
            batch = await subscription.batch(batch_messages, None if follow else POLL_S)
        except TimeoutError:
            quiet_s += POLL_S
            if end is not None:
                description = await client.describe(subscription.stream)
                position = max(position, description["first"])
            elif await _at_end(client, subscription, quiet_s):
                break
            continue
        quiet_s = 0.0
        position = batch[-1].offset + 1
        left = left and left - len(batch)
        yield batch
    if subscription.persistent and left != 0:
        refuse_damaged(
            await client.describe(subscription.stream)
        )  # a damaged stream ends too early


async def _at_end(client: Client, subscription: Subscription, quiet_s: float) -> bool:
    """Return whether a group has no more messages for its members.

    Messages that other members work on may still be redelivered, so the group also has to be quiet for a while.
    """
    await flush(subscription)
    status = await client.group(subscription.stream, subscription.group)
    return not status["ready"] and (not status["in_flight"] or quiet_s >= IDLE_S)


async def flush(subscription: Subscription, timeout: float | None = None) -> None:
    """Wait until acknowledgements are on disk. Those lost with a connection belong to messages that are redelivered."""
    try:
        await subscription.flush(timeout)
    except StreamsError as error:
        if error.code not in ("ACK_STALE", "CONNECTION_LOST"):
            raise
        await subscription.flush(timeout)


def as_data(message: Message) -> dict[str, Any]:
    """Return a message as data for JSON."""
    fields: dict[str, Any] = {}
    if message.subscription.persistent:
        fields |= {"offset": message.offset, "time": message.time / 1e6}
        if message.subscription.group:
            fields["delivery"] = message.delivery
    else:
        fields["topic"] = message.topic
    fields["id"] = None if message.id is None else message.id.decode("utf-8", "backslashreplace")
    return fields | {"headers": message.headers} | payload_data(message.payload)


def payload_data(payload: bytes) -> dict[str, str]:
    """Return a payload as data for JSON: as text if it is UTF-8, or else in base64.

    >>> payload_data(b"hello"), payload_data(bytes([0, 255]))
    ({'payload': 'hello'}, {'base64': 'AP8='})
    """
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}
