"""Start Spark in a thread of its own, so that the caller can give up the start at any moment.

PySpark's own start cannot be interrupted cleanly. A `KeyboardInterrupt` in the midst of it leaves a JVM behind that
nothing refers to: `launch_gateway` keeps the process to itself, and removes the directory in which the JVM is to write
its port, so the JVM fails at that and listens for ever. Or the interrupt leaves half a context, and a stack of Py4J's.

Signals reach only the main thread. So the thread that starts Spark is never interrupted; the caller that waits for it
is, and then ends the JVM, at which the start fails. A start that is not needed any more, because its job was stopped in
the meantime, ends in the same way.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext, java_gateway
from pyspark.errors import PySparkException

from railgun.errors import RailgunError

END_TIMEOUT_S: Final = 5.0
"""The time a JVM has to clean up before it is killed."""


class SparkStartError(RailgunError):
    """Spark did not start."""


class StartGivenUpError(SparkStartError):
    """The start of Spark was given up by the caller."""


class Start:
    """One start of Spark, which can be given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self._finished = threading.Event()
        self._wake = threading.Event()  # set when the start has finished or is given up
        self._process: subprocess.Popen[bytes] | None = None
        self._context: SparkContext | None = None
        self._error: BaseException | None = None

    def give_up(self) -> None:
        """End what has been started, if Spark is not up yet; return when it has ended. Call it from any thread."""
        with self._lock:
            self._given_up = True
            process = None if self._finished.is_set() else self._process
        self._wake.set()
        if process is not None:
            _end(process)

    def context(self, conf: SparkConf) -> SparkContext:
        """Start a context, and the JVM if there is none; raise `SparkStartError` if that fails."""
        if self._given_up:
            raise StartGivenUpError("the start of Spark was given up")
        relay = Relay() if SparkContext._gateway is None else None
        thread = threading.Thread(target=self._run, args=(conf, relay), daemon=True)
        thread.name = "railgun-spark-start"
        with _silent(lambda record: record.thread == thread.ident and self._given_up):
            try:
                thread.start()
                self._wake.wait()
            except BaseException:  # Ctrl-C, for one
                self.give_up()
                raise
            finally:
                if relay is not None and not self._finished.is_set():
                    thread.join(END_TIMEOUT_S)  # its JVM is gone, so it ends
        if not self._finished.is_set():
            raise StartGivenUpError("the start of Spark was given up")
        error, context = self._error, self._context
        jvm_output = ""
        if relay is not None:
            jvm_output = relay.held() if error is not None else ""
            relay.open()
        if isinstance(error, PySparkException | Py4JError | OSError):
            suffix = f"\nIts output:\n{jvm_output}" if jvm_output else ""
            raise SparkStartError(f"Spark did not start: {error}{suffix}") from error
        if error is not None:
            raise error
        assert context is not None
        return context

    # ------------------------------------------------------------ the thread

    def _run(self, conf: SparkConf, relay: Relay | None) -> None:
        context = error = None
        try:
            gateway = None if relay is None else self._launch(conf, relay)
            context = SparkContext(conf=conf, gateway=gateway)
        except BaseException as raised:  # raised again in the thread that waits
            error = raised
        finally:
            if relay is not None:
                relay.close_entry()
        with self._lock:
            self._context, self._error = context, error
            given_up = self._given_up
            if not given_up:
                self._finished.set()
        self._wake.set()
        if given_up:
            self._clean(context, relay)

    def _launch(self, conf: SparkConf, relay: Relay) -> Any:
        # The JVM gets a session of its own: signals to our process group, as `timeout` and terminals send them, would
        # end it while workers still save. It ends when its standard input closes, whatever becomes of this process.
        options = {"stderr": relay.entry, "start_new_session": True}
        with _noting(self._launched):
            gateway = java_gateway.launch_gateway(conf, options)  # type: ignore[no-untyped-call]
        relay.close_entry()
        return gateway

    def _launched(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            given_up = self._given_up
        if given_up:
            _end(process)

    def _clean(self, context: SparkContext | None, relay: Relay | None) -> None:
        """Remove what is half made."""
        if relay is None:  # the JVM belongs to an earlier session
            if context is not None:
                with suppress(Exception):
                    context.stop()
            return
        if self._process is not None:
            _end(self._process)
        SparkContext._active_spark_context = None
        SparkContext._gateway = SparkContext._jvm = None


@contextmanager
def _noting(note: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """Call `note` with the process that `launch_gateway` starts, at once."""
    module: Any = java_gateway
    before = module.Popen

    def popen(*args: Any, **options: Any) -> Any:
        process = before(*args, **options)
        note(process)
        return process

    module.Popen = popen
    try:
        yield
    finally:
        module.Popen = before


@contextmanager
def _silent(silenced: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Drop Py4J's log records about a JVM that was ended on purpose."""

    def passes(record: logging.LogRecord) -> bool:
        return not silenced(record)

    logging.root.addFilter(passes)
    try:
        yield
    finally:
        logging.root.removeFilter(passes)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a JVM, which leads a session of its own, and the script that starts it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


class Relay:
    """Takes the JVM's stderr: holds it back until `open`, and passes it on to ours from then on.

    Spark starts the JVM with an option for which Java prints a warning that no setting turns off. The output of tasks
    comes the same way, so the stream cannot be thrown away as a whole.
    """

    def __init__(self) -> None:
        self._exit, self.entry = os.pipe()
        self._lines: list[bytes] = []
        self._passing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._carry, name="spark-stderr", daemon=True)
        self._thread.start()

    def close_entry(self) -> None:
        """Close our copy of the pipe's entry: when the JVM closes its own, the stream ends."""
        if self.entry >= 0:
            os.close(self.entry)
            self.entry = -1

    def open(self) -> None:
        """Forget what was held back, and pass on what comes: Spark is up."""
        with self._lock:
            self._passing = True
            self._lines.clear()

    def held(self) -> str:
        """Return what was held back; if the JVM has just ended, wait for the rest."""
        self._thread.join(timeout=2)
        with self._lock:
            return b"".join(self._lines).decode(errors="replace").strip()

    def _carry(self) -> None:
        with os.fdopen(self._exit, "rb") as lines:
            for line in lines:
                with self._lock:
                    if self._passing:
                        os.write(2, line)
                    else:
                        self._lines.append(line)
