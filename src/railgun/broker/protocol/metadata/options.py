"""The settings of the cluster as a whole: which there are, and what they may be.

They are metadata: once the cluster is formed they change by a command only, if at all. What a node's file says of them
counts when the cluster is formed, and after that is compared (`drift`), told, and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import RefusedError, Scalar, bad, check_object, told


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: a number of seconds within limits; `optional`: or None, which is without it.

    `settled`: it cannot be changed once the cluster is formed. `least_asked`: the lowest value that people may ask for
    (`check_asked`); lower ones, down to `least`, are accepted only from logs of older versions.
    """

    default: float | None
    least: float
    most: float
    optional: bool = False
    settled: bool = False
    least_asked: float | None = None


OPTIONS: Final[Mapping[str, Option]] = {
    # How long nodes wait for a leader; leases are shorter.
    "election": Option(0.6, 0.05, 60.0, settled=True),
    "patience": Option(0.7, 0.1, 3600.0),  # how long the leader waits for a silent master
    "prune_after": Option(None, 1.0, 1e9, optional=True),  # a dead node leaves; None: never
    # How long a write waits for a master: in less than a second no other one can be elected.
    "master_wait": Option(5.0, 0.0, 3600.0, least_asked=1.0),
    "rs_timeout": Option(30.0, 0.001, 86400.0),  # of a response, if it is not asked for another
}
"""All in seconds."""


def defaults() -> dict[str, Scalar]:
    """What a cluster has if nothing else is said."""
    return {key: option.default for key, option in OPTIONS.items()}


def check_options(value: Any) -> dict[str, Scalar]:
    """Some of the settings, looked at.

    >>> check_options({"patience": 5})
    {'patience': 5}
    >>> check_options({"patience": "long"})
    Traceback (most recent call last):
    railgun.broker.protocol.metadata.fields.RefusedError: patience is 0.1 to 3600 seconds, not 'long'
    """
    if value is None:
        raise bad("settings are an object, not None")
    asked = check_object(value, "settings")
    for key, one in asked.items():
        option = OPTIONS.get(key)
        if option is None:
            raise RefusedError(
                "BAD_SETTINGS",
                f"a cluster has no setting {told(key)}; there are {', '.join(sorted(OPTIONS))}",
            )
        if one is None and option.optional:
            continue
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        if not is_number or not option.least <= one <= option.most:
            raise _out_of_range(key, option.least, one)
    return dict(asked)


def check_asked(value: Any) -> dict[str, Scalar]:
    """Return some of the settings as people ask for them; raise `RefusedError` also for what makes no sense.

    >>> check_asked({"master_wait": 0.1})
    Traceback (most recent call last):
    railgun.broker.protocol.metadata.fields.RefusedError: master_wait is 1 to 3600 seconds, not 0.1
    """
    asked = check_options(value)
    for key, one in asked.items():
        least = OPTIONS[key].least_asked
        if least is not None and isinstance(one, int | float) and one < least:
            raise _out_of_range(key, least, one)
    return asked


def _out_of_range(key: str, least: float, value: Any) -> RefusedError:
    option = OPTIONS[key]
    also = ", or nothing" if option.optional else ""
    text = f"{key} is {least:g} to {option.most:g} seconds{also}, not {told(value)}"
    return RefusedError("BAD_SETTINGS", text)


def drift(cluster: Mapping[str, Scalar], file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Where a node's file differs from what the cluster does.

    >>> drift({"patience": 3.0, "prune_after": None}, {"patience": 5, "prune_after": None})
    {'patience': {'file': 5, 'cluster': 3.0}}
    """
    return {
        key: {"file": file[key], "cluster": cluster[key]}
        for key in OPTIONS
        if key in file and key in cluster and file[key] != cluster[key]
    }
