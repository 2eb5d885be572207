"""Take messages away from the end of a log, as a copy of a stream needs: cut it off, begin anew, or set damage aside.

The functions work on the private parts of a `StreamLog`, in the turn of its one writer.

Rules:

1. Each change is done wholly or not at all, whenever a crash comes. The name of an empty file (the plan) says what is
   to be done, and is durable before anything is changed; `finish`, at the next open, does the rest of it. The plan is
   removed last, and durably, before anything is appended.
2. Before the end of a log is cut off, it is copied to a file beside the log, for people: `cut-<offset>-<n>.batches`,
   record batches one after the other. The newest 8 are kept.
3. `repair` throws nothing away: all bytes from the first bad one on go to files `damaged-<n>-<segment>-<byte>.bytes`,
   as they lay in that segment from that byte on. The newest 2 sets are kept; a set is all files of one `<n>`.
4. Later segments are removed newest first, each durably before the next. Their indexes are removed before them, and so
   is the index of the segment that becomes the last one: no index of another history may be trusted.
5. The part of a segment that is kept was synced before the segment is cut, and the cut is synced before anything is
   written behind it. So all marks in the segment are right, and none lies behind its end.
6. An error before the plan is durable leaves the log unchanged. After a later error the log has failed until it is
   opened again.
7. Readers see the change as soon as the plan is durable: they get messages before the cut, and none that go.
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
    empty_segment,
    floor_name,
    floor_of,
    index_of,
    log_name,
    scan,
)
from railgun.broker.log.tail import Tail
from railgun.transport.records import Bytes, LaterBatchError, head

if TYPE_CHECKING:
    from railgun.broker.log.log import StreamLog

MAX_CUT_FILES: Final = 8
MAX_DAMAGED_SETS: Final = 2

_READ_BYTES: Final = 4 << 20
_OFFSET_LIMIT: Final = 1 << 63
_PLAN: Final = re.compile(r"([0-9]{20})-([0-9]{20})\.(?:cut|repair-([0-9]+))")
_RESET: Final = re.compile(r"([0-9]{20})\.reset")
_CUT: Final = re.compile(r"cut-[0-9]+-([0-9]+)\.batches")
_SET: Final = re.compile(r"damaged-([0-9]+)-[0-9]+-[0-9]+\.bytes")


@dataclass(frozen=True, slots=True)
class Shortening:
    """The plan of a cut or a repair: `segment` becomes the last one, and ends at the offset `end`.

    The bytes behind it are removed; or, in a repair, set aside under the number `aside`.
    """

    segment: int
    end: int
    aside: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the file that records this plan.

        >>> Shortening(12, 15, aside=3).name
        '00000000000000000012-00000000000000000015.repair-3'
        """
        kind = "cut" if self.aside is None else f"repair-{self.aside}"
        return f"{self.segment:020}-{self.end:020}.{kind}"

    @staticmethod
    def of(name: str) -> Shortening | None:
        """Return the plan that a file name records; None for other files.

        >>> Shortening.of(Shortening(12, 15).name)
        Shortening(segment=12, end=15, aside=None)
        """
        match = _PLAN.fullmatch(name)
        if match is None:
            return None
        return Shortening(int(match[1]), int(match[2]), int(match[3]) if match[3] else None)


def reset_name(base: int) -> str:
    """Return the name of the file which records that the log is dropped, and begins anew with this offset."""
    return f"{base:020}.reset"


def reset_of(name: str) -> int | None:
    """Return the offset in the name of a reset file; None for other files."""
    match = _RESET.fullmatch(name)
    return int(match[1]) if match else None


# ------------------------------------------------------------ while a log is open


def cut(log: StreamLog, offset: int) -> int:
    """Remove all messages from this offset on; return how many. See `StreamLog.cut`."""
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
    with _new_end(log, offset) as new_end:
        kept = new_end.scan.segment
        if new_end.scan.problem:
            with log._lock:
                raise log._note_damage(kept.base, kept.end, kept.size, new_end.scan.problem)
        if kept.end != offset:
            raise OrderError(
                f"stream {log.directory!r} cannot be cut at {offset}, in the middle of the batch from {kept.end} on. "
                "Nothing was changed. Cut where a batch begins."
            )
        count = log.end - offset
        _keep(log, f"cut-{offset}-{_next_number(log)}.batches", _batches(log, offset))
        _shorten(log, new_end, Shortening(kept.base, offset))
    return count


def repair(log: StreamLog) -> int:
    """Set aside all bytes from the damage on; return how many. See `StreamLog.repair`."""
    if log._closed:
        raise ClosedError(f"the log of stream {log.directory!r} is closed")
    log._tail.check()
    damage = log._damage
    if damage is None:
        return 0
    log._tail.sync()
    # The scan may end before the damage that was noted: there may be more of it.
    with _new_end(log, damage.offset) as new_end:
        kept, number = new_end.scan.segment, _next_number(log)
        bad = new_end.scan.size - kept.size
        later = sum(_size(log, base) for base in _later(log._disk.list(log.directory), kept.base))
        if bad:
            name = f"damaged-{number}-{kept.base}-{kept.size}.bytes"
            _keep(log, name, _bytes(new_end.file, kept.size))
        _shorten(log, new_end, Shortening(kept.base, kept.end, number))
    return bad + later


def reset(log: StreamLog, base: int) -> None:
    """Drop all messages, and begin anew with `base`. See `StreamLog.reset`."""
    if log._closed:
        raise ClosedError(f"the log of stream {log.directory!r} is closed")
    log._tail.check()
    if not 0 <= base < _OFFSET_LIMIT:
        raise OrderError(f"stream {log.directory!r} cannot begin with {base}: that is no offset")
    _announce(log, reset_name(base))
    old = log._tail
    with log._lock:
        log._floor = log._before = 0
        _replace(log, 0, empty_segment(base, log.config.index_bytes), base)
    try:
        file = _begin(log._disk, log.directory, base)
    except OSError as error:
        old.fail("begun anew", error)
        raise
    with log._lock:
        log._tail = Tail(file, _what(log, base), 0)
    old.file.close()


@dataclass(frozen=True, slots=True)
class _NewEnd:
    """The new end of a log: number and file of its last segment, and the good part of that."""

    at: int
    file: File
    scan: Scan


@contextlib.contextmanager
def _new_end(log: StreamLog, offset: int) -> Iterator[_NewEnd]:
    """Scan the segment that holds the offset, up to the offset, and yield it as the new end of the log."""
    at = bisect_right(log._bases, offset) - 1
    base = log._bases[at]
    file = log._tail.file
    try:
        if at < len(log._bases) - 1:  # readers may close the file that they share
            file = log._disk.open(log._path(log_name(base)))
        yield _NewEnd(at, file, scan(file, base, log.config.index_bytes, offset))
    except LaterBatchError as error:
        raise later_format(_what(log, base), error) from error
    except OSError as error:
        raise storage_error(error, f"{_what(log, base)} cannot be read") from error
    finally:
        if file is not log._tail.file:
            file.close()


def _shorten(log: StreamLog, new_end: _NewEnd, plan: Shortening) -> None:
    """Carry out a plan: record it durably, show readers the new end, and change the files."""
    _remove_old_files(log, plan.aside)
    _announce(log, plan.name)
    kept, old = new_end.scan.segment, log._tail.file
    with log._lock:
        _replace(log, new_end.at, kept, new_end.scan.whole)
        log._tail = Tail(new_end.file, _what(log, kept.base), kept.size)
    if old is not new_end.file:
        old.close()
    try:
        _carry_out(log._disk, log.directory, plan, kept.size)
    except OSError as error:
        log._tail.fail(f"cut off at offset {plan.end}", error)


def _replace(log: StreamLog, at: int, last: Segment, whole: int) -> None:
    """Put the segment `last` in place of all from number `at` on; units are whole up to `whole`. The lock is held."""
    for base in [base for base in log._files if base >= log._bases[at]]:
        log._files.pop(base).close()
    log._segments[at:], log._bases[at:] = [last], [last.base]
    log._floor = min(log._floor, last.end)
    log._end = log._durable_end = last.end
    log._whole = log._durable_whole = whole
    stored = [segment for segment in log._segments if not segment.empty]
    log._last_time = log._given_time = stored[-1].last_time if stored else LONG_AGO
    log._epoch = stored[-1].epoch if stored else log._before
    log._damage = None
    log._hints.clear()
    log._changes += 1


def _announce(log: StreamLog, name: str) -> None:
    """Record a plan durably, as the name of an empty file: from now on it will be carried out, even after a crash."""
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
    """Carry out what a crash has interrupted.

    Return what that was, and an offset: all messages before it were synced.
    """
    names = disk.list(directory)
    resets = [base for base in map(reset_of, names) if base is not None]
    if resets:
        _begin(disk, directory, resets[0]).close()
        return f"the reset to {resets[0]}", 0
    plans = [plan for plan in map(Shortening.of, names) if plan is not None]
    if not plans:
        return "", 0
    plan = min(plans, key=lambda plan: plan.end)  # the repair, if a cut has come upon damage
    file = disk.open(f"{directory}/{log_name(plan.segment)}")
    try:
        kept = scan(file, plan.segment, every, plan.end).segment
    finally:
        file.close()
    if kept.end < plan.end:  # damaged since: the plan stays until the log is repaired
        _clear(disk, directory, plan)
        return "", plan.end
    _carry_out(disk, directory, plan, kept.size)
    return f"the cut at {plan.end}", 0


def _carry_out(disk: Disk, directory: str, plan: Shortening, byte: int) -> None:
    """Make a segment the last one, and let it end at that byte."""
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
    if above:  # purged offsets stay purged; offsets from the new end on will have new messages
        disk.create(f"{directory}/{floor_name(plan.end)}").close()
        disk.sync_directory(directory)
    _remove(disk, directory, above)
    others = [name for name in names if Shortening.of(name) not in (None, plan)]
    _remove(disk, directory, others)  # first, because they are plans for segments that are gone
    _remove(disk, directory, [plan.name])


def _clear(disk: Disk, directory: str, plan: Shortening) -> None:
    """Remove the segments behind that of the plan, and all index files that the plan makes wrong."""
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
    """Make an empty log in place of all files; return its first segment."""
    names = disk.list(directory)
    segments = [name for name in names if base_of(name) is not None]
    parsers = (index_of, floor_of, Shortening.of)
    records = [name for name in names if any(parse(name) is not None for parse in parsers)]
    _remove(disk, directory, [*records, *reversed(segments)])
    file = disk.create(f"{directory}/{log_name(base)}")
    disk.sync_directory(directory)
    _remove(disk, directory, [name for name in names if reset_of(name) is not None])
    return file


def _remove(disk: Disk, directory: str, names: Sequence[str]) -> None:
    """Remove these files, durably."""
    for name in names:
        disk.remove(f"{directory}/{name}")
    if names:
        disk.sync_directory(directory)


def _later(names: Iterable[str], segment: int) -> list[int]:
    """Return the bases of the segments behind this one, in order."""
    return sorted(base for base in map(base_of, names) if base is not None and base > segment)


# ------------------------------------------------------------ files kept for people


def _keep(log: StreamLog, name: str, content: Iterator[Sequence[Bytes]]) -> None:
    """Write a file with this content, durably; leave no file if that fails."""
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
    """Yield all batches from this offset on."""
    while batches := log.read(offset, _READ_BYTES):
        yield batches
        offset = head(batches[-1]).end


def _bytes(file: File, position: int) -> Iterator[Sequence[Bytes]]:
    """Yield all bytes of a file from this position on, good or bad."""
    while data := file.read(position, _READ_BYTES):
        yield [data]
        position += len(data)


def _next_number(log: StreamLog) -> int:
    """Return a number that no kept file beside the log has."""
    numbers = [0]
    for name in log._disk.list(log.directory):
        match = _CUT.fullmatch(name) or _SET.fullmatch(name)
        if match is not None:
            numbers.append(int(match[1]))
    return max(numbers) + 1


def _remove_old_files(log: StreamLog, coming: int | None) -> None:
    """Remove all kept files but the newest, counting the set `coming` as one of those; ignore errors of the disk."""
    names = log._disk.list(log.directory)
    for kind, max_files in ((_CUT, MAX_CUT_FILES), (_SET, MAX_DAMAGED_SETS)):
        files = [(int(match[1]), match[0]) for match in map(kind.fullmatch, names) if match]
        numbers = {number for number, _ in files}
        if kind is _SET and coming is not None:
            numbers.add(coming)
        newest = sorted(numbers)[-max_files:]
        for number, name in files:
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
