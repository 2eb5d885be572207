"""Tail: lines of files that grow, pushed into a flow. A file is a stream, a line a message.

Rules:

1. The id of a line is the offset of its last byte, the newline. Ids go up, and the line after id n begins at byte
   n + 1: so the flow's position is all that has to be known. Nothing is kept here; after a restart the flow is asked.
2. A line is sent when its newline is there. An incomplete one waits.
3. Files may only grow. One that is shorter than the position, or has no newline where a line ended, fails, in words;
   the others go on.
4. A file is known by its inode, not by its name, as long as this program runs. Renamed, it goes on as the stream it
   was, and its new name is no other stream. Another file under its old name cannot be that stream too, for ids go up:
   it fails. So files are rotated to new names, never reused.
5. A file is kept open while it is followed, so what was appended before it was deleted, or moved away, is still read. A
   file that was deleted and sent whole ends its stream; one whose last line is not whole fails.
6. What cannot be read now is tried again, with longer and longer pauses, and counts as failed until it can.
7. One look at all files, in a thread, every `poll` seconds; a file is read only if it has changed. A look that takes
   long makes the next one come later, though not much.
"""

from __future__ import annotations

import asyncio
import glob
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from railgun.ingest.client import ROOM, Connector
from railgun.ingest.errors import FeedError
from railgun.ingest.ready.progress import Progress
from railgun.ingest.stream import HEADROOM
from railgun.transport.ingest_batch import LARGEST

POLL: Final = 0.5  # seconds between two looks
BLOCK: Final = (4 << 10, 256 << 10)  # bytes that are read at once: at least, and at most
LONGEST: Final = LARGEST - HEADROOM  # bytes of a line
THREADS: Final = 4
SPARE: Final = 256  # files that this program may have open besides those it follows
PAUSES: Final = (
    0.5,
    10.0,
)  # seconds until a file that cannot be read is tried again: at first, and at most
LONGEST_PAUSE: Final = 5.0  # seconds between two looks, if they take long


class TailError(FeedError):
    """A file cannot be followed (any more)."""


class Listed(NamedTuple):
    """A file, as it is found in its directory."""

    path: str
    size: int
    mtime: int
    inode: tuple[int, int]


@dataclass(slots=True)
class Look:
    """What was read of a file."""

    lines: list[tuple[int, bytes]]
    end: int  # of these lines
    size: int  # of the file
    inode: tuple[int, int]
    links: int  # names that the file has; 0: it was deleted


class File:
    """One file, as far as it is followed."""

    def __init__(self, name: str, stream: str, listed: Listed) -> None:
        self.name, self.stream = name, stream
        """Under which it was found first."""
        self.names = {name}  # all that it had
        self.now, self.path = name, listed.path  # as it is called
        self.position = 0  # where the next line begins
        self.inode = listed.inode
        self.size, self.mtime = listed.size, listed.mtime  # as far as is known
        self.looked = -1  # its size when it had no whole line more
        self.is_read = False  # whether it ever was
        self.is_replaced = False  # whether another file has its name
        self.is_in_trouble = False
        self.missed = 0  # looks that have not found it, one after the other
        self.changed = asyncio.Event()
        self.handle: FileIO | None = None
        self._lock = threading.Lock()

    def seen(self, listed: Listed) -> None:
        """What a look at the directory says of it."""
        self.size, self.mtime, self.missed = listed.size, listed.mtime, 0
        if listed.size != self.looked:
            self.changed.set()

    def may_be(self, listed: Listed) -> bool:
        """Whether a file with this inode and another name is this one. Inodes are used again, unless they are open."""
        return self.handle is not None or (self.size, self.mtime) == (listed.size, listed.mtime)

    def look(self, block: int, keep_open: bool) -> Look:
        """Read some lines; called in a thread."""
        with self._lock:
            if self.handle is None:
                self.handle = FileIO(self.path)
            try:
                inode = self.inode if self.is_read else None
                found = read(self.handle, self.path, self.position, block, inode)
            except OSError:
                keep_open = False
                raise
            finally:
                if not keep_open:
                    self._close()
            return found

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None


def read(file: FileIO, path: str, position: int, block: int, inode: tuple[int, int] | None) -> Look:
    """Whole lines from a position on, about so many bytes."""
    # With the newline before, which tells whether this is still the file that was read.
    begin = max(0, position - 1)
    told = os.fstat(file.fileno())
    known = (told.st_dev, told.st_ino)
    if inode is not None and known != inode:
        raise _replaced(path)
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
    return Look(lines, at, told.st_size, known, told.st_nlink)


def _replaced(path: str) -> TailError:
    return TailError(
        f"{path} is another file now: its lines are not sent, for the stream of this name is that of the first one. "
        "Rotate files to new names, and follow them with a pattern"
    )


def _may_be_open() -> int:
    """How many files may be kept open."""
    if os.name != "posix":  # an open file cannot be renamed or deleted there
        return 0
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - SPARE


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
        on_warning: Callable[[str, str], None] | None = None,
    ) -> None:
        self.connector = connector
        self.path = Path(path)
        self.pattern = pattern
        self.prefix = prefix
        self.once = once
        self.poll = poll
        self.progress = progress or Progress()
        self.files: dict[str, File] = {}
        """By the names under which they were found first, which are those of streams."""
        self.unfinished: list[str] = []
        """Of a run with `once`: files whose last line is not complete; it was not sent."""
        self._on_error, self._on_warning = on_error, on_warning
        self._inodes: dict[tuple[int, int], File] = {}
        self._open: set[File] = set()
        self._may_be_open = _may_be_open()
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
            for file in self.files.values():
                file.close()

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
        links: dict[str, Listed] = {}  # after what they may point to
        for path, name in paths:
            try:
                told = os.lstat(path)
                is_link = stat.S_ISLNK(told.st_mode)
                if is_link:
                    told = os.stat(path)
            except OSError as error:  # gone since, or not there yet
                if self.once and path == str(self.path):
                    raise TailError(f"{path} cannot be read: {error.strerror}") from error
                continue
            if stat.S_ISREG(told.st_mode):
                inode = (told.st_dev, told.st_ino)
                (links if is_link else found)[name] = Listed(
                    path, told.st_size, told.st_mtime_ns, inode
                )
        return {**found, **links}

    def _update(self, found: dict[str, Listed]) -> None:
        here = set()
        for name, listed in found.items():
            file = self._inodes.get(listed.inode)
            if file is None or not (file.now == name or file in here or file.may_be(listed)):
                file = self.files.get(name)
                if file is None:
                    file = self._begin(name, listed)
                elif file.is_read:
                    self._fail(file, _replaced(listed.path), file.is_replaced)
                    file.is_replaced = True
                    continue
                self._identify(file, listed.inode)
            here.add(file)
            file.seen(listed)
            if name != file.now:
                self._rename(file, name, found)
        for name, file in list(self.files.items()):
            if file not in here:  # deleted, or moved away
                file.missed += 1
                file.changed.set()
                if name not in found and self._tasks[name].done():
                    # One of this name that comes later is another.
                    self._forget(file)
                    del self.files[name], self._tasks[name]
                    self.progress.streams -= 1

    def _begin(self, name: str, listed: Listed) -> File:
        file = self.files[name] = File(name, self.prefix + Path(name).as_posix(), listed)
        self.progress.streams += 1
        self._tasks[name] = asyncio.get_running_loop().create_task(self._follow(file))
        return file

    def _identify(self, file: File, inode: tuple[int, int]) -> None:
        if self._inodes.get(file.inode) is file:
            del self._inodes[file.inode]
        file.inode = inode
        self._inodes[inode] = file

    def _forget(self, file: File) -> None:
        """Let go of a file; its inode may become another's."""
        file.close()
        self._open.discard(file)
        if self._inodes.get(file.inode) is file:
            del self._inodes[file.inode]

    def _rename(self, file: File, name: str, found: dict[str, Listed]) -> None:
        """A file that is followed has another name, too or instead."""
        before = found.get(file.now)
        if before is None or before.inode != file.inode:
            file.now, file.path = name, found[name].path
            file.changed.set()
        if name not in file.names:
            file.names.add(name)
            if self._on_warning is not None:
                self._on_warning(
                    file.stream,
                    f"{found[name].path} is the same file: its lines are sent as those of {file.stream!r}, and not of "
                    "another stream",
                )

    def _fail(self, file: File, error: Exception, is_known: bool = False) -> None:
        """A file's lines cannot be sent, or not all."""
        if not is_known:
            self.progress.failed.setdefault(file.stream, str(error))
            if self._on_error is not None:
                self._on_error(file.stream, error)

    async def _follow(self, file: File) -> None:
        try:
            await self.connector.feed(file.stream, lambda por: self._lines(file, por))
        except (FeedError, OSError) as error:
            if self.connector.error is not None:
                raise self.connector.error from None
            if isinstance(error, OSError):
                error = _unread(file, error)
            self._fail(file, error, file.is_replaced)
        else:
            self._forget(file)

    async def _read(self, file: File) -> Look:
        """Some lines of a file; as soon as it can be read."""
        loop = asyncio.get_running_loop()
        pause = PAUSES[0]
        while True:
            block = max(BLOCK[0], min(BLOCK[1], ROOM // len(self.files)))
            keep_open = file in self._open or len(self._open) < self._may_be_open
            if keep_open:
                self._open.add(file)
            try:
                look = await loop.run_in_executor(self._threads, file.look, block, keep_open)
            except FileNotFoundError:
                raise
            except OSError as error:
                self._open.discard(file)
                if self.once:
                    raise
                self._fail(file, _unread(file, error), file.is_in_trouble)
                file.is_in_trouble = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
                continue
            if file.is_in_trouble:
                file.is_in_trouble = False
                if not file.is_replaced:
                    del self.progress.failed[file.stream]
            if not file.is_read:
                file.is_read = True
                self._identify(file, look.inode)
            file.size = look.size
            return look

    async def _lines(self, file: File, por: int | None) -> AsyncIterator[list[Any]]:
        """The lines of a file after an id."""
        self.progress.again(file.stream, por)
        file.position = 0 if por is None else por + 1
        enough = file.size if self.once else None  # what is there now
        while True:
            file.changed.clear()
            try:
                look = await self._read(file)
                is_there = look.links > 0
            except FileNotFoundError:  # and it was not kept open
                if file.missed < 2 and not self.once:  # a look may miss what is renamed meanwhile
                    await file.changed.wait()
                    continue
                look, is_there = None, False
            if look is not None and look.lines:
                file.position = look.end
                self.progress.took(file.stream, look.lines[-1][0], len(look.lines))
                yield look.lines
                if enough is not None and file.position >= enough:
                    return
                continue
            if not is_there:
                if file.position >= file.size:
                    return  # it was sent whole
                raise TailError(
                    f"{file.path} was deleted before all of it was sent: it is missing from byte {file.position:,} on"
                )
            file.looked = file.size
            if self.once:
                if file.position < file.size:
                    self.unfinished.append(file.stream)
                return
            await file.changed.wait()


def _unread(file: File, error: OSError) -> TailError:
    return TailError(f"{file.path} cannot be read: {error.strerror or error}")
