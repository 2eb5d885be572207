"""Tell the controller that a worker is alive while a user's function blocks its event loop (`Pulse`).

The event loop sends heartbeats between two batches, but a batch of slow calls may take minutes. That is no reason to
give the worker up; one call that never returns is. So a thread looks at the main thread every second: is it inside the
same call of a user's function as before? If not, the thread sends a heartbeat, over a connection of its own, because
the loop's connection belongs to the loop.

User code is called in another thread too: sinks prepare, commit and recover there, while the main thread goes on. So
every other thread that is inside a call is watched as well (`calls.others`). If one has made no progress since the last
look, a line of text reports it, repeatedly until it goes on; an empty line reports that. If it stays stuck for long,
the controller gives the worker up despite its heartbeats. User code that runs in the program which starts a flow is
watched in the same way (`watched`), though its thread cannot be ended.

Importing a module or unpickling the flow may take longer than any call should. So either counts as a sign of life for
`MAX_LOADING_S`, and after that as a call that does not return.

A thread that waits for an outage outside to pass (`client.outages`) counts as alive too. What sources and sinks wait
for is sent as a line of text whenever it changes; an empty line means that they go on.

A process that is frozen, or that never releases the GIL, has no pulse.
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

from railgun.client.outages import OUTAGES
from railgun.engine.operators import calls
from railgun.engine.worker.spec import WorkerSpec
from railgun.errors import RailgunError
from railgun.transport.hello import NONCE, Dialer, HelloError

LOOK_EVERY_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 10.0
BEAT: Final = b"\0"
STUCK: Final = b"\1"
"""Begins a line that says where the main thread is stuck, which is no sign of life. It has \\r in place of \\n."""
OTHER_STUCK: Final = b"\2"
"""Begins such a line about another thread that is in a call of user code. An empty line means that it goes on."""
MAX_LOADING_S: Final = 600.0  # for one import, or for unpickling the flow
STUCK_EVERY_LOOKS: Final = 5  # looks, from one such line to the next
MAX_STACK_FRAMES: Final = 8  # that are reported
MAX_STUCK_CHARACTERS: Final = 3000
MAX_WAITS_CHARACTERS: Final = 2000  # of a line about outages
IN_STEP: Final = "it is in step"
"""Begins the description of a thread that is inside a call of user code."""
UNPICKLE_FLOW: Final = "unpickling the flow"
"""Name of the function in the description of a call, while the flow is unpickled."""
_IMPORT: Final = ("<frozen importlib._bootstrap>", "_find_and_load")
_RAILGUN: Final = str(Path(__file__).resolve().parents[1])
_INTERNAL_PATHS: Final = (_RAILGUN, str(Path(asyncio.__file__).resolve().parent))
R = TypeVar("R")


class HungCallError(RailgunError):
    """A call of user code does not return; the text says where it is."""


class Pulse:
    """Sends heartbeats to the controller while the thread that made this object makes progress."""

    def __init__(self, spec: WorkerSpec, every: float = LOOK_EVERY_S) -> None:
        self._spec = spec
        self._every = every
        self._watched = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="railgun-pulse", daemon=True).start()

    def stop(self) -> None:
        """Stop sending heartbeats, because the worker ends."""
        self._over.set()

    def _beat(self) -> None:
        # If the connection fails there is no pulse, and only the loop's own heartbeats are left.
        with contextlib.suppress(OSError, HelloError), self._connect() as connection:
            last_call: FrameType | None = None
            loading = Loading()
            others = OtherThreads()
            sent_waits = ""
            stuck = 0
            while not self._over.wait(self._every):
                # The frame is kept alive, so that no later frame can get its identity.
                frames = sys._current_frames()
                frame = frames.get(self._watched)
                line = others.look(
                    frames, calls.calls_of_other_threads(self._watched), time.monotonic()
                )
                if line is not None:
                    connection.sendall(OTHER_STUCK + line.replace("\n", "\r").encode() + b"\n")
                call = call_under_way(frame)
                is_loading = loading.look(frame, calls.running(self._watched), time.monotonic())
                waits = OUTAGES.describe()
                if waits != sent_waits:
                    connection.sendall(
                        " ".join(waits.split())[:MAX_WAITS_CHARACTERS].encode() + b"\n"
                    )
                elif call is not last_call or is_loading or OUTAGES.blocks(self._watched):
                    connection.sendall(BEAT)
                    stuck = 0
                else:
                    stuck += 1
                    if stuck % STUCK_EVERY_LOOKS == 1:
                        within = calls.running(self._watched)
                        where = describe_position(frame, within, loading.what).replace("\n", "\r")
                        connection.sendall(STUCK + where.encode() + b"\n")
                last_call, sent_waits = call, waits

    def _connect(self) -> socket.socket:
        spec = self._spec
        connection = socket.create_connection((spec.host, spec.port), CONNECT_TIMEOUT_S)
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


def describe_position(
    frame: FrameType | None, within: Sequence[calls.Call], loading: str = ""
) -> str:
    """Return the call of user code that a thread is in, with its stack, as text.

    `frame`: the thread's innermost frame. `within`: the calls it is in. `loading`: what it has been loading for too
    long.
    """
    text = ""
    if loading:
        text = f"{loading} has taken more than {MAX_LOADING_S:.0f} s; "
    if within and within[-1].step:
        call = within[-1]
        which = call.which()
        text += f"{IN_STEP} {call.step!r}, function {call.name}{', ' * bool(which)}{which}\n"
    text += "".join(traceback.format_stack(frame)[-MAX_STACK_FRAMES:])
    return text.strip()[:MAX_STUCK_CHARACTERS]


class OtherThreads:
    """Watches the threads other than the main one that are in calls of user code."""

    def __init__(self) -> None:
        self._last: dict[int, FrameType | None] = {}  # the frame of the present call, by thread
        self._loading: dict[int, Loading] = {}
        self._stuck: FrameType | None = None
        self._looks = 0

    def look(
        self,
        frames: Mapping[int, FrameType],
        inside: Mapping[int, Sequence[calls.Call]],
        now_s: float,
    ) -> str | None:
        """Return where one of the threads `inside` calls is stuck, an empty text if none is any more, None if nothing
        changed.
        """
        stuck, position = None, ""
        last, self._last = self._last, {}
        self._loading = {thread: self._loading.get(thread) or Loading() for thread in inside}
        for thread, within in inside.items():
            frame = frames.get(thread)
            call = self._last[thread] = call_under_way(frame)
            is_loading = self._loading[thread].look(frame, within, now_s)
            is_same = call is not None and call is last.get(thread)
            if is_same and not is_loading and not OUTAGES.blocks(thread) and stuck is None:
                stuck, position = call, describe_position(frame, within, self._loading[thread].what)
        was, self._stuck = self._stuck, stuck
        if stuck is not was:
            self._looks = 0
            if was is not None:
                return ""  # if another thread is stuck, the next look reports it
        if stuck is None:
            return None
        self._looks += 1
        return position if self._looks % STUCK_EVERY_LOOKS == 1 else None


def watched(work: Callable[[], R], hang_after_s: float, every_s: float = LOOK_EVERY_S) -> R:
    """Call `work`, which calls user code, in another thread. Return or raise what it returns or raises.

    Raises `HungCallError` if one of its calls has not returned for `hang_after_s`; the thread then goes on unwatched.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="railgun-watched", daemon=True)
    thread.start()
    assert thread.ident is not None
    others = OtherThreads()
    where, since_s = "", 0.0
    while thread.is_alive():
        thread.join(every_s)
        now_s = time.monotonic()
        within = calls.running(thread.ident)[:]
        line = others.look(sys._current_frames(), {thread.ident: within} if within else {}, now_s)
        if line is not None:
            since_s = since_s if where else now_s
            where = line
        if where and now_s - since_s > hang_after_s:
            raise HungCallError(f"a call has not returned for {now_s - since_s:.0f} s: {where}")
    if errors:
        raise errors[0]
    return results[0]


class Loading:
    """Measures for how long a thread has been importing one module, or unpickling the flow."""

    def __init__(self) -> None:
        self.what = ""
        """Name of the loading under way, for messages; empty if there is none."""
        self._loaded: object = None  # the frame of the import, or the call that unpickles the flow
        self._since_s = 0.0

    def look(self, frame: FrameType | None, within: Sequence[calls.Call], now_s: float) -> bool:
        """Return whether a thread in `frame` and in the calls `within` is loading, and not for too long."""
        loaded: object = _import_under_way(frame)
        if isinstance(loaded, FrameType):
            self.what = f"the import of module {loaded.f_locals.get('name', '?')!r}"
        elif within and within[0].function == UNPICKLE_FLOW:
            loaded, self.what = within[0], "to unpickle the flow"
        else:
            self.what = ""
        if loaded is not self._loaded:
            self._loaded, self._since_s = loaded, now_s
        return loaded is not None and now_s - self._since_s < MAX_LOADING_S


def _import_under_way(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the outermost import by user code, of a thread that is in `frame`."""
    import_frame = None
    while frame is not None and not frame.f_code.co_filename.startswith(_RAILGUN):
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            import_frame = frame
        frame = frame.f_back
    return import_frame


def call_under_way(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the user's function that Railgun has called, or else the innermost frame of Railgun's."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    inside = False
    for called in reversed(frames):
        file = called.f_code.co_filename
        if inside and not file.startswith(_INTERNAL_PATHS):
            return called
        inside = inside or file.startswith(_RAILGUN)
    return frames[0] if frames else None
