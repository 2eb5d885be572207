"""Record which user code a worker was in, in case its process is lost (`os._exit`, a segfault, a kill).

A worker maps a small file in its machine's temporary directory into memory. Each call of user code is noted there when
it begins (`engine.operators.calls`): the step, the function and the first record, once for a batch. For a while after a
worker was lost (`be_careful`) each record is noted, so that a second loss names the very record. Records flow in one
thread while sinks commit in another: each thread has its part of the file, and both are reported. Mapped memory
outlives the process, however it ends. After the notes, Python writes its stack if it crashes (`faulthandler`).

The controller reads and deletes the file if it is on the same machine. On another machine the next worker of the job
that starts there does, and reports it to the controller (`left_behind`). A worker holds a lock on its file while it
lives, so that no other process takes the file of a living worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Final

from railgun.engine.operators import calls
from railgun.engine.worker.spec import WorkerSpec
from railgun.storage.processes import Process

PREFIX: Final = "railgun-worker-"
MAX_DEPTH: Final = 8  # nested calls that are noted
NOTE_BYTES: Final = 500
_SLOT_BYTES: Final = NOTE_BYTES + 2
_PART_BYTES: Final = 1 + MAX_DEPTH * _SLOT_BYTES
SIZE_BYTES: Final = 2 * _PART_BYTES
"""Size of the notes: first those of the main thread, then those of another thread that calls user code."""
MAX_STACK_BYTES: Final = 4_000
MAX_PLACES: Final = 10_000  # steps and functions whose names are cached
_PLAIN: Final = frozenset({int, float, bool, type(None)})


class Breadcrumb:
    """The breadcrumb file of this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        prefix = f"{_prefix(spec)}{spec.worker}-{spec.incarnation}-"
        number, self.path = tempfile.mkstemp(prefix=prefix)
        self._file: IO[bytes] = os.fdopen(number, "r+b", buffering=0)
        _lock(number)
        self._file.truncate(SIZE_BYTES)
        self._file.seek(SIZE_BYTES)
        self._memory = mmap.mmap(number, SIZE_BYTES)
        self._thread = threading.get_ident()
        self._other_thread: int | None = None  # another thread that is inside of calls
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.enable(self._file, all_threads=False)
        calls.observer = self

    @staticmethod
    def make(spec: WorkerSpec) -> Breadcrumb | None:
        """Make the file of this process; return None if it cannot be made, because the worker can do without."""
        try:
            return Breadcrumb(spec)
        except OSError:
            return None

    def location(self) -> dict[str, str]:
        """Return the path of the file and the identity of the machine, as part of the worker's hello."""
        process = Process.this()
        return {"breadcrumb": self.path, "boot_id": process.boot_id, "host_name": process.host}

    def entered(self, call: calls.Call, depth: int) -> None:
        """Note that a call of user code begins at this depth of nested calls."""
        part = self._part()
        if depth > MAX_DEPTH or part is None:
            return
        try:
            note = describe(call)
        except Exception:  # the user's function or sequence is not really one
            note = f"in step {call.step!r}" if call.step else "before any step"
        self._write(part, depth, note)
        self._memory[part] = depth

    def _part(self) -> int | None:
        """Return the offset of this thread's notes; None for a third thread, which has no space for notes."""
        thread = threading.get_ident()
        if thread == self._thread:
            return 0
        if self._other_thread is None:
            self._other_thread = thread
        return _PART_BYTES if thread == self._other_thread else None

    def _write(self, part: int, depth: int, text: str) -> None:
        note = text.encode("utf-8", "replace")[:NOTE_BYTES]
        at = part + 1 + (depth - 1) * _SLOT_BYTES
        self._memory[at : at + 2 + len(note)] = len(note).to_bytes(2, "little") + note

    def reached(self, call: calls.Call) -> None:
        """Note the record that a call has come to."""
        depth, part = len(calls.running()), self._part()
        if depth > MAX_DEPTH or part is None:
            return
        try:
            note = describe_record(call)
        except Exception:  # the user's function or sequence is not really one
            return
        self._write(part, depth, note)

    def be_careful(self, careful: bool) -> None:
        """Begin or stop noting each record."""
        calls.careful = careful

    def left(self, depth: int) -> None:
        """Note that the innermost call has ended; `depth` calls remain."""
        part = self._part()
        if part is not None:
            self._memory[part] = min(depth, MAX_DEPTH)
            if part and not depth:
                self._other_thread = None

    def remove(self) -> None:
        """Delete the file, because the worker ends in good order."""
        if calls.observer is self:
            calls.observer = None
            calls.careful = False
        faulthandler.disable()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self._memory.close()
        self._file.close()


def read(who: dict[str, Any]) -> str:
    """Return the text of a worker's breadcrumb and delete it; an empty text if it is not on this machine."""
    path, process = who.get("breadcrumb"), Process.this()
    if not isinstance(path, str) or who.get("boot_id") != process.boot_id:
        return ""
    if who.get("host_name") != process.host or not Path(path).name.startswith(PREFIX):
        return ""
    return _take(path)


def left_behind(spec: WorkerSpec) -> list[tuple[int, int, str]]:
    """Return the breadcrumbs of this job's workers that were lost on this machine, and delete their files.

    Each comes with the worker's number and incarnation.
    """
    breadcrumbs = []
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(spec)}*"):
        worker, incarnation, *_ = path.name.removeprefix(_prefix(spec)).split("-")
        try:
            with path.open("rb") as file:
                if not _lock(file.fileno()):
                    continue
                text = _take(str(path))
        except OSError:
            continue
        if text:
            breadcrumbs.append((int(worker), int(incarnation), text))
    return breadcrumbs


def _prefix(spec: WorkerSpec) -> str:
    """Return the prefix of the file names of one run of a job."""
    return f"{PREFIX}{hashlib.sha256(b'breadcrumb' + spec.secret).hexdigest()[:16]}-"


def _lock(number: int) -> bool:
    """Lock an open file until it is closed or its process ends; return False if another process has locked it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _take(path: str) -> str:
    """Return the text of a file, and delete it; an empty text if it does not exist."""
    try:
        data = Path(path).read_bytes()
        os.unlink(path)
    except OSError:
        return ""
    notes = [
        note
        for note in (_innermost(data[:_PART_BYTES]), _innermost(data[_PART_BYTES:SIZE_BYTES]))
        if note
    ]
    stack = data[SIZE_BYTES:][:MAX_STACK_BYTES].decode("utf-8", "replace").strip()
    text = f"it was {', and at the same time '.join(notes)}" if notes else ""
    return f"{text}\n{stack}".strip() if stack else text


def _innermost(part: bytes) -> str:
    """Return the note of a thread's innermost call, from its part of a file; an empty text if there is none."""
    depth = min(part[0], MAX_DEPTH) if part else 0
    if not depth:
        return ""
    slot = part[1 + (depth - 1) * _SLOT_BYTES :]
    length = int.from_bytes(slot[:2], "little")
    return slot[2 : 2 + length].decode("utf-8", "replace")


def describe(call: calls.Call) -> str:
    """Return the step, the function and the first record of a call that begins."""
    return _joined(_where(call), call.began_with(glimpse))


def describe_record(call: calls.Call) -> str:
    """Return the step, the function and the record that a call has come to."""
    return _joined(call.place, call.which(glimpse))


def _joined(where: str, which: str) -> str:
    return f"{where}, {which}" if which else where


_places: dict[tuple[str, int], str] = {}
_functions: list[Any] = []


def _where(call: calls.Call) -> str:
    """Return the step and the function of a call, cached by function."""
    cache_key = (call.step, id(call.function))
    place = _places.get(cache_key)
    if place is None:
        if len(_places) > MAX_PLACES:
            _places.clear()
            _functions.clear()
        # The function is kept alive, so that no other function can get its id.
        _functions.append(call.function)
        place = _places[cache_key] = calls.place_text(call.step, call.names)
    return place


def glimpse(value: Any) -> str:
    """Return the beginning of a value as text, quickly and without calling user code.

    >>> glimpse(("ada", 1, 2)), glimpse({"a": [1]}), glimpse(object()), glimpse("x" * 100) == repr("x" * 80) + "…"
    ("('ada', 1, …)", "{'a': <list>, …}", '<object>', True)
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return f"({', '.join(map(_scalar, value[:2]))}{', …' if len(value) > 2 else ''})"
    if kind is dict and value:
        name, first = next(iter(value.items()))
        return f"{{{_scalar(name)}: {_scalar(first)}, …}}"
    return _scalar(value)


def _scalar(value: Any) -> str:
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}…"
    return repr(value) if kind in _PLAIN else f"<{kind.__name__}>"
