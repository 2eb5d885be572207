"""Looks at a history, and says what must not be in it.

Rules:

1. Pure: the same history, the same findings. Nothing is asked of the system that is judged.
2. What it finds is there: each rule is a consequence of what the system promises, also if answers were lost, nodes were
   stopped in the middle of a word, and numbers were forgotten that may be. What it cannot know it does not say.
3. Every rule takes time in proportion to the history, or to sort it.

>>> from verification.faults.history import LastRead, Publish
>>> told = Publish("p", "orders", "tea", begin=0.0, end=1.0, outcome="ok", offset=0)
>>> print(*check([told, LastRead("n1", "orders", [], [])]).found)
lost: 'tea' was acknowledged at 0 of orders, and is not there
"""

from __future__ import annotations

from collections.abc import Sequence

from verification.faults.anomalies import ALLOWED, Findings
from verification.faults.delivery_rules import (
    check_group,
    check_questions,
    check_readers,
    gather_groups,
)
from verification.faults.fault_rules import check_faults
from verification.faults.history import Meta, Record
from verification.faults.log_rules import check_log, gather
from verification.faults.producer_rules import check_producers


def check(records: Sequence[Record], transit: float | None = None) -> Findings:
    """All anomalies of a history. `transit`: as `Meta` says, unless told otherwise."""
    if transit is None:
        transit = next((one.transit for one in records if isinstance(one, Meta)), 0.0)
    findings = Findings()
    streams = gather(records, findings)
    for facts in streams.values():
        check_log(facts, findings)
    groups, readers = gather_groups(records)
    check_readers(readers, streams, findings)
    for group in groups.values():
        check_group(group, streams.get(group.stream), transit, findings)
    check_producers(records, streams, findings)
    check_questions(records, findings)
    check_faults(records, findings)
    return findings


def is_sound(findings: Findings) -> bool:
    """Whether nothing was found but what is allowed."""
    return all(kind in ALLOWED for kind in findings.counts)
