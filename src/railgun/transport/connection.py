"""An authenticated connection: a socket, opened by the handshake `hello`, then bytes or messages both ways.

`Connection` is an asyncio protocol without coroutines: bytes are handled where they arrive, so they are handled in
order. A connection that does not complete the hello within `HELLO_TIMEOUT_S` seconds is closed.

All connections of a thread read into one shared buffer, and the bytes are copied out of it: asyncio's default allocates
a new buffer of 256 KiB for every read, which costs more than all other work for a short message. A receiver of large
messages may have them read directly into its own buffer (`filling`), as long as much is missing: an event loop reads
again from the same connection while each read fills its buffer, and the other connections wait.
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

HELLO_TIMEOUT_S: Final = 10.0
READ_BUFFER_BYTES: Final = 256 << 10
MAX_UNGREETED: Final = 100  # connections that have not completed the hello
USUAL_HELLO_S: Final = 1.0  # for a hello; a connection that takes longer makes way for others
UNIX_SEND_BUFFER_BYTES: Final = 4 << 20  # the default of a Unix socket is smaller than that of TCP
_LENGTH: Final = struct.Struct("<I")


class _Shared(threading.local):
    """The read buffer that all connections of a thread share."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BUFFER_BYTES))


_SHARED: Final = _Shared()


class Filling(Protocol):
    """A receiver that assembles messages, and may provide the buffer for the next bytes."""

    def room(self) -> memoryview | None:
        """Return the buffer for the rest of the current message, or None."""

    def filled(self, count: int) -> None:
        """Note that `count` bytes were read into that buffer."""


class Connection(asyncio.BufferedProtocol):
    """One end of a connection: the dialer if `who` is given, else the acceptor.

    `opened(connection)` may raise `HelloError` to refuse the other side; `received(connection, data)` gets bytes;
    `closed(connection, error)` is called once, also if the connection never opened.
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
        """What the dialer says about itself in the hello."""
        self.transport: asyncio.Transport
        self.tag: Any = None
        """Free for the owner's use."""
        self.filling: Filling | None = None
        """A receiver with its own buffer; `received` is called with empty bytes after a read into it."""
        self._filled = False  # whether the next read goes into that buffer
        self._hello: Acceptor | Dialer | None = (
            Acceptor(secret, nonce) if who is None else Dialer(secret, nonce, who)
        )
        self._opened, self._received, self._closed = opened, received, closed
        self._early: list[bytes] | None = None  # sent by `opened`, before the hello is answered
        self._error: Exception | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._gone = self._aborted = False

    @property
    def peer(self) -> str:
        """The address of the other side, `host:port`."""
        name = self.transport.get_extra_info("peername") or ("?", "?")
        return f"{name[0]}:{name[1]}"

    @property
    def settled(self) -> bool:
        """Whether the hello has succeeded or failed."""
        return self._hello is None or self._gone

    @property
    def there(self) -> bool:
        """Whether the socket is open."""
        return hasattr(self, "transport") and not self._gone

    @property
    def closing(self) -> bool:
        """Whether the connection closes once everything is sent."""
        return hasattr(self, "transport") and self.transport.is_closing()

    @property
    def unsent(self) -> int:
        """The number of bytes that wait to be sent."""
        return self.transport.get_write_buffer_size()

    def send(self, data: bytes) -> None:
        """Send bytes, in order, without waiting; drop them if the connection has ended."""
        if self._early is None:
            if not self.transport.is_closing():
                self.transport.write(data)
        else:
            self._early.append(data)

    def close(self, error: Exception | None = None) -> None:
        """Close the connection once everything is sent; `error` is passed to `closed`."""
        self._error = self._error or error
        self.transport.close()

    def abort(self) -> None:
        """Close the connection now and drop unsent bytes; if it is not established yet, as soon as it is."""
        self._aborted = True
        if hasattr(self, "transport"):
            self.transport.abort()

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the hello on the new socket."""
        self.transport = cast(asyncio.Transport, transport)
        if self._aborted:
            self.transport.abort()
            return
        # Never pause writing: back-pressure is applied at the sources.
        self.transport.set_write_buffer_limits(high=(1 << 31) - 1)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family == getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_S, self._too_late)
        assert self._hello is not None
        self.transport.write(self._hello.start())

    def _too_late(self) -> None:
        if self._hello is not None:
            self.close(HelloError(f"{self.peer} has not completed the hello in time"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read: the receiver's own for large messages, else the shared one."""
        room = self.filling.room() if self.filling is not None else None
        if room is None or len(room) < READ_BUFFER_BYTES:
            self._filled = False
            return _SHARED.view
        self._filled = True
        return room

    def buffer_updated(self, nbytes: int) -> None:
        """Handle `nbytes` bytes that were read."""
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
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if hello.rest:
            self._received(self, hello.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the socket is closed."""
        self._gone = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        error = self._error or exc
        if error is None and self._hello is not None:
            error = HelloError("the other side closed the connection before it was open")
        self._closed(self, error)


class Gate:
    """Limits the connections that have not completed the hello: unknown peers must not exhaust resources."""

    def __init__(self, most: int = MAX_UNGREETED) -> None:
        self.most = most
        self._waiting: dict[Connection, float] = {}  # when each was accepted, the oldest first

    def admit(self, connection: Connection) -> asyncio.BaseProtocol:
        """Return the connection; or, if too many wait already, a protocol that closes at once.

        If the oldest waiting connection has taken longer than a hello usually takes, it is closed instead: silent
        connections must not keep others out. When many connect at one moment, the first ones are left alone.
        """
        now = time.monotonic()
        if len(self._waiting) >= self.most:
            self._waiting = {
                waiting: since for waiting, since in self._waiting.items() if not waiting.settled
            }
        if len(self._waiting) >= self.most:
            oldest = next(iter(self._waiting))
            if now - self._waiting[oldest] < USUAL_HELLO_S:
                return _Rejected()
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[connection] = now
        return connection


class _Rejected(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Messages:
    """Encodes and decodes Python objects sent over a connection whose ends belong to one job."""

    def __init__(self, largest: int = 1 << 30) -> None:
        self.largest = largest
        self._data = bytearray()

    @staticmethod
    def encode(message: Any) -> bytes:
        """Return a message pickled, behind its length."""
        body = dumps(message)
        return _LENGTH.pack(len(body)) + body

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes; raise `DecodingError` if one cannot be read."""
        self._data += data
        messages = []
        at = 0
        while len(self._data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > self.largest:
                raise DecodingError(f"a message of {length} bytes is not acceptable")
            end = at + _LENGTH.size + length
            if len(self._data) < end:
                break
            try:
                messages.append(pickle.loads(bytes(self._data[at + _LENGTH.size : end])))
            except BaseException as error:
                pass_interrupt(error)
                kind = DecodingError if may_unpickle_later(error) else CannotUnpickleError
                raise kind(f"a message cannot be read: {represent(error)}") from error
            at = end
        del self._data[:at]
        return messages
