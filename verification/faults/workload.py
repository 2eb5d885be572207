"""Clients that publish, consume, read and send requests all the time, and record what they see.

Rules:

1. Each client is a task with a connection of its own, to one of the nodes. If that node is useless for a while the
   client goes to another; readers without a group stay, because they check what their node has.
2. Values are unique: the publisher's name, and a number. With an ID the value is the ID; each message of a batch that
   is stored completely or not at all has its own record in the history.
3. An operation that was cut short by the end of its task is `unknown`.
4. While the load is `rough`, consumers refuse some messages, forget some, leave and die. After that they only ack: all
   messages must be done in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from railgun.client.client import Client
from railgun.client.errors import DuplicateIdError, NoAnswerError, StreamsError
from railgun.client.message import Message
from railgun.client.subscription import Subscription
from verification.faults.history import (
    NOT_STORED_CODES,
    Acked,
    Acks,
    Delivery,
    End,
    History,
    Outcome,
    Position,
    Publish,
    Request,
    Response,
)
from verification.faults.nodes import Nodes

STREAMS: Final = ("orders", "events")
ASK: Final = "ask"
SHARED, ONLY, RESPONDERS = "shared", "only", "responders"
GROUPS: Final = tuple((stream, group) for stream in STREAMS for group in (SHARED, ONLY))
ID_BOX_S: Final = 30 * 24 * 3600.0
"""Seconds: longer than any clock jumps."""
PATIENCE_S: Final = 4.0
"""Seconds for a call, and how long a node may be useless before its clients leave."""
NEWEST_MESSAGES: Final = 50
"""Messages that a newcomer reads."""
ANSWER_TIMEOUT_S: Final = 1.5
"""Seconds for an answer to a request."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """How many clients of each kind there are, and how often they act."""

    publishers: int = 3
    """Publishers of each stream."""
    pause: float = 0.02
    """Seconds between two publishes of a publisher, on average."""
    members: int = 2
    """Members of each group."""
    requesters: int = 2
    responders: int = 2
    flows: int = 1
    """Flows that write to each target."""
    transactors: int = 1
    patience_s: float = PATIENCE_S
    """Seconds for a call of a publisher."""


def acks_known(client: Client) -> bool:
    """Return whether a publisher can say how many nodes must have a message."""
    return "acks" in inspect.signature(client.publish).parameters


class Workload:
    """All clients of a run."""

    def __init__(self, nodes: Nodes, history: History, seed: int, load: Load | None = None) -> None:
        self.nodes, self.history = nodes, history
        self.load = load or Load()
        self.rough = True
        self.publishing = True
        self.counts: Counter[str] = Counter()
        """Outcomes of the calls of all clients."""
        self.troubles: list[str] = []
        """Errors that no client should raise."""
        self.connected: dict[str, Client] = {}
        """The client of each worker that must leave its node when the node is frozen, by the worker's name."""
        self._chance = Random(seed)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def prepare(self) -> None:
        """Create the streams; every node is asked, and streams may exist already."""
        for name in self.nodes.names:
            async with await self.nodes[name].connect(20.0, direct=True) as client:
                for stream in STREAMS:
                    await client.ensure(stream, id_box=ID_BOX_S)
                await client.ensure(ASK, kind="ephemeral")

    def start(self) -> None:
        """Start all clients; each runs until its work is done or `stop`."""
        load = self.load
        for stream in STREAMS:
            for number in range(load.publishers):
                self.add(Publisher, f"{stream}-p{number}", stream, number)
            for number in range(load.members):
                self.add(Member, f"{stream}-s{number}", stream, number, SHARED, False)
                self.add(Member, f"{stream}-x{number}", stream, number, ONLY, True)
            for number, name in enumerate(self.nodes.names):
                self.add(Reader, f"{stream}-r-{name}", stream, number)
                self.add(Newcomer, f"{stream}-n-{name}", stream, number)
        for number in range(load.responders):
            self.add(_Responder, f"answer{number}", ASK, number)
        for number in range(load.requesters):
            self.add(_Requester, f"asker{number}", ASK, number + 1)
        self.add(_Watcher, "watcher", "", 0)

    def add(self, kind: Callable[..., Worker], name: str, stream: str, at: int, *more: Any) -> None:
        """Start one more client, at the node with the number `at` first."""
        worker = kind(self, name, stream, at, Random(self._chance.random()), *more)
        self.spawn(name, worker.live())

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until its end or the end of the run."""
        self._tasks[name] = asyncio.create_task(work, name=name)

    def clients_at(self, names: Collection[str]) -> list[str]:
        """Return the names of the workers that have a connection to one of these nodes."""
        places = {(self.nodes[name].outside, self.nodes[name].port) for name in names}
        return sorted(
            worker
            for worker, client in self.connected.items()
            if client.connected and client.where in places
        )

    async def stop_publishing(self) -> None:
        """Stop messages, requests and roughness."""
        self.publishing = self.rough = False
        ending = [task for name, task in self._tasks.items() if "-p" in name or "asker" in name]
        await self._end(ending, grace=2 * self.load.patience_s)

    async def stop(self) -> None:
        """Cancel all clients, and wait for their ends."""
        await self._end(list(self._tasks.values()), grace=0.0)

    async def _end(self, tasks: Sequence[asyncio.Task[None]], grace: float) -> None:
        if grace and tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                trouble = f"{type(result).__name__}: {result}"
                if trouble not in self.troubles:
                    self.troubles.append(trouble)

    def check(self) -> None:
        """Record clients that have ended and should not have."""
        for name, task in self._tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                trouble = f"{name}: {type(task.exception()).__name__}: {task.exception()}"
                if trouble not in self.troubles:
                    self.troubles.append(trouble)


class Worker:
    """One client and its task; the task reconnects to another node when its own is useless."""

    roams = True
    goes_on = True
    """Whether the worker must leave its node when the node is frozen."""
    patience_s = PATIENCE_S

    def __init__(self, workload: Workload, name: str, stream: str, at: int, chance: Random) -> None:
        self.w, self.name, self.stream, self.chance = workload, name, stream, chance
        self._at = at
        self.lives = 0

    @property
    def on(self) -> bool:
        """Return whether the worker has something to do."""
        return True

    async def live(self) -> None:
        """Work until there is nothing to do or the task is cancelled."""
        while self.on:
            names = self.w.nodes.names
            node = self.w.nodes[names[self._at % len(names)]]
            try:
                client = await node.connect(timeout=self.patience_s, name=self.name)
            except (StreamsError, OSError):
                self.w.counts["no node"] += 1
                self._at += self.roams
                await asyncio.sleep(0.1)
                continue
            self.lives += 1
            if self.goes_on:
                self.w.connected[self.name] = client
            try:
                await self.work(client)
            except (StreamsError, TimeoutError, StopAsyncIteration) as error:
                self.w.counts[f"{type(self).__name__.lstrip('_')} {code_of(error)}"] += 1
                self._at += self.roams
                await asyncio.sleep(0.05)
            finally:
                self.w.connected.pop(self.name, None)
                await end(client, abruptly=self.w.rough and self.chance.random() < 0.3)

    async def work(self, client: Client) -> None:
        """Use a client; the node is useless when this method returns or raises."""
        raise NotImplementedError

    async def bounded(self, call: Awaitable[T], timeout: float | None = None) -> T:
        """Await a call with a deadline for the client itself, beyond the deadline of the call."""
        async with asyncio.timeout(2 * self.patience_s if timeout is None else timeout):
            return await call


class Publisher(Worker):
    """Publish single messages, with IDs and without, and batches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.patience_s = self.w.load.patience_s
        self._numbers = 0
        self._doubtful: list[tuple[str, Acks]] = []  # messages with IDs whose outcome is unknown

    @property
    def on(self) -> bool:
        """Return whether the publisher continues."""
        return self.w.publishing

    async def work(self, client: Client) -> None:
        """Publish until the run ends, or too many outcomes are unknown at this node."""
        doubts = 0
        while self.on and doubts < 3:
            fine = await self.way()(client)
            doubts = 0 if fine else doubts + 1
            await asyncio.sleep(self.chance.expovariate(1 / self.w.load.pause))

    def way(self) -> Callable[[Client], Awaitable[bool]]:
        """Choose how to publish next."""
        ways = [self._id, self.plain, self.batch, self._id_batch, self._together, self._again]
        return self.chance.choices(ways, [4, 4, 1, 1, 1, 2])[0]

    def _value(self) -> str:
        self._numbers += 1
        return f"{self.name}.{self._numbers}"

    def _acks(self, client: Client) -> tuple[Acks, dict[str, Any]]:
        if not acks_known(client):
            return "quorum", {}
        levels: list[Acks] = ["quorum", "all", "master"]
        chosen = self.chance.choices(levels, [6, 1, 1])[0]
        return chosen, {"acks": chosen}

    async def _id(self, client: Client) -> bool:
        acks, options = self._acks(client)
        return await self._publish_one(client, self._value(), acks, options, True)

    async def plain(self, client: Client) -> bool:
        """Publish one message without an ID; return whether its outcome is known."""
        acks, options = self._acks(client)
        return await self._publish_one(client, self._value(), acks, options, False)

    async def _again(self, client: Client) -> bool:
        if not self._doubtful:
            return await self._id(client)
        value, acks = self._doubtful.pop(0)
        options = {"acks": acks} if acks_known(client) else {}
        return await self._publish_one(client, value, acks, options, True)

    async def _publish_one(
        self, client: Client, value: str, acks: Acks, options: dict[str, Any], with_id: bool
    ) -> bool:
        begin = time.monotonic()
        outcome: Outcome = "unknown"
        offset, code = -1, ""
        try:
            id_ = value if with_id else None
            offset = await self.bounded(client.publish(self.stream, value, id=id_, **options))
            outcome = "ok"
        except DuplicateIdError as error:
            outcome, offset, code = "ok", error.offset, error.code
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
            if code in NOT_STORED_CODES and not with_id:
                outcome = "failed"
            elif with_id:
                self._doubtful.append((value, acks))
        finally:
            self.w.counts[f"publish {outcome} {code}".strip()] += 1
            self.w.history.add(
                Publish(
                    *(self.name, self.stream, value, begin, time.monotonic(), outcome, offset),
                    id=value if with_id else None,
                    acks=acks,
                    code=code,
                )
            )
        return outcome == "ok"

    async def batch(self, client: Client) -> bool:
        """Publish some messages without IDs; return whether their outcome is known."""
        return await self._many(client, lambda values: {}, lambda value, n: None)

    async def _id_batch(self, client: Client) -> bool:
        return await self._many(client, lambda values: {"ids": values}, lambda value, n: value)

    async def _together(self, client: Client) -> bool:
        return await self._many(
            client, lambda values: {"id": values[0]}, lambda value, n: f"{value}#{n}"
        )

    async def _many(
        self,
        client: Client,
        more: Callable[[list[str]], dict[str, Any]],
        id_of: Callable[[str, int], str | None],
    ) -> bool:
        values = [self._value() for _ in range(self.chance.randint(2, 20))]
        acks, options = self._acks(client)
        if "acks" not in inspect.signature(client.publish_many).parameters:
            acks, options = "quorum", {}
        begin = time.monotonic()
        outcome: Outcome = "unknown"
        offsets, code = [-1] * len(values), ""
        try:
            offsets = await self.bounded(
                client.publish_many(self.stream, values, **more(values), **options)
            )
            outcome = "ok"
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
        finally:
            now = time.monotonic()
            self.w.counts[f"batch {outcome} {code}".strip()] += 1
            self.w.history.add_all(
                Publish(
                    *(self.name, self.stream, value, begin, now, outcome, offset),
                    id=id_of(value, n),
                    acks=acks,
                    code=code,
                )
                for n, (value, offset) in enumerate(zip(values, offsets, strict=True))
            )
        return outcome == "ok"


class Member(Worker):
    """A member of a group."""

    def __init__(self, *args: Any) -> None:
        *rest, self.group, self.exclusive = args
        super().__init__(*rest)

    async def work(self, client: Client) -> None:
        """Take messages and ack most of them."""
        wait = 0.0 if self.exclusive else 3.0
        sub = await self.bounded(
            client.subscribe(
                self.stream,
                group=self.group,
                exclusive=self.exclusive,
                prefetch=self.chance.choice([20, 100]),
                ack_wait=wait,
            )
        )
        label = f"{self.name}#{self.lives}"
        idle = 0.0
        while True:
            try:
                messages = await sub.batch(50, timeout=0.5)
            except TimeoutError:
                idle = 0.0 if client.connected else idle + 0.5
                if idle >= PATIENCE_S:
                    raise
                continue
            idle = 0.0
            self._got(label, messages)
            await self._process(sub, messages)
            if self.w.rough and self.chance.random() < 0.01:
                return  # the member leaves, or dies

    def _got(self, label: str, messages: Sequence[Message]) -> None:
        now = time.monotonic()
        self.w.counts[f"got {self.group}"] += len(messages)
        self.w.history.add_all(
            Delivery(
                *(now, self.stream, label, self.name, message.offset, message.text, self.group),
                exclusive=self.exclusive,
                number=message.delivery,
                epoch=message.epoch,
                arrived=message.arrived_s,
            )
            for message in messages
        )

    async def _process(self, sub: Subscription, messages: Sequence[Message]) -> None:
        acked: list[Message] = []
        begin = time.monotonic()
        for message in messages:
            die = self.chance.random()
            if self.w.rough and die < 0.03:
                message.nack(delay=self.chance.choice([0.0, 0.0, 0.05, 0.5]), reason="rough")
                self.w.counts["nack"] += 1
                if self.exclusive:
                    break  # the rest of the batch is delivered again
            elif self.w.rough and die < 0.035 and not self.exclusive:
                self.w.counts["forgotten"] += 1  # delivered again after `ack_wait`
            else:
                message.ack()
                acked.append(message)
        confirmed = False
        try:
            await self.bounded(sub.flush(PATIENCE_S))
            confirmed = True
        except (StreamsError, TimeoutError) as error:
            self.w.counts[f"flush {code_of(error)}"] += 1
        finally:
            end = time.monotonic()
            self.w.history.add_all(
                Acked(
                    *(begin, end, self.stream, self.group, self.name),
                    *(message.offset, message.delivery, message.epoch, confirmed),
                    exclusive=self.exclusive,
                )
                for message in acked
            )


class Reader(Worker):
    """Reads all messages of its node, in order."""

    roams = False

    async def work(self, client: Client) -> None:
        """Read until the client is useless."""
        sub = await self.bounded(client.subscribe(self.stream))
        label = f"{self.name}#{self.lives}"
        while True:
            with contextlib.suppress(TimeoutError):
                messages = await sub.batch(200, timeout=1.0)
                now = time.monotonic()
                self.w.counts["read"] += len(messages)
                self.w.history.add_all(
                    Delivery(now, self.stream, label, self.name, message.offset, message.text)
                    for message in messages
                )


class Newcomer(Worker):
    """Describes the stream and reads its end, again and again, as a new reader of its node: also of a minority."""

    roams = goes_on = False

    async def work(self, client: Client) -> None:
        """Look at the stream again and again."""
        looks = 0
        while True:
            looks += 1
            label = f"{self.name}#{self.lives}.{looks}"
            description = await self.bounded(client.describe(self.stream))
            end = int(description["end"])
            self.w.history.add(End(time.monotonic(), self.stream, self.name, end))
            start = max(int(description["first"]), end - NEWEST_MESSAGES)
            async with await self.bounded(client.subscribe(self.stream, start=start)) as sub:
                following = start
                while following < end:  # all described messages can be read
                    messages = await sub.batch(NEWEST_MESSAGES, timeout=PATIENCE_S)
                    now = time.monotonic()
                    self.w.counts["read by newcomers"] += len(messages)
                    self.w.history.add_all(
                        Delivery(now, self.stream, label, self.name, message.offset, message.text)
                        for message in messages
                    )
                    following = messages[-1].offset + 1
            await asyncio.sleep(1.0)


class _Watcher(Worker):
    """Records the positions of groups."""

    async def work(self, client: Client) -> None:
        while True:
            for stream, group in GROUPS:
                begin = time.monotonic()
                try:
                    group_state = await self.bounded(client.group(stream, group))
                except StreamsError as error:
                    if error.code == "NO_GROUP":
                        continue
                    raise
                self.w.history.add(
                    Position(
                        begin,
                        time.monotonic(),
                        stream,
                        group,
                        group_state["floor"],
                        group_state["end"],
                    )
                )
            await asyncio.sleep(0.3)


class _Requester(Worker):
    """Sends requests."""

    @property
    def on(self) -> bool:
        return self.w.publishing

    async def work(self, client: Client) -> None:
        number = doubts = 0
        while self.on and doubts < 3:
            number += 1
            value, begin = f"{self.name}.{self.lives}.{number}", time.monotonic()
            outcome: Outcome = "unknown"
            answer = code = ""
            try:
                call = client.request(self.stream, value, timeout=ANSWER_TIMEOUT_S)
                answer = (await self.bounded(call, ANSWER_TIMEOUT_S + 8.0)).decode()
                outcome, doubts = "ok", 0
            except NoAnswerError as error:
                outcome, code, doubts = "failed", error.code, 0
            except (StreamsError, TimeoutError) as error:
                code, doubts = code_of(error), doubts + 1
            finally:
                self.w.counts[f"request {outcome} {code}".strip()] += 1
                end = time.monotonic()
                self.w.history.add(
                    Request(self.name, self.stream, value, begin, end, outcome, answer, code)
                )
            await asyncio.sleep(self.chance.expovariate(1 / (3 * self.w.load.pause)))


class _Responder(Worker):
    """Answers requests; sometimes too late."""

    async def work(self, client: Client) -> None:
        sub = await self.bounded(client.subscribe(self.stream, group=RESPONDERS))
        idle = 0.0
        while True:
            try:
                message = await sub.next(timeout=0.5)
            except TimeoutError:
                idle = 0.0 if client.connected else idle + 0.5
                if idle >= PATIENCE_S:
                    raise
                continue
            idle = 0.0
            await self._answer(message)

    async def _answer(self, message: Message) -> None:
        if self.w.rough and self.chance.random() < 0.02:
            await asyncio.sleep(ANSWER_TIMEOUT_S + self.chance.uniform(-0.2, 0.5))
        begin, answer = time.monotonic(), f"{message.text}:{self.name}"
        outcome: Outcome = "unknown"
        code = ""
        try:
            await self.bounded(message.respond(answer))
            outcome = "ok"
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
            outcome = "failed" if code == "RS_GONE" else "unknown"
        finally:
            self.w.counts[f"response {outcome} {code}".strip()] += 1
            facts = (self.name, self.stream, message.response, message.text)
            now = time.monotonic()
            self.w.history.add(
                Response(*facts, begin, now, outcome, answer, group=RESPONDERS, code=code)
            )


def code_of(error: BaseException) -> str:
    """Return the code or the kind of an error."""
    return str(getattr(error, "code", "") or type(error).__name__)


async def end(client: Client, abruptly: bool) -> None:
    """Close a client, or drop its connection without a word if `abruptly`."""
    client.timeout = 0.2 if abruptly else 1.0
    if abruptly:
        connection = client._connection
        if connection is not None:
            connection.transport.abort()
    with contextlib.suppress(StreamsError, TimeoutError, OSError):
        await client.close()
