"""Open the log of a stream: find out what is there, and what is torn or damaged.

The functions work on the private parts of a `StreamLog`, before anybody else has it. They follow rule 4 of
`railgun.broker.log.log`. A cut or reset that a crash has interrupted is finished first
(`railgun.broker.log.truncation`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from railgun.broker.errors import DamagedLogError, StorageError, damaged, later_tail
from railgun.broker.log import truncation
from railgun.broker.log.disk import unless_read_only
from railgun.broker.log.segment import (
    Segment,
    base_of,
    empty_segment,
    floor_name,
    floor_of,
    index_name,
    index_of,
    load_index,
    log_name,
    save_index,
    scan,
)
from railgun.broker.log.tail import Tail, has_mark
from railgun.transport.records import MAGIC, is_later

if TYPE_CHECKING:
    from railgun.broker.log.log import StreamLog


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `StreamLog.open` has found, and what it has changed."""

    first: int
    end: int
    cut_bytes: int = 0
    """Bytes of a torn end that were cut off."""
    cut_reason: str = ""
    rebuilt: tuple[str, ...] = ()
    """Names of index files that were rebuilt."""
    damage: DamagedLogError | None = None
    finished: str = ""
    """The cut or reset that a crash had interrupted, and that is finished now."""

    def __str__(self) -> str:
        parts = [f"messages {self.first} to {self.end}"]
        if self.cut_bytes:
            parts.append(f"{self.cut_bytes} bytes torn at the end are cut off ({self.cut_reason})")
        if self.rebuilt:
            parts.append(f"{len(self.rebuilt)} indexes rebuilt")
        if self.finished:
            parts.append(f"{self.finished} is finished")
        if self.damage is not None:
            parts.append(str(self.damage))
        return "; ".join(parts)


def recover(log: StreamLog, existed: bool = False) -> Recovery:
    """Load the log from its disk, or make it; if it `existed` before and is gone, raise `DamagedLogError` instead."""
    disk, directory = log._disk, log.directory
    disk.make_directory(directory)
    finished, durable = truncation.finish(disk, directory, log.config.index_bytes)
    names = disk.list(directory)
    bases = sorted(base for base in map(base_of, names) if base is not None)
    if existed and not bases:
        raise DamagedLogError(
            f"there is no log in {disk.where(directory)}, and there was one: somebody has removed its files. Nothing "
            "was changed. Restore them.",
            0,
        )
    successor = _remove_leftovers(log, names, bases)
    if not bases:
        path = log._path(log_name(0))
        log._tail = Tail(disk.create(path), log._what(path), 0)
        disk.sync_directory(directory)
        log._add(empty_segment(0, log.config.index_bytes))
        return Recovery(0, 0)
    rebuilt: list[str] = []
    damage: DamagedLogError | None = None
    for base, following in itertools.pairwise(bases):
        segment, problem = _load_segment(log, base, rebuilt)
        log._add(segment)
        if not problem and segment.end != following:
            problem = f"the end, but the next segment begins with {following}"
        if problem:
            what = log._what(log._path(log_name(base)))
            damage = damaged(what, segment.end, segment.size, problem)
            break
    cut, reason, whole = 0, "", None
    if damage is None:
        cut, reason, damage, whole = _recover_last(log, bases[-1], durable, successor)
    else:
        last = log._path(log_name(log._bases[-1]))
        log._tail = Tail(disk.open(last), log._what(last), log._segments[-1].size)
    log._damage = damage
    stored = [segment for segment in log._segments if not segment.empty]
    log._end = log._durable_end = log._segments[-1].end
    log._whole = log._durable_whole = log._end if whole is None else whole
    if stored:
        log._last_time, log._epoch = stored[-1].last_time, stored[-1].epoch
    floors = [floor for floor in map(floor_of, names) if floor is not None]
    highest = max(floors, default=0)
    if damage is None:
        damage = log.note_missing(highest, f"the file {floor_name(highest)} beside it", "")
    log._floor = min(highest, log._end)
    if floors and damage is None:  # a crash may have left purged segments
        with contextlib.suppress(StorageError):  # if they cannot be removed now, nobody reads them
            log.trim(None, None, 0)
            log._remove_old_floors()
    return Recovery(log.first, log.end, cut, reason, tuple(rebuilt), damage, finished)


def _remove_leftovers(log: StreamLog, names: Sequence[str], bases: Sequence[int]) -> str:
    """Remove what a crash has left: unfinished files, and indexes that belong to no finished segment.

    Return the name of an index that proves that the last segment had a successor; "" if there is none.
    """
    indexes = {name: base for name in names if (base := index_of(name)) is not None}
    behind = [name for name, base in indexes.items() if bases and base >= bases[-1]]
    valid = {*behind, *(index_name(base) for base in bases[:-1])}
    unwanted = (".idx", ".idx.tmp", ".batches.tmp", ".bytes.tmp")
    for name in names:
        if name.endswith(unwanted) and name not in valid:
            with unless_read_only():
                log._disk.remove(log._path(name))
    return max(behind, default="")


def _load_segment(log: StreamLog, base: int, rebuilt: list[str]) -> tuple[Segment, str]:
    """Load a finished segment by its index, or by a scan; return it, and what is wrong with it ("": nothing)."""
    every = log.config.index_bytes
    file = log._disk.open(log._path(log_name(base)))
    try:
        size = file.size()
        loaded = load_index(log._disk, log.directory, base, size, every)
        if loaded is not None:
            loaded.index = None  # to save memory; loaded again when the segment is read
            return loaded, ""
        result = scan(file, base, every)
    finally:
        file.close()
    if not result.problem:
        rebuilt.append(index_name(base))
        save_index(log._disk, log.directory, result.segment, result.index)
        result.segment.index = None
    return result.segment, result.problem


def _recover_last(
    log: StreamLog, base: int, durable: int, successor: str
) -> tuple[int, str, DamagedLogError | None, int]:
    """Recover the last segment; return the bytes cut off, why, the damage, and up to where units are whole.

    Offsets before `durable` were synced; for the rest, marks tell. `successor` is the name of an index that proves that
    other segments followed; "" if there is none.
    """
    path = log._path(log_name(base))
    file = log._disk.open(path)
    try:
        result = scan(file, base, log.config.index_bytes)
    except BaseException:
        file.close()
        raise
    segment, cut, damage, reason = result.segment, 0, None, result.problem
    if segment.end < durable or (result.problem and has_mark(file, segment.size, MAGIC)):
        problem = result.problem or "the end of the file"
        damage = damaged(log._what(path), segment.end, segment.size, problem)
    elif successor:
        problem = f"the end of the file, but {successor} says that another segment followed"
        damage = damaged(log._what(path), segment.end, segment.size, problem)
    elif result.problem:
        version = file.read(segment.size, 4)
        # This may be a damaged batch of this version: to refuse it is safe, to cut it off is not.
        if is_later(MAGIC, version):
            file.close()
            raise later_tail(log._what(path), log._disk.where(path), segment.size, version)
        with unless_read_only():  # the tail then fails, because it cannot cut off either
            file.truncate(segment.size)
            cut = result.size - segment.size
    if damage is None and result.whole < segment.end:  # never finished, so never acknowledged
        reason = result.problem or "a unit of batches that was not finished"
        segment = scan(file, base, log.config.index_bytes, result.whole).segment
        with unless_read_only():
            file.truncate(segment.size)
            cut = result.size - segment.size
    tail = Tail(file, log._what(path), segment.size)
    if damage is None:
        tail.try_write()
        file.sync()  # writes of a killed process may be in the page cache only
        log._disk.sync_directory(log.directory)
    log._add(segment)
    log._tail = tail
    return cut, reason if cut else "", damage, result.whole
