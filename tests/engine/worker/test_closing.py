"""A worker lets go of everything, whatever a stage does; and rests when it is to."""

from __future__ import annotations

from typing import Any

import pytest

from railgun.engine.worker.runtime import IDLE_S, Runtime


class Closing:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed = error, False

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_a_stage_that_cannot_be_closed_keeps_no_other() -> None:
    runtime: Any = Runtime.__new__(Runtime)
    runtime.stages = [Closing(OSError("full")), Closing(), Closing()]
    runtime._disk = Closing()
    with pytest.raises(OSError, match="full"):
        runtime.close()
    assert all(one.closed for one in [*runtime.stages, runtime._disk])


def test_a_worker_that_rests_reads_no_source() -> None:
    """Not even one that is pushed to: what came waits there, and who sent it gets no credits."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.paused, runtime.stopped = True, False
    assert runtime._read(0) == IDLE_S[0]  # it has no sources that it could look at
