"""End a worker's process when its controller is gone, even if a user's function never returns.

The event loop notices that the controller's connection has closed, and ends the process; but not while it is inside a
user's function. So a thread of its own waits for the end of that connection. It sleeps in the kernel until then, gives
the loop `GRACE_S` seconds to end in good order, and then ends the process by force.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Final

GRACE_S: Final = 5.0
EXIT_CODE: Final = 70
_CLOSED: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ParentWatchdog:
    """Ends this process some time after a connected socket has closed, unless it is released."""

    def __init__(self, watched: int, grace_s: float = GRACE_S) -> None:
        # Duplicated, because the loop may close its descriptor, and the number may be reused, at any time.
        self._socket = socket.socket(fileno=os.dup(watched))
        self._grace_s = grace_s
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="railgun-parent-watchdog", daemon=True).start()

    def release(self) -> None:
        """Stop watching, because the worker has ended in good order."""
        self._released.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _watch(self) -> None:
        with self._socket:
            waiting = select.poll()
            waiting.register(self._socket, _CLOSED)
            waiting.poll()
            if not self._released.wait(self._grace_s):
                with contextlib.suppress(OSError):
                    os.write(
                        2,
                        b"railgun: ending this worker: its controller is gone, and a function does not return\n",
                    )
                os._exit(EXIT_CODE)
