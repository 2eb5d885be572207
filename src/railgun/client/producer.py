"""Stage messages for a stream, where no consumer sees them, and commit them: all together, and exactly once.

>>> import asyncio, tempfile
>>> from pathlib import Path
>>> from railgun.client.client import connect
>>> from railgun.testing.node import served
>>> async def main(data):
...     async with await connect(data=data) as client:
...         await client.ensure("totals")
...         producer = await client.producer("totals", "nightly", epoch=1)
...         stage = await producer.open()
...         await stage.put([b"12", b"30"])
...         before = (await client.admin("describe", name="totals"))["end"]
...         return before, await producer.commit([stage]), await producer.commit([stage])
>>> with served(Path(tempfile.mkdtemp())) as node:
...     asyncio.run(main(node.data))
(0, 2, 0)

Rules:

1. The stream knows a producer by its name, for as long as the stream exists, or for the producer's `lifetime`. A
   process that begins a higher epoch fences those with a lower one: all their calls are refused (`FENCED`).
2. Staged messages are on disk, as safe as messages with `acks="quorum"`, when `put` has returned. The client sends
   pieces again if necessary; the stream keeps them in order, each once.
3. A commit may be repeated at any time, by any process that knows what was staged (`Stage.sequence`, `Stage.count`).
   If messages are neither staged nor committed, that is an error (`LOST_OUTPUT`). So are messages that were staged by a
   producer that was forgotten since, also if it has begun anew.
4. A commit may have a label, a number that the producer chooses. A commit with a label that was committed before is
   done, for as long as the stream exists. If its messages were staged once more for other sequences, these are dropped.
5. A producer that cannot count its epochs has a session instead, a name that nobody else has. The stream gives a new
   session the next epoch, and drops what was staged before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from railgun.client.checks import BadValueError, as_bytes, check_list, check_seconds, check_text
from railgun.client.errors import DeadlineError, StreamsError
from railgun.client.publisher import check_size, fail_future
from railgun.errors import shortened
from railgun.transport.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.client.client import Client

PIECE_BYTES: Final = 256 << 10
"""The size of the pieces in which a transaction is staged."""
RETRY_PAUSE_S: Final = 0.05
TRANSACTION_S: Final = 3600.0
"""How long the node keeps what a client has staged and not committed, after its last use."""


class Stage:
    """The messages staged for one sequence. Created by `Producer.open`."""

    def __init__(self, producer: Producer, sequence: int) -> None:
        self.sequence = sequence
        """The number that the stream gave."""
        self.count = 0
        """How many messages were put, staged or on their way."""
        self.producer = producer
        self.dropped = False
        self._puts: set[asyncio.Task[None]] = set()  # under way, and a caller waits for them
        self._abandoned_puts: set[asyncio.Task[None]] = set()  # under way; no caller waits any more
        self._sent: set[asyncio.Future[Any]] = set()
        self._refused: dict[int, tuple[int, StreamsError]] = {}
        """Refused pieces that have others behind them: by their first message, where they end, and why."""

    def put_soon(
        self, payloads: Sequence[bytes | str], at: int | None = None
    ) -> asyncio.Future[Any]:
        """Put messages behind those that were put before; the future is done when they are safe.

        `at`: send messages again that were refused for a reason that may pass, behind the first `at` messages. The
        messages are sent, and count, also if the future is cancelled. Raises `StreamsError` if they cannot be sent, and
        then they do not count.
        """
        messages = [as_bytes("payload", payload) for payload in check_list("payloads", payloads)]
        if not messages:
            raise StreamsError("BAD_REQUEST", "no messages to stage: put at least one")
        self._check_open()
        producer = self.producer
        place = p.Staging(
            producer=producer.number,
            epoch=producer.epoch,
            sequence=self.sequence,
            at=self.count if at is None else at,
            identity=producer.identity,
        )
        sent = producer.client.put_staged(producer.stream, messages, place, self._is_open)
        if at is None:
            self.count += len(messages)
        return sent

    async def put(self, payloads: Sequence[bytes | str]) -> None:
        """Put messages behind those that were put before; return when they are safe.

        If messages before them are still on their way to another master (`STAGE_GAP`), they are sent again for a while.
        Messages count, and are sent, also if this call is cancelled: then it is unknown whether they are staged.
        Messages that are refused do not count, and neither do those behind them.
        """
        await self.put_pieces([payloads])

    async def put_pieces(self, pieces: Sequence[Sequence[bytes | str]]) -> None:
        """Put messages as pieces, which are sent together; see `put`. No piece is put if one is too large."""
        await self.wait(self.begin_puts(pieces))

    def begin_puts(self, pieces: Sequence[Sequence[bytes | str]]) -> Sequence[asyncio.Task[None]]:
        """Begin to put messages as pieces, and return the tasks to pass to `wait`."""
        pieces = [
            [as_bytes("payload", payload) for payload in check_list("payloads", piece)]
            for piece in pieces
        ]
        for payloads in pieces:
            check_size(payloads)
        tasks = []
        for payloads in pieces:
            at = self.count
            sent = self.put_soon(payloads)
            task = asyncio.get_running_loop().create_task(self._finish(sent, payloads, at))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._puts.add(task)
            tasks.append(task)
        return tasks

    async def wait(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for puts; if this call is cancelled, the puts under way go on."""
        try:
            await asyncio.gather(*map(asyncio.shield, tasks))
        finally:
            self._puts.difference_update(tasks)
            for task in tasks:
                if not task.done():
                    self._abandoned_puts.add(task)
                    task.add_done_callback(self._abandoned_puts.discard)

    async def settle(self) -> None:
        """Wait for all puts under way, whether they succeed or fail."""
        if under_way := self._puts | self._abandoned_puts:
            await asyncio.wait(under_way)

    async def check_puts(self) -> None:
        """Wait for all puts under way; raise the error of a put that a caller waits for."""
        await asyncio.gather(*map(asyncio.shield, self._puts))
        await self.settle()

    @property
    def is_under_way(self) -> bool:
        """Whether puts are under way."""
        return bool(self._puts or self._abandoned_puts)

    def close(self) -> None:
        """Accept no more messages, and do not send those that were not sent: the sequence is dropped."""
        self.dropped = True
        for sent in list(self._sent):
            fail_future(sent, self._over())

    def _is_open(self) -> bool:
        return not self.dropped

    def _over(self) -> StreamsError:
        return StreamsError(
            "SEQUENCE_OVER", f"sequence {self.sequence} was dropped: open another one"
        )

    def _check_open(self) -> None:
        if self.dropped:
            raise self._over()

    async def _finish(
        self, sent: asyncio.Future[Any], payloads: Sequence[bytes | str], at: int
    ) -> None:
        """Wait until messages are safe; send them again while messages before them are missing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.producer.client.timeout
        while True:
            self._sent.add(sent)
            try:
                await sent
                return
            except StreamsError as error:
                earlier = next(
                    (refusal for end, refusal in self._refused.values() if end <= at), None
                )
                if error.code != "STAGE_GAP" or earlier is not None or loop.time() > deadline:
                    self._take_back(at, len(payloads), error)
                    if error.code != "STAGE_GAP" or earlier is None:
                        raise
                    raise StreamsError(
                        earlier.code, f"messages that were put before were refused: {earlier.text}"
                    ) from error
            finally:
                self._sent.discard(sent)
            await asyncio.sleep(RETRY_PAUSE_S)
            sent = self.put_soon(payloads, at)

    def _take_back(self, at: int, count: int, error: StreamsError) -> None:
        """Subtract refused messages from the count, as soon as no messages are behind them."""
        self._refused[at] = at + count, error
        for start in sorted(self._refused, reverse=True):
            end, why = self._refused[start]
            if end != self.count or not why.nothing_done or why.code == "CLOSED":  # may be staged
                return
            self.count = start
            del self._refused[start]


class Producer:
    """A producer in one epoch. Created by `Client.producer`."""

    def __init__(
        self, client: Client, stream: str, name: str, epoch: int, answer: Mapping[str, Any]
    ) -> None:
        self.client, self.stream, self.name, self.epoch = client, stream, name, epoch
        self.number: int = answer["number"]
        self.identity: str = answer["identity"]
        """The identity of the stream: it changes when the stream is deleted and created anew."""
        self.staged: dict[int, int] = {int(n): count for n, count in answer["staged"].items()}
        """Counts of the messages that were staged when the producer began, by sequence."""
        self.labels: list[tuple[int, int]] = [(a, b) for a, b in answer.get("labels", ())]
        """The labels that were committed when the producer began: ranges that include both ends."""
        self._undropped: set[int] = set()  # sequences whose drop the node has not confirmed

    async def open(self, label: int | None = None) -> Stage:
        """Return a new sequence to stage messages for.

        `label`: the label that the sequence will be committed under; other sequences that were opened for it are
        dropped then. Raises `StreamsError` with the code `SEQUENCE_OVER` if that label was committed before.
        """
        labels = {} if label is None else {"label": label}
        answer = await self._ask("open_sequence", **labels)
        return Stage(self, answer["sequence"])

    async def commit(
        self,
        stages: Iterable[Stage] | Mapping[int, int],
        timeout: float | None = None,
        *,
        label: int | None = None,
        label_since: int | None = None,
    ) -> int:
        """Make staged messages part of the stream, all together; return how many messages this call added.

        `stages`: the stages in the order of the commit; or sequences, each with its number of messages. `label`: a
        number for this commit; if it was committed before, nothing is done, and these stages are dropped.
        `label_since`: all labels from this one on count as committed, too. Raises `StreamsError` with the code
        `LOST_OUTPUT` if a stage is neither staged nor committed, and with `FENCED` if a later epoch has begun.
        """
        if not isinstance(stages, Mapping):
            checked = _checked(stages)
            timeout = await self._settle(checked, timeout)
            stages = {stage.sequence: stage.count for stage in checked}
        labels = {"label": label, "label_since": label_since}
        more = {name: value for name, value in labels.items() if value is not None}
        return int((await self._commit(stages, timeout, **more))["committed"])

    async def _settle(self, stages: Sequence[Stage], timeout: float | None) -> float | None:
        """Wait for puts of stages that are under way; return how much of the timeout is left."""
        if not any(stage.is_under_way for stage in stages):
            return timeout
        loop, timeout = (
            asyncio.get_running_loop(),
            self.client.timeout if timeout is None else timeout,
        )
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                for stage in stages:
                    await stage.settle()  # the caller of put gets the error
        except TimeoutError as error:
            raise DeadlineError(
                "messages that were put before the commit are not staged yet"
            ) from error
        return max(0.0, deadline - loop.time())

    async def _commit(
        self, counts: Mapping[int, int], timeout: float | None = None, **more: Any
    ) -> Any:
        by_name = {str(sequence): count for sequence, count in counts.items()}
        if sorted(counts) != list(counts):
            more["order"] = list(counts)
        return await self._ask("commit_sequences", timeout, counts=by_name, **more)

    async def drop(self, stages: Iterable[Stage]) -> None:
        """Drop staged messages that will not be committed. Nothing more can be put to them (`SEQUENCE_OVER`)."""
        checked = _checked(stages)
        for stage in checked:
            stage.close()
        await self._drop([stage.sequence for stage in checked])

    async def drop_left(self) -> None:
        """Drop sequences that could not be dropped before, if the node can be reached now."""
        if self._undropped:
            with contextlib.suppress(StreamsError):
                await self._drop(sorted(self._undropped))

    async def _drop(self, sequences: Sequence[int]) -> None:
        self._undropped.update(sequences)
        try:
            await self._ask("drop_sequences", sequences=list(sequences))
        except StreamsError as error:
            if error.may_pass:
                raise
            self._undropped.difference_update(sequences)
            raise
        self._undropped.difference_update(sequences)

    async def _ask(self, call: str, timeout: float | None = None, **more: Any) -> Any:
        caller = {"name": self.stream, "producer": self.name, "epoch": self.epoch}
        return await self.client.admin(call, timeout, **caller, identity=self.identity, **more)


def _checked(stages: Any) -> list[Stage]:
    checked = list(check_list("stages", stages))
    for stage in checked:
        if not isinstance(stage, Stage):
            raise BadValueError(
                f"stages are what Producer.open has returned, not {shortened(stage)}"
            )
    return checked


class Transaction:
    """Messages that become visible all together, or not at all. Created by `Client.transaction`; tasks may share it."""

    def __init__(
        self, begin: Callable[[bool], Awaitable[Producer]], check: Callable[[], Awaitable[None]]
    ) -> None:
        self.offsets = range(0)
        """The offsets of the messages, once the transaction is committed."""
        self._begin = begin
        self._check = check
        self._stage: Stage | None = None
        self._opening = asyncio.Lock()
        self._over = False

    async def put(self, payload: bytes | str) -> None:
        """Put one message behind those that were put before. Raises the errors of `put_all`."""
        await self.put_all([payload])

    async def put_all(self, payloads: Iterable[bytes | str]) -> None:
        """Put messages behind those that were put before; return when they are safe.

        If this call is cancelled, it is unknown whether they belong to the transaction. Raises `BadValueError` if they
        are not messages, or the transaction has ended.
        """
        messages = [as_bytes("payload", payload) for payload in check_list("payloads", payloads)]
        if self._over:
            raise BadValueError("the transaction has ended: put messages before its block ends")
        if not messages:
            return
        async with self._opening:  # tasks that wait go on in the order in which they came
            stage = self._stage = self._stage or await self._open()
            if self._over:
                raise BadValueError("the transaction has ended: put messages before its block ends")
            tasks = stage.begin_puts(list(_pieces(messages)))
        await stage.wait(tasks)

    async def _open(self) -> Stage:
        """Open a sequence. If the node forgot the producer, begin it again first: no messages were put before."""
        try:
            producer = await self._begin(False)
            await producer.drop_left()
            return await producer.open()
        except StreamsError as error:
            if error.code not in ("NO_PRODUCER", "STREAM_REPLACED"):
                raise
        return await (await self._begin(True)).open()

    async def commit(self) -> None:
        """Make all messages part of the stream. The end of `async with` calls this."""
        self._over = True
        async with self._opening:
            stage = self._stage
        if stage is not None:
            await stage.check_puts()
        if stage is None or not stage.count:
            await self._check()
            return
        answer = await stage.producer._commit({stage.sequence: stage.count})
        base, self._stage = answer["base"], None
        if base is not None:  # None: another commit came since, so the offset is unknown
            self.offsets = range(base, base + stage.count)

    async def abandon(self) -> None:
        """Drop all messages. If the node cannot be reached, the next transaction of the client drops them."""
        self._over = True
        stage, self._stage = self._stage, None
        if stage is not None:
            with contextlib.suppress(StreamsError):
                await stage.producer.drop([stage])


def _pieces(payloads: Sequence[bytes | str]) -> Iterable[Sequence[bytes | str]]:
    """Split messages into pieces of about `PIECE_BYTES`."""
    at = size = 0
    for n, payload in enumerate(payloads, 1):
        size += len(payload)
        if size >= PIECE_BYTES or n == len(payloads):
            yield payloads[at:n]
            at, size = n, 0


async def begin(
    client: Client,
    stream: str,
    name: str,
    epoch: int | None,
    keep: Iterable[int] | None = None,
    lifetime: float | None = None,
    session: str | None = None,
) -> Producer:
    """Begin an epoch of a producer; see `Client.producer`."""
    check_text("stream", stream)
    check_text("name", name)
    if session is not None:
        check_text("session", session, empty=False)
    options: dict[str, Any] = {"epoch": epoch, "session": session}
    options["keep"] = None if keep is None else list(check_list("keep", keep))
    if lifetime is not None and check_seconds("lifetime", lifetime) < math.inf:
        options["lifetime"] = lifetime
    settings = {key: value for key, value in options.items() if value is not None}
    answer = await client.admin("begin_producer", name=stream, producer=name, **settings)
    return Producer(client, stream, name, answer["epoch"], answer)
