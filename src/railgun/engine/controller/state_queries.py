"""Inquiries: what is the state of a key, now? Workers are asked while they work, and answer between two batches.

Rules:

1. A key is at the worker its placement gives it to. While keys move it may be at its old owner, at its new one, or on
   the way between them: then all workers are asked, and if none has it they are asked again.
2. That a key has no state is said at once if nothing moved while it was looked for; else when it was not found for as
   long as `MOVING`, much longer than a key is on the way.
3. Who does not answer within `PATIENCE` is busy in a user's function, or frozen. Nothing waits for it but the question.
4. Nothing that is asked can harm a worker: keys travel as bytes that are opened with care
   (`engine.worker.state_queries`).
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

PATIENCE: Final = 5.0
MOVING: Final = 1.0
PAUSE: Final = 0.02
AT_ONCE: Final = 64  # questions
SAMPLES: Final = 5
STATEFUL: Final = ("source", "stateful_map", "reduce", "stateful")


class NoStepError(RailgunError):
    """There is no step of this name that has state."""


class NoKeyError(RailgunError, LookupError):
    """The key has no state."""


class NoAnswerError(RailgunError):
    """A worker has not answered, or cannot."""


class BusyError(RailgunError):
    """There are too many questions at once."""


Ask = Callable[[Worker, control.Look], bool]
"""Send a question to a worker; False if it cannot be reached."""


class Inquiries:
    """Asks the workers of one flow. Its coroutines run in the controller's loop."""

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
        """The state of a key: for people, or the `whole` of it."""
        self.check(step)
        number, pickled = key_hash(key), dumps(key)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._one_more():
            while True:
                before = self._stands()
                answers = await self._round(
                    self._who_may_have(number),
                    lambda n: control.Look(n, step, pickled, whole),
                    began + PATIENCE - loop.time(),
                )
                for answer in answers:
                    if answer.error:
                        raise NoAnswerError(answer.error)
                    if answer.found:
                        return answer
                all_looked = bool(answers) and all(answer.ready for answer in answers)
                still = before is not None and before == self._stands()
                if all_looked and (still or loop.time() - began > MOVING):
                    raise NoKeyError(f"step {step!r} has no state of the key {key!r}")
                if loop.time() - began > PATIENCE:
                    raise NoAnswerError(
                        f"the flow is {self.life.shown}: there is no state to look at now"
                    )
                await asyncio.sleep(PAUSE)

    async def overview(self, step: str, samples: int = SAMPLES) -> list[control.Found]:
        """How many keys a step has on each worker, and a few of them."""
        self.check(step)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self._one_more():
            while True:
                answers = await self._round(
                    self._all(),
                    lambda n: control.Look(n, step, samples=samples),
                    began + PATIENCE - loop.time(),
                )
                for answer in answers:
                    if answer.error:
                        raise NoAnswerError(answer.error)
                if answers and all(answer.ready for answer in answers):
                    return sorted(answers, key=lambda answer: answer.worker)
                if loop.time() - began > PATIENCE:
                    raise NoAnswerError(
                        f"the flow is {self.life.shown}: there is no state to look at now"
                    )
                await asyncio.sleep(PAUSE)

    def answered(self, answer: control.Found) -> None:
        """A worker has answered."""
        _, future = self._open.get(answer.number, (None, None))
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self, worker: Worker) -> None:
        """A worker is gone: nobody waits for its answers."""
        for number, (asked, future) in self._open.items():
            if asked == worker and not future.done():
                future.set_result(control.Found(number, worker, ready=False))

    # ------------------------------------------------------------ whom to ask

    def check(self, step: str) -> None:
        """Refuse to look for a step that has no state, or at a flow that has ended."""
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

    def _stands(self) -> object:
        """Something that changes whenever keys may have moved; None while they do."""
        coordinator = self.life.coordinator
        if coordinator is None or coordinator.target is not None:
            return None
        return self.life.generation, tuple(coordinator.epochs)

    def _who_may_have(self, number: int) -> Sequence[Worker]:
        if self._stands() is None:
            return self._all()
        owner = self.life.placement.owner(number)
        return [owner] if owner in self.life.members else []

    def _all(self) -> Sequence[Worker]:
        if self.life.coordinator is None:
            return []
        return [worker for worker, member in self.life.members.items() if member.ready]

    # ------------------------------------------------------------ asking

    async def _round(
        self, workers: Sequence[Worker], look: Callable[[int], control.Look], patience: float
    ) -> list[control.Found]:
        """Ask these workers, and wait for all of them."""
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
                _, silent = await asyncio.wait(futures.values(), timeout=max(0.1, patience))
                if silent:
                    first = next(number for number, f in futures.items() if f in silent)
                    raise NoAnswerError(
                        f"worker {self._open[first][0]} has not answered within {PATIENCE:.0f} s: it is busy in a "
                        "function, or frozen. Try again."
                    )
            return [future.result() for future in futures.values()]
        finally:
            for number in futures:
                del self._open[number]

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._asking >= AT_ONCE:
            raise BusyError(f"there are {AT_ONCE} questions at once already")
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1


def key_typed(text: str) -> Any:
    """A key as people type it: JSON if it is JSON, or else text.

    >>> key_typed("ada"), key_typed("42"), key_typed('"42"'), key_typed('["a", 1]')
    ('ada', 42, '42', ('a', 1))
    """
    try:
        return key_in(json.loads(text))
    except ValueError:
        return text


def key_in(value: Any) -> Any:
    """A key out of JSON: keys that are tuples are written as lists."""
    return tuple(map(key_in, value)) if isinstance(value, list) else value


def state_of(answer: control.Found) -> Any:
    """The state itself, out of an answer to who wanted the whole of it."""
    try:
        return pickle.loads(answer.pickled)
    except Exception as error:
        raise NoAnswerError(
            f"the state cannot be made again in this program: {type(error).__name__}: {error}"
        ) from error
