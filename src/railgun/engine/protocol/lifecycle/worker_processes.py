"""Track the processes of a flow's workers: launched, up, leaving, gone. Part of the `Lifecycle` machine.

1. **Incarnations.** Every launched process has a number of its own. A process that is not the latest of its worker
   is turned away, so a second attempt of a task, or a process given up for dead, can do no harm.
2. **A process that does not leave** within `LEAVE_TIMEOUT_US` is ended by force; in a hurry, within
   `HURRIED_LEAVE_TIMEOUT_US`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from railgun.engine.protocol.lifecycle.messages import Address, Cancel, Launch, Order, Stop, To
from railgun.engine.protocol.placement import Worker
from railgun.errors import RailgunError

SECOND_US: Final = 1_000_000
LEAVE_TIMEOUT_US: Final = 10 * SECOND_US
HURRIED_LEAVE_TIMEOUT_US: Final = SECOND_US


class StaleWorkerError(RailgunError):
    """A worker's process came that the flow does not expect."""


@dataclass(slots=True)
class Member:
    """The state of a worker's process, as far as the controller knows it."""

    incarnation: int
    since: int  # when it was launched, in µs
    address: Address | None = None  # set once the process is up
    ready: bool = False
    begun: bool = False  # whether it was ordered to begin, in its generation
    ended: bool = False
    leaving: bool = False
    leave_ordered_at: int | None = None  # µs
    cancelled: bool = False
    owes_farewell: bool = False  # whether it must still hand over what is to be saved of it
    # Whether its generation failed, and it has not been ready for a later one.
    of_failed_generation: bool = False


class WorkerProcesses:
    """The processes of a flow's workers; `give_order` takes orders."""

    def __init__(self, give_order: Callable[[Order], None]) -> None:
        self.give_order = give_order
        self.members: dict[Worker, Member] = {}
        self.hurried = False
        self._incarnations = 0

    def expects(self, worker: Worker, incarnation: int) -> bool:
        """Return whether this process is expected."""
        member = self.members.get(worker)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.leaving
            and member.address is None
        )

    def up(self, worker: Worker, incarnation: int, address: Address) -> None:
        """Record the address of a worker's process; raise `StaleWorkerError` if it is not expected."""
        if not self.expects(worker, incarnation):
            raise StaleWorkerError(f"worker {worker}, incarnation {incarnation}, is not expected")
        self.members[worker].address = address

    def address(self, worker: Worker) -> Address:
        """Return the address of a worker that is up."""
        address = self.members[worker].address
        assert address is not None
        return address

    def is_unusable(self, worker: Worker) -> bool:
        """Return whether the worker is leaving, or its process is not up yet."""
        member = self.members[worker]
        return member.leaving or member.address is None

    def launch(self, worker: Worker, now: int) -> None:
        """Start a process for the worker, with a new incarnation."""
        self._incarnations += 1
        self.members[worker] = Member(self._incarnations, now)
        self.give_order(Launch(worker, self._incarnations))

    def dismiss(self, worker: Worker) -> None:
        """Order the worker to leave, or end its process if it is not up yet."""
        member = self.members[worker]
        if member.leaving:
            return
        member.leaving = True
        if member.address is None:
            self._cancel(worker, member)
        else:
            self.give_order(To(worker, Stop(handing_over=member.owes_farewell)))

    def cancel_overdue(self, now: int) -> None:
        """End by force the processes that were ordered to leave and have not done so in time."""
        timeout_us = HURRIED_LEAVE_TIMEOUT_US if self.hurried else LEAVE_TIMEOUT_US
        for worker, member in self.members.items():
            if not member.leaving or member.cancelled:
                continue
            if member.leave_ordered_at is None:
                member.leave_ordered_at = now
            elif now - member.leave_ordered_at >= timeout_us:
                self._cancel(worker, member)

    def _cancel(self, worker: Worker, member: Member) -> None:
        member.cancelled = True
        self.give_order(Cancel(worker, member.incarnation))
