"""A node: the streams it has, by their names, and what can be done with them.

Rules:

1. What a stream is stands in a file beside its log, written before the stream is used and replaced whole. A directory
   without it is a stream that was being made or deleted, and is removed.
2. One node works in a directory at a time.
3. `ensure` makes a stream what it is asked to be, or says how it differs; it never ends anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from railgun.core.errors import RailgunError
from railgun.core.exchange import Exchange, Responses
from railgun.node.commit import Committer
from railgun.node.disk import NodeDisk
from railgun.node.persistent import NoGraveError, Persistent
from railgun.node.settings import DEAD, SECOND, StreamSettings, check_name
from railgun.snapshots.errors import LockedError
from railgun.snapshots.lock import FileLock

RETENTION: Final = 10.0  # seconds between two looks at what is too old
DEAD_BOX: Final = 7 * 24 * 3600.0  # so long a dead letter is not brought twice
_SETTINGS: Final = "stream.json"
Mode = Literal["warn", "overwrite", "strict"]


class NoStreamError(RailgunError, LookupError):
    """There is no stream of that name."""

    code: ClassVar[str] = "NO_STREAM"


class NoGroupError(RailgunError, LookupError):
    """There is no group of that name."""

    code: ClassVar[str] = "NO_GROUP"


class StreamDiffersError(RailgunError):
    """A stream of that name is there, and is not what was asked for."""

    code: ClassVar[str] = "DIFFERS"


class InUseError(RailgunError):
    """Another node works in the directory."""

    code: ClassVar[str] = "IN_USE"


class Ephemeral:
    """An ephemeral stream: who listens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = StreamSettings(kind="ephemeral")
        self.exchange: Exchange[Any, Any] = Exchange()


Stream = Persistent | Ephemeral


class Node:
    """The streams of a directory. Made within an event loop; `open` before use, `close` at the end."""

    def __init__(self, data: Path, threads: int = 2) -> None:
        self.data = data
        self.loop = asyncio.get_running_loop()
        self.streams: dict[str, Stream] = {}
        self.responses: Responses[Any] = Responses()
        self.committer = Committer(threads, self.loop.call_soon_threadsafe)
        self._home = data / "streams"
        self._lock: FileLock | None = None
        self._retention: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ begin and end

    def open(self) -> list[str]:
        """Take the directory, and open all streams in it; what recovery has to tell of them."""
        self._home.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(self.data / "lock")
        except LockedError as error:
            raise InUseError(f"another node works in {self.data}: stop it first") from error
        self._disk = NodeDisk(self.data)
        told = []
        for path in sorted(self._home.iterdir()):
            if not (path / _SETTINGS).exists():
                shutil.rmtree(path)
                continue
            settings = StreamSettings.of(json.loads((path / _SETTINGS).read_text("utf-8")))
            stream = self._start(path.name, settings)
            if isinstance(stream, Persistent) and (stream.found.cut_bytes or stream.found.damage):
                told.append(f"stream {path.name!r}: {stream.found}")
        self._keep()
        return told

    async def close(self) -> None:
        """Write what has to be written, and leave the directory."""
        if self._retention is not None:
            self._retention.cancel()
        persistent = list(self._persistent())
        for stream in persistent:
            stream.end()
        await self.loop.run_in_executor(None, self.committer.close)
        for stream in persistent:
            stream.close()
        if self._lock is not None:
            self._lock.release()

    def _start(self, name: str, settings: StreamSettings) -> Stream:
        stream: Stream
        if settings.kind == "ephemeral":
            stream = Ephemeral(name)
        else:
            where = f"streams/{name}"
            stream = Persistent(
                name, settings, self._disk, where, self.committer, self.loop, self._graves
            )
        self.streams[name] = stream
        return stream

    def _persistent(self) -> Iterator[Persistent]:
        return (stream for stream in self.streams.values() if isinstance(stream, Persistent))

    def _graves(self, stream: Persistent) -> Persistent:
        """Where the dead letters of a stream go."""
        name = stream.name + DEAD
        if name not in self.streams:
            self._make(name, StreamSettings(id_box=DEAD_BOX))
        graves = self.streams[name]
        if not isinstance(graves, Persistent):
            raise NoGraveError(f"{name!r} is not persistent: dead letters cannot be kept in it")
        return graves

    def _keep(self) -> None:
        """Take away what is too old, now and then."""
        self._retention = self.loop.call_later(RETENTION, self._keep)
        limited = [stream for stream in self._persistent() if stream.settings.limited]
        if limited:
            self.loop.create_task(self._trim(limited))

    async def _trim(self, streams: list[Persistent]) -> None:
        for stream in streams:
            with contextlib.suppress(RailgunError):  # it stays, and is tried again
                await self.loop.run_in_executor(None, stream.trim)
                stream.trimmed()

    # ------------------------------------------------------------ streams

    def get(self, name: str) -> Stream:
        """A stream by its name."""
        stream = self.streams.get(name)
        if stream is None:
            raise NoStreamError(
                f"there is no stream {name[:200]!r}: make it (railgun stream ensure)"
            )
        return stream

    def ensure(
        self, name: str, asked: dict[str, Any] | None = None, mode: Mode = "warn"
    ) -> dict[str, Any]:
        """Make a stream what it is asked to be: what was done, and what differs."""
        check_name(name)
        wanted = StreamSettings.of(asked or {})
        stream = self.streams.get(name)
        if stream is None:
            self._make(name, wanted)
            return {"result": "CREATED", "differs": {}}
        differs = {
            key: {"is": value, "asked": getattr(wanted, key)}
            for key, value in asdict(stream.settings).items()
            if key in (asked or {}) and value != getattr(wanted, key)
        }
        if not differs:
            return {"result": "UNCHANGED", "differs": {}}
        if mode == "strict" or (mode == "overwrite" and "kind" in differs):
            what = ", ".join(f"{k} is {v['is']!r}, not {v['asked']!r}" for k, v in differs.items())
            raise StreamDiffersError(f"stream {name!r}: {what}")
        if mode != "overwrite":
            return {"result": "DIFFERS", "differs": differs}
        merged = StreamSettings.of(asdict(stream.settings) | (asked or {}))
        self._write(name, merged)
        stream.settings = merged
        return {"result": "UPDATED", "differs": differs}

    def _make(self, name: str, settings: StreamSettings) -> None:
        self._disk.make_directory(f"streams/{name}")
        self._start(name, settings)
        self._write(name, settings)

    def _write(self, name: str, settings: StreamSettings) -> None:
        home = f"streams/{name}"
        file = self._disk.create(f"{home}/{_SETTINGS}.new")
        try:
            file.write([settings.as_json().encode()])
            file.sync()
        finally:
            file.close()
        self._disk.rename(f"{home}/{_SETTINGS}.new", f"{home}/{_SETTINGS}")
        self._disk.sync_directory(home)

    def describe(self, name: str) -> dict[str, Any]:
        """What there is to know of a stream."""
        stream = self.get(name)
        told: dict[str, Any] = {"name": name, "settings": asdict(stream.settings)}
        if isinstance(stream, Persistent):
            log = stream.log
            told |= {
                "first": log.first,
                "end": log.durable_end,
                "bytes": log.size,
                "last_time": log.last_time / SECOND if log.durable_end > log.first else None,
                "trouble": str(log.failed) if log.failed else "",
                "groups": [self.group(name, group) for group in stream.groups if group[0] != "#"],
                "readers": sum(group.startswith("#") for group in stream.groups),
            }
        else:
            told["consumers"] = len(stream.exchange)
        return told

    def list(self) -> list[dict[str, Any]]:
        """All streams, briefly."""
        return [self.describe(name) for name in sorted(self.streams)]

    def group(self, name: str, group: str) -> dict[str, Any]:
        """What a group is doing, and why it gets nothing if so."""
        stream = self.get(name)
        driver = stream.groups.get(group) if isinstance(stream, Persistent) else None
        if driver is None:
            raise NoGroupError(f"stream {name!r} has no group {group!r}")
        told = asdict(driver.explain())
        told |= {"name": group, "exclusive": driver.group.config.exclusive}
        told["lag"] = told["end"] - told["floor"]
        return told
