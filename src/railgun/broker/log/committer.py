"""Group commit: write and sync the batches of many publishers at once.

Rules:

1. Jobs of one log are committed in the order in which they were submitted. One thread at a time commits to a log;
   several logs are committed by several threads.
2. A thread takes all jobs that wait for a log (up to `max_bytes`, or what a segment holds; at least one), appends them
   in one write, and syncs once. Jobs that come meanwhile form the next group: the slower the disk, the larger the
   groups.
3. Only then `done(None)` is called for each job, in order; or `done` with the error, which reaches all jobs of the
   group. A batch that does not fit in the log (`OrderError`, `BatchError`) is the error of its own job: the others are
   written without it.
4. When a write of a group has failed, every stamped batch fails that was submitted before its submitter could hear of
   the failure: so the log has no batch that was sent after a missing one.
5. With a `Stamp`, the committer writes offsets, epoch and time into the batches just before they are appended; `done`
   can read them from the batches. So when a disk is full, later batches get the offsets that were not used. Without a
   stamp, the caller sets the offsets, and has to set them anew after an error.
6. `run` is called once a group, from the thread, with a function that calls all `done` of the group; a node passes
   `loop.call_soon_threadsafe`. An exception in a `done` is logged, and the others are called nevertheless.
7. `close` takes no more jobs, and returns when all submitted jobs are done. The logs stay open.
8. `perform` runs other work of the one writer of a log, such as rolling or closing it: the work takes its turn among
   the jobs of the log, and runs alone.
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
    """A log that can be committed to: a `StreamLog` or a `GroupLog`."""

    def append(self, batches: Sequence[Any], /) -> Any:
        """Write all of these batches, or none."""
        ...

    def sync(self) -> Any:
        """Make the appended batches durable."""
        ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """Values to write into batches besides their offsets: the epoch, and the time now (µs)."""

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
    failures_reported: int = 0
    """How many failed groups of the log its submitter could know of."""


@dataclass(slots=True)
class _Failures:
    """Failed groups of a log: how many, how many of them submitters could know of, and the last error."""

    count: int = 0
    reported: int = 0
    error: RailgunError | None = None


@dataclass(eq=False, slots=True)
class _Line:
    """The jobs that wait for one log."""

    log: Log
    failures: _Failures
    jobs: deque[_Job] = field(default_factory=deque)


class Committer:
    """Commits batches to logs, in groups: see the rules of the module.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> from railgun.transport.records import build
    >>> log, _ = StreamLog.open(NodeDisk(tempfile.mkdtemp()), "orders")
    >>> committer, results = Committer(), []
    >>> for payload in (b"a", b"b"):
    ...     committer.submit(log, [build([payload])], results.append, Stamp(epoch=1, now=1_000))
    >>> committer.close()
    >>> results, log.durable_end
    ([None, None], 2)
    >>> log.close()
    """

    def __init__(
        self,
        threads: int = 2,
        run: Callable[[Callable[[], None]], object] | None = None,
        max_bytes: int = 16 << 20,
    ) -> None:
        self._run = run
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}  # by the id of the log, which the line keeps alive
        self._failures: WeakKeyDictionary[Log, _Failures] = WeakKeyDictionary()
        # A queue wakes a thread sooner than a condition does.
        self._ready: SimpleQueue[_Line | None] = SimpleQueue()
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
        """Commit these batches in the next group of the log; `done` is called once, with None or the error.

        `cold`, for batches of a stream: nobody will read them soon.
        """
        self._enqueue(log, _Job(batches, done, stamp, sum(map(len, batches)), None, cold))

    def perform(self, log: Log, work: Callable[[], object], done: Done) -> None:
        """Run `work` once all jobs submitted before are done; no other thread writes to the log meanwhile."""
        self._enqueue(log, _Job((), done, None, 0, work))

    def _enqueue(self, log: Log, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the committer is closed: the node is about to end")
            line = self._lines.get(id(log))
            if line is not None:
                job.failures_reported = line.failures.reported
                line.jobs.append(job)
                return
            failures = self._failures.get(log) or _Failures()
            job.failures_reported = failures.reported
            line = self._lines[id(log)] = _Line(log, failures)
            line.jobs.append(job)
        self._ready.put(line)

    def close(self) -> None:
        """Take no more jobs, and wait until all are done. May be called again, and by several threads."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first and not self._lines:
                self._stop_threads()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._ready.put(None)

    def _work(self) -> None:
        while (line := self._ready.get()) is not None:
            with self._lock:
                jobs = self._take(line)
            count, error = line.failures.count, line.failures.error
            behind = [
                job for job in jobs if job.stamp is not None and job.failures_reported < count
            ]
            results = [(job.done, error) for job in behind]
            if others := [job for job in jobs if job not in behind] if behind else jobs:
                results += self._commit(line, others)
            self._call_done(results, line.failures)
            with self._lock:
                if line.jobs:
                    self._ready.put(line)
                    continue
                del self._lines[id(line.log)]
                if self._closed and not self._lines:
                    self._stop_threads()

    def _take(self, line: _Line) -> list[_Job]:
        jobs = [line.jobs.popleft()]
        size = jobs[0].size
        if jobs[0].work is not None:
            return jobs
        max_bytes = self._max_bytes
        if isinstance(line.log, StreamLog):  # one write lies in one segment
            max_bytes = min(max_bytes, line.log.roll_bytes)
        while line.jobs and not line.jobs[0].work and size + line.jobs[0].size <= max_bytes:
            job = line.jobs.popleft()
            jobs.append(job)
            size += job.size
        return jobs

    def _failed(self, line: _Line, error: RailgunError) -> None:
        """Count a failed group, so that the batches behind it fail too (rule 4)."""
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
            errors = self._append(log, jobs)
            for error in errors.values():
                if not isinstance(error, OrderError | BatchError):
                    self._failed(line, error)
                    break
            log.sync()
        except RailgunError as error:
            if jobs[0].work is None:
                self._failed(line, error)
            return [(job.done, error) for job in jobs]
        except Exception as error:  # a bug of Railgun, but no submitter may wait for ever
            _LOG.exception("a commit has failed with an unexpected error")
            failed = LogFailedError(f"a commit has failed: {error!r}. This is an error of Railgun.")
            self._failed(line, failed)
            return [(job.done, failed) for job in jobs]
        return [(job.done, errors.get(n)) for n, job in enumerate(jobs)]

    def _append(self, log: Log, jobs: list[_Job]) -> dict[int, RailgunError]:
        """Append all batches at once; if some do not fit, job by job. Return the errors by the number of the job."""
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
        errors: dict[int, RailgunError] = {}
        for n, job in enumerate(jobs):
            try:
                _stamp(log, job, log.end if isinstance(log, StreamLog) else 0)
                _write(log, job.batches, [job])
            except (OrderError, BatchError) as error:
                errors[n] = error
            except (
                RailgunError
            ) as error:  # the jobs before this one are written, and will be synced
                errors.update(dict.fromkeys(range(n, len(jobs)), error))
                break
        return errors

    def _call_done(
        self, results: list[tuple[Done, RailgunError | None]], failures: _Failures
    ) -> None:
        count = failures.count

        def call() -> None:
            failures.reported = count  # from now on, submitters can know of these failures
            for done, error in results:
                try:
                    done(error)
                except Exception:
                    _LOG.exception("the callback of a commit has failed")

        if self._run is None:
            call()
            return
        try:
            self._run(call)
        except Exception:  # the event loop is closed
            _LOG.exception("the callbacks of %d commits could not be run", len(results))


def _write(log: Log, batches: Sequence[Any], jobs: Sequence[_Job]) -> None:
    """Append batches of these jobs."""
    if isinstance(log, StreamLog):
        log.append(batches, all(job.cold for job in jobs))
    else:
        log.append(batches)


def _stamp(log: Log, job: _Job, base: int) -> int:
    """Stamp the batches of a job, if it has a stamp; return the offset after them."""
    if job.stamp is not None:
        assert isinstance(log, StreamLog), "only batches of a stream are stamped"
        return log.stamp(job.batches, job.stamp.epoch, job.stamp.now, base)
    if isinstance(log, StreamLog):
        return base + sum(head(batch).count for batch in job.batches)
    return base
