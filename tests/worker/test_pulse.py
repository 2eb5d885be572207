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

from railgun.flow.calls import Call
from railgun.worker.pulse import MOST_LOADING_S, UNPICKLE_FLOW, Loading

MODULE = "railgun_test_waits_at_import"
WAITS = f"""
import sys
sys.modules["{__name__}"].IN_IMPORT.set()
assert sys.modules["{__name__}"].GO_ON.wait(60)
"""
IN_IMPORT = threading.Event()
GO_ON = threading.Event()


@contextmanager
def importing(path: Path) -> Iterator[FrameType]:
    """The innermost frame of a thread that imports a module which waits."""
    (path / f"{MODULE}.py").write_text(WAITS)
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
        assert loading.look(frame, [], 4.0 + MOST_LOADING_S)
        assert not loading.look(frame, [], 6.0 + MOST_LOADING_S)
    assert not loading.look(sys._getframe(), [], 7.0 + MOST_LOADING_S)
    assert loading.what == ""


def test_to_unpickle_the_flow_is_a_sign_of_life_until_it_has_taken_too_long() -> None:
    loading = Loading()
    frame, unpickles, other = sys._getframe(), Call("", UNPICKLE_FLOW), Call("step", str)
    assert loading.look(frame, [unpickles], 1.0)
    assert loading.what == "to unpickle the flow"
    assert not loading.look(frame, [unpickles], 2.0 + MOST_LOADING_S)
    assert loading.look(frame, [Call("", UNPICKLE_FLOW)], 2.0 + MOST_LOADING_S), "another time"
    assert not loading.look(frame, [other], 3.0)
