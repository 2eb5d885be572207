"""SinkServer: a sink outside of a flow, as a program of its own: it listens, keeps, votes, and fills its target.

>>> import asyncio, tempfile
>>> from pathlib import Path
>>> from railgun.sinkserver import FileTarget, SinkServer
>>> async def main(directory):
...     target = FileTarget(directory / "out.jsonl")
...     async with SinkServer(target, data=directory / "sink", port=0) as server:
...         return server.port > 0
>>> asyncio.run(main(Path(tempfile.mkdtemp())))
True

A flow writes to it by `Outside(data="railgun-sink")` on the same machine, or `Outside("host:7373", secret=...)`.

Rules:

1. Whoever connects proves that they know the secret, before anything else is read (`transport.hello`). The secret is
   made at the first start, and lies in the directory beside the address, so that flows on the same machine find both.
   Only some who have not proved it yet are let in at a time.
2. It listens on loopback, and elsewhere only with TLS.
3. What is asked for is done by one thread, in the order in which it came; what it means is told in `participant.py`.
   The frames are in `transport/proto/sinks.proto`. Each has one answer, in order; while that takes long a `Pong` comes
   now and then, so a slow sink is not taken for one that is gone.
4. What a session asks for wrongly is answered with `Failed`, a code and a sentence. Bytes that are no frame, a command
   that is none of ours or too long, or bytes with a gap before them, also end that session. Nothing ends the server.
5. A session is not read while much of what it has sent is not done; one that does not read its answers is ended when
   too many wait; one whose other end is gone is found by the system (keep-alive).
6. On `stop` it takes nothing more, ends what is being done, and leaves the rest on disk: it loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import ssl
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from railgun.errors import RailgunError
from railgun.ingest.errors import MisuseError, SinkError
from railgun.sinks.external_address import ADDRESS, DATA, SECRET
from railgun.sinkserver.participant import Participant, shortened
from railgun.sinkserver.targets import Target
from railgun.storage.errors import LockedError
from railgun.storage.lock import FileLock
from railgun.transport.commands import VERSION, Frame, FrameError, FrameReader, encode
from railgun.transport.connection import Connection, Gate
from railgun.transport.hello import BAD_VERSION, HelloError
from railgun.transport.listen_rules import OpenListenError, is_loopback, secret_in
from railgun.transport.listener import Listener
from railgun.transport.proto import sinks_pb2 as s
from railgun.transport.proto import streams_pb2 as p

PORT: Final = 7373
MOST_UNDONE: Final = 16 << 20  # bytes a session has sent that are not done yet
MOST_UNREAD: Final = 4 << 20  # bytes of answers that nobody reads
ALIVE: Final = 3.0  # seconds between two signs of life, while something is being done
PATIENCE: Final = 5.0  # seconds, when it is to end; then the target is interrupted
AT_ONCE: Final = 64  # frames that are done together
MOST_LISTED: Final = 10_000  # transactions in one answer; whoever aborts them asks for more
_OF_A_FRAME: Final = 500  # bytes of memory, but for what it carries
_LONGEST: Final = 32 << 10  # bytes of a command, but for what it carries: names are short
Told = Callable[[str, dict[str, Any]], None]


class SinkServer:
    """Takes transactions of flows, and gives those that are committed to a target, each once.

    `told(kind, data)` hears what happens: "vote-no", "committed", "failed" (what was asked
    for), "refused" (a session). It is called by the event loop's thread.
    """

    def __init__(
        self,
        target: Target,
        data: str | os.PathLike[str] = DATA,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        secret: bytes | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        told: Told | None = None,
    ) -> None:
        self.target = target
        self.data = Path(data).absolute()
        self.host = host
        self.port = port
        self.secret = secret or b""
        self.certificate = None if certificate is None else Path(certificate).absolute()
        self.key = key
        self.participant = Participant(self.data, target)
        self.recovered: list[str] = []
        """What the start has found."""
        self._given = secret
        self._listener = told or (lambda kind, data: None)
        self._lock: FileLock | None = None
        self._listening: Listener | None = None
        self._sessions: dict[Connection, _Session] = {}
        self._thread: ThreadPoolExecutor
        self._stopping = False

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> SinkServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def run(self) -> None:
        """Start, and stop at SIGTERM or Ctrl-C."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        async with self:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stopped.set)
            await stopped.wait()
            for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends it at once
                loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Open everything, finish what was decided, and listen."""
        if self.certificate is None and not is_loopback(self.host):
            raise OpenListenError(
                f"{self.host} can be reached from elsewhere, and what is sent there can be read: give the sink a "
                "certificate and its key, or let it listen on 127.0.0.1"
            )
        loop = asyncio.get_running_loop()
        self.data.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(self.data / "lock")
        except LockedError as error:
            raise SinkError(
                "IN_USE",
                f"another sink works in {self.data}: stop it, or give this one another directory",
            ) from error
        self._thread = ThreadPoolExecutor(1, "railgun-sink")
        opened = False
        try:
            self.secret = self._given or secret_in(self.data / SECRET)
            self.recovered = await loop.run_in_executor(self._thread, self.participant.open)
            opened = True
            tls = None
            if self.certificate is not None:
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(self.certificate, self.key)
            listener = Listener(self._accept, Gate())
            try:
                self.port = await listener.open(self.host, self.port, tls)
            except OSError as error:
                raise SinkError(
                    "PORT_TAKEN",
                    f"cannot listen on {self.host}:{self.port}: {error.strerror or error}",
                ) from error
        except BaseException:
            await self._leave(opened)
            raise
        self._listening = listener
        self._tell_where()

    def _tell_where(self) -> None:
        """Let flows on this machine find it."""
        where: dict[str, Any] = {"host": self.host, "port": self.port, "pid": os.getpid()}
        if self.certificate is not None:
            where["certificate"] = str(self.certificate)
        new = self.data / f"{ADDRESS}.new"
        new.write_text(json.dumps(where), "utf-8")
        new.rename(self.data / ADDRESS)

    async def stop(self) -> None:
        """End in order."""
        self._stopping = True
        listener, self._listening = self._listening, None
        if listener is None:
            return
        listener.stop()
        with contextlib.suppress(OSError):
            (self.data / ADDRESS).unlink()
        for session in list(self._sessions.values()):
            session.end()
        hurry = asyncio.get_running_loop().call_later(PATIENCE, self.target.interrupt)
        for session in list(self._sessions.values()):
            await session.ended()
        hurry.cancel()
        await listener.close()
        await self._leave(opened=True)

    async def _leave(self, opened: bool) -> None:
        loop = asyncio.get_running_loop()
        close = self.participant.close if opened else self.target.close
        await loop.run_in_executor(self._thread, close)
        self._thread.shutdown()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ------------------------------------------------------------ sessions

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Say what happens; whoever hears it badly does not end a session."""
        try:
            self._listener(kind, data)
        except Exception as error:
            context = {"message": "told() of a SinkServer has raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _accept(self) -> Connection:
        return Connection(self.secret, self._opened, self._received, self._closed)

    def _opened(self, connection: Connection) -> None:
        version = connection.who.get("version")
        if version != VERSION:
            told = f"this sink speaks version {VERSION}, and you {version!r}"
            raise HelloError(told, BAD_VERSION)
        if self._stopping:
            raise HelloError("this sink is about to end")
        _keep_alive(connection.transport.get_extra_info("socket"))
        self._sessions[connection] = _Session(self, connection)

    def _received(self, connection: Connection, data: bytes) -> None:
        session = self._sessions.get(connection)
        if session is not None:
            session.received(data)

    def _closed(self, connection: Connection, error: Exception | None) -> None:
        session = self._sessions.pop(connection, None)
        if session is not None:
            session.lost()
        elif isinstance(error, HelloError):
            self.tell("refused", {"code": error.code, "text": str(error)})

    # ------------------------------------------------------------ what is asked for

    async def done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
        """Do these, in the one thread; the answers, and whether the session has to end."""
        loop = asyncio.get_running_loop()
        before = self.participant.commits
        answers, over, heard = await loop.run_in_executor(self._thread, self._do, frames)
        for kind, data in heard:
            self.tell(kind, data)
        if self.participant.commits > before:
            self.tell("committed", self.counts())
        return answers, over

    def counts(self) -> dict[str, Any]:
        """How far it is."""
        states = [txn.state for txn in list(self.participant.txns.values())]
        return {
            "transactions": self.participant.commits,
            "records": self.participant.records,
            "prepared": states.count("prepared"),
            "open": states.count("open"),
        }

    def _do(
        self, frames: list[Frame]
    ) -> tuple[list[Message], bool, list[tuple[str, dict[str, Any]]]]:
        answers: list[Message] = []
        heard: list[tuple[str, dict[str, Any]]] = []
        for frame in frames:
            try:
                answers.append(self._answer(frame, heard))
            except MisuseError as error:
                answers.append(p.Failed(code=error.code, text=shortened(str(error))))
                return answers, True, heard
            except Exception as error:
                code, text = code_of(error), shortened(str(error) or repr(error))
                answers.append(p.Failed(code=code, text=text))
                heard.append(("failed", {"code": code, "text": text}))
        return answers, False, heard

    def _answer(self, frame: Frame, heard: list[tuple[str, dict[str, Any]]]) -> Message:
        part, asked = self.participant, frame.command
        match asked:
            case s.Begin():
                of = (
                    asked.flow,
                    asked.step,
                    asked.generation,
                    asked.worker,
                    asked.alone,
                    asked.store,
                )
                return s.Have(txn=asked.txn, end=part.begin(asked.txn, *of))
            case s.Data():
                return s.Have(txn=asked.txn, end=part.data(asked.txn, asked.start, frame.blob))
            case s.Prepare():
                try:
                    part.prepare(asked.txn, asked.snapshot, asked.end, asked.count)
                except Exception as error:
                    code, text = code_of(error), shortened(str(error) or repr(error))
                    heard.append(("vote-no", {"txn": asked.txn, "code": code, "text": text}))
                    return s.Vote(txn=asked.txn, yes=False, code=code, text=text)
                return s.Vote(txn=asked.txn, yes=True)
            case s.Commit():
                part.commit(asked.txn)
                return s.Done(txn=asked.txn)
            case s.Abort():
                part.abort(asked.txn)
                return s.Done(txn=asked.txn)
            case s.List():
                found = part.uncommitted(asked.flow, asked.step, asked.generation, asked.store)
                return s.Listed(
                    store=asked.store,
                    transactions=[
                        s.Uncommitted(
                            txn=txn.id, generation=txn.generation, snapshot=txn.snapshot,
                            worker=txn.worker, prepared=txn.state == "prepared", end=txn.end, count=txn.count,
                        )
                        for txn in found[:MOST_LISTED]
                    ],
                )  # fmt: skip
            case p.Ping():
                return p.Pong(number=asked.number)
        raise MisuseError("BAD_FRAME", f"a sink knows no {type(asked).__name__}")


class _Session:
    """One connection, and what it has asked for."""

    def __init__(self, server: SinkServer, connection: Connection) -> None:
        self.server = server
        self.connection = connection
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._undone = 0
        self._paused = False
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._over:
            return
        try:
            for frame in self._reader.feed(data):
                size = frame.command.ByteSize()
                if size > _LONGEST:
                    what = type(frame.command).__name__
                    raise FrameError(f"{what} of {size:,} bytes: {_LONGEST:,} are the most")
                self._frames.append(frame)
                self._undone += _size(frame)
        except FrameError as error:
            self._refuse(error.code, str(error))
            return
        if self._undone > MOST_UNDONE and not self._paused:
            self._paused = True
            self.connection.transport.pause_reading()
        if self._frames and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._frames and not self._over:
                frames = [self._frames.popleft() for _ in range(min(AT_ONCE, len(self._frames)))]
                answers, over = await self._done(frames)
                if self._over:
                    return
                self.connection.send(b"".join(b"".join(encode(answer)) for answer in answers))
                if over:
                    self.end()
                    return
                if self.connection.unsent > MOST_UNREAD:
                    self._over = True
                    self.server.tell("refused", {"code": "SLOW", "text": "answers are not read"})
                    self.connection.transport.abort()
                    return
                self._undone -= sum(map(_size, frames))
                if self._paused and self._undone <= MOST_UNDONE // 2:
                    self._paused = False
                    self.connection.transport.resume_reading()
        except Exception as error:  # nothing may wait for an answer that never comes
            self.server.tell("failed", {"code": code_of(error), "text": shortened(repr(error))})
            self.end()
        finally:
            self._task = None

    async def _done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
        """Have these done; as long as it takes, say that it is under way."""
        work = asyncio.ensure_future(self.server.done(frames))
        while not (await asyncio.wait([work], timeout=ALIVE))[0]:
            if not self._over:
                self.connection.send(b"".join(encode(p.Pong())))
        return work.result()

    def _refuse(self, code: str, text: str) -> None:
        self.server.tell("refused", {"code": code, "text": text})
        self.connection.send(b"".join(encode(p.Failed(code=code, text=text))))
        self.end()

    def end(self) -> None:
        """Do nothing more; what was answered goes out."""
        self._over = True
        self._frames.clear()
        self.connection.close()

    def lost(self) -> None:
        """The other side is gone; what it asked for last may still be done."""
        self._over = True
        self._frames.clear()

    async def ended(self) -> None:
        """Wait for what is being done."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._task)


def _size(frame: Frame) -> int:
    """Bytes of memory, about."""
    return _OF_A_FRAME + int(frame.command.ByteSize()) + len(frame.blob)


def code_of(error: Exception) -> str:
    """An error by a word, for programs."""
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return "NO_SPACE" if full else "DISK"
    if isinstance(error, RailgunError):
        return str(getattr(error, "code", "FAILED"))
    return "FAILED"


def _keep_alive(found: socket.socket | None) -> None:
    """Let the system find out if the other side is gone."""
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
