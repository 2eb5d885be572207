"""The settings of the cluster as a whole, and their limits.

They are metadata: once the cluster is formed they change only by a command, if at all. The settings in a node's file
count when the cluster is formed; later they are compared (`drift`), reported, and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import (
    RefusedError,
    Scalar,
    check_object,
    invalid,
    quoted,
)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: a number of seconds within limits; `optional`: or None, which turns it off.

    `fixed`: it cannot be changed once the cluster is formed. `least_asked`: the lowest value that a user may set
    (`check_asked`); lower ones, down to `least`, are accepted only from logs of older versions.
    """

    default: float | None
    least: float
    most: float
    optional: bool = False
    fixed: bool = False
    least_asked: float | None = None


OPTIONS: Final[Mapping[str, Option]] = {
    # Nodes wait this long for a leader; leases are shorter.
    "election": Option(0.6, 0.05, 60.0, fixed=True),
    "patience": Option(0.7, 0.1, 3600.0),  # the leader replaces a master that is silent for longer
    "prune_after": Option(None, 1.0, 1e9, optional=True),  # a dead node is removed; None: never
    # A write waits this long for a master. In less than a second no new master can be elected.
    "master_wait": Option(5.0, 0.0, 3600.0, least_asked=1.0),
    "rs_timeout": Option(30.0, 0.001, 86400.0),  # default timeout of a response
}
"""The settings by name, all in seconds."""


def defaults() -> dict[str, Scalar]:
    """Return the default of every setting."""
    return {key: option.default for key, option in OPTIONS.items()}


def check_options(value: Any) -> dict[str, Scalar]:
    """Return settings after checking their names and values. Raises `RefusedError`.

    >>> check_options({"patience": 5})
    {'patience': 5}
    >>> check_options({"patience": "long"})
    Traceback (most recent call last):
    railgun.broker.protocol.metadata.fields.RefusedError: patience is 0.1 to 3600 seconds, not 'long'
    """
    if value is None:
        raise invalid("settings are an object, not None")
    settings = check_object(value, "settings")
    for key, number in settings.items():
        option = OPTIONS.get(key)
        if option is None:
            raise RefusedError(
                "BAD_SETTINGS",
                f"a cluster has no setting {quoted(key)}; there are {', '.join(sorted(OPTIONS))}",
            )
        if number is None and option.optional:
            continue
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not option.least <= number <= option.most:
            raise _out_of_range(key, option.least, number)
    return dict(settings)


def check_asked(value: Any) -> dict[str, Scalar]:
    """Return settings requested by a user; refuse also values that are allowed only in old logs. Raises `RefusedError`.

    >>> check_asked({"master_wait": 0.1})
    Traceback (most recent call last):
    railgun.broker.protocol.metadata.fields.RefusedError: master_wait is 1 to 3600 seconds, not 0.1
    """
    settings = check_options(value)
    for key, number in settings.items():
        least = OPTIONS[key].least_asked
        if least is not None and isinstance(number, int | float) and number < least:
            raise _out_of_range(key, least, number)
    return settings


def _out_of_range(key: str, least: float, value: Any) -> RefusedError:
    option = OPTIONS[key]
    also = ", or nothing" if option.optional else ""
    text = f"{key} is {least:g} to {option.most:g} seconds{also}, not {quoted(value)}"
    return RefusedError("BAD_SETTINGS", text)


def drift(cluster: Mapping[str, Scalar], file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return where the settings in a node's file differ from those of the cluster.

    >>> drift({"patience": 3.0, "prune_after": None}, {"patience": 5, "prune_after": None})
    {'patience': {'file': 5, 'cluster': 3.0}}
    """
    return {
        key: {"file": file[key], "cluster": cluster[key]}
        for key in OPTIONS
        if key in file and key in cluster and file[key] != cluster[key]
    }
