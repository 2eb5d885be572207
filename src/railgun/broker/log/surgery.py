"""What a copy of a stream may have to do to its log: cut off its end, begin anew, set damage aside.

These work on the insides of a `StreamLog`, in the line of its one writer.

Rules:

1. Each is done wholly or not at all, wherever a crash comes. The name of an empty file says what is to be done, and is
   for good before anything is changed; `finish`, at the next open, does what is left of it. The name goes last, and is
   gone for good before anything is appended.
2. Before the end of a log is cut off, it is in a file beside it, for people: `cut-<offset>-<n>.batches`, record batches
   one after the other. The newest 8 are kept.
3. `repair` throws nothing away: from the first bad byte on, all goes to files `damaged-<n>-<segment>-<byte>.bytes`, as
   it lay in that segment from that byte on. The newest 2 sets are kept, a set being all files of one `<n>`.
4. Later segments go newest first, each for good before the next. Their indexes go before them, and so does that of the
   segment that is the last one then: none may be believed that is of another past.
5. What is kept of a segment was synced before it is cut, and the cut is synced before anything is written behind it.
   So all marks in it are right, and none is behind it.
6. An error before the name is there for good: nothing was changed. After it: the log has failed, until it is opened.
7. Readers are told at once when the name is there. They see what lies before the cut, and nothing of what goes.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from railgun.broker.errors import (
    BeyondEndError,
    ClosedError,
    OrderError,
    StorageError,
    TrimmedError,
    later_format,
    storage_error,
)
from railgun.broker.log.disk import Disk, File
from railgun.broker.log.segment import (
    LONG_AGO,
    Scan,
    Segment,
    base_of,
    floor_name,
    floor_of,
    fresh,
    index_of,
    log_name,
    scan,
)
from railgun.broker.log.tail import Tail
from railgun.transport.records import Bytes, LaterBatchError, head

if TYPE_CHECKING:
    from railgun.broker.log.log import StreamLog

KEPT_CUTS: Final = 8
KEPT_SETS: Final = 2

_CHUNK: Final = 4 << 20
_LAST_OFFSET: Final = 1 << 63
_PLAN: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.(?:cut|repair-([0-9]+))")
_RESET: Final = re.compile(r"([0-9]{20})\.reset")
_CUT: Final = re.compile(r"cut-[0-9]+-([0-9]+)\.batches")
_SET: Final = re.compile(r"damaged-([0-9]+)-[0-9]+-[0-9]+\.bytes")


@dataclass(frozen=True, slots=True)
class Shortening:
    """This segment becomes the last one, and ends there; what goes is removed, or set aside under a number."""

    segment: int
    end: int
    aside: int | None = None

    @property
    def name(self) -> str:
        """The name of the file that says so.

        >>> Shortening(12, 15, aside=3).name
        '00000000000000000012-00000000000000000015.repair-3'
        """
        kind = "cut" if self.aside is None else f"repair-{self.aside}"
        return f"{self.segment:020}-{self.end:020}.{kind}"

    @staticmethod
    def of(name: str) -> Shortening | None:
        """What such a name says; None for other files.

        >>> Shortening.of(Shortening(12, 15).name)
        Shortening(segment=12, end=15, aside=None)
        """
        found = _PLAN.fullmatch(name)
        if found is None:
            return None
        return Shortening(int(found[1]), int(found[2]), int(found[3]) if found[3] else None)


def reset_name(base: int) -> str:
    """The name of the file that says: all is dropped, and the log begins anew with this offset."""
    return f"{base:020}.reset"


def reset_of(name: str) -> int | None:
    """The offset in such a name; None for other files."""
    found = _RESET.fullmatch(name)
    return int(found[1]) if found else None


# ------------------------------------------------------------ while a log is open


def cut(log: StreamLog, offset: int) -> int:
    """Forget all from there on; how many messages that were. See `StreamLog.cut`."""
    log._check()
    if offset < log.first:
        raise TrimmedError(
            f"stream {log.directory!r} cannot be cut at {offset}: it keeps offset {log.first} and later",
            log.first,
        )
    if offset > log.end:
        raise BeyondEndError(
            f"stream {log.directory!r} cannot be cut at {offset}: it ends at {log.end}", log.end
        )
    if offset == log.end:
        return 0
    log.sync()
    with _place(log, offset) as place:
        kept = place.found.segment
        if place.found.problem:
            with log._lock:
                raise log._note_damage(kept.base, kept.end, kept.size, place.found.problem)
        if kept.end != offset:
            raise OrderError(
                f"stream {log.directory!r} cannot be cut at {offset}, in the middle of the batch from {kept.end} on. "
                "Nothing was changed. Cut where a batch begins."
            )
        count = log.end - offset
        _keep(log, f"cut-{offset}-{_next_number(log)}.batches", _batches(log, offset))
        _shorten(log, place, Shortening(kept.base, offset))
    return count


def repair(log: StreamLog) -> int:
    """Set all from the damage on aside; how many bytes that were. See `StreamLog.repair`."""
    if log._closed:
        raise ClosedError(f"the log of stream {log.directory!r} is closed")
    log._tail.check()
    damage = log._damage
    if damage is None:
        return 0
    log._tail.sync()
    with _place(
        log, damage.offset
    ) as place:  # or before it, if there is more damage than was known
        kept, number = place.found.segment, _next_number(log)
        bad = place.found.size - kept.size
        later = sum(_size(log, base) for base in _later(log._disk.list(log.directory), kept.base))
        if bad:
            name = f"damaged-{number}-{kept.base}-{kept.size}.bytes"
            _keep(log, name, _bytes(place.file, kept.size))
        _shorten(log, place, Shortening(kept.base, kept.end, number))
    return bad + later


def reset(log: StreamLog, base: int) -> None:
    """Drop all, and begin anew there. See `StreamLog.reset`."""
    if log._closed:
        raise ClosedError(f"the log of stream {log.directory!r} is closed")
    log._tail.check()
    if not 0 <= base < _LAST_OFFSET:
        raise OrderError(f"stream {log.directory!r} cannot begin with {base}: that is no offset")
    _announce(log, reset_name(base))
    old = log._tail
    with log._lock:
        log._floor = log._before = 0
        _replace(log, 0, fresh(base, log.config.index_bytes), base)
    try:
        file = _begin(log._disk, log.directory, base)
    except OSError as error:
        old.fail("begun anew", error)
        raise
    with log._lock:
        log._tail = Tail(file, _what(log, base), 0)
    old.file.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a log is to end: in this file, behind what was found in it."""

    at: int
    file: File
    found: Scan


@contextlib.contextmanager
def _place(log: StreamLog, offset: int) -> Iterator[_Place]:
    """The segment that holds the offset, and what is good in it before that."""
    at = bisect_right(log._bases, offset) - 1
    base = log._bases[at]
    file = log._tail.file
    try:
        if at < len(log._bases) - 1:  # readers may close theirs
            file = log._disk.open(log._path(log_name(base)))
        yield _Place(at, file, scan(file, base, log.config.index_bytes, offset))
    except LaterBatchError as error:
        raise later_format(_what(log, base), error) from error
    except OSError as error:
        raise storage_error(error, f"{_what(log, base)} cannot be read") from error
    finally:
        if file is not log._tail.file:
            file.close()


def _shorten(log: StreamLog, place: _Place, plan: Shortening) -> None:
    """Do it: for good, for readers, and on disk."""
    _tidy(log, plan.aside)
    _announce(log, plan.name)
    kept, old = place.found.segment, log._tail.file
    with log._lock:
        _replace(log, place.at, kept, place.found.whole)
        log._tail = Tail(place.file, _what(log, kept.base), kept.size)
    if old is not place.file:
        old.close()
    try:
        _carry_out(log._disk, log.directory, plan, kept.size)
    except OSError as error:
        log._tail.fail(f"cut off at offset {plan.end}", error)


def _replace(log: StreamLog, at: int, last: Segment, whole: int) -> None:
    """From that segment on there is only this one, with units that are whole up to there; the lock is held."""
    for base in [base for base in log._files if base >= log._bases[at]]:
        log._files.pop(base).close()
    log._segments[at:], log._bases[at:] = [last], [last.base]
    log._floor = min(log._floor, last.end)
    log._end = log._durable_end = last.end
    log._whole = log._durable_whole = whole
    stored = [segment for segment in log._segments if not segment.empty]
    log._last_time = log._told_time = stored[-1].last_time if stored else LONG_AGO
    log._epoch = stored[-1].epoch if stored else log._before
    log._damage = None
    log._hints.clear()
    log._changes += 1


def _announce(log: StreamLog, name: str) -> None:
    """From now on it will be done, whatever happens."""
    path = log._path(name)
    try:
        log._disk.create(path).close()
    except OSError as error:
        what = f"{log._disk.where(path)} cannot be made, and nothing was changed"
        raise storage_error(error, what) from error
    try:
        log._disk.sync_directory(log.directory)
    except OSError as error:
        log._tail.fail("cut off", error)


# ------------------------------------------------------------ on disk


def finish(disk: Disk, directory: str, every: int) -> tuple[str, int]:
    """Do what a crash has left undone. What that was, and an offset: all before it was there for good."""
    names = disk.list(directory)
    resets = [base for base in map(reset_of, names) if base is not None]
    if resets:
        _begin(disk, directory, resets[0]).close()
        return f"the reset to {resets[0]}", 0
    plans = [plan for plan in map(Shortening.of, names) if plan is not None]
    if not plans:
        return "", 0
    plan = min(plans, key=lambda plan: plan.end)  # a repair, if a cut has met damage
    file = disk.open(f"{directory}/{log_name(plan.segment)}")
    try:
        kept = scan(file, plan.segment, every, plan.end).segment
    finally:
        file.close()
    if kept.end < plan.end:  # it has rotted since: the name stays until somebody repairs it
        _clear(disk, directory, plan)
        return "", plan.end
    _carry_out(disk, directory, plan, kept.size)
    return f"the cut at {plan.end}", 0


def _carry_out(disk: Disk, directory: str, plan: Shortening, byte: int) -> None:
    """Let a segment be the last one, and end at that byte."""
    _clear(disk, directory, plan)
    file = disk.open(f"{directory}/{log_name(plan.segment)}")
    try:
        if file.size() > byte:
            file.truncate(byte)
        file.sync()
    finally:
        file.close()
    names = disk.list(directory)
    above = [name for name in names if (floor_of(name) or 0) > plan.end]
    if above:  # what was purged stays so, and what comes now was not
        disk.create(f"{directory}/{floor_name(plan.end)}").close()
        disk.sync_directory(directory)
    _remove(disk, directory, above)
    others = [name for name in names if Shortening.of(name) not in (None, plan)]
    _remove(disk, directory, others)  # first: they speak of what is not there any more
    _remove(disk, directory, [plan.name])


def _clear(disk: Disk, directory: str, plan: Shortening) -> None:
    """Take away what lies behind that segment, and all that is said of it."""
    names = disk.list(directory)
    indexes = [(index_of(name), name) for name in names]
    of_these = [name for base, name in indexes if base is not None and base >= plan.segment]
    _remove(disk, directory, of_these)
    for base in reversed(_later(names, plan.segment)):
        path = f"{directory}/{log_name(base)}"
        if plan.aside is None:
            disk.remove(path)
        else:
            disk.rename(path, f"{directory}/damaged-{plan.aside}-{base}-0.bytes")
        disk.sync_directory(directory)


def _begin(disk: Disk, directory: str, base: int) -> File:
    """An empty log, in place of all there is."""
    names = disk.list(directory)
    segments = [name for name in names if base_of(name) is not None]
    tellers = (index_of, floor_of, Shortening.of)
    said = [name for name in names if any(teller(name) is not None for teller in tellers)]
    _remove(disk, directory, [*said, *reversed(segments)])
    file = disk.create(f"{directory}/{log_name(base)}")
    disk.sync_directory(directory)
    _remove(disk, directory, [name for name in names if reset_of(name) is not None])
    return file


def _remove(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Take these away, for good."""
    for name in names:
        disk.remove(f"{directory}/{name}")
    if names:
        disk.sync_directory(directory)


def _later(names: Iterable[str], segment: int) -> list[int]:
    """The segments behind that one, in order."""
    return sorted(base for base in map(base_of, names) if base is not None and base > segment)


# ------------------------------------------------------------ what is kept for people


def _keep(log: StreamLog, name: str, content: Iterator[Sequence[Bytes]]) -> None:
    """A file with this content, there for good; nothing, if that fails."""
    path = log._path(name)
    try:
        file = log._disk.create(f"{path}.tmp")
        try:
            for pieces in content:
                file.write(pieces)
            file.sync()
        finally:
            file.close()
        log._disk.rename(f"{path}.tmp", path)
        log._disk.sync_directory(log.directory)
    except (OSError, StorageError) as error:
        with contextlib.suppress(OSError):
            log._disk.remove(f"{path}.tmp")
        if isinstance(error, StorageError):
            raise
        what = f"{log._disk.where(path)} cannot be written, and nothing was cut off"
        raise storage_error(error, what) from error


def _batches(log: StreamLog, offset: int) -> Iterator[Sequence[Bytes]]:
    """All batches from there on."""
    while batches := log.read(offset, _CHUNK):
        yield batches
        offset = head(batches[-1]).end


def _bytes(file: File, position: int) -> Iterator[Sequence[Bytes]]:
    """All bytes from there on, whatever they are."""
    while data := file.read(position, _CHUNK):
        yield [data]
        position += len(data)


def _next_number(log: StreamLog) -> int:
    """One that no file beside the log has."""
    numbers = [0]
    for name in log._disk.list(log.directory):
        found = _CUT.fullmatch(name) or _SET.fullmatch(name)
        if found is not None:
            numbers.append(int(found[1]))
    return max(numbers) + 1


def _tidy(log: StreamLog, coming: int | None) -> None:
    """Only the newest ones are kept, and a set that is coming is one of them; if some cannot be removed, more."""
    names = log._disk.list(log.directory)
    for kind, most in ((_CUT, KEPT_CUTS), (_SET, KEPT_SETS)):
        found = [(int(match[1]), match[0]) for match in map(kind.fullmatch, names) if match]
        numbers = {number for number, _ in found}
        if kind is _SET and coming is not None:
            numbers.add(coming)
        newest = sorted(numbers)[-most:]
        for number, name in found:
            if number not in newest:
                with contextlib.suppress(OSError):
                    log._disk.remove(log._path(name))


def _size(log: StreamLog, base: int) -> int:
    file = log._disk.open(log._path(log_name(base)))
    try:
        return file.size()
    finally:
        file.close()


def _what(log: StreamLog, base: int) -> str:
    return log._what(log._path(log_name(base)))
