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
    client: Client, subscription: Subscription, out: Output, most: int | None, follow: bool
) -> AsyncIterator[list[Message]]:
    """What comes, some at a time; unless it is followed, up to the end there is. Warns of an end that may be old."""
    left = most
    position = subscription.offset
    end: int | None = None
    if not follow and not subscription.group:
        told = await client.describe(subscription.stream)
        end = told["end"]
        if told.get("from_copy"):
            out.warn(f"the end of {subscription.stream} is {told['from_copy']}", end=end)
    quiet = 0.0
    while (left is None or left) and (end is None or position < end):
        try:
            some = min(
                READ_MESSAGES,
                left or READ_MESSAGES,
                READ_MESSAGES if end is None else end - position,
            )
            found = await subscription.batch(some, None if follow else POLL_S)
        except TimeoutError:
            quiet += POLL_S
            if end is not None:
                told = await client.describe(subscription.stream)
                position = max(position, told["first"])
            elif await _at_end(client, subscription, quiet):
                break
            continue
        quiet = 0.0
        position = found[-1].offset + 1
        left = left and left - len(found)
        yield found
    if subscription.persistent and left != 0:
        refuse_damaged(await client.describe(subscription.stream))  # its end is not the stream's


async def _at_end(client: Client, subscription: Subscription, quiet: float) -> bool:
    """Whether a group has nothing more for its members; what others have may still come back."""
    await flush(subscription)
    told = await client.group(subscription.stream, subscription.group)
    return not told["ready"] and (not told["in_flight"] or quiet >= IDLE_S)


async def flush(subscription: Subscription, timeout: float | None = None) -> None:
    """Let the acks be on disk. Those that were lost with a connection are of messages that come again."""
    try:
        await subscription.flush(timeout)
    except StreamsError as error:
        if error.code not in ("ACK_STALE", "CONNECTION_LOST"):
            raise
        await subscription.flush(timeout)


def as_data(message: Message) -> dict[str, Any]:
    """A message for programs."""
    told: dict[str, Any] = {}
    if message.subscription.persistent:
        told |= {"offset": message.offset, "time": message.time / 1e6}
        if message.subscription.group:
            told["delivery"] = message.delivery
    else:
        told["topic"] = message.topic
    told["id"] = None if message.id is None else message.id.decode("utf-8", "backslashreplace")
    return told | {"headers": message.headers} | payload_data(message.payload)


def payload_data(payload: bytes) -> dict[str, str]:
    """A payload for programs: text, if it is that.

    >>> payload_data(b"hello"), payload_data(bytes([0, 255]))
    ({'payload': 'hello'}, {'base64': 'AP8='})
    """
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}
