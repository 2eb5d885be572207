"""Redrive: deliver dead letters again, only to the group that gave them up.

Rules:

1. The message itself is delivered again, from the stream: with its own offset, ID and headers, to the group that its
   dead letter names. Other groups and readers notice nothing, and nothing is stored again.
2. The position of the group `redrive` of the dead letters records which letters were redriven: a letter is
   acknowledged when the log of its group has the redrive, so a second redrive sends none of them again.
3. If the node stops between the two, the letter is examined again, and the group knows that it was redriven: it is
   counted as `already`. Each letter is redriven once.
4. A letter that cannot be redriven stays among the dead letters, and is reported with its reason (`refused`):
   `MESSAGE_GONE`  the stream has no such message any more (retention, purge), or another one in its place
   `NO_GROUP`      the group was deleted
   `GROUP_BUSY`    the group has not finished with the message: it was reset, say, and will get the message anyway
   `LOG_DAMAGED`   the log of the stream is damaged, and the message cannot be read
   `NOT_A_LETTER`  a message that somebody else published to the dead letters
   A letter that was asked for by its offset, and does not wait to be redriven, is reported in the same way:
   `NO_LETTER`     no letter has this offset: there never was one, or retention or a purge has removed it
   `REDRIVEN`      the letter was redriven before
5. Letters that arrive during a redrive wait for the next one; else a message that fails again at once would go round
   for ever. One redrive of a stream runs at a time; any other consumer of the group `redrive` has to leave first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from railgun.broker.errors import NoGroupError, TrimmedError
from railgun.broker.protocol.groups import (
    Command,
    Deliver,
    Group,
    GroupBusyError,
    Receipt,
    RedriveOutcome,
)
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.broker.settings import REDRIVE
from railgun.broker.streams.groups import GroupDriver
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError
from railgun.transport.records import Records

GROUP: Final = REDRIVE
READ_BYTES: Final = 256 << 10
MAX_REFUSED_REPORTED: Final = 1000  # letters
_MEMBER: Final = "redrive"


@dataclass(slots=True)
class Redriven:
    """The result of a redrive, in numbers of letters."""

    redriven: int = 0
    already: int = 0
    """Letters that an interrupted call had redriven before."""
    left: int = 0
    """Letters that were not redriven yet, including the refused ones."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """Letters that cannot be redriven: offset among the dead letters, code and text of each. At most 1,000."""


class Letter(NamedTuple):
    """A dead letter: where it is, and what its headers say about the message."""

    at: int  # its offset among the dead letters
    group: str
    offset: int  # of the message, in its stream
    time: int  # when the message was stored
    redrives: int  # how often it had been redriven before it died
    payload: bytes


class _Member:
    """The consumer of the dead letters during a redrive; letters that come later go back when it leaves."""

    name = _MEMBER

    def deliver(self, delivers: list[Deliver]) -> None:
        """Ignore letters that came after the redrive began."""

    def tell(self, command: Command) -> None:
        """Ignore the notice: this consumer reads by itself."""

    def stopped(self, error: RailgunError) -> None:
        """Ignore the error: the next read raises it."""

    def lost(self, error: RailgunError) -> None:
        """Ignore the error: the next read raises it."""

    def let_go(self, error: RailgunError) -> None:
        """Ignore the request to leave: this consumer leaves at the end of the redrive."""


class RefusedLetterError(RailgunError):
    """A letter cannot be redriven."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


async def redrive(
    dead_letters: Persistent | None,
    stream: Persistent,
    offsets: Sequence[int] | None,
    most: int | None,
) -> Redriven:
    """Deliver dead letters again: those at these offsets of the dead letters, or all; at most `most` of them.

    `dead_letters`: the stream of the dead letters; None: there is none yet. Raise `GroupBusyError` while another
    consumer of the group `redrive` is live.
    """
    if dead_letters is None:
        done = Redriven()
        for at in sorted(set(offsets or ())):
            _refuse(done, at, _no_letter(stream, at))
        return done
    group_driver = dead_letters.groups.get(GROUP)
    if group_driver is not None and group_driver.consumers:
        members = ", ".join(list(group_driver.consumers)[:5])
        raise GroupBusyError(f"the dead letters of {stream.name!r} are being redriven by {members}")
    driver, _ = dead_letters.subscribe(
        _Member(), GROUP, exclusive=False, ack_wait=0, credit=0, start=0, seek=None
    )
    done = Redriven()
    try:
        group = driver.group
        wanted = None if offsets is None else set(offsets)
        group.grant(_MEMBER, group.end - group.floor, dead_letters.now())
        waiting = group.take(dead_letters.now())
        for at in _not_among(waiting, wanted or ()):
            _refuse(done, at, _not_waiting(dead_letters, stream, group, at))
        for deliver in waiting:
            for first, end in _chosen(deliver, wanted):
                await _send(dead_letters, stream, driver, deliver, first, end, most, done)
    finally:
        dead_letters.leave(driver, _MEMBER, graceful=True)
    await driver.saved()
    done.left = driver.explain().ready
    return done


def _chosen(deliver: Deliver, wanted: set[int] | None) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that are wanted.

    >>> list(_chosen(Deliver("m", 3, 9, 1, 0), {1, 4, 5, 8, 9}))
    [(4, 6), (8, 9)]
    """
    if wanted is None:
        yield deliver.first, deliver.end
        return
    yield from _runs(offset for offset in wanted if deliver.first <= offset < deliver.end)


def _not_among(waiting: Iterable[Deliver], wanted: Iterable[int]) -> list[int]:
    """Return those of the wanted letters that do not wait to be redriven.

    >>> _not_among([Deliver("m", 3, 5, 1, 0), Deliver("m", 8, 9, 1, 0)], {1, 4, 5, 8})
    [1, 5]
    """
    ranges = Ranges((deliver.first, deliver.end, None) for deliver in waiting)
    return sorted(at for at in wanted if not ranges.pieces(at, at + 1))


def _not_waiting(
    dead_letters: Persistent, stream: Persistent, group: Group, at: int
) -> RefusedLetterError:
    """Return the reason why a letter does not wait to be redriven, as an error."""
    if not dead_letters.log.first <= at < group.end:
        return _no_letter(stream, at)
    if at < group.floor or group.settled.pieces(at, at + 1):
        return RefusedLetterError("REDRIVEN", f"letter {at} of {stream.name!r} was redriven before")
    text = f"letter {at} of {stream.name!r} was delayed by a consumer of the group {GROUP!r}: try again later"
    return RefusedLetterError("GROUP_BUSY", text)


def _no_letter(stream: Persistent, at: int) -> RefusedLetterError:
    text = f"stream {stream.name!r} has no dead letter {at}: railgun dlq ls {stream.name}"
    return RefusedLetterError("NO_LETTER", text)


def _runs(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield offsets as ranges, as few as possible."""
    left = sorted(offsets)
    while left:
        first = end = left[0]
        while left and left[0] == end:
            left.pop(0)
            end += 1
        yield first, end


async def _send(
    dead_letters: Persistent,
    stream: Persistent,
    driver: GroupDriver,
    deliver: Deliver,
    first: int,
    end: int,
    most: int | None,
    done: Redriven,
) -> None:
    """Redrive the letters at [first, end) of the dead letters, and acknowledge those that were redriven."""
    while first < end and (most is None or done.redriven + done.already < most):
        batches, following = dead_letters.read(first, end, READ_BYTES)
        room = None if most is None else most - done.redriven - done.already
        by_group: dict[str, list[Letter]] = {}
        chosen = 0
        for at, payload, headers in _raw_letters(batches):
            if room is not None and chosen >= room:
                following = at
                break
            try:
                letter = _letter(stream, at, payload, headers)
            except RefusedLetterError as error:
                _refuse(done, at, error)
                continue
            by_group.setdefault(letter.group, []).append(letter)
            chosen += 1
        acked: list[int] = []
        for name, letters in by_group.items():
            acked += await _redrive_group(stream, name, letters, done)
        for low, high in _runs(acked):
            driver.ack(_MEMBER, [Receipt(low, high, deliver.delivery, deliver.epoch)], None)
        first = following


async def _redrive_group(
    stream: Persistent, name: str, letters: list[Letter], done: Redriven
) -> list[int]:
    """Redrive letters of one group; return the offsets, among the dead letters, of those that were redriven."""
    try:
        driver = stream.redriver(name)
    except NoGroupError as error:
        for letter in letters:
            _refuse(done, letter.at, error)
        return []
    became = driver.redrive([(letter.offset, letter.redrives) for letter in letters])
    await driver.saved()
    acked: list[int] = []
    for letter, how in zip(letters, became, strict=True):
        if how in ("redriven", "already"):
            acked.append(letter.at)
            done.redriven += how == "redriven"
            done.already += how == "already"
        else:
            _refuse(done, letter.at, _not_redriven(stream, letter, how))
    return acked


def _not_redriven(stream: Persistent, letter: Letter, how: RedriveOutcome) -> RefusedLetterError:
    if how == "gone":
        return _gone(stream, letter.offset)
    text = f"the group {letter.group!r} has not finished with message {letter.offset}: it will get it anyway"
    return RefusedLetterError("GROUP_BUSY", text)


def _gone(stream: Persistent, offset: int) -> RefusedLetterError:
    first, end = stream.log.first, stream.end
    if offset < first:
        why = f"does not have message {offset} any more (it begins at {first})"
    elif offset >= end:
        why = f"ends before message {offset} (at {end}): it was deleted and made anew since"
    else:
        why = f"has another message {offset}: it was deleted and made anew since"
    return RefusedLetterError(
        "MESSAGE_GONE",
        f"stream {stream.name!r} {why}. The letter has the payload: publish it again as a new message",
    )


def _refuse(done: Redriven, at: int, error: RailgunError) -> None:
    if len(done.refused) < MAX_REFUSED_REPORTED:
        code = getattr(error, "code", "BAD_REQUEST")
        done.refused.append({"offset": at, "code": code, "text": str(error)})


def _raw_letters(batches: Sequence[Any]) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield offset, payload and headers of each message."""
    for batch in batches:
        records = Records(batch)
        for row, payload in enumerate(records.payloads()):
            yield records.base + row, payload, records.headers(row)


def _letter(stream: Persistent, at: int, payload: bytes, headers: bytes) -> Letter:
    """Return the letter in a message; raise `RefusedLetterError` if it is none, or the stream lacks its message."""
    try:
        fields = json.loads(headers)
        group, offset, time = fields["group"], int(fields["offset"]), int(fields["time"])
        redrives = int(fields.get("redrives", 0))
        ours = fields["stream"] == stream.name and isinstance(group, str)
    except (ValueError, TypeError, KeyError, RecursionError):
        ours = False
    if not ours or not 0 <= offset < 1 << 62 or not 0 <= redrives < 1 << 62:
        text = (
            f"message {at} is no dead letter of {stream.name!r}: publish it again as a new message"
        )
        raise RefusedLetterError("NOT_A_LETTER", text)
    letter = Letter(at, group, offset, time, redrives, payload)
    damage = stream.damage
    if damage is not None and offset >= damage.offset:
        raise RefusedLetterError(damage.code, str(damage))
    if offset >= stream.end:
        raise _gone(stream, offset)
    try:
        (batch,), _ = stream.read(offset, offset + 1, 1)
    except (TrimmedError, ValueError) as error:
        raise _gone(stream, offset) from error
    message = Records(batch)
    if (
        message.time != time or message.payload(0) != payload
    ):  # the stream was deleted and made anew
        raise _gone(stream, offset)
    return letter
