"""Finish micro-batches that an older Railgun has begun, and take its journal over into the query's producer.

The older sink kept a *journal* for each query and target, the stream `_spark.…`. For a micro-batch that had *begun*, it
had the end of the target at that time, and the staged streams (`_staged.…`) whose messages were to be published, or
none if the micro-batch was small and published by one call. Later it said that the micro-batch was *done*. Rules:

1. A micro-batch that has begun and is not done is finished as it was planned: messages that are in the target already,
   by their IDs, are left out. A micro-batch that was to be published by one call, and was not, has never been
   published: it is committed as any other.
2. A micro-batch that is done counts as committed: its label, and in a query that Spark numbers all labels before it.
3. Then its staged streams are deleted, and at last the journal: an interrupted take-over is repeated.
4. Numbers that users choose come in any order. If a journal of such numbers does not go back far enough to know about a
   number, that is an error (`InDoubtError`), and the journal stays.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from railgun.client.errors import StreamsError
from railgun.sinks.old_staged_streams import delete_stream, known_ids, publish_staged
from railgun.spark.streams.errors import InDoubtError

if TYPE_CHECKING:
    from railgun.client.producer import Producer
    from railgun.client.retrying_client import RetryingClient


class _PublishedIds:
    """IDs of a micro-batch in the target; raises `InDoubtError` for an ID whose message may have been deleted."""

    def __init__(self, ids: set[bytes], cut: bool, doubt: str) -> None:
        self._ids, self._cut, self._doubt = ids, cut, doubt

    def __contains__(self, id: object) -> bool:
        if id not in self._ids and self._cut:
            raise InDoubtError(self._doubt)
        return id in self._ids


def digest(query: str, target: str) -> str:
    """Return a short name for a query and where it writes to."""
    return hashlib.sha256(f"{query}\0{target}".encode()).hexdigest()[:24]


def journal_name(query: str, target: str) -> str:
    """Return the name of the journal of a query that writes to a stream."""
    return f"_spark.{target[:100]}.{digest(query, target)}"


def take_over(
    node: RetryingClient, producer: Producer, query: str, batch: int, *, numbered: bool
) -> None:
    """Commit what the journal says to the producer, before it commits a micro-batch; mostly there is no journal."""
    target = producer.stream
    journal = journal_name(query, target)
    try:
        status = node.admin("describe", name=journal)
    except StreamsError as error:
        if error.code == "NO_STREAM":
            return
        raise
    entries = _entries(node, journal, status)
    doubtful = numbered and status["first"] and batch not in entries
    if doubtful and batch < max(entries, default=0):
        raise InDoubtError(
            f"{node.who}, query {query}: batch {batch} is to be published, but an older Railgun has published later "
            f"ones, and whether it published {batch} is not known any more. Look into the stream; to write the batch, "
            "set a new name in the option query"
        )
    done = [
        number
        for number, entry in sorted(entries.items())
        if _finish(node, target, query, number, entry)
    ]
    if done and not numbered:
        node.commit(producer, {}, label=done[-1], label_since=0)
    for number in done if numbered else ():
        node.commit(producer, {}, label=number)
    staged_name = re.compile(rf"_staged\.spark-{digest(query, target)}\.[0-9]+\.[0-9a-f]+")
    for stream in node.admin("list"):
        if staged_name.fullmatch(stream["name"]):
            delete_stream(node, stream["name"])
    if not (numbered and status["first"]):
        delete_stream(node, journal)


def _entries(
    node: RetryingClient, journal: str, status: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the entries of a journal, by the numbers of micro-batches."""
    entries: dict[int, dict[str, Any]] = {}
    at, end = status["first"], status["end"]
    if at < end:
        with node.subscribe(journal, at) as reader:
            while at < end:
                records = node.records(reader)
                at = records.end
                for entry in map(json.loads, records.payloads()):
                    entries.setdefault(entry["batch"], {}).update(entry)
    return entries


def _finish(
    node: RetryingClient, target: str, query: str, batch: int, entry: dict[str, Any]
) -> bool:
    """Publish what is missing of a micro-batch that has begun; return whether all of it is published then."""
    if entry.get("done"):
        return True
    name = f"{query}/{batch}"
    cut = entry["since"] < node.admin("describe", name=target)["first"]
    doubt = (
        f"{node.who}: micro-batch {name} was begun by an older Railgun and not finished, and messages of its target "
        "have been deleted since. Whether it was published cannot be seen. Look into the stream; then begin "
        "with a new checkpoint, or delete the journal (railgun stream ls --all) to have it published once more"
    )
    published = _PublishedIds(known_ids(node, target, entry["since"], name.encode()), cut, doubt)
    if entry["staged"] is None:
        return name.encode() in published
    for number, (staged, count) in enumerate(entry["staged"]):
        publish_staged(node, staged, count, target, f"{name}/{number}/".encode(), published)
    return True
