"""Group commit: many publishers, one write and one sync.

Rules:

1. What is submitted to a log is committed in the order of submission. A log is committed by one thread at a time;
   several logs by several threads.
2. A thread takes all that waits for a log (up to `most_bytes`, or what a segment holds; at least one), appends it in
   one write, and syncs once. What comes meanwhile is the next group: the slower the disk, the larger the groups.
3. Only then `done(None)` is called for each, in order; or with the error, which reaches all of the group. A batch that
   does not fit in the log (`OrderError`, `BatchError`) is its submitter's own error: the others are taken without it.
4. When a write of a group has failed, so does every stamped batch that was submitted before its submitter could hear of
   that: nothing is in the log that was sent behind something that is not.
5. With a `Stamp`, offsets, epoch and time are written into the batches here, just before they are appended, and can be
   read from them in `done`. So if a disk is full, those who come later get the offsets that were not used. Without one,
   whoever has given offsets has to give them anew after an error.
6. `run` is called once a group, from the thread, with a function that calls all of its `done`; a node gives
   `loop.call_soon_threadsafe`. An error in a `done` is logged, and hinders nobody.
7. `close` takes nothing more, and returns when all that was submitted is done. The logs stay open.
8. `perform` is for other work of the one writer of a log, as to roll or close it: it stands in the same line, and is
   done alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from railgun.broker.errors import ClosedError, LogFailedError, OrderError
from railgun.broker.log.log import StreamLog
from railgun.errors import RailgunError
from railgun.transport.records import BatchError, head

Done = Callable[[RailgunError | None], None]
_LOG: Final = logging.getLogger(__name__)


class Log(Protocol):
    """What can be committed to: a `StreamLog`, a `GroupLog`."""

    def append(self, batches: Sequence[Any], /) -> Any:
        """Write all of these or none."""
        ...

    def sync(self) -> Any:
        """Let them be there for good."""
        ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is written into batches besides their offsets."""

    epoch: int
    now: int


@dataclass(eq=False, slots=True)
class _Job:
    batches: Sequence[Any]
    done: Done
    stamp: Stamp | None
    size: int
    work: Callable[[], object] | None = None
    cold: bool = False
    known: int = 0
    """Failed groups of its log that its submitter could know of."""


@dataclass(slots=True)
class _Failures:
    """Groups of a log that have failed: how many, how many of them submitters were told of, and the last error."""

    count: int = 0
    told: int = 0
    error: RailgunError | None = None


@dataclass(eq=False, slots=True)
class _Line:
    """What waits for one log."""

    log: Log
    failures: _Failures
    jobs: deque[_Job] = field(default_factory=deque)


class Committer:
    """See the rules of the module.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> from railgun.transport.records import build
    >>> log, _ = StreamLog.open(NodeDisk(tempfile.mkdtemp()), "orders")
    >>> committer, told = Committer(), []
    >>> for payload in (b"a", b"b"):
    ...     committer.submit(log, [build([payload])], told.append, Stamp(epoch=1, now=1_000))
    >>> committer.close()
    >>> told, log.durable_end
    ([None, None], 2)
    >>> log.close()
    """

    def __init__(
        self,
        threads: int = 2,
        run: Callable[[Callable[[], None]], object] | None = None,
        most_bytes: int = 16 << 20,
    ) -> None:
        self._run = run
        self._most = most_bytes
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}  # by the id of the log, which the line keeps alive
        self._failures: WeakKeyDictionary[Log, _Failures] = WeakKeyDictionary()
        self._ready: SimpleQueue[_Line | None] = (
            SimpleQueue()
        )  # a thread awakes sooner than by a condition
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"railgun-commit-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        log: Log,
        batches: Sequence[Any],
        done: Done,
        stamp: Stamp | None = None,
        *,
        cold: bool = False,
    ) -> None:
        """Commit these as soon as may be; `done` is called once, with None or what went wrong.

        `cold`, of batches of a stream: nobody will soon read them.
        """
        self._line_up(log, _Job(batches, done, stamp, sum(map(len, batches)), None, cold))

    def perform(self, log: Log, work: Callable[[], object], done: Done) -> None:
        """Do this when all that was submitted for the log before is done, and nobody else writes to it."""
        self._line_up(log, _Job((), done, None, 0, work))

    def _line_up(self, log: Log, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the committer is closed: the node is about to end")
            line = self._lines.get(id(log))
            if line is not None:
                job.known = line.failures.told
                line.jobs.append(job)
                return
            failures = self._failures.get(log) or _Failures()
            job.known = failures.told
            line = self._lines[id(log)] = _Line(log, failures)
            line.jobs.append(job)
        self._ready.put(line)

    def close(self) -> None:
        """Take nothing more, and wait until all is done. May be called again, and by several threads."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first and not self._lines:
                self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _end(self) -> None:
        for _ in self._threads:
            self._ready.put(None)

    def _work(self) -> None:
        while (line := self._ready.get()) is not None:
            with self._lock:
                jobs = self._take(line)
            count, error = line.failures.count, line.failures.error
            behind = [job for job in jobs if job.stamp is not None and job.known < count]
            told = [(job.done, error) for job in behind]
            if left := [job for job in jobs if job not in behind] if behind else jobs:
                told += self._commit(line, left)
            self._tell(told, line.failures)
            with self._lock:
                if line.jobs:
                    self._ready.put(line)
                    continue
                del self._lines[id(line.log)]
                if self._closed and not self._lines:
                    self._end()

    def _take(self, line: _Line) -> list[_Job]:
        jobs = [line.jobs.popleft()]
        size = jobs[0].size
        if jobs[0].work is not None:
            return jobs
        most = self._most
        if isinstance(line.log, StreamLog):  # what is written at once lies in one segment
            most = min(most, line.log.roll_bytes)
        while line.jobs and not line.jobs[0].work and size + line.jobs[0].size <= most:
            job = line.jobs.popleft()
            jobs.append(job)
            size += job.size
        return jobs

    def _failed(self, line: _Line, error: RailgunError) -> None:
        """Note that a group has failed, for those that are behind it."""
        line.failures.count += 1
        line.failures.error = error
        with self._lock:
            self._failures[line.log] = line.failures

    def _commit(self, line: _Line, jobs: list[_Job]) -> list[tuple[Done, RailgunError | None]]:
        log = line.log
        try:
            if (work := jobs[0].work) is not None:
                work()
                return [(jobs[0].done, None)]
            alone = self._append(log, jobs)
            for error in alone.values():
                if not isinstance(error, OrderError | BatchError):
                    self._failed(line, error)
                    break
            log.sync()
        except RailgunError as error:
            if jobs[0].work is None:
                self._failed(line, error)
            return [(job.done, error) for job in jobs]
        except Exception as error:  # a bug, but nobody may wait for ever
            _LOG.exception("a commit has failed in a way nobody has thought of")
            failed = LogFailedError(f"a commit has failed: {error!r}. This is an error of Railgun.")
            self._failed(line, failed)
            return [(job.done, failed) for job in jobs]
        return [(job.done, alone.get(n)) for n, job in enumerate(jobs)]

    def _append(self, log: Log, jobs: list[_Job]) -> dict[int, RailgunError]:
        """Append all at once; if some do not fit, one by one. Those that did not, by their number."""
        if len(jobs) > 1:
            try:
                if any(job.stamp is not None for job in jobs):
                    base = log.end if isinstance(log, StreamLog) else 0
                    for job in jobs:
                        base = _stamp(log, job, base)
                _write(log, [batch for job in jobs for batch in job.batches], jobs)
                return {}
            except (OrderError, BatchError):
                pass  # nothing was written
        wrong: dict[int, RailgunError] = {}
        for n, job in enumerate(jobs):
            try:
                _stamp(log, job, log.end if isinstance(log, StreamLog) else 0)
                _write(log, job.batches, [job])
            except (OrderError, BatchError) as error:
                wrong[n] = error
            except RailgunError as error:  # those before it are written, and will be synced
                wrong.update(dict.fromkeys(range(n, len(jobs)), error))
                break
        return wrong

    def _tell(self, told: list[tuple[Done, RailgunError | None]], failures: _Failures) -> None:
        count = failures.count

        def tell() -> None:
            failures.told = count  # what is submitted from now on is submitted by who knows
            for done, error in told:
                try:
                    done(error)
                except Exception:
                    _LOG.exception("what was to be done after a commit has failed")

        if self._run is None:
            tell()
            return
        try:
            self._run(tell)
        except Exception:  # the loop is closed: nobody is there to be told
            _LOG.exception("nobody could be told of %d commits", len(told))


def _write(log: Log, batches: Sequence[Any], jobs: Sequence[_Job]) -> None:
    """Append what these are about."""
    if isinstance(log, StreamLog):
        log.append(batches, all(job.cold for job in jobs))
    else:
        log.append(batches)


def _stamp(log: Log, job: _Job, base: int) -> int:
    """Stamp the batches of a job, if they are to be; the offset after them."""
    if job.stamp is not None:
        assert isinstance(log, StreamLog), "only batches of a stream are stamped"
        return log.stamp(job.batches, job.stamp.epoch, job.stamp.now, base)
    if isinstance(log, StreamLog):
        return base + sum(head(batch).count for batch in job.batches)
    return base
