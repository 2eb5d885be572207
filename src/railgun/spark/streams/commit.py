"""How what tasks have written comes into its stream, exactly once, whatever Spark repeats.

Spark repeats a micro-batch that it does not know to be committed: after a failure, or after a restart days later. The
repeated tasks may share rows out otherwise, and order them otherwise. So nothing of a micro-batch is published before
all of it is there; and from then on it is decided what it is. Rules:

1. Each query has a journal on the node for each stream it writes to: the stream `_spark.…`. To *begin* a micro-batch is
   to write there, for good, where the target ends now, and which staged streams are to be published.
2. If all of it is little, nothing is staged: it is published by one call with one ID, wholly or not at all.
   Else it is published piece by piece, each with an ID of query, micro-batch, staged stream and piece.
3. When all is published, the journal says that the micro-batch is *done*; only then staged streams are deleted.
4. A micro-batch that is done is not published again, whenever it is repeated, and whatever is in it now.
5. One that has begun and is not done is finished: the target is read from where it ended at its beginning, and what is
   there already is left out. What was staged then is published, and not what the repetition has brought. That does not
   depend on how long the target remembers IDs; they only keep two who finish at the same time from doing it twice.
6. If messages were deleted from the target since, and some are not found, nobody knows: that is an error.
7. What failed attempts left behind is deleted when the micro-batch is aborted; or else with the first commit after the
   query is started again, and after an attempt that failed.

A write that is no micro-batch is committed once or never, by Spark's rules: it has no journal. If its commit fails half
way, what was published stays.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.client.patience import patiently
from railgun.client.publisher import MOST
from railgun.client.sync import SyncClient
from railgun.spark.streams.errors import InDoubtError, StreamSourceError
from railgun.spark.streams.feed import OUTAGE_S
from railgun.spark.streams.staging import (
    PREFETCH,
    Line,
    Written,
    delete,
    digest,
    is_old,
    pieces,
    size_of,
    stage,
    staged,
    staged_name,
    staged_prefix,
)

ATOMIC: Final = 4 << 20  # bytes that are published by one call
RECENT: Final = 8  # entries of a journal that are looked at first
KEPT: Final = 500  # entries of a journal that are kept at least
Staged = list[tuple[str, int]]
_SWEPT: Final[set[tuple[str, str, str]]] = set()
"""The starts of queries for which this process has looked for what was left behind."""


def journal_name(query: str, target: str) -> str:
    """The journal of a query that writes to a stream."""
    return f"_spark.{target[:100]}.{digest(query, target)}"


class Target:
    """The stream that is written to. `sequential`: no micro-batch begins before the one before is done."""

    def __init__(
        self, client: SyncClient, stream: str, timeout: float, *, sequential: bool = True
    ) -> None:
        self.client = client
        self.sequential = sequential
        self.stream = stream
        self.timeout = timeout
        self.who = f"railgun, stream {stream!r}"

    def ensure(self) -> dict[str, Any]:
        """What the node says of it; it is made if need be."""
        self.client.ensure(self.stream)
        told: dict[str, Any] = self.client.admin("describe", name=self.stream)
        if told["settings"]["kind"] != "persistent":
            raise StreamSourceError(
                f"{self.who}: it is ephemeral and keeps nothing; nothing can be exactly once there. Choose a "
                "persistent one, or option delivery = 'at-least-once'"
            )
        return told

    # ------------------------------------------------------------ a write that is no micro-batch

    def commit(self, written: Sequence[Written]) -> None:
        """Publish what tasks have written."""
        line = Line(self.client, self.stream)
        for one in written:
            for number, piece in enumerate(self._of(one)):
                line.add(piece, f"{one.query}/{one.partition}/{number}")
        line.wait()
        self.discard(written)

    def _of(self, one: Written) -> Any:
        if one.staged is None:
            return pieces([one.payloads])
        return staged(self.client, *one.staged, self.timeout)

    def discard(self, written: Sequence[Written]) -> None:
        """Take away what tasks have staged."""
        for one in written:
            if one.staged is not None:
                delete(self.client, one.staged[0])

    # ------------------------------------------------------------ a micro-batch

    def commit_batch(self, query: str, batch: int, written: Sequence[Written]) -> None:
        """Publish a micro-batch, unless that was done. What fails and may pass is repeated: the journal allows it."""
        once = partial(self._commit_batch, query, batch, written)
        patiently(once, timeout_s=max(OUTAGE_S, self.timeout))

    def _commit_batch(self, query: str, batch: int, written: Sequence[Written]) -> None:
        journal = _Journal(self, query)
        known = journal.look(batch)
        repeated = known is not None
        if known is None:
            if not any(one.payloads or one.staged for one in written):
                return
            known, repeated = self._begin(journal, query, batch, written)
        if not known.get("done"):
            self._finish(f"{query}/{batch}", known, written, repeated)
            journal.done(batch)
        for name, _ in known.get("staged") or []:
            delete(self.client, name)
        self.discard(written)
        runs = {(self.stream, query, one.run) for one in written}
        if repeated or not runs <= _SWEPT or any(one.attempt for one in written):
            self.sweep(query, batch)
            _SWEPT.update(runs)

    def _begin(
        self, journal: _Journal, query: str, batch: int, written: Sequence[Written]
    ) -> tuple[dict[str, Any], bool]:
        """Decide what the micro-batch is, for good; and whether somebody else has."""
        told = self.ensure()
        little = all(one.staged is None for one in written)
        atomic = little and sum(size_of(one.payloads) for one in written) <= ATOMIC
        given = None if atomic else self._staged(query, batch, written)
        return journal.begin(batch, told["end"], given)

    def _staged(self, query: str, batch: int, written: Sequence[Written]) -> Staged:
        """All of it in staged streams, in the order of the tasks."""
        found: Staged = []
        waiting: list[bytes] = []

        def flush() -> None:
            if waiting:
                name = staged_name(query, self.stream, batch)
                found.append(stage(self.client, name, [waiting]))
                waiting.clear()

        for one in written:
            waiting += one.payloads
            if one.staged is not None:
                flush()
                found.append(one.staged)
        flush()
        return found

    def _finish(
        self, name: str, known: dict[str, Any], written: Sequence[Written], repeated: bool
    ) -> None:
        """Publish what is not there yet."""
        there = self._there(known["since"], name) if repeated else _Found(set(), False)
        line = Line(self.client, self.stream)
        if known["staged"] is None and name not in there.ids:
            self._sure(there, name)
            every = [payload for one in written for piece in self._of(one) for payload in piece]
            self._fits(name, every)
            if every:
                line.add(every, name)
        for number, (stream, count) in enumerate(known["staged"] or []):
            try:
                for at, piece in enumerate(staged(self.client, stream, count, self.timeout)):
                    id = f"{name}/{number}/{at}"
                    if id not in there.ids:
                        self._sure(there, name)
                        line.add(piece, id)
            except StreamsError as error:
                if error.code != "NO_STREAM" or not repeated:
                    raise
                break  # all was published: it is deleted only then
        line.wait()

    def _fits(self, name: str, payloads: Sequence[bytes]) -> None:
        """What was to be published by one call is, also if tasks have shared it out otherwise."""
        if size_of(payloads) > MOST:
            raise StreamSourceError(
                f"{self.who}: micro-batch {name} has become larger when it was repeated. Its source or its query is "
                "not the same as before: begin with a new checkpoint"
            )

    def _sure(self, there: _Found, name: str) -> None:
        if there.cut:
            raise InDoubtError(
                f"{self.who}: micro-batch {name} was begun and not finished, and messages have been deleted since "
                "from where it went to. Whether it was published cannot be seen. Look for yourself; then begin with "
                "a new checkpoint, or delete the journal (railgun stream ls --all) to have it published once more"
            )

    def _there(self, since: int, name: str) -> _Found:
        """The IDs of a micro-batch that are in the target."""
        told = self.client.admin("describe", name=self.stream)
        at, end = max(since, told["first"]), told["end"]
        exact, start = name.encode(), f"{name}/".encode()
        found: set[str] = set()
        if at < end:
            with self.client.subscribe(self.stream, start=at, prefetch=PREFETCH) as reader:
                while at < end:
                    records = reader.records(self.timeout)
                    at = records.end
                    if records.has_ids:
                        ids = (id for id in records.ids() if id)
                        found.update(
                            id.decode() for id in ids if id == exact or id.startswith(start)
                        )
        return _Found(found, since < told["first"])

    def abort_batch(self, query: str, batch: int, written: Sequence[Written]) -> None:
        """It came to nothing, for now. What has begun is left for who finishes it."""
        known = _Journal(self, query).look(batch)
        begun = [] if known is None or known.get("done") else known.get("staged") or []
        self.sweep(query, batch, but=[name for name, _ in begun])

    def sweep(self, query: str, batch: int = 0, but: Sequence[str] = ()) -> None:
        """Delete what attempts of this micro-batch and of earlier ones have left behind."""
        form = re.compile(re.escape(staged_prefix(query, self.stream)) + r"([0-9]+)\.[0-9a-f]+")
        for one in self.client.admin("list"):
            found = form.fullmatch(one["name"])
            if not found or one["name"] in but:
                continue
            number = int(found[1])
            if number == batch or (self.sequential and number < batch):
                delete(self.client, one["name"])

    def sweep_old(self) -> None:
        """Delete what writes that are no micro-batches have left behind."""
        for one in self.client.admin("list"):
            if is_old(one["name"]):
                delete(self.client, one["name"])


class _Found:
    """IDs, and whether others may have been deleted."""

    def __init__(self, ids: set[str], cut: bool) -> None:
        self.ids = ids
        self.cut = cut


class _Journal:
    """What a query has begun, and what of it is done."""

    def __init__(self, target: Target, query: str) -> None:
        self._client = target.client
        self._name = journal_name(query, target.stream)
        self._who = f"{target.who}, query {query}"
        self._timeout = target.timeout
        self._sequential = target.sequential

    def look(self, batch: int) -> dict[str, Any] | None:
        """What is known of a micro-batch; None: it has not begun."""
        try:
            told = self._client.admin("describe", name=self._name)
        except StreamsError as error:
            if error.code == "NO_STREAM":
                return None
            raise
        first, end = told["first"], told["end"]
        at = max(first, end - RECENT) if self._sequential else first
        found, last = self._read(at, end, batch)
        if found is None and last >= batch and at > first:
            found, last = self._read(first, end, batch)
        if found is None and batch < last and first:
            raise InDoubtError(
                f"{self._who}: micro-batch {batch} is to be published, but {last} was already, and what became of "
                f"{batch} is not known any more. The checkpoint is an old one: begin with a new one"
            )
        if end - first > 2 * KEPT:
            self._client.admin("purge", name=self._name, before=end - KEPT)
        return found

    def _read(self, at: int, end: int, batch: int) -> tuple[dict[str, Any] | None, int]:
        """What entries say of a micro-batch, and the last one that they are about."""
        found: dict[str, Any] | None = None
        last = -1
        if at < end:
            with self._client.subscribe(self._name, start=at, prefetch=PREFETCH) as reader:
                while at < end:
                    records = reader.records(self._timeout)
                    at = records.end
                    for entry in map(json.loads, records.payloads()):
                        last = max(last, entry["batch"])
                        if entry["batch"] == batch:
                            found = {**(found or {}), **entry}
        return found, last

    def begin(self, batch: int, since: int, given: Staged | None) -> tuple[dict[str, Any], bool]:
        """Say what the micro-batch is; or what somebody else has said just before."""
        entry = {"batch": batch, "since": since, "staged": given}
        self._client.ensure(self._name)
        try:
            self._client.publish(self._name, json.dumps(entry), id=f"{batch}")
        except DuplicateIdError:
            known = self.look(batch)
            if known is not None:
                return known, True
        return entry, False

    def done(self, batch: int) -> None:
        """All of it is published."""
        with contextlib.suppress(DuplicateIdError):
            self._client.publish(
                self._name, json.dumps({"batch": batch, "done": True}), id=f"{batch}/done"
            )
