"""A node: the streams in its directory, by name, and the calls that manage them.

Rules:

1. The settings of a stream stand in a file beside its log, which is written before the stream is used, and replaced
   whole. A directory without the file is a stream that was being made or deleted, and is removed.
2. One node works in a directory at a time. If the directory is not at its place any more (its lock is not the one that
   was taken), streams are neither made nor changed nor deleted, and the node says so.
3. `ensure` makes a stream, or changes its settings, or says how they differ; it never removes anything. A stream is
   used once its settings are on disk: if they cannot be written, there is no stream.
4. `delete` first removes the settings, durably, and then the rest: a crash leaves the stream, or nothing.
5. Streams are made, changed and deleted one at a time, with their files handled in other threads: only callers that
   asked for the change wait for it.
6. Timers run by a clock that never jumps, and deadlines by the time of day, which may jump: when it has jumped, all
   groups check their deadlines anew, a second later at most.
7. A stream whose settings cannot be read, or whose log is gone, is left alone; the others go on. It is reported at the
   start, by an alarm, and to every client that asks for it, with what to do (`not_opened`). It is not made anew.
8. In a cluster, all nodes agree on which streams there are (`cluster`), and each node makes, changes and deletes its
   copies accordingly. The id of a stream tells it from others of the same name.
9. The directory of the node and that of each stream have a format file (`railgun.storage.formats`). If one of them,
   or anything in a log, is of a later version of Railgun, the node does not start and changes nothing: it could not
   serve that stream, and other nodes would take it for a copy.
10. The time of day is noted in the file `clock`, at the start, every `KEEP_NOTES_S`, and at the end. A node that starts
   more than `MAX_STEP_S` before the noted time, or more than `MAX_PAUSE_S` after it, says so (`clock_at_start_s`) and
   goes on: it cannot know which of the two times was wrong. It says so until the noted time is reached, or until it is
   started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeVar

from railgun.broker.clock import steady_us, time_of_day
from railgun.broker.errors import (
    BadRequestError,
    DamagedLogError,
    NoGroupError,
    NoStreamError,
    NotPersistentError,
    StorageError,
    StreamReplacedError,
    later_format,
    storage_error,
)
from railgun.broker.log.committer import Committer
from railgun.broker.log.disk import (
    GONE,
    Disk,
    NodeDisk,
    check_format,
    put,
    unless_read_only,
    write_format,
)
from railgun.broker.log.log import LogConfig
from railgun.broker.protocol.exchange import Exchange, Responses
from railgun.broker.protocol.groups import OffsetRangeError
from railgun.broker.protocol.metadata.alarms import of_lone_node, wrong_at_start
from railgun.broker.protocol.metadata.fields import difference
from railgun.broker.protocol.metadata.options import OPTIONS
from railgun.broker.protocol.stored_time import PacedClock
from railgun.broker.settings import DEAD, SECOND, STAGING, StreamSettings, check_name
from railgun.broker.streams.groups import GroupDriver
from railgun.broker.streams.persistent import TIME_AHEAD, DeadLetterError, Persistent
from railgun.broker.streams.redrive import redrive
from railgun.broker.streams.routing import Passage, Routing
from railgun.errors import RailgunError, said
from railgun.storage.errors import LockedError
from railgun.storage.formats import Format
from railgun.storage.lock import Lock

if TYPE_CHECKING:
    from railgun.broker.protocol.exchange import Routing as Exchanged
    from railgun.broker.streams.listener import Listener
    from railgun.broker.streams.producing import Producing
    from railgun.transport.commands import Blob
    from railgun.transport.proto.streams_pb2 import Publish

RETENTION_INTERVAL_S: Final = 10.0
CHECK_CLOCK_S: Final = 1.0  # between two checks of the clock
CHECK_FILES_S: Final = 1.0  # between two checks of the files of all streams
KEEP_NOTES_S: Final = 20.0  # between two notes of what is safe
MIN_FREE_BYTES: Final = 64 << 20
"""A node with less free space on its disk raises an alarm, and other nodes are preferred as masters."""
CLOCK_JUMP_US: Final = SECOND // 2  # more than clocks drift between two checks
RESPONSE_TIMEOUT_S: Final = OPTIONS["rs_timeout"].default or 30.0
DEAD_LETTER_ID_BOX_S: Final = 7 * 24 * 3600.0  # for so long no dead letter is stored twice
NODE_FORMAT: Final = Format("railgun node", 1)
"""Format of the directory of a node."""
STAGING_LOG: Final = LogConfig(segment_bytes=16 << 20)
"""Small segments: staged data is needed for a short time, and is deleted segment by segment."""
STREAM_FORMAT: Final = Format("railgun stream", 1)
"""Format of the directory of a stream: its settings, its log and its group log."""
SETTINGS_FILE: Final = "stream.json"
"""The file with the settings, in the directory of a stream."""
DELETED_FILE: Final = "deleted"
"""The settings of a stream that is being deleted: the settings file gets this name first, and is removed last."""
_ID: Final = "id"  # in the settings file, beside the settings: id of the stream in its cluster
_LOG: Final = logging.getLogger(__name__)
CLOCK: Final = "clock"
"""The file with the last noted time of day (µs)."""
_MADE: Final = "made"  # in the settings file: identity of a stream that is of no cluster
Mode = Literal["warn", "overwrite", "strict"]
T = TypeVar("T")


class StreamDiffersError(RailgunError):
    """A stream of this name exists, and its settings differ from those that were asked for."""

    code: ClassVar[str] = "DIFFERS"


class InUseError(RailgunError):
    """Another node works in the directory."""

    code: ClassVar[str] = "IN_USE"


class RemoteListeners(Protocol):
    """Subscriptions to ephemeral streams, and awaited responses, on the other nodes of the cluster."""

    def joined(self, listener: Listener) -> None:
        """Tell the other nodes of a subscription on this node."""

    def changed(self, listener: Listener) -> None:
        """Tell the other nodes that the credit of a subscription has changed."""

    def left(self, listener: Listener) -> None:
        """Tell the other nodes that a subscription has ended."""

    def stream_made(self, stream: Ephemeral) -> None:
        """Add the subscriptions of other nodes to a stream that was made on this node."""

    def stream_gone(self, name: str) -> None:
        """Remove the subscriptions of other nodes to a stream that was deleted on this node."""

    def scatter(
        self, command: Publish, batches: Sequence[Blob], routing: Exchanged[Any, Any]
    ) -> Exchanged[Any, Any]:
        """Send messages to their subscribers on other nodes; return the routing for those on this node."""

    def reserve(self, name: str, timeout: int, done: Callable[[RailgunError | None], None]) -> None:
        """Reserve the name of a response for `timeout` µs; `done` is called with None, or why that cannot be."""

    def released(self, name: str) -> None:
        """Give up the name of a response."""

    def reply(
        self, name: str, blob: Blob, done: Callable[[RailgunError | None], None] | None
    ) -> None:
        """Send a response to the node that awaits it."""


class Cluster(Protocol):
    """The cluster, as a node sees it."""

    async def ensure(self, name: str, asked: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Make a stream or change its settings, on all nodes."""
        ...

    async def delete(self, name: str, dead_letters: bool) -> dict[str, Any]:
        """Delete a stream on all nodes."""
        ...

    async def make_beside(self, stream: str, name: str, settings: StreamSettings) -> None:
        """Make a stream that belongs to another one, in the same region; return when it exists."""
        ...

    def region_of(self, name: str) -> str | None:
        """Return the region of a stream; None if no node knows the stream."""
        ...

    async def describe_all(self) -> list[dict[str, Any]]:
        """Return all streams of the cluster, as their masters describe them."""
        ...

    async def administer(self, call: str, arguments: dict[str, Any]) -> Any:
        """Run a call about the cluster itself, and return its result."""
        ...

    async def elsewhere(self, call: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Pass a call on to the master of a stream if that is another node; return whether it is, and the result."""
        ...

    @property
    def cluster_id(self) -> str:
        """Return the id of the cluster; empty until the cluster is formed."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the state of the cluster, as far as this node knows without asking others."""
        ...

    def reasons(self) -> dict[str, str]:
        """Return why this node cannot serve clients, by code; empty if it can."""
        ...


class Ephemeral:
    """An ephemeral stream: its subscriptions, without stored messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = 0
        self.made = ""
        self.settings = StreamSettings(kind="ephemeral")
        self.exchange: Exchange[Any, Any] = Exchange()


Stream = Persistent | Ephemeral


class Node:
    """The streams of a directory. Make it within an event loop; call `open` before use, and `close` at the end."""

    def __init__(
        self,
        data: Path,
        threads: int = 2,
        disk: Disk | None = None,
        clock: Callable[[], int] | None = None,
        in_cluster: bool = False,
    ) -> None:
        self.data = data
        self.in_cluster = in_cluster
        self.now = clock or time_of_day
        """Return the time of day (µs)."""
        self.pace = PacedClock()
        self.paced()  # the paced clock starts with the present time of day
        self.loop = asyncio.get_running_loop()
        self.streams: dict[str, Stream] = {}
        self.responses: Responses[Any] = Responses()
        self.response_timeout_s: Callable[[], float] = lambda: RESPONSE_TIMEOUT_S
        """Return how long a request waits for its response by default; in a cluster, all nodes agree on it."""
        self.events: RemoteListeners | None = None
        """Subscriptions on other nodes, if this node belongs to a cluster."""
        self.committer = Committer(threads, self.loop.call_soon_threadsafe)
        self.left_alone: list[str] = []
        """Streams in the directory that belong to no cluster, although the node does."""
        self.not_opened: dict[str, RailgunError] = {}
        """Streams in the directory that could not be opened, and why."""
        self.refused_at_end: list[str] = []
        """Writes that the disk refused when the node was closed, and why."""
        self.refused: Counter[str] = Counter()
        """Number of refused publishes, by code."""
        self.cluster: Cluster | None = None
        self.routing: Routing | None = None
        """Which node serves which stream; None if this node is alone."""
        self.passage: Passage | None = None
        """How sessions are passed on to other nodes."""
        self._disk = disk or NodeDisk(data)
        self._noted: int | None = None  # the last time of day (µs) noted before this start
        self._started = self.now()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock: Lock | None = None
        self._checking: asyncio.Task[None] | None = None
        self._retention: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._expiry: tuple[int, asyncio.TimerHandle] | None = None  # deadline, and its timer

    def paced(self) -> int:
        """Return the time of day (µs), held to a steady clock: the time that is stored with messages."""
        return self.pace.read(self.now(), steady_us())

    # ------------------------------------------------------------ opening and closing

    def open(self) -> list[str]:
        """Take the directory, and open all streams in it; return messages for the log about what was found."""
        format_due = check_format(self._disk, "", NODE_FORMAT)
        self._disk.make_directory("streams")
        try:
            self._lock = self._disk.lock("lock")
        except LockedError as error:
            raise InUseError(f"another node works in {self.data}: stop it first") from error
        try:
            due = [
                name
                for name in self._disk.directories("streams")
                if check_format(self._disk, f"streams/{name}", STREAM_FORMAT)
            ]
            messages = self._open_streams()
            for name in due:
                if SETTINGS_FILE in self._disk.list(f"streams/{name}"):
                    write_format(self._disk, f"streams/{name}", STREAM_FORMAT)
            if format_due:
                write_format(self._disk, "", NODE_FORMAT)
                self._disk.make_directory("streams")  # which makes the names in the root durable
        except BaseException:
            for stream in self._persistent():
                stream.close()
            self._lock.release()
            raise
        self._read_noted_time()
        if wrong := wrong_at_start(str(self.data), self.clock_at_start_s):
            messages.append(wrong)
        self._note_time()
        self._schedule_retention()
        self._check_clock(self.now() - _steady())
        self._checking = self.loop.create_task(self._check_files())
        return messages

    def _open_streams(self) -> list[str]:
        messages = []
        for name in self._disk.directories("streams"):
            home = f"streams/{name}"
            if SETTINGS_FILE not in self._disk.list(home):
                if DELETED_FILE not in self._disk.list(home) and self._has_messages(home):
                    missing = self._no_settings(name)
                    self.not_opened[name] = missing
                    messages.append(f"{missing} The stream is left alone.")
                else:
                    with unless_read_only():
                        self._clear(name)
                continue
            file = self._disk.open(f"{home}/{SETTINGS_FILE}")
            stored: Any = None
            try:
                stored = json.loads(file.read(0, file.size()))
                id = int(stored.pop(_ID, 0))
                identity = str(stored.pop(_MADE, ""))
                settings = StreamSettings.of(stored)
            except (ValueError, TypeError, AttributeError, RailgunError) as error:
                failure = self._bad_settings(name, stored, error)
                self.not_opened[name] = failure
                messages.append(f"{failure} The stream is left alone.")
                continue
            finally:
                file.close()
            if self.in_cluster and not id:
                messages.append(f"stream {name!r} is left alone: it is of no cluster")
                self.left_alone.append(name)
                continue
            # Missing files of a copy in a cluster are fetched from other nodes; here they are damage.
            existed = not (self.in_cluster or id)
            try:
                stream = self.streams[name] = self._start(name, settings, id, identity, existed)
            except DamagedLogError as error:
                what = f"stream {name!r} is there and cannot be opened"
                failure = DamagedLogError(f"{what}: {error} {self._way_out(home)}", error.offset)
                self.not_opened[name] = failure
                messages.append(f"{failure} The stream is left alone.")
                continue
            if isinstance(stream, Persistent):
                messages += [f"stream {name!r}: {finding}" for finding in stream.findings]
        return messages

    def _has_messages(self, home: str) -> bool:
        """Return whether the log of a stream has any bytes."""
        for name in self._disk.list(f"{home}/log"):
            file = self._disk.open(f"{home}/log/{name}")
            try:
                if file.size():
                    return True
            finally:
                file.close()
        return False

    def _no_settings(self, name: str) -> RailgunError:
        """Return the error for a stream that has messages, but no settings."""
        home = f"streams/{name}"
        where = self._disk.where(f"{home}/{SETTINGS_FILE}")
        return StorageError(
            f"stream {name!r} is there and cannot be opened: it has messages, and {where} is missing. Nothing was "
            f"changed. Restore the file, and start the node again. {self._way_out(home)}"
        )

    def _bad_settings(self, name: str, stored: Any, error: Exception) -> RailgunError:
        """Return the error for a stream whose settings cannot be read, or are not valid."""
        home = f"streams/{name}"
        where = self._disk.where(f"{home}/{SETTINGS_FILE}")
        unknown = sorted(set(stored) - StreamSettings.names()) if isinstance(stored, dict) else []
        if unknown:
            what = f"the settings {', '.join(map(repr, unknown))}, which this version does not know"
            return later_format(f"stream {name!r} is there and cannot be opened: {where}", what)
        return StorageError(
            f"stream {name!r} is there and cannot be opened: {where} cannot be read: {said(error)}. Nothing was "
            f"changed. Restore the file, and start the node again. {self._way_out(home)}"
        )

    def _way_out(self, home: str) -> str:
        """Return what to do with a stream that can be neither opened nor restored."""
        away = f"stop the node, move {self._disk.where(home)} away, and start it again"
        if self.in_cluster:
            return f"Or {away}: what other nodes have of it is fetched."
        return f"To give up what is in it, {away}: the stream can be made anew then, without its messages."

    async def close(self) -> list[str]:
        """Write everything that is due, and leave the directory; return what is not on disk, and why.

        Writes that the disk refused at the end, and that were never acknowledged, are in `refused_at_end`.
        """
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        if self._retention is not None:
            self._retention.cancel()
        if self._beating is not None:
            self._beating.cancel()
        if self._expiry is not None:
            self._expiry[1].cancel()
        for stream in self._persistent():
            await stream.flush_groups()
        await self.loop.run_in_executor(None, self.committer.close)
        if self._tasks:
            await asyncio.wait(self._tasks)
        lost = self._removed()
        if not lost:
            self._note_time()
        for stream in self._persistent():
            lost += stream.close()
            self.refused_at_end += stream.refused_at_end
        if self._lock is not None:
            self._lock.release()
        return lost

    # ------------------------------------------------------------ clocks, room

    def _read_noted_time(self) -> None:
        with contextlib.suppress(OSError, ValueError, RailgunError):
            file = self._disk.open(CLOCK)
            try:
                self._noted = int(file.read(0, 100))
            finally:
                file.close()
        self._started = self.now()

    def _note_time(self) -> None:
        """Note the time of day for the next start; without a note, the next start has nothing to compare with."""
        with contextlib.suppress(OSError, RailgunError):
            put(self._disk, f"{CLOCK}.new", [b"%d" % self.now()]).close()
            self._disk.rename(f"{CLOCK}.new", CLOCK)

    @property
    def clock_at_start_s(self) -> float:
        """Return how far the time of day was ahead of the noted time at the start (seconds); below 0: behind.

        0 if there was no note, or if the time of day was behind and has reached the noted time since.
        """
        if self._noted is None:
            return 0.0
        off = self._started - self._noted
        return 0.0 if off < 0 and self.now() >= self._noted else off / SECOND

    def time_ahead(self) -> dict[str, float]:
        """Return the streams whose last message is stored far ahead of the time of day, and by how many seconds."""
        ahead = {stream.name: stream.stored_ahead for stream in self._persistent()}
        return {name: round(us / SECOND, 3) for name, us in ahead.items() if us > TIME_AHEAD}

    def alarms(self) -> list[dict[str, Any]]:
        """Return the alarms: those of the cluster, or of this node alone, about its disk, its clock and its streams."""
        if self.cluster is not None:
            return list(self.cluster.status()["alarms"])
        full = False
        with contextlib.suppress(OSError):
            full = self._disk.free() < MIN_FREE_BYTES
        status = {
            "name": str(self.data),
            "displaced": self.displaced,
            "not_opened": {name: str(error) for name, error in self.not_opened.items()},
            "full": full,
            "clock_stepped": self.pace.stepped / SECOND,
            "clock_at_start": self.clock_at_start_s,
            "time_ahead": self.time_ahead(),
        }
        return [asdict(alarm) for alarm in of_lone_node(status)]

    @property
    def displaced(self) -> str:
        """Return why the directory at the node's path is not the one in which it works; "" if it is."""
        if self._lock is None or self._lock.held():
            return ""
        return f"{self.data} is not the directory any more in which this node works: {GONE}"

    def reasons(self) -> dict[str, str]:
        """Return why this node, or some of its streams, cannot serve clients: by code, or by the name of the stream."""
        reasons = {"DATA_GONE": self.displaced} if self.displaced else {}
        reasons |= {name: str(error) for name, error in sorted(self.not_opened.items())}
        for name, stream in sorted(self.streams.items()):
            if isinstance(stream, Persistent) and stream.trouble:
                reasons[name] = str(stream.trouble)
        return reasons if self.cluster is None else reasons | self.cluster.reasons()

    def _check_place(self, what: str) -> None:
        """Raise `StorageError` if the directory is not at its place: then `what` cannot be done, and would be lost."""
        if self.displaced:
            raise StorageError(
                f"{what}: {self.displaced}. Stop the node, put back what was there, and start it again."
            )

    def _removed(self) -> list[str]:
        """Return what somebody has removed under this node: settings of streams, or the directory."""
        removed = []
        with contextlib.suppress(OSError):
            if self.displaced:
                removed.append(self.displaced)
            for name in self.streams:
                home = f"streams/{name}"
                if SETTINGS_FILE not in self._disk.list(home):
                    where = self._disk.where(f"{home}/{SETTINGS_FILE}")
                    removed.append(f"stream {name!r}: {where} was removed, so the stream is gone")
        return removed

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run this in the background; `close` waits for it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as seen: callers that await the task get it

    def _start(
        self, name: str, settings: StreamSettings, id: int, identity: str, existed: bool = False
    ) -> Stream:
        stream: Stream
        if settings.kind == "ephemeral":
            stream = Ephemeral(name)
        else:
            stream = Persistent(
                *(name, settings, self._disk, f"streams/{name}", self.committer, self.loop),
                *(self.now, self._dead_letters_of, self._staging_of),
                in_cluster=self.in_cluster,
                paced=self.paced,
                log_config=STAGING_LOG if name.endswith(STAGING) else None,
                existed=existed,
            )
        stream.id, stream.made = id, identity
        return stream

    def identity_of(self, stream: Stream) -> str:
        """Return what tells a stream from earlier and later ones of its name; "" if that is not known.

        In a cluster, the identity comes from the entry that made the stream, and is the same on all nodes.
        """
        if stream.id and self.cluster is not None:
            return f"{self.cluster.cluster_id[:16]}-{stream.id}"
        return stream.made

    def check_identity(self, stream: Persistent, identity: str) -> None:
        """Raise `StreamReplacedError` if a producer began with another stream of this name; "" matches any."""
        now = self.identity_of(stream)
        if identity and now and identity != now:
            raise StreamReplacedError(
                f"stream {stream.name!r} was deleted and made anew since this producer has begun: what was staged and "
                "not committed then is lost. Begin again"
            )

    def _persistent(self) -> Iterator[Persistent]:
        return (stream for stream in self.streams.values() if isinstance(stream, Persistent))

    async def _dead_letters_of(self, stream: Persistent) -> Persistent:
        """Return the stream for the dead letters of a stream."""
        return await self._companion(stream, DEAD, StreamSettings(id_box=DEAD_LETTER_ID_BOX_S))

    async def _staging_of(self, stream: Persistent) -> Persistent:
        """Return the stream for the staged messages of a stream's producers."""
        return await self._companion(stream, STAGING, StreamSettings())

    async def _companion(
        self, stream: Persistent, suffix: str, settings: StreamSettings
    ) -> Persistent:
        """Return the stream named `stream.name + suffix`; make it, in the same region, if it does not exist."""
        name = stream.name + suffix
        if name not in self.streams and self.cluster is not None:
            await self.cluster.make_beside(stream.name, name, settings)
        elif name not in self.streams:
            async with self._changing:
                if name not in self.streams:
                    await self._make(name, settings)
        companion = self.streams[name]
        if not isinstance(companion, Persistent):
            raise DeadLetterError(f"{name!r} is not persistent: nothing can be kept in it")
        return companion

    def _schedule_retention(self) -> None:
        """Apply retention in regular intervals."""
        self._retention = self.loop.call_later(RETENTION_INTERVAL_S, self._schedule_retention)
        self.spawn(self._retain())

    def _check_clock(self, ahead: int) -> None:
        """Check whether the time of day has jumped; `ahead`: how far it was ahead of a steady clock (µs)."""
        self.paced()
        now_ahead = self.now() - _steady()
        if abs(now_ahead - ahead) > CLOCK_JUMP_US:
            for stream in self._persistent():
                stream.check_groups()
        self._beating = self.loop.call_later(CHECK_CLOCK_S, self._check_clock, now_ahead)

    async def _check_files(self) -> None:
        """Notice removed files and the end of a full disk even without publishes; regularly note what is safe."""
        noted = self.loop.time()
        while True:
            await asyncio.sleep(CHECK_FILES_S)
            began = self.loop.time()
            if due := began - noted > KEEP_NOTES_S:
                noted = began
                if not self.displaced:
                    await self.loop.run_in_executor(None, self._note_time)
            for stream in list(self._persistent()):
                try:
                    await stream.check_files()
                    if due:
                        stream.keep_note()
                except Exception:
                    _LOG.exception("the files of stream %r cannot be checked", stream.name)
            await asyncio.sleep(20 * (self.loop.time() - began))  # with many streams, less often

    async def _retain(self) -> None:
        for stream in [stream for stream in self._persistent() if stream.acting]:
            with contextlib.suppress(RailgunError):  # tried again after the next interval
                if stream.settings.limited:
                    await stream.retain()
                else:  # producers, and what they have staged, may expire
                    await stream.producing.expire()

    # ------------------------------------------------------------ responses

    def await_response(self, name: str, session: Any, timeout: int) -> None:
        """Let a session await a response for `timeout` µs; `session.expired` is called if none comes."""
        now = _steady()
        self.responses.open(name, session, now + timeout)
        self._set_expiry_timer(now + timeout, now)

    def _set_expiry_timer(self, deadline: int, now: int) -> None:
        """Set the one timer of all awaited responses to this deadline, if that is the earliest."""
        if self._expiry is not None:
            if self._expiry[0] <= deadline:
                return
            self._expiry[1].cancel()
        delay = (deadline - now) / SECOND
        self._expiry = deadline, self.loop.call_later(delay, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = _steady()
        for name, session in self.responses.expired(now):
            session.expired(name)
        following = self.responses.deadline()
        if following is not None:
            self._set_expiry_timer(following, now)

    # ------------------------------------------------------------ streams

    def get(self, name: str) -> Stream:
        """Return a stream by its name; raise `NoStreamError`, or why it could not be opened."""
        stream = self.streams.get(name)
        if stream is None:
            self._check_opened(name)
            raise NoStreamError(
                f"there is no stream {name[:200]!r}: make it (railgun stream ensure)"
            )
        return stream

    def _check_opened(self, name: str) -> None:
        """Raise the reason if a stream exists and could not be opened."""
        if name in self.not_opened:
            raise self.not_opened[name].with_traceback(None)

    def get_persistent(self, name: str) -> Persistent:
        """Return a stream by its name; raise `NotPersistentError` if it is ephemeral."""
        stream = self.get(name)
        if not isinstance(stream, Persistent):
            raise NotPersistentError(f"stream {name!r} is ephemeral: it keeps nothing")
        return stream

    async def ensure(
        self, name: str, asked: dict[str, Any] | None = None, mode: Mode = "warn"
    ) -> dict[str, Any]:
        """Make a stream, change its settings, or tell how they differ; return the result, and the differences."""
        check_name(name)
        if self.cluster is not None:
            return await self.cluster.ensure(name, asked or {}, mode)
        async with self._changing:
            return await self._ensure(name, asked, mode)

    async def _ensure(self, name: str, asked: dict[str, Any] | None, mode: Mode) -> dict[str, Any]:
        self._check_opened(name)
        stream = self.streams.get(name)
        existing = None if stream is None else asdict(stream.settings)
        wanted = StreamSettings.merged(existing, asked or {})
        if stream is None:
            await self._make(name, wanted)
            return {"result": "CREATED", "differs": {}}
        differs = {
            key: {"is": value, "asked": getattr(wanted, key)}
            for key, value in asdict(stream.settings).items()
            if key in (asked or {}) and value != getattr(wanted, key)
        }
        if not differs:
            return {"result": "UNCHANGED", "differs": {}}
        if mode == "strict" or (mode == "overwrite" and "kind" in differs):
            raise StreamDiffersError(f"stream {name!r}: {difference(differs)}")
        if mode != "overwrite":
            return {"result": "DIFFERS", "differs": differs}
        await self._change(stream, wanted)
        return {"result": "UPDATED", "differs": differs}

    async def _change(self, stream: Stream, settings: StreamSettings) -> None:
        name = stream.name
        self._check_place(f"the stream {name!r} cannot be changed")
        try:
            await self.loop.run_in_executor(None, self._write, stream, settings)
        except OSError as error:
            raise storage_error(error, f"the stream {name!r} cannot be changed") from error
        stream.settings = settings
        if isinstance(stream, Persistent):
            stream.settings_changed()

    async def make(self, name: str, settings: StreamSettings, id: int) -> Stream:
        """Make the copy of a stream of the cluster."""
        async with self._changing:
            return await self._make(name, settings, id)

    async def change(self, name: str, settings: StreamSettings) -> None:
        """Change the settings of a copy."""
        async with self._changing:
            await self._change(self.get(name), settings)

    async def drop(self, name: str) -> None:
        """Delete the copy of a stream that the cluster has deleted."""
        async with self._changing:
            await self._delete(name)

    async def _make(self, name: str, settings: StreamSettings, id: int = 0) -> Stream:
        self._check_place(f"the stream {name!r} cannot be made")
        try:
            stream = await self.loop.run_in_executor(None, self._make_files, name, settings, id)
        except OSError as error:
            raise storage_error(error, f"the stream {name!r} cannot be made") from error
        self.streams[name] = stream
        if self.events is not None and isinstance(stream, Ephemeral):
            self.events.stream_made(stream)
        return stream

    def _make_files(self, name: str, settings: StreamSettings, id: int) -> Stream:
        home = f"streams/{name}"
        self._check_opened(name)
        if SETTINGS_FILE in self._disk.list(home):  # names may differ only in case
            raise FileExistsError(errno.EEXIST, f"{self._disk.where(home)} is another stream's")
        self._clear(name)  # files that an earlier delete could not remove
        stream: Stream | None = None
        try:
            self._disk.make_directory(home)
            write_format(self._disk, home, STREAM_FORMAT)
            stream = self._start(name, settings, id, "" if id else secrets.token_hex(8))
            self._write(stream, settings)
        except BaseException:
            with contextlib.suppress(OSError, RailgunError):
                if isinstance(stream, Persistent):
                    stream.close()
                self._clear(name)
            raise
        return stream

    def _clear(self, name: str) -> None:
        """Remove the directory of a stream: its settings first, so that it is none, and the record of that last."""
        home = f"streams/{name}"
        if name not in self._disk.directories("streams"):
            return
        if SETTINGS_FILE in self._disk.list(home):
            self._disk.rename(f"{home}/{SETTINGS_FILE}", f"{home}/{DELETED_FILE}")
        self._disk.sync_directory(home)
        for below in self._disk.directories(home):
            self._disk.clear(f"{home}/{below}")
        self._disk.sync_directory(home)
        self._disk.clear(home)
        self._disk.sync_directory("streams")

    def _write(self, stream: Stream, settings: StreamSettings) -> None:
        home = f"streams/{stream.name}"
        stored = asdict(settings) | ({_ID: stream.id} if stream.id else {})
        stored |= {_MADE: stream.made} if stream.made else {}
        put(self._disk, f"{home}/{SETTINGS_FILE}.new", [json.dumps(stored).encode()]).close()
        self._disk.rename(f"{home}/{SETTINGS_FILE}.new", f"{home}/{SETTINGS_FILE}")
        self._disk.sync_directory(home)

    async def delete(self, name: str, dead_letters: bool = False) -> dict[str, Any]:
        """Delete a stream and all its messages; return the names of the deleted streams."""
        if self.cluster is not None:
            return await self.cluster.delete(name, dead_letters)
        async with self._changing:
            self.get(name)
            deleted = [name]
            if dead_letters and name + DEAD in self.streams:
                deleted.append(name + DEAD)
            staged = [name + STAGING] if name + STAGING in self.streams else []
            for stream_name in [*deleted, *staged]:
                await self._delete(stream_name)
        return {"deleted": deleted}

    # ------------------------------------------------------------ producers

    async def begin_producer(
        self,
        name: str,
        producer: str,
        epoch: int | None = None,
        keep: list[int] | None = None,
        lifetime: float = 0.0,
        session: str | None = None,
    ) -> dict[str, Any]:
        """Begin an epoch of a producer, by its number or for a session; return the number, and what is staged.

        Raise `BadRequestError` if both or neither are given, or if a session comes with `keep`.
        """
        if (epoch is None) == (session is None) or (session is not None and keep is not None):
            raise BadRequestError(
                "a producer begins with an epoch, or else with a session, which keeps nothing that was staged before: "
                "give one of epoch and session, and keep with an epoch only"
            )
        stream = self.get_persistent(name)
        begun = await stream.producing.begin(producer, epoch, keep, int(lifetime * SECOND), session)
        return begun | {"identity": self.identity_of(stream)}

    def _producing(self, name: str, identity: str) -> Producing:
        """Return the producers of a stream; raise `StreamReplacedError` if the stream has another identity."""
        stream = self.get_persistent(name)
        self.check_identity(stream, identity)
        return stream.producing

    async def open_sequence(
        self, name: str, producer: str, epoch: int, label: int | None = None, identity: str = ""
    ) -> dict[str, Any]:
        """Return a new sequence for which the producer can stage messages."""
        producing = self._producing(name, identity)
        return {"sequence": await producing.open(producer, epoch, label)}

    async def commit_sequences(
        self,
        name: str,
        producer: str,
        epoch: int,
        counts: dict[str, int],
        order: list[int] | None = None,
        label: int | None = None,
        label_since: int | None = None,
        identity: str = "",
    ) -> dict[str, Any]:
        """Add staged messages of a producer to the stream, once; return how many, and the offset of the first.

        Raise `BadRequestError` if `order` has other sequences than `counts`, or if `label_since` is above `label`.
        """
        producing = self._producing(name, identity)
        by_sequence = {int(sequence): count for sequence, count in counts.items()}
        order = sorted(by_sequence) if order is None else order
        if sorted(order) != sorted(by_sequence):
            raise BadRequestError(
                f"order is {order}, and counts is of {sorted(by_sequence)}: name the same sequences, each once"
            )
        labels = None
        if label is not None:
            labels = range(label if label_since is None else label_since, label + 1)
        if (labels is not None and not labels) or (label is None and label_since is not None):
            raise BadRequestError(
                f"label_since is {label_since}: it needs a label that is not below it"
            )
        wanted = {sequence: by_sequence[sequence] for sequence in order}
        count, base = await producing.commit(producer, epoch, wanted, labels)
        return {"committed": count, "base": base}

    async def drop_sequences(
        self, name: str, producer: str, epoch: int, sequences: list[int], identity: str = ""
    ) -> dict[str, Any]:
        """Drop what a producer has staged for these sequences."""
        await self._producing(name, identity).drop(producer, epoch, sequences)
        return {}

    async def forget_producer(self, name: str, producer: str) -> dict[str, Any]:
        """Forget a producer, and drop what it has staged; return whether it existed."""
        return {"forgotten": await self.get_persistent(name).producing.forget(producer)}

    async def producers(self, name: str) -> list[dict[str, Any]]:
        """Describe the producers of a stream."""
        return await self.get_persistent(name).producing.describe()

    async def _delete(self, name: str) -> None:
        stream = self.streams[name]
        home = f"streams/{name}"
        run = self.loop.run_in_executor
        what = f"the stream {name!r} cannot be deleted"
        self._check_place(what)
        try:
            files = f"{home}/{SETTINGS_FILE}", f"{home}/{DELETED_FILE}"
            await run(None, self._disk.rename, *files)
        except OSError as error:
            raise storage_error(error, f"{what}, and is as it was") from error
        del self.streams[name]
        gone = NoStreamError(f"the stream {name!r} was deleted")
        try:  # messages go only once the deletion is durable: else the stream could come back empty
            await run(None, self._disk.sync_directory, home)
        except OSError as error:
            raise storage_error(error, f"{what} for good, and may come back") from error
        finally:
            if isinstance(stream, Persistent):
                await stream.delete(gone)
            else:
                if self.events is not None:
                    self.events.stream_gone(name)
                for listener in stream.exchange.members():
                    listener.lost(gone)
        try:
            await run(None, self._clear, name)
        except OSError as error:
            raise storage_error(
                error, f"the stream {name!r} is deleted, but not its files"
            ) from error

    async def purge(self, name: str, before: int | None = None) -> dict[str, Any]:
        """Remove all messages of a stream, or those before an offset; return the new first offset, and how many."""
        stream = self.get_persistent(name)
        was, end = stream.log.first, stream.end
        if before is not None and before > end:
            raise OffsetRangeError(f"stream {name!r} ends at {end}: {before} is beyond")
        first = await stream.purge(before)
        return {"first": first, "end": stream.end, "purged": max(0, first - was)}

    async def redrive(
        self, name: str, offsets: list[int] | None = None, most: int | None = None
    ) -> dict[str, Any]:
        """Deliver dead letters of a stream again, to the groups that gave them up; return what became of them."""
        stream = self.get_persistent(name)
        dead_letters = self.get_persistent(name + DEAD) if name + DEAD in self.streams else None
        return asdict(await redrive(dead_letters, stream, offsets, most))

    def describe(self, name: str) -> dict[str, Any]:
        """Return a description of a stream: settings, offsets, size, groups."""
        stream = self.get(name)
        description: dict[str, Any] = {"name": name, "settings": asdict(stream.settings)}
        if isinstance(stream, Persistent):
            log = stream.log
            description |= {
                "identity": self.identity_of(stream),
                "first": log.first,
                "end": stream.end,
                "bytes": log.size,
                "last_time": log.last_time / SECOND if log.durable_end > log.first else None,
                "trouble": str(stream.trouble or ""),
                "damaged_at": None if stream.damage is None else stream.damage.offset,
                "groups": self.groups(name),
                "readers": sum(group.startswith("#") for group in stream.groups),
            }
        else:
            description["consumers"] = len(stream.exchange)
        if self.cluster is not None:
            description["region"] = self.cluster.region_of(name)
        return description

    def describe_all(self) -> list[dict[str, Any]]:
        """Return descriptions of all streams, sorted by name."""
        return [self.describe(name) for name in sorted(self.streams)]

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Return descriptions of the groups of a stream."""
        stream = self.get(name)
        if not isinstance(stream, Persistent):
            return []
        return [self.group(name, group) for group in stream.groups if group[0] != "#"]

    def _driver(self, name: str, group: str) -> tuple[Persistent, GroupDriver]:
        stream = self.get(name)
        driver = stream.groups.get(group) if isinstance(stream, Persistent) else None
        if driver is None or not isinstance(stream, Persistent) or group.startswith("#"):
            raise NoGroupError(f"stream {name!r} has no group {group!r}")
        return stream, driver

    async def reset_group(self, name: str, group: str, to: str | int) -> dict[str, Any]:
        """Move a group to the `start`, the `end` or an offset; raise `GroupBusyError` if a member is live."""
        stream, _ = self._driver(name, group)
        places: dict[str | int, int | None] = {"start": stream.log.first, "end": None}
        place = places[to] if isinstance(to, str) else to
        return {"position": await stream.reset(group, place)}

    async def delete_group(self, name: str, group: str) -> dict[str, Any]:
        """Delete a group and its position; raise `GroupBusyError` if a member is live."""
        stream, _ = self._driver(name, group)
        await stream.remove(group)
        return {"deleted": group}

    def finished(self, name: str, group: str) -> dict[str, Any]:
        """Return which messages a group has finished with: all below `floor`, and `ranges` (first, end) above it."""
        _, driver = self._driver(name, group)
        settled = driver.group.settled
        return {"floor": driver.group.floor, "ranges": [(first, end) for first, end, _ in settled]}

    def group(self, name: str, group: str) -> dict[str, Any]:
        """Describe a group: its state, its lag, and why it gets no messages."""
        _, driver = self._driver(name, group)
        description = asdict(driver.explain())
        description |= {"name": group, "exclusive": driver.group.config.exclusive}
        description["redelivered"] = driver.redelivered
        description["lag"] = description["end"] - description["floor"]
        return description


def _steady() -> int:
    """Return the time (µs) of a clock that never jumps, for timers: only differences mean something."""
    return time.monotonic_ns() // 1000


def refuse_hidden(name: str) -> None:
    """Raise `NoStreamError` for the name of a stream that is hidden from users, as it is for staged messages."""
    if name.endswith(STAGING):
        raise NoStreamError(
            f"{name[:200]!r} is no stream for others: names that end with {STAGING!r} are for what producers stage"
        )
