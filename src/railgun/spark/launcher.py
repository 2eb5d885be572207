"""Workers as Spark tasks: one job of one task per worker, from one thread each.

So workers are added, ended and lost one by one. Rules:

- A job group per (job, run of it, worker, incarnation), so that cancelling one worker touches no other, and
  can be asked for before Spark has even heard of its job.
- Spark's retries are not used. An attempt that fails is the end of the incarnation: its job is
  cancelled as soon as that is seen, and a second attempt that began before refuses to run
  (`task.py`). Whether the worker runs again is the controller's decision.
- A worker has ended when Spark knows of no running task of it, which is after its process is dead:
  a cancelled job is over for Spark at once, its process lives on for a second or more.
- The session is not ours to stop.
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
"""What calls into Spark raise; the last two where it has been stopped and its objects are gone."""
Key = tuple[str, int, int]


class LaunchedTwiceError(RailgunError):
    """An incarnation of a worker is launched once: this is a bug in the one who launches."""


@dataclass(slots=True, eq=False)
class _Worker:
    spec: WorkerSpec
    ended: Ended
    run: str
    cancelled: bool = False
    lost: WorkerFailure | None = None
    jobs: int = 0
    """How many were submitted for it: one, and one more for each used process it met."""
    stages: list[int] = field(default_factory=list)
    """Of these jobs, one each, as far as Spark has told."""
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def group(self) -> str:
        spec = self.spec
        return f"railgun/{spec.job}/{self.run}/{spec.worker}/{spec.incarnation}"

    @property
    def description(self) -> str:
        """As it stands in Spark's UI."""
        spec = self.spec
        return f"railgun {spec.job} worker {spec.worker} (incarnation {spec.incarnation})"


class SparkLauncher:
    """Launches the workers of a job on a Spark session.

    `workers` is how many there will be at first: a local session with fewer slots is refused.
    `entry` is what a worker runs; by default the worker of the Railgun installed on the executors.
    `patience` is how long, in seconds, a cancelled worker on an executor that does not answer is
    waited for; from then on the controller's fence by incarnation is all there is against it.
    """

    def __init__(
        self,
        session: SparkSession,
        *,
        workers: int = 0,
        entry: task.Entry | None = None,
        patience: float = 30.0,
        poll: float = 0.5,
    ) -> None:
        check(session, workers)
        self._context: SparkContext = session.sparkContext
        self._conf = dict(self._context.getConf().getAll())
        self._body = task.body(entry)
        self._patience = patience
        self._poll = poll
        self._profile = self._own_profile()
        self._guard = threading.Lock()
        self._launched: set[Key] = set()
        self._running: dict[Key, _Worker] = {}
        # A job may be run again in the same session, and what is cancelled of a group is so for ever.
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
        """Raise `TooFewSlotsError` if the master is local and has fewer slots than so many workers need."""
        refuse(self._conf, workers)

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker; returns at once. `ended` is called once, from another thread."""
        worker = _Worker(spec, ended, self._run_name)
        key = _key(spec)
        with self._guard:
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
        """End a worker by force; nothing happens if it has ended or never was."""
        with self._guard:
            worker = self._running.get(_key(spec))
            if worker is None:
                return
            worker.cancelled = True
        self._cancel(worker)

    def pending(self, spec: WorkerSpec) -> bool:
        """Whether it waits for a slot: it was launched, and Spark has not begun its task."""
        with self._guard:
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
        """End all workers and wait for them; the session stays."""
        self._closed.set()
        with self._guard:
            left = list(self._running.values())
            for worker in left:
                worker.cancelled = True
        for worker in left:
            self._cancel(worker)
        deadline = time.monotonic() + 2 * self._patience
        for worker in left:
            worker.done.wait(max(0.0, deadline - time.monotonic()))
        if self._watch is not None:
            self._watch.join(timeout=self._patience)

    # ------------------------------------------------------------------ the thread of a worker

    def _run(self, worker: _Worker) -> None:
        told: WorkerFailure | None
        try:
            if self._closed.is_set():
                told = failure.LauncherClosedError("the launcher is closed: nothing can start")
            elif worker.cancelled:
                told = failure.CancelledError("it was cancelled before it began")
            else:
                told = self._run_job(worker)
        except Exception as error:
            told = failure.SparkJobError(f"{type(error).__name__}: {error}")
        self._report(worker, told)

    def _run_job(self, worker: _Worker) -> WorkerFailure | None:
        context = self._context
        try:
            context.setJobGroup(worker.group, worker.description, interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", POOL)
            rdd = context.parallelize([task.row_of(worker.spec)], 1).mapPartitions(self._body)
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
            told = failure.of_spark(str(error), stopped)
            if worker.cancelled and not isinstance(told, failure.SparkStoppedError):
                return failure.CancelledError("it was cancelled")
            return told

    def _await_end(self, worker: _Worker, since: float) -> None:
        """Until no task of it is running, which is when its process is gone."""
        if seconds(self._conf.get("spark.ui.liveUpdate.period", "100ms")) > 0:
            # Somebody else's session: its status lags behind. This is how long Spark takes to kill.
            kill = 2 + seconds(self._conf.get("spark.python.task.killTimeout", "2s")) + 1
            self._pause(since + kill)
        quiet = 0  # a task may have begun at the very moment of the cancel: so look twice
        while quiet < 2 and time.monotonic() < since + self._patience:
            try:
                stages = self._stages(worker)
                busy = self._job_is_on(worker) or any(stage.numActiveTasks() for stage in stages)
            except SPARK_ERRORS:
                return
            quiet = 0 if busy else quiet + 1
            self._pause(time.monotonic() + 0.05)

    @staticmethod
    def _pause(until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    def _report(self, worker: _Worker, told: WorkerFailure | None) -> None:
        with self._guard:
            self._running.pop(_key(worker.spec), None)
        try:
            worker.ended(worker.spec, None if told is None else str(told))
        finally:
            worker.done.set()

    # ------------------------------------------------------------------ what Spark knows

    def _cancel(self, worker: _Worker) -> None:
        try:
            # Jobs of the group that come later, too: ours may not have been submitted yet.
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(worker.group)
        except SPARK_ERRORS:
            return  # stopped: the thread of the worker sees it as well

    def _stages(self, worker: _Worker) -> list[Any]:
        """What Spark knows of its stages, in their order. Asks for as little as it can."""
        tracker = self._context._jsc.statusTracker()
        if len(worker.stages) < worker.jobs:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(worker.group)]
            worker.stages = sorted(stage for job in jobs if job for stage in job.stageIds())
        found = [tracker.getStageInfo(stage) for stage in worker.stages]
        return [info for info in found if info is not None]

    def _job_is_on(self, worker: _Worker) -> bool:
        """Whether Spark's books say that its job runs; they are written a little later."""
        tracker = self._context._jsc.statusTracker()
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(worker.group)]
        return any(info is not None and str(info.status()) == "RUNNING" for info in infos)

    def _is_stopped(self) -> bool:
        try:
            return bool(self._context._jsc.sc().isStopped())
        except SPARK_ERRORS:
            return True

    def _watch_all(self) -> None:
        """Sees attempts that failed, so that no worker waits for a retry nobody wants."""
        while not self._closed.wait(self._poll):
            with self._guard:
                workers = [worker for worker in self._running.values() if worker.lost is None]
            for worker in workers:
                try:
                    if any(stage.numFailedTasks() for stage in self._stages(worker)):
                        worker.lost = failure.of_spark(self._why_failed(worker))
                        self._cancel(worker)
                except SPARK_ERRORS:
                    break

    def _why_failed(self, worker: _Worker) -> str:
        """What Spark has noted of the attempt that failed."""
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
        return "its task failed, and Spark does not tell why"

    def _own_profile(self) -> ResourceProfile | None:
        """Executors for workers alone, where they come and go by dynamic allocation.

        Those of queries hold shuffle data, and are kept for it long after the last task.
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
