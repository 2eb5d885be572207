"""Write to persistent streams of a node from a flow, exactly once.

Rules:

1. The sink is a *producer* of its stream (`client.producer`), named by the directory of the snapshots, the flow and the
   step; its epoch is the generation. What a worker writes between two snapshots is staged under a sequence. To
   *prepare* is to wait until all of it is safe on the node.
2. To *commit* is to let the node make it part of the stream: at once, and once. A commit may be repeated for as long as
   there is the stream. What is neither staged nor committed is an error (`LOST_OUTPUT`), and so is what was staged for
   a stream that was deleted and made anew: the token has the stream's identity.
3. A generation that begins fences the ones before it, commits what its snapshot holds, and drops what else they have
   staged. Other jobs of the same flow have other directories, and are other producers.
4. What a snapshot of an older Railgun holds was staged another way, and is recovered by that
   (`sinks.old_staged_streams`).
5. One worker commits what all have staged for a snapshot, in one commit. Items of one key stay in order: when a rescale
   brings keys to a worker, it begins another sequence, and sequences are committed in the order of the rescales
   they began with. A worker that keys leave writes on under the sequence it has, which comes before.
6. A sink waits as a source does (rule 4 of `sources.streams`). What was sent keeps its order: the client sends it again
   itself as long as roles change or nodes are gone. Pieces that were refused for another reason that may pass are sent
   again one by one, if none behind them was stored.

At least once, and in a flow without snapshots, items are published as they come.
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

PIECE: Final = 256 << 10  # bytes published at once
T = TypeVar("T")
_Future: TypeAlias = "concurrent.futures.Future[Any]"

_ENCODE: Final[dict[str, Callable[[Any], bytes]]] = {
    "json": lambda item: as_json(item).encode(),
    "text": lambda item: str(item).encode(),
    "bytes": lambda item: memoryview(item).tobytes(),
    "msgpack": to_msgpack,
}


class _Patient(RetryingClient):
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
                raise self._lost(token, _replaced(target))

    def _lost(self, token: Token, why: str) -> LostOutputError:
        """Return the error of a token that cannot be committed any more, with what to do."""
        step = token.get("step", "STEP")  # older versions did not note it
        return LostOutputError(
            f"{self.who}: output of a whole snapshot is lost: {why}. Begin with a later snapshot, or drop the output "
            f"of this sink: {drop_either_way(step)}"
        )

    def commit_staged(self, tokens: Sequence[Token]) -> None:
        """Commit tokens, those of one producer all at once, and in the order of rescales, however long it takes."""
        producers: dict[tuple[str, str, int, str], list[Token]] = {}
        for token in tokens:
            producer = token["target"], token["producer"], token["epoch"], token["identity"]
            producers.setdefault(producer, []).append(token)
        for (stream, name, epoch, identity), mine in producers.items():
            parts = [part for token in mine for part in token["parts"]]
            told = {"name": stream, "producer": name, "epoch": epoch, "identity": identity}
            told["counts"] = {str(sequence): count for _, sequence, count in parts}
            told["order"] = [sequence for _, sequence, _ in sorted(parts)]
            try:
                self.admin("commit_sequences", **told)
            except StreamsError as error:
                if error.code == REPLACED:
                    raise self._lost(mine[0], _replaced(stream)) from error
                if error.code in ("LOST_OUTPUT", "NO_PRODUCER"):
                    raise self._lost(mine[0], str(error)) from error
                raise

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


def _replaced(stream: str) -> str:
    return f"stream {stream!r} was deleted and made anew since it was staged"


class StreamSink(TwoPhaseSink[Any]):
    """Items as messages of a persistent stream, which is made if need be.

    >>> StreamSink("totals", mode="perhaps")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: StreamSink('totals') delivers 'exactly-once' or ...

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
        self.node = NodeAddress(node, secret, data)

    def __str__(self) -> str:
        return f"StreamSink({self.name!r})"

    def open(self, place: Place) -> Writer[Any]:
        """The writer of one worker."""
        with named(str(self)):
            client = SHARED_CLIENTS.take(self.node)
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
                SHARED_CLIENTS.release(client)
                raise
        return _Staging(self, client, place) if exactly else _Publishing(self, client, place)

    def commit(self, token: Token) -> None:
        """Let the node make what was staged part of the stream."""
        self.commit_all([token])

    def commit_all(self, tokens: Sequence[Token]) -> None:
        """Let the node make what all workers staged part of the stream, all at once, results of each key in order."""
        with named(f"{self}, commit"), SHARED_CLIENTS.use(self.node) as client:
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
        with named(f"{self}, recovery"), SHARED_CLIENTS.use(self.node) as client:
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

    def pieces(self) -> _Pieces | StagedPieces:
        """Where to."""
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
        self._staged: StagedPieces | None = None
        self._before: list[
            tuple[int, StagedPieces]
        ] = []  # what was staged before rescales of this snapshot

    def pieces(self) -> StagedPieces:
        if self._staged is None:
            self._staged = StagedPieces(self.node, self.node.open_stage(self._producer))
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
            "step": self.place.step,
            "parts": [[rescale, part.stage.sequence, part.count] for rescale, part in parts],
        }

        def rest() -> Token:
            with self.named():
                for _, part in parts:
                    part.wait()
            return token

        return rest
