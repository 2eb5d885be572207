"""Mends times that were stored by a clock that was ahead, in the directory of a node that is stopped.

Rules:

1. A batch that was stored later than `latest` gets the time `latest`; nothing else is changed, so stored time still
   never steps back.
2. A segment is replaced whole. Its index, which knows times, is removed before: it is made anew at the next start. So a
   crash leaves each segment as it was or mended, and the repair can be run again.
3. A log that is damaged is left alone: fetch or repair it first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from railgun.core.errors import RailgunError
from railgun.node.disk import Disk, NodeDisk, check_format, put
from railgun.node.errors import DamagedLogError, NoStreamError
from railgun.node.log import StreamLog
from railgun.node.node import CLOCK, NODE_FORMAT, STREAM_FORMAT
from railgun.node.segment import Walk, base_of, index_name
from railgun.node.settings import check_name
from railgun.snapshots.errors import LockedError
from railgun.wire.records import patch


class NodeRunsError(RailgunError):
    """A node works in the directory."""

    code = "IN_USE"


def retime(data: Path, latest: int, names: Sequence[str] = ()) -> dict[str, int]:
    """Set stored times after `latest` (µs) to it; return how many batches were changed, by stream.

    `names`: of the streams; without, all of the directory. Raises `NodeRunsError` while a node works there, and
    `DamagedLogError` if a log is not whole: the streams before it are mended, it and those after it are not. Raises
    `LaterFormatError`, and changes nothing, if a later version of Railgun has written the directory or a stream.
    """
    if not (data / "streams").is_dir():
        raise NoStreamError(f"{data} is not the directory of a node: there are no streams in it")
    disk = NodeDisk(data)
    try:
        lock = disk.lock("lock")
    except LockedError as error:
        raise NodeRunsError(f"a node works in {data}: stop it first") from error
    try:
        check_format(disk, "", NODE_FORMAT)
        known = disk.directories("streams")
        for name in names:
            if check_name(name) not in known:
                raise NoStreamError(f"there is no stream {name!r} in {data}")
        for name in known:
            check_format(disk, f"streams/{name}", STREAM_FORMAT)
        changed = {
            name: _retime(disk, f"streams/{name}/log", latest)
            for name in names or sorted(known)
            if "log" in disk.directories(f"streams/{name}")
        }
        disk.remove(CLOCK)  # the time that was noted may be as wrong
        return changed
    finally:
        lock.release()


def _retime(disk: Disk, directory: str, latest: int) -> int:
    log, found = StreamLog.open(disk, directory)  # which cuts off what is torn at its end
    with contextlib.closing(log):
        if found.damage is not None:
            raise DamagedLogError(f"{found.damage} Its times are left alone.", found.damage.offset)
        ahead = log.last_time > latest
    changed = 0
    for name in sorted(disk.list(directory)) if ahead else ():
        if (base := base_of(name)) is not None:
            changed += _retime_segment(disk, directory, name, base, latest)
    return changed


def _retime_segment(disk: Disk, directory: str, name: str, base: int, latest: int) -> int:
    path = f"{directory}/{name}"
    file = disk.open(path)
    try:
        data = bytearray(file.read(0, file.size()))
    finally:
        file.close()
    late = []
    walk = Walk(bytes(data), 0, base)
    for begin, found, _ in walk:
        if found.time > latest:
            late.append((begin, found))
    if walk.problem:
        raise DamagedLogError(f"{disk.where(path)}: {walk.problem}", walk.offset)
    if not late:
        return 0
    for begin, found in late:
        patch(memoryview(data)[begin : begin + found.size], found.base, found.epoch, latest)
    put(disk, f"{path}.batches.tmp", [data]).close()
    disk.remove(f"{directory}/{index_name(base)}")
    disk.sync_directory(directory)
    disk.rename(f"{path}.batches.tmp", path)
    disk.sync_directory(directory)
    return len(late)
