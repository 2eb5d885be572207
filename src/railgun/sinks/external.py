"""Write to a sink outside, a program of its own (`railgun.sinkserver.SinkServer`, `railgun sink`).

Rules:

1. What a worker writes between two snapshots is one transaction. It is sent as it is written, in batches; at most
   `WINDOW_BYTES` bytes are under way unacknowledged, then `write` waits. So memory is bounded, and a slow sink slows
   the flow down.
2. After a lost connection, the worker asks the sink how many bytes of the transaction it has, and sends the rest. Bytes
   that the sink has acknowledged are not kept by the worker: if the sink comes back with less, the flow goes back to
   its last snapshot.
3. The worker waits up to `timeout` seconds for a sink that cannot be reached, with growing pauses; it waits for a slow
   sink as long as that reports that it is at work. Time during which the sink was at work does not count.
4. To *prepare* is to wait for the vote. A "no", or a sink that cannot be reached for too long, is an error caused by an
   `OSError`: the flow goes back to its last snapshot, and tries again.
5. To *commit* is to send the commit and wait until it is done. The sink commits first what is prepared for earlier
   snapshots: output is in the order of snapshots, and within a snapshot in the order of each worker. A key that has
   moved writes by two workers: its items of one snapshot may change places around the move.
6. When a generation begins, its tokens are committed, in the order of their snapshots; then the sink lists what else it
   has of this and older generations of this job, and that is aborted. A job is identified by its snapshot directory,
   whose identity is in each transaction: other jobs of the same flow have other directories. A token of an older
   Railgun is committed like any other; its other transactions are left alone.
7. At least once, and in a flow without snapshots: what was written is committed with each `flush`.
8. `open` needs no sink: the first connection is made when there is something to send.
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
from railgun.sinks.external_address import DATA, SinkAddress, SinkLocator
from railgun.sinks.files import as_json, encoded
from railgun.sinks.staging import MODES, Mode
from railgun.transport.commands import LARGEST, VERSION, FrameError, FrameReader, encode
from railgun.transport.hello import BAD_SECRET, BAD_VERSION, NONCE, Dialer, HelloError
from railgun.transport.packed_records import LENGTH_BYTES, pack
from railgun.transport.proto import sinks_pb2 as s
from railgun.transport.proto import streams_pb2 as p

T = TypeVar("T")
PIECE_BYTES: Final = 256 << 10  # sent at once
WINDOW_BYTES: Final = 2 << 20  # under way, not acknowledged
TIMEOUT_S: Final = 30.0
ABORT_TIMEOUT_S: Final = 1.0  # to abort a transaction when the writer closes
MAX_RECORD_BYTES: Final = LARGEST - (64 << 10)
"""The most bytes of a record."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 1.0  # between two attempts to connect
_LASTING_CODES: Final = ("BAD_FRAME", "BAD_OFFSET", "BAD_TXN", BAD_SECRET, BAD_VERSION)
_LOST_CODES: Final = ("LOST", "DAMAGED")
_ENCODE: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": lambda item: as_json(item).encode("utf-8", "backslashreplace"),
    "text": lambda item: str(item).encode(),
    "bytes": lambda item: memoryview(item).tobytes(),
}


class Outside(TwoPhaseSink[Any]):
    """Writes items as records to a sink outside.

    >>> Outside("10.0.0.7:7373", secret="00ff", format="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Outside('10.0.0.7:7373') writes 'json', 'text' or 'bytes', not 'xml'

    `address`: "host:port", with the sink's `secret` and, if the sink uses TLS, the `certificate` to trust (a PEM file);
    by default, the sink that works in the directory `data` of this machine. If the flow takes snapshots, records appear
    with them, exactly once; with `mode="at-least-once"` they appear about every second.
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
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.where = SinkLocator(address, secret=secret, data=data, certificate=certificate)
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
        """Return the writer of one worker."""
        if place.transactional and self.mode == "exactly-once":
            return _Staging(self, place)
        return _Committing(self, place)

    def commit(self, token: Token) -> None:
        """Commit the transaction of a token."""
        txn, _ = _parts(token)
        with _Session(f"{self}, commit", self) as session:
            session.ask(s.Commit(txn=txn), s.Done)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit these tokens, and abort what else older generations left; for a flow without a snapshot directory."""
        self.recover_at(Place(flow, step, 0, generation, transactional=True), tokens)

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> None:
        """Commit these tokens, and abort what else older generations of this job have left."""
        tokens_by_snapshot = sorted(map(_parts, tokens), key=lambda part: part[1])
        with _Session(f"{self}, recovery", self) as session:
            for txn, _ in tokens_by_snapshot:
                session.ask(s.Commit(txn=txn), s.Done)
            which = s.List(
                flow=place.flow, step=place.step, generation=place.generation, store=place.store
            )
            while True:  # an answer lists as many as fit into it
                listed = session.ask(which, s.Listed)
                if listed.store != place.store:
                    raise ConnectorError(
                        f"{self}, recovery: this sink is of an older Railgun, which cannot tell two jobs of one flow "
                        "apart: upgrade the sink before its flows"
                    )
                if not listed.transactions:
                    break
                for listed_transaction in listed.transactions:
                    session.ask(s.Abort(txn=listed_transaction.txn), s.Done)


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
        """When the sink last answered, or reported that it is at work."""
        self._socket = socket.create_connection((address.host, address.port), timeout)
        try:
            tls = address.tls()
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduction = {"version": VERSION, "name": "flow"}
            hello = Dialer(address.secret, secrets.token_bytes(NONCE), introduction)
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
        answers = [frame.command for frame in self._reader.feed(data)]
        if answers:
            self.heard = time.monotonic()
            self._answers.extend(answers)

    def send(self, command: Message, data: bytes = b"") -> None:
        """Send a command and its data as a frame."""
        self._socket.sendall(b"".join(encode(command, [data])))

    def answer(self) -> Any:
        """Return the next answer; skip reports that the sink is at work."""
        while True:
            while not self._answers:
                self._take(self._read())
            answer = self._answers.popleft()
            if not isinstance(answer, p.Pong):
                return answer

    def set_timeout(self, seconds: float) -> None:
        """Set how long each call waits from now on."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close the connection; errors are ignored."""
        with contextlib.suppress(OSError):
            self._socket.close()


class _Session:
    """Requests to a sink, repeated over a new connection when one is lost. All requests may safely be repeated."""

    def __init__(self, subject: str, sink: Outside, link: _Link | None = None) -> None:
        self.subject = subject
        self.sink = sink
        self.link = link

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def ask(self, command: Message, expected: type[T]) -> T:
        """Send a request, and return its answer, which must be of type `expected`."""

        def work(link: _Link) -> T:
            link.send(command)
            return self.expect(link, expected)

        return self.keep_trying(work)

    def expect(self, link: _Link, expected: type[T]) -> T:
        """Return the next answer, which must be of type `expected`."""
        answer = link.answer()
        if isinstance(answer, p.Failed):
            self.close()
            raise self.refused(answer.code, answer.text)
        if not isinstance(answer, expected):
            self.close()
            raise ConnectorError(f"{self.subject}: the sink answers with {type(answer).__name__}")
        return answer

    def keep_trying(self, work: Callable[[_Link], T]) -> T:
        """Do `work` with a connection; with a new one if it is lost, until the sink's timeout."""
        deadline, pause = time.monotonic() + self.sink.timeout, _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                if self.link is None:
                    self.link = self.connect()
                    began = time.monotonic()
                return work(self.link)
            except (OSError, FrameError, HelloError) as error:
                if self.link is not None:
                    # For that time the sink was at work
                    deadline += max(0.0, self.link.heard - began)
                self.close()
                if isinstance(error, HelloError) and error.code in _LASTING_CODES:
                    raise ConnectorError(f"{self.subject}: {error}") from error
                if time.monotonic() + pause > deadline:
                    cause = error if isinstance(error, OSError) else ConnectionError(str(error))
                    raise ConnectorError(
                        f"{self.subject}: the sink could not be reached for {self.sink.timeout:g} s: {error}"
                    ) from cause
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def connect(self) -> _Link:
        """Make a new connection."""
        return _Link(self.sink.where.find(), self.sink.timeout)

    def refused(self, code: str, text: str) -> ConnectorError:
        """Return a refusal of the sink as an error of the flow."""
        message = f"{self.subject}: {text} ({code})"
        if code in _LOST_CODES:
            return LostOutputError(message)
        error = ConnectorError(message)
        if code not in _LASTING_CODES:
            error.__cause__ = ConnectionError(text)  # it may pass
        return error


class _Transaction(_Session):
    """A transaction that is being sent."""

    def __init__(
        self, subject: str, sink: Outside, place: Place, alone: bool, link: _Link | None
    ) -> None:
        super().__init__(subject, sink)
        self.txn = uuid.uuid4().hex
        self.end = 0
        self.count = 0
        self._begin = s.Begin(
            txn=self.txn, flow=place.flow, step=place.step, generation=place.generation,
            worker=place.worker, alone=alone, store=place.store,
        )  # fmt: skip
        self._unacknowledged: deque[tuple[int, bytes]] = deque()  # pieces, with their offsets
        self._acknowledged = 0  # bytes that the sink has acknowledged
        self._sent = 0  # bytes sent over this connection
        self._answers_due = 0  # answers to come
        self._voted = False
        self._spare_link = link

    def connect(self) -> _Link:
        """Make a connection on which the transaction goes on."""
        link, self._spare_link = self._spare_link or super().connect(), None
        if self._voted:
            # Nothing more is sent. The transaction may be committed by now, and then the sink has nothing of it.
            return link
        try:
            link.send(self._begin)
            held_bytes = self.expect(link, s.Have).end
        except BaseException:
            link.close()
            raise
        if held_bytes < self._acknowledged:
            link.close()
            held = f"{held_bytes:,} of {self._acknowledged:,} bytes"
            problem = f"{self.subject}: the sink has lost a part of what it had: {held}"
            raise ConnectorError(problem) from ConnectionError(problem)
        self._answers_due = 0
        self._set_acknowledged(held_bytes)
        self._sent = held_bytes
        return link

    def _take_answer(self, link: _Link) -> None:
        self._set_acknowledged(self.expect(link, s.Have).end)
        self._answers_due -= 1

    def _set_acknowledged(self, acknowledged: int) -> None:
        self._acknowledged = acknowledged
        while self._unacknowledged and self._unacknowledged[0][0] < acknowledged:
            self._unacknowledged.popleft()

    def add(self, records: list[bytes]) -> None:
        """Send these records; wait if too much is under way."""
        data = pack(records)
        self._unacknowledged.append((self.end, data))
        self.end += len(data)
        self.count += len(records)
        self.keep_trying(self._push)

    def _push(self, link: _Link) -> None:
        for start, data in list(self._unacknowledged):
            if start >= self._sent:
                link.send(s.Data(txn=self.txn, start=start), data)
                self._sent = start + len(data)
                self._answers_due += 1
        while self._answers_due and self._sent - self._acknowledged > WINDOW_BYTES:
            self._take_answer(link)

    def vote(self, snapshot: int) -> None:
        """Wait until the sink has all of the transaction on disk; raise an error if it votes no."""

        def work(link: _Link) -> s.Vote:
            self._push(link)
            link.send(s.Prepare(txn=self.txn, snapshot=snapshot, end=self.end, count=self.count))
            while self._answers_due:
                self._take_answer(link)
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
        """Return the connection, for the next transaction."""
        link, self.link = self.link, None
        return link

    def abort(self) -> None:
        """Let the sink abort the transaction, if it can be reached at once."""
        if self.link is not None:
            with contextlib.suppress(OSError, FrameError):
                self.link.set_timeout(ABORT_TIMEOUT_S)
                self.link.send(s.Abort(txn=self.txn))
                while not isinstance(self.link.answer(), s.Done | p.Failed):
                    # If a connection is closed with unread answers, the request may be lost with it
                    pass
        self.close()


# ---------------------------------------------------------------- writers


class _Encoding(TwoPhaseWriter[Any]):
    """Encodes items as records, and sends them in batches."""

    alone: bool

    def __init__(self, sink: Outside, place: Place) -> None:
        self.sink = sink
        self.place = place
        self.transaction: _Transaction | None = None
        self._encode = _ENCODE[sink.format]
        self._records: list[bytes] = []
        self._records_bytes = 0
        self._spare_links: deque[_Link] = deque()  # connections without a transaction
        self._closed = False

    def write(self, items: Sequence[Any]) -> None:
        records = encoded(self._encode, items, self.place.step, "send", f"as {self.sink.format}")
        longest_record = max(map(len, records), default=0)
        if longest_record > MAX_RECORD_BYTES:
            raise ConnectorError(
                f"sink {self.place.step!r}: a record of {longest_record:,} bytes is too long: at most "
                f"{MAX_RECORD_BYTES:,} are allowed"
            )
        self._records += records
        self._records_bytes += sum(map(len, records)) + LENGTH_BYTES * len(records)
        if self._records_bytes >= PIECE_BYTES:
            self.send()

    def send(self) -> None:
        """Send all records that wait."""
        waiting, self._records, self._records_bytes = self._records, [], 0
        at = size = 0
        for n, record in enumerate(waiting):
            if at < n and size + LENGTH_BYTES + len(record) > PIECE_BYTES:
                self._transaction().add(waiting[at:n])
                at, size = n, 0
            size += LENGTH_BYTES + len(record)
        if waiting:
            self._transaction().add(waiting[at:])

    def _transaction(self) -> _Transaction:
        if self.transaction is None:
            link = self._spare_links.popleft() if self._spare_links else None
            subject = f"sink {self.place.step!r}, {self.sink}"
            self.transaction = _Transaction(subject, self.sink, self.place, self.alone, link)
        return self.transaction

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def close(self) -> None:
        self._records, self._records_bytes = [], 0
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            transaction.abort()
        self._closed = True
        self.give_back(None)

    def give_back(self, link: _Link | None) -> None:
        """Keep a connection for the next transaction. May be called from any thread."""
        if link is not None:
            self._spare_links.append(link)
        while len(self._spare_links) > (0 if self._closed else 1):
            with contextlib.suppress(IndexError):
                self._spare_links.popleft().close()


class _Staging(_Encoding):
    """Sends what belongs to the next snapshot."""

    alone = False

    def flush(self) -> None:
        self.send()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        self.send()
        transaction, self.transaction = self.transaction, None
        if transaction is None:
            return lambda: None
        token = {"txn": transaction.txn, "generation": self.place.generation, "snapshot": snapshot}

        def rest() -> Token:
            transaction.vote(snapshot)
            self.give_back(transaction.rest())
            return token

        return rest


class _Committing(_Encoding):
    """Commits what is written about every second."""

    alone = True

    def flush(self) -> None:
        self.send()
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            transaction.vote(0)
            transaction.ask(s.Commit(txn=transaction.txn), s.Done)
            self.give_back(transaction.rest())

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Leave nothing to commit, but make sure that what was written before the snapshot is in the sink."""
        self.flush()
        return lambda: None

    def close(self) -> None:
        try:
            self.flush()
        finally:
            super().close()
