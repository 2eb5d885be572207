"""Where connectors come in: a listener of a worker for one source, and those who are connected.

A door is open as long as the process is there. Behind it is a `Receiving` while a generation of the flow runs;
in between, connectors are told to try again. Rules:

1. Whoever connects proves that they know the secret (`transport.hello`), and says of what version and instance they
   are.
2. Messages are paid for with credits, in bytes; they come back as messages are applied. Who sends without any, or
   anything that cannot be, is told why, and that session ends. Nothing a connector sends ends the worker.
3. All that waits, and all of frames that are not whole yet, stays within `ALL` bytes. The more connectors there are,
   the fewer credits each gets; when that is not enough, nobody is read from until there is room. If it is frames
   that are not whole that take up the room, those are completed one after the other.
4. Who says nothing for long is asked, and given up if there is no answer. A connector that connects again is known by
   its instance: its old session, which may not have ended yet as far as is known here, ends.
5. Who does not read what is sent to it is given up; also one whose session has ended, and who was told why.
6. There are never so many connections, nor names of streams, that the worker has no room left for its own work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import Message

from railgun.engine.operators.receiving import Receiving
from railgun.engine.protocol.ingest.messages import (
    LAST_ID,
    NONE,
    Acknowledge,
    Answer,
    Ask,
    FromTable,
    Hasten,
    Reason,
    Relinquish,
    Restart,
    SessionError,
)
from railgun.engine.worker import control_messages as control
from railgun.flows.source import Pushed
from railgun.transport.commands import Blob, FrameError, FrameReader, encode
from railgun.transport.connection import MAX_UNGREETED, Connection, Gate
from railgun.transport.hello import BAD_VERSION, HelloError
from railgun.transport.ingest_batch import FRAME_COST, LARGEST, LONGEST_NAME, VERSION
from railgun.transport.listener import Listener
from railgun.transport.outbox import Outbox
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import streams_pb2 as p

WINDOW: Final = (16 << 10, 2 << 20)  # bytes of credits of a session: at least, and at most
ALL: Final = 128 << 20  # bytes of all sessions that may wait
MOST_SESSIONS: Final = 20_000
RESERVED: Final = 2 * MAX_UNGREETED + 300  # files of a process for everything but connectors
MOST_STREAMS: Final = 100_000  # of a session
MOST_HERE: Final = 200_000  # streams of all sessions
UNREAD: Final = 8 << 20  # bytes that may wait for a connector to read them
LINGER_S: Final = (
    0.5  # for connectors to read why, before a worker that ends closes their connections
)
LEAVING: Final = 5.0  # seconds for one whose session has ended to read why
LISTEN: Final = (
    0.1,
    10.0,
)  # seconds between trying to get a port that is taken, and until that is given up
POINTS: Final = 10_000  # acknowledgements in a frame
SILENT: Final = (10.0, 20.0)  # seconds after which it is asked, and given up
_LOG = logging.getLogger(__name__)


def files_left(others: int = 0) -> int:
    """How many files this process may have open for connectors; it asks for as many as it can get.

    `others`: how many doors there are besides one; each has its strangers.
    """
    reserved = RESERVED + others * MAX_UNGREETED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        most = MOST_SESSIONS + reserved if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            soft = max(soft, most)
    return MOST_SESSIONS if soft == resource.RLIM_INFINITY else max(1, soft - reserved)


@dataclass(slots=True, eq=False)
class Caller:
    """A connector that is connected."""

    session: int
    connection: Connection
    out: Outbox
    credits: int
    window: int
    who: str
    reader: FrameReader = field(default_factory=lambda: FrameReader(LARGEST))
    names: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    owed: int = 0  # credits to give back
    waiting: int = 0  # bytes of its messages that are not applied
    begun: int = 0  # bytes of a frame that is not whole
    heard: float = field(default_factory=time.monotonic)
    asked: bool = False


class Door:
    """The listener of one source."""

    def __init__(
        self,
        source: Pushed[Any],
        step: str,
        tell: Callable[[control.FromWorker], None],
        wake: Callable[[], None],
        share: int = 1,
    ) -> None:
        self.source = source
        self.step = step
        self.tell, self.wake = tell, wake
        self.callers: dict[int, Caller] = {}
        self.instances: dict[str, Caller] = {}
        self.receiving: Receiving | None = None
        self.generation = -1
        self.elsewhere = ""  # where connectors are to go when this worker leaves
        self.refused = 0
        self._sessions = 0
        self._owing: dict[int, Caller] = {}
        self._leaving: dict[Caller, float] = {}  # whose session has ended, and since when
        self._waiting = self._begun = 0  # bytes, of all callers
        self._names = 0  # of streams, of all callers
        self._resting = False  # whether nobody is read from
        self._finishing: tuple[Caller, float] | None = (
            None  # who may complete a frame nevertheless, since when
        )
        self._listener = Listener(
            lambda: Connection(source.secret, self._opened, self._received, self._closed), Gate()
        )
        self._share = share
        self._all = ALL // share
        self._most = MOST_SESSIONS
        self._watch: asyncio.Task[None] | None = None

    async def open(self, host: str, worker: int) -> tuple[str, int]:
        """Listen; where. Raises `OSError` if that cannot be, `EADDRINUSE` only when the port stays taken.

        Whoever had the port before, a worker that was given up perhaps, may need a moment to be gone.
        """
        self.loop = asyncio.get_running_loop()
        self._most = max(1, min(MOST_SESSIONS, files_left(self._share - 1) // self._share))
        port = 0 if self.source.port is None else self.source.port + worker
        tried = 0.0
        while True:
            try:
                listening = socket.create_server((host, port), backlog=1024)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or tried >= LISTEN[1]:
                    raise
                if not tried:
                    _LOG.warning("%s: port %d is taken; trying again", self.source, port)
            tried += LISTEN[0]
            await asyncio.sleep(LISTEN[0])
        await self._listener.open_socket(listening)
        self._watch = self.loop.create_task(self._look_around())
        address: tuple[str, int] = listening.getsockname()[:2]
        return address

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(SILENT[0] / 4)
            self._look_for_silent()
            self._look_for_stuck()

    async def close(self) -> None:
        """Nobody comes in any more, and whoever is in goes."""
        if self._watch is not None:
            self._watch.cancel()
        self.let_go()
        await self._listener.close(LINGER_S)

    # ------------------------------------------------------------ what is behind it

    def attach(self, receiving: Receiving, generation: int) -> None:
        """A generation of the flow runs."""
        self.receiving, self.generation, self.elsewhere = receiving, generation, ""
        receiving.callers = self
        for session in self.callers:
            receiving.table.opened(session)

    def let_go(self) -> None:
        """It does no more: all sessions end."""
        self.receiving = None
        for caller in list(self.callers.values()):
            self._restart(caller, "")

    def hear(self, order: control.Granted | control.Rejected | control.Wanted) -> None:
        """What the controller says."""
        receiving = self.receiving
        if receiving is None or order.generation != self.generation:
            return
        match order:
            case control.Granted(_, _, stream, session, por, reached):
                receiving.granted(stream, session, por, reached)
            case control.Rejected(_, _, stream, session):
                receiving.rejected(stream, session)
            case control.Wanted(_, _, stream):
                receiving.wanted(stream)

    def carry_out(self, command: FromTable) -> None:
        """Do what the table wants."""
        match command:
            case Answer(session, stream, reason, por):
                self._answer(session, stream, reason, por)
            case Acknowledge(session, points):
                caller = self.callers.get(session)
                if caller is not None:
                    told = [c.Point(stream=caller.numbers[s], por=por) for s, por in points]
                    for at in range(0, len(told), POINTS):  # a frame has its limits
                        self._send(caller, c.Ack(points=told[at : at + POINTS]))
            case Restart(session):
                caller = self.callers.get(session)
                if caller is not None:
                    self._restart(caller, self.elsewhere)
            case Ask(stream, session):
                self.tell(control.Asked(self.generation, self.step, stream, session))
            case Relinquish(stream, por, reached):
                self.tell(control.Relinquished(self.generation, self.step, stream, por, reached))
            case Hasten():
                self.tell(control.Hastened(self.generation))

    def _answer(self, session: int, stream: str, reason: Reason, por: int) -> None:
        caller = self.callers.get(session)
        if caller is None:
            return
        told = c.NotifyAck(
            stream=caller.numbers[stream],
            granted=reason is Reason.OK,
            reason=reason.name,
        )
        if reason is Reason.OK and por != NONE:
            told.por = por
        if reason is Reason.REDIRECT:
            told.address = self.elsewhere
        self._send(caller, told)

    def took(self, session: int, size: int) -> None:
        """Messages were applied: their credits come back, those of a turn together."""
        caller = self.callers.get(session)
        if caller is None:
            return
        caller.credits += size
        caller.owed += size
        caller.waiting -= size
        self._waiting -= size
        if not self._owing:
            self.loop.call_soon(self._give_back)
        self._owing[session] = caller

    def _give_back(self) -> None:
        owing, self._owing = self._owing, {}
        for session, caller in owing.items():
            if session in self.callers:
                credits, caller.owed = caller.owed, 0
                self._send(caller, c.Ack(credits=credits))
        self._rest_or_go_on()

    def refuse(self, session: int, error: SessionError) -> None:
        """Say why, and end the session."""
        caller = self.callers.get(session)
        if caller is None:
            return
        self.refused += 1
        told = c.Refused(code=error.code, text=str(error), stream=error.stream)
        if error.id != NONE:
            told.id = error.id
        self._send(caller, told)
        self._end(caller)

    def metrics(self) -> dict[str, int]:
        """Figures, for people."""
        return {"connectors": len(self.callers), "refused": self.refused}

    # ------------------------------------------------------------ connections

    def _opened(self, connection: Connection) -> None:
        who = connection.who
        if who.get("version") != VERSION:
            raise HelloError(
                f"a connector of version {who.get('version')!r}; this worker speaks {VERSION}",
                BAD_VERSION,
            )
        if who.get("source") not in (None, self.source.name):
            raise HelloError(
                f"this is {self.source.name!r}, not {str(who['source'])[:100]!r}", "NO_SOURCE"
            )
        instance = str(who.get("instance") or "")[:200]
        before = self.instances.get(instance) if instance else None
        if before is not None:  # whose other end is not listened to any more
            self._drop(before)
        if len(self.callers) + len(self._leaving) >= self._most:
            raise HelloError(f"{self._most} connectors are the most", "TOO_MANY")
        self._sessions += 1
        window = min(WINDOW[1], max(WINDOW[0], self._all // (len(self.callers) + 1)))
        out = Outbox(self.loop, connection.transport)
        caller = Caller(self._sessions, connection, out, window, window, instance)
        connection.tag = caller
        self.callers[caller.session] = caller
        if instance:
            self.instances[instance] = caller
        if self.receiving is not None:
            self.receiving.table.opened(caller.session)
        welcome = c.Welcome(credits=window, largest=LARGEST)
        connection.send(b"".join(encode(welcome)))
        if self._resting:
            connection.transport.pause_reading()

    def _closed(self, connection: Connection, error: Exception | None) -> None:
        if connection.tag is not None:
            self._forget(connection.tag)
            self._leaving.pop(connection.tag, None)

    def _received(self, connection: Connection, data: bytes) -> None:
        caller: Caller = connection.tag
        if caller.session not in self.callers:
            return
        caller.heard, caller.asked = time.monotonic(), False
        try:
            for frame in caller.reader.feed(data):
                self._handle(caller, frame.command, frame.blob)
                if caller.session not in self.callers:
                    return
            begun = caller.reader.begun
            self._begun += begun - caller.begun
            caller.begun = begun
            self._rest_or_go_on()
        except SessionError as refused:
            self.refuse(caller.session, refused)
        except FrameError as garbage:
            self.refuse(caller.session, SessionError("BAD_FRAME", str(garbage)))
        except Exception as error:  # whatever it is, it is of this session
            _LOG.exception("a connector's session ends")
            self.refuse(caller.session, SessionError("INTERNAL", repr(error)[:500]))

    def _handle(self, caller: Caller, command: Message, blob: Blob) -> None:
        match command:
            case c.Messages():
                self._offer(caller, command.stream, blob, len(blob))
            case c.Eos():
                last = command.last if command.HasField("last") else NONE
                if not NONE <= last <= LAST_ID:
                    raise SessionError("BAD_IDS", f"a stream cannot end with {last}")
                self._offer(caller, command.stream, last, 0)
            case c.Notify():
                self._notify(caller, command.stream, command.name)
            case p.Ping():
                self._send(caller, p.Pong(number=command.number))
            case p.Pong():
                pass
            case _:
                what = type(command).__name__
                raise SessionError("BAD_FRAME", f"{what} is not for a worker to hear")

    def _offer(self, caller: Caller, number: int, what: Blob | int, size: int) -> None:
        name = caller.names.get(number)
        if name is None or self.receiving is None:
            raise SessionError("NOT_OPEN", f"stream {number} is not open here: notify first")
        if caller.credits <= 0:
            raise SessionError("OVERDRAWN", f"{size} bytes, but there are no credits")
        cost = size + FRAME_COST
        caller.credits -= cost
        if self.receiving.stopped:
            return
        caller.waiting += cost
        self._waiting += cost
        if self.receiving.offer(caller.session, name, what, cost):
            self.wake()

    def _notify(self, caller: Caller, number: int, name: str) -> None:
        if not name or len(name.encode()) > LONGEST_NAME:
            raise SessionError("BAD_NAME", f"a stream's name has 1 to {LONGEST_NAME} bytes")
        self._names -= len(caller.names)
        try:
            self._number(caller, number, name)
        finally:
            self._names += len(caller.names)
        receiving = self.receiving
        if receiving is None or receiving.stopped:
            self._answer(caller.session, name, Reason.ROLLING_BACK, NONE)
        elif len(receiving.table.entries) >= MOST_HERE and name not in receiving.table.entries:
            # Those that have come to their end, or have no connection, are gone with a snapshot.
            self._answer(caller.session, name, Reason.BUSY_RETRY, NONE)
            self.carry_out(Hasten())
        else:
            receiving.notify(caller.session, name)

    def _number(self, caller: Caller, number: int, name: str) -> None:
        """A connector says by which number it calls a stream."""
        if caller.names.setdefault(number, name) != name:
            raise SessionError("BAD_NAME", f"stream {number} is {caller.names[number]!r}", name)
        if caller.numbers.setdefault(name, number) != number:
            raise SessionError("BAD_NAME", f"{name!r} is stream {caller.numbers[name]}", name)
        if len(caller.names) > min(MOST_STREAMS, MOST_HERE - self._names):
            self._forget_ended(caller)
        if len(caller.names) > MOST_STREAMS:
            raise SessionError("TOO_MANY", f"{MOST_STREAMS} streams are the most of a session")
        if len(caller.names) > MOST_HERE - self._names:
            raise SessionError("TOO_MANY", f"{MOST_HERE} streams are the most of all sessions")

    def _forget_ended(self, caller: Caller) -> None:
        """Streams that are not here any more need no number."""
        known = {} if self.receiving is None else self.receiving.table.entries
        for number, name in list(caller.names.items())[:-1]:
            if name not in known:
                del caller.names[number], caller.numbers[name]

    def _send(self, caller: Caller, command: Message, blobs: tuple[Blob, ...] = ()) -> None:
        caller.out.send(encode(command, blobs))
        if caller.out.unsent > UNREAD:
            caller.connection.abort()

    def _restart(self, caller: Caller, address: str) -> None:
        self._send(caller, c.Restart(address=address))
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        """Its session is over; it may read what was sent to it."""
        self._forget(caller)
        self._leaving[caller] = time.monotonic()
        caller.out.flush()
        caller.connection.close()

    def _drop(self, caller: Caller) -> None:
        """There is nobody to be told anything."""
        self._forget(caller)
        caller.connection.abort()

    def _forget(self, caller: Caller) -> None:
        if self.callers.pop(caller.session, None) is None:
            return
        if self.instances.get(caller.who) is caller:
            del self.instances[caller.who]
        self._waiting -= caller.waiting
        self._begun -= caller.begun
        self._names -= len(caller.names)
        caller.waiting = caller.begun = 0
        caller.names, caller.numbers = {}, {}
        if self.receiving is not None:
            self.receiving.closed(caller.session)
        self._rest_or_go_on()

    # ------------------------------------------------------------ room

    def _rest_or_go_on(self) -> None:
        """Read from nobody when too much waits, and from all when there is room again."""
        waiting = self._waiting + self._begun
        if not self._resting:
            if waiting > self._all:
                self._resting = True
                for caller in self.callers.values():
                    caller.connection.transport.pause_reading()
                self._let_one_finish()
        elif waiting <= self._all * 3 // 4:
            self._resting, self._finishing = False, None
            now = time.monotonic()
            for caller in self.callers.values():
                caller.heard, caller.asked = now, False  # it could not be heard
                caller.connection.transport.resume_reading()
        else:
            self._let_one_finish()

    def _let_one_finish(self) -> None:
        """If only frames wait that are not whole, nothing would ever be free: the one that lacks least goes on."""
        if self._finishing is not None:
            caller, _ = self._finishing
            if caller.begun and not caller.waiting and caller.session in self.callers:
                return  # it is at it
            self._finishing = None
            caller.connection.transport.pause_reading()
        if self._waiting == 0:
            begun = (caller for caller in self.callers.values() if caller.begun)
            least = min(begun, key=lambda caller: caller.reader.missing, default=None)
            if least is not None:
                self._finishing = least, time.monotonic()
                least.connection.transport.resume_reading()

    def _look_for_stuck(self) -> None:
        """Give up who does not come to an end: with a frame all others wait for, or with reading why it is over."""
        now = time.monotonic()
        if self._finishing is not None and now - self._finishing[1] > LEAVING:
            self._drop(self._finishing[0])
        for caller, since in list(self._leaving.items()):
            if now - since > LEAVING:
                caller.connection.abort()

    def _look_for_silent(self) -> None:
        if self._resting:
            return  # nobody is heard
        now = time.monotonic()
        for caller in list(self.callers.values()):
            silent = now - caller.heard
            if silent > SILENT[1] and caller.asked:
                self._drop(caller)
            elif silent > SILENT[0] and not caller.asked:
                caller.asked = True
                with contextlib.suppress(Exception):
                    self._send(caller, p.Ping(number=0))
