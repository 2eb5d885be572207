"""Producers: what is staged for a stream is seen by nobody; what is committed is in it once, all of it together.

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

1. A producer is known to the stream by its name, for as long as there is the stream, or for its `lifetime`. Who begins
   a higher epoch fences those with a lower one: all they ask for is refused (`FENCED`).
2. What is staged is on disk, as safe as messages with `acks="quorum"`, when `put` has returned. Pieces are sent again
   by the client if need be; the stream keeps them in order, each once.
3. A commit may be repeated at any time, by any process that knows what was staged (`Stage.sequence`, `Stage.count`).
   What is neither staged nor committed is an error (`LOST_OUTPUT`).
   So is what was staged by a producer that was forgotten since, also if it has begun anew.
4. A commit may have a label, a number of the producer's own. What has a label that was committed before is done, for as
   long as there is the stream, also if it was staged once more for other sequences: these are dropped.
5. Who cannot count its epochs has a session instead, a name that nobody else has. The stream gives a new session the
   next epoch, and drops what was staged before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from railgun.client.checks import BadValueError, as_bytes, check_list, check_seconds, check_text
from railgun.client.errors import DeadlineError, StreamsError
from railgun.client.publisher import check_size, tell
from railgun.errors import shortened
from railgun.transport.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.client.client import Client

PIECE_BYTES: Final = 256 << 10
"""How much of a transaction is staged at once."""
AGAIN_S: Final = 0.05
TRANSACTION_S: Final = 3600.0
"""What a client has staged and not committed is kept for so many seconds after it was used last."""


class Stage:
    """What is staged under one sequence. Made by `Producer.open`."""

    def __init__(self, producer: Producer, sequence: int) -> None:
        self.sequence = sequence
        """The number that the stream has given it."""
        self.count = 0
        """How many messages were put, staged or on their way."""
        self.producer = producer
        self.dropped = False
        self._puts: set[asyncio.Task[None]] = set()  # under way, and somebody waits for them
        self._forsaken_puts: set[asyncio.Task[None]] = set()  # under way, and nobody does any more
        self._sent: set[asyncio.Future[Any]] = set()
        self._refused: dict[int, tuple[int, StreamsError]] = {}
        """Pieces that were refused, and are no longer the last ones: where they end, and why."""

    def put_soon(
        self, payloads: Sequence[bytes | str], at: int | None = None
    ) -> asyncio.Future[Any]:
        """Put messages behind those that were put before; the future is done when they are safe.

        `at`: put messages again that were refused for a reason that may pass, behind the first `at` of them. They are
        sent, and count, also if the future is cancelled. Raises `StreamsError` if they cannot be sent, and then they do
        not count.
        """
        messages = [as_bytes("payload", one) for one in check_list("payloads", payloads)]
        if not messages:
            raise StreamsError("BAD_REQUEST", "nothing is to be staged: put one message at least")
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
        """Put messages behind those that were put before; returns when they are safe.

        If those before them are still on their way to another master (`STAGE_GAP`), they are sent again for a while.
        Messages count, and are sent, also if this is cancelled meanwhile: whether they are staged is not known then.
        Messages that are refused do not count, and nor do those behind them.
        """
        await self.put_pieces([payloads])

    async def put_pieces(self, pieces: Sequence[Sequence[bytes | str]]) -> None:
        """Put messages as pieces, which are sent together; see `put`. None is put if one is too large."""
        await self.wait(self.begin_puts(pieces))

    def begin_puts(self, pieces: Sequence[Sequence[bytes | str]]) -> Sequence[asyncio.Task[None]]:
        """Put messages as pieces, and return the tasks that `wait` is to wait for."""
        pieces = [
            [as_bytes("payload", one) for one in check_list("payloads", some)] for some in pieces
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
        """Wait for puts; those that are under way when this is cancelled go on."""
        try:
            await asyncio.gather(*map(asyncio.shield, tasks))
        finally:
            self._puts.difference_update(tasks)
            for task in tasks:
                if not task.done():
                    self._forsaken_puts.add(task)
                    task.add_done_callback(self._forsaken_puts.discard)

    async def settle(self) -> None:
        """Wait for all puts under way, whatever becomes of them."""
        if under_way := self._puts | self._forsaken_puts:
            await asyncio.wait(under_way)

    async def check_puts(self) -> None:
        """Wait for all puts under way; raises the error of one that somebody waits for."""
        await asyncio.gather(*map(asyncio.shield, self._puts))
        await self.settle()

    @property
    def is_under_way(self) -> bool:
        """Whether puts are under way."""
        return bool(self._puts or self._forsaken_puts)

    def close(self) -> None:
        """Take nothing more, and send nothing that was not sent: it is dropped."""
        self.dropped = True
        for sent in list(self._sent):
            tell(sent, self._over())

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
        """Wait until messages are safe, and send them again as long as those before them are not there."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.producer.client.timeout
        while True:
            self._sent.add(sent)
            try:
                await sent
                return
            except StreamsError as error:
                before = next((why for end, why in self._refused.values() if end <= at), None)
                if error.code != "STAGE_GAP" or before is not None or loop.time() > deadline:
                    self._take_back(at, len(payloads), error)
                    if error.code != "STAGE_GAP" or before is None:
                        raise
                    raise StreamsError(
                        before.code, f"messages that were put before were refused: {before.text}"
                    ) from error
            finally:
                self._sent.discard(sent)
            await asyncio.sleep(AGAIN_S)
            sent = self.put_soon(payloads, at)

    def _take_back(self, at: int, count: int, error: StreamsError) -> None:
        """Let messages that were refused not count, as soon as none are behind them."""
        self._refused[at] = at + count, error
        for start in sorted(self._refused, reverse=True):
            end, why = self._refused[start]
            if end != self.count or not why.nothing_done or why.code == "CLOSED":  # may be there
                return
            self.count = start
            del self._refused[start]


class Producer:
    """A producer in one epoch. Made by `Client.producer`."""

    def __init__(
        self, client: Client, stream: str, name: str, epoch: int, answer: Mapping[str, Any]
    ) -> None:
        self.client, self.stream, self.name, self.epoch = client, stream, name, epoch
        self.number: int = answer["number"]
        self.identity: str = answer["identity"]
        """Of the stream: one that was deleted and made anew is another one."""
        self.staged: dict[int, int] = {int(n): count for n, count in answer["staged"].items()}
        """What was staged when it began: messages, by their sequence."""
        self.labels: list[tuple[int, int]] = [(a, b) for a, b in answer.get("labels", ())]
        """The labels that were committed when it began: ranges, both ends in."""
        self._undropped: set[int] = (
            set()
        )  # what is to be dropped, and the node has not said that it is

    async def open(self, label: int | None = None) -> Stage:
        """Return a new sequence to stage messages for.

        `label`: under which it will be committed; what else is staged for the label is dropped then. Raises
        `StreamsError` with the code `SEQUENCE_OVER` if that label was committed.
        """
        more = {} if label is None else {"label": label}
        answer = await self._ask("open_sequence", **more)
        return Stage(self, answer["sequence"])

    async def commit(
        self,
        stages: Iterable[Stage] | Mapping[int, int],
        timeout: float | None = None,
        *,
        label: int | None = None,
        label_since: int | None = None,
    ) -> int:
        """Let what was staged be part of the stream, all of it together; return how many messages that were now.

        `stages`: in their order; or sequences, each with its number of messages. `label`: a number for this commit; if
        it was committed before, nothing is done, and these stages are dropped. `label_since`: all labels from it on
        count as committed, too. Raises `StreamsError` with the code `LOST_OUTPUT` if one of the stages is neither
        staged nor committed, and `FENCED`.
        """
        if not isinstance(stages, Mapping):
            given = _checked(stages)
            timeout = await self._settle(given, timeout)
            stages = {one.sequence: one.count for one in given}
        labels = {"label": label, "label_since": label_since}
        more = {name: value for name, value in labels.items() if value is not None}
        return int((await self._commit(stages, timeout, **more))["committed"])

    async def _settle(self, stages: Sequence[Stage], timeout: float | None) -> float | None:
        """Wait for the puts of stages that are under way; return how much of the time is left."""
        if not any(one.is_under_way for one in stages):
            return timeout
        loop, timeout = (
            asyncio.get_running_loop(),
            self.client.timeout if timeout is None else timeout,
        )
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                for stage in stages:
                    await stage.settle()  # whoever has put messages hears what became of them
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
        """Drop what was staged, and will not be committed. Nothing more can be put there (`SEQUENCE_OVER`)."""
        given = _checked(stages)
        for one in given:
            one.close()
        await self._drop([one.sequence for one in given])

    async def drop_left(self) -> None:
        """Drop what could not be dropped before, as far as the node can be asked now."""
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
        who = {"name": self.stream, "producer": self.name, "epoch": self.epoch}
        return await self.client.admin(call, timeout, **who, identity=self.identity, **more)


def _checked(stages: Any) -> list[Stage]:
    found = list(check_list("stages", stages))
    for one in found:
        if not isinstance(one, Stage):
            raise BadValueError(f"stages are what Producer.open has returned, not {shortened(one)}")
    return found


class Transaction:
    """Messages that are seen all together, or not at all. Made by `Client.transaction`; several tasks may put some."""

    def __init__(
        self, begin: Callable[[bool], Awaitable[Producer]], check: Callable[[], Awaitable[None]]
    ) -> None:
        self.offsets = range(0)
        """Where the messages are, when the transaction is committed."""
        self._begin = begin
        self._check = check
        self._stage: Stage | None = None
        self._opening = asyncio.Lock()
        self._over = False

    async def put(self, payload: bytes | str) -> None:
        """Put one message behind those that were put before. Raises as `put_all`."""
        await self.put_all([payload])

    async def put_all(self, payloads: Iterable[bytes | str]) -> None:
        """Put messages behind those that were put before; returns when they are safe.

        If this is cancelled, they belong to the transaction or not. Raises `BadValueError` if they are no messages, or
        the transaction has ended.
        """
        given = [as_bytes("payload", one) for one in check_list("payloads", payloads)]
        if self._over:
            raise BadValueError("the transaction has ended: put messages before its block ends")
        if not given:
            return
        async with self._opening:  # those who wait go on in the order in which they came
            stage = self._stage = self._stage or await self._open()
            if self._over:
                raise BadValueError("the transaction has ended: put messages before its block ends")
            tasks = stage.begin_puts(list(_pieces(given)))
        await stage.wait(tasks)

    async def _open(self) -> Stage:
        """Open a sequence; if the producer is not known any more, it begins again first: nothing was put before."""
        try:
            producer = await self._begin(False)
            await producer.drop_left()
            return await producer.open()
        except StreamsError as error:
            if error.code not in ("NO_PRODUCER", "STREAM_REPLACED"):
                raise
        return await (await self._begin(True)).open()

    async def commit(self) -> None:
        """Let all of them be part of the stream. It is done at the end of `async with`."""
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
        if base is not None:  # else others were committed since, and nobody knows it any more
            self.offsets = range(base, base + stage.count)

    async def abandon(self) -> None:
        """Let none of them be; what cannot be dropped now is dropped with the next transaction of the client."""
        self._over = True
        stage, self._stage = self._stage, None
        if stage is not None:
            with contextlib.suppress(StreamsError):
                await stage.producer.drop([stage])


def _pieces(payloads: Sequence[bytes | str]) -> Iterable[Sequence[bytes | str]]:
    """Messages, some at a time: as many as travel well together."""
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
    more: dict[str, Any] = {"epoch": epoch, "session": session}
    more["keep"] = None if keep is None else list(check_list("keep", keep))
    if lifetime is not None and check_seconds("lifetime", lifetime) < math.inf:
        more["lifetime"] = lifetime
    given = {key: value for key, value in more.items() if value is not None}
    answer = await client.admin("begin_producer", name=stream, producer=name, **given)
    return Producer(client, stream, name, answer["epoch"], answer)
