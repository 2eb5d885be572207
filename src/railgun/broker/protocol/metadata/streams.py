"""The catalogue: which streams there are in the cluster, which there were, and how far groups are.

Rules:

1. A stream's identity is the index of the entry that made it. A name may come back, an id never does, and the ids of
   streams that were deleted are remembered for ever: files are removed only for these.
2. Names are unique, also on disks where A and a are the same.
3. `ensure` makes a stream what it is asked to be, or says how it differs. Only what was asked for is compared. The
   settings themselves are understood by whoever proposes: it sends what was `asked`, the `defaults` for all else, and
   for `overwrite` the settings it has `seen`, because it has checked what comes of both; if they have changed since,
   that is void (`CHANGED`), and it is to look again.
4. The kind of a stream and its region never change. Dead letters are in the region of their stream: its master buries.
5. Positions of groups are coarse: what a new reader of the metadata is told, not what a group goes on from. They come
   from the master of the region, in its epoch, and step back only if that is said. Streams are named by their ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import (
    RefusedError,
    Scalar,
    bad,
    check_list,
    check_name,
    check_object,
    check_region,
    check_scalars,
    check_whole,
    difference,
    take_flag,
    take_name,
    take_whole,
    told,
)
from railgun.broker.protocol.metadata.nodes import GLOBAL

DEAD: Final = ".dlq"
"""The dead letters of a stream are in the stream of its name with this at its end."""
STAGING: Final = ".staged"
"""What producers stage for a stream is in the stream of its name with this at its end, which nobody sees."""
MOST_STREAMS: Final = 100_000
MOST_GROUPS: Final = 100_000
"""Of a stream."""
MODES: Final = ("warn", "overwrite", "strict")


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream; `settings` are complete, and replaced whole."""

    id: int
    name: str
    region: str
    settings: dict[str, Scalar]

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "id": self.id,
            "name": self.name,
            "region": self.region,
            "settings": dict(self.settings),
        }

    @staticmethod
    def load(dumped: dict[str, Any]) -> StreamInfo:
        """What `dump` told."""
        return StreamInfo(
            take_whole(dumped, "id"),
            take_name(dumped, "name"),
            check_region(dumped.get("region")),
            check_scalars(dumped.get("settings"), "settings"),
        )


class Catalogue:
    """All streams, by name."""

    __slots__ = ("_counts", "_folded", "_names", "deleted", "groups", "streams")

    def __init__(self) -> None:
        self.streams: dict[str, StreamInfo] = {}
        self.deleted: set[int] = set()
        """The ids of all streams that were."""
        self.groups: dict[int, dict[str, int]] = {}
        """Of each stream that has some: how far they are, at least."""
        self._folded: dict[str, str] = {}  # names as disks may see them
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()  # streams of each region

    @property
    def used(self) -> set[str]:
        """The regions with streams in them."""
        return set(self._counts)

    def of_id(self, id: int) -> StreamInfo | None:
        """The stream with this identity, if it is there (still)."""
        return self.streams.get(self._names.get(id, ""))

    # ------------------------------------------------------------ streams

    def ensure(
        self, index: int, command: dict[str, Any], can_lead: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Make a stream what it is asked to be; `can_lead`: whether a region has somebody to lead it."""
        name = take_name(command, "name")
        asked = check_scalars({} if (a := command.get("asked")) is None else a, "asked")
        region = None if (r := command.get("region")) is None else check_region(r)
        mode = command.get("mode", "warn")
        if not isinstance(mode, str) or mode not in MODES:
            raise bad(f"mode is one of {', '.join(MODES)}, not {told(mode)}")
        stream = self.streams.get(name)
        if stream is None:
            defaults = check_scalars(
                {} if (d := command.get("defaults")) is None else d, "defaults"
            )
            return self._make(index, name, defaults | asked, region, can_lead)
        differs: dict[str, Any] = {
            key: {"is": stream.settings.get(key), "asked": value}
            for key, value in asked.items()
            if key not in stream.settings or not _same(stream.settings[key], value)
        }
        if region is not None and region != stream.region:
            differs["region"] = {"is": stream.region, "asked": region}
        if not differs:
            return {"result": "UNCHANGED", "differs": {}, "id": stream.id}
        fixed = [key for key in ("kind", "region") if key in differs]
        if mode == "strict" or (mode == "overwrite" and fixed):
            never = f"; {' and '.join(fixed)} cannot be changed" if fixed else ""
            what = f"stream {name!r}: {difference(differs)}{never}"
            raise RefusedError("DIFFERS", what, differs=differs)
        if mode == "warn":
            return {"result": "DIFFERS", "differs": differs, "id": stream.id}
        if check_scalars(command.get("seen"), "seen") != stream.settings:
            raise RefusedError(
                "CHANGED", f"stream {name!r} was changed by somebody else meanwhile: look again"
            )
        self.streams[name] = replace(stream, settings=stream.settings | asked)
        return {"result": "UPDATED", "differs": differs, "id": stream.id}

    def _make(
        self,
        index: int,
        name: str,
        settings: dict[str, Scalar],
        region: str | None,
        can_lead: Callable[[str], bool],
    ) -> dict[str, Any]:
        twin = self._folded.get(name.lower())
        if twin is not None:
            raise RefusedError(
                "NAME_TAKEN", f"there is a stream {twin!r}: {name!r} must differ by more than case"
            )
        if len(self.streams) >= MOST_STREAMS:
            raise RefusedError("TOO_MANY", f"there are {MOST_STREAMS} streams: delete some first")
        kin = self.streams.get(name.removesuffix(DEAD) if name.endswith(DEAD) else name + DEAD)
        if region is None:
            region = GLOBAL if kin is None else kin.region
        elif kin is not None and kin.region != region:
            raise RefusedError(
                "BAD_REGION",
                f"stream {kin.name!r} is in region {kin.region!r}: {name!r} has to be there, too",
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
        """Take a stream away, perhaps with its dead letters."""
        name = take_name(command, "name")
        dead_letters = take_flag(command, "dead_letters")
        if name not in self.streams:
            raise RefusedError("NO_STREAM", f"there is no stream {name!r}")
        deleted = [name]
        if dead_letters and name + DEAD in self.streams:
            deleted.append(name + DEAD)
        if name + STAGING in self.streams:
            deleted.append(name + STAGING)
        for one in deleted:
            stream = self.streams.pop(one)
            del self._folded[one.lower()], self._names[stream.id]
            self.groups.pop(stream.id, None)
            self.deleted.add(stream.id)
            self._counts[stream.region] -= 1
            if not self._counts[stream.region]:
                del self._counts[stream.region]
        return {"deleted": deleted}

    # ------------------------------------------------------------ groups

    def note_groups(self, region: str, command: dict[str, Any]) -> dict[str, Any]:
        """How far groups are, and which are gone. Streams that are no more, or of other regions, are left out."""
        positions = [
            (_id(stream), check_name(group, "group"), check_whole(offset, "position"))
            for stream, groups in check_object(command.get("positions", {}), "positions").items()
            for group, offset in check_object(groups, "positions of a stream").items()
        ]
        gone = [_pair(one) for one in check_list(command.get("gone", []), "gone")]
        reset = take_flag(command, "reset")
        noted = 0
        for id, group, offset in positions:
            stream = self.of_id(id)
            if stream is None or stream.region != region:
                continue
            groups = self.groups.setdefault(id, {})
            if group not in groups and len(groups) >= MOST_GROUPS:
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
        """As plain data; ids that follow each other are one range."""
        return {
            "streams": [stream.dump() for stream in self.streams.values()],
            "deleted": _ranges(self.deleted),
            "groups": [[id, dict(groups)] for id, groups in self.groups.items()],
        }

    @staticmethod
    def load(dumped: dict[str, Any], last: int) -> Catalogue:
        """What `dump` told; `last`: no stream has a higher id."""
        made = Catalogue()
        for one in check_list(dumped.get("streams"), "streams"):
            made._put(StreamInfo.load(check_object(one, "stream")))
        for first, end in check_list(dumped.get("deleted"), "deleted"):
            made.deleted.update(range(check_whole(first, "id"), check_whole(end, "id", last + 1)))
        for id, groups in check_list(dumped.get("groups"), "groups"):
            made.groups[check_whole(id, "id")] = {
                check_name(group, "group"): check_whole(offset, "position")
                for group, offset in check_object(groups, "groups").items()
            }
        return made


def _same(a: Scalar, b: Scalar) -> bool:
    """Whether two settings are equal; true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _id(value: Any) -> int:
    """The id of a stream; keys of objects are texts."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return check_whole(value, "id of a stream")


def _pair(value: Any) -> tuple[int, str]:
    pair = check_list(value, "gone")
    if len(pair) != 2:
        raise bad("what is gone is a list of streams and groups")
    return _id(pair[0]), check_name(pair[1], "group")


def _ranges(ids: set[int]) -> list[list[int]]:
    """Sorted, [first, end) each.

    >>> _ranges({7, 3, 4, 5})
    [[3, 6], [7, 8]]
    """
    found: list[list[int]] = []
    for id in sorted(ids):
        if found and found[-1][1] == id:
            found[-1][1] = id + 1
        else:
            found.append([id, id + 1])
    return found
