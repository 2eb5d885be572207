"""One group of a persistent stream at work: the driver of `core.delivery.Group`.

Rules:

1. Whatever happens to a group is looked at together, once in a turn of the event loop: `tick`, `take`, `letters`, in
   this order. So a thousand acks cost one look. Dead letters are decided by the
   machine, before it delivers anything.
2. What a tracked group must not forget goes to the group log, `LAZY` seconds after it came up at the latest. Who asked
   to be told when an ack is safe is told then, and for them it goes at once. What is lost with the node is delivered
   again: at least once.
   What cannot be written (a full disk) is tried again, and then all of it, whatever came between.
3. What an exclusive group hands out goes out when the log has its epoch, and in the order in which it was handed out.
4. Who joins is told so, and gets messages, when the log knows the group: what is published after that reaches it.
5. Consumers of a stream whose log is damaged are told so when they have everything before the damage. They stay
   members: what they have they may still ack.
6. A dead letter is in the dead letters before the group lets go of it. If that fails, it stays, and is tried again.
7. Who is told to go elsewhere (`let_go`) gets nothing more; what it says counts until it leaves.
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

LAZY: Final = 0.05
RETRY: Final = 1.0
Told = Callable[[RailgunError | None], None]


class Consumer(Protocol):
    """Who gets what a group hands out."""

    name: str

    def deliver(self, delivers: list[Deliver]) -> None:
        """Send these."""

    def tell(self, command: Command) -> None:
        """Say what it has to know: `Missed`, `Recalled`."""

    def stopped(self, error: RailgunError) -> None:
        """Nothing more can be read for it, for this reason; it stays a member. Only the first call counts."""

    def lost(self, error: RailgunError) -> None:
        """There is nothing more to get, for this reason."""

    def let_go(self, error: RailgunError) -> None:
        """It gets nothing more here, for this reason, and is to leave when it has said what it has to say."""


@dataclass(eq=False, slots=True)
class _HandedOut:
    """What an exclusive group has handed out, and whether the log knows of it."""

    out: dict[str, list[Deliver]]
    known: bool = False


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
        """Of a tracked consumer: which subscription has it."""
        self.redelivered = 0
        """Messages that were delivered again, since the node was started."""
        self._awaited: list[Told] = []  # who waits for the log
        self._saving = 0  # changes that are on their way to it
        self._unsaved: RailgunError | None = None  # why some did not get there
        self._on_disk = saved is not None  # whether it exists there
        self._line: deque[_HandedOut] = deque()  # exclusive: what waits for the log, in order
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None
        self._lazy: asyncio.TimerHandle | None = None
        self.ended = False

    # ------------------------------------------------------------ members

    def join(self, consumer: Consumer, credit: int, seek: int | None) -> Joined:
        """A consumer comes; `seek`: to begin there, if nobody else is here."""
        now = self.stream.now()
        told = self.group.join(consumer.name, now)
        self.consumers[consumer.name] = consumer
        try:
            if seek is not None:
                told += self.group.seek(seek, now, consumer.name)
            self.group.grant(consumer.name, credit, now)
        except RailgunError:
            self.leave(consumer.name, graceful=True)
            raise
        joined = told[0]
        assert isinstance(joined, Joined)
        self._tell(told[1:])
        self.look()
        if seek is None:
            return joined
        return Joined(joined.member, self.group.floor, "sought", joined.receives)

    def begin(self, member: str, credit: int) -> None:
        """A consumer that has come may get messages."""
        self.group.grant(member, credit, self.stream.now())
        self.look()

    def safe(self, told: Told) -> None:
        """Call this when all that has happened until now is in the log."""
        self._save(told)

    @property
    def unsaved(self) -> RailgunError | None:
        """Why what it has done is not on disk; None: it is, or will be soon, or nobody was told that it exists."""
        return self._unsaved if self.tracked and self._on_disk else None

    async def saved(self) -> None:
        """Wait until all that has happened until now is in the log."""
        done: asyncio.Future[None] = self.stream.loop.create_future()
        self.safe(partial(resolve, done))
        await done

    def leave(self, member: str, graceful: bool) -> None:
        """A consumer goes."""
        if self.consumers.pop(member, None) is not None:
            self._tell(self.group.leave(member, graceful, self.stream.now()))
            self.look()

    def send_away(self, member: str) -> None:
        """Let a consumer go that did nothing wrong: this node, or the one it comes by, ends or serves it no more."""
        if self.consumers.pop(member, None) is not None:
            self._tell(self.group.send_away(member, self.stream.now()))
            self.look()

    def let_go(self, error: RailgunError) -> None:
        """Let all consumers go elsewhere: rule 7."""
        for consumer in list(self.consumers.values()):
            consumer.let_go(error)

    # ------------------------------------------------------------ what members say

    def ack(self, member: str, receipts: Sequence[Receipt], told: Told | None) -> list[Stale]:
        """These are done; `told` is called when that is safe. What of it is stale."""
        return self._said(self.group.ack(member, receipts, self.stream.now()), told)

    def nack(
        self,
        member: str,
        receipts: Sequence[Receipt],
        delay: int,
        reason: str,
        told: Told | None,
        *,
        block: bool = False,
    ) -> list[Stale]:
        """Let these come again after `delay` (µs), which blocks the whole group if `block`."""
        now = self.stream.now()
        commands = self.group.nack(member, receipts, delay, reason, now, block=block)
        return self._said(commands, told)

    def in_progress(
        self, member: str, receipts: Sequence[Receipt], told: Told | None
    ) -> list[Stale]:
        """These are being worked on."""
        return self._said(self.group.in_progress(member, receipts, self.stream.now()), told)

    def unsent(self, member: str, receipts: Sequence[Receipt]) -> None:
        """These could not be read, and were not sent: take them back, and tell all who wait for what is damaged."""
        self._tell(self.group.unsent(member, receipts, self.stream.now()))
        self.stream.look()

    def _said(self, commands: list[Command], told: Told | None) -> list[Stale]:
        stale = [command for command in commands if isinstance(command, Stale)]
        self._tell([command for command in commands if not isinstance(command, Stale)])
        if told is not None:
            self._awaited.append(told)
        self.look()
        return stale

    # ------------------------------------------------------------ what the stream says

    def appended(self, end: int) -> None:
        """There is more."""
        self.group.appended(end, self.stream.now())
        self.look()

    def trimmed(self, first: int) -> None:
        """The oldest messages are gone."""
        self._tell(self.group.trimmed(first, self.stream.now()))
        self.look()

    def reset(self, offset: int) -> None:
        """Begin anew at an offset, if nobody is here."""
        self._tell(self.group.seek(offset, self.stream.now()))
        self.look()

    def redrive(self, letters: Sequence[tuple[int, int]]) -> list[RedriveOutcome]:
        """Deliver dead letters again, by their offset in the stream and how often they were redriven before."""
        became, commands = self.group.redrive(letters, self.stream.now())
        self._tell(commands)
        self.look()
        return became

    def explain(self) -> Explanation:
        """Why it receives nothing, or what it is doing."""
        return self.group.explain(self.stream.now())

    # ------------------------------------------------------------ looking

    def look(self) -> None:
        """See to it, soon."""
        if not self._looking and not self.ended:
            self._looking = True
            self.stream.loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self.ended or (self.tracked and not self.stream.acting):  # it is looked at when it is
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
            if self._awaited:
                self._save()
            elif self.tracked and self._lazy is None:
                self._lazy = self.stream.loop.call_later(LAZY, self._save)
        for bury in group.letters(now):
            self.stream.bury(self, bury)
        if damage is not None and group.at_damage() and not self._line:
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
            self._timer = self.stream.loop.call_later(min(delay, 3600.0), self.look)

    def _hand_out(self, out: dict[str, list[Deliver]]) -> None:
        """Send these when the log has their epoch, and not before what was handed out before them."""
        handed = _HandedOut(out)
        self._line.append(handed)
        self._let_know(handed)

    def _let_know(self, handed: _HandedOut) -> None:
        if not self.ended:
            self._save(partial(self._known, handed))

    def _known(self, handed: _HandedOut, error: RailgunError | None) -> None:
        """The log has it, or takes nothing now: then later, unless it was taken back."""
        if error is None:
            handed.known = True
        elif not self._still(handed.out):
            self._line.remove(handed)
        else:
            self.stream.loop.call_later(RETRY, self._let_know, handed)
        while self._line and self._line[0].known:
            self._send(self._still(self._line.popleft().out))
        if not self._line and self.stream.damage is not None:
            self.look()  # behind what was sent it is told

    def _still(self, out: dict[str, list[Deliver]]) -> dict[str, list[Deliver]]:
        """What of these was not taken back while the log was written."""
        found: dict[str, list[Deliver]] = {}
        for member, delivers in out.items():
            party = self.group.members.get(member)
            if party is None:
                continue
            for deliver in delivers:
                terms = (deliver.delivery, deliver.epoch)
                for first, end, flight in party.flights.pieces(deliver.first, deliver.end):
                    if (flight.delivery, flight.epoch) == terms:
                        found.setdefault(member, []).append(replace(deliver, first=first, end=end))
        return found

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

    # ------------------------------------------------------------ what is kept

    def _save(self, then: Told | None = None) -> None:
        """Write what has changed to the log of groups."""
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        awaited, self._awaited = self._awaited, []
        if then is not None:
            awaited.append(then)

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
                if not self.ended and self._lazy is None:
                    self._lazy = self.stream.loop.call_later(RETRY, self._save)
            for told in awaited:
                told(self._unsaved or error)

        if changes:
            self._saving += 1
            self.stream.keep([(self.name, pack(changes))], done)
        elif awaited and self._saving:
            self.stream.keep([], done)  # when those before are on disk
        elif awaited:
            done(None)

    def buried(self, bury: Bury, error: RailgunError | None) -> None:
        """A dead letter is where it belongs, or could not be brought there."""
        if self.ended:
            return
        now = self.stream.now()
        if error is None:
            self.group.buried(bury.offset, now)
            self.look()
        else:
            self.group.kept(bury.offset, now)
            self.stream.loop.call_later(RETRY, self.look)

    def end(self) -> None:
        """Keep what there is to keep; nothing happens after that."""
        if not self.ended:
            self._save()
            self.ended = True
            if self._timer is not None:
                self._timer.cancel()

    def abandon(self, error: RailgunError) -> None:
        """Keep nothing: the group is deleted, or its stream. Who waits or consumes is told why."""
        self.ended = True
        for timer in (self._timer, self._lazy):
            if timer is not None:
                timer.cancel()
        awaited, self._awaited = self._awaited, []
        for told in awaited:
            told(error)
        for consumer in list(self.consumers.values()):
            consumer.lost(error)


def resolve(future: asyncio.Future[None], error: RailgunError | None) -> None:
    """What a committer says, for who awaits it."""
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
    """Changes of a group, for its log.

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
    """Return the fields as they are stored; the last ones only if there is something to say."""
    told = standing.count, standing.reason, standing.until, standing.delay
    if standing.spared:
        return (*told, standing.since, standing.spared)
    return told if standing.since is None else (*told, standing.since)


def unpack(data: bytes) -> list[Change]:
    """Changes as they were."""
    found: list[Change] = []
    for letter, *fields in json.loads(data):
        try:
            if letter == "o":
                fields[2] = Standing(*fields[2])
            elif letter == "u":
                fields = [tuple((first, end) for first, end in fields[0])]
            found.append(_KINDS[letter](*fields))
        except (KeyError, TypeError) as error:
            raise _later(f"the change {letter!r} with {len(fields)} fields") from error
    return found


def _later(what: str) -> LaterVersionError:
    return LaterVersionError(f"the state of a group is of a later version of Railgun: {what}")


@dataclass(frozen=True, slots=True)
class CopyNote:
    """What a copy in a cluster must not forget, beside its groups: under the empty name, in their log.

    A stream that is of no cluster has one, too, for `safe`: so messages are missed that are not there any more.
    """

    label: int = 0
    """The epoch whose log it matches (`broker.protocol.replication`)."""
    groups: tuple[int, int] = (0, 0)
    """Epoch and number of the last change of groups."""
    safe: int = 0
    """What was safe, at least."""

    def pack(self) -> bytes:
        """For the log.

        >>> fold.apply(None, CopyNote(3, (3, 7), 100).pack())
        CopyNote(label=3, groups=(3, 7), safe=100)
        """
        return b"@" + json.dumps([self.label, self.groups, self.safe]).encode()

    @staticmethod
    def of(data: bytes) -> CopyNote:
        """As it was packed."""
        label, groups, safe = json.loads(data[1:])
        return CopyNote(label, (groups[0], groups[1]), safe)


@dataclass(frozen=True, slots=True)
class ProducerNote:
    """A record of a producer in the group log (`broker.protocol.producers`): under `PRODUCER` and its name."""

    told: dict[str, Any]

    def pack(self) -> bytes:
        """For the log.

        >>> fold.apply(None, ProducerNote({"number": 1}).pack())
        ProducerNote(told={'number': 1})
        """
        return b"P" + json.dumps(self.told, separators=(",", ":")).encode()

    @staticmethod
    def of(data: bytes) -> ProducerNote:
        """As it was packed."""
        return ProducerNote(json.loads(data[1:]))


Kept: TypeAlias = Saved | CopyNote | ProducerNote
"""What is kept beside the messages of a stream."""


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
    """The whole of a group, in columns: it may be in a hundred thousand pieces.

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
    told = {
        "floor": saved.floor,
        "epoch": saved.epoch,
        "highest": saved.highest,
        "standings": list(map(_standing, kinds)),
        "columns": list(map(len, columns)),
    }
    if saved.exclusive is not None:
        told["exclusive"] = saved.exclusive
    if saved.pause != (0, 0):
        told["pause"] = saved.pause
    if saved.redriven:
        told["redriven"] = [(first, end, *mark) for first, end, mark in saved.redriven]
    text = json.dumps(told, separators=(",", ":")).encode()
    return b"".join([text, b"\n", *map(_little, columns)])


def load(data: bytes) -> Kept:
    """What was dumped. A group of an older log has no `exclusive`, `pause` and `redriven`."""
    if data[:1] == b"@":
        return CopyNote.of(data)
    if data[:1] == b"P":
        return ProducerNote.of(data)
    at = data.index(b"\n") + 1
    told, columns = json.loads(data[:at]), []
    for length in told.pop("columns"):
        column = array("q", data[at : at + 8 * length])
        columns.append(array("q", _little(column)))
        at += 8 * length
    done, dones, untold, untolds, starts, ends, kinds = columns
    standings = [Standing(*one) for one in told.pop("standings")]
    saved = Saved(
        told.pop("floor"),
        Ranges.of(done, dones, [None] * len(done)),
        Ranges.of(starts, ends, [standings[kind] for kind in kinds]),
        told.pop("epoch"),
        told.pop("highest"),
        Ranges.of(untold, untolds, [None] * len(untold)),
        told.pop("exclusive", None),
        tuple(told.pop("pause", (0, 0))),
        Ranges((first, end, Mark(*mark)) for first, end, *mark in told.pop("redriven", ())),
    )
    if told:  # what is left would be lost when the log is written anew
        raise _later(f"it has {', '.join(sorted(told))}")
    return saved


def _little(column: array[int]) -> bytes:
    """Numbers of eight bytes each, little endian, from or to what this machine has."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


fold: Final = Fold[Kept](_apply, dump, load)
"""How the state of a group comes from its log."""
