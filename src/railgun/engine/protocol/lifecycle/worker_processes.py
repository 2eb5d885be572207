"""The processes of a flow's workers: launched, there, leaving, gone. Part of the `Lifecycle` machine.

1. **Incarnations.** Every process that is launched has a number of its own. One that is not the latest of its worker
   is turned away, so a second attempt of a task, or one that was given up for dead, can do no harm.
2. **Who is to leave** and does not within `LEAVE` is ended by force; in haste, within `HASTE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from railgun.engine.protocol.lifecycle.messages import Address, Cancel, Launch, Order, Stop, To
from railgun.engine.protocol.placement import Worker
from railgun.errors import RailgunError

SECOND: Final = 1_000_000
LEAVE: Final = 10 * SECOND
HASTE: Final = SECOND


class StaleWorkerError(RailgunError):
    """A worker that nobody waits for."""


@dataclass(slots=True)
class Member:
    """A worker's process, as far as is known."""

    incarnation: int
    since: int
    address: Address | None = None  # known when it is up
    ready: bool = False
    begun: bool = False  # whether it was told to begin, in the generation it is of
    ended: bool = False
    leaving: bool = False
    told: int | None = None  # when it was told to leave
    cancelled: bool = False
    owing: bool = False  # whether it has still to hand over what is to be saved of it
    doubtful: bool = (
        False  # whether it is of a generation that failed, and was not ready for one since
    )


class Crew:
    """Who there is; `give` takes orders."""

    def __init__(self, give: Callable[[Order], None]) -> None:
        self.give = give
        self.members: dict[Worker, Member] = {}
        self.haste = False
        self._incarnations = 0

    def expects(self, worker: Worker, incarnation: int) -> bool:
        """Whether this process is waited for."""
        member = self.members.get(worker)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.leaving
            and member.address is None
        )

    def up(self, worker: Worker, incarnation: int, address: Address) -> None:
        """A worker's process has come. Raises `StaleWorkerError` if nobody waits for it."""
        if not self.expects(worker, incarnation):
            raise StaleWorkerError(f"worker {worker}, incarnation {incarnation}, is not expected")
        self.members[worker].address = address

    def address(self, worker: Worker) -> Address:
        """Where a worker that is up is."""
        address = self.members[worker].address
        assert address is not None
        return address

    def is_leaving_or_coming(self, worker: Worker) -> bool:
        """Whether nobody can count on it now."""
        member = self.members[worker]
        return member.leaving or member.address is None

    def launch(self, worker: Worker, now: int) -> None:
        """Start a process."""
        self._incarnations += 1
        self.members[worker] = Member(self._incarnations, now)
        self.give(Launch(worker, self._incarnations))

    def dismiss(self, worker: Worker) -> None:
        """Nobody needs it any more."""
        member = self.members[worker]
        if member.leaving:
            return
        member.leaving = True
        if member.address is None:
            self._cancel(worker, member)
        else:
            self.give(To(worker, Stop(handing_over=member.owing)))

    def hurry(self, now: int) -> None:
        """Who was told to leave, and does not, is ended by force."""
        patience = HASTE if self.haste else LEAVE
        for worker, member in self.members.items():
            if not member.leaving or member.cancelled:
                continue
            if member.told is None:
                member.told = now
            elif now - member.told >= patience:
                self._cancel(worker, member)

    def _cancel(self, worker: Worker, member: Member) -> None:
        member.cancelled = True
        self.give(Cancel(worker, member.incarnation))
