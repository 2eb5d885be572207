"""Dead letters on their way back into their stream.

Rules:

1. A letter is published again to the stream it came from, with its payload, the headers it had, and what became of it
   as headers that begin with `dead-`.
2. Which letters were redriven is the position of a group of the dead letters, `redrive`: a letter is acked when its
   message is on disk, so a second redrive sends none of them again.
3. If the node is gone between the two, the letter is sent again, and its ID (`redrive/`, the name of the dead letters,
   its offset and time) sees to it that it is stored once, while the stream remembers IDs.
4. Letters that come while it works wait for the next redrive: else one that dies again at once would go round for ever.
   One redrive of a stream at a time; whoever else consumes as this group has to leave first.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railgun.core.delivery import Command, Deliver, GroupBusyError, Receipt
from railgun.core.errors import RailgunError
from railgun.node.groups import GroupDriver
from railgun.node.persistent import Persistent, Stored
from railgun.wire.records import Records, build

GROUP: Final = "redrive"
PIECE: Final = 256 << 10  # bytes read and published at once
_MEMBER: Final = "redrive"
_OWN: Final = ("headers", "headers_base64")


class IdPoolFullError(RailgunError):
    """The stream remembers as many IDs as it may."""

    code = "ID_POOL_FULL"


@dataclass(slots=True)
class Redriven:
    """What became of the letters."""

    redriven: int = 0
    already: int = 0
    """Of these the stream knew the ID: they were sent before."""
    left: int = 0
    """Letters that were not redriven yet."""


class _Member:
    """The one who consumes the letters; what comes to it later goes back when it leaves."""

    name = _MEMBER

    def deliver(self, delivers: list[Deliver]) -> None:
        """These came after it began."""

    def tell(self, command: Command) -> None:
        """It needs to know nothing."""

    def lost(self, error: RailgunError) -> None:
        """Its next read says so."""


async def redrive(
    graves: Persistent, stream: Persistent, offsets: Sequence[int] | None, most: int | None
) -> Redriven:
    """Publish letters to their stream again: these, or all; at most so many."""
    known = graves.groups.get(GROUP)
    if known is not None and known.consumers:
        who = ", ".join(list(known.consumers)[:5])
        raise GroupBusyError(f"the dead letters of {stream.name!r} are being redriven: by {who}")
    driver, _ = graves.subscribe(
        _Member(), GROUP, exclusive=False, ack_wait=0, credit=0, start=0, seek=None
    )
    done = Redriven()
    try:
        group = driver.group
        wanted = None if offsets is None else set(offsets)
        group.grant(_MEMBER, group.end - group.floor, graves.now())
        for deliver in group.take(graves.now()):
            for first, end in _chosen(deliver, wanted):
                room = (
                    end if most is None else min(end, first + most - done.redriven - done.already)
                )
                await _send(graves, stream, driver, deliver, first, room, done)
    finally:
        graves.leave(driver, _MEMBER, graceful=True)
    await driver.saved()
    done.left = driver.explain().ready
    return done


def _chosen(deliver: Deliver, wanted: set[int] | None) -> Iterator[tuple[int, int]]:
    """The parts of a range that are wanted.

    >>> list(_chosen(Deliver("m", 3, 9, 1, 0), {1, 4, 5, 8, 9}))
    [(4, 6), (8, 9)]
    """
    if wanted is None:
        yield deliver.first, deliver.end
        return
    chosen = sorted(offset for offset in wanted if deliver.first <= offset < deliver.end)
    while chosen:
        first = end = chosen[0]
        while chosen and chosen[0] == end:
            chosen.pop(0)
            end += 1
        yield first, end


async def _send(
    graves: Persistent,
    stream: Persistent,
    driver: GroupDriver,
    deliver: Deliver,
    first: int,
    end: int,
    done: Redriven,
) -> None:
    while first < end:
        batches, following = graves.read(first, end, PIECE)
        letters = [letter for batch in batches for letter in _letters(graves.name, batch)]
        payloads, ids, headers = zip(*letters, strict=True)
        stored = await _publish(stream, build(payloads, ids, headers))
        if any(code == IdPoolFullError.code for _, code, _ in stored.refused):
            raise IdPoolFullError(
                f"stream {stream.name!r} remembers no more IDs: redrive the others later"
            )
        receipt = Receipt(first, following, deliver.delivery, deliver.epoch)
        driver.ack(_MEMBER, [receipt], None)
        done.redriven += stored.count
        done.already += len(stored.refused)
        first = following


def _letters(graves: str, batch: Any) -> Iterator[tuple[bytes, bytes, bytes]]:
    records = Records(batch)
    for n, payload in enumerate(records.payloads()):
        id = f"redrive/{graves}/{records.base + n}/{records.time}".encode()
        yield payload, id, revived_headers(records.headers(n))


def revived_headers(letter: bytes) -> bytes:
    """The headers of a message that was dead, out of those of its letter.

    >>> revived_headers(b'{"headers": "{\\\\"a\\\\": \\\\"b\\\\"}", "group": "g"}')
    b'{"a": "b", "dead-group": "g"}'
    >>> revived_headers(b"no letter of ours")
    b'no letter of ours'
    """
    told = _object(letter)
    if told is None:
        return letter
    had = str(told.get("headers", "")).encode()
    if "headers_base64" in told:
        had = base64.b64decode(str(told["headers_base64"]))
    known = _object(had) if had else {}
    if known is None:
        return had
    was = {f"dead-{name}": value for name, value in told.items() if name not in _OWN}
    return json.dumps(known | was).encode()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _publish(stream: Persistent, batch: bytearray) -> Stored:
    answered: asyncio.Future[Stored] = stream.loop.create_future()

    def answer(outcome: Stored | RailgunError) -> None:
        if answered.done():
            return
        if isinstance(outcome, RailgunError):
            answered.set_exception(outcome)
        else:
            answered.set_result(outcome)

    stream.publish([batch], answer)
    return await answered
