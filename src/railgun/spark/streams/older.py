"""Micro-batches that an older Railgun has written: what its journal says of them holds for the producer of the query.

The older sink kept a *journal* for each query and target, the stream `_spark.…`: a micro-batch had *begun* with the end
of the target then, and with the staged streams (`_staged.…`) whose messages it was to publish, or with none if it was
little and published by one call; and later it was *done*. Rules:

1. One that has begun and is not done is finished as it was to be: what is in the target already, by its IDs, is left
   out. One that was to be published by one call, and was not, has never been: it is committed as any other.
2. What is done then counts as committed: its label, and in a query that Spark numbers all labels before it.
3. Then its staged streams are deleted, and at last the journal: whoever is interrupted does it again.
4. Numbers that users give come in any order. If a journal of these does not go back far enough to tell about a number,
   that is an error (`InDoubtError`), and the journal stays.
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


class _Found:
    """IDs of a micro-batch in the target; to ask for one that may have been deleted is an error."""

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
    """Let a producer know what the journal knows, before it commits a micro-batch; most often there is none."""
    target = producer.stream
    journal = journal_name(query, target)
    try:
        told = node.admin("describe", name=journal)
    except StreamsError as error:
        if error.code == "NO_STREAM":
            return
        raise
    entries = _entries(node, journal, told)
    doubtful = numbered and told["first"] and batch not in entries
    if doubtful and batch < max(entries, default=0):
        raise InDoubtError(
            f"{node.who}, query {query}: batch {batch} is to be published, but later ones were by an older Railgun, "
            f"and what became of {batch} is not known any more. Look into the stream; to write it, give a new name "
            "in the option query"
        )
    done = [
        one for one, entry in sorted(entries.items()) if _finish(node, target, query, one, entry)
    ]
    if done and not numbered:
        node.commit(producer, {}, label=done[-1], label_since=0)
    for one in done if numbered else ():
        node.commit(producer, {}, label=one)
    form = re.compile(rf"_staged\.spark-{digest(query, target)}\.[0-9]+\.[0-9a-f]+")
    for stream in node.admin("list"):
        if form.fullmatch(stream["name"]):
            delete_stream(node, stream["name"])
    if not (numbered and told["first"]):
        delete_stream(node, journal)


def _entries(node: RetryingClient, journal: str, told: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what a journal says, by the numbers of micro-batches."""
    found: dict[int, dict[str, Any]] = {}
    at, end = told["first"], told["end"]
    if at < end:
        with node.subscribe(journal, at) as reader:
            while at < end:
                records = node.records(reader)
                at = records.end
                for entry in map(json.loads, records.payloads()):
                    found.setdefault(entry["batch"], {}).update(entry)
    return found


def _finish(
    node: RetryingClient, target: str, query: str, batch: int, entry: dict[str, Any]
) -> bool:
    """Publish what is missing of a micro-batch that has begun; return whether it is all there then."""
    if entry.get("done"):
        return True
    name = f"{query}/{batch}"
    cut = entry["since"] < node.admin("describe", name=target)["first"]
    doubt = (
        f"{node.who}: micro-batch {name} was begun by an older Railgun and not finished, and messages have been "
        "deleted since from where it went to. Whether it was published cannot be seen. Look for yourself; then begin "
        "with a new checkpoint, or delete the journal (railgun stream ls --all) to have it published once more"
    )
    known = _Found(known_ids(node, target, entry["since"], name.encode()), cut, doubt)
    if entry["staged"] is None:
        return name.encode() in known
    for number, (staged, count) in enumerate(entry["staged"]):
        publish_staged(node, staged, count, target, f"{name}/{number}/".encode(), known)
    return True
