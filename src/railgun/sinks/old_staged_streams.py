"""Commit output that a snapshot of an older Railgun holds: it is in staged streams, `_staged.…`, and published from
there.

Rules:

1. To commit is to publish what was staged to the target, piece by piece, each with an ID, and then to delete the staged
   stream. A commit that finds no staged stream was done before. An interrupted commit is repeated, and the target's
   deduplication window ("ID time box") keeps pieces from being published twice.
2. If so much time has passed that the window may have forgotten IDs, the target is read from where it ended when the
   piece was staged, and pieces that are in it are left out.
3. Staged streams that no snapshot names are left alone: they may belong to another job. Users may delete them.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Protocol

from railgun.client.errors import StreamsError
from railgun.flows.sink import Token

if TYPE_CHECKING:
    from typing import Any, Literal

    from railgun.client.sync import SyncSubscription
    from railgun.transport.records import Records


class Caller(Protocol):
    """The calls to a node, each repeated until it succeeds or fails for good."""

    def admin(self, call: str, **arguments: Any) -> Any:
        """Make an administrative call, as `SyncClient.admin`."""

    def subscribe(self, stream: str, start: int | Literal["start"] = "start") -> SyncSubscription:
        """Subscribe to a stream, as `SyncClient.subscribe`."""

    def records(self, reader: SyncSubscription) -> Records:
        """Return the next batch of a subscription."""

    def publish(self, stream: str, payloads: list[bytes], id: bytes) -> None:
        """Publish messages under one ID, once."""


def commit_older(node: Caller, token: Token, suspicious: bool) -> None:
    """Publish what was staged, unless that was done; `suspicious`: a commit may have begun long ago."""
    staged, target = token["staged"], token["target"]
    box = node.admin("describe", name=target)["settings"]["id_box"]
    old = suspicious or not 0 <= time.time() - token["time"] < box / 4
    name = _name(staged)
    published = known_ids(node, target, token["since"], name) if old else set()
    publish_staged(node, staged, token["count"], target, name, published)
    delete_stream(node, staged)


def publish_staged(
    node: Caller, staged: str, count: int, target: str, name: bytes, published: Container[bytes]
) -> None:
    """Publish what was staged, except pieces whose IDs are in `published`; each ID begins with `name`.

    A missing staged stream was published, also if it disappears meanwhile: another process was faster.
    """
    try:
        with node.subscribe(staged) as reader:
            for number, payloads in _pieces(node, reader, count):
                id = name + number
                if id not in published:
                    node.publish(target, payloads, id)
    except StreamsError as error:
        if error.code != "NO_STREAM" or staged not in str(error):
            raise


def _name(staged: str) -> bytes:
    """Return the beginning of the IDs that a staged stream's pieces have in the target."""
    return staged.rpartition(".")[2].encode()


def _pieces(
    node: Caller, reader: SyncSubscription, count: int
) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the pieces as they were staged: each begins with a message that has an ID."""
    number, payloads, at = b"", list[bytes](), 0
    while at < count:
        records = node.records(reader)
        at = records.end
        for id, payload in zip(records.ids(), records.payloads(), strict=True):
            if id is not None:
                if payloads:
                    yield number, payloads
                number, payloads = id, []
            payloads.append(payload)
    yield number, payloads


def known_ids(node: Caller, target: str, since: int, name: bytes) -> set[bytes]:
    """Return the IDs in the target, from offset `since` on, that begin with `name`."""
    status = node.admin("describe", name=target)
    ids: set[bytes] = set()
    at = max(since, status["first"])
    if at < status["end"]:
        with node.subscribe(target, at) as reader:
            while at < status["end"]:
                records = node.records(reader)
                at = records.end
                if records.has_ids:
                    ids.update(id for id in records.ids() if id and id.startswith(name))
    return ids


def delete_stream(node: Caller, stream: str) -> None:
    """Delete a stream, if it still exists."""
    try:
        node.admin("delete", name=stream)
    except StreamsError as error:
        if error.code != "NO_STREAM":
            raise
