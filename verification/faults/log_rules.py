"""What must be true of the logs: one order, one value for an offset, nothing lost, nothing that nobody published.

All that was ever seen of an offset is one table, whoever saw it: a publisher by an answer it can rely on, a consumer, a
reader of any node at the end. Answers of `acks=master` are left out: they may be void after a failover.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from verification.faults.anomalies import Findings
from verification.faults.history import (
    Committed,
    Delivery,
    LastRead,
    Publish,
    Purged,
    Record,
    Staged,
)


class StreamFacts:
    """All that is known of one stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.publishes: dict[str, list[Publish]] = {}
        self.seen: dict[int, tuple[str, Record]] = {}
        """What an offset holds, and who has seen it first."""
        self.places: dict[str, tuple[int, Record]] = {}
        """Where a value is, and who has seen it there first."""
        self.finals: list[LastRead] = []
        self.staged: dict[str, Staged] = {}
        """Values that producers have staged."""
        self.purges: list[Purged] = []
        self.kept: dict[str, int] = {}
        """Values that are there at the end, on any node, and where."""

    def see(self, offset: int, value: str, record: Record, findings: Findings) -> None:
        """One more look at an offset."""
        known = self.seen.get(offset)
        if known is None:
            self.seen[offset] = (value, record)
        elif known[0] != value:
            text = f"{self.stream} has {known[0]!r} and {value!r} at {offset}"
            findings.add("two_values", text, _shown(known[1]), _shown(record))
        place = self.places.get(value)
        if place is None:
            self.places[value] = (offset, record)
        elif place[0] != offset:
            self._twice(value, place, offset, record, findings)

    def _twice(
        self, value: str, known: tuple[int, Record], offset: int, record: Record, findings: Findings
    ) -> None:
        operations = self.publishes.get(value, [])
        ids = {one.id for one in operations if one.id is not None}
        tries = sum(one.tries for one in operations)
        where = f"{value!r} is at {known[0]} and at {offset} of {self.stream}"
        evidence = (*map(_shown, operations), _shown(known[1]), _shown(record))
        if value in self.staged:
            findings.add("committed_twice", where, self.staged[value], *evidence)
            return
        if ids:
            findings.add("duplicate_id", f"{where}, with the ID {', '.join(ids)}", *evidence)
        elif tries <= 1:
            findings.add("duplicate_value", f"{where}, and was published once", *evidence)


def gather(records: Sequence[Record], findings: Findings) -> dict[str, StreamFacts]:
    """What is known of each stream; values that are not where they were are found on the way."""
    streams: dict[str, StreamFacts] = {}

    def facts(stream: str) -> StreamFacts:
        found = streams.get(stream)
        if found is None:
            found = streams[stream] = StreamFacts(stream)
        return found

    for record in records:  # first, so that it is known what was published how
        if isinstance(record, Publish):
            facts(record.stream).publishes.setdefault(record.value, []).append(record)
        elif isinstance(record, Staged):
            facts(record.stream).staged.update(dict.fromkeys(record.values, record))
        elif isinstance(record, Purged):
            facts(record.stream).purges.append(record)
    sequences = {
        (one.stream, one.producer, one.sequence): one for one in records if isinstance(one, Staged)
    }
    for record in records:
        match record:
            case Committed() if record.base >= 0 and len(record.sequences) == 1:
                staged = sequences.get((record.stream, record.producer, record.sequences[0]))
                for n, value in enumerate(staged.values if staged is not None else ()):
                    facts(record.stream).see(record.base + n, value, record, findings)
            case Delivery():
                facts(record.stream).see(record.offset, record.value, record, findings)
            case Publish() if record.safe and record.offset >= 0:
                facts(record.stream).see(record.offset, record.value, record, findings)
            case LastRead():
                found = facts(record.stream)
                found.finals.append(record)
                for offset, value in record.rows:
                    found.see(offset, value, record, findings)
                    found.kept[value] = offset
    return streams


def check_log(facts: StreamFacts, findings: Findings) -> None:
    """All that must be true of one stream's log."""
    _values(facts, findings)
    _ids(facts, findings)
    _finals(facts, findings)
    _order(facts, findings)


def _values(facts: StreamFacts, findings: Findings) -> None:
    first = min((one.offsets[0] for one in facts.finals if one.offsets), default=0)
    for value, operations in facts.publishes.items():
        if facts.finals and value not in facts.kept:
            _missing(facts, first, operations, findings)
        place = facts.places.get(value)
        if place is not None and all(one.outcome == "failed" for one in operations):
            codes = ", ".join(one.code for one in operations)
            text = f"{value!r} is at {place[0]} of {facts.stream}, and was refused: {codes}"
            findings.add("failed_read", text, *map(_shown, operations), _shown(place[1]))
    for value, (offset, record) in facts.places.items():
        if value not in facts.publishes and value not in facts.staged:
            text = f"{value!r} at {offset} of {facts.stream} was published by nobody"
            findings.add("phantom", text, _shown(record))


def _missing(
    facts: StreamFacts, first: int, operations: Sequence[Publish], findings: Findings
) -> None:
    for one in operations:
        if one.outcome != "ok" or 0 <= one.offset < first:  # it may be too old to be kept
            continue
        text = f"{one.value!r} was acknowledged at {one.offset} of {facts.stream}, and is not there"
        findings.add("lost" if one.safe else "lost_master", text, _shown(one))


def _ids(facts: StreamFacts, findings: Findings) -> None:
    """Two values with one ID: both were taken."""
    at: dict[str, tuple[int, Publish]] = {}
    for value, operations in facts.publishes.items():
        for one in operations:
            if one.id is None:
                continue
            place = facts.places.get(value)
            if place is None:
                continue
            known = at.setdefault(one.id, (place[0], one))
            if known[0] != place[0] and known[1].value != value:
                text = f"the ID {one.id} is at {known[0]} and at {place[0]} of {facts.stream}"
                findings.add("duplicate_id", text, _shown(known[1]), _shown(one))


def _finals(facts: StreamFacts, findings: Findings) -> None:
    for final in facts.finals:
        previous = None
        for offset in final.offsets:
            if previous is not None and offset != previous + 1:
                text = f"{final.node} has {previous} and then {offset} of {facts.stream}"
                findings.add("gap", text, _shown(final))
                break
            previous = offset
    for final in facts.finals[1:]:
        other = facts.finals[0]
        if (final.offsets, final.values) == (other.offsets, other.values):
            continue
        mine, theirs = set(final.rows), set(other.rows)
        if facts.purges and final.offsets and other.offsets:  # one may have trimmed less yet
            first = max(final.offsets[0], other.offsets[0])
            mine = {row for row in mine if row[0] >= first}
            theirs = {row for row in theirs if row[0] >= first}
            if mine == theirs:
                continue
        differ = sorted(mine ^ theirs)
        text = (
            f"{other.node} and {final.node} have {len(theirs)} and {len(mine)} messages of {facts.stream}, "
            f"and differ in {len(differ)}: {differ[:5]}"
        )
        findings.add("diverged", text, _shown(other), _shown(final))


def _order(facts: StreamFacts, findings: Findings) -> None:
    """Of one publisher: what was answered before something was asked for, lies before it."""
    by_client: dict[str, list[Publish]] = defaultdict(list)
    for operations in facts.publishes.values():
        # What was tried before may lie where the first try put it.
        if len(operations) == 1 and operations[0].safe and operations[0].offset >= 0:
            by_client[operations[0].client].append(operations[0])
    for some in by_client.values():
        some.sort(key=lambda one: one.begin)
        open_: list[tuple[float, int]] = []  # when it ended, and its number
        highest: Publish | None = None  # of all that had ended
        for number, one in enumerate(some):
            while open_ and open_[0][0] < one.begin:
                ended = some[heapq.heappop(open_)[1]]
                if highest is None or ended.offset > highest.offset:
                    highest = ended
            if highest is not None and highest.offset > one.offset:
                text = (
                    f"{one.client} published {one.value!r} after {highest.value!r} was answered, and "
                    f"it is before it in {facts.stream}: {one.offset}, {highest.offset}"
                )
                findings.add("order", text, _shown(highest), _shown(one))
            heapq.heappush(open_, (one.end, number))


def _shown(record: Record) -> Record:
    """As evidence; of a whole log only the outline."""
    if isinstance(record, LastRead):
        return LastRead(record.node, record.stream, record.offsets[:1] + record.offsets[-1:])
    return record
