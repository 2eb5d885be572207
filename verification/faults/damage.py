"""Damage the files of a node while it is down: flip bits, cut off ends, remove directories.

Files about the cluster itself are left alone: a node that has lost them must not come back.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Final

from railgun.broker.log.segment import base_of
from railgun.testing.disks import flip_bit as flipped

GROUPS: Final = "groups"


def stream_directories(data: Path) -> list[Path]:
    """Return the directories of all streams that a node has messages of."""
    return sorted(path for path in data.glob("streams/*") if _segments(path))


def _segments(directory: Path) -> list[Path]:
    files = (file for file in directory.rglob("*.log") if base_of(file.name) is not None)
    return sorted(file for file in files if file.stat().st_size > 0)


def flip_bit(data: Path, chance: Random) -> str:
    """Flip a bit in the first half of a stream's log, well before its end; return what was done, or ""."""
    files = [_segments(directory)[0] for directory in stream_directories(data)]
    return _flip(files, chance)


def flip_group_bit(data: Path, chance: Random) -> str:
    """Flip a bit in the first half of the stored progress of a group; return what was done, or ""."""
    files = [
        file
        for directory in stream_directories(data)
        for file in sorted(directory.rglob(GROUPS))
        if file.is_file()
    ]
    return _flip(files, chance)


def _flip(files: list[Path], chance: Random) -> str:
    large_files = [file for file in files if file.stat().st_size >= 512]
    if not large_files:
        return ""
    file = chance.choice(large_files)
    content = file.read_bytes()
    bit = chance.randrange(8 * len(content) // 2)
    file.write_bytes(flipped(content, bit, chance))
    return f"bit {bit} of {_named(file)} is flipped"


def cut_tail(data: Path, chance: Random) -> str:
    """Cut off up to a third of the last segment of a stream; return what was done, or ""."""
    directories = stream_directories(data)
    if not directories:
        return ""
    file = _segments(chance.choice(directories))[-1]
    size = file.stat().st_size
    gone = chance.randint(1, max(1, size // 3))
    with file.open("r+b") as opened:
        opened.truncate(size - gone)
    return f"{gone} of {size} bytes of {_named(file)} are cut off"


def remove_stream(data: Path, chance: Random) -> str:
    """Remove the directory of a stream; return what was done, or ""."""
    directories = stream_directories(data)
    if not directories:
        return ""
    directory = chance.choice(directories)
    shutil.rmtree(directory)
    return f"{directory.name} is removed"


def _named(file: Path) -> str:
    return file.as_posix().rpartition("/streams/")[2]
