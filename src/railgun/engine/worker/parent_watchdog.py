"""The leash: a worker's process ends when its controller is gone, even if a user's function never returns.

The event loop sees that the controller's connection has closed, and ends the process; but it sees nothing while it is
inside a user's function. So a thread of its own waits for the end of that connection. It sleeps in the kernel until
then, gives the loop `GRACE` seconds to end in good order, and ends the process by force if it has not.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Final

GRACE: Final = 5.0
EXIT_CODE: Final = 70
_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Leash:
    """Watches a connected socket until it is let go of."""

    def __init__(self, watched: int, grace: float = GRACE) -> None:
        # A descriptor of its own: the loop's may be closed, and its number used again, at any time.
        self._socket = socket.socket(fileno=os.dup(watched))
        self._grace = grace
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="railgun-leash", daemon=True).start()

    def release(self) -> None:
        """The worker has ended in good order."""
        self._released.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _watch(self) -> None:
        with self._socket:
            waiting = select.poll()
            waiting.register(self._socket, _GONE)
            waiting.poll()
            if not self._released.wait(self._grace):
                with contextlib.suppress(OSError):
                    os.write(
                        2, b"railgun: the controller is gone, and a function does not return\n"
                    )
                os._exit(EXIT_CODE)
