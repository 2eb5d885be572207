"""Check a recorded history: report every anomaly that the guarantees of the system rule out.

Rules:

1. Pure: the same history gives the same findings. The system under test is never asked.
2. Every finding is real: each rule follows from a guarantee of the system, even if answers were lost, nodes were killed
   in the middle of a write, and IDs were forgotten that may be. What a history cannot show is not reported.
3. Every rule takes time in proportion to the history, or to sort it.

>>> from verification.faults.history import LastRead, Publish
>>> publish = Publish("p", "orders", "tea", begin=0.0, end=1.0, outcome="ok", offset=0)
>>> print(*check([publish, LastRead("n1", "orders", [], [])]).found)
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
    """Return all anomalies of a history. `transit` overrides the value of its `Meta`."""
    if transit is None:
        transit = next((meta.transit for meta in records if isinstance(meta, Meta)), 0.0)
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
    """Return whether all findings are of allowed kinds."""
    return all(kind in ALLOWED for kind in findings.counts)
