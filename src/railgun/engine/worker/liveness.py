"""The pulse: a sign of life while a user's functions keep the event loop waiting.

The loop beats between two batches, and a batch of slow calls may take minutes. That is no reason to give a worker up;
one call that never returns is. So a thread looks at the main thread every second: is it inside the same call of a
user's function as before? If not, it says so to the controller, over a connection of its own, for the loop's is the
loop's.

User code is called in another thread, too: sinks prepare, commit and recover there, while the main thread gets on. So
every other thread that is inside a call is looked at (`calls.others`). One that has not got on since the last look is
told of, as a line of text, now and then, until it does; an empty one says that. If it does not for long, the controller
gives the worker up, for all its beats. What the program that starts a flow calls is looked at in the same way
(`watched`), though nobody can end it.

To import a module, or to unpickle the flow, may take longer than a call ever should. So that counts as a sign of life
for `MOST_LOADING_S`, and then as a call that does not return.

A thread that waits for an outage outside to pass (`client.outages`) gets on, too. What the sources and sinks wait for
is told with the pulse, as a line of text whenever it changes; an empty line says that they go on.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from railgun import errors
from railgun.client.outages import WAITS
from railgun.engine.operators import calls
from railgun.engine.worker.spec import WorkerSpec
from railgun.errors import RailgunError
from railgun.transport.hello import NONCE, Dialer, HelloError

EVERY: Final = 1.0
PATIENCE: Final = 10.0
BEAT: Final = b"\0"
STUCK: Final = b"\1"
"""Begins a line that says where the thread is stuck, its newlines as carriage returns: no sign of life."""
BESIDE: Final = b"\2"
"""Begins such a line about another thread than the main one, which is in a call of user code; empty: it gets on."""
MOST_LOADING_S: Final = 600.0  # that one import, or unpickling the flow, may take
STUCK_EVERY: Final = 5  # looks, from one such line to the next
STACK: Final = 8  # frames of it that are told
MOST_STUCK_CHARACTERS: Final = 3000
MOST_CHARACTERS: Final = 2000  # of what is waited for
IN_STEP: Final = "it is in step"
"""Begins what is said of a thread that is inside a call of user code."""
UNPICKLE_FLOW: Final = "unpickling the flow"
"""The function that a call of user code is said to be in while the flow is unpickled."""
_IMPORT: Final = ("<frozen importlib._bootstrap>", "_find_and_load")
_RAILGUN: Final = str(Path(errors.__file__).resolve().parent)
_OURS: Final = (_RAILGUN, str(Path(asyncio.__file__).resolve().parent))
R = TypeVar("R")


class HungCallError(RailgunError):
    """A call of user code does not return; the text says where it is."""


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
            beside = Beside()
            told = ""
            stuck = 0
            while not self._over.wait(self._every):
                # The frame is kept, so that no later one can have its identity.
                frames = sys._current_frames()
                frame = frames.get(self._watched)
                line = beside.look(frames, calls.others(self._watched), time.monotonic())
                if line is not None:
                    connection.sendall(BESIDE + line.replace("\n", "\r").encode() + b"\n")
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
                        within = calls.running(self._watched)
                        where = tell_where(frame, within, loading.what).replace("\n", "\r")
                        connection.sendall(STUCK + where.encode() + b"\n")
                last, told = now, waits

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


def tell_where(frame: FrameType | None, within: Sequence[calls.Call], loading: str = "") -> str:
    """Say which call of user code a thread is in, with its stack.

    The thread is in `frame`, and in the calls `within`. `loading`: what it loads.
    """
    told = ""
    if loading:
        told = f"{loading} has taken more than {MOST_LOADING_S:.0f} s; "
    if within and within[-1].step:
        call = within[-1]
        which = call.which()
        told += f"{IN_STEP} {call.step!r}, function {call.name}{', ' * bool(which)}{which}\n"
    told += "".join(traceback.format_stack(frame)[-STACK:])
    return told.strip()[:MOST_STUCK_CHARACTERS]


class Beside:
    """Looks at the threads that are in calls of user code beside the main one: whether one does not get on."""

    def __init__(self) -> None:
        self._last: dict[int, FrameType | None] = {}  # the call under way, by thread
        self._loading: dict[int, Loading] = {}
        self._stuck: FrameType | None = None
        self._looks = 0

    def look(
        self,
        frames: Mapping[int, FrameType],
        inside: Mapping[int, Sequence[calls.Call]],
        now_s: float,
    ) -> str | None:
        """Return where one of the threads `inside` calls is stuck, nothing if none is any more; None: nothing new."""
        stuck, told = None, ""
        last, self._last = self._last, {}
        self._loading = {thread: self._loading.get(thread) or Loading() for thread in inside}
        for thread, within in inside.items():
            frame = frames.get(thread)
            now = self._last[thread] = call_under_way(frame)
            loads = self._loading[thread].look(frame, within, now_s)
            is_same = now is not None and now is last.get(thread)
            if is_same and not loads and not WAITS.blocks(thread) and stuck is None:
                stuck, told = now, tell_where(frame, within, self._loading[thread].what)
        was, self._stuck = self._stuck, stuck
        if stuck is not was:
            self._looks = 0
            if was is not None:
                return ""  # if another one is stuck, that is told at the next look
        if stuck is None:
            return None
        self._looks += 1
        return told if self._looks % STUCK_EVERY == 1 else None


def watched(work: Callable[[], R], hang_after_s: float, every_s: float = EVERY) -> R:
    """Call `work`, which calls user code, in another thread, and return what it returns or raise what it raises.

    Raises `HungCallError` if one call of it has not returned for `hang_after_s`; the thread is then left to itself.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below, whatever it is
            errors.append(error)

    thread = threading.Thread(target=run, name="railgun-watched", daemon=True)
    thread.start()
    assert thread.ident is not None
    beside = Beside()
    where, since_s = "", 0.0
    while thread.is_alive():
        thread.join(every_s)
        now_s = time.monotonic()
        within = calls.running(thread.ident)[:]
        line = beside.look(sys._current_frames(), {thread.ident: within} if within else {}, now_s)
        if line is not None:
            since_s = since_s if where else now_s
            where = line
        if where and now_s - since_s > hang_after_s:
            raise HungCallError(f"a call has not returned for {now_s - since_s:.0f} s: {where}")
    if errors:
        raise errors[0]
    return results[0]


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
