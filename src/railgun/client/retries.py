"""Retry a call to a node while it fails with a transient error (`transport.error_codes`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from railgun.client.errors import StreamsError
from railgun.client.nodes import Pauses

T = TypeVar("T")
PAUSES_S: Final = (0.1, 2.0)
"""Seconds until the next try: at first, and at most."""


def call_with_retries(
    call: Callable[[], T],
    *,
    waiting: Callable[[StreamsError], None] = lambda error: None,
    give_up: Callable[[], bool] = lambda: False,
    timeout_s: float = math.inf,
) -> T:
    """Return the result of `call`; repeat it while it raises a transient `StreamsError` (`may_pass`).

    `call` must be idempotent. `waiting` is called with each transient error. Raises the last error when `give_up`
    returns True, or after `timeout_s` seconds.
    """
    deadline, pauses = time.monotonic() + timeout_s, Pauses(*PAUSES_S)
    while True:
        try:
            return call()
        except StreamsError as error:
            pause = pauses.next()
            if not error.may_pass or give_up() or time.monotonic() + pause >= deadline:
                raise
            waiting(error)
        time.sleep(pause)
