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
from railgun.client.errors import StreamsError
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

    def put_soon(
        self, payloads: Sequence[bytes | str], at: int | None = None
    ) -> asyncio.Future[Any]:
        """Put messages behind those that were put before; the future is done when they are safe.

        `at`: put messages again that were refused for a reason that may pass, behind the first `at` of them.
        """
        messages = [as_bytes("payload", one) for one in check_list("payloads", payloads)]
        if not messages:
            raise StreamsError("BAD_REQUEST", "nothing is to be staged: put one message at least")
        producer = self.producer
        place = p.Staging(
            producer=producer.number,
            epoch=producer.epoch,
            sequence=self.sequence,
            at=self.count,
            identity=producer.identity,
        )
        if at is not None:
            place.at = at
        else:
            self.count += len(messages)
        return producer.client.put_staged(producer.stream, messages, place)

    async def put(self, payloads: Sequence[bytes | str]) -> None:
        """Put messages behind those that were put before; returns when they are safe.

        If those before them are still on their way to another master (`STAGE_GAP`), they are sent again for a while.
        """
        at, patience = self.count, self.producer.client.timeout
        sent = self.put_soon(payloads)
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            try:
                await sent
                return
            except StreamsError as error:
                late = asyncio.get_running_loop().time() > deadline
                if error.code != "STAGE_GAP" or late:
                    raise
            await asyncio.sleep(AGAIN_S)
            sent = self.put_soon(payloads, at)


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
            stages = {one.sequence: one.count for one in _checked(stages)}
        labels = {"label": label, "label_since": label_since}
        more = {name: value for name, value in labels.items() if value is not None}
        return int((await self._commit(stages, timeout, **more))["committed"])

    async def _commit(
        self, counts: Mapping[int, int], timeout: float | None = None, **more: Any
    ) -> Any:
        by_name = {str(sequence): count for sequence, count in counts.items()}
        if sorted(counts) != list(counts):
            more["order"] = list(counts)
        return await self._ask("commit_sequences", timeout, counts=by_name, **more)

    async def drop(self, stages: Iterable[Stage]) -> None:
        """Drop what was staged, and will not be committed."""
        sequences = [one.sequence for one in _checked(stages)]
        await self._ask("drop_sequences", sequences=sequences)

    async def _ask(self, call: str, timeout: float | None = None, **more: Any) -> Any:
        who = {"name": self.stream, "producer": self.name, "epoch": self.epoch}
        return await self.client.admin(call, timeout, **who, identity=self.identity, **more)


def _checked(stages: Any) -> list[Stage]:
    found = list(check_list("stages", stages))
    for one in found:
        if not isinstance(one, Stage):
            raise BadValueError(f"stages are what Producer.open has returned, not {one!r:.80}")
    return found


class Transaction:
    """Messages that are seen all together, or not at all. Made by `Client.transaction`; several tasks may put some."""

    def __init__(self, begin: Callable[[bool], Awaitable[Producer]]) -> None:
        self.offsets = range(0)
        """Where the messages are, when the transaction is committed."""
        self._begin = begin
        self._stage: Stage | None = None
        self._opening = asyncio.Lock()
        self._over = False
        self._under_way: set[asyncio.Task[None]] = set()

    async def put(self, payload: bytes | str) -> None:
        """Put one message behind those that were put before. Raises as `put_all`."""
        await self.put_all([payload])

    async def put_all(self, payloads: Iterable[bytes | str]) -> None:
        """Put messages behind those that were put before; returns when they are safe.

        Raises `BadValueError` if they are no messages, or the transaction has ended.
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
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(stage.put(some)) for some in _pieces(given)]
            self._under_way.update(tasks)
            await asyncio.sleep(0)  # each task takes its place
        try:
            await asyncio.gather(*tasks)
        finally:
            self._under_way.difference_update(tasks)

    async def _open(self) -> Stage:
        """Open a sequence; if the producer is not known any more, it begins again first: nothing was put before."""
        try:
            return await (await self._begin(False)).open()
        except StreamsError as error:
            if error.code not in ("NO_PRODUCER", "STREAM_REPLACED"):
                raise
        return await (await self._begin(True)).open()

    async def commit(self) -> None:
        """Let all of them be part of the stream. It is done at the end of `async with`."""
        self._over = True
        async with self._opening:
            stage = self._stage
        if stage is not None and stage.count:
            await asyncio.gather(*self._under_way)  # of tasks that nobody has waited for
            answer = await stage.producer._commit({stage.sequence: stage.count})
            base = answer["base"]
            self._stage, self.offsets = None, range(base, base + stage.count)

    async def abandon(self) -> None:
        """Let none of them be; what cannot be dropped now goes when the producer is forgotten."""
        self._over = True
        stage, self._stage = self._stage, None
        for task in self._under_way:
            task.cancel()
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
