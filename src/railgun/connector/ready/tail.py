"""Tail: lines of files that grow, pushed into a flow. A file is a stream, a line a message.

Rules:

1. The id of a line is the offset of its last byte, the newline. Ids go up, and the line after id n begins at byte
   n + 1: so the flow's position is all that has to be known. Nothing is kept here; after a restart the flow is asked.
2. A line is sent when its newline is there. An incomplete one waits.
3. Files may only grow. One that is shorter than the position, has no newline where a line ended, or is another file
   than before (its inode), fails, in words; the others go on. So files are rotated to new names, never reused.
4. A file that was deleted after it was sent whole ends its stream.
5. One look at all files, in a thread, every `poll` seconds; a file is read only if it has changed. A look that takes
   long makes the next one come later, though not much.
"""

from __future__ import annotations

import asyncio
import glob
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from railgun.connector.client import ROOM, Connector
from railgun.connector.errors import FeedError
from railgun.connector.ready.progress import Progress
from railgun.connector.stream import HEADROOM
from railgun.wire.outside import LARGEST

POLL: Final = 0.5  # seconds between two looks
BLOCK: Final = (4 << 10, 256 << 10)  # bytes that are read at once: at least, and at most
LONGEST: Final = LARGEST - HEADROOM  # bytes of a line
THREADS: Final = 4
LONGEST_PAUSE: Final = 5.0  # seconds between two looks, if they take long


class TailError(FeedError):
    """A file cannot be followed (any more)."""


class Listed(NamedTuple):
    """A file, as it is found in its directory."""

    path: str
    size: int
    inode: tuple[int, int]


@dataclass(slots=True)
class Look:
    """What was read of a file."""

    lines: list[tuple[int, bytes]]
    end: int  # of these lines
    size: int  # of the file
    inode: tuple[int, int]


class File:
    """One file, as far as it is followed."""

    def __init__(self, path: Path, stream: str) -> None:
        self.path, self.stream = path, stream
        self.position = 0  # where the next line begins
        self.inode: tuple[int, int] | None = None  # once it was read
        self.size = 0  # as far as is known
        self.looked = -1  # its size when it had no whole line more
        self.changed = asyncio.Event()

    def seen(self, size: int, inode: tuple[int, int]) -> None:
        """What a look at the directory says of it."""
        if size != self.looked or inode != self.inode:
            self.size = size
            self.changed.set()


def read(path: Path, position: int, block: int, inode: tuple[int, int] | None) -> Look:
    """Whole lines from a position on, about so many bytes."""
    begin = max(
        0, position - 1
    )  # with the newline before, which tells whether this is still the file that was read
    with open(path, "rb", buffering=0) as file:
        told = os.fstat(file.fileno())
        known = (told.st_dev, told.st_ino)
        if inode is not None and known != inode:
            raise TailError(
                f"{path} was replaced by another file; what was left of the first one is not sent. Rotate files to "
                "new names, and follow them with a pattern"
            )
        if told.st_size < position:
            raise TailError(
                f"{path} has {told.st_size:,} bytes, but {position:,} were sent: it was truncated or replaced. Files "
                "that are followed may only grow"
            )
        file.seek(begin)
        data = b""
        while True:
            piece = file.read(max(block, len(data)))
            data += piece
            end = data.rfind(b"\n") + 1
            if end > position - begin or not piece or len(data) > LONGEST + 1:
                break
    if position and data[:1] != b"\n":
        raise TailError(
            f"{path} has no end of a line at byte {begin:,}, where one was sent: it was replaced by another file"
        )
    rest = data[position - begin : end]
    if not rest and len(data) - (position - begin) > LONGEST:
        raise TailError(f"{path}: the line at byte {position:,} has more than {LONGEST:,} bytes")
    lines = []
    at = position
    for line in rest.split(b"\n")[:-1]:
        at += len(line) + 1
        lines.append((at - 1, line[:-1] if line[-1:] == b"\r" else line))
    return Look(lines, at, told.st_size, known)


class Tail:
    """Follows a file, or the files of a directory that match a pattern.

    `prefix` stands before the names of streams. `once`: `run` returns when all that is there now is acknowledged.
    """

    def __init__(
        self,
        connector: Connector,
        path: str | os.PathLike[str],
        pattern: str = "*",
        *,
        prefix: str = "",
        once: bool = False,
        poll: float = POLL,
        progress: Progress | None = None,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.connector = connector
        self.path = Path(path)
        self.pattern = pattern
        self.prefix = prefix
        self.once = once
        self.poll = poll
        self.progress = progress or Progress()
        self.files: dict[str, File] = {}
        self.unfinished: list[str] = []
        """Of a run with `once`: files whose last line is not complete; it was not sent."""
        self._on_error = on_error
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "railgun-tail")
        self._looking = ThreadPoolExecutor(1, "railgun-look")  # not behind thousands of reads

    async def run(self) -> None:
        """Follow what there is and what comes, for ever; or, with `once`, what there is."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                found, took = await loop.run_in_executor(self._looking, self._look)
                self._update(found)
                if self.once:
                    await asyncio.gather(*self._tasks.values())
                    return
                await self._pause(max(self.poll, min(10 * took, LONGEST_PAUSE)))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._looking.shutdown(wait=False, cancel_futures=True)

    async def _pause(self, seconds: float) -> None:
        """Until the next look, or something that ends everything."""
        done = [task for task in self._tasks.values() if task.done()]
        for task in done:
            task.result()
        await asyncio.sleep(seconds)

    def _look(self) -> tuple[dict[str, Listed], float]:
        """The files there are, and the processor's seconds it took to find them."""
        begun = time.thread_time()
        return self._list(), time.thread_time() - begun

    def _list(self) -> dict[str, Listed]:
        """The files there are."""
        paths = [(str(self.path), self.path.name)]
        if self.path.is_dir():  # names as text: there may be many, and none is hidden
            names = sorted(glob.iglob(self.pattern, root_dir=self.path, recursive=True))
            paths = [(os.path.join(self.path, name), name) for name in names]
        found: dict[str, Listed] = {}
        for path, name in paths:
            try:
                told = os.stat(path)
            except OSError as error:  # gone since, or not there yet
                if self.once and path == str(self.path):
                    raise TailError(f"{path} cannot be read: {error.strerror}") from error
                continue
            if stat.S_ISREG(told.st_mode):
                found[name] = Listed(path, told.st_size, (told.st_dev, told.st_ino))
        return found

    def _update(self, found: dict[str, Listed]) -> None:
        for name, (path, size, inode) in found.items():
            file = self.files.get(name)
            if file is None:
                file = self.files[name] = File(Path(path), self.prefix + Path(name).as_posix())
                self.progress.streams += 1
                self._tasks[name] = asyncio.get_running_loop().create_task(self._follow(file))
            file.seen(size, inode)
        for name in self.files.keys() - found.keys():
            self.files[name].changed.set()
            if self._tasks[name].done():  # one of this name that comes later is another
                del self.files[name], self._tasks[name]
                self.progress.streams -= 1

    async def _follow(self, file: File) -> None:
        try:
            await self.connector.feed(file.stream, lambda por: self._lines(file, por))
        except (FeedError, OSError) as error:
            if self.connector.error is not None:
                raise self.connector.error from None
            told: Exception = error
            if isinstance(error, OSError):
                told = TailError(f"{file.path} cannot be read: {error.strerror or error}")
            self.progress.failed[file.stream] = str(told)
            if self._on_error is not None:
                self._on_error(file.stream, told)

    async def _lines(self, file: File, por: int | None) -> AsyncIterator[list[Any]]:
        """The lines of a file after an id."""
        loop = asyncio.get_running_loop()
        self.progress.again(file.stream, por)
        file.position = 0 if por is None else por + 1
        enough = file.size if self.once else None  # what is there now
        while True:
            file.changed.clear()
            block = max(BLOCK[0], min(BLOCK[1], ROOM // len(self.files)))
            try:
                look = await loop.run_in_executor(
                    self._threads, read, file.path, file.position, block, file.inode
                )
            except FileNotFoundError:
                if file.position == file.size:
                    return  # it was sent whole
                raise TailError(
                    f"{file.path} was deleted before all of it was sent: it is missing from byte {file.position:,} on"
                ) from None
            file.inode, file.size = look.inode, look.size
            if look.lines:
                file.position = look.end
                self.progress.took(file.stream, look.lines[-1][0], len(look.lines))
                yield look.lines
                if enough is not None and file.position >= enough:
                    return
                continue
            file.looked = look.size
            if self.once:
                if file.position < look.size:
                    self.unfinished.append(file.stream)
                return
            await file.changed.wait()
