"""Settings of a stream: its kind and its rules, as users give them and as they are stored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from railgun.broker.protocol.groups import GroupConfig
from railgun.errors import RailgunError, shortened

SECOND: Final = 1_000_000
SETTING_LIMIT: Final = 1e15
"""Every number in the settings of a stream is below this."""
Kind = Literal["persistent", "ephemeral"]
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
DEAD: Final = ".dlq"
"""The dead letters of a stream are in the stream named after it, with this suffix."""

STAGING: Final = ".staged"
"""Staged messages of producers are in the stream named after their stream, with this suffix. Users never see it."""
PRODUCER: Final = "!"
"""Prefix of the names under which the group log keeps records of producers, beside the states of groups."""
REDRIVE: Final = "redrive"
"""The consumer group, on the dead letters of a stream, that has finished with the redriven ones."""
TRACKED: Final = "@"
"""Prefix of the group of a tracked consumer: an exclusive group of its own, named after the consumer's ID."""


class BadSettingsError(RailgunError):
    """The settings of a stream are not valid."""

    code: ClassVar[str] = "BAD_SETTINGS"


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of a stream. Times are in seconds; None switches a rule off.

    >>> StreamSettings.of({"max_age": 3600})
    StreamSettings(kind=..., max_age=3600, ...)
    >>> StreamSettings.of({"kind": "table"})
    Traceback (most recent call last):
    railgun.broker.settings.BadSettingsError: kind is 'persistent' or 'ephemeral', not 'table'
    """

    kind: Kind = "persistent"
    id_box: float = 120.0
    """The deduplication window ("ID time box"): for how long the ID of a message is remembered."""
    max_ids: int = 1_000_000
    duplicates: Literal["refuse", "ok"] = "refuse"
    """The answer to a publisher if the ID of its message is already stored: an error, or OK."""
    max_age: float | None = None
    max_bytes: int | None = None
    max_staged: int = 8 << 30
    """Bytes that producers may have staged for the stream without committing them."""
    dead_distance: int | None = None
    """Dead-letter a message that failed once a message more than this many offsets later is acknowledged, or when more
    than this many of its deliveries failed; 0: when it fails for the first time."""
    dead_deliveries: int | None = None
    """Dead-letter a message of which this many deliveries failed."""
    dead_age: float | None = None
    """Dead-letter a message that failed this many seconds after the first delivery to the group that failed."""

    @staticmethod
    def names() -> frozenset[str]:
        """Return the names of all settings."""
        return frozenset(field.name for field in dataclasses.fields(StreamSettings))

    @staticmethod
    def of(raw: Any) -> StreamSettings:
        """Return the settings that a JSON object describes; raise `BadSettingsError` if they are not valid."""
        if not isinstance(raw, dict):
            raise BadSettingsError(f"settings are an object, not {type(raw).__name__}")
        if "region" in raw:  # in a cluster, the region was taken out before this is called
            raise BadSettingsError(
                f"region is {raw['region']!r}: regions belong to a cluster, and this node is in none. Leave region "
                "out, or ask a node of a cluster"
            )
        names = StreamSettings.names()
        for name in raw:
            if name not in names:
                raise BadSettingsError(
                    f"a stream has no setting {name!r}; there are {', '.join(sorted(names))}"
                )
        settings = StreamSettings(**raw)
        settings.check()
        return settings

    @staticmethod
    def merged(existing: Mapping[str, Any] | None, changes: Any) -> StreamSettings:
        """Return the settings of a stream after a request to change them.

        `existing`: its settings now (None: there is no stream). A setting that `changes` leaves out stays as it is, and
        the result is checked as a whole. If `changes` names another kind of stream, it is taken alone: the kinds cannot
        be merged.

        >>> StreamSettings.merged({"id_box": 10.0}, {"max_age": 60}).id_box
        10.0
        """
        if not isinstance(changes, dict):
            raise BadSettingsError(f"settings are an object, not {type(changes).__name__}")
        if existing is None or changes.get("kind", existing.get("kind")) != existing.get("kind"):
            return StreamSettings.of(changes)
        return StreamSettings.of(dict(existing) | changes)

    def check(self) -> None:
        """Raise `BadSettingsError` if a setting is out of range, or two of them contradict each other."""
        if self.kind not in ("persistent", "ephemeral"):
            raise BadSettingsError(f"kind is 'persistent' or 'ephemeral', not {self.kind!r}")
        if self.duplicates not in ("refuse", "ok"):
            raise BadSettingsError(f"duplicates is 'refuse' or 'ok', not {self.duplicates!r}")
        for name, least in (
            ("id_box", 0.001), ("max_ids", 1), ("max_age", 0.001), ("max_bytes", 1),
            ("max_staged", 1),
            ("dead_distance", 0), ("dead_deliveries", 1), ("dead_age", 0.001),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name not in ("id_box", "max_ids", "max_staged"):
                continue
            whole = name in (
                "max_ids", "max_bytes", "max_staged", "dead_distance", "dead_deliveries",
            )  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise BadSettingsError(f"{name} is {kind}, not {value!r}")
            if not value >= least:
                raise BadSettingsError(f"{name} is {value}, and must be at least {least}")
            if not value < SETTING_LIMIT:
                raise BadSettingsError(f"{name} is {value}, and must be below {SETTING_LIMIT:g}")
        if self.kind == "ephemeral" and self != StreamSettings(kind="ephemeral"):
            raise BadSettingsError("an ephemeral stream keeps nothing: it has no other settings")
        if self.max_age is not None and self.max_age < self.id_box:
            raise BadSettingsError(
                f"IDs are remembered for {self.id_box:g} s, and messages kept for {self.max_age:g} s: "
                "after a restart those in between would be forgotten. Make id_box shorter"
            )

    @property
    def limited(self) -> bool:
        """Whether retention takes messages away, by age or by size."""
        return self.max_age is not None or self.max_bytes is not None

    def group(self, exclusive: bool, ack_wait: int) -> GroupConfig:
        """Return the configuration of a consumer group of the stream; `ack_wait` is in µs (0: wait without limit)."""
        age = None if self.dead_age is None else int(self.dead_age * SECOND)
        wait = ack_wait or None
        return GroupConfig(exclusive, wait, self.dead_distance, self.dead_deliveries, age)


def check_group(name: str) -> str:
    """Return the name of a group, or of a tracked consumer (`@` and its ID).

    Raise `BadSettingsError` if it is not valid.
    """
    check_name(name.removeprefix(TRACKED))
    return name


def check_name(name: str) -> str:
    """Return the name of a stream or a group.

    Raise `BadSettingsError` if it has other characters than letters, digits, `_`, `.` and `-`, begins with one of the
    last two, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise BadSettingsError(
            f"{shortened(name)} cannot be a name: letters, digits, '_', '.' and '-', at most 200, none of the last "
            "two at the beginning"
        )
    return name
