"""Write items of a flow to persistent streams of a node, exactly once.

Rules:

1. The sink is a *producer* of its stream (`client.producer`), named by the directory of the snapshots, the flow and the
   step; its epoch is the generation. Items that a worker writes between two snapshots are staged for one sequence. To
   *prepare* is to wait until all of them are safe on the node.
2. To *commit* is to let the node make the staged items part of the stream: all together, and once. A commit
   may be repeated for as long as the stream exists. If items are neither staged nor committed, that is an error
   (`LOST_OUTPUT`). So are items staged for a stream that was deleted and created anew: the token has the stream's
   identity.
3. A generation that begins fences earlier generations, commits what its snapshot holds, and drops all else that they
   have staged. Other jobs of the same flow have other directories, and are other producers.
4. Snapshots of older versions of Railgun hold output that was staged another way; `sinks.old_staged_streams` recovers
   that.
5. One worker commits what all workers have staged for a snapshot, in one commit. Items of one key stay in order: when
   a rescale brings keys to a worker, it begins another sequence, and sequences are committed in the order of the
   rescales they began with. A worker that loses keys continues with its sequence, which is committed before.
6. A sink waits as a source does (rule 4 of `sources.streams`). Pieces that were sent keep their order: the client
   itself sends them again as long as roles change or nodes are gone. Pieces that were refused for another reason that
   may pass are sent again one by one, if no piece behind them was stored.

With at-least-once delivery, and in a flow without snapshots, items are published as they come.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from railgun.client.address import DATA
from railgun.client.errors import StreamsError
from railgun.client.payloads import to_msgpack
from railgun.client.retrying_client import UNDER_WAY, RetryingClient, StagedPieces, producer_name
from railgun.client.shared import SHARED_CLIENTS, NodeAddress
from railgun.engine.snapshots.option_names import drop_either_way
from railgun.flows.errors import ConnectorError, LostOutputError
from railgun.flows.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter, Writer
from railgun.sinks.files import as_json, encoded
from railgun.sinks.old_staged_streams import commit_older
from railgun.sinks.staging import MODES, Mode

if TYPE_CHECKING:
    from railgun.client.sync import SyncClient

from railgun.sources.streams import REPLACED, named

PIECE_BYTES: Final = 256 << 10  # bytes published at once
T = TypeVar("T")
_Future: TypeAlias = "concurrent.futures.Future[Any]"

_ENCODE: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": lambda item: as_json(item).encode(),
    "text": lambda item: str(item).encode(),
    "bytes": lambda item: memoryview(item).tobytes(),
    "msgpack": to_msgpack,
}


class _SinkClient(RetryingClient):
    """The calls of a sink to its node, with those that commit the output of snapshots."""

    def check_identity(self, tokens: Sequence[Token]) -> None:
        """Raise `LostOutputError` if a stream that output was staged for was deleted and created anew since.

        The new stream gives the same sequences again, to other output. Nodes that know no identities of streams are
        trusted.
        """
        now: dict[str, str] = {}
        for token in tokens:
            target, identity = token["target"], token["identity"]
            if identity and target not in now:
                now[target] = self.admin("describe", name=target).get("identity", "")
            if identity and now[target] and now[target] != identity:
                raise self._lost(token, _replaced(target))

    def _lost(self, token: Token, why: str) -> LostOutputError:
        """Return the error for a token that can no longer be committed, with what to do."""
        step = token.get("step", "STEP")  # tokens of older versions have no step
        return LostOutputError(
            f"{self.who}: output of a whole snapshot is lost: {why}. Begin with a later snapshot, or drop the output "
            f"of this sink: {drop_either_way(step)}"
        )

    def commit_staged(self, tokens: Sequence[Token]) -> None:
        """Commit tokens, those of one producer together, and in the order of rescales, however long it takes."""
        producers: dict[tuple[str, str, int, str], list[Token]] = {}
        for token in tokens:
            producer = token["target"], token["producer"], token["epoch"], token["identity"]
            producers.setdefault(producer, []).append(token)
        for (stream, name, epoch, identity), own in producers.items():
            parts = [part for token in own for part in token["parts"]]
            commit = {"name": stream, "producer": name, "epoch": epoch, "identity": identity}
            commit["counts"] = {str(sequence): count for _, sequence, count in parts}
            commit["order"] = [sequence for _, sequence, _ in sorted(parts)]
            try:
                self.admin("commit_sequences", **commit)
            except StreamsError as error:
                if error.code == REPLACED:
                    raise self._lost(own[0], _replaced(stream)) from error
                if error.code in ("LOST_OUTPUT", "NO_PRODUCER"):
                    raise self._lost(own[0], str(error)) from error
                raise

    def commit_again(self, tokens: Sequence[Token]) -> None:
        """Commit what other producers have staged, also if a later epoch of one has begun since.

        A complete snapshot has decided these commits. The later epoch has committed the output, or was to; if it
        dropped the output instead, that is `LOST_OUTPUT`.
        """
        try:
            self.commit_staged(tokens)
        except StreamsError as error:
            if error.code != "FENCED":
                raise
            streams = {token["target"] for token in tokens}
            epochs = {
                (stream, state["name"]): state["epoch"]
                for stream in streams
                for state in self.admin("producers", name=stream)
            }
            self.commit_staged(
                [
                    {**token, "epoch": epochs.get((token["target"], token["producer"]), 0)}
                    for token in tokens
                ]
            )


def _replaced(stream: str) -> str:
    return f"stream {stream!r} was deleted and made anew since it was staged"


class StreamSink(TwoPhaseSink[Any]):
    """Write items as messages to a persistent stream, which is created if it does not exist.

    >>> StreamSink("totals", mode="perhaps")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: StreamSink('totals') delivers 'exactly-once' or ...

    If the flow takes snapshots, messages appear with each snapshot, exactly once; `mode="at-least-once"` publishes them
    at once. `settings` are the settings of the stream if it is created (`max_age=86400`).
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
        self.node = NodeAddress(node, secret, data)

    def __str__(self) -> str:
        return f"StreamSink({self.name!r})"

    def open(self, place: Place) -> Writer[Any]:
        """Return the writer of one worker."""
        with named(str(self)):
            client = SHARED_CLIENTS.take(self.node)
            try:
                node = _SinkClient(client, str(self))
                node.ensure(self.name, **self.settings)
                transactional = place.transactional and self.mode == "exactly-once"
                if (
                    transactional
                    and node.admin("describe", name=self.name)["settings"]["kind"] != "persistent"
                ):
                    raise ConnectorError(
                        f"{self}: the stream is ephemeral and stores nothing, so exactly-once delivery is impossible. "
                        "Choose mode='at-least-once', or a persistent stream"
                    )
            except BaseException:
                SHARED_CLIENTS.release(client)
                raise
        return _Staging(self, client, place) if transactional else _Publishing(self, client, place)

    def commit(self, token: Token) -> None:
        """Make the staged output of a token part of the stream."""
        self.commit_all([token])

    def commit_all(self, tokens: Sequence[Token]) -> None:
        """Make the staged output of all workers part of the stream, all together; results of each key stay in order."""
        with named(f"{self}, commit"), SHARED_CLIENTS.use(self.node) as client:
            node = _SinkClient(client, f"{self}, commit")
            for token in tokens:
                if "staged" in token:
                    commit_older(node, token, suspicious=False)
            node.commit_staged([token for token in tokens if "staged" not in token])

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit `tokens`, and drop what else older generations have staged, in a flow without a store of its own."""
        self.recover_at(Place(flow, step, 0, generation, transactional=True), tokens)

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> None:
        """Fence older generations, commit `tokens`, and drop what else these generations have staged."""
        producer = producer_of(place)
        with named(f"{self}, recovery"), SHARED_CLIENTS.use(self.node) as client:
            node = _SinkClient(client, f"{self}, recovery")
            node.ensure(self.name, **self.settings)
            node.check_identity([token for token in tokens if "staged" not in token])
            own = [
                token
                for token in tokens
                if token.get("producer") == producer and token["target"] == self.name
            ]
            keep = [sequence for token in own for _, sequence, _ in token["parts"]]
            node.begin(self.name, producer, place.generation, keep=keep)
            node.commit_staged([{**token, "epoch": place.generation} for token in own])
            for token in tokens:
                if "staged" in token:
                    commit_older(node, token, suspicious=True)
            # Tokens of another directory, or another target:
            node.commit_again(
                [token for token in tokens if "staged" not in token and token not in own]
            )


def producer_of(place: Place) -> str:
    """Return the name under which a step of a flow is a producer of its stream.

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
    """Pieces on their way into a stream, in order, each once: the client may send a piece again by its ID."""

    def __init__(self, node: _SinkClient, stream: str, ids: str) -> None:
        self.stream = stream
        self.count = 0
        self._node = node
        self._ids = ids
        self._under_way: deque[_Piece] = deque()
        self._number = 0

    def add(self, payloads: list[bytes]) -> None:
        """Send one more piece, after waiting for the first if too many are under way."""
        while len(self._under_way) >= UNDER_WAY:
            self._first()
        id = f"{self._ids}/{self._number}"
        sent = self._node.soon(self.stream, payloads, id)
        self._under_way.append(_Piece(id, payloads, sent))
        self._number += 1
        self.count += len(payloads)

    def wait(self) -> None:
        """Wait until all pieces are on disk."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        """Wait for the first piece under way; send it again if it was refused for a reason that may pass."""
        first = self._under_way[0]
        try:
            self._node.outcome(first.stored)
        except StreamsError as error:
            if not error.may_pass or any(map(self._is_stored, self._under_way)):
                raise  # to send them again would change the order of pieces
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
    """Encodes items as payloads, and cuts payloads into pieces."""

    def __init__(self, sink: StreamSink, client: SyncClient, place: Place) -> None:
        self.sink = sink
        self.client = client
        self.place = place
        self.node = _SinkClient(client, f"sink {place.step!r}, {sink}")
        self._encode = _ENCODE[sink.format]
        self._waiting: list[bytes] = []
        self._size = 0
        self._closed = False

    def write(self, items: Sequence[Any]) -> None:
        payloads = encoded(
            self._encode, items, self.place.step, "publish", f"as {self.sink.format}"
        )
        self._waiting += payloads
        self._size += sum(map(len, payloads))
        if self._size >= PIECE_BYTES:
            self.send()

    def send(self) -> None:
        """Send all payloads that wait, as pieces."""
        at = size = 0
        with self.named():
            for n, payload in enumerate(self._waiting, 1):
                size += len(payload)
                if size >= PIECE_BYTES or n == len(self._waiting):
                    self.pieces().add(self._waiting[at:n])
                    at, size = n, 0
        self._waiting, self._size = [], 0

    def pieces(self) -> _Pieces | StagedPieces:
        """Return where to send pieces."""
        raise NotImplementedError

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def named(self) -> contextlib.AbstractContextManager[None]:
        return named(f"sink {self.place.step!r}, {self.sink}")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            SHARED_CLIENTS.release(self.client)


class _Publishing(_Encoding):
    """Publishes messages as they come."""

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
        """Wait until all is on disk, as the snapshot says that it was written; nothing is left to commit."""
        self.flush()
        return lambda: None

    def close(self) -> None:
        try:
            if not self._closed:
                self.flush()
        finally:
            super().close()


class _Staging(_Encoding):
    """Stages messages on the node, for the next snapshot."""

    def __init__(self, sink: StreamSink, client: SyncClient, place: Place) -> None:
        super().__init__(sink, client, place)
        self._name = producer_of(place)
        with self.named():
            self._producer = self.node.begin(sink.name, self._name, place.generation)
        self._rescale = 0  # the last rescale that brought keys
        self._staged: StagedPieces | None = None
        self._before: list[tuple[int, StagedPieces]] = []  # sequences that rescales have ended

    def pieces(self) -> StagedPieces:
        if self._staged is None:
            self._staged = StagedPieces(self.node, self.node.open_stage(self._producer))
        return self._staged

    def flush(self) -> None:
        self.send()

    def keys_arrive(self, rescale: int) -> None:
        """Begin another sequence: those of a later rescale are committed after those of all workers before it."""
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
            "step": self.place.step,
            "parts": [[rescale, part.stage.sequence, part.count] for rescale, part in parts],
        }

        def finish() -> Token:
            with self.named():
                for _, part in parts:
                    part.wait()
            return token

        return finish
