"""The pulse: a sign of life while a user's functions keep the event loop waiting.

The loop beats between two batches, and a batch of slow calls may take minutes. That is no reason to give a worker up;
one call that never returns is. So a thread looks at the main thread every second: is it inside the same call of a
user's function as before? If not, it says so to the controller, over a connection of its own, for the loop's is the
loop's.

To import a module, or to unpickle the flow, may take longer than a call ever should. So that counts as a sign of life
for `MOST_LOADING_S`, and then as a call that does not return.

A thread that waits for an outage outside to pass (`flow.waiting`) gets on, too. What the sources and sinks wait for is
told with the pulse, as a line of text whenever it changes; an empty line says that they go on.

A process that is frozen, or holds the interpreter's lock for ever, has no pulse either.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from railgun.flow import calls
from railgun.flow.telling import shorten
from railgun.flow.waiting import WAITS
from railgun.wire.hello import NONCE, Dialer, HelloError
from railgun.worker.spec import WorkerSpec

EVERY: Final = 1.0
PATIENCE: Final = 10.0
BEAT: Final = b"\0"
STUCK: Final = b"\1"
"""Begins a line that says where the thread is stuck, its newlines as carriage returns: no sign of life."""
MOST_LOADING_S: Final = 600.0  # that one import, or unpickling the flow, may take
STUCK_EVERY: Final = 5  # looks, from one such line to the next
STACK: Final = 8  # frames of it that are told
MOST_STUCK_CHARACTERS: Final = 3000
MOST_CHARACTERS: Final = 2000  # of what is waited for
UNPICKLE_FLOW: Final = "unpickle the flow"
"""The function that a call of user code is said to be in while the flow is unpickled."""
_IMPORT: Final = ("<frozen importlib._bootstrap>", "_find_and_load")
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
            loading = Loading()
            told = ""
            stuck = 0
            while not self._over.wait(self._every):
                # The frame is kept, so that no later one can have its identity.
                frame = sys._current_frames().get(self._watched)
                now = call_under_way(frame)
                loads = loading.look(frame, calls.running(self._watched), time.monotonic())
                waits = WAITS.told()
                if waits != told:
                    connection.sendall(" ".join(waits.split())[:MOST_CHARACTERS].encode() + b"\n")
                elif now is not last or loads or WAITS.blocks(self._watched):
                    connection.sendall(BEAT)
                    stuck = 0
                else:
                    stuck += 1
                    if stuck % STUCK_EVERY == 1:
                        connection.sendall(STUCK + self._where(loading) + b"\n")
                last, told = now, waits

    def _where(self, loading: Loading) -> bytes:
        """Say in one line which call of user code the watched thread is in, with its stack."""
        within = calls.running(self._watched)
        frame = sys._current_frames().get(self._watched)
        told = ""
        if loading.what:
            told = f"{loading.what} has taken more than {MOST_LOADING_S:.0f} s; "
        if within and within[-1].step:
            call = within[-1]
            told += (
                f"it is in step {call.step!r}, function {call.name}, for {shorten(call.record)}\n"
            )
        told += "".join(traceback.format_stack(frame)[-STACK:])
        return told.strip().replace("\n", "\r")[:MOST_STUCK_CHARACTERS].encode()

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


class Loading:
    """Notes for how long a thread has been importing one module, or unpickling the flow."""

    def __init__(self) -> None:
        self.what = ""
        """What is being loaded, for messages; empty: nothing."""
        self._loaded: object = None  # the frame of the import, or the call that unpickles
        self._since_s = 0.0

    def look(self, frame: FrameType | None, within: Sequence[calls.Call], now_s: float) -> bool:
        """Return whether a thread in `frame` and in the calls `within` loads something, and not for too long."""
        loaded: object = _import_under_way(frame)
        if isinstance(loaded, FrameType):
            self.what = f"the import of module {loaded.f_locals.get('name', '?')!r}"
        elif within and within[0].function == UNPICKLE_FLOW:
            loaded, self.what = within[0], "to unpickle the flow"
        else:
            self.what = ""
        if loaded is not self._loaded:
            self._loaded, self._since_s = loaded, now_s
        return loaded is not None and now_s - self._since_s < MOST_LOADING_S


def _import_under_way(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost import that user code has begun, of a thread that is in `frame`."""
    found = None
    while frame is not None and not frame.f_code.co_filename.startswith(_RAILGUN):
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            found = frame
        frame = frame.f_back
    return found


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
