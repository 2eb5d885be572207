"""The start of Spark: in a thread of its own, so that whoever waits for it can give it up at any moment.

PySpark's own start is not made to be interrupted. A `KeyboardInterrupt` in the midst of it leaves a JVM behind that
nobody knows of: `launch_gateway` keeps the process to itself, and takes the directory away that the JVM is to write its
port to, at which the JVM fails, and listens for ever. Or it leaves half a context, and a stack of Py4J's.

Signals reach the main thread alone. So nothing interrupts the thread that starts; who waits for it is interrupted, ends
the JVM, and the start fails. The same ends a start that nobody needs any more, as of a job that is stopped meanwhile.
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

ENDS_WITHIN_S: Final = 5.0
"""That a JVM has to clean up behind itself before it is killed."""


class SparkStartError(RailgunError):
    """Spark did not start."""


class StartGivenUpError(SparkStartError):
    """Nobody needs Spark any more."""


class Start:
    """One start of Spark."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._given_up = False
        self._over = threading.Event()
        self._wake = threading.Event()  # that it is over, or given up
        self._process: subprocess.Popen[bytes] | None = None
        self._context: SparkContext | None = None
        self._error: BaseException | None = None

    def give_up(self) -> None:
        """From any thread: end what has been started, if it is not up yet. Returns when that has ended."""
        with self._guard:
            self._given_up = True
            process = None if self._over.is_set() else self._process
        self._wake.set()
        if process is not None:
            _end(process)

    def context(self, conf: SparkConf) -> SparkContext:
        """Start a context, and the JVM if there is none. Raises `SparkStartError`."""
        if self._given_up:
            raise StartGivenUpError("the start of Spark was given up")
        relay = Relay() if SparkContext._gateway is None else None
        thread = threading.Thread(target=self._run, args=(conf, relay), daemon=True)
        thread.name = "railgun-spark-start"
        with _silent(lambda record: record.thread == thread.ident and self._given_up):
            try:
                thread.start()
                self._wake.wait()
            except BaseException:  # as Ctrl-C raises
                self.give_up()
                raise
            finally:
                if relay is not None and not self._over.is_set():
                    thread.join(ENDS_WITHIN_S)  # its JVM is gone: it notices
        if not self._over.is_set():
            raise StartGivenUpError("the start of Spark was given up")
        error, context = self._error, self._context
        told = ""
        if relay is not None:
            told = relay.held() if error is not None else ""
            relay.open()
        if isinstance(error, PySparkException | Py4JError | OSError):
            said = f"\nIt said:\n{told}" if told else ""
            raise SparkStartError(f"Spark did not start: {error}{said}") from error
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
        except BaseException as raised:  # raised again by who waits
            error = raised
        finally:
            if relay is not None:
                relay.close_entry()
        with self._guard:
            self._context, self._error = context, error
            given_up = self._given_up
            if not given_up:
                self._over.set()
        self._wake.set()
        if given_up:
            self._clean(context, relay)

    def _launch(self, conf: SparkConf, relay: Relay) -> Any:
        # In a session of its own: what is sent to all of ours, as `timeout` does and terminals do, would end the JVM
        # while workers still save. It ends with its standard input, whatever becomes of this process.
        options = {"stderr": relay.entry, "start_new_session": True}
        with _noting(self._launched):
            gateway = java_gateway.launch_gateway(conf, options)  # type: ignore[no-untyped-call]
        relay.close_entry()
        return gateway

    def _launched(self, process: subprocess.Popen[bytes]) -> None:
        with self._guard:
            self._process = process
            given_up = self._given_up
        if given_up:
            _end(process)

    def _clean(self, context: SparkContext | None, relay: Relay | None) -> None:
        """Leave nothing that is half made."""
        if relay is None:  # the JVM is of an earlier session
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
    """Have `note` called with the process that `launch_gateway` starts, at once."""
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
    """Drop what Py4J logs, at the root, of a JVM that was ended on purpose."""

    def passes(record: logging.LogRecord) -> bool:
        return not silenced(record)

    logging.root.addFilter(passes)
    try:
        yield
    finally:
        logging.root.removeFilter(passes)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a JVM, which leads a session of its own, and whatever is starting it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)


class Relay:
    """Where the JVM's stderr goes: held back until `open`, passed on to ours from then on.

    Spark starts the JVM with an option at which Java prints a warning that no setting turns off.
    What tasks print comes the same way, so the stream cannot just be thrown away.
    """

    def __init__(self) -> None:
        self._exit, self.entry = os.pipe()
        self._lines: list[bytes] = []
        self._passing = False
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._carry, name="spark-stderr", daemon=True)
        self._thread.start()

    def close_entry(self) -> None:
        """The JVM has its own copy of our end; without ours, its end is the stream's end."""
        if self.entry >= 0:
            os.close(self.entry)
            self.entry = -1

    def open(self) -> None:
        """Spark is up: forget what was said so far, and pass on what comes."""
        with self._guard:
            self._passing = True
            self._lines.clear()

    def held(self) -> str:
        """What was said so far. Waits for the rest if the JVM has just ended."""
        self._thread.join(timeout=2)
        with self._guard:
            return b"".join(self._lines).decode(errors="replace").strip()

    def _carry(self) -> None:
        with os.fdopen(self._exit, "rb") as lines:
            for line in lines:
                with self._guard:
                    if self._passing:
                        os.write(2, line)
                    else:
                        self._lines.append(line)
