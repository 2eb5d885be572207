"""The handshake (hello) that opens every connection: both sides prove that they know the shared secret.

Only fixed bytes and JSON are parsed before the proof, so garbage, strangers and other jobs are rejected unread.
A pure machine: bytes in, bytes out::

    acceptor → dialer    MAGIC, nonce a (32 bytes)
    dialer → acceptor    MAGIC, nonce d (32), length u16, who (JSON), HMAC("dial", a, d, who)
    acceptor → dialer    b"+", HMAC("accept", d, a)    or    b"-", length u16, reason (a code, a space, a sentence)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any, Final

from railgun.errors import RailgunError

MAGIC: Final = b"RAILGUN1"
NONCE: Final = 32
BAD_SECRET: Final = "BAD_SECRET"
BAD_VERSION: Final = "BAD_VERSION"
_LENGTH: Final = struct.Struct("<H")
_MAX_TEXT_BYTES: Final = 4096


class HelloError(RailgunError):
    """The hello has failed. `code` says why: BAD_SECRET, BAD_VERSION, BAD_HELLO, or a code of the acceptor."""

    def __init__(self, text: str, code: str = "BAD_HELLO") -> None:
        super().__init__(text)
        self.code = code


class Dialer:
    """The side that opens the connection. Call `feed` until `open`; `rest` then holds bytes behind the hello."""

    def __init__(self, secret: bytes, nonce: bytes, who: dict[str, Any]) -> None:
        self.open = False
        self.rest = b""
        self._secret = secret
        self._nonce = nonce
        self._who = json.dumps(who).encode()
        self._theirs = b""
        self._data = b""

    def start(self) -> bytes:
        """Return the bytes to send at once: none, since the acceptor begins."""
        return b""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the bytes to send. Raises `HelloError` if the hello fails."""
        self._data += data
        if not self._theirs:
            begin = len(MAGIC) + NONCE
            if not self._data.startswith(MAGIC[: len(self._data)]):
                raise HelloError("the program at this address is not Railgun")
            if len(self._data) < begin:
                return b""
            self._theirs, self._data = self._data[len(MAGIC) : begin], self._data[begin:]
            proof = _proof(self._secret, b"dial", self._theirs, self._nonce, self._who)
            length = _LENGTH.pack(len(self._who))
            return b"".join((MAGIC, self._nonce, length, self._who, proof))
        self._answer()
        return b""

    def _answer(self) -> None:
        data = self._data
        if data[:1] == b"-" and len(data) >= 1 + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, 1)
            if len(data) >= 1 + _LENGTH.size + length:
                reason = data[1 + _LENGTH.size :][:length].decode(errors="replace")
                code, _, text = reason.partition(" ")
                raise HelloError(text, code)
        elif data[:1] == b"+" and len(data) > NONCE:
            expected = _proof(self._secret, b"accept", self._nonce, self._theirs)
            if not hmac.compare_digest(data[1 : 1 + NONCE], expected):
                raise HelloError("the other side does not know the secret", BAD_SECRET)
            self.open, self.rest = True, data[1 + NONCE :]
        elif data[:1] not in (b"", b"+", b"-"):
            raise HelloError("the program at this address is not Railgun")


class Acceptor:
    """The side that accepts the connection. When `who` is set, call `accept` or `refuse`, and send its result."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self.open = False
        self.rest = b""
        self.who: dict[str, Any] | None = None
        self._secret = secret
        self._nonce = nonce
        self._theirs = b""
        self._data = b""

    def start(self) -> bytes:
        """Return the bytes to send at once."""
        return MAGIC + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the bytes to send.

        Raises `HelloError` if the hello fails; send `refuse` of it before closing the connection.
        """
        self._data += data
        data = self._data
        if not data.startswith(MAGIC[: len(data)]):
            raise HelloError("that was no hello of Railgun")
        at = len(MAGIC) + NONCE
        if self.who is not None or len(data) < at + _LENGTH.size:
            return b""
        (length,) = _LENGTH.unpack_from(data, at)
        if length > _MAX_TEXT_BYTES:
            raise HelloError("the hello is too long")
        begin = at + _LENGTH.size
        end = begin + length + NONCE
        if len(data) < end:
            return b""
        self._theirs, who = data[len(MAGIC) : at], data[begin : begin + length]
        expected = _proof(self._secret, b"dial", self._nonce, self._theirs, who)
        if not hmac.compare_digest(data[begin + length : end], expected):
            raise HelloError("the secret is wrong", BAD_SECRET)
        claims = json.loads(who)
        if not isinstance(claims, dict):
            raise HelloError("the hello does not describe its sender: it is no JSON object")
        self.who, self.rest = claims, data[end:]
        return b""

    def accept(self) -> bytes:
        """Accept the dialer; return the proof to send."""
        self.open = True
        return b"+" + _proof(self._secret, b"accept", self._theirs, self._nonce)

    def refuse(self, why: HelloError) -> bytes:
        """Return the bytes that tell the dialer why it is refused."""
        reason = f"{why.code} {why}".encode()[:_MAX_TEXT_BYTES]
        return b"-" + _LENGTH.pack(len(reason)) + reason


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, b"\0".join(parts), hashlib.sha256).digest()
