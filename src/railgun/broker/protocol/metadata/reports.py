"""What a node tells the leader with each renewal of its lease, as far as it can be believed.

A report is a sign of life whatever is in it. What cannot be read in it is as if it had not been told:

    {"regions": {region: {"epoch": int, "active": bool, "caught_up": [ids], "anew": bool, "lag": int}},
     "trouble": "", "unwritable": {stream: why}, "full": bool, "lag": int, "applied": int}

In `regions` are those it is the master of, with what it knows of this `epoch`: `active` when a majority has the label
on every stream, who of those that learn has `caught_up`, and `anew` when this process has not begun the epoch itself
(it was started again), so it must not write in it. A replica may tell its `lag` there, too: how much it knows to lack.
`trouble` is why the node can be nobody's master, as a failed disk; `full`, that others should rather be: there is
hardly any room on its disk. `unwritable` names the streams whose copies there cannot be written. `applied` is the last
index of Raft that it applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MOST: Final = 1000
"""Regions of a report, and nodes of a region."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of one region."""

    epoch: int = -1
    active: bool = False
    caught_up: frozenset[str] = frozenset()
    anew: bool = False
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a node has told.

    >>> Report.of({"regions": {"global": {"epoch": 3, "caught_up": ["b", 7]}, "x": 1}, "lag": "?"})
    Report(regions={'global': Told(epoch=3, active=False, caught_up=frozenset({'b'}), ...)}, trouble='', lag=0, ...)
    """

    regions: Mapping[str, Told] = field(default_factory=dict)
    trouble: str = ""
    lag: int = 0
    applied: int | None = None
    full: bool = False
    unwritable: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(told: Any) -> Report:
        """What of this can be read."""
        fields = told if isinstance(told, dict) else {}
        regions = fields.get("regions")
        trouble = fields.get("trouble")
        unwritable = fields.get("unwritable")
        return Report(
            {
                name: _told(one)
                for name, one in list(regions.items() if isinstance(regions, dict) else ())[:MOST]
                if isinstance(name, str) and isinstance(one, dict)
            },
            trouble[:1000] if isinstance(trouble, str) else "",
            _whole(fields.get("lag")) or 0,
            _whole(fields.get("applied")),
            fields.get("full") is True,
            {
                stream: why[:1000]
                for stream, why in list(unwritable.items() if isinstance(unwritable, dict) else ())[
                    :MOST
                ]
                if isinstance(stream, str) and isinstance(why, str)
            },
        )

    def lag_in(self, region: str) -> int:
        """How much it lacks there, as far as it knows."""
        told = self.regions.get(region)
        return self.lag if told is None or told.lag is None else told.lag


def _told(fields: dict[Any, Any]) -> Told:
    epoch, caught_up = _whole(fields.get("epoch")), fields.get("caught_up")
    some = caught_up[:MOST] if isinstance(caught_up, list | tuple) else ()
    return Told(
        -1 if epoch is None else epoch,
        fields.get("active") is True,
        frozenset(one for one in some if isinstance(one, str)),
        fields.get("anew") is True,
        _whole(fields.get("lag")),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
