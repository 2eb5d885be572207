"""A connection inside a job: a socket, opened by `hello`, then bytes or messages both ways.

`Connection` is an asyncio protocol without coroutines: what arrives is handled where it arrives, so the order of a link
is the order of its bytes. A connection that does not say hello within `PATIENCE` seconds is closed.

All connections of a thread read into one buffer, and what came is copied out of it: asyncio's own way takes a new
buffer of 256 KiB from the system for every read, which costs more than all else that is done with a short message.
Who gathers large messages may have them read straight to where they stay (`filling`), as long as much is missing: an
event loop goes on reading from one connection while what it reads fills the buffer it was given, and the others wait.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from railgun.errors import pass_interrupt, represent
from railgun.transport.columns import CannotUnpickleError, DecodingError
from railgun.transport.hello import NONCE, Acceptor, Dialer, HelloError
from railgun.transport.pickling import dumps, may_unpickle_later

PATIENCE: Final = 10.0
BUFFER: Final = 256 << 10
STRANGERS: Final = 100  # who have not said hello, and are listened to
SOON: Final = 1.0  # seconds in which a hello is mostly said; who takes longer gives way to others
UNSENT: Final = 4 << 20  # bytes a Unix socket takes: by itself fewer than TCP does
_LENGTH: Final = struct.Struct("<I")


class _Shared(threading.local):
    """The buffer of a thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BUFFER))


_SHARED: Final = _Shared()


class Filling(Protocol):
    """Who gathers messages, and may say where the next bytes of one belong."""

    def room(self) -> memoryview | None:
        """There."""

    def filled(self, count: int) -> None:
        """So many are there now."""


class Connection(asyncio.BufferedProtocol):
    """One end of a connection.

    `opened(connection)` may raise `HelloError` to refuse the caller; `received(connection, data)` gets bytes;
    `closed(connection, error)` is called once, also if it never opened.
    """

    def __init__(
        self,
        secret: bytes,
        opened: Callable[[Connection], None],
        received: Callable[[Connection, bytes], None],
        closed: Callable[[Connection, Exception | None], None],
        who: dict[str, Any] | None = None,
    ) -> None:
        nonce = secrets.token_bytes(NONCE)
        self.who: dict[str, Any] = who or {}
        """Of the other side, for the one that was called."""
        self.transport: asyncio.Transport
        self.tag: Any = None
        """For the owner's use."""
        self.filling: Filling | None = None
        """Where bytes may be read to; `received` is told, with none, when some have been."""
        self._filled = False  # whether the next ones are
        self._hello: Acceptor | Dialer | None = (
            Acceptor(secret, nonce) if who is None else Dialer(secret, nonce, who)
        )
        self._opened, self._received, self._closed = opened, received, closed
        self._early: list[bytes] | None = None  # sent while the hello is still to be answered
        self._error: Exception | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._gone = self._aborted = False

    @property
    def peer(self) -> str:
        """The other side's address."""
        name = self.transport.get_extra_info("peername") or ("?", "?")
        return f"{name[0]}:{name[1]}"

    @property
    def settled(self) -> bool:
        """Whether the hello is over, one way or the other."""
        return self._hello is None or self._gone

    @property
    def there(self) -> bool:
        """Whether its socket is open."""
        return hasattr(self, "transport") and not self._gone

    @property
    def closing(self) -> bool:
        """Whether it ends after what was sent."""
        return hasattr(self, "transport") and self.transport.is_closing()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return self.transport.get_write_buffer_size()

    def send(self, data: bytes) -> None:
        """Send bytes, in order; never waits. What is sent when the connection has ended is dropped."""
        if self._early is None:
            if not self.transport.is_closing():
                self.transport.write(data)
        else:
            self._early.append(data)

    def close(self, error: Exception | None = None) -> None:
        """End the connection, after what was sent; `error` is what `closed` is told."""
        self._error = self._error or error
        self.transport.close()

    def abort(self) -> None:
        """End the connection now, whatever was sent; one that is not quite there yet, as soon as it is."""
        self._aborted = True
        if hasattr(self, "transport"):
            self.transport.abort()

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there: say hello."""
        self.transport = cast(asyncio.Transport, transport)
        if self._aborted:
            self.transport.abort()
            return
        # Nothing is ever held back: throttling is the sources' business.
        self.transport.set_write_buffer_limits(high=(1 << 31) - 1)
        found = self.transport.get_extra_info("socket")
        if found is not None and found.family == getattr(socket, "AF_UNIX", None):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(PATIENCE, self._too_late)
        assert self._hello is not None
        self.transport.write(self._hello.start())

    def _too_late(self) -> None:
        if self._hello is not None:
            self.close(HelloError(f"{self.peer} said no hello"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        room = self.filling.room() if self.filling is not None else None
        if room is None or len(room) < BUFFER:
            self._filled = False
            return _SHARED.view
        self._filled = True
        return room

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        if self._filled and self.filling is not None:
            self.filling.filled(nbytes)
            self._received(self, b"")
            return
        data = bytes(_SHARED.view[:nbytes])
        if self._hello is None:
            self._received(self, data)
            return
        try:
            self._greet(self._hello, data)
        except HelloError as error:
            if isinstance(self._hello, Acceptor):
                self.transport.write(self._hello.refuse(error))
            self.close(error)
        except ValueError as error:
            self.close(HelloError(f"{self.peer}: {error}"))

    def _greet(self, hello: Acceptor | Dialer, data: bytes) -> None:
        self.transport.write(hello.feed(data))
        if isinstance(hello, Acceptor) and hello.who is not None:
            self.who = hello.who
            self._open(hello)
        elif isinstance(hello, Dialer) and hello.open:
            self._open(hello)

    def _open(self, hello: Acceptor | Dialer) -> None:
        self._early = []
        try:
            self._opened(self)
        finally:
            early, self._early = self._early, None
        if isinstance(hello, Acceptor):
            self.transport.write(hello.accept())
        self.transport.writelines(early)
        self._hello = None
        if self._patience is not None:
            self._patience.cancel()
        if hello.rest:
            self._received(self, hello.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._gone = True
        if self._patience is not None:
            self._patience.cancel()
        error = self._error or exc
        if error is None and self._hello is not None:
            error = HelloError("the other side closed the connection before it was open")
        self._closed(self, error)


class Gate:
    """Lets only so many in at a time who have not said hello: strangers must not use up what others need."""

    def __init__(self, most: int = STRANGERS) -> None:
        self.most = most
        self._waiting: dict[Connection, float] = {}  # since when, the oldest first

    def admit(self, connection: Connection) -> asyncio.BaseProtocol:
        """The connection; or, if too many wait already, one that ends at once.

        Who has waited for longer than a hello takes ends instead: silent ones must not keep others out. When many
        come at one moment, those who came first are not disturbed.
        """
        now = time.monotonic()
        if len(self._waiting) >= self.most:
            self._waiting = {one: since for one, since in self._waiting.items() if not one.settled}
        if len(self._waiting) >= self.most:
            oldest = next(iter(self._waiting))
            if now - self._waiting[oldest] < SOON:
                return _TurnedAway()
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[connection] = now
        return connection


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Messages:
    """Whole Python objects over a connection; both ends belong to one job."""

    def __init__(self, largest: int = 1 << 30) -> None:
        self.largest = largest
        self._data = bytearray()

    @staticmethod
    def encode(message: Any) -> bytes:
        """A message as bytes."""
        body = dumps(message)
        return _LENGTH.pack(len(body)) + body

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now."""
        self._data += data
        found = []
        at = 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > self.largest:
                raise DecodingError(f"a message of {length} bytes is not acceptable")
            end = at + _LENGTH.size + length
            if len(self._data) < end:
                break
            try:
                found.append(pickle.loads(bytes(self._data[at + _LENGTH.size : end])))
            except BaseException as error:
                pass_interrupt(error)
                kind = DecodingError if may_unpickle_later(error) else CannotUnpickleError
                raise kind(f"a message cannot be read: {represent(error)}") from error
            at = end
        del self._data[:at]
        return found
