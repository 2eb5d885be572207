"""Reports of a node to the leader, one with each renewal of its lease.

A report is a sign of life whatever is in it. A field that cannot be read counts as absent:

    {"regions": {region: {"epoch": int, "active": bool, "caught_up": [ids], "anew": bool, "lag": int}},
     "trouble": "", "unwritable": {stream: why}, "full": bool, "lag": int, "applied": int}

`regions` are those of which the node is master, with what it knows of this `epoch`: `active` when a majority has the
label on every stream, the learners that have `caught_up`, and `anew` when this process has not begun the epoch itself
(it was restarted), so it must not write in it. A replica may report its `lag` there, too: how many messages it knows to
lack. `trouble` is why the node cannot be a master, such as a failed disk; `full`, that others should rather be: there
is hardly any room on its disk. `unwritable` names the streams whose copies there cannot be written. `applied` is the
last index of Raft that it applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MAX_ITEMS: Final = 1000
"""How many regions, streams and nodes of a report are read; further ones are ignored."""


@dataclass(frozen=True, slots=True)
class RegionReport:
    """The report on one region."""

    epoch: int = -1
    active: bool = False
    caught_up: frozenset[str] = frozenset()
    anew: bool = False
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The last report of a node.

    >>> Report.of({"regions": {"global": {"epoch": 3, "caught_up": ["b", 7]}, "x": 1}, "lag": "?"})
    Report(regions={'global': RegionReport(epoch=3, ..., caught_up=frozenset({'b'}), ...)}, trouble='', lag=0, ...)
    """

    regions: Mapping[str, RegionReport] = field(default_factory=dict)
    trouble: str = ""
    lag: int = 0
    applied: int | None = None
    full: bool = False
    unwritable: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(data: Any) -> Report:
        """Return the readable parts of a report."""
        fields = data if isinstance(data, dict) else {}
        regions = fields.get("regions")
        trouble = fields.get("trouble")
        unwritable = fields.get("unwritable")
        return Report(
            {
                name: _region_report(value)
                for name, value in list(regions.items() if isinstance(regions, dict) else ())[
                    :MAX_ITEMS
                ]
                if isinstance(name, str) and isinstance(value, dict)
            },
            trouble[:1000] if isinstance(trouble, str) else "",
            _whole(fields.get("lag")) or 0,
            _whole(fields.get("applied")),
            fields.get("full") is True,
            {
                stream: why[:1000]
                for stream, why in list(unwritable.items() if isinstance(unwritable, dict) else ())[
                    :MAX_ITEMS
                ]
                if isinstance(stream, str) and isinstance(why, str)
            },
        )

    def lag_in(self, region: str) -> int:
        """Return how many messages the node lacks in a region, as far as it knows."""
        report = self.regions.get(region)
        return self.lag if report is None or report.lag is None else report.lag


def _region_report(fields: dict[Any, Any]) -> RegionReport:
    epoch, caught_up = _whole(fields.get("epoch")), fields.get("caught_up")
    nodes = caught_up[:MAX_ITEMS] if isinstance(caught_up, list | tuple) else ()
    return RegionReport(
        -1 if epoch is None else epoch,
        fields.get("active") is True,
        frozenset(node for node in nodes if isinstance(node, str)),
        fields.get("anew") is True,
        _whole(fields.get("lag")),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
