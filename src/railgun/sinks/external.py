"""Outside: a sink that is a program of its own (`railgun.sinkserver.SinkServer`, `railgun sink`).

Rules:

1. What a worker writes between two snapshots is one transaction. It is sent as it is written, in batches; no more than
   `WINDOW` bytes are on their way unanswered, then `write` waits. So memory stays within bounds, and a slow sink slows
   the flow.
2. When the connection is lost, the sink is asked how many bytes of the transaction it has, and gets the rest. What it
   had said it has is not kept here: if it comes back with less, the flow goes back to its last snapshot.
3. A sink that is not there (yet) is waited for, with pauses that grow, for `timeout` seconds; one that is slow, but
   says that it is at work, as long as it takes. Time in which it was at work does not count.
4. To *prepare* is to wait for the vote. A "no", or a sink that is not there for too long, is an error caused by an
   `OSError`: the flow goes back to its last snapshot, and tries again.
5. To *commit* is to say so and wait until it is done. The sink commits what is prepared for earlier snapshots first:
   what comes out is in the order of snapshots, and within one in the order of each worker. A key that has moved writes
   by two workers: its items of one snapshot may change places around the move.
6. When a generation begins, its tokens are committed, in the order of their snapshots; then the sink tells what else it
   has of this and older generations of this job, and that is aborted. A job is known by the identity of its snapshot
   directory, which travels with each transaction: other jobs of the same flow have other ones. A token of an older
   Railgun is committed as any other, and what else it has left is left alone.
7. At least once, and in a flow without snapshots: what was written is committed with each `flush`.
8. `open` needs no sink: it is looked for when there is something to send.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from google.protobuf.message import Message

from railgun.flows.errors import ConnectorError, LostOutputError
from railgun.flows.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter, Writer
from railgun.sinks.external_address import DATA, SinkAddress, Whereabouts
from railgun.sinks.files import as_json, encoded
from railgun.sinks.staging import MODES, Mode
from railgun.transport.commands import LARGEST, VERSION, FrameError, FrameReader, encode
from railgun.transport.hello import BAD_SECRET, BAD_VERSION, NONCE, Dialer, HelloError
from railgun.transport.packed_records import BEFORE, pack
from railgun.transport.proto import sinks_pb2 as s
from railgun.transport.proto import streams_pb2 as p

T = TypeVar("T")
PIECE: Final = 256 << 10  # bytes sent at once
WINDOW: Final = 2 << 20  # bytes on their way
TIMEOUT: Final = 30.0
GOOD_BYE: Final = 1.0  # seconds, at most, to throw away what nobody needs
LONGEST: Final = LARGEST - (64 << 10)
"""Bytes of a record."""
_FIRST, _LAST = 0.02, 1.0  # pauses between two attempts to connect
_LASTING: Final = ("BAD_FRAME", "BAD_OFFSET", "BAD_TXN", BAD_SECRET, BAD_VERSION)
_LOST: Final = ("LOST", "DAMAGED")
_ENCODE: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": lambda item: as_json(item).encode("utf-8", "backslashreplace"),
    "text": lambda item: str(item).encode(),
    "bytes": lambda item: memoryview(item).tobytes(),
}


class Outside(TwoPhaseSink[Any]):
    """Items as records of a sink outside.

    >>> Outside("10.0.0.7:7373", secret="00ff", format="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Outside('10.0.0.7:7373') writes 'json', 'text' or 'bytes', not 'xml'

    `address`: "host:port", with its `secret` and, if it speaks TLS, the `certificate` to trust (a PEM file); without,
    the sink that works in the directory `data` of this machine. If the flow takes snapshots, records come out with
    them, exactly once; `mode="at-least-once"` lets them come out about every second.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        secret: bytes | str | None = None,
        format: Literal["json", "text", "bytes"] = "json",
        mode: Mode = "exactly-once",
        data: str | Path = DATA,
        certificate: str | Path | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.where = Whereabouts(address, secret=secret, data=data, certificate=certificate)
        if format not in _ENCODE:
            raise ConnectorError(f"{self} writes 'json', 'text' or 'bytes', not {format!r}")
        if mode not in MODES:
            raise ConnectorError(f"{self} delivers 'exactly-once' or 'at-least-once', not {mode!r}")
        self.format = format
        self.mode = mode
        self.timeout = timeout

    def __str__(self) -> str:
        return f"Outside({str(self.where)!r})"

    def open(self, place: Place) -> Writer[Any]:
        """The writer of one worker."""
        if place.transactional and self.mode == "exactly-once":
            return _Staging(self, place)
        return _Committing(self, place)

    def commit(self, token: Token) -> None:
        """Let the sink show what it has prepared."""
        txn, _ = _parts(token)
        with _Asking(f"{self}, commit", self) as asking:
            asking.ask(s.Commit(txn=txn), s.Done)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit these, abort what else is left of older generations; for a flow without a store of its own."""
        self.recover_at(Place(flow, step, 0, generation, transactional=True), tokens)

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> None:
        """Commit these, abort what else older generations of this job have left."""
        known = sorted(map(_parts, tokens), key=lambda part: part[1])
        with _Asking(f"{self}, recovery", self) as asking:
            for txn, _ in known:
                asking.ask(s.Commit(txn=txn), s.Done)
            which = s.List(
                flow=place.flow, step=place.step, generation=place.generation, store=place.store
            )
            while True:  # so many as go into an answer
                listed = asking.ask(which, s.Listed)
                if listed.store != place.store:
                    raise ConnectorError(
                        f"{self}, recovery: this sink is of an older Railgun, which cannot tell two jobs of one flow "
                        "apart: upgrade the sink before its flows"
                    )
                if not listed.transactions:
                    break
                for one in listed.transactions:
                    asking.ask(s.Abort(txn=one.txn), s.Done)


def _parts(token: Token) -> tuple[str, tuple[int, int]]:
    match token:
        case {"txn": str(txn), "generation": int(generation), "snapshot": int(snapshot)}:
            return txn, (generation, snapshot)
    raise ConnectorError(
        f"{token!r} is not a token of Outside: was the step another sink when its snapshot was taken?"
    )


# ---------------------------------------------------------------- the connection


class _Link:
    """A connection to a sink. Every frame has one answer, in order."""

    def __init__(self, address: SinkAddress, timeout: float) -> None:
        self._reader = FrameReader()
        self._answers: deque[Any] = deque()
        self.heard = 0.0
        """When the sink has answered last, or has said that it is at work."""
        self._socket = socket.create_connection((address.host, address.port), timeout)
        try:
            tls = address.tls()
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            who = {"version": VERSION, "name": "flow"}
            hello = Dialer(address.secret, secrets.token_bytes(NONCE), who)
            while not hello.open:
                self._socket.sendall(hello.feed(self._read()))
            self._take(hello.rest)
        except BaseException:
            self.close()
            raise

    def _read(self) -> bytes:
        data = self._socket.recv(64 << 10)
        if not data:
            raise ConnectionResetError("the sink has closed the connection")
        return data

    def _take(self, data: bytes) -> None:
        found = [frame.command for frame in self._reader.feed(data)]
        if found:
            self.heard = time.monotonic()
            self._answers.extend(found)

    def send(self, command: Message, data: bytes = b"") -> None:
        """Send a frame."""
        self._socket.sendall(b"".join(encode(command, [data])))

    def answer(self) -> Any:
        """The next answer. A sign of life is none, but whoever gives one is waited for."""
        while True:
            while not self._answers:
                self._take(self._read())
            found = self._answers.popleft()
            if not isinstance(found, p.Pong):
                return found

    def patience(self, seconds: float) -> None:
        """Wait no longer than that from now on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._socket.close()


class _Asking:
    """Asks, and asks again over a new connection when one is lost. Whatever is asked may be asked twice."""

    def __init__(self, who: str, sink: Outside, link: _Link | None = None) -> None:
        self.who = who
        self.sink = sink
        self.link = link

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def ask(self, command: Message, expected: type[T]) -> T:
        """One question, one answer."""

        def work(link: _Link) -> T:
            link.send(command)
            return self.expect(link, expected)

        return self.keep_trying(work)

    def expect(self, link: _Link, expected: type[T]) -> T:
        """The next answer, which is to be of this kind."""
        found = link.answer()
        if isinstance(found, p.Failed):
            self.close()
            raise self.refused(found.code, found.text)
        if not isinstance(found, expected):
            self.close()
            raise ConnectorError(f"{self.who}: the sink answers with {type(found).__name__}")
        return found

    def keep_trying(self, work: Callable[[_Link], T]) -> T:
        """Do something over a connection; on another one if it is lost."""
        deadline, pause = time.monotonic() + self.sink.timeout, _FIRST
        while True:
            begun = time.monotonic()
            try:
                if self.link is None:
                    self.link = self.connect()
                    begun = time.monotonic()
                return work(self.link)
            except (OSError, FrameError, HelloError) as error:
                if self.link is not None:
                    deadline += max(0.0, self.link.heard - begun)  # so long it was at work
                self.close()
                if isinstance(error, HelloError) and error.code in _LASTING:
                    raise ConnectorError(f"{self.who}: {error}") from error
                if time.monotonic() + pause > deadline:
                    cause = error if isinstance(error, OSError) else ConnectionError(str(error))
                    raise ConnectorError(
                        f"{self.who}: the sink cannot be reached, for {self.sink.timeout:g} s now: {error}"
                    ) from cause
            time.sleep(pause)
            pause = min(2 * pause, _LAST)

    def connect(self) -> _Link:
        """A new connection."""
        return _Link(self.sink.where.find(), self.sink.timeout)

    def refused(self, code: str, text: str) -> ConnectorError:
        """What the sink says no with, as an error of the flow."""
        told = f"{self.who}: {text} ({code})"
        if code in _LOST:
            return LostOutputError(told)
        error = ConnectorError(told)
        if code not in _LASTING:
            error.__cause__ = ConnectionError(text)  # it may pass
        return error


class _Sending(_Asking):
    """A transaction on its way."""

    def __init__(
        self, who: str, sink: Outside, place: Place, alone: bool, link: _Link | None
    ) -> None:
        super().__init__(who, sink)
        self.txn = uuid.uuid4().hex
        self.end = 0
        self.count = 0
        self._begin = s.Begin(
            txn=self.txn, flow=place.flow, step=place.step, generation=place.generation,
            worker=place.worker, alone=alone, store=place.store,
        )  # fmt: skip
        self._unsure: deque[tuple[int, bytes]] = deque()  # what the sink has not said it has
        self._had = 0  # bytes it has said it has
        self._sent = 0  # over this connection
        self._owed = 0  # answers
        self._voted = False
        self._spare = link

    def connect(self) -> _Link:
        """A connection on which the transaction goes on."""
        link, self._spare = self._spare or super().connect(), None
        if (
            self._voted
        ):  # nothing more is sent; it may be committed by now, and then nothing of it is there
            return link
        try:
            link.send(self._begin)
            here = self.expect(link, s.Have).end
        except BaseException:
            link.close()
            raise
        if here < self._had:
            link.close()
            told = f"{self.who}: the sink has lost a part of what it had: {here:,} of {self._had:,} bytes"
            raise ConnectorError(told) from ConnectionError(told)
        self._owed = 0
        self._heard(here)
        self._sent = here
        return link

    def _hear(self, link: _Link) -> None:
        self._heard(self.expect(link, s.Have).end)
        self._owed -= 1

    def _heard(self, had: int) -> None:
        self._had = had
        while self._unsure and self._unsure[0][0] < had:
            self._unsure.popleft()

    def add(self, records: list[bytes]) -> None:
        """Send these; wait if too much is on its way."""
        data = pack(records)
        self._unsure.append((self.end, data))
        self.end += len(data)
        self.count += len(records)
        self.keep_trying(self._push)

    def _push(self, link: _Link) -> None:
        for start, data in list(self._unsure):
            if start >= self._sent:
                link.send(s.Data(txn=self.txn, start=start), data)
                self._sent = start + len(data)
                self._owed += 1
        while self._owed and self._sent - self._had > WINDOW:
            self._hear(link)

    def vote(self, snapshot: int) -> None:
        """Wait until the sink has all of it, safe; an error if it does not want it."""

        def work(link: _Link) -> s.Vote:
            self._push(link)
            link.send(s.Prepare(txn=self.txn, snapshot=snapshot, end=self.end, count=self.count))
            while self._owed:
                self._hear(link)
            return self.expect(link, s.Vote)

        vote = self.keep_trying(work)
        if not vote.yes:
            self.close()
            error = self.refused(vote.code, f"the sink votes no: {vote.text}")
            if error.__cause__ is None:
                error.__cause__ = ConnectionError(vote.text)
            raise error
        self._voted = True

    def rest(self) -> _Link | None:
        """The connection, for the next transaction."""
        link, self.link = self.link, None
        return link

    def abort(self) -> None:
        """Let the sink forget it, if it can be told at once."""
        if self.link is not None:
            with contextlib.suppress(OSError, FrameError):
                self.link.patience(GOOD_BYE)
                self.link.send(s.Abort(txn=self.txn))
                while not isinstance(self.link.answer(), s.Done | p.Failed):
                    pass  # a connection that is closed with answers unread may take the question with it
        self.close()


# ---------------------------------------------------------------- writers


class _Encoding(TwoPhaseWriter[Any]):
    """Makes records of items, and batches of records."""

    alone: bool

    def __init__(self, sink: Outside, place: Place) -> None:
        self.sink = sink
        self.place = place
        self.sending: _Sending | None = None
        self._encode = _ENCODE[sink.format]
        self._waiting: list[bytes] = []
        self._size = 0
        self._spares: deque[_Link] = deque()  # connections without a transaction
        self._closed = False

    def write(self, items: Sequence[Any]) -> None:
        made = encoded(self._encode, items, self.place.step, "send", f"as {self.sink.format}")
        longest = max(map(len, made), default=0)
        if longest > LONGEST:
            raise ConnectorError(
                f"sink {self.place.step!r}: a record of {longest:,} bytes is too long: {LONGEST:,} are the most"
            )
        self._waiting += made
        self._size += sum(map(len, made)) + BEFORE * len(made)
        if self._size >= PIECE:
            self.send()

    def send(self) -> None:
        """Let all go that waits."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        at = size = 0
        for n, record in enumerate(waiting):
            if at < n and size + BEFORE + len(record) > PIECE:
                self._transaction().add(waiting[at:n])
                at, size = n, 0
            size += BEFORE + len(record)
        if waiting:
            self._transaction().add(waiting[at:])

    def _transaction(self) -> _Sending:
        if self.sending is None:
            link = self._spares.popleft() if self._spares else None
            who = f"sink {self.place.step!r}, {self.sink}"
            self.sending = _Sending(who, self.sink, self.place, self.alone, link)
        return self.sending

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def close(self) -> None:
        self._waiting, self._size = [], 0
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.abort()
        self._closed = True
        self.give_back(None)

    def give_back(self, link: _Link | None) -> None:
        """Keep a connection for the next transaction. Any thread."""
        if link is not None:
            self._spares.append(link)
        while len(self._spares) > (0 if self._closed else 1):
            with contextlib.suppress(IndexError):
                self._spares.popleft().close()


class _Staging(_Encoding):
    """Sends what belongs to the next snapshot."""

    alone = False

    def flush(self) -> None:
        self.send()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        self.send()
        sending, self.sending = self.sending, None
        if sending is None:
            return lambda: None
        token = {"txn": sending.txn, "generation": self.place.generation, "snapshot": snapshot}

        def rest() -> Token:
            sending.vote(snapshot)
            self.give_back(sending.rest())
            return token

        return rest


class _Committing(_Encoding):
    """Lets others see what is written, about every second."""

    alone = True

    def flush(self) -> None:
        self.send()
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.vote(0)
            sending.ask(s.Commit(txn=sending.txn), s.Done)
            self.give_back(sending.rest())

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Nothing is left to commit, but what the snapshot says was written has to be there."""
        self.flush()
        return lambda: None

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()
