"""A node: the streams it has, by their names, and what can be done with them.

Rules:

1. What a stream is stands in a file beside its log, written before the stream is used and replaced whole. A directory
   without it is a stream that was being made or deleted, and is removed.
2. One node works in a directory at a time. If the directory is not at its place any more (its lock is not the one that
   was taken), streams are neither made nor changed nor deleted, and the node says so.
3. `ensure` makes a stream what it is asked to be, or says how it differs; it never ends anything. A stream is used
   when that file is on disk: if it cannot be made, there is none.
4. `delete` removes that file first, for good, and the rest then: a crash leaves the stream, or nothing.
5. Streams are made, changed and deleted one at a time, and their files in other threads: nobody waits for them who does
   not ask for them.
6. Timers run by a clock that never jumps, and deadlines by the time of day, which may: when it has jumped, all groups
   look at their deadlines anew, a second later at most.
7. A stream of which the settings cannot be read, or whose log is gone, is left alone; the others go on. It is told at
   the start, by an alarm, and to all who ask for it, with what to do (`not_opened`). It is not made anew.
8. In a cluster, which streams there are is agreed on by all nodes (`cluster`), and each makes, changes and deletes its
   copies accordingly. A stream knows by its id which one it is: another one of its name is another one.
9. The directory of the node and that of each stream have a format file (`railgun.storage.formats`). If one of them,
   or anything in a log, is of a later version of Railgun, the node does not start and changes nothing: it could not
   serve that stream, and other nodes would take it for a copy.
10. The time of day is noted in the file `clock`, at the start, every `KEEP_NOTES_S`, and at the end. A node that starts
   more than `MAX_STEP_S` before that, or more than `MAX_PAUSE_S` after it, says so (`clock_at_start_s`) and goes on:
   it cannot know which of both times was wrong. It says so until the noted time is reached, or it is started again.
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
from railgun.broker.streams.persistent import TIME_AHEAD, NoGraveError, Persistent
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

RETENTION: Final = 10.0  # seconds between two looks at what is too old
BEAT: Final = 1.0  # seconds between two looks at the clock
CHECK_FILES_S: Final = 1.0  # between two looks at the files of all streams
KEEP_NOTES_S: Final = 20.0  # between two notes of what is safe
LEAST_ROOM: Final = (
    64 << 20
)  # bytes free on a disk; with less, a node says so, and others are rather master
JUMP: Final = SECOND // 2  # more than clocks drift in that time
RESPONSE_TIMEOUT_S: Final = OPTIONS["rs_timeout"].default or 30.0
DEAD_BOX: Final = 7 * 24 * 3600.0  # so long a dead letter is not brought twice
NODE_FORMAT: Final = Format("railgun node", 1)
"""Of the directory of a node."""
STAGING_LOG: Final = LogConfig(segment_bytes=16 << 20)
"""Of what is staged little is needed for long: small segments can be taken away soon."""
STREAM_FORMAT: Final = Format("railgun stream", 1)
"""Of the directory of a stream: its settings, its log and its group log."""
SETTINGS_FILE: Final = "stream.json"
"""In the directory of a stream."""
DELETED_FILE: Final = "deleted"
"""Has the settings of a stream that is deleted: they are renamed to this first, and it goes last."""
_ID: Final = "id"  # in there, beside the settings: of the stream in its cluster
_LOG: Final = logging.getLogger(__name__)
CLOCK: Final = "clock"
"""The file with the time of day that was noted last (µs)."""
_MADE: Final = "made"  # and so is what tells it from others of its name, if it is of no cluster
Mode = Literal["warn", "overwrite", "strict"]
T = TypeVar("T")


class StreamDiffersError(RailgunError):
    """A stream of that name is there, and is not what was asked for."""

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
        """Add the subscriptions of other nodes to a stream that was made here."""

    def stream_gone(self, name: str) -> None:
        """Remove the subscriptions of other nodes to a stream that was deleted here."""

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
    """What a node asks of its cluster."""

    async def ensure(self, name: str, asked: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Make a stream what it is asked to be, on all nodes."""
        ...

    async def delete(self, name: str, dead_letters: bool) -> dict[str, Any]:
        """Take a stream away, on all nodes."""
        ...

    async def make_beside(self, stream: str, name: str, settings: StreamSettings) -> None:
        """Make a stream that keeps something for another one, in its region; returns when it is there."""
        ...

    def region_of(self, name: str) -> str | None:
        """Where a stream is kept; None: nobody has heard of it."""
        ...

    async def every(self) -> list[dict[str, Any]]:
        """All streams of the cluster, as their masters describe them."""
        ...

    async def administer(self, call: str, arguments: dict[str, Any]) -> Any:
        """Do one of the calls that are about the cluster itself, or tell of it."""
        ...

    async def elsewhere(self, call: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Let the master of a stream do a call, if that is another node: whether it is, and what came of it."""
        ...

    @property
    def cluster_id(self) -> str:
        """What tells this cluster from others; empty: it is not formed yet."""
        ...

    def status(self) -> dict[str, Any]:
        """How the cluster is, as far as this node knows without asking anybody."""
        ...

    def reasons(self) -> dict[str, str]:
        """Why this node is of no use to clients, by code; nothing: it is."""
        ...


class Ephemeral:
    """An ephemeral stream: who listens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = 0
        self.made = ""
        self.settings = StreamSettings(kind="ephemeral")
        self.exchange: Exchange[Any, Any] = Exchange()


Stream = Persistent | Ephemeral


class Node:
    """The streams of a directory. Made within an event loop; `open` before use, `close` at the end."""

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
        """The time of day (µs)."""
        self.pace = PacedClock()
        self.paced()  # takes the time of day as it is now
        self.loop = asyncio.get_running_loop()
        self.streams: dict[str, Stream] = {}
        self.responses: Responses[Any] = Responses()
        self.response_timeout_s: Callable[[], float] = lambda: RESPONSE_TIMEOUT_S
        """Return how long a request waits for its response if it does not say; in a cluster, as all have agreed."""
        self.events: RemoteListeners | None = None
        """Ephemeral streams across nodes, if this is one of a cluster."""
        self.committer = Committer(threads, self.loop.call_soon_threadsafe)
        self.left_alone: list[str] = []
        """Streams in the directory that are of no cluster, though the node is."""
        self.not_opened: dict[str, RailgunError] = {}
        """Streams that are in the directory and cannot be opened, and why."""
        self.refused_at_end: list[str] = []
        """What the files of streams refused when the node was closed, and why."""
        self.refused: Counter[str] = Counter()
        """Publishes that were refused, by code."""
        self.cluster: Cluster | None = None
        self.routing: Routing | None = None
        """Where streams are served; None: this node is alone."""
        self.passage: Passage | None = None
        """How sessions are passed on to other nodes."""
        self._disk = disk or NodeDisk(data)
        self._noted: int | None = (
            None  # the time of day that was noted last, in the life before (µs)
        )
        self._started = self.now()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock: Lock | None = None
        self._checking: asyncio.Task[None] | None = None
        self._retention: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._expiry: tuple[int, asyncio.TimerHandle] | None = None  # when, and what will look then

    def paced(self) -> int:
        """Return the time of day, held to a steady clock: what is stored with messages (µs)."""
        return self.pace.read(self.now(), steady_us())

    # ------------------------------------------------------------ begin and end

    def open(self) -> list[str]:
        """Take the directory, and open all streams in it; what recovery has to tell of them."""
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
            told = self._open_streams()
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
        self._look_at_noted_time()
        if wrong := wrong_at_start(str(self.data), self.clock_at_start_s):
            told.append(wrong)
        self._note_time()
        self._keep()
        self._beat(self.now() - _steady())
        self._checking = self.loop.create_task(self._check_files())
        return told

    def _open_streams(self) -> list[str]:
        told = []
        for name in self._disk.directories("streams"):
            home = f"streams/{name}"
            if SETTINGS_FILE not in self._disk.list(home):
                if DELETED_FILE not in self._disk.list(home) and self._has_messages(home):
                    missing = self._no_settings(name)
                    self.not_opened[name] = missing
                    told.append(f"{missing} The stream is left alone.")
                else:
                    with unless_read_only():
                        self._clear(name)
                continue
            file = self._disk.open(f"{home}/{SETTINGS_FILE}")
            told_settings: Any = None
            try:
                told_settings = json.loads(file.read(0, file.size()))
                id = int(told_settings.pop(_ID, 0))
                made = str(told_settings.pop(_MADE, ""))
                settings = StreamSettings.of(told_settings)
            except (ValueError, TypeError, AttributeError, RailgunError) as error:
                wrong = self._bad_settings(name, told_settings, error)
                self.not_opened[name] = wrong
                told.append(f"{wrong} The stream is left alone.")
                continue
            finally:
                file.close()
            if self.in_cluster and not id:
                told.append(f"stream {name!r} is left alone: it is of no cluster")
                self.left_alone.append(name)
                continue
            known = not (self.in_cluster or id)  # what a copy of a cluster lacks, others have
            try:
                stream = self.streams[name] = self._start(name, settings, id, made, known)
            except DamagedLogError as error:
                what = f"stream {name!r} is there and cannot be opened"
                wrong = DamagedLogError(f"{what}: {error} {self._way_out(home)}", error.offset)
                self.not_opened[name] = wrong
                told.append(f"{wrong} The stream is left alone.")
                continue
            if isinstance(stream, Persistent):
                told += [f"stream {name!r}: {one}" for one in stream.told]
        return told

    def _has_messages(self, home: str) -> bool:
        """Return whether there is anything in the log of a stream."""
        for name in self._disk.list(f"{home}/log"):
            file = self._disk.open(f"{home}/log/{name}")
            try:
                if file.size():
                    return True
            finally:
                file.close()
        return False

    def _no_settings(self, name: str) -> RailgunError:
        """Return why a stream with messages and without settings cannot be opened, and what to do."""
        home = f"streams/{name}"
        where = self._disk.where(f"{home}/{SETTINGS_FILE}")
        return StorageError(
            f"stream {name!r} is there and cannot be opened: it has messages, and {where} is missing. Nothing was "
            f"changed. Restore the file, and start the node again. {self._way_out(home)}"
        )

    def _bad_settings(self, name: str, told: Any, error: Exception) -> RailgunError:
        """Return why a stream with these settings, which are wrong in that way, cannot be opened, and what to do."""
        home = f"streams/{name}"
        where = self._disk.where(f"{home}/{SETTINGS_FILE}")
        strange = sorted(set(told) - StreamSettings.names()) if isinstance(told, dict) else []
        if strange:
            what = f"the settings {', '.join(map(repr, strange))}, which this version does not know"
            return later_format(f"stream {name!r} is there and cannot be opened: {where}", what)
        return StorageError(
            f"stream {name!r} is there and cannot be opened: {where} cannot be read: {said(error)}. Nothing was "
            f"changed. Restore the file, and start the node again. {self._way_out(home)}"
        )

    def _way_out(self, home: str) -> str:
        """Return what to do with a stream that cannot be opened nor restored."""
        away = f"stop the node, move {self._disk.where(home)} away, and start it again"
        if self.in_cluster:
            return f"Or {away}: what other nodes have of it is fetched."
        return f"To give up what is in it, {away}: the stream can be made anew then, without its messages."

    async def close(self) -> list[str]:
        """Write what has to be written, and leave the directory; return what is not on disk, and why.

        What the disk refused last, and nobody was promised, is in `refused_at_end`.
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
            await stream.rest()
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

    def _look_at_noted_time(self) -> None:
        with contextlib.suppress(OSError, ValueError, RailgunError):
            file = self._disk.open(CLOCK)
            try:
                self._noted = int(file.read(0, 100))
            finally:
                file.close()
        self._started = self.now()

    def _note_time(self) -> None:
        """Note the time of day, for the next start; if that cannot be, there is nothing to compare with then."""
        with contextlib.suppress(OSError, RailgunError):
            put(self._disk, f"{CLOCK}.new", [b"%d" % self.now()]).close()
            self._disk.rename(f"{CLOCK}.new", CLOCK)

    @property
    def clock_at_start_s(self) -> float:
        """How far the time of day was ahead of the noted one when the node started; below 0: behind.

        0: there was none, or it was behind and has reached the noted time since.
        """
        if self._noted is None:
            return 0.0
        off = self._started - self._noted
        return 0.0 if off < 0 and self.now() >= self._noted else off / SECOND

    def time_ahead(self) -> dict[str, float]:
        """Return the streams whose last message is stored far ahead of the time of day, and by how much (seconds)."""
        ahead = {stream.name: stream.stored_ahead for stream in self._persistent()}
        return {name: round(us / SECOND, 3) for name, us in ahead.items() if us > TIME_AHEAD}

    def alarms(self) -> list[dict[str, Any]]:
        """Return what is wrong: as the cluster says, or with the room and the clock of this node, if it is alone."""
        if self.cluster is not None:
            return list(self.cluster.status()["alarms"])
        full = False
        with contextlib.suppress(OSError):
            full = self._disk.free() < LEAST_ROOM
        told = {
            "name": str(self.data),
            "displaced": self.displaced,
            "not_opened": {name: str(error) for name, error in self.not_opened.items()},
            "full": full,
            "clock_stepped": self.pace.stepped / SECOND,
            "clock_at_start": self.clock_at_start_s,
            "time_ahead": self.time_ahead(),
        }
        return [asdict(alarm) for alarm in of_lone_node(told)]

    @property
    def displaced(self) -> str:
        """Why the directory at the node's path is not the one in which it works, if so; "": it is."""
        if self._lock is None or self._lock.held():
            return ""
        return f"{self.data} is not the directory any more in which this node works: {GONE}"

    def reasons(self) -> dict[str, str]:
        """Return why this node is of no use to clients, or some streams are: by code, or by the name of the stream."""
        found = {"DATA_GONE": self.displaced} if self.displaced else {}
        found |= {name: str(error) for name, error in sorted(self.not_opened.items())}
        for name, stream in sorted(self.streams.items()):
            if isinstance(stream, Persistent) and stream.trouble:
                found[name] = str(stream.trouble)
        return found if self.cluster is None else found | self.cluster.reasons()

    def _check_place(self, what: str) -> None:
        """Raise `StorageError` if the directory is not at its place: `what` cannot be done, and would be lost."""
        if self.displaced:
            raise StorageError(
                f"{what}: {self.displaced}. Stop the node, put back what was there, and start it again."
            )

    def _removed(self) -> list[str]:
        """Return the streams whose settings somebody has removed under this node, and the directory, if it is gone."""
        lost = []
        with contextlib.suppress(OSError):
            if self.displaced:
                lost.append(self.displaced)
            for name in self.streams:
                home = f"streams/{name}"
                if SETTINGS_FILE not in self._disk.list(home):
                    where = self._disk.where(f"{home}/{SETTINGS_FILE}")
                    lost.append(f"stream {name!r}: {where} was removed, so the stream is gone")
        return lost

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do this beside all else; the node does not end before it has."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever wants to hear of it has heard

    def _start(
        self, name: str, settings: StreamSettings, id: int, made: str, known: bool = False
    ) -> Stream:
        stream: Stream
        if settings.kind == "ephemeral":
            stream = Ephemeral(name)
        else:
            stream = Persistent(
                *(name, settings, self._disk, f"streams/{name}", self.committer, self.loop),
                *(self.now, self._graves, self._staging),
                in_cluster=self.in_cluster,
                paced=self.paced,
                log_config=STAGING_LOG if name.endswith(STAGING) else None,
                known=known,
            )
        stream.id, stream.made = id, made
        return stream

    def identity_of(self, stream: Stream) -> str:
        """Return what tells a stream from others of its name, before and after; empty: that is not known.

        In a cluster it is made of the entry that made the stream, the same on all nodes.
        """
        if stream.id and self.cluster is not None:
            return f"{self.cluster.cluster_id[:16]}-{stream.id}"
        return stream.made

    def check_identity(self, stream: Persistent, identity: str) -> None:
        """Raise `StreamReplacedError` if a producer has begun at another stream of that name. Empty: nobody knows."""
        now = self.identity_of(stream)
        if identity and now and identity != now:
            raise StreamReplacedError(
                f"stream {stream.name!r} was deleted and made anew since this producer has begun: what was staged and "
                "not committed then is lost. Begin again"
            )

    def _persistent(self) -> Iterator[Persistent]:
        return (stream for stream in self.streams.values() if isinstance(stream, Persistent))

    async def _graves(self, stream: Persistent) -> Persistent:
        """Where the dead letters of a stream go."""
        return await self._beside(stream, DEAD, StreamSettings(id_box=DEAD_BOX))

    async def _staging(self, stream: Persistent) -> Persistent:
        """Where it is kept what producers stage for a stream."""
        return await self._beside(stream, STAGING, StreamSettings())

    async def _beside(
        self, stream: Persistent, suffix: str, settings: StreamSettings
    ) -> Persistent:
        """Return the stream that keeps something for another one, in its region; it is made if need be."""
        name = stream.name + suffix
        if name not in self.streams and self.cluster is not None:
            await self.cluster.make_beside(stream.name, name, settings)
        elif name not in self.streams:
            async with self._changing:
                if name not in self.streams:
                    await self._make(name, settings)
        found = self.streams[name]
        if not isinstance(found, Persistent):
            raise NoGraveError(f"{name!r} is not persistent: nothing can be kept in it")
        return found

    def _keep(self) -> None:
        """Take away what is too old, now and then."""
        self._retention = self.loop.call_later(RETENTION, self._keep)
        self.spawn(self._retain())

    def _beat(self, ahead: int) -> None:
        """See whether the clock has jumped; `ahead`: how far it was before the one that never does."""
        self.paced()
        now_ahead = self.now() - _steady()
        if abs(now_ahead - ahead) > JUMP:
            for stream in self._persistent():
                stream.look()
        self._beating = self.loop.call_later(BEAT, self._beat, now_ahead)

    async def _check_files(self) -> None:
        """Notice removed files and the end of a full disk, also if nobody publishes; and note what is safe."""
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
        for stream in [one for one in self._persistent() if one.acting]:
            with contextlib.suppress(RailgunError):  # it stays, and is tried again
                if stream.settings.limited:
                    await stream.retain()
                else:  # its producers may have ends, and what they have staged
                    await stream.producing.expire()

    # ------------------------------------------------------------ responses

    def await_response(self, name: str, session: Any, timeout: int) -> None:
        """A session awaits a response of this name, for so long (µs); `session.expired` is called if none comes."""
        now = _steady()
        self.responses.open(name, session, now + timeout)
        self._look_at(now + timeout, now)

    def _look_at(self, deadline: int, now: int) -> None:
        """One timer for all: it looks when the first one's time is over."""
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
            self._look_at(following, now)

    # ------------------------------------------------------------ streams

    def get(self, name: str) -> Stream:
        """A stream by its name."""
        stream = self.streams.get(name)
        if stream is None:
            self._check_opened(name)
            raise NoStreamError(
                f"there is no stream {name[:200]!r}: make it (railgun stream ensure)"
            )
        return stream

    def _check_opened(self, name: str) -> None:
        """Raise why a stream cannot be opened that is there, if it is so."""
        if name in self.not_opened:
            raise self.not_opened[name].with_traceback(None)

    def get_persistent(self, name: str) -> Persistent:
        """A stream by its name, which has to be persistent."""
        stream = self.get(name)
        if not isinstance(stream, Persistent):
            raise NotPersistentError(f"stream {name!r} is ephemeral: it keeps nothing")
        return stream

    async def ensure(
        self, name: str, asked: dict[str, Any] | None = None, mode: Mode = "warn"
    ) -> dict[str, Any]:
        """Make a stream what it is asked to be: what was done, and what differs."""
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
            stream.changed()

    async def make(self, name: str, settings: StreamSettings, id: int) -> Stream:
        """Make a copy of a stream of the cluster."""
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
            made = await self.loop.run_in_executor(None, self._make_files, name, settings, id)
        except OSError as error:
            raise storage_error(error, f"the stream {name!r} cannot be made") from error
        self.streams[name] = made
        if self.events is not None and isinstance(made, Ephemeral):
            self.events.stream_made(made)
        return made

    def _make_files(self, name: str, settings: StreamSettings, id: int) -> Stream:
        home = f"streams/{name}"
        self._check_opened(name)
        if SETTINGS_FILE in self._disk.list(home):  # as where A and a are the same
            raise FileExistsError(errno.EEXIST, f"{self._disk.where(home)} is another stream's")
        self._clear(name)  # what a delete could not take away
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
        """Take away the directory of a stream that is none (any more): first what makes it one, last that it was."""
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
        told = asdict(settings) | ({_ID: stream.id} if stream.id else {})
        told |= {_MADE: stream.made} if stream.made else {}
        put(self._disk, f"{home}/{SETTINGS_FILE}.new", [json.dumps(told).encode()]).close()
        self._disk.rename(f"{home}/{SETTINGS_FILE}.new", f"{home}/{SETTINGS_FILE}")
        self._disk.sync_directory(home)

    async def delete(self, name: str, dead_letters: bool = False) -> dict[str, Any]:
        """Take a stream away with all that is in it; what is deleted."""
        if self.cluster is not None:
            return await self.cluster.delete(name, dead_letters)
        async with self._changing:
            self.get(name)
            deleted = [name]
            if dead_letters and name + DEAD in self.streams:
                deleted.append(name + DEAD)
            staged = [name + STAGING] if name + STAGING in self.streams else []
            for one in [*deleted, *staged]:
                await self._delete(one)
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
        """Begin an epoch of a producer of a stream, by its number or for a session: its number, and what is staged.

        Raises `BadRequestError` if it has neither or both, or a session `keep`.
        """
        if (epoch is None) == (session is None) or (session is not None and keep is not None):
            raise BadRequestError(
                "a producer begins with an epoch, or else with a session, which keeps nothing that was staged before: "
                "give one of epoch and session, and keep with an epoch only"
            )
        stream = self.get_persistent(name)
        found = await stream.producing.begin(producer, epoch, keep, int(lifetime * SECOND), session)
        return found | {"identity": self.identity_of(stream)}

    def _producing(self, name: str, identity: str) -> Producing:
        """Return the producers of a stream; raise `StreamReplacedError` if the stream has another identity."""
        stream = self.get_persistent(name)
        self.check_identity(stream, identity)
        return stream.producing

    async def open_sequence(
        self, name: str, producer: str, epoch: int, label: int | None = None, identity: str = ""
    ) -> dict[str, Any]:
        """Give a producer a sequence to stage messages for."""
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
        """Let what a producer has staged be part of a stream, once: how many messages that were now.

        Raises `BadRequestError` if `order` has other sequences than `counts`, or `label_since` is above `label`.
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
        """Drop what a producer has staged for some sequences."""
        await self._producing(name, identity).drop(producer, epoch, sequences)
        return {}

    async def forget_producer(self, name: str, producer: str) -> dict[str, Any]:
        """Forget a producer, with what it has staged."""
        return {"forgotten": await self.get_persistent(name).producing.forget(producer)}

    async def producers(self, name: str) -> list[dict[str, Any]]:
        """Tell of the producers of a stream."""
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
        try:  # not until it is for good: else the stream could come back without its messages
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
        """Take messages out of a stream: all, or those before an offset."""
        stream = self.get_persistent(name)
        was, end = stream.log.first, stream.end
        if before is not None and before > end:
            raise OffsetRangeError(f"stream {name!r} ends at {end}: {before} is beyond")
        first = await stream.purge(before)
        return {"first": first, "end": stream.end, "purged": max(0, first - was)}

    async def redrive(
        self, name: str, offsets: list[int] | None = None, most: int | None = None
    ) -> dict[str, Any]:
        """Deliver the dead letters of a stream again, to the groups that gave them up; return what became of them."""
        stream = self.get_persistent(name)
        graves = self.get_persistent(name + DEAD) if name + DEAD in self.streams else None
        return asdict(await redrive(graves, stream, offsets, most))

    def describe(self, name: str) -> dict[str, Any]:
        """What there is to know of a stream."""
        stream = self.get(name)
        told: dict[str, Any] = {"name": name, "settings": asdict(stream.settings)}
        if isinstance(stream, Persistent):
            log = stream.log
            told |= {
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
            told["consumers"] = len(stream.exchange)
        return told if self.cluster is None else told | {"region": self.cluster.region_of(name)}

    def every(self) -> list[dict[str, Any]]:
        """All streams, briefly."""
        return [self.describe(name) for name in sorted(self.streams)]

    def groups(self, name: str) -> list[dict[str, Any]]:
        """The groups of a stream."""
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
        """Let a group begin anew: at the `start`, the `end` or an offset. Only if no member is live."""
        stream, _ = self._driver(name, group)
        places: dict[str | int, int | None] = {"start": stream.log.first, "end": None}
        place = places[to] if isinstance(to, str) else to
        return {"position": await stream.reset(group, place)}

    async def delete_group(self, name: str, group: str) -> dict[str, Any]:
        """Forget a group and its position. Only if no member is live."""
        stream, _ = self._driver(name, group)
        await stream.remove(group)
        return {"deleted": group}

    def finished(self, name: str, group: str) -> dict[str, Any]:
        """Return which messages a group has finished with: all below `floor`, and `ranges` (first, end) above it."""
        _, driver = self._driver(name, group)
        settled = driver.group.settled
        return {"floor": driver.group.floor, "ranges": [(first, end) for first, end, _ in settled]}

    def group(self, name: str, group: str) -> dict[str, Any]:
        """What a group is doing, and why it gets nothing if so."""
        _, driver = self._driver(name, group)
        told = asdict(driver.explain())
        told |= {"name": group, "exclusive": driver.group.config.exclusive}
        told["redelivered"] = driver.redelivered
        told["lag"] = told["end"] - told["floor"]
        return told


def _steady() -> int:
    """In µs; it never jumps, and means nothing by itself."""
    return time.monotonic_ns() // 1000


def refuse_hidden(name: str) -> None:
    """Raise `NoStreamError` for the name of a stream that is for producers only."""
    if name.endswith(STAGING):
        raise NoStreamError(
            f"{name[:200]!r} is no stream for others: names that end with {STAGING!r} are for what producers stage"
        )
