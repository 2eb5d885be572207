"""Check the logs: one order, one value per offset, nothing lost, and nothing that was never published.

All sightings of an offset go into one table, whoever saw it: a publisher by an answer it can rely on, a consumer, a
reader of any node at the end. Answers of `acks=master` are left out: a failover may void them.
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
    """The facts about one stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.publishes: dict[str, list[Publish]] = {}
        self.seen: dict[int, tuple[str, Record]] = {}
        """The value at an offset, and the record that showed it first."""
        self.places: dict[str, tuple[int, Record]] = {}
        """The offset of a value, and the record that showed it first."""
        self.finals: list[LastRead] = []
        self.staged: dict[str, Staged] = {}
        """Values that producers have staged."""
        self.purges: list[Purged] = []
        self.kept: dict[str, int] = {}
        """Values that any node has at the end, and their offsets."""

    def see(self, offset: int, value: str, record: Record, findings: Findings) -> None:
        """Add one sighting of an offset."""
        first = self.seen.get(offset)
        if first is None:
            self.seen[offset] = (value, record)
        elif first[0] != value:
            text = f"{self.stream} has {first[0]!r} and {value!r} at {offset}"
            findings.add("two_values", text, _shown(first[1]), _shown(record))
        place = self.places.get(value)
        if place is None:
            self.places[value] = (offset, record)
        elif place[0] != offset:
            self._twice(value, place, offset, record, findings)

    def _twice(
        self, value: str, first: tuple[int, Record], offset: int, record: Record, findings: Findings
    ) -> None:
        operations = self.publishes.get(value, [])
        ids = {operation.id for operation in operations if operation.id is not None}
        tries = sum(operation.tries for operation in operations)
        where = f"{value!r} is at {first[0]} and at {offset} of {self.stream}"
        evidence = (*map(_shown, operations), _shown(first[1]), _shown(record))
        if value in self.staged:
            findings.add("committed_twice", where, self.staged[value], *evidence)
            return
        if ids:
            findings.add("duplicate_id", f"{where}, with the ID {', '.join(ids)}", *evidence)
        elif tries <= 1:
            findings.add("duplicate_value", f"{where}, and was published once", *evidence)


def gather(records: Sequence[Record], findings: Findings) -> dict[str, StreamFacts]:
    """Return the facts about each stream; add to `findings` the values that are at two offsets, and the like."""
    streams: dict[str, StreamFacts] = {}

    def facts(stream: str) -> StreamFacts:
        stream_facts = streams.get(stream)
        if stream_facts is None:
            stream_facts = streams[stream] = StreamFacts(stream)
        return stream_facts

    for record in records:  # publishes first: the sightings below need their outcomes
        if isinstance(record, Publish):
            facts(record.stream).publishes.setdefault(record.value, []).append(record)
        elif isinstance(record, Staged):
            facts(record.stream).staged.update(dict.fromkeys(record.values, record))
        elif isinstance(record, Purged):
            facts(record.stream).purges.append(record)
    sequences = {
        (staged.stream, staged.producer, staged.sequence): staged
        for staged in records
        if isinstance(staged, Staged)
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
                stream_facts = facts(record.stream)
                stream_facts.finals.append(record)
                for offset, value in record.rows:
                    stream_facts.see(offset, value, record, findings)
                    stream_facts.kept[value] = offset
    return streams


def check_log(facts: StreamFacts, findings: Findings) -> None:
    """Check all rules of one stream's log."""
    _values(facts, findings)
    _ids(facts, findings)
    _finals(facts, findings)
    _order(facts, findings)


def _values(facts: StreamFacts, findings: Findings) -> None:
    first = min((final.offsets[0] for final in facts.finals if final.offsets), default=0)
    for value, operations in facts.publishes.items():
        if facts.finals and value not in facts.kept:
            _missing(facts, first, operations, findings)
        place = facts.places.get(value)
        if place is not None and all(operation.outcome == "failed" for operation in operations):
            codes = ", ".join(operation.code for operation in operations)
            text = f"{value!r} is at {place[0]} of {facts.stream}, and was refused: {codes}"
            findings.add("failed_read", text, *map(_shown, operations), _shown(place[1]))
    for value, (offset, record) in facts.places.items():
        if value not in facts.publishes and value not in facts.staged:
            text = f"{value!r} at {offset} of {facts.stream} was published by nobody"
            findings.add("phantom", text, _shown(record))


def _missing(
    facts: StreamFacts, first: int, operations: Sequence[Publish], findings: Findings
) -> None:
    for operation in operations:
        if (
            operation.outcome != "ok" or 0 <= operation.offset < first
        ):  # retention may have removed it
            continue
        text = f"{operation.value!r} was acknowledged at {operation.offset} of {facts.stream}, and is not there"
        findings.add("lost" if operation.safe else "lost_master", text, _shown(operation))


def _ids(facts: StreamFacts, findings: Findings) -> None:
    """Check that no ID was stored with two values."""
    at: dict[str, tuple[int, Publish]] = {}
    for value, operations in facts.publishes.items():
        for operation in operations:
            if operation.id is None:
                continue
            place = facts.places.get(value)
            if place is None:
                continue
            first = at.setdefault(operation.id, (place[0], operation))
            if first[0] != place[0] and first[1].value != value:
                text = f"the ID {operation.id} is at {first[0]} and at {place[0]} of {facts.stream}"
                findings.add("duplicate_id", text, _shown(first[1]), _shown(operation))


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
        reference = facts.finals[0]
        if (final.offsets, final.values) == (reference.offsets, reference.values):
            continue
        mine, theirs = set(final.rows), set(reference.rows)
        if (
            facts.purges and final.offsets and reference.offsets
        ):  # one node may have trimmed less than the other so far
            first = max(final.offsets[0], reference.offsets[0])
            mine = {row for row in mine if row[0] >= first}
            theirs = {row for row in theirs if row[0] >= first}
            if mine == theirs:
                continue
        differ = sorted(mine ^ theirs)
        text = (
            f"{reference.node} and {final.node} have {len(theirs)} and {len(mine)} messages of {facts.stream}, "
            f"and differ in {len(differ)}: {differ[:5]}"
        )
        findings.add("diverged", text, _shown(reference), _shown(final))


def _order(facts: StreamFacts, findings: Findings) -> None:
    """Check, for each publisher, that messages lie before those it published after their answer."""
    by_client: dict[str, list[Publish]] = defaultdict(list)
    for operations in facts.publishes.values():
        # A message that was sent several times may lie where the first try put it.
        if len(operations) == 1 and operations[0].safe and operations[0].offset >= 0:
            by_client[operations[0].client].append(operations[0])
    for publishes in by_client.values():
        publishes.sort(key=lambda publish: publish.begin)
        open_: list[tuple[float, int]] = []  # the time when a publish ended, and its number
        highest: Publish | None = None  # the one with the highest offset of all that had ended
        for number, publish in enumerate(publishes):
            while open_ and open_[0][0] < publish.begin:
                ended = publishes[heapq.heappop(open_)[1]]
                if highest is None or ended.offset > highest.offset:
                    highest = ended
            if highest is not None and highest.offset > publish.offset:
                text = (
                    f"{publish.client} published {publish.value!r} after {highest.value!r} was answered, and "
                    f"it is before it in {facts.stream}: {publish.offset}, {highest.offset}"
                )
                findings.add("order", text, _shown(highest), _shown(publish))
            heapq.heappush(open_, (publish.end, number))


def _shown(record: Record) -> Record:
    """Return a record as evidence; only an outline of a whole log."""
    if isinstance(record, LastRead):
        return LastRead(record.node, record.stream, record.offsets[:1] + record.offsets[-1:])
    return record
