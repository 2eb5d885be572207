"""Streams and StreamSink: persistent streams of a node as ends of a flow.

Rules of the source:

1. A part is a stream, by its name; the position is the offset of the next message, with the identity of the stream. So
   a stream is read by one worker at a time, in order, and moves to another at the cost of a number. A stream that was
   deleted and made anew is another one: that is an error (`missing="skip"`: it is read from its start). Positions of
   older snapshots are offsets alone, and are taken as they are. A position never moves back within a stream.
2. Nothing is acked and no group is made: the position is the flow's, saved with its snapshots.
3. Messages that were deleted before they were read are an error, never passed over in silence (`missing="skip"`: they
   are).
4. A node that is gone for a while is waited for, and so is a cluster without a leader or master: whatever fails with a
   code that may pass (`transport.error_codes`) is tried again, and `engine.operators.outages` knows what is waited for. The records read ahead
   stay within bounds.

Rules of the sink, exactly once:

5. The sink is a *producer* of its stream (`client.producer`), named by the directory of the snapshots, the flow and the
   step; its epoch is the generation. What a worker writes between two snapshots is staged under a sequence. To
   *prepare* is to wait until all of it is safe on the node.
6. To *commit* is to let the node make it part of the stream: at once, and once. A commit may be repeated for as long as
   there is the stream. What is neither staged nor committed is an error (`LOST_OUTPUT`), and so is what was staged for
   a stream that was deleted and made anew: the token has the stream's identity.
7. A generation that begins fences the ones before it, commits what its snapshot holds, and drops what else they have
   staged. Other jobs of the same flow have other directories, and are other producers.
8. What a snapshot of an older Railgun holds was staged another way, and is recovered by that (`sinks.old_staged_streams`).
9. One worker commits what all have staged for a snapshot, in one commit. Items of one key stay in order: when a rescale
   brings keys to a worker, it begins another sequence, and sequences are committed in the order of the rescales
   they began with. A worker that keys leave writes on under the sequence it has, which comes before.
10. A sink waits as a source does (4). What was sent keeps its order: the client sends it again itself as long as roles
    change or nodes are gone. Pieces that were refused for another reason that may pass are sent again one by one, if
    none behind them was stored.

At least once, and in a flow without snapshots, items are published as they come.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import fnmatch
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from railgun.client.address import DATA, Address
from railgun.client.errors import StreamsError, refuse_damaged
from railgun.client.nodes import Pauses
from railgun.client.patience import PAUSES_S
from railgun.client.payloads import from_json, from_msgpack, to_msgpack
from railgun.sources.errors import ConnectorError, LostOutputError
from railgun.sinks.files import as_json, encoded
from railgun.sinks.old_staged_streams import commit_older
from railgun.sinks.retrying_client import PREFETCH, UNDER_WAY, Patient, Staged, producer_name
from railgun.sinks.staging import MODES, Mode
from railgun.errors import said
from railgun.engine.operators.operator import shorten
from railgun.flows.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter, Writer
from railgun.flows.source import Reader, Source
from railgun.engine.operators.outages import WAITS

if TYPE_CHECKING:
    from railgun.client.subscription import Subscription
    from railgun.client.sync import SyncClient
    from railgun.transport.records import Records

AHEAD: Final = 40_000  # messages read ahead of the flow
PIECE: Final = 256 << 10  # bytes published at once
TIMEOUT: Final = 30.0
REPLACED: Final = "STREAM_REPLACED"
T = TypeVar("T")
_Future: TypeAlias = "concurrent.futures.Future[Any]"
Format = Literal["json", "text", "bytes", "msgpack", "message"]


class StreamMessage(NamedTuple):
    """A message with all there is to it (`format="message"`)."""

    stream: str
    offset: int
    time: int
    """When it was stored (µs)."""
    id: bytes | None
    headers: bytes
    payload: bytes


def _messages(stream: str, records: Records) -> list[StreamMessage]:
    rows = zip(records.ids(), records.all_headers(), records.payloads(), strict=True)
    return [
        StreamMessage(stream, offset, records.time, *row)
        for offset, row in enumerate(rows, records.base)
    ]


_DECODE: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": from_json, "text": bytes.decode, "bytes": bytes, "msgpack": from_msgpack,
}  # fmt: skip
_ENCODE: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": lambda item: as_json(item).encode(),
    "text": lambda item: str(item).encode(),
    "bytes": lambda item: memoryview(item).tobytes(),
    "msgpack": to_msgpack,
}


# ---------------------------------------------------------------- the node


class _Node:
    """The node of a source or sink: known when it is made, or looked for when it is needed."""

    def __init__(self, where: str | None, secret: bytes | str | None, data: str | Path) -> None:
        self._how = (where, secret, Path(data).absolute())
        self._address: Address | None = None
        with contextlib.suppress(StreamsError):
            self.address()

    def address(self) -> Address:
        if self._address is None:
            where, secret, data = self._how
            self._address = Address.find(where, secret=secret, data=data)
        return self._address


class _Shared:
    """The clients of a process: one for each node, as long as somebody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, Address], tuple[SyncClient, int]] = {}

    @contextlib.contextmanager
    def use(self, node: _Node) -> Iterator[SyncClient]:
        """A client for a while."""
        client = self.take(node)
        try:
            yield client
        finally:
            self.release(client)

    def take(self, node: _Node) -> SyncClient:
        from railgun.client.sync import connect_to

        address = node.address()
        key = (os.getpid(), address)  # threads do not survive a fork
        with self._lock:
            if key not in self._clients:
                self._clients[key] = (connect_to(address, name="flow", timeout=TIMEOUT), 0)
            client, users = self._clients[key]
            self._clients[key] = (client, users + 1)
            return client

    def release(self, client: SyncClient) -> None:
        with self._lock:
            for key, (known, users) in list(self._clients.items()):
                if known is client:
                    if users > 1:
                        self._clients[key] = (client, users - 1)
                        return
                    del self._clients[key]
        client.close()


_SHARED: Final = _Shared()


@contextlib.contextmanager
def _named(who: str) -> Iterator[None]:
    """What a node refuses becomes an error of the flow; what may pass is known to be such."""
    try:
        yield
    except StreamsError as error:
        cause: Exception = error
        if error.may_pass and not isinstance(error, OSError):
            cause = ConnectionError(str(error))
        raise ConnectorError(f"{who}: {error}") from cause


class _Patient(Patient):
    """The calls of a source or sink to its node, also those that commit what snapshots hold."""

    def check_identity(self, tokens: Sequence[Token]) -> None:
        """Raise `LostOutputError` if a stream that output was staged for has been deleted and made anew since.

        The new stream gives the same sequences again, to other output. Nodes that know no identities of streams are
        believed.
        """
        now: dict[str, str] = {}
        for token in tokens:
            target, identity = token["target"], token["identity"]
            if identity and target not in now:
                now[target] = self.admin("describe", name=target).get("identity", "")
            if identity and now[target] and now[target] != identity:
                raise self._lost(target)

    def _lost(self, target: str) -> LostOutputError:
        return LostOutputError(
            f"{self.who}: output of a whole snapshot is lost: stream {target!r} was deleted and made anew "
            "since it was staged. Begin with a later snapshot, or drop the output of this sink"
        )

    def commit_staged(self, tokens: Sequence[Token]) -> None:
        """Commit tokens, those of one producer all at once, and in the order of rescales, however long it takes."""
        producers: dict[tuple[str, str, int, str], list[list[int]]] = {}
        for token in tokens:
            producer = token["target"], token["producer"], token["epoch"], token["identity"]
            producers.setdefault(producer, []).extend(token["parts"])
        for (stream, name, epoch, identity), parts in producers.items():
            told = {"name": stream, "producer": name, "epoch": epoch, "identity": identity}
            told["counts"] = {str(sequence): count for _, sequence, count in parts}
            told["order"] = [sequence for _, sequence, _ in sorted(parts)]
            try:
                self.admin("commit_sequences", **told)
            except StreamsError as error:
                if error.code != REPLACED:
                    raise
                raise self._lost(stream) from error

    def commit_again(self, tokens: Sequence[Token]) -> None:
        """Commit what other producers have staged, also if a later epoch of one has begun since.

        A complete snapshot has decided it. The later epoch has committed it, or was to; if it dropped it instead, that
        is `LOST_OUTPUT`.
        """
        try:
            self.commit_staged(tokens)
        except StreamsError as error:
            if error.code != "FENCED":
                raise
            streams = {token["target"] for token in tokens}
            epochs = {
                (stream, known["name"]): known["epoch"]
                for stream in streams
                for known in self.admin("producers", name=stream)
            }
            self.commit_staged(
                [
                    {**token, "epoch": epochs.get((token["target"], token["producer"]), 0)}
                    for token in tokens
                ]
            )


# ---------------------------------------------------------------- the source


class Streams(Source[Any]):
    """The messages of persistent streams, by their names or by patterns (`orders.*`).

    >>> Streams("orders", format="xml")
    Traceback (most recent call last):
    railgun.sources.errors.ConnectorError: Streams('orders') reads 'json', 'text', 'bytes', 'msgpack' or ...

    `follow=False`: the source ends where a stream ends when it is opened. `node`: "host:port", with its `secret`;
    without, the node that works in the directory `data`.
    """

    def __init__(
        self,
        *names: str,
        format: Format = "json",
        start: Literal["start", "end"] = "start",
        follow: bool = True,
        missing: Literal["error", "skip"] = "error",
        node: str | None = None,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
    ) -> None:
        self.names = names
        if not names:
            raise ConnectorError("Streams() of which names? Streams('orders')")
        if format not in (*_DECODE, "message"):
            raise ConnectorError(
                f"{self} reads 'json', 'text', 'bytes', 'msgpack' or 'message', not {format!r}"
            )
        if start not in ("start", "end") or missing not in ("error", "skip"):
            raise ConnectorError(
                f"{self} begins at 'start' or 'end', not {start!r}; what is missing is an 'error', or to 'skip', "
                f"not {missing!r}"
            )
        self.format = format
        self.start = start
        self.follow = follow
        self.missing = missing
        self.node = _Node(node, secret, data)
        self.bounded = not (follow and any(map(_is_pattern, names)))
        self.ends: dict[str, int] | None = None  # if it is bounded by what was there at some time

    def __str__(self) -> str:
        return f"Streams({', '.join(map(repr, self.names))})"

    def partitions(self) -> Iterable[str]:
        """The names, and those of the streams that are there now for patterns."""
        if self.ends is not None:
            return list(self.ends)
        plain = [name for name in self.names if not _is_pattern(name)]
        patterns = [name for name in self.names if _is_pattern(name)]
        if not patterns:
            return plain
        with _named(str(self)), _SHARED.use(self.node) as client:
            listed = _Patient(client, str(self)).admin("list")
        found = [
            one["name"]
            for one in listed
            if one["settings"]["kind"] == "persistent"
            and not one["name"].startswith("_")
            and any(fnmatch.fnmatchcase(one["name"], pattern) for pattern in patterns)
        ]
        return dict.fromkeys([*plain, *found])

    def as_of_now(self) -> Streams:
        """The streams there are, up to where they end."""
        now = copy.copy(self)
        with _named(str(self)), _SHARED.use(self.node) as client:
            node = _Patient(client, str(self))
            told = {name: node.admin("describe", name=name) for name in self.partitions()}
            for one in told.values():
                refuse_damaged(one)
            now.ends = {name: one["end"] for name, one in told.items()}
        now.bounded = True
        return now

    def open(self, partition: Any, position: Any) -> Reader[Any]:
        """Read one stream, from an offset on."""
        return _Reader(self, partition, position)


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


class _Reader(Reader[Any]):
    def __init__(self, source: Streams, stream: str, position: int | None) -> None:
        self.source = source
        self.stream = stream
        self.end: int | None = None
        self._items: Sequence[Any] = ()
        self._row = 0
        self._who = f"Streams({stream!r})"
        self._waiting = False
        self._skips = source.missing == "skip"
        with _named(self._who):
            self._client = _SHARED.take(source.node)
        try:
            offset, self._identity = _parts_of(position)
            at_end = offset is None and source.start == "end"
            if source.ends is not None:
                self.end = end = source.ends[stream]
            elif not source.follow or at_end:
                with _named(self._who):
                    node = _Patient(self._client, self._who)
                    told = node.admin("describe", name=stream)
                    end = told["end"]
                    if not source.follow:
                        refuse_damaged(told)
                self.end = None if source.follow else end
            if at_end:
                offset = end
                self._identity = told.get("identity", "") if source.ends is None else ""
            self._offset = offset
            self._feed = _Feed(self._client, stream, offset, self._identity, self._skips)
        except BaseException:
            _SHARED.release(self._client)
            raise

    @property
    def position(self) -> Any:
        """Where the reader stands: None before anything was read; the offset alone if the node knows no identity."""
        if self._offset is None or not self._identity:
            return self._offset
        return {"offset": self._offset, "identity": self._identity}

    def read(self, most: int, now: int) -> Sequence[Any] | None:
        if self._row == len(self._items):
            if self.end is not None and (self._offset or 0) >= self.end:
                return None
            found = self._feed.take()
            if found is None:
                with _named(self._who):
                    self._feed.check()
                self._waits()
                return []
            self._take(*found)
        items = self._items[self._row : self._row + most]
        if self.end is not None:
            items = items[: self.end - (self._offset or 0)]
        self._row += len(items)
        self._offset = (self._offset or 0) + len(items)
        return items

    def _waits(self) -> None:
        """Note whether an outage is the reason why nothing comes."""
        trouble = self._feed.trouble
        if trouble:
            WAITS.begin(self._who, trouble)
        elif self._waiting:
            WAITS.end(self._who)
        self._waiting = bool(trouble)

    def _take(self, records: Records, identity: str) -> None:
        if self._waiting:
            WAITS.end(self._who)
            self._waiting = False
        expected = self._offset
        replaced = bool(identity and self._identity and identity != self._identity)
        if expected is not None and records.base < expected and not replaced:
            raise ConnectorError(
                f"{self._who}: offset {records.base} came where {expected} was expected, and nothing is read twice. "
                "If the stream was deleted and made anew, start the flow without its snapshots, or under a new name"
            )
        if expected is not None and records.base != expected and not self._skips:
            raise ConnectorError(
                f"{self._who}: messages {expected} to {records.base - 1} were deleted before the flow read them. Let "
                "the stream keep more (max_age, max_bytes), or go on without them: Streams(..., missing='skip')"
            )
        self._offset, self._identity = records.base, identity
        if self.source.format == "message":
            self._items, self._row = _messages(self.stream, records), 0
            return
        items: list[Any] = []
        payloads = records.payloads()
        try:
            items.extend(map(_DECODE[self.source.format], payloads))
        except ValueError as error:
            raise ConnectorError(
                f"{self._who}, offset {records.base + len(items)}: {shorten(payloads[len(items)])} is not "
                f"{self.source.format}: {said(error)}. To go on without such messages read them as bytes, and decode "
                "them with .map(..., on_error='dead_letter')"
            ) from error
        self._items, self._row = items, 0

    def close(self) -> None:
        WAITS.end(self._who)
        self._feed.close()
        _SHARED.release(self._client)


def _parts_of(position: Any) -> tuple[int | None, str]:
    """Return the offset and the stream's identity of a position; older ones are offsets alone.

    >>> _parts_of({"offset": 7, "identity": "a1"}), _parts_of(7), _parts_of(None)
    ((7, 'a1'), (7, ''), (None, ''))
    """
    if isinstance(position, dict):
        return int(position["offset"]), str(position.get("identity", ""))
    return position, ""


class _Feed:
    """Reads a stream ahead, in the thread of the client."""

    def __init__(
        self, client: SyncClient, stream: str, position: int | None, identity: str, skips: bool
    ) -> None:
        self._client = client
        self._stream, self._identity, self._skips = stream, identity, skips
        self._queue: deque[tuple[Records, str]] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._room = asyncio.Event()
        self._subscription: Subscription | None = None
        self._refusal = ""  # why there is none yet
        self._work = asyncio.run_coroutine_threadsafe(self._run(position), client.loop)

    async def _run(self, position: int | None) -> None:
        while True:
            async with await self._subscribe(position) as sub:
                self._subscription, self._identity = sub, sub.identity
                try:
                    while True:
                        records = await sub.records()
                        position = records.end
                        await self._add(records, sub.identity)
                except StreamsError as error:
                    self._subscription = None
                    self._refused(
                        error
                    )  # else: a reconnect, and what comes next was deleted meanwhile
                    if error.code == REPLACED:
                        position, self._identity = None, ""

    async def _subscribe(self, position: int | None) -> Subscription:
        """From there on; or from what is left, and the reader will see what is missing."""
        client, pauses = self._client.client, Pauses(*PAUSES_S)
        start: int | Literal["start"] = "start" if position is None else position
        while True:
            try:
                made = await client.subscribe(
                    self._stream, start=start, prefetch=PREFETCH, identity=self._identity
                )
                self._refusal = ""
                return made
            except StreamsError as error:
                self._refused(error)
                self._refusal = str(error)
                if error.code == REPLACED:
                    start, self._identity = "start", ""
                    continue
                if error.code == "OFFSET_OUT_OF_RANGE" and position is not None:
                    start = await self._first(position, error)
            await asyncio.sleep(pauses.next())

    async def _first(self, position: int, error: StreamsError) -> int:
        """Return the first offset that is left, which is behind `position`; raise `error` if it is not."""
        try:
            first = int((await self._client.client.describe(self._stream))["first"])
        except StreamsError as unknown:
            self._refused(unknown)
            return position
        if first <= position:
            raise error
        return first

    def _refused(self, error: StreamsError) -> None:
        """Raise an error that would come again."""
        if error.may_pass and not self._client.client.closing:
            return
        if error.code != "OFFSET_OUT_OF_RANGE" and not (self._skips and error.code == REPLACED):
            raise error

    @property
    def trouble(self) -> str:
        """Why nothing comes, if that is for a reason that may pass."""
        return self._refusal or (self._subscription.trouble if self._subscription else "")

    async def _add(self, records: Records, identity: str) -> None:
        with self._lock:
            self._queue.append((records, identity))
            self._queued += records.count
            full = self._queued >= AHEAD
        if full:
            self._room.clear()
            await self._room.wait()

    def take(self) -> tuple[Records, str] | None:
        """The next batch, if there is one, and the identity of its stream."""
        with self._lock:
            if not self._queue:
                return None
            records, identity = self._queue.popleft()
            was, self._queued = self._queued, self._queued - records.count
        if was >= AHEAD:
            self._client.loop.call_soon_threadsafe(self._room.set)
        return records, identity

    def check(self) -> None:
        """Raise what has made an end of it."""
        if self._work.done():
            self._work.result()
            raise StreamsError("CLOSED", "the stream is not read any more")

    def close(self) -> None:
        self._work.cancel()


# ---------------------------------------------------------------- the sink


class StreamSink(TwoPhaseSink[Any]):
    """Items as messages of a persistent stream, which is made if need be.

    >>> StreamSink("totals", mode="perhaps")
    Traceback (most recent call last):
    railgun.sources.errors.ConnectorError: StreamSink('totals') delivers 'exactly-once' or ...

    If the flow takes snapshots, messages appear with them, exactly once; `mode="at-least-once"` publishes them at once.
    `settings` are those of the stream if it is made (`max_age=86400`).
    """

    commits_together = True

    def __init__(
        self,
        name: str,
        format: Literal["json", "text", "bytes", "msgpack"] = "json",
        mode: Mode = "exactly-once",
        *,
        node: str | None = None,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
        **settings: Any,
    ) -> None:
        self.name = name
        if mode not in MODES:
            raise ConnectorError(f"{self} delivers 'exactly-once' or 'at-least-once', not {mode!r}")
        if format not in _ENCODE:
            raise ConnectorError(
                f"{self} writes 'json', 'text', 'bytes' or 'msgpack', not {format!r}"
            )
        self.format = format
        self.mode = mode
        self.settings = settings
        self.node = _Node(node, secret, data)

    def __str__(self) -> str:
        return f"StreamSink({self.name!r})"

    def open(self, place: Place) -> Writer[Any]:
        """The writer of one worker."""
        with _named(str(self)):
            client = _SHARED.take(self.node)
            try:
                node = _Patient(client, str(self))
                node.ensure(self.name, **self.settings)
                exactly = place.transactional and self.mode == "exactly-once"
                if (
                    exactly
                    and node.admin("describe", name=self.name)["settings"]["kind"] != "persistent"
                ):
                    raise ConnectorError(
                        f"{self}: the stream is ephemeral and keeps nothing; nothing can be exactly once there. Choose "
                        "mode='at-least-once', or a persistent stream"
                    )
            except BaseException:
                _SHARED.release(client)
                raise
        return _Staging(self, client, place) if exactly else _Publishing(self, client, place)

    def commit(self, token: Token) -> None:
        """Let the node make what was staged part of the stream."""
        self.commit_all([token])

    def commit_all(self, tokens: Sequence[Token]) -> None:
        """Let the node make what all workers staged part of the stream, all at once, results of each key in order."""
        with _named(f"{self}, commit"), _SHARED.use(self.node) as client:
            node = _Patient(client, f"{self}, commit")
            for token in tokens:
                if "staged" in token:
                    commit_older(node, token, suspicious=False)
            node.commit_staged([token for token in tokens if "staged" not in token])

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit these, and drop what else older generations have staged; for a flow without a store of its own."""
        self.recover_at(Place(flow, step, 0, generation, transactional=True), tokens)

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> None:
        """Fence older generations, commit these, and drop what else they have staged."""
        mine = producer_of(place)
        with _named(f"{self}, recovery"), _SHARED.use(self.node) as client:
            node = _Patient(client, f"{self}, recovery")
            node.ensure(self.name, **self.settings)
            node.check_identity([token for token in tokens if "staged" not in token])
            own = [t for t in tokens if t.get("producer") == mine and t["target"] == self.name]
            keep = [sequence for token in own for _, sequence, _ in token["parts"]]
            node.begin(self.name, mine, place.generation, keep=keep)
            node.commit_staged([{**token, "epoch": place.generation} for token in own])
            for token in tokens:
                if "staged" in token:
                    commit_older(node, token, suspicious=True)
            # Of another directory, or another target:
            node.commit_again([t for t in tokens if "staged" not in t and t not in own])


def producer_of(place: Place) -> str:
    """Return the name of the producer that a step of a flow is to its stream.

    >>> producer_of(Place("orders", "totals", 0, 1, store="5f3a"))
    '5f3a/orders/totals'
    """
    return producer_name(f"{place.store}/{place.flow}/{place.step}")


class _Piece(NamedTuple):
    """A piece that was sent."""

    id: str
    payloads: list[bytes]
    stored: _Future


class _Pieces:
    """Pieces on their way into a stream, in order, each once: the client may send one again by its ID."""

    def __init__(self, node: _Patient, stream: str, ids: str) -> None:
        self.stream = stream
        self.count = 0
        self._node = node
        self._ids = ids
        self._under_way: deque[_Piece] = deque()
        self._number = 0

    def add(self, payloads: list[bytes]) -> None:
        """One more."""
        while len(self._under_way) >= UNDER_WAY:
            self._first()
        id = f"{self._ids}/{self._number}"
        sent = self._node.soon(self.stream, payloads, id)
        self._under_way.append(_Piece(id, payloads, sent))
        self._number += 1
        self.count += len(payloads)

    def wait(self) -> None:
        """Until all are on disk."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        """Wait for the first piece under way; it is sent again if it was refused for a reason that may pass."""
        first = self._under_way[0]
        try:
            self._node.outcome(first.stored)
        except StreamsError as error:
            if not error.may_pass or any(map(self._is_stored, self._under_way)):
                raise  # pieces would change their order
            for piece in self._under_way:
                self._node.publish(self.stream, piece.payloads, piece.id.encode())
            self._under_way.clear()
        else:
            self._under_way.popleft()

    def _is_stored(self, piece: _Piece) -> bool:
        """Wait for a piece, and return whether it was stored; raise an error that would come again."""
        try:
            self._node.outcome(piece.stored)
        except StreamsError as error:
            if not error.may_pass:
                raise
            return False
        return True


class _Encoding(TwoPhaseWriter[Any]):
    """Makes payloads of items, and pieces of payloads."""

    def __init__(self, sink: StreamSink, client: SyncClient, place: Place) -> None:
        self.sink = sink
        self.client = client
        self.place = place
        self.node = _Patient(client, f"sink {place.step!r}, {sink}")
        self._encode = _ENCODE[sink.format]
        self._waiting: list[bytes] = []
        self._size = 0
        self._closed = False

    def write(self, items: Sequence[Any]) -> None:
        made = encoded(self._encode, items, self.place.step, "publish", f"as {self.sink.format}")
        self._waiting += made
        self._size += sum(map(len, made))
        if self._size >= PIECE:
            self.send()

    def send(self) -> None:
        """Let all go that waits."""
        at = size = 0
        with self.named():
            for n, payload in enumerate(self._waiting, 1):
                size += len(payload)
                if size >= PIECE or n == len(self._waiting):
                    self.pieces().add(self._waiting[at:n])
                    at, size = n, 0
        self._waiting, self._size = [], 0

    def pieces(self) -> _Pieces | Staged:
        """Where to."""
        raise NotImplementedError

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def named(self) -> contextlib.AbstractContextManager[None]:
        return _named(f"sink {self.place.step!r}, {self.sink}")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _SHARED.release(self.client)


class _Publishing(_Encoding):
    """Lets others see messages as they come."""

    def __init__(self, sink: StreamSink, client: SyncClient, place: Place) -> None:
        super().__init__(sink, client, place)
        self._pieces = _Pieces(self.node, sink.name, uuid.uuid4().hex)

    def pieces(self) -> _Pieces:
        return self._pieces

    def flush(self) -> None:
        self.send()
        with self.named():
            self._pieces.wait()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Nothing is left to commit, but what the snapshot says was written has to be on disk."""
        self.flush()
        return lambda: None

    def close(self) -> None:
        try:
            if not self._closed:
                self.flush()
        finally:
            super().close()


class _Staging(_Encoding):
    """Stages messages with the node, for the next snapshot."""

    def __init__(self, sink: StreamSink, client: SyncClient, place: Place) -> None:
        super().__init__(sink, client, place)
        self._name = producer_of(place)
        with self.named():
            self._producer = self.node.begin(sink.name, self._name, place.generation)
        self._rescale = 0  # the last one that brought keys
        self._staged: Staged | None = None
        self._before: list[
            tuple[int, Staged]
        ] = []  # what was staged before rescales of this snapshot

    def pieces(self) -> Staged:
        if self._staged is None:
            self._staged = Staged(self.node, self.node.open_stage(self._producer))
        return self._staged

    def flush(self) -> None:
        self.send()

    def keys_arrive(self, rescale: int) -> None:
        """Begin another sequence: those of a later rescale are committed behind those of all workers before it."""
        self.send()
        if self._staged is not None:
            self._before.append((self._rescale, self._staged))
        self._rescale, self._staged = rescale, None

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        self.send()
        parts = self._before
        if self._staged is not None:
            parts.append((self._rescale, self._staged))
        self._before, self._staged = [], None
        if not parts:
            return lambda: None
        token = {
            "target": self.sink.name,
            "identity": self._producer.identity,
            "producer": self._name,
            "epoch": self.place.generation,
            "parts": [[rescale, part.stage.sequence, part.count] for rescale, part in parts],
        }

        def rest() -> Token:
            with self.named():
                for _, part in parts:
                    part.wait()
            return token

        return rest
