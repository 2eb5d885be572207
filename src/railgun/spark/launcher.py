"""Run workers as Spark tasks: each worker is one job with one task, submitted from a thread of its own.

So workers are added, ended and lost one by one. Rules:

- Each (job, run of it, worker, incarnation) has a job group. So cancelling one worker touches no other, and is possible
  even before Spark knows its job.
- Spark's retries are not used. When an attempt fails, the incarnation ends: its job is cancelled as soon as the failure
  is seen, and a second attempt that began before refuses to run (`task.py`). The controller decides whether the worker
  runs again.
- A worker has ended when Spark has no running task of it, which is after its process is dead. For Spark a cancelled job
  is over at once; its process lives on for a second or more.
- The launcher never stops the session, which belongs to the caller.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)
from pyspark.sql import SparkSession

from railgun.engine.controller.launcher import Ended
from railgun.engine.worker.spec import WorkerSpec
from railgun.errors import RailgunError
from railgun.spark import failure, task
from railgun.spark.conf import is_local, is_true, refuse, seconds
from railgun.spark.failure import WorkerFailure
from railgun.spark.session import check

__all__ = ["LaunchedTwiceError", "SparkLauncher"]

POOL = "railgun"
SPARK_ERRORS = (Py4JError, PySparkException, OSError, AttributeError, AssertionError)
"""Errors that calls into Spark raise; the last two when it has been stopped and its objects are gone."""
Key = tuple[str, int, int]


class LaunchedTwiceError(RailgunError):
    """An incarnation of a worker was launched twice, which is a bug of the caller."""


@dataclass(slots=True, eq=False)
class _Worker:
    spec: WorkerSpec
    ended: Ended
    run: str
    cancelled: bool = False
    lost: WorkerFailure | None = None
    jobs: int = 0
    """The number of jobs submitted for this worker: one, and one more for each used process it met."""
    stages: list[int] = field(default_factory=list)
    """The stages of these jobs, one each, as far as Spark has reported them."""
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def group(self) -> str:
        spec = self.spec
        return f"railgun/{spec.job}/{self.run}/{spec.worker}/{spec.incarnation}"

    @property
    def description(self) -> str:
        """Return the text for Spark's UI."""
        spec = self.spec
        return f"railgun {spec.job} worker {spec.worker} (incarnation {spec.incarnation})"


class SparkLauncher:
    """Launches the workers of a job on a Spark session.

    `workers`: the number of workers at first; a local session with fewer slots is refused. `entry`: the function that a
    worker runs; by default the worker of the Railgun installed on the executors. `timeout_s`: how long to wait for a
    cancelled worker on an executor that does not answer; after that, only the controller's fencing by incarnation keeps
    it out.
    """

    def __init__(
        self,
        session: SparkSession,
        *,
        workers: int = 0,
        entry: task.Entry | None = None,
        timeout_s: float = 30.0,
        poll_s: float = 0.5,
    ) -> None:
        check(session, workers)
        self._context: SparkContext = session.sparkContext
        self._conf = dict(self._context.getConf().getAll())
        self._task_body = task.body(entry)
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._profile = self._own_profile()
        self._lock = threading.Lock()
        self._launched: set[Key] = set()
        self._running: dict[Key, _Worker] = {}
        # A job may run again in the same session, and a cancelled group stays cancelled for ever.
        self._run_name = secrets.token_hex(4)
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        if not is_local(
            self._conf["spark.master"]
        ):  # on local masters a failed attempt ends the job
            self._watch = threading.Thread(target=self._watch_all, name="railgun-spark-watch")
            self._watch.daemon = True
            self._watch.start()

    # ------------------------------------------------------------------ what the controller calls

    def refuse(self, workers: int) -> None:
        """Raise `TooFewSlotsError` if the master is local and has fewer slots than `workers` workers need."""
        refuse(self._conf, workers)

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker and return at once. `ended` is called once, from another thread, when the worker has ended."""
        worker = _Worker(spec, ended, self._run_name)
        key = _key(spec)
        with self._lock:
            if key in self._launched:
                raise LaunchedTwiceError(f"{worker.description} has been launched before")
            self._launched.add(key)
            self._running[key] = worker
        try:
            thread = InheritableThread(target=self._run, args=(worker,), name=worker.group)
            thread.daemon = True
            thread.start()
        except SPARK_ERRORS:
            stopped = failure.SparkStoppedError("the Spark session is stopped: nothing can start")
            threading.Thread(target=self._report, args=(worker, stopped), daemon=True).start()

    def cancel(self, spec: WorkerSpec) -> None:
        """End a worker by force; do nothing if it has ended or was never launched."""
        with self._lock:
            worker = self._running.get(_key(spec))
            if worker is None:
                return
            worker.cancelled = True
        self._cancel(worker)

    def pending(self, spec: WorkerSpec) -> bool:
        """Return whether a worker waits for a slot: it was launched, and Spark has not begun its task."""
        with self._lock:
            worker = self._running.get(_key(spec))
        if worker is None:
            return False
        try:
            for stage in self._stages(worker)[worker.jobs - 1 :]:
                if stage.numActiveTasks() or stage.numCompletedTasks() or stage.numFailedTasks():
                    return False
        except SPARK_ERRORS:
            return False
        return True

    def close(self) -> None:
        """End all workers and wait for them; leave the session running."""
        self._closed.set()
        with self._lock:
            remaining = list(self._running.values())
            for worker in remaining:
                worker.cancelled = True
        for worker in remaining:
            self._cancel(worker)
        deadline = time.monotonic() + 2 * self._timeout_s
        for worker in remaining:
            worker.done.wait(max(0.0, deadline - time.monotonic()))
        if self._watch is not None:
            self._watch.join(timeout=self._timeout_s)

    # ------------------------------------------------------------------ the thread of a worker

    def _run(self, worker: _Worker) -> None:
        failure_of_worker: WorkerFailure | None
        try:
            if self._closed.is_set():
                failure_of_worker = failure.LauncherClosedError(
                    "the launcher is closed: nothing can start"
                )
            elif worker.cancelled:
                failure_of_worker = failure.CancelledError("it was cancelled before it began")
            else:
                failure_of_worker = self._run_job(worker)
        except Exception as error:
            failure_of_worker = failure.SparkJobError(f"{type(error).__name__}: {error}")
        self._report(worker, failure_of_worker)

    def _run_job(self, worker: _Worker) -> WorkerFailure | None:
        context = self._context
        try:
            context.setJobGroup(worker.group, worker.description, interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", POOL)
            rdd = context.parallelize([task.row_of(worker.spec)], 1).mapPartitions(self._task_body)
            if self._profile is not None:
                rdd = rdd.withResources(self._profile)
            outcome = (task.USED, "")
            while outcome[0] == task.USED:  # each time such a process ends
                worker.jobs += 1
                outcome = rdd.collect()[0]
            if worker.lost is None and outcome[0] == task.REFUSED:
                worker.lost = failure.of_spark(self._why_failed(worker))
            return worker.lost or failure.of_outcome(outcome)
        except SPARK_ERRORS as error:
            since = time.monotonic()
            stopped = self._is_stopped()
            if not stopped:
                self._await_end(worker, since)
            if worker.lost is not None:
                return worker.lost
            cause = failure.of_spark(str(error), stopped)
            if worker.cancelled and not isinstance(cause, failure.SparkStoppedError):
                return failure.CancelledError("it was cancelled")
            return cause

    def _await_end(self, worker: _Worker, since: float) -> None:
        """Wait until no task of the worker is running, which is when its process is gone."""
        if seconds(self._conf.get("spark.ui.liveUpdate.period", "100ms")) > 0:
            # A session of the user's: its status lags behind. Spark takes at most this long to kill the process.
            kill_s = 2 + seconds(self._conf.get("spark.python.task.killTimeout", "2s")) + 1
            self._pause(since + kill_s)
        idle_looks = 0  # a task may begin at the very moment of the cancel: look twice
        while idle_looks < 2 and time.monotonic() < since + self._timeout_s:
            try:
                stages = self._stages(worker)
                busy = self._job_is_on(worker) or any(stage.numActiveTasks() for stage in stages)
            except SPARK_ERRORS:
                return
            idle_looks = 0 if busy else idle_looks + 1
            self._pause(time.monotonic() + 0.05)

    @staticmethod
    def _pause(until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    def _report(self, worker: _Worker, cause: WorkerFailure | None) -> None:
        with self._lock:
            self._running.pop(_key(worker.spec), None)
        try:
            worker.ended(worker.spec, None if cause is None else str(cause))
        finally:
            worker.done.set()

    # ------------------------------------------------------------------ what Spark knows

    def _cancel(self, worker: _Worker) -> None:
        try:
            # This cancels later jobs of the group too: the worker's job may not have been submitted yet.
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(worker.group)
        except SPARK_ERRORS:
            return  # stopped: the worker's thread notices it as well

    def _stages(self, worker: _Worker) -> list[Any]:
        """Return what Spark knows of the worker's stages, in their order, with as few calls as possible."""
        tracker = self._context._jsc.statusTracker()
        if len(worker.stages) < worker.jobs:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(worker.group)]
            worker.stages = sorted(stage for job in jobs if job for stage in job.stageIds())
        infos = [tracker.getStageInfo(stage) for stage in worker.stages]
        return [info for info in infos if info is not None]

    def _job_is_on(self, worker: _Worker) -> bool:
        """Return whether Spark's status store says that the worker's job runs; the store lags a little."""
        tracker = self._context._jsc.statusTracker()
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(worker.group)]
        return any(info is not None and str(info.status()) == "RUNNING" for info in infos)

    def _is_stopped(self) -> bool:
        try:
            return bool(self._context._jsc.sc().isStopped())
        except SPARK_ERRORS:
            return True

    def _watch_all(self) -> None:
        """Watch for attempts that failed, and cancel their jobs, so that no worker waits for a retry."""
        while not self._closed.wait(self._poll_s):
            with self._lock:
                workers = [worker for worker in self._running.values() if worker.lost is None]
            for worker in workers:
                try:
                    if any(stage.numFailedTasks() for stage in self._stages(worker)):
                        worker.lost = failure.of_spark(self._why_failed(worker))
                        self._cancel(worker)
                except SPARK_ERRORS:
                    break

    def _why_failed(self, worker: _Worker) -> str:
        """Return the error message that Spark has stored for the attempt that failed."""
        try:
            store = self._context._jsc.sc().statusStore()
            for stage in worker.stages:
                tasks = store.taskList(stage, 0, 10)
                for number in range(tasks.size()):
                    message = tasks.apply(number).errorMessage()
                    if message.isDefined():
                        return str(message.get())
        except SPARK_ERRORS:
            pass
        return "its task failed, and Spark gives no reason"

    def _own_profile(self) -> ResourceProfile | None:
        """Return a profile for executors that only workers use, if executors come and go by dynamic allocation; else
        None.

        Executors of queries hold shuffle data, and would be kept for it long after their last task.
        """
        if not is_true(self._conf, "spark.dynamicAllocation.enabled"):
            return None
        cores = int(self._conf.get("spark.executor.cores", "1"))
        memory = self._conf.get("spark.executor.memory", "1g")
        executors = ExecutorResourceRequests().cores(cores).memory(memory)
        if overhead := self._conf.get("spark.executor.memoryOverhead"):
            executors.memoryOverhead(overhead)
        if python := self._conf.get("spark.executor.pyspark.memory"):
            executors.pysparkMemory(python)
        cpus = TaskResourceRequests().cpus(int(float(self._conf.get("spark.task.cpus", "1"))))
        return ResourceProfileBuilder().require(executors).require(cpus).build


def _key(spec: WorkerSpec) -> Key:
    return spec.job, spec.worker, spec.incarnation
