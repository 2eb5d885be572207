"""What counts as a sign of life of a worker: imports do, for a while."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from railgun.client.outages import OUTAGES
from railgun.engine.operators.calls import Call, calls_of_other_threads
from railgun.engine.worker.liveness import (
    MAX_LOADING_S,
    STUCK_EVERY_LOOKS,
    UNPICKLE_FLOW,
    Loading,
    OtherThreads,
)

MODULE = "railgun_test_waits_at_import"
IMPORT_SOURCE = f"""
import sys
sys.modules["{__name__}"].IN_IMPORT.set()
assert sys.modules["{__name__}"].GO_ON.wait(60)
"""
IN_IMPORT = threading.Event()
GO_ON = threading.Event()


@contextmanager
def importing(path: Path) -> Iterator[FrameType]:
    """The innermost frame of a thread that imports a module which waits."""
    (path / f"{MODULE}.py").write_text(IMPORT_SOURCE)
    IN_IMPORT.clear()
    GO_ON.clear()
    thread = threading.Thread(target=importlib.import_module, args=[MODULE])
    thread.start()
    try:
        assert IN_IMPORT.wait(60)
        yield sys._current_frames()[thread.ident or 0]
    finally:
        GO_ON.set()
        thread.join()
        sys.modules.pop(MODULE, None)


def test_an_import_is_a_sign_of_life_until_it_has_taken_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    loading = Loading()
    assert not loading.look(sys._getframe(), [], 0.0)
    assert loading.what == ""
    with importing(tmp_path) as frame:
        assert loading.look(frame, [], 5.0)
        assert loading.what == f"the import of module '{MODULE}'"
        assert loading.look(frame, [], 4.0 + MAX_LOADING_S)
        assert not loading.look(frame, [], 6.0 + MAX_LOADING_S)
    assert not loading.look(sys._getframe(), [], 7.0 + MAX_LOADING_S)
    assert loading.what == ""


def test_to_unpickle_the_flow_is_a_sign_of_life_until_it_has_taken_too_long() -> None:
    loading = Loading()
    frame, unpickles, other = sys._getframe(), Call("", UNPICKLE_FLOW), Call("step", str)
    assert loading.look(frame, [unpickles], 1.0)
    assert loading.what == "to unpickle the flow"
    assert not loading.look(frame, [unpickles], 2.0 + MAX_LOADING_S)
    assert loading.look(frame, [Call("", UNPICKLE_FLOW)], 2.0 + MAX_LOADING_S), "another time"
    assert not loading.look(frame, [other], 3.0)


class Parked:
    """A thread that calls `wait` again and again: `inside` a call of user code, and perhaps for an `outage` to pass."""

    def __init__(self, inside: bool = True, outage: bool = False) -> None:
        self.inside = inside
        self.outage = outage
        self.over = False
        self.there, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> Parked:
        self.thread.start()
        assert self.there.acquire(timeout=60)
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.go_on.release()
        self.thread.join()

    def run(self) -> None:
        while not self.over:
            if self.inside:
                with Call("sink", self.wait):
                    self.wait()
            else:
                self.wait()

    def wait(self) -> None:
        if self.outage:
            OUTAGES.begin("sink", "no network", blocks=True)
        else:
            OUTAGES.end("sink")
        self.there.release()
        assert self.go_on.acquire(timeout=60)

    def turn(self) -> None:
        """Let this call return, and wait until the next one is under way."""
        self.go_on.release()
        assert self.there.acquire(timeout=60)


def looked(beside: OtherThreads) -> str | None:
    return beside.look(sys._current_frames(), calls_of_other_threads(threading.get_ident()), 0.0)


def test_a_call_in_another_thread_that_does_not_return_is_told_until_it_does() -> None:
    beside = OtherThreads()
    assert looked(beside) is None
    with Parked() as parked:
        assert looked(beside) is None, "it has only begun"
        told = looked(beside)
        assert told is not None
        assert "it is in step 'sink', function Parked.wait" in told
        assert "in wait" in told
        for _ in range(STUCK_EVERY_LOOKS - 1):
            assert looked(beside) is None
        assert looked(beside)
        parked.turn()
        assert looked(beside) == "", "it gets on"
        parked.turn()
        assert looked(beside) is None
        assert looked(beside)
    assert looked(beside) == ""
    assert looked(beside) is None


def test_another_thread_may_wait_outside_of_user_code_or_for_an_outage_to_pass() -> None:
    beside = OtherThreads()
    with Parked(inside=False):
        assert [looked(beside) for _ in range(3)] == [None] * 3
    with Parked(outage=True) as parked:
        assert [looked(beside) for _ in range(3)] == [None] * 3
        parked.outage = False
        parked.turn()
        assert looked(beside) is None, "it has only begun"
        assert looked(beside)
