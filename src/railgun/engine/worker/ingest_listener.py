"""Listen for connectors that push records into one source of a worker, and serve their sessions.

The listener is open as long as the process runs. While a generation of the flow runs, it has a `Receiving`; in between,
connectors are told to try again. Rules:

1. A connector that connects proves that it knows the secret (`transport.hello`), and sends its version and its
   instance.
2. Sending messages costs credits, in bytes, which come back as messages are applied. A connector that sends without
   credits, or sends something invalid, is told the error, and its session ends. Nothing that a connector sends ends the
   worker.
3. All waiting messages and all incomplete frames stay within `MAX_WAITING_BYTES`. The more connectors there are, the
   fewer credits each gets; if that is not enough, no connection is read until there is room. If incomplete frames take
   up the room, they are completed one after the other.
4. A connector that is silent for long is pinged, and given up if it does not answer. A connector that connects again is
   recognized by its instance: its old session, which may still look alive here, ends.
5. A connector that does not read what is sent to it is given up, also one whose session has ended with an error.
6. The number of connections and of stream names is limited, so that the worker has resources left for its own work.
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

WINDOW_BYTES: Final = (16 << 10, 2 << 20)  # credits of a session: minimum, maximum
MAX_WAITING_BYTES: Final = 128 << 20  # of all sessions together
MAX_SESSIONS: Final = 20_000
RESERVED_FILES: Final = 2 * MAX_UNGREETED + 300  # for everything but connectors
MAX_STREAMS_PER_SESSION: Final = 100_000
MAX_STREAMS: Final = 200_000  # of all sessions together
MAX_UNREAD_BYTES: Final = 8 << 20  # that a connector has not read yet
# Time for connectors to read the reason, before a worker that ends closes their connections.
LINGER_S: Final = 0.5
LEAVING_S: Final = 5.0  # for a connector whose session has ended to read the reason
LISTEN_RETRY_S: Final = (0.1, 10.0)  # pause between attempts to open a port in use, and limit
MAX_POINTS: Final = 10_000  # acknowledgements in a frame
SILENCE_S: Final = (10.0, 20.0)  # after which a connector is pinged, and given up
_LOG = logging.getLogger(__name__)


def files_left(others: int = 0) -> int:
    """Return how many files this process may have open for connectors, after raising its limit as far as possible.

    `others`: the number of further listeners, each of which has its own unauthenticated connections.
    """
    reserved = RESERVED_FILES + others * MAX_UNGREETED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        wanted = MAX_SESSIONS + reserved if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
            soft = max(soft, wanted)
    return MAX_SESSIONS if soft == resource.RLIM_INFINITY else max(1, soft - reserved)


@dataclass(slots=True, eq=False)
class Caller:
    """A connected connector and its session."""

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
    waiting: int = 0  # bytes of its messages that are not applied yet
    begun: int = 0  # bytes of an incomplete frame
    heard: float = field(default_factory=time.monotonic)
    asked: bool = False


class IngestListener:
    """The listener of one source, with its sessions."""

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
        self._leaving: dict[Caller, float] = {}  # callers whose session has ended, and when
        self._waiting = self._begun = 0  # bytes of all callers
        self._names = 0  # number of stream names of all callers
        self._paused = False  # whether no caller is read
        # The caller that may complete a frame nevertheless, and since when.
        self._resumed: tuple[Caller, float] | None = None
        self._listener = Listener(
            lambda: Connection(source.secret, self._opened, self._received, self._closed), Gate()
        )
        self._share = share
        self._max_waiting_bytes = MAX_WAITING_BYTES // share
        self._max_sessions = MAX_SESSIONS
        self._watch: asyncio.Task[None] | None = None

    async def open(self, host: str, worker: int) -> tuple[str, int]:
        """Listen, and return the address. Raises `OSError`; `EADDRINUSE` only if the port stays in use.

        The previous owner of the port, for example a worker that was given up, may need a moment to end.
        """
        self.loop = asyncio.get_running_loop()
        self._max_sessions = max(1, min(MAX_SESSIONS, files_left(self._share - 1) // self._share))
        port = 0 if self.source.port is None else self.source.port + worker
        waited_s = 0.0
        while True:
            try:
                listening = socket.create_server((host, port), backlog=1024)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or waited_s >= LISTEN_RETRY_S[1]:
                    raise
                if not waited_s:
                    _LOG.warning("%s: port %d is taken; trying again", self.source, port)
            waited_s += LISTEN_RETRY_S[0]
            await asyncio.sleep(LISTEN_RETRY_S[0])
        await self._listener.open_socket(listening)
        self._watch = self.loop.create_task(self._check_regularly())
        address: tuple[str, int] = listening.getsockname()[:2]
        return address

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S[0] / 4)
            self._drop_silent()
            self._drop_stuck()

    async def close(self) -> None:
        """Stop listening, and end all sessions."""
        if self._watch is not None:
            self._watch.cancel()
        self.let_go()
        await self._listener.close(LINGER_S)

    # ------------------------------------------------------------ the running generation

    def attach(self, receiving: Receiving, generation: int) -> None:
        """Pass messages to the `Receiving` of a generation that runs now."""
        self.receiving, self.generation, self.elsewhere = receiving, generation, ""
        receiving.callers = self
        for session in self.callers:
            receiving.table.opened(session)

    def let_go(self) -> None:
        """End all sessions, because no generation runs any more."""
        self.receiving = None
        for caller in list(self.callers.values()):
            self._restart(caller, "")

    def obey(self, order: control.Granted | control.Rejected | control.Wanted) -> None:
        """Carry out an order of the controller about a stream."""
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
        """Carry out a command of the table of streams."""
        match command:
            case Answer(session, stream, reason, por):
                self._answer(session, stream, reason, por)
            case Acknowledge(session, points):
                caller = self.callers.get(session)
                if caller is not None:
                    points_to_send = [
                        c.Point(stream=caller.numbers[s], por=por) for s, por in points
                    ]
                    for at in range(0, len(points_to_send), MAX_POINTS):
                        # The size of a frame is limited.
                        self._send(caller, c.Ack(points=points_to_send[at : at + MAX_POINTS]))
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
        answer = c.NotifyAck(
            stream=caller.numbers[stream],
            granted=reason is Reason.OK,
            reason=reason.name,
        )
        if reason is Reason.OK and por != NONE:
            answer.por = por
        if reason is Reason.REDIRECT:
            answer.address = self.elsewhere
        self._send(caller, answer)

    def took(self, session: int, size: int) -> None:
        """Give credits back for messages that were applied; those of one loop iteration are sent together."""
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
        self._pause_or_resume()

    def refuse(self, session: int, error: SessionError) -> None:
        """Send the reason to a connector, and end its session."""
        caller = self.callers.get(session)
        if caller is None:
            return
        self.refused += 1
        refusal = c.Refused(code=error.code, text=str(error), stream=error.stream)
        if error.id != NONE:
            refusal.id = error.id
        self._send(caller, refusal)
        self._end(caller)

    def metrics(self) -> dict[str, int]:
        """Return the listener's metrics."""
        return {"connectors": len(self.callers), "refused": self.refused}

    # ------------------------------------------------------------ connections

    def _opened(self, connection: Connection) -> None:
        who = connection.who
        if who.get("version") != VERSION:
            raise HelloError(
                f"the connector has version {who.get('version')!r}; this worker needs {VERSION}",
                BAD_VERSION,
            )
        if who.get("source") not in (None, self.source.name):
            raise HelloError(
                f"this is {self.source.name!r}, not {str(who['source'])[:100]!r}", "NO_SOURCE"
            )
        instance = str(who.get("instance") or "")[:200]
        before = self.instances.get(instance) if instance else None
        if before is not None:  # the connector has abandoned this connection
            self._drop(before)
        if len(self.callers) + len(self._leaving) >= self._max_sessions:
            raise HelloError(
                f"this worker accepts at most {self._max_sessions} connectors", "TOO_MANY"
            )
        self._sessions += 1
        window = min(
            WINDOW_BYTES[1],
            max(WINDOW_BYTES[0], self._max_waiting_bytes // (len(self.callers) + 1)),
        )
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
        if self._paused:
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
            self._pause_or_resume()
        except SessionError as refused:
            self.refuse(caller.session, refused)
        except FrameError as garbage:
            self.refuse(caller.session, SessionError("BAD_FRAME", str(garbage)))
        except Exception as error:  # any error ends only this session
            _LOG.exception("a connector's session ends because of an unexpected error")
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
                name = type(command).__name__
                raise SessionError("BAD_FRAME", f"a worker does not accept {name}")

    def _offer(self, caller: Caller, number: int, content: Blob | int, size: int) -> None:
        name = caller.names.get(number)
        if name is None or self.receiving is None:
            raise SessionError("NOT_OPEN", f"stream {number} is not open here: notify first")
        if caller.credits <= 0:
            raise SessionError("OVERDRAWN", f"{size} bytes were sent without any credits")
        cost = size + FRAME_COST
        caller.credits -= cost
        if self.receiving.stopped:
            return
        caller.waiting += cost
        self._waiting += cost
        if self.receiving.offer(caller.session, name, content, cost):
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
        elif len(receiving.table.entries) >= MAX_STREAMS and name not in receiving.table.entries:
            # A snapshot removes streams that have ended or have no connection.
            self._answer(caller.session, name, Reason.BUSY_RETRY, NONE)
            self.carry_out(Hasten())
        else:
            receiving.notify(caller.session, name)

    def _number(self, caller: Caller, number: int, name: str) -> None:
        """Note the number by which a connector refers to a stream."""
        if caller.names.setdefault(number, name) != name:
            raise SessionError("BAD_NAME", f"stream {number} is {caller.names[number]!r}", name)
        if caller.numbers.setdefault(name, number) != number:
            raise SessionError("BAD_NAME", f"{name!r} is stream {caller.numbers[name]}", name)
        if len(caller.names) > min(MAX_STREAMS_PER_SESSION, MAX_STREAMS - self._names):
            self._forget_ended(caller)
        if len(caller.names) > MAX_STREAMS_PER_SESSION:
            raise SessionError(
                "TOO_MANY", f"a session has at most {MAX_STREAMS_PER_SESSION} streams"
            )
        if len(caller.names) > MAX_STREAMS - self._names:
            raise SessionError(
                "TOO_MANY", f"all sessions together have at most {MAX_STREAMS} streams"
            )

    def _forget_ended(self, caller: Caller) -> None:
        """Free the numbers of streams that no longer exist here."""
        entries = {} if self.receiving is None else self.receiving.table.entries
        for number, name in list(caller.names.items())[:-1]:
            if name not in entries:
                del caller.names[number], caller.numbers[name]

    def _send(self, caller: Caller, command: Message, blobs: tuple[Blob, ...] = ()) -> None:
        caller.out.send(encode(command, blobs))
        if caller.out.unsent > MAX_UNREAD_BYTES:
            caller.connection.abort()

    def _restart(self, caller: Caller, address: str) -> None:
        self._send(caller, c.Restart(address=address))
        self._end(caller)

    def _end(self, caller: Caller) -> None:
        """End a session; the connector may still read what was sent to it."""
        self._forget(caller)
        self._leaving[caller] = time.monotonic()
        caller.out.flush()
        caller.connection.close()

    def _drop(self, caller: Caller) -> None:
        """End a session without telling the connector."""
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
        self._pause_or_resume()

    # ------------------------------------------------------------ memory

    def _pause_or_resume(self) -> None:
        """Stop reading when too much waits; read all callers again when there is room."""
        waiting = self._waiting + self._begun
        if not self._paused:
            if waiting > self._max_waiting_bytes:
                self._paused = True
                for caller in self.callers.values():
                    caller.connection.transport.pause_reading()
                self._resume_one()
        elif waiting <= self._max_waiting_bytes * 3 // 4:
            self._paused, self._resumed = False, None
            now = time.monotonic()
            for caller in self.callers.values():
                caller.heard, caller.asked = now, False  # it was not read while paused
                caller.connection.transport.resume_reading()
        else:
            self._resume_one()

    def _resume_one(self) -> None:
        """If only incomplete frames wait, read the caller whose frame lacks the fewest bytes.

        Otherwise no room would ever become free.
        """
        if self._resumed is not None:
            caller, _ = self._resumed
            if caller.begun and not caller.waiting and caller.session in self.callers:
                return  # its frame is still incomplete
            self._resumed = None
            caller.connection.transport.pause_reading()
        if self._waiting == 0:
            begun = (caller for caller in self.callers.values() if caller.begun)
            least = min(begun, key=lambda caller: caller.reader.missing, default=None)
            if least is not None:
                self._resumed = least, time.monotonic()
                least.connection.transport.resume_reading()

    def _drop_stuck(self) -> None:
        """Drop callers that take too long: to complete a frame that all others wait for, or to read why their session
        ended.
        """
        now = time.monotonic()
        if self._resumed is not None and now - self._resumed[1] > LEAVING_S:
            self._drop(self._resumed[0])
        for caller, since in list(self._leaving.items()):
            if now - since > LEAVING_S:
                caller.connection.abort()

    def _drop_silent(self) -> None:
        if self._paused:
            return  # no caller is read
        now = time.monotonic()
        for caller in list(self.callers.values()):
            silent = now - caller.heard
            if silent > SILENCE_S[1] and caller.asked:
                self._drop(caller)
            elif silent > SILENCE_S[0] and not caller.asked:
                caller.asked = True
                with contextlib.suppress(Exception):
                    self._send(caller, p.Ping(number=0))
