"""Answer queries for the state of a key: workers are asked while they work, and answer between two batches.

Rules:

1. A key is on the worker that its placement assigns it to. While keys move it may be on its old owner, on its new one,
   or in transit: then all workers are asked, and asked again if none has it.
2. That a key has no state is answered at once if nothing moved during the search; otherwise if it was not found for
   `MOVING_TIMEOUT_S`, much longer than a key is in transit.
3. A worker that does not answer within `ANSWER_TIMEOUT_S` is busy in a user's function, or frozen. Only the query waits
   for it.
4. No query can harm a worker: keys travel as bytes that are unpickled with care (`engine.worker.state_queries`).
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from railgun.engine.protocol.lifecycle.machine import Lifecycle, LifecycleError
from railgun.engine.protocol.placement import Worker
from railgun.engine.worker import control_messages as control
from railgun.errors import RailgunError
from railgun.flows.plan import Plan
from railgun.hashing import key_hash
from railgun.transport.pickling import dumps

ANSWER_TIMEOUT_S: Final = 5.0
MOVING_TIMEOUT_S: Final = 1.0
RETRY_PAUSE_S: Final = 0.02
MAX_QUERIES: Final = 64  # at once
SAMPLE_KEYS: Final = 5
STATEFUL: Final = ("source", "stateful_map", "reduce", "stateful")


class NoStepError(RailgunError):
    """The flow has no step of this name that has state."""


class NoKeyError(RailgunError, LookupError):
    """The key has no state."""


class NoAnswerError(RailgunError):
    """A worker did not answer, or cannot."""


class BusyError(RailgunError):
    """Too many queries run at once."""


Ask = Callable[[Worker, control.Look], bool]
"""Send a query to a worker; return False if it cannot be reached."""


class Inquiries:
    """Queries the state of one flow's workers. Its coroutines run in the controller's loop."""

    def __init__(self, plan: Plan, lifecycle: Lifecycle, ask: Ask) -> None:
        self.life = lifecycle
        self.steps = [
            step.name
            for stage in plan.stages
            for step in (*stage.ports, *stage.steps)
            if step.kind in STATEFUL
        ]
        self._ask = ask
        self._open: dict[int, tuple[Worker, asyncio.Future[control.Found]]] = {}
        self._number = 0
        self._asking = 0

    async def key(self, step: str, key: Any, *, whole: bool = False) -> control.Found:
        """Return the state of a key: as text for people, or with `whole` pickled.

        Raises `NoKeyError`, `NoStepError`, `NoAnswerError` and `BusyError`.
        """
        self.check(step)
        number, pickled = key_hash(key), dumps(key)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._counted():
            while True:
                before = self._placement_version()
                answers = await self._round(
                    self._possible_owners(number),
                    lambda n: control.Look(n, step, pickled, whole),
                    began + ANSWER_TIMEOUT_S - loop.time(),
                )
                for answer in answers:
                    if answer.error:
                        raise NoAnswerError(answer.error)
                    if answer.found:
                        return answer
                all_ready = bool(answers) and all(answer.ready for answer in answers)
                unchanged = before is not None and before == self._placement_version()
                if all_ready and (unchanged or loop.time() - began > MOVING_TIMEOUT_S):
                    raise NoKeyError(f"step {step!r} has no state of the key {key!r}")
                if loop.time() - began > ANSWER_TIMEOUT_S:
                    raise NoAnswerError(
                        f"the flow is {self.life.shown}: there is no state to look at now"
                    )
                await asyncio.sleep(RETRY_PAUSE_S)

    async def overview(self, step: str, samples: int = SAMPLE_KEYS) -> list[control.Found]:
        """Return the number of keys that a step has on each worker, with up to `samples` of the keys."""
        self.check(step)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._counted():
            while True:
                answers = await self._round(
                    self._all(),
                    lambda n: control.Look(n, step, samples=samples),
                    began + ANSWER_TIMEOUT_S - loop.time(),
                )
                for answer in answers:
                    if answer.error:
                        raise NoAnswerError(answer.error)
                if answers and all(answer.ready for answer in answers):
                    return sorted(answers, key=lambda answer: answer.worker)
                if loop.time() - began > ANSWER_TIMEOUT_S:
                    raise NoAnswerError(
                        f"the flow is {self.life.shown}: there is no state to look at now"
                    )
                await asyncio.sleep(RETRY_PAUSE_S)

    def answered(self, answer: control.Found) -> None:
        """Accept the answer of a worker."""
        _, future = self._open.get(answer.number, (None, None))
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self, worker: Worker) -> None:
        """Answer all open queries to a worker that is lost."""
        for number, (asked, future) in self._open.items():
            if asked == worker and not future.done():
                future.set_result(control.Found(number, worker, ready=False))

    # ------------------------------------------------------------ which workers to ask

    def check(self, step: str) -> None:
        """Raise `NoStepError` if the step has no state, or `LifecycleError` if the flow has ended."""
        if step not in self.steps:
            raise NoStepError(
                f"there is no step {step!r} with state; these have some: "
                + ", ".join(map(repr, self.steps))
            )
        self._check_alive()

    def _check_alive(self) -> None:
        if self.life.over:
            saved = self.life.saving.committed
            where = "" if saved is None else f"; what it was is in snapshot {saved}"
            raise LifecycleError(
                f"the flow is {self.life.state_text}: it has no state any more{where}"
            )

    def _placement_version(self) -> object:
        """Return a value that changes whenever keys may have moved; None while keys move."""
        coordinator = self.life.coordinator
        if coordinator is None or coordinator.target is not None:
            return None
        return self.life.generation, tuple(coordinator.epochs)

    def _possible_owners(self, number: int) -> Sequence[Worker]:
        if self._placement_version() is None:
            return self._all()
        owner = self.life.placement.owner(number)
        return [owner] if owner in self.life.members else []

    def _all(self) -> Sequence[Worker]:
        if self.life.coordinator is None:
            return []
        return [worker for worker, member in self.life.members.items() if member.ready]

    # ------------------------------------------------------------ asking

    async def _round(
        self, workers: Sequence[Worker], look: Callable[[int], control.Look], timeout_s: float
    ) -> list[control.Found]:
        """Ask these workers, and return all their answers. Raises `NoAnswerError` after `timeout_s`."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[control.Found]] = {}
        try:
            for worker in workers:
                self._number += 1
                future: asyncio.Future[control.Found] = loop.create_future()
                futures[self._number] = future
                self._open[self._number] = (worker, future)
                if not self._ask(worker, look(self._number)):
                    future.set_result(control.Found(self._number, worker, ready=False))
            if futures:
                _, silent = await asyncio.wait(futures.values(), timeout=max(0.1, timeout_s))
                if silent:
                    first = next(number for number, f in futures.items() if f in silent)
                    raise NoAnswerError(
                        f"worker {self._open[first][0]} has not answered within {ANSWER_TIMEOUT_S:.0f} s: "
                        "it is busy in a function, or frozen. Try again."
                    )
            return [future.result() for future in futures.values()]
        finally:
            for number in futures:
                del self._open[number]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._asking >= MAX_QUERIES:
            raise BusyError(f"too many queries at once: at most {MAX_QUERIES} are allowed")
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1


def key_typed(text: str) -> Any:
    """Return the key that a user typed: parsed as JSON if it is JSON, otherwise the text itself.

    >>> key_typed("ada"), key_typed("42"), key_typed('"42"'), key_typed('["a", 1]')
    ('ada', 42, '42', ('a', 1))
    """
    try:
        return key_in(json.loads(text))
    except ValueError:
        return text


def key_in(value: Any) -> Any:
    """Return the key in a JSON value: keys that are tuples are written as lists."""
    return tuple(map(key_in, value)) if isinstance(value, list) else value


def state_of(answer: control.Found) -> Any:
    """Return the state in an answer to a query for the `whole` state."""
    try:
        return pickle.loads(answer.pickled)
    except Exception as error:
        raise NoAnswerError(
            f"the state cannot be unpickled in this program: {type(error).__name__}: {error}"
        ) from error
