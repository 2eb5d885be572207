"""The pulse: a sign of life while a user's functions keep the event loop waiting.

The loop beats between two batches, and a batch of slow calls may take minutes. That is no reason to give a worker up;
one call that never returns is. So a thread looks at the main thread every second: is it inside the same call of a
user's function as before? If not, it says so to the controller, over a connection of its own, for the loop's is the
loop's.

A process that is frozen, or holds the interpreter's lock for ever, has no pulse either.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Final

from railgun.wire.hello import NONCE, Dialer, HelloError
from railgun.worker.spec import WorkerSpec

EVERY: Final = 1.0
PATIENCE: Final = 10.0
_RAILGUN: Final = str(Path(__file__).resolve().parents[1])
_OURS: Final = (_RAILGUN, str(Path(asyncio.__file__).resolve().parent))


class Pulse:
    """Tells the controller of a worker that the thread which made it gets on."""

    def __init__(self, spec: WorkerSpec, every: float = EVERY) -> None:
        self._spec = spec
        self._every = every
        self._watched = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="railgun-pulse", daemon=True).start()

    def stop(self) -> None:
        """The worker ends."""
        self._over.set()

    def _beat(self) -> None:
        # Without the controller's ear there is no pulse, and the loop's own beats are all there is.
        with contextlib.suppress(OSError, HelloError), self._connect() as connection:
            last: FrameType | None = None
            while not self._over.wait(self._every):
                # The frame is kept, so that no later one can have its identity.
                now = call_under_way(sys._current_frames().get(self._watched))
                if now is not last:
                    connection.sendall(b".")
                last = now

    def _connect(self) -> socket.socket:
        spec = self._spec
        connection = socket.create_connection((spec.host, spec.port), PATIENCE)
        who = {"worker": spec.worker, "incarnation": spec.incarnation, "pulse": True}
        hello = Dialer(spec.secret, secrets.token_bytes(NONCE), who)
        try:
            while not hello.open:
                data = connection.recv(4096)
                if not data:
                    raise HelloError("the controller closed the connection")
                connection.sendall(hello.feed(data))
        except BaseException:
            connection.close()
            raise
        return connection


def call_under_way(frame: FrameType | None) -> FrameType | None:
    """The frame of the user's function that Railgun has called, or else the innermost of ours."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    inside = False
    for called in reversed(frames):
        file = called.f_code.co_filename
        if inside and not file.startswith(_OURS):
            return called
        inside = inside or file.startswith(_RAILGUN)
    return frames[0] if frames else None
