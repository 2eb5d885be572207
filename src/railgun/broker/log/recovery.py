"""What is done when the log of a stream is opened: find out what is there, and what is torn or damaged.

It works on the insides of a `StreamLog`, before anybody else has it. Its rule is the 4th of `railgun.broker.log.log`;
what a crash has left of a cut or a reset is finished first (`railgun.broker.log.surgery`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from railgun.broker.errors import DamagedLogError, StorageError, damaged, later_tail
from railgun.broker.log import surgery
from railgun.broker.log.disk import unless_read_only
from railgun.broker.log.segment import (
    Segment,
    base_of,
    floor_name,
    floor_of,
    fresh,
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
    """What `StreamLog.open` has found."""

    first: int
    end: int
    cut_bytes: int = 0
    """So much was torn at the end, and is cut off."""
    cut_reason: str = ""
    rebuilt: tuple[str, ...] = ()
    """Indexes that were made anew."""
    damage: DamagedLogError | None = None
    finished: str = ""
    """What a crash had interrupted, and is done now."""

    def __str__(self) -> str:
        told = [f"messages {self.first} to {self.end}"]
        if self.cut_bytes:
            told.append(f"{self.cut_bytes} bytes torn at the end are cut off ({self.cut_reason})")
        if self.rebuilt:
            told.append(f"{len(self.rebuilt)} indexes made anew")
        if self.finished:
            told.append(f"{self.finished} is finished")
        if self.damage is not None:
            told.append(str(self.damage))
        return "; ".join(told)


def recover(log: StreamLog, known: bool = False) -> Recovery:
    """Let a log know what is on its disk, which may be nothing, unless it is `known` to have been there."""
    disk, directory = log._disk, log.directory
    disk.make_directory(directory)
    finished, sure = surgery.finish(disk, directory, log.config.index_bytes)
    names = disk.list(directory)
    bases = sorted(base for base in map(base_of, names) if base is not None)
    if known and not bases:
        raise DamagedLogError(
            f"there is no log in {disk.where(directory)}, and there was one: somebody has removed its files. Nothing "
            "was changed. Restore them.",
            0,
        )
    successor = _tidy(log, names, bases)
    if not bases:
        path = log._path(log_name(0))
        log._tail = Tail(disk.create(path), log._what(path), 0)
        disk.sync_directory(directory)
        log._add(fresh(0, log.config.index_bytes))
        return Recovery(0, 0)
    rebuilt: list[str] = []
    damage: DamagedLogError | None = None
    for base, following in itertools.pairwise(bases):
        segment, problem = _believe(log, base, rebuilt)
        log._add(segment)
        if not problem and segment.end != following:
            problem = f"the end, but the next segment begins with {following}"
        if problem:
            what = log._what(log._path(log_name(base)))
            damage = damaged(what, segment.end, segment.size, problem)
            break
    cut, reason, whole = 0, "", None
    if damage is None:
        cut, reason, damage, whole = _recover_last(log, bases[-1], sure, successor)
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
        damage = log.miss(highest, f"the file {floor_name(highest)} beside it", "")
    log._floor = min(highest, log._end)
    if floors and damage is None:  # a crash may have left what was purged
        with contextlib.suppress(StorageError):  # it cannot be removed now, and is not read
            log.trim(None, None, 0)
            log._tidy_floors()
    return Recovery(log.first, log.end, cut, reason, tuple(rebuilt), damage, finished)


def _tidy(log: StreamLog, names: Sequence[str], bases: Sequence[int]) -> str:
    """Indexes without a segment before all others, and what is not whole, are left by a crash.

    Return the name of an index that says that the last segment was followed by another one; "": there is none.
    """
    indexes = {name: base for name in names if (base := index_of(name)) is not None}
    behind = [name for name, base in indexes.items() if bases and base >= bases[-1]]
    known = {*behind, *(index_name(base) for base in bases[:-1])}
    unwanted = (".idx", ".idx.tmp", ".batches.tmp", ".bytes.tmp")
    for name in names:
        if name.endswith(unwanted) and name not in known:
            with unless_read_only():
                log._disk.remove(log._path(name))
    return max(behind, default="")


def _believe(log: StreamLog, base: int, rebuilt: list[str]) -> tuple[Segment, str]:
    """A segment that is not written any more: by its index, or by a scan."""
    every = log.config.index_bytes
    file = log._disk.open(log._path(log_name(base)))
    try:
        size = file.size()
        told = load_index(log._disk, log.directory, base, size, every)
        if told is not None:
            told.index = None  # again when it is read
            return told, ""
        found = scan(file, base, every)
    finally:
        file.close()
    if not found.problem:
        rebuilt.append(index_name(base))
        save_index(log._disk, log.directory, found.segment, found.index)
        found.segment.index = None
    return found.segment, found.problem


def _recover_last(
    log: StreamLog, base: int, sure: int, successor: str
) -> tuple[int, str, DamagedLogError | None, int]:
    """Recover the last segment; return the bytes cut off, why, the damage, and up to where units are whole.

    What lies before the offset `sure` was there for good; of the rest, marks tell. `successor`: the name of an index,
    by which there were segments behind this one; "": there is none.
    """
    path = log._path(log_name(base))
    file = log._disk.open(path)
    try:
        found = scan(file, base, log.config.index_bytes)
    except BaseException:
        file.close()
        raise
    segment, cut, damage, reason = found.segment, 0, None, found.problem
    if segment.end < sure or (found.problem and has_mark(file, segment.size, MAGIC)):
        problem = found.problem or "the end of the file"
        damage = damaged(log._what(path), segment.end, segment.size, problem)
    elif successor:
        problem = f"the end of the file, but {successor} says that another segment followed"
        damage = damaged(log._what(path), segment.end, segment.size, problem)
    elif found.problem:
        version = file.read(segment.size, 4)
        if is_later(
            MAGIC, version
        ):  # perhaps a damaged one of ours: to refuse is safe, to cut is not
            file.close()
            raise later_tail(log._what(path), log._disk.where(path), segment.size, version)
        with unless_read_only():  # then the tail fails, for it cannot be cut off either
            file.truncate(segment.size)
            cut = found.size - segment.size
    if damage is None and found.whole < segment.end:  # never finished, so never acknowledged
        reason = found.problem or "a unit of batches that was not finished"
        segment = scan(file, base, log.config.index_bytes, found.whole).segment
        with unless_read_only():
            file.truncate(segment.size)
            cut = found.size - segment.size
    tail = Tail(file, log._what(path), segment.size)
    if damage is None:
        tail.try_write()
        file.sync()  # what a killed process has left may be in memory only
        log._disk.sync_directory(log.directory)
    log._add(segment)
    log._tail = tail
    return cut, reason if cut else "", damage, found.whole
