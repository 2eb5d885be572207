"""Push the lines of growing files into a flow. A file is a stream, a line a message.

Rules:

1. The id of a line is the offset of its last byte, the newline. Ids increase, and the line after id n begins at byte
   n + 1: so the flow's position is all that must be known. Nothing is kept here; after a restart the flow is queried.
2. A line is sent when its newline has been written. An incomplete line waits.
3. Files may only grow. A file that is shorter than the position, or has no newline where a line ended, fails with an
   error text; the others continue.
4. A file is identified by its inode, not by its name, as long as this program runs. A renamed file continues as its old
   stream, and its new name makes no new stream. Another file under the old name cannot be that stream too, for ids
   increase: it fails. So rotate files to new names, and never reuse names.
5. A file is kept open while it is followed, so lines appended before it was deleted, or moved away, are still read. A
   file that was deleted and sent completely ends its stream; a deleted file with an incomplete last line fails.
6. A file that cannot be read is retried, with growing pauses, and counts as failed until it can be read.
7. One scan in a thread lists all files every `poll` seconds; a file is read only if it has changed. A scan that takes
   long delays the next one, within limits.
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

from railgun.ingest.client import READ_AHEAD_BYTES, Connector
from railgun.ingest.errors import FeedError
from railgun.ingest.ready.progress import Progress
from railgun.ingest.stream import FRAME_HEADROOM_BYTES
from railgun.transport.ingest_batch import LARGEST

POLL_S: Final = 0.5  # between two scans
BLOCK_BYTES: Final = (4 << 10, 256 << 10)  # read at once: at least, and at most
MAX_LINE_BYTES: Final = LARGEST - FRAME_HEADROOM_BYTES
READ_THREADS: Final = 4
SPARE_FILES: Final = 256  # open files that are left to the program, besides those it follows
RETRY_PAUSES_S: Final = (0.5, 10.0)  # for a file that cannot be read: at first, and at most
MAX_POLL_S: Final = 5.0  # between two scans, if they take long


class TailError(FeedError):
    """A file cannot be followed, or no longer."""


class Listed(NamedTuple):
    """A file as a scan finds it in its directory."""

    path: str
    size: int
    mtime: int
    inode: tuple[int, int]


@dataclass(slots=True)
class ReadResult:
    """The lines that one read of a file returned, and the state of the file."""

    lines: list[tuple[int, bytes]]  # ids, and lines without their newlines
    end: int  # the offset behind these lines
    size: int  # of the file
    inode: tuple[int, int]
    links: int  # the number of the file's names; 0: it was deleted


class File:
    """A file that is followed."""

    def __init__(self, name: str, stream: str, listed: Listed) -> None:
        self.name, self.stream = name, stream
        """The name under which the file was found first, and its stream."""
        self.names = {name}  # all names it has had
        self.now, self.path = name, listed.path  # its current name and path
        self.position = 0  # where the next line begins
        self.inode = listed.inode
        self.size, self.mtime = listed.size, listed.mtime  # at the last scan or read
        self.looked = -1  # its size when it last had no further complete line
        self.is_read = False  # whether it was ever read
        self.is_replaced = False  # whether another file has its name
        self.is_in_trouble = False  # whether the last attempt to read it failed
        self.missed = 0  # the number of scans in a row that have not found it
        self.changed = asyncio.Event()
        self.handle: FileIO | None = None
        self._lock = threading.Lock()

    def seen(self, listed: Listed) -> None:
        """Take over what a scan of the directory has found."""
        self.size, self.mtime, self.missed = listed.size, listed.mtime, 0
        if listed.size != self.looked:
            self.changed.set()

    def may_be(self, listed: Listed) -> bool:
        """Return whether a file with this inode and another name is this file. Inodes of closed files are reused."""
        return self.handle is not None or (self.size, self.mtime) == (listed.size, listed.mtime)

    def look(self, block: int, keep_open: bool) -> ReadResult:
        """Read about `block` bytes of lines; called in a thread. The file stays open if `keep_open`."""
        with self._lock:
            if self.handle is None:
                self.handle = FileIO(self.path)
            try:
                inode = self.inode if self.is_read else None
                result = read(self.handle, self.path, self.position, block, inode)
            except OSError:
                keep_open = False
                raise
            finally:
                if not keep_open:
                    self._close()
            return result

    def close(self) -> None:
        """Close the file, if it is open."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None


def read(
    file: FileIO, path: str, position: int, block: int, inode: tuple[int, int] | None
) -> ReadResult:
    """Read complete lines from `position` on, about `block` bytes; always at least one line if there is one.

    Raises `TailError` if the file was replaced (it has not this `inode`), truncated, or has too long a line.
    """
    # Read the newline before the position too: it shows whether this is still the same file.
    begin = max(0, position - 1)
    status = os.fstat(file.fileno())
    file_id = (status.st_dev, status.st_ino)
    if inode is not None and file_id != inode:
        raise _replaced(path)
    if status.st_size < position:
        raise TailError(
            f"{path} has {status.st_size:,} bytes, but {position:,} were sent: it was truncated or replaced. Files "
            "that are followed may only grow"
        )
    file.seek(begin)
    data = b""
    while True:
        piece = file.read(max(block, len(data)))
        data += piece
        end = data.rfind(b"\n") + 1
        if end > position - begin or not piece or len(data) > MAX_LINE_BYTES + 1:
            break
    if position and data[:1] != b"\n":
        raise TailError(
            f"{path} has no end of a line at byte {begin:,}, where one was sent: it was replaced by another file"
        )
    rest = data[position - begin : end]
    if not rest and len(data) - (position - begin) > MAX_LINE_BYTES:
        raise TailError(
            f"{path}: the line at byte {position:,} has more than {MAX_LINE_BYTES:,} bytes"
        )
    lines = []
    at = position
    for line in rest.split(b"\n")[:-1]:
        at += len(line) + 1
        lines.append((at - 1, line[:-1] if line[-1:] == b"\r" else line))
    return ReadResult(lines, at, status.st_size, file_id, status.st_nlink)


def _replaced(path: str) -> TailError:
    return TailError(
        f"{path} is another file now: its lines are not sent, for the stream of this name is that of the first one. "
        "Rotate files to new names, and follow them with a pattern"
    )


def _may_be_open() -> int:
    """Return how many files may be kept open."""
    if os.name != "posix":  # an open file cannot be renamed or deleted there
        return 0
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - SPARE_FILES


class Tail:
    """A connector that follows a file, or the files of a directory that match a pattern.

    `prefix` precedes the names of streams. `once`: `run` returns when all lines that exist now are acknowledged.
    `on_error` is called with a stream and why it failed, `on_warning` with a stream and a text.
    """

    def __init__(
        self,
        connector: Connector,
        path: str | os.PathLike[str],
        pattern: str = "*",
        *,
        prefix: str = "",
        once: bool = False,
        poll: float = POLL_S,
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
        """Files by the name under which they were found first, which names the stream."""
        self.unfinished: list[str] = []
        """With `once`: streams whose file has an incomplete last line, which was not sent."""
        self._on_error, self._on_warning = on_error, on_warning
        self._inodes: dict[tuple[int, int], File] = {}
        self._open: set[File] = set()
        self._may_be_open = _may_be_open()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(READ_THREADS, "railgun-tail")
        self._looking = ThreadPoolExecutor(
            1, "railgun-look"
        )  # scans must not wait for thousands of reads

    async def run(self) -> None:
        """Follow existing and new files for ever; with `once`, only the existing ones until they are acknowledged."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                listed, took = await loop.run_in_executor(self._looking, self._look)
                self._update(listed)
                if self.once:
                    await asyncio.gather(*self._tasks.values())
                    return
                await self._pause(max(self.poll, min(10 * took, MAX_POLL_S)))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._looking.shutdown(wait=False, cancel_futures=True)
            for file in self.files.values():
                file.close()

    async def _pause(self, seconds: float) -> None:
        """Sleep until the next scan; raise the error of a task that ends the program."""
        done = [task for task in self._tasks.values() if task.done()]
        for task in done:
            task.result()
        await asyncio.sleep(seconds)

    def _look(self) -> tuple[dict[str, Listed], float]:
        """Return the files by name, and the CPU seconds it took to list them."""
        begun = time.thread_time()
        return self._list(), time.thread_time() - begun

    def _list(self) -> dict[str, Listed]:
        """Return the files by name; symbolic links come last."""
        paths = [(str(self.path), self.path.name)]
        if self.path.is_dir():  # names as text, not paths: there may be many
            names = sorted(glob.iglob(self.pattern, root_dir=self.path, recursive=True))
            paths = [(os.path.join(self.path, name), name) for name in names]
        files: dict[str, Listed] = {}
        links: dict[str, Listed] = {}  # listed after the files they may point to
        for path, name in paths:
            try:
                status = os.lstat(path)
                is_link = stat.S_ISLNK(status.st_mode)
                if is_link:
                    status = os.stat(path)
            except OSError as error:  # deleted meanwhile, or not created yet
                if self.once and path == str(self.path):
                    raise TailError(f"{path} cannot be read: {error.strerror}") from error
                continue
            if stat.S_ISREG(status.st_mode):
                inode = (status.st_dev, status.st_ino)
                (links if is_link else files)[name] = Listed(
                    path, status.st_size, status.st_mtime_ns, inode
                )
        return {**files, **links}

    def _update(self, listing: dict[str, Listed]) -> None:
        here = set()
        for name, listed in listing.items():
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
                self._rename(file, name, listing)
        for name, file in list(self.files.items()):
            if file not in here:  # deleted, or moved away
                file.missed += 1
                file.changed.set()
                if name not in listing and self._tasks[name].done():
                    # A file of this name that appears later is another file.
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
        """Close a file, and forget its inode, which another file may get."""
        file.close()
        self._open.discard(file)
        if self._inodes.get(file.inode) is file:
            del self._inodes[file.inode]

    def _rename(self, file: File, name: str, listing: dict[str, Listed]) -> None:
        """Note another name of a file that is followed, and warn: it may be an additional or a new name."""
        before = listing.get(file.now)
        if before is None or before.inode != file.inode:
            file.now, file.path = name, listing[name].path
            file.changed.set()
        if name not in file.names:
            file.names.add(name)
            if self._on_warning is not None:
                self._on_warning(
                    file.stream,
                    f"{listing[name].path} is the same file: its lines are sent as those of {file.stream!r}, and not "
                    "of another stream",
                )

    def _fail(self, file: File, error: Exception, is_known: bool = False) -> None:
        """Record and report that the lines of a file cannot be sent, or not all, unless that `is_known`."""
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

    async def _read(self, file: File) -> ReadResult:
        """Read lines of a file, retrying until it can be read. Raises `FileNotFoundError` if it was deleted."""
        loop = asyncio.get_running_loop()
        pause = RETRY_PAUSES_S[0]
        while True:
            block = max(BLOCK_BYTES[0], min(BLOCK_BYTES[1], READ_AHEAD_BYTES // len(self.files)))
            keep_open = file in self._open or len(self._open) < self._may_be_open
            if keep_open:
                self._open.add(file)
            try:
                result = await loop.run_in_executor(self._threads, file.look, block, keep_open)
            except FileNotFoundError:
                raise
            except OSError as error:
                self._open.discard(file)
                if self.once:
                    raise
                self._fail(file, _unread(file, error), file.is_in_trouble)
                file.is_in_trouble = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_PAUSES_S[1])
                continue
            if file.is_in_trouble:
                file.is_in_trouble = False
                if not file.is_replaced:
                    del self.progress.failed[file.stream]
            if not file.is_read:
                file.is_read = True
                self._identify(file, result.inode)
            file.size = result.size
            return result

    async def _lines(self, file: File, por: int | None) -> AsyncIterator[list[Any]]:
        """Yield the lines of a file after an id, until it is deleted; with `once`, until its present end."""
        self.progress.again(file.stream, por)
        file.position = 0 if por is None else por + 1
        stop_at = file.size if self.once else None  # the present end of the file
        while True:
            file.changed.clear()
            try:
                result = await self._read(file)
                is_there = result.links > 0
            except FileNotFoundError:  # it was deleted, and not kept open
                if file.missed < 2 and not self.once:  # a scan may miss a file renamed meanwhile
                    await file.changed.wait()
                    continue
                result, is_there = None, False
            if result is not None and result.lines:
                file.position = result.end
                self.progress.took(file.stream, result.lines[-1][0], len(result.lines))
                yield result.lines
                if stop_at is not None and file.position >= stop_at:
                    return
                continue
            if not is_there:
                if file.position >= file.size:
                    return  # it was sent completely
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
