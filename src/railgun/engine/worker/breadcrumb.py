"""The breadcrumb: which user code a worker was in when its process ended (`os._exit`, a segfault, a kill).

A worker keeps a small file, mapped into its memory, in the temporary directory of its machine. Every call of user code
is noted there when it is entered (`engine.operators.calls`): the step, the function and the first record, once for a
batch; for a while after a worker was lost (`be_careful`), each record, so that a second loss names the very one.
Records flow in one thread, and sinks commit in another at the same time: each has its part of the file, and both are
told. What is in mapped memory outlives the process, however it ends. Behind the notes, Python writes its stack if it
crashes (`faulthandler`). The controller reads the file if it is on the same machine, and deletes it. On another machine
the next worker of the job that starts there does, and tells the controller (`left_behind`). A worker holds a lock on
its file while it lives, so that nobody takes the file of one that does.
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
DEPTH: Final = 8  # calls inside of calls that are noted
NOTE_BYTES: Final = 500
_SLOT: Final = NOTE_BYTES + 2
_PART: Final = 1 + DEPTH * _SLOT
SIZE: Final = 2 * _PART
"""Bytes of notes: first those of the thread that works, then those of another one that calls user code."""
MOST_STACK_BYTES: Final = 4_000
MOST_KNOWN: Final = 10_000  # functions whose names are remembered
_PLAIN: Final = frozenset({int, float, bool, type(None)})


class Breadcrumb:
    """The file of this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        prefix = f"{_prefix(spec)}{spec.worker}-{spec.incarnation}-"
        number, self.path = tempfile.mkstemp(prefix=prefix)
        self._file: IO[bytes] = os.fdopen(number, "r+b", buffering=0)
        _lock(number)
        self._file.truncate(SIZE)
        self._file.seek(SIZE)
        self._memory = mmap.mmap(number, SIZE)
        self._thread = threading.get_ident()
        self._other: int | None = None  # the other thread that is inside of calls
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.enable(self._file, all_threads=False)
        calls.observer = self

    @staticmethod
    def make(spec: WorkerSpec) -> Breadcrumb | None:
        """Make the file of this process; None if there is no place for it, which is no reason not to work."""
        try:
            return Breadcrumb(spec)
        except OSError:
            return None

    def told(self) -> dict[str, str]:
        """Say where the file is, and on which machine."""
        here = Process.this()
        return {"breadcrumb": self.path, "boot_id": here.boot_id, "host_name": here.host}

    def entered(self, call: calls.Call, depth: int) -> None:
        """Note that a call of user code begins, the innermost of so many."""
        part = self._part()
        if depth > DEPTH or part is None:
            return
        try:
            note = describe(call)
        except Exception:  # of a function or a sequence of the user's that is none
            note = f"in step {call.step!r}" if call.step else "before any step"
        self._write(part, depth, note)
        self._memory[part] = depth

    def _part(self) -> int | None:
        """Return where the notes of this thread begin; None: a third thread has no place for any."""
        thread = threading.get_ident()
        if thread == self._thread:
            return 0
        if self._other is None:
            self._other = thread
        return _PART if thread == self._other else None

    def _write(self, part: int, depth: int, text: str) -> None:
        note = text.encode("utf-8", "replace")[:NOTE_BYTES]
        at = part + 1 + (depth - 1) * _SLOT
        self._memory[at : at + 2 + len(note)] = len(note).to_bytes(2, "little") + note

    def reached(self, call: calls.Call) -> None:
        """Note which record a call has come to."""
        depth, part = len(calls.running()), self._part()
        if depth > DEPTH or part is None:
            return
        try:
            note = describe_record(call)
        except Exception:  # of a function or a sequence of the user's that is none
            return
        self._write(part, depth, note)

    def be_careful(self, careful: bool) -> None:
        """Note each record, or no longer."""
        calls.careful = careful

    def left(self, depth: int) -> None:
        """Note that so many calls are left."""
        part = self._part()
        if part is not None:
            self._memory[part] = min(depth, DEPTH)
            if part and not depth:
                self._other = None

    def remove(self) -> None:
        """End in good order: nobody will ask."""
        if calls.observer is self:
            calls.observer = None
            calls.careful = False
        faulthandler.disable()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self._memory.close()
        self._file.close()


def read(who: dict[str, Any]) -> str:
    """Return what the breadcrumb of a worker says, if it is on this machine, and delete it; else nothing."""
    path, here = who.get("breadcrumb"), Process.this()
    if not isinstance(path, str) or who.get("boot_id") != here.boot_id:
        return ""
    if who.get("host_name") != here.host or not Path(path).name.startswith(PREFIX):
        return ""
    return _taken(path)


def left_behind(spec: WorkerSpec) -> list[tuple[int, int, str]]:
    """Return what workers of this job were in that were lost on this machine, and delete their files.

    Each is told with the worker's number and incarnation.
    """
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(spec)}*"):
        worker, incarnation, *_ = path.name.removeprefix(_prefix(spec)).split("-")
        try:
            with path.open("rb") as file:
                if not _lock(file.fileno()):
                    continue
                text = _taken(str(path))
        except OSError:
            continue
        if text:
            found.append((int(worker), int(incarnation), text))
    return found


def _prefix(spec: WorkerSpec) -> str:
    """Return how the names of the files of one run of a job begin."""
    return f"{PREFIX}{hashlib.sha256(b'breadcrumb' + spec.secret).hexdigest()[:16]}-"


def _lock(number: int) -> bool:
    """Lock an open file, until it is closed or its process ends; False if another process has."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _taken(path: str) -> str:
    """Return what a file says, and delete it; nothing if it is not there."""
    try:
        data = Path(path).read_bytes()
        os.unlink(path)
    except OSError:
        return ""
    notes = [note for note in (_innermost(data[:_PART]), _innermost(data[_PART:SIZE])) if note]
    stack = data[SIZE:][:MOST_STACK_BYTES].decode("utf-8", "replace").strip()
    told = f"it was {', and at the same time '.join(notes)}" if notes else ""
    return f"{told}\n{stack}".strip() if stack else told


def _innermost(part: bytes) -> str:
    """Return the note of the innermost call of a thread, from its part of a file; nothing if it was in none."""
    depth = min(part[0], DEPTH) if part else 0
    if not depth:
        return ""
    slot = part[1 + (depth - 1) * _SLOT :]
    length = int.from_bytes(slot[:2], "little")
    return slot[2 : 2 + length].decode("utf-8", "replace")


def describe(call: calls.Call) -> str:
    """Name the step, the function and the first record of a call that begins."""
    return _joined(_where(call), call.began_with(glimpse))


def describe_record(call: calls.Call) -> str:
    """Name the step, the function and the record that a call has come to."""
    return _joined(call.place, call.which(glimpse))


def _joined(where: str, which: str) -> str:
    return f"{where}, {which}" if which else where


_known: dict[tuple[str, int], str] = {}
_kept: list[Any] = []


def _where(call: calls.Call) -> str:
    """Name the step and the function; this is worked out once for each."""
    known = (call.step, id(call.function))
    found = _known.get(known)
    if found is None:
        if len(_known) > MOST_KNOWN:
            _known.clear()
            _kept.clear()
        # The function is kept, so that no other one can have its identity.
        _kept.append(call.function)
        found = _known[known] = calls.place_text(call.step, call.names)
    return found


def glimpse(value: Any) -> str:
    """Show the beginning of a value, quickly, and without calling code of users.

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
