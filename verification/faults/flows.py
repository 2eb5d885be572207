"""Producers of a fault run: programs that write as a flow's `StreamSink` does, and transactions.

Rules:

1. A *flow* has a name, epochs and snapshots. Its process stages messages, saves a snapshot with the token of the staged
   messages, and repeats the commit of the snapshot until it gets an answer; then it continues.
2. A process ends at any time. Its successor begins the next epoch with the tokens of a snapshot: the last one, or one
   before it. The successor commits these, and all other staged messages are dropped.
3. Now and then the old process does not know that it has ended (a *straggler*): it continues beside its successor, and
   all its requests must have no effect.
4. `TARGETS` are purged all the time (`totals`), or keep only the newest messages (`trail`). IDs are remembered there
   for less than any fault lasts; commits must not need them.
5. Other clients publish to these streams meanwhile, one by one and in batches, without IDs.
6. A transaction is a producer with one sequence in the history. An abandoned one has no commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.producer import Producer
from verification.faults.history import Begun, Committed, Outcome, Purged, Staged
from verification.faults.workload import (
    SHARED,
    Member,
    Newcomer,
    Publisher,
    Reader,
    Worker,
    Workload,
    code_of,
)

PURGED, BOUNDED = "totals", "trail"
TARGETS: Final = (PURGED, BOUNDED)
TARGET_GROUPS: Final = tuple((stream, SHARED) for stream in TARGETS)
ID_WINDOW_S: Final = 1.0
BOUNDED_BYTES: Final = 64 << 10
SNAPSHOTS: Final = 3
"""How many snapshots a flow keeps."""
OVER: Final = frozenset({"FENCED", "LOST_OUTPUT"})
"""Codes that end a process of a flow: a repeated request gets them again."""


class AbandonedError(Exception):
    """Raised in a transaction that is not to be committed."""


async def prepare(workload: Workload) -> None:
    """Create the streams that flows write into."""
    nodes = workload.nodes
    for name in nodes.names:
        async with await nodes[name].connect(20.0, direct=True) as client:
            await client.ensure(PURGED, id_box=ID_WINDOW_S)
            await client.ensure(BOUNDED, id_box=ID_WINDOW_S, max_bytes=BOUNDED_BYTES)
    now = time.monotonic()
    workload.history.add(Purged(BOUNDED, now, now))


def start(workload: Workload) -> None:
    """Start flows and transactions, and readers of what they write."""
    load = workload.load
    for at, stream in enumerate(TARGETS):
        for number in range(load.flows):
            workload.add(_Flow, f"{stream}-pf{number}", stream, at + number)
        for number in range(load.publishers if load.flows else 0):
            workload.add(_Beside, f"{stream}-p{number}", stream, at + number)
        for number in range(load.transactors):
            workload.add(_Transactor, f"{stream}-pt{number}", stream, at + number + 1)
        for number in range(load.members if load.flows else 0):
            workload.add(Member, f"{stream}-s{number}", stream, number, SHARED, False)
        for number, name in enumerate(workload.nodes.names if load.flows else ()):
            workload.add(Reader, f"{stream}-r-{name}", stream, number)
            workload.add(Newcomer, f"{stream}-n-{name}", stream, number)
    if load.flows:
        workload.add(_Purger, f"{PURGED}-purge", PURGED, 0)


@dataclass(frozen=True, slots=True)
class _Token:
    sequence: int
    count: int


@dataclass(slots=True)
class _Saved:
    """What the processes of a flow share: its snapshots, which survive a process."""

    epoch: int = 0
    snapshots: list[list[_Token]] = field(default_factory=lambda: [[]])


class _Beside(Publisher):
    """Publish messages that are part of no commit."""

    def way(self) -> Callable[[Client], Awaitable[bool]]:
        """Choose how to publish next: without IDs, which these streams do not remember for long."""
        return self.chance.choices([self.plain, self.batch], [4, 1])[0]


class _Flow(Worker):
    """The processes of one flow, one after the other."""

    goes_on = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._saved = _Saved()
        self._numbers = 0
        self._stragglers = 0

    @property
    def on(self) -> bool:
        return self.w.publishing

    async def work(self, client: Client) -> None:
        """Run one process: begin with a snapshot, and continue until its end."""
        saved = self._saved
        back = self.chance.choice([1, 1, 1, 2, SNAPSHOTS])
        tokens = saved.snapshots[-min(back, len(saved.snapshots))]
        saved.epoch += 1
        producer = await self._begin(client, saved.epoch, tokens)
        if producer is None:
            return
        if tokens and not await self._commit(client, producer, tokens):
            saved.snapshots.append([])  # the broker answers that they are lost: begin without them
            return
        life = asyncio.create_task(self._process(client, producer, self.chance.uniform(0.5, 8.0)))
        try:
            await life
        except asyncio.CancelledError:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            raise
        if self.on and self.chance.random() < 0.5:
            self._stragglers += 1
            work = self._straggle(producer)
            self.w.spawn(f"{self.name}-straggler{self._stragglers}", work)

    async def _process(self, client: Client, producer: Producer, seconds: float) -> None:
        """Stage, save and commit, again and again; end at any point."""
        end = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + seconds):
                while self.on and time.monotonic() < end:
                    tokens = []
                    for _ in range(self.chance.choice([1, 1, 2])):
                        token = await self._stage(producer)
                        if token is None:
                            return
                        tokens.append(token)
                    if producer.epoch == self._saved.epoch:  # otherwise the snapshot is incomplete
                        self._saved.snapshots.append(tokens)
                        del self._saved.snapshots[:-SNAPSHOTS]
                    if self.chance.random() < 0.1:
                        return  # the successor, or a straggler, commits the saved snapshot
                    if not await self._commit(client, producer, tokens):
                        return
                    await asyncio.sleep(self.chance.expovariate(1 / (4 * self.w.load.pause)))

    async def _straggle(self, former: Producer) -> None:
        """Continue as the process of an epoch that has a successor, with another connection."""
        chance = Random(self.chance.random())
        name = chance.choice(self.w.nodes.names)
        with contextlib.suppress(StreamsError, TimeoutError, OSError):
            async with await self.w.nodes[name].connect(
                self.patience_s, f"{self.name}-old"
            ) as client:
                tokens = [token for snapshot in self._saved.snapshots for token in snapshot]
                status = {"number": former.number, "identity": former.identity, "staged": {}}
                old = Producer(client, self.stream, self.name, former.epoch, status)
                for _ in range(5):
                    await asyncio.sleep(chance.uniform(0.0, 1.0))
                    if tokens and chance.random() < 0.7:
                        await self._commit_once(client, old, chance.sample(tokens, 1))
                    else:
                        await self._stage(old)

    # ------------------------------------------------------------ requests

    async def _begin(self, client: Client, epoch: int, tokens: list[_Token]) -> Producer | None:
        """Begin an epoch, with as many tries as needed; return None if the broker refuses it for good."""
        keep = [token.sequence for token in tokens]
        while self.on:
            begin, outcome, code = time.monotonic(), "unknown", ""
            try:
                producer = await self.bounded(
                    client.producer(self.stream, self.name, epoch, keep=keep)
                )
                outcome = "ok"
                return producer
            except (StreamsError, TimeoutError) as error:
                code = code_of(error)
                if code in OVER:
                    return None
            finally:
                self.w.counts[f"begin {outcome} {code}".strip()] += 1
                recorded_outcome: Outcome = "ok" if outcome == "ok" else "unknown"
                who = (self.name, self.stream, self.name, epoch)
                self.w.history.add(
                    Begun(*who, begin, time.monotonic(), recorded_outcome, keep, code)
                )
            await asyncio.sleep(0.1)
        return None

    async def _stage(self, producer: Producer) -> _Token | None:
        """Stage some messages; return None if that failed: the process ends then, as a flow's worker does."""
        values: list[str] = []
        begin, code = time.monotonic(), ""
        outcome: Outcome = "unknown"
        stage = None
        try:
            stage = await self.bounded(producer.open())
            for _ in range(self.chance.choice([1, 2, 5])):
                piece = [self._value() for _ in range(self.chance.choice([1, 3, 20]))]
                values += piece
                await self.bounded(stage.put(piece))
            outcome = "ok"
            return _Token(stage.sequence, stage.count)
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
            return None
        finally:
            self.w.counts[f"stage {outcome} {code}".strip()] += 1
            if stage is not None and values:
                who = (self.name, self.stream, self.name, producer.epoch, stage.sequence, values)
                self.w.history.add(Staged(*who, begin, time.monotonic(), outcome, code))

    def _value(self) -> str:
        self._numbers += 1
        return f"{self.name}.{self._numbers}"

    async def _commit(self, client: Client, producer: Producer, tokens: list[_Token]) -> bool:
        """Commit until the broker answers; return False if it refuses for good."""
        while True:
            code = await self._commit_once(client, producer, tokens)
            if not code:
                return True
            if code in OVER or not self.on:
                return False
            await asyncio.sleep(0.05)

    async def _commit_once(self, client: Client, producer: Producer, tokens: list[_Token]) -> str:
        """Send one commit; return the code of the refusal, or "" if the commit succeeded."""
        begin, code, count, base = time.monotonic(), "", 0, None
        outcome: Outcome = "unknown"
        try:
            answer = await self.bounded(producer._commit({t.sequence: t.count for t in tokens}))
            outcome, count, base = "ok", answer["committed"], answer["base"]
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
            outcome = "failed" if code in OVER else "unknown"
        finally:
            self.w.counts[f"commit {outcome} {code}".strip()] += 1
            who = (self.name, self.stream, self.name, producer.epoch)
            sequences = [token.sequence for token in tokens]
            result = (outcome, count, -1 if base is None else base, code)
            self.w.history.add(Committed(*who, sequences, begin, time.monotonic(), *result))
        return code or ("" if outcome == "ok" else "UNKNOWN")


class _Transactor(Worker):
    """Publish messages that must become visible together: by transactions, and by atomic publishes."""

    goes_on = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers = 0

    @property
    def on(self) -> bool:
        return self.w.publishing

    async def work(self, client: Client) -> None:
        doubts = 0
        while self.on and doubts < 3:
            doubts = 0 if await self._one(client) else doubts + 1
            await asyncio.sleep(self.chance.expovariate(1 / (4 * self.w.load.pause)))

    async def _one(self, client: Client) -> bool:
        self._numbers += 1
        producer = f"{self.name}.{self._numbers}"
        values = [f"{producer}.{n}" for n in range(self.chance.choice([1, 2, 30]))]
        is_abandoned = self.chance.random() < 0.2
        begin, code, base = time.monotonic(), "", -1
        outcome: Outcome = "unknown"
        try:
            if is_abandoned or self.chance.random() < 0.5:
                base = await self.bounded(self._transact(client, values, is_abandoned))
            else:
                call = client.publish_many(self.stream, values, atomic=True)
                base = (await self.bounded(call))[0]
            outcome = "ok"
        except AbandonedError:
            outcome = "ok"
        except (StreamsError, TimeoutError) as error:
            code = code_of(error)
        finally:
            self.w.counts[f"transaction {outcome} {code}".strip()] += 1
            who, now = (self.name, self.stream, producer, 0), time.monotonic()
            self.w.history.add(Staged(*who, 1, values, begin, now, outcome, code))
            if not is_abandoned:
                count = len(values) if outcome == "ok" else 0
                result = (outcome, count, base, code)
                self.w.history.add(Committed(*who, [1], begin, now, *result))
        return outcome == "ok"

    async def _transact(self, client: Client, values: list[str], is_abandoned: bool) -> int:
        async with client.transaction(self.stream) as transaction:
            for at in range(0, len(values), 10):
                await transaction.put_all(values[at : at + 10])
            if is_abandoned:
                raise AbandonedError
        return transaction.offsets[0]


class _Purger(Worker):
    """Purge most of a stream, again and again; its last message is left, to show which nodes have it."""

    goes_on = False

    @property
    def on(self) -> bool:
        return self.w.publishing

    async def work(self, client: Client) -> None:
        while self.on:
            await asyncio.sleep(self.chance.uniform(0.5, 3.0))
            end = int((await self.bounded(client.describe(self.stream)))["end"])
            before = end - self.chance.choice([1, 5, 40])
            if before <= 0:
                continue
            begin = time.monotonic()
            try:
                await self.bounded(client.admin("purge", name=self.stream, before=before))
                self.w.counts["purge"] += 1
            finally:
                self.w.history.add(Purged(self.stream, begin, time.monotonic(), before))
