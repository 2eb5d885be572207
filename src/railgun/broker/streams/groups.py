"""Run one group of a persistent stream: the driver of the machine `broker.protocol.groups.Group`.

Rules:

1. All events of a group in one turn of the event loop are handled together: `tick`, `take`, `letters`, in this order.
   So a thousand acks cost one check. The machine decides on dead letters before it delivers anything.
2. Changes of a tracked group go to the group log, at most `SAVE_DELAY_S` after they came up. If a client asked to be
   told when its ack is safe, the changes go at once, and the client is told when they are on disk. Acks that are lost
   with the node are delivered again: at least once. If the changes cannot be written (a full disk), they are tried
   again, and then all of them, with those that came meanwhile.
3. Deliveries of an exclusive group are sent once the log has their epoch, and in the order in which they were made.
4. A new member is told that it has joined, and gets messages, when the log knows the group: messages published after
   that reach it.
5. Consumers of a stream whose log is damaged are told so when they have all messages before the damage. They stay
   members: they may still acknowledge what they have.
6. A dead letter is stored among the dead letters before the group lets go of it. If that fails, the message stays with
   the group, and is tried again.
7. A consumer that is told to go elsewhere (`let_go`) gets nothing more; its acks count until it leaves.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from railgun.broker.log.group_log import Fold
from railgun.broker.protocol.groups import (
    Bury,
    Change,
    Command,
    Cut,
    Deliver,
    Explanation,
    Group,
    GroupConfig,
    Joined,
    Kind,
    Missed,
    Paused,
    Receipt,
    Redriven,
    RedriveOutcome,
    Saved,
    Settled,
    Sought,
    Stale,
    Standing,
    Stands,
    Unreported,
    Unsettled,
)
from railgun.broker.protocol.groups.persisted import Mark
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.broker.settings import SECOND
from railgun.errors import LaterVersionError, RailgunError

if TYPE_CHECKING:
    from railgun.broker.streams.persistent import Persistent

SAVE_DELAY_S: Final = 0.05
RETRY_PAUSE_S: Final = 1.0
OnSaved = Callable[[RailgunError | None], None]


class Consumer(Protocol):
    """A member of a group, to which the group delivers messages."""

    name: str

    def deliver(self, delivers: list[Deliver]) -> None:
        """Send these messages to the client."""

    def tell(self, command: Command) -> None:
        """Handle a notice of the group: `Missed` or `Recalled`."""

    def stopped(self, error: RailgunError) -> None:
        """Report an error that ends the deliveries; the consumer stays a member. Only the first call counts."""

    def lost(self, error: RailgunError) -> None:
        """End the subscription with an error: there is nothing more to get."""

    def let_go(self, error: RailgunError) -> None:
        """Send the consumer elsewhere, for this reason: it gets nothing more, and leaves after its last acks."""


@dataclass(eq=False, slots=True)
class _HandedOut:
    """Deliveries of an exclusive group, by member, and whether the log has their epoch."""

    out: dict[str, list[Deliver]]
    saved: bool = False


class GroupDriver:
    """A group, its members, and its part of the group log."""

    def __init__(
        self,
        stream: Persistent,
        name: str,
        config: GroupConfig,
        saved: Saved | None,
        start: int,
        tracked: bool,
    ) -> None:
        self.stream = stream
        self.name = name
        self.tracked = tracked
        self.group = Group(config, saved, start, stream.log.first, stream.end)
        self.consumers: dict[str, Consumer] = {}
        self.token = ""
        """Of a tracked consumer: the token of the subscription that uses its ID."""
        self.redelivered = 0
        """Messages that were delivered again since the node was started."""
        self._on_saved: list[OnSaved] = []  # to be called when the log has the changes so far
        self._saving = 0  # writes to the log that are under way
        self._unsaved: RailgunError | None = None  # why the last write failed
        self._on_disk = saved is not None  # whether the log knows the group
        self._send_queue: deque[_HandedOut] = deque()  # exclusive: deliveries that wait for the log
        self._check_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._save_timer: asyncio.TimerHandle | None = None
        self.ended = False

    # ------------------------------------------------------------ members

    def join(self, consumer: Consumer, credit: int, seek: int | None) -> Joined:
        """Add a consumer; `seek`: begin at that offset, if no other member is live."""
        now = self.stream.now()
        commands = self.group.join(consumer.name, now)
        self.consumers[consumer.name] = consumer
        try:
            if seek is not None:
                commands += self.group.seek(seek, now, consumer.name)
            self.group.grant(consumer.name, credit, now)
        except RailgunError:
            self.leave(consumer.name, graceful=True)
            raise
        joined = commands[0]
        assert isinstance(joined, Joined)
        self._tell(commands[1:])
        self.schedule_check()
        if seek is None:
            return joined
        return Joined(joined.member, self.group.floor, "sought", joined.receives)

    def begin(self, member: str, credit: int) -> None:
        """Give a member credit for more messages."""
        self.group.grant(member, credit, self.stream.now())
        self.schedule_check()

    def when_saved(self, done: OnSaved) -> None:
        """Call `done` when all changes up to now are in the log."""
        self._save(done)

    @property
    def unsaved(self) -> RailgunError | None:
        """Return why changes are not on disk; None if they are, or will be soon, or no client knows of the group."""
        return self._unsaved if self.tracked and self._on_disk else None

    async def saved(self) -> None:
        """Wait until all changes up to now are in the log."""
        done: asyncio.Future[None] = self.stream.loop.create_future()
        self.when_saved(partial(resolve, done))
        await done

    def leave(self, member: str, graceful: bool) -> None:
        """Remove a consumer that leaves; `graceful`: it has said so, and did not just vanish."""
        if self.consumers.pop(member, None) is not None:
            self._tell(self.group.leave(member, graceful, self.stream.now()))
            self.schedule_check()

    def send_away(self, member: str) -> None:
        """Remove a consumer without fault of its own: this node, or the one that relays it, stops serving it."""
        if self.consumers.pop(member, None) is not None:
            self._tell(self.group.send_away(member, self.stream.now()))
            self.schedule_check()

    def let_go(self, error: RailgunError) -> None:
        """Send all consumers elsewhere: rule 7."""
        for consumer in list(self.consumers.values()):
            consumer.let_go(error)

    # ------------------------------------------------------------ requests of members

    def ack(self, member: str, receipts: Sequence[Receipt], done: OnSaved | None) -> list[Stale]:
        """Acknowledge deliveries; `done` is called when that is safe. Return those that are stale."""
        return self._after_request(self.group.ack(member, receipts, self.stream.now()), done)

    def nack(
        self,
        member: str,
        receipts: Sequence[Receipt],
        delay: int,
        reason: str,
        done: OnSaved | None,
        *,
        block: bool = False,
    ) -> list[Stale]:
        """Redeliver these after `delay` (µs), which blocks the whole group if `block`; return those that are stale."""
        now = self.stream.now()
        commands = self.group.nack(member, receipts, delay, reason, now, block=block)
        return self._after_request(commands, done)

    def in_progress(
        self, member: str, receipts: Sequence[Receipt], done: OnSaved | None
    ) -> list[Stale]:
        """Extend the time to acknowledge these deliveries; return those that are stale."""
        return self._after_request(
            self.group.in_progress(member, receipts, self.stream.now()), done
        )

    def unsent(self, member: str, receipts: Sequence[Receipt]) -> None:
        """Take back deliveries that could not be read, and so were not sent.

        Groups that wait for the damaged part are told.
        """
        self._tell(self.group.unsent(member, receipts, self.stream.now()))
        self.stream.check_groups()

    def _after_request(self, commands: list[Command], done: OnSaved | None) -> list[Stale]:
        stale = [command for command in commands if isinstance(command, Stale)]
        self._tell([command for command in commands if not isinstance(command, Stale)])
        if done is not None:
            self._on_saved.append(done)
        self.schedule_check()
        return stale

    # ------------------------------------------------------------ events of the stream

    def appended(self, end: int) -> None:
        """Note that the stream has messages up to the offset `end`."""
        self.group.appended(end, self.stream.now())
        self.schedule_check()

    def trimmed(self, first: int) -> None:
        """Note that messages before the offset `first` are gone."""
        self._tell(self.group.trimmed(first, self.stream.now()))
        self.schedule_check()

    def reset(self, offset: int) -> None:
        """Begin anew at an offset, if no member is live."""
        self._tell(self.group.seek(offset, self.stream.now()))
        self.schedule_check()

    def redrive(self, letters: Sequence[tuple[int, int]]) -> list[RedriveOutcome]:
        """Deliver dead letters again; each is an offset in the stream, and how often it was redriven before."""
        became, commands = self.group.redrive(letters, self.stream.now())
        self._tell(commands)
        self.schedule_check()
        return became

    def explain(self) -> Explanation:
        """Return what the group is doing, or why it gets no messages."""
        return self.group.explain(self.stream.now())

    # ------------------------------------------------------------ checking

    def schedule_check(self) -> None:
        """Schedule a check of the group in this turn of the event loop."""
        if not self._check_due and not self.ended:
            self._check_due = True
            self.stream.loop.call_soon(self._check)

    def _check(self) -> None:
        self._check_due = False
        if self.ended or (
            self.tracked and not self.stream.acting
        ):  # checked when this node serves groups
            return
        now, group, damage = self.stream.now(), self.group, self.stream.damage
        if damage is not None:
            group.unreadable(damage.offset)
        deadline = group.deadline()
        if deadline is not None and deadline <= now:
            self._tell(group.tick(now))
        out: dict[str, list[Deliver]] = {}
        for deliver in group.take(now):
            out.setdefault(deliver.member, []).append(deliver)
            if deliver.delivery > 1:
                self.redelivered += deliver.end - deliver.first
        if group.config.exclusive and self.tracked and out:
            self._hand_out(out)
        else:
            self._send(out)
            if self._on_saved:
                self._save()
            elif self.tracked and self._save_timer is None:
                self._save_timer = self.stream.loop.call_later(SAVE_DELAY_S, self._save)
        for bury in group.letters(now):
            self.stream.bury(self, bury)
        if damage is not None and group.at_damage() and not self._send_queue:
            active = group.active
            for name, consumer in list(self.consumers.items()):
                if active is None or active.name == name:
                    consumer.stopped(damage)
        self._set_timer(now)

    def _set_timer(self, now: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.group.deadline()
        if deadline is not None:
            delay = max(0.0, (deadline - now) / SECOND)
            self._timer = self.stream.loop.call_later(min(delay, 3600.0), self.schedule_check)

    def _hand_out(self, out: dict[str, list[Deliver]]) -> None:
        """Send deliveries once the log has their epoch, behind all that were made before them."""
        handed = _HandedOut(out)
        self._send_queue.append(handed)
        self._save_epoch(handed)

    def _save_epoch(self, handed: _HandedOut) -> None:
        if not self.ended:
            self._save(partial(self._epoch_saved, handed))

    def _epoch_saved(self, handed: _HandedOut, error: RailgunError | None) -> None:
        """Send deliveries whose epoch is saved; after an error try again later, unless they were taken back."""
        if error is None:
            handed.saved = True
        elif not self._not_taken_back(handed.out):
            self._send_queue.remove(handed)
        else:
            self.stream.loop.call_later(RETRY_PAUSE_S, self._save_epoch, handed)
        while self._send_queue and self._send_queue[0].saved:
            self._send(self._not_taken_back(self._send_queue.popleft().out))
        if not self._send_queue and self.stream.damage is not None:
            self.schedule_check()  # the damage is reported behind the messages that were sent

    def _not_taken_back(self, out: dict[str, list[Deliver]]) -> dict[str, list[Deliver]]:
        """Return the parts of these deliveries that were not taken back while the log was written."""
        remaining: dict[str, list[Deliver]] = {}
        for member, delivers in out.items():
            party = self.group.members.get(member)
            if party is None:
                continue
            for deliver in delivers:
                terms = (deliver.delivery, deliver.epoch)
                for first, end, flight in party.flights.pieces(deliver.first, deliver.end):
                    if (flight.delivery, flight.epoch) == terms:
                        remaining.setdefault(member, []).append(
                            replace(deliver, first=first, end=end)
                        )
        return remaining

    def _send(self, out: dict[str, list[Deliver]]) -> None:
        for member, delivers in out.items():
            consumer = self.consumers.get(member)
            if consumer is not None:
                consumer.deliver(delivers)

    def _tell(self, commands: Sequence[Command]) -> None:
        for command in commands:
            member = getattr(command, "member", None)
            if isinstance(command, Missed):
                for consumer in self.consumers.values():
                    consumer.tell(command)
            elif member in self.consumers:
                self.consumers[member].tell(command)

    # ------------------------------------------------------------ saving

    def _save(self, then: OnSaved | None = None) -> None:
        """Write the changes to the group log; call `then`, and all that wait, when they are on disk."""
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        waiting, self._on_saved = self._on_saved, []
        if then is not None:
            waiting.append(then)

        changes = self.group.changes() if self.tracked else []
        if self._unsaved is not None:
            saved = self.group.save()
            untold = Unreported(tuple((first, end) for first, end, _ in saved.unreported))
            changes, self._unsaved = [*saved.changes(), untold], None

        def done(error: RailgunError | None) -> None:
            self._saving -= bool(changes)
            self._on_disk |= error is None and bool(changes)
            if error is not None and changes:
                self._unsaved = error
                if not self.ended and self._save_timer is None:
                    self._save_timer = self.stream.loop.call_later(RETRY_PAUSE_S, self._save)
            for on_saved in waiting:
                on_saved(self._unsaved or error)

        if changes:
            self._saving += 1
            self.stream.keep([(self.name, pack(changes))], done)
        elif waiting and self._saving:
            self.stream.keep([], done)  # done when the writes under way are on disk
        elif waiting:
            done(None)

    def buried(self, bury: Bury, error: RailgunError | None) -> None:
        """Let go of a message that is stored among the dead letters; after an error, keep it and try again later."""
        if self.ended:
            return
        now = self.stream.now()
        if error is None:
            self.group.buried(bury.offset, now)
            self.schedule_check()
        else:
            self.group.kept(bury.offset, now)
            self.stream.loop.call_later(RETRY_PAUSE_S, self.schedule_check)

    def end(self) -> None:
        """Save the changes, and stop."""
        if not self.ended:
            self._save()
            self.ended = True
            if self._timer is not None:
                self._timer.cancel()

    def abandon(self, error: RailgunError) -> None:
        """Stop without saving, because the group or its stream is deleted.

        Waiting callers and consumers get `error`.
        """
        self.ended = True
        for timer in (self._timer, self._save_timer):
            if timer is not None:
                timer.cancel()
        waiting, self._on_saved = self._on_saved, []
        for on_saved in waiting:
            on_saved(error)
        for consumer in list(self.consumers.values()):
            consumer.lost(error)


def resolve(future: asyncio.Future[None], error: RailgunError | None) -> None:
    """Set the result of a future that waits for a committer."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# ---------------------------------------------------------------- changes as bytes

_KINDS: Final[dict[str, Any]] = {
    "s": Sought, "t": Stands, "d": Settled, "o": Unsettled, "u": Unreported, "c": Cut, "k": Kind, "p": Paused,
    "r": Redriven,
}  # fmt: skip


def pack(changes: Sequence[Change]) -> bytes:
    """Return changes of a group as bytes, for its log.

    >>> pack([Settled(3, 9)])
    b'[["d",3,9]]'
    >>> fold.apply(None, pack([Sought(3, 1), Settled(3, 9)])).floor
    9
    """
    return json.dumps([_row(change) for change in changes], separators=(",", ":")).encode()


def _row(change: Change) -> tuple[Any, ...]:
    match change:
        case Settled(first, end):
            return ("d", first, end)
        case Unsettled(first, end, standing):
            return ("o", first, end, _standing(standing))
        case Stands(epoch, highest):
            return ("t", epoch, highest)
        case Sought(offset, epoch):
            return ("s", offset, epoch)
        case Unreported(ranges):
            return ("u", ranges)
        case Cut(end):
            return ("c", end)
        case Kind(exclusive):
            return ("k", exclusive)
        case Paused(until, delay):
            return ("p", until, delay)
        case Redriven(first, end, number, highest, again):
            return ("r", first, end, number, highest, again)


def _standing(standing: Standing) -> tuple[Any, ...]:
    """Return the fields as they are stored, without trailing defaults."""
    fields = standing.count, standing.reason, standing.until, standing.delay
    if standing.spared:
        return (*fields, standing.since, standing.spared)
    return fields if standing.since is None else (*fields, standing.since)


def unpack(data: bytes) -> list[Change]:
    """Return the changes in these bytes; raise `LaterVersionError` for those of a later version."""
    changes: list[Change] = []
    for letter, *fields in json.loads(data):
        try:
            if letter == "o":
                fields[2] = Standing(*fields[2])
            elif letter == "u":
                fields = [tuple((first, end) for first, end in fields[0])]
            changes.append(_KINDS[letter](*fields))
        except (KeyError, TypeError) as error:
            raise _later(f"the change {letter!r} with {len(fields)} fields") from error
    return changes


def _later(what: str) -> LaterVersionError:
    return LaterVersionError(f"the state of a group is of a later version of Railgun: {what}")


@dataclass(frozen=True, slots=True)
class CopyNote:
    """A record beside the groups, under the empty name in their log: what a copy in a cluster must not forget.

    A stream outside of a cluster has a record too, for `safe`: it shows when messages are missing.
    """

    label: int = 0
    """The epoch whose log this copy matches (`broker.protocol.replication`)."""
    groups: tuple[int, int] = (0, 0)
    """Epoch and number of the last change of groups."""
    safe: int = 0
    """The end of the safe messages, at least."""

    def pack(self) -> bytes:
        """Return the note as bytes, for the log.

        >>> fold.apply(None, CopyNote(3, (3, 7), 100).pack())
        CopyNote(label=3, groups=(3, 7), safe=100)
        """
        return b"@" + json.dumps([self.label, self.groups, self.safe]).encode()

    @staticmethod
    def of(data: bytes) -> CopyNote:
        """Return the note in these bytes."""
        label, groups, safe = json.loads(data[1:])
        return CopyNote(label, (groups[0], groups[1]), safe)


@dataclass(frozen=True, slots=True)
class ProducerNote:
    """A record of a producer in the group log (`broker.protocol.producers`), under `PRODUCER` and its name."""

    told: dict[str, Any]

    def pack(self) -> bytes:
        """Return the note as bytes, for the log.

        >>> fold.apply(None, ProducerNote({"number": 1}).pack())
        ProducerNote(told={'number': 1})
        """
        return b"P" + json.dumps(self.told, separators=(",", ":")).encode()

    @staticmethod
    def of(data: bytes) -> ProducerNote:
        """Return the note in these bytes."""
        return ProducerNote(json.loads(data[1:]))


Kept: TypeAlias = Saved | CopyNote | ProducerNote
"""The state of one name in the group log: of a group, of the copy, or of a producer."""


def _apply(saved: Kept | None, data: bytes) -> Kept:
    if data[:1] == b"@":
        return CopyNote.of(data)
    if data[:1] == b"P":
        return ProducerNote.of(data)
    if not isinstance(saved, Saved):
        saved = Saved()
    for change in unpack(data):
        saved.apply(change)
    return saved


def dump(saved: Kept) -> bytes:
    """Return the whole state of a group as bytes, in columns: a group may be in a hundred thousand pieces.

    >>> load(dump(_apply(None, pack([Sought(3, 1), Settled(5, 9)])))).done
    Ranges([(5, 9, None)])
    """
    if not isinstance(saved, Saved):
        return saved.pack()
    *open_, standings = saved.open.columns()
    *done, _ = saved.done.columns()
    *untold, _ = saved.unreported.columns()
    kinds = {standing: n for n, standing in enumerate(dict.fromkeys(standings))}
    columns = [*done, *untold, *open_, array("q", map(kinds.__getitem__, standings))]
    header = {
        "floor": saved.floor,
        "epoch": saved.epoch,
        "highest": saved.highest,
        "standings": list(map(_standing, kinds)),
        "columns": list(map(len, columns)),
    }
    if saved.exclusive is not None:
        header["exclusive"] = saved.exclusive
    if saved.pause != (0, 0):
        header["pause"] = saved.pause
    if saved.redriven:
        header["redriven"] = [(first, end, *mark) for first, end, mark in saved.redriven]
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([text, b"\n", *map(_little, columns)])


def load(data: bytes) -> Kept:
    """Return the state in these bytes.

    The state of a group in an older log lacks `exclusive`, `pause` and `redriven`.
    """
    if data[:1] == b"@":
        return CopyNote.of(data)
    if data[:1] == b"P":
        return ProducerNote.of(data)
    at = data.index(b"\n") + 1
    header, columns = json.loads(data[:at]), []
    for length in header.pop("columns"):
        column = array("q", data[at : at + 8 * length])
        columns.append(array("q", _little(column)))
        at += 8 * length
    done, dones, untold, untolds, starts, ends, kinds = columns
    standings = [Standing(*fields) for fields in header.pop("standings")]
    saved = Saved(
        header.pop("floor"),
        Ranges.of(done, dones, [None] * len(done)),
        Ranges.of(starts, ends, [standings[kind] for kind in kinds]),
        header.pop("epoch"),
        header.pop("highest"),
        Ranges.of(untold, untolds, [None] * len(untold)),
        header.pop("exclusive", None),
        tuple(header.pop("pause", (0, 0))),
        Ranges((first, end, Mark(*mark)) for first, end, *mark in header.pop("redriven", ())),
    )
    if header:  # fields of a later version would be lost when the log is rewritten
        raise _later(f"it has {', '.join(sorted(header))}")
    return saved


def _little(column: array[int]) -> bytes:
    """Return the bytes of 64-bit numbers in little-endian order; converts in both directions."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


fold: Final = Fold[Kept](_apply, dump, load)
"""How states come from the changes in the group log."""
