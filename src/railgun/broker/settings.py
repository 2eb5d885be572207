"""What a stream is, as it is asked for and kept: its kind, and the rules it has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from railgun.broker.protocol.groups import GroupConfig
from railgun.errors import RailgunError, shortened

SECOND: Final = 1_000_000
MOST: Final = 1e15
"""No setting of a stream is as large as this."""
Kind = Literal["persistent", "ephemeral"]
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
DEAD: Final = ".dlq"
"""The dead letters of a stream are in the stream of its name with this at its end."""

STAGING: Final = ".staged"
"""What producers stage for a stream is in the stream of its name with this at its end, which nobody sees."""
PRODUCER: Final = "!"
"""Notes of producers are kept under this and their name, beside the states of groups."""
REDRIVE: Final = "redrive"
"""The group of the dead letters of a stream that has finished with those that were redriven."""
TRACKED: Final = "@"
"""A tracked consumer is an exclusive group of its own, whose name is the consumer's ID behind this."""


class BadSettingsError(RailgunError):
    """A stream that cannot be as it is asked for."""

    code: ClassVar[str] = "BAD_SETTINGS"


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream is. Times in seconds; None: without that rule.

    >>> StreamSettings.of({"max_age": 3600})
    StreamSettings(kind=..., max_age=3600, ...)
    >>> StreamSettings.of({"kind": "table"})
    Traceback (most recent call last):
    railgun.broker.settings.BadSettingsError: kind is 'persistent' or 'ephemeral', not 'table'
    """

    kind: Kind = "persistent"
    id_box: float = 120.0
    """For so long an ID is remembered."""
    max_ids: int = 1_000_000
    duplicates: Literal["refuse", "ok"] = "refuse"
    """What a publisher is told of an ID that is there already."""
    max_age: float | None = None
    max_bytes: int | None = None
    max_staged: int = 8 << 30
    """Bytes that producers may have staged for it and not committed."""
    dead_distance: int | None = None
    """Dead-letter a message that failed once a message more than this many offsets later is acknowledged, or when more
    than this many of its deliveries failed; 0: when it fails for the first time."""
    dead_deliveries: int | None = None
    """Dead-letter a message of which this many deliveries failed."""
    dead_age: float | None = None
    """Dead-letter a message that failed this many seconds after the first delivery to the group that failed."""

    @staticmethod
    def names() -> frozenset[str]:
        """Return which settings there are."""
        return frozenset(field.name for field in dataclasses.fields(StreamSettings))

    @staticmethod
    def of(asked: Any) -> StreamSettings:
        """As it was asked for, by an object of JSON."""
        if not isinstance(asked, dict):
            raise BadSettingsError(f"settings are an object, not {type(asked).__name__}")
        if "region" in asked:  # a cluster has taken it out before
            raise BadSettingsError(
                f"region is {asked['region']!r}: regions belong to a cluster, and this node is in none. Leave region "
                "out, or ask a node of a cluster"
            )
        known = StreamSettings.names()
        for name in asked:
            if name not in known:
                raise BadSettingsError(
                    f"a stream has no setting {name!r}; there are {', '.join(sorted(known))}"
                )
        made = StreamSettings(**asked)
        made.check()
        return made

    @staticmethod
    def merged(existing: Mapping[str, Any] | None, asked: Any) -> StreamSettings:
        """Return what a stream with the settings `existing` (None: there is none) is asked to be.

        What is not asked for stays as it is, and the whole is checked. What is asked for of another kind of stream is
        taken by itself: it cannot be merged, and the stream stays what it is.

        >>> StreamSettings.merged({"id_box": 10.0}, {"max_age": 60}).id_box
        10.0
        """
        if not isinstance(asked, dict):
            raise BadSettingsError(f"settings are an object, not {type(asked).__name__}")
        if existing is None or asked.get("kind", existing.get("kind")) != existing.get("kind"):
            return StreamSettings.of(asked)
        return StreamSettings.of(dict(existing) | asked)

    def check(self) -> None:
        """Refuse what cannot be."""
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
            if not value < MOST:
                raise BadSettingsError(f"{name} is {value}, and must be below {MOST:g}")
        if self.kind == "ephemeral" and self != StreamSettings(kind="ephemeral"):
            raise BadSettingsError("an ephemeral stream keeps nothing: it has no other settings")
        if self.max_age is not None and self.max_age < self.id_box:
            raise BadSettingsError(
                f"IDs are remembered for {self.id_box:g} s, and messages kept for {self.max_age:g} s: "
                "after a restart those in between would be forgotten. Make id_box shorter"
            )

    @property
    def limited(self) -> bool:
        """Whether messages are taken away some day."""
        return self.max_age is not None or self.max_bytes is not None

    def group(self, exclusive: bool, ack_wait: int) -> GroupConfig:
        """How a group of it is served."""
        age = None if self.dead_age is None else int(self.dead_age * SECOND)
        wait = ack_wait or None
        return GroupConfig(exclusive, wait, self.dead_distance, self.dead_deliveries, age)


def check_group(name: str) -> str:
    """Check the name of a group, or of a tracked consumer: its ID behind `@`."""
    check_name(name.removeprefix(TRACKED))
    return name


def check_name(name: str) -> str:
    """The name of a stream or a group: letters, digits, `_`, `.` and `-`."""
    if not _NAME.fullmatch(name):
        raise BadSettingsError(
            f"{shortened(name)} cannot be a name: letters, digits, '_', '.' and '-', at most 200, none of the last "
            "two at the beginning"
        )
    return name
