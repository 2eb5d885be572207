"""Serve a sink as a process of its own: receive transactions of flows, vote, and commit them to a target.

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

1. A peer proves that it knows the secret before anything else is read (`transport.hello`). The secret is made at the
   first start, and kept in the data directory beside the address, so that flows on the same machine find both. The
   number of connections that have not proved it yet is limited.
2. The server listens on loopback, and on other addresses only with TLS.
3. One thread carries out the commands, in the order in which they arrive; `participant.py` says what they mean. The
   frames are in `transport/proto/sinks.proto`. Each has one answer, in order; while an answer takes long, a `Pong` is
   sent now and then, so that a slow sink is not taken for a dead one.
4. A wrong command is answered with `Failed`, a code and a sentence. Bytes that are no frame, an unknown or too long
   command, and data with a gap before it also end that session. No session ends the server.
5. A session is not read while many of its commands wait (back-pressure). A session that does not read its answers is
   ended when too many wait. A session whose other end is gone is found by the operating system (TCP keep-alive).
6. `stop` takes no more commands, finishes the current one, and leaves the rest on disk: nothing is lost.
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
from railgun.sinkserver.participant import Participant, shorten
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
MAX_PENDING_BYTES: Final = 16 << 20
"""Commands of a session that wait, with their data; above this the session is not read."""
MAX_UNREAD_BYTES: Final = 4 << 20
"""Answers that a session has not read; above this the session is ended."""
PONG_INTERVAL_S: Final = 3.0
"""Time between two signs of life, while a command is carried out."""
STOP_TIMEOUT_S: Final = 5.0
"""Time that `stop` gives the current command; then the target is interrupted."""
MAX_BATCH_FRAMES: Final = 64
"""Frames that are carried out in one call of the thread."""
MAX_LISTED_TRANSACTIONS: Final = 10_000
"""Transactions in one answer; a caller that aborts them asks again for more."""
FRAME_OVERHEAD_BYTES: Final = 500
"""Memory of a frame without its command and data."""
MAX_COMMAND_BYTES: Final = 32 << 10
"""Size of a command without its data: names are short."""
OnEvent = Callable[[str, dict[str, Any]], None]


class SinkServer:
    """A server that receives transactions of flows, and applies those that are committed to a target, each once.

    `told(kind, data)` is called for each event: "vote-no", "committed", "failed" (a command),
    "refused" (a session). It is called in the event loop's thread.
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
        told: OnEvent | None = None,
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
        """Notes on what the start has found in the data directory."""
        self._given_secret = secret
        self._on_event = told or (lambda kind, data: None)
        self._lock: FileLock | None = None
        self._listener: Listener | None = None
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
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
            ):  # a second signal ends the process at once
                loop.remove_signal_handler(number)

    async def start(self) -> None:
        """Open the data directory and the target, apply what was decided, and listen.

        Raise `OpenListenError` for an address that others can reach without TLS, and `SinkError` if the directory or
        the port is in use.
        """
        if self.certificate is None and not is_loopback(self.host):
            raise OpenListenError(
                f"{self.host} can be reached from other machines, and data sent to it can be read on the way: give the "
                "sink a certificate and its key, or let it listen on 127.0.0.1"
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
            self.secret = self._given_secret or secret_in(self.data / SECRET)
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
        self._listener = listener
        self._write_address()

    def _write_address(self) -> None:
        """Write the address file, by which flows on this machine find the server."""
        address: dict[str, Any] = {"host": self.host, "port": self.port, "pid": os.getpid()}
        if self.certificate is not None:
            address["certificate"] = str(self.certificate)
        new = self.data / f"{ADDRESS}.new"
        new.write_text(json.dumps(address), "utf-8")
        new.rename(self.data / ADDRESS)

    async def stop(self) -> None:
        """Stop listening, finish the current command, end all sessions, and close the target."""
        self._stopping = True
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.stop()
        with contextlib.suppress(OSError):
            (self.data / ADDRESS).unlink()
        for session in list(self._sessions.values()):
            session.end()
        timer = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, self.target.interrupt)
        for session in list(self._sessions.values()):
            await session.ended()
        timer.cancel()
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

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Call `told` with an event; an error that it raises does not end a session."""
        try:
            self._on_event(kind, data)
        except Exception as error:
            context = {"message": "told() of a SinkServer has raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _accept(self) -> Connection:
        return Connection(self.secret, self._opened, self._received, self._closed)

    def _opened(self, connection: Connection) -> None:
        version = connection.who.get("version")
        if version != VERSION:
            refusal = f"this sink speaks version {VERSION}, and you {version!r}"
            raise HelloError(refusal, BAD_VERSION)
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
            self.report("refused", {"code": error.code, "text": str(error)})

    # ------------------------------------------------------------ commands

    async def done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
        """Carry out commands in the one thread; return the answers, and whether the session has to end."""
        loop = asyncio.get_running_loop()
        before = self.participant.commits
        answers, over, events = await loop.run_in_executor(self._thread, self._do, frames)
        for kind, data in events:
            self.report(kind, data)
        if self.participant.commits > before:
            self.report("committed", self.counts())
        return answers, over

    def counts(self) -> dict[str, Any]:
        """Return how many transactions and records are committed, and how many transactions are prepared and open."""
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
        events: list[tuple[str, dict[str, Any]]] = []
        for frame in frames:
            try:
                answers.append(self._answer(frame, events))
            except MisuseError as error:
                answers.append(p.Failed(code=error.code, text=shorten(str(error))))
                return answers, True, events
            except Exception as error:
                code, text = code_of(error), shorten(str(error) or repr(error))
                answers.append(p.Failed(code=code, text=text))
                events.append(("failed", {"code": code, "text": text}))
        return answers, False, events

    def _answer(self, frame: Frame, events: list[tuple[str, dict[str, Any]]]) -> Message:
        part, command = self.participant, frame.command
        match command:
            case s.Begin():
                of = (
                    command.flow,
                    command.step,
                    command.generation,
                    command.worker,
                    command.alone,
                    command.store,
                )
                return s.Have(txn=command.txn, end=part.begin(command.txn, *of))
            case s.Data():
                return s.Have(
                    txn=command.txn, end=part.data(command.txn, command.start, frame.blob)
                )
            case s.Prepare():
                try:
                    part.prepare(command.txn, command.snapshot, command.end, command.count)
                except Exception as error:
                    code, text = code_of(error), shorten(str(error) or repr(error))
                    events.append(("vote-no", {"txn": command.txn, "code": code, "text": text}))
                    return s.Vote(txn=command.txn, yes=False, code=code, text=text)
                return s.Vote(txn=command.txn, yes=True)
            case s.Commit():
                part.commit(command.txn)
                return s.Done(txn=command.txn)
            case s.Abort():
                part.abort(command.txn)
                return s.Done(txn=command.txn)
            case s.List():
                left_over = part.uncommitted(
                    command.flow, command.step, command.generation, command.store
                )
                return s.Listed(
                    store=command.store,
                    transactions=[
                        s.Uncommitted(
                            txn=txn.id, generation=txn.generation, snapshot=txn.snapshot,
                            worker=txn.worker, prepared=txn.state == "prepared", end=txn.end, count=txn.count,
                        )
                        for txn in left_over[:MAX_LISTED_TRANSACTIONS]
                    ],
                )  # fmt: skip
            case p.Ping():
                return p.Pong(number=command.number)
        raise MisuseError("BAD_FRAME", f"a sink knows no {type(command).__name__}")


class _Session:
    """One connection, and its commands that wait."""

    def __init__(self, server: SinkServer, connection: Connection) -> None:
        self.server = server
        self.connection = connection
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._pending_bytes = 0
        self._paused = False
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def received(self, data: bytes) -> None:
        """Take bytes from the connection, and start carrying out the commands in them."""
        if self._over:
            return
        try:
            for frame in self._reader.feed(data):
                size = frame.command.ByteSize()
                if size > MAX_COMMAND_BYTES:
                    kind = type(frame.command).__name__
                    raise FrameError(
                        f"{kind} of {size:,} bytes: {MAX_COMMAND_BYTES:,} are the most"
                    )
                self._frames.append(frame)
                self._pending_bytes += _size(frame)
        except FrameError as error:
            self._refuse(error.code, str(error))
            return
        if self._pending_bytes > MAX_PENDING_BYTES and not self._paused:
            self._paused = True
            self.connection.transport.pause_reading()
        if self._frames and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._frames and not self._over:
                frames = [
                    self._frames.popleft() for _ in range(min(MAX_BATCH_FRAMES, len(self._frames)))
                ]
                answers, over = await self._done(frames)
                if self._over:
                    return
                self.connection.send(b"".join(b"".join(encode(answer)) for answer in answers))
                if over:
                    self.end()
                    return
                if self.connection.unsent > MAX_UNREAD_BYTES:
                    self._over = True
                    self.server.report("refused", {"code": "SLOW", "text": "answers are not read"})
                    self.connection.transport.abort()
                    return
                self._pending_bytes -= sum(map(_size, frames))
                if self._paused and self._pending_bytes <= MAX_PENDING_BYTES // 2:
                    self._paused = False
                    self.connection.transport.resume_reading()
        except (
            Exception
        ) as error:  # end the session: the flow must not wait for an answer that never comes
            self.server.report("failed", {"code": code_of(error), "text": shorten(repr(error))})
            self.end()
        finally:
            self._task = None

    async def _done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
        """Carry out commands; while that takes long, send a `Pong` now and then."""
        work = asyncio.ensure_future(self.server.done(frames))
        while not (await asyncio.wait([work], timeout=PONG_INTERVAL_S))[0]:
            if not self._over:
                self.connection.send(b"".join(encode(p.Pong())))
        return work.result()

    def _refuse(self, code: str, text: str) -> None:
        self.server.report("refused", {"code": code, "text": text})
        self.connection.send(b"".join(encode(p.Failed(code=code, text=text))))
        self.end()

    def end(self) -> None:
        """Drop the commands that wait, and close the connection after sending the answers."""
        self._over = True
        self._frames.clear()
        self.connection.close()

    def lost(self) -> None:
        """Drop the commands that wait, since the connection is lost; the current one may still be carried out."""
        self._over = True
        self._frames.clear()

    async def ended(self) -> None:
        """Wait until the current command is carried out."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._task)


def _size(frame: Frame) -> int:
    """Return about how much memory a frame takes, in bytes."""
    return FRAME_OVERHEAD_BYTES + int(frame.command.ByteSize()) + len(frame.blob)


def code_of(error: Exception) -> str:
    """Return the code of an error, for programs."""
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return "NO_SPACE" if full else "DISK"
    if isinstance(error, RailgunError):
        return str(getattr(error, "code", "FAILED"))
    return "FAILED"


def _keep_alive(connected: socket.socket | None) -> None:
    """Turn on TCP keep-alive, so that the operating system finds a peer that is gone."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
