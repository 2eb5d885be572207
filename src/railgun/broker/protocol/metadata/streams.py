"""The catalogue: the streams of the cluster, the ids of deleted ones, and the positions of groups.

Rules:

1. A stream's identity is the index of the entry that created it. A name may be used again, an id never is, and the ids
   of deleted streams are remembered for ever: files are removed only for these.
2. Names are unique, even on file systems that do not distinguish A from a.
3. `ensure` makes a stream match the request, or reports how it differs. Only the settings that were requested are
   compared. The proposer understands the settings: it sends the requested ones (`asked`), the `defaults` for all
   others, and for `overwrite` the settings it has `seen`, because it has checked the combination; if the stream has
   changed since, the command is void (`CHANGED`), and the proposer must look again.
4. The kind of a stream and its region never change. Dead letters are in the region of their stream, whose master writes
   them.
5. Positions of groups are approximate: they tell a new reader of the metadata how far groups are; a group itself does
   not continue from them. They come from the master of the region, in its epoch, and go back only if the command says
   so (`reset`). Streams are named by their ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import (
    RefusedError,
    Scalar,
    check_list,
    check_name,
    check_object,
    check_region,
    check_scalars,
    check_whole,
    difference,
    invalid,
    quoted,
    take_flag,
    take_name,
    take_whole,
)
from railgun.broker.protocol.metadata.nodes import GLOBAL

DEAD: Final = ".dlq"
"""Suffix of the stream that holds a stream's dead letters."""
STAGING: Final = ".staged"
"""Suffix of the hidden stream in which producers stage messages for a stream."""
MAX_STREAMS: Final = 100_000
MAX_GROUPS: Final = 100_000
"""Limit for one stream."""
MODES: Final = ("warn", "overwrite", "strict")


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream; its `settings` are complete, and replaced as a whole."""

    id: int
    name: str
    region: str
    settings: dict[str, Scalar]

    def dump(self) -> dict[str, Any]:
        """Return the stream as plain data."""
        return {
            "id": self.id,
            "name": self.name,
            "region": self.region,
            "settings": dict(self.settings),
        }

    @staticmethod
    def load(dumped: dict[str, Any]) -> StreamInfo:
        """Return the stream from the result of `dump`."""
        return StreamInfo(
            take_whole(dumped, "id"),
            take_name(dumped, "name"),
            check_region(dumped.get("region")),
            check_scalars(dumped.get("settings"), "settings"),
        )


class Catalogue:
    """All streams by name, and the positions of their groups."""

    __slots__ = ("_counts", "_folded", "_names", "deleted", "groups", "streams")

    def __init__(self) -> None:
        self.streams: dict[str, StreamInfo] = {}
        self.deleted: set[int] = set()
        """The ids of all deleted streams."""
        self.groups: dict[int, dict[str, int]] = {}
        """By stream id: each group's position, a lower bound."""
        self._folded: dict[str, str] = {}  # lower-case name → name
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()  # number of streams in each region

    @property
    def used(self) -> set[str]:
        """Return the regions that contain streams."""
        return set(self._counts)

    def of_id(self, id: int) -> StreamInfo | None:
        """Return the stream with this id, or None."""
        return self.streams.get(self._names.get(id, ""))

    # ------------------------------------------------------------ streams

    def ensure(
        self, index: int, command: dict[str, Any], can_lead: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Create a stream, or compare or change its settings. Raises `RefusedError`.

        `can_lead`: whether a region has a node that can be its master.
        """
        name = take_name(command, "name")
        requested = check_scalars({} if (a := command.get("asked")) is None else a, "asked")
        region = None if (r := command.get("region")) is None else check_region(r)
        mode = command.get("mode", "warn")
        if not isinstance(mode, str) or mode not in MODES:
            raise invalid(f"mode is one of {', '.join(MODES)}, not {quoted(mode)}")
        stream = self.streams.get(name)
        if stream is None:
            defaults = check_scalars(
                {} if (d := command.get("defaults")) is None else d, "defaults"
            )
            return self._make(index, name, defaults | requested, region, can_lead)
        differs: dict[str, Any] = {
            key: {"is": stream.settings.get(key), "asked": value}
            for key, value in requested.items()
            if key not in stream.settings or not _same(stream.settings[key], value)
        }
        if region is not None and region != stream.region:
            differs["region"] = {"is": stream.region, "asked": region}
        if not differs:
            return {"result": "UNCHANGED", "differs": {}, "id": stream.id}
        fixed = [key for key in ("kind", "region") if key in differs]
        if mode == "strict" or (mode == "overwrite" and fixed):
            never = f"; {' and '.join(fixed)} cannot be changed" if fixed else ""
            text = f"stream {name!r}: {difference(differs)}{never}"
            raise RefusedError("DIFFERS", text, differs=differs)
        if mode == "warn":
            return {"result": "DIFFERS", "differs": differs, "id": stream.id}
        if check_scalars(command.get("seen"), "seen") != stream.settings:
            raise RefusedError(
                "CHANGED", f"stream {name!r} was changed by another command meanwhile: look again"
            )
        self.streams[name] = replace(stream, settings=stream.settings | requested)
        return {"result": "UPDATED", "differs": differs, "id": stream.id}

    def _make(
        self,
        index: int,
        name: str,
        settings: dict[str, Scalar],
        region: str | None,
        can_lead: Callable[[str], bool],
    ) -> dict[str, Any]:
        existing = self._folded.get(name.lower())
        if existing is not None:
            raise RefusedError(
                "NAME_TAKEN",
                f"there is a stream {existing!r}: {name!r} must differ by more than case",
            )
        if len(self.streams) >= MAX_STREAMS:
            raise RefusedError("TOO_MANY", f"there are {MAX_STREAMS} streams: delete some first")
        relative = self.streams.get(name.removesuffix(DEAD) if name.endswith(DEAD) else name + DEAD)
        if region is None:
            region = GLOBAL if relative is None else relative.region
        elif relative is not None and relative.region != region:
            raise RefusedError(
                "BAD_REGION",
                f"stream {relative.name!r} is in region {relative.region!r}: {name!r} has to be there, too",
            )
        if not can_lead(region):
            raise RefusedError(
                "NO_REGION",
                f"stream {name!r} cannot be made in region {region!r}: no node that has copies of it can be "
                "its master. Name the region in the file of a node",
            )
        self._put(StreamInfo(index, name, region, settings))
        return {"result": "CREATED", "differs": {}, "id": index}

    def _put(self, stream: StreamInfo) -> None:
        self.streams[stream.name] = stream
        self._folded[stream.name.lower()] = stream.name
        self._names[stream.id] = stream.name
        self._counts[stream.region] += 1

    def delete(self, command: dict[str, Any]) -> dict[str, Any]:
        """Delete a stream and its staging stream, and its dead letters if asked to."""
        name = take_name(command, "name")
        dead_letters = take_flag(command, "dead_letters")
        if name not in self.streams:
            raise RefusedError("NO_STREAM", f"there is no stream {name!r}")
        deleted = [name]
        if dead_letters and name + DEAD in self.streams:
            deleted.append(name + DEAD)
        if name + STAGING in self.streams:
            deleted.append(name + STAGING)
        for stream_name in deleted:
            stream = self.streams.pop(stream_name)
            del self._folded[stream_name.lower()], self._names[stream.id]
            self.groups.pop(stream.id, None)
            self.deleted.add(stream.id)
            self._counts[stream.region] -= 1
            if not self._counts[stream.region]:
                del self._counts[stream.region]
        return {"deleted": deleted}

    # ------------------------------------------------------------ groups

    def note_groups(self, region: str, command: dict[str, Any]) -> dict[str, Any]:
        """Record positions of groups, and remove deleted groups.

        Streams that do not exist, or are in other regions, are ignored.
        """
        positions = [
            (_id(stream), check_name(group, "group"), check_whole(offset, "position"))
            for stream, groups in check_object(command.get("positions", {}), "positions").items()
            for group, offset in check_object(groups, "positions of a stream").items()
        ]
        gone = [_pair(pair) for pair in check_list(command.get("gone", []), "gone")]
        reset = take_flag(command, "reset")
        noted = 0
        for id, group, offset in positions:
            stream = self.of_id(id)
            if stream is None or stream.region != region:
                continue
            groups = self.groups.setdefault(id, {})
            if group not in groups and len(groups) >= MAX_GROUPS:
                continue
            groups[group] = offset if reset else max(offset, groups.get(group, 0))
            noted += 1
        for id, group in gone:
            stream = self.of_id(id)
            if stream is None or stream.region != region or id not in self.groups:
                continue
            if self.groups[id].pop(group, None) is not None:
                noted += 1
            if not self.groups[id]:
                del self.groups[id]
        return {"result": "NOTED", "noted": noted}

    # ------------------------------------------------------------ plain data

    def dump(self) -> dict[str, Any]:
        """Return the catalogue as plain data; consecutive ids are merged into ranges."""
        return {
            "streams": [stream.dump() for stream in self.streams.values()],
            "deleted": _ranges(self.deleted),
            "groups": [[id, dict(groups)] for id, groups in self.groups.items()],
        }

    @staticmethod
    def load(dumped: dict[str, Any], last: int) -> Catalogue:
        """Return the catalogue from the result of `dump`; `last`: no stream has a higher id."""
        catalogue = Catalogue()
        for stream in check_list(dumped.get("streams"), "streams"):
            catalogue._put(StreamInfo.load(check_object(stream, "stream")))
        for first, end in check_list(dumped.get("deleted"), "deleted"):
            catalogue.deleted.update(
                range(check_whole(first, "id"), check_whole(end, "id", last + 1))
            )
        for id, groups in check_list(dumped.get("groups"), "groups"):
            catalogue.groups[check_whole(id, "id")] = {
                check_name(group, "group"): check_whole(offset, "position")
                for group, offset in check_object(groups, "groups").items()
            }
        return catalogue


def _same(a: Scalar, b: Scalar) -> bool:
    """Return whether two settings are equal; True does not equal 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _id(value: Any) -> int:
    """Return the id of a stream, which is a text where it is the key of an object."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return check_whole(value, "id of a stream")


def _pair(value: Any) -> tuple[int, str]:
    pair = check_list(value, "gone")
    if len(pair) != 2:
        raise invalid("gone is a list of pairs of a stream and a group")
    return _id(pair[0]), check_name(pair[1], "group")


def _ranges(ids: set[int]) -> list[list[int]]:
    """Return ids as sorted ranges [first, end).

    >>> _ranges({7, 3, 4, 5})
    [[3, 6], [7, 8]]
    """
    ranges: list[list[int]] = []
    for id in sorted(ids):
        if ranges and ranges[-1][1] == id:
            ranges[-1][1] = id + 1
        else:
            ranges.append([id, id + 1])
    return ranges
