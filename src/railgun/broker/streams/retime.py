"""Correct stored times that a clock has set too late, in the directory of a stopped node.

Rules:

1. A batch stored later than `latest` gets the time `latest`; nothing else is changed, so stored time still never steps
   back.
2. A segment is replaced whole. Its index, which has times, is removed before, and rebuilt at the next start. So a crash
   leaves each segment either unchanged or corrected, and the command can be run again.
3. All streams are examined before any is changed. If a log is damaged, none is changed: fetch or repair it first.
4. A time that would make retention delete messages at once, which it would have kept, is refused unless the caller
   allows it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from railgun.broker.clock import time_of_day
from railgun.broker.errors import DamagedLogError, NoStreamError
from railgun.broker.log.disk import Disk, NodeDisk, check_format, put
from railgun.broker.log.log import StreamLog
from railgun.broker.log.segment import Walk, base_of, index_name
from railgun.broker.settings import SECOND, check_name
from railgun.broker.streams.node import CLOCK, NODE_FORMAT, SETTINGS_FILE, STREAM_FORMAT
from railgun.errors import RailgunError
from railgun.storage.errors import LockedError
from railgun.transport.records import Head, patch

UNLIMITED_US: Final = 1 << 62


class NodeRunsError(RailgunError):
    """A node works in the directory."""

    code = "IN_USE"


class WouldExpireError(RailgunError):
    """Retention would delete messages as soon as the node starts; `messages` has their number by stream."""

    code = "WOULD_EXPIRE"

    def __init__(self, messages: dict[str, int], earliest: int) -> None:
        counts = ", ".join(f"{count:,} messages of {name!r}" for name, count in messages.items())
        since = datetime.fromtimestamp(earliest / SECOND, UTC).isoformat()
        super().__init__(
            f"the time is older than max_age: retention would delete {counts} when the node starts. Nothing was "
            f"changed. Choose a time after {since} (--latest), or say that messages may expire (--may-expire)"
        )
        self.messages = messages


def retime(
    data: Path, latest: int, names: Sequence[str] = (), *, may_expire: bool = False
) -> dict[str, int]:
    """Set stored times after `latest` (µs) to `latest`; return how many batches were changed, by stream.

    `names`: streams to correct; empty: all in the directory. `may_expire`: go on even if retention will delete messages
    then. Nothing is changed when an error is raised: `NodeRunsError` while a node works in the directory,
    `DamagedLogError` if a log is damaged, `WouldExpireError` if retention would delete messages at once that it would
    have kept, and `LaterFormatError` if a later version of Railgun has written the directory or a stream.
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
        existing = disk.directories("streams")
        for name in names:
            if check_name(name) not in existing:
                raise NoStreamError(f"there is no stream {name!r} in {data}")
        for name in existing:
            check_format(disk, f"streams/{name}", STREAM_FORMAT)
        chosen = [
            name
            for name in names or sorted(existing)
            if "log" in disk.directories(f"streams/{name}")
        ]
        now = time_of_day()
        late = {name: _Late(disk, name, latest, now) for name in chosen}
        expiring = {name: stream.expiring for name, stream in late.items() if stream.expiring}
        if expiring and not may_expire:
            raise WouldExpireError(expiring, max(late[name].kept_since for name in expiring))
        changed = {
            name: sum(
                _retime_segment(disk, stream.directory, segment, latest)
                for segment in stream.segments
            )
            for name, stream in late.items()
        }
        disk.remove(CLOCK)  # the noted time may be wrong for the same reason
        return changed
    finally:
        lock.release()


class _Late:
    """Batches of a stream stored after `latest`: names of their `segments`, and the number of `expiring` messages.

    A message is expiring if retention keeps it now, and would not keep it with the time `latest`.
    """

    def __init__(self, disk: Disk, name: str, latest: int, now: int) -> None:
        self.directory = f"streams/{name}/log"
        self.segments: list[str] = []
        self.expiring = 0
        self.kept_since = now - _max_age(disk, name)
        log, recovery = StreamLog.open(disk, self.directory)  # cuts off a torn end
        with contextlib.closing(log):
            if recovery.damage is not None:
                raise DamagedLogError(
                    f"{recovery.damage} No times were changed.", recovery.damage.offset
                )
            if log.last_time <= latest:
                return
            first = log.first
        for segment in sorted(disk.list(self.directory)):
            if base_of(segment) is None:
                continue
            _, late = _late_batches(disk, self.directory, segment, latest)
            if late:
                self.segments.append(segment)
            if latest < self.kept_since:
                kept = [
                    batch
                    for _, batch in late
                    if batch.time >= self.kept_since and batch.end > first
                ]
                self.expiring += sum(batch.end - max(batch.base, first) for batch in kept)


def _max_age(disk: Disk, name: str) -> int:
    """Return for how long a stream keeps messages (µs); `UNLIMITED_US` if it keeps all, or has no valid settings."""
    if SETTINGS_FILE not in disk.list(f"streams/{name}"):
        return UNLIMITED_US
    file = disk.open(f"streams/{name}/{SETTINGS_FILE}")
    try:
        max_age = json.loads(file.read(0, file.size())).get("max_age")
        return UNLIMITED_US if max_age is None else int(max_age * SECOND)
    except (ValueError, TypeError, AttributeError):
        return UNLIMITED_US
    finally:
        file.close()


def _late_batches(
    disk: Disk, directory: str, name: str, latest: int
) -> tuple[bytearray, list[tuple[int, Head]]]:
    """Return the bytes of a segment, and the batches in it that were stored after `latest`, each with its position."""
    path = f"{directory}/{name}"
    file = disk.open(path)
    try:
        data = bytearray(file.read(0, file.size()))
    finally:
        file.close()
    base = base_of(name)
    assert base is not None
    walk = Walk(bytes(data), 0, base)
    late = [(begin, head) for begin, head, _ in walk if head.time > latest]
    if walk.problem:
        raise DamagedLogError(f"{disk.where(path)}: {walk.problem}", walk.offset)
    return data, late


def _retime_segment(disk: Disk, directory: str, name: str, latest: int) -> int:
    data, late = _late_batches(disk, directory, name, latest)
    for begin, header in late:
        patch(memoryview(data)[begin : begin + header.size], header.base, header.epoch, latest)
    path, base = f"{directory}/{name}", base_of(name)
    assert base is not None
    put(disk, f"{path}.batches.tmp", [data]).close()
    disk.remove(f"{directory}/{index_name(base)}")
    disk.sync_directory(directory)
    disk.rename(f"{path}.batches.tmp", path)
    disk.sync_directory(directory)
    return len(late)
