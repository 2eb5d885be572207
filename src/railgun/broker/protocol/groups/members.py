"""Members of a group: joining, leaving, credit, and choosing the active member of an exclusive group.

The rules are those of `group.py`: 3 (which deliveries count and which fail), 4 (credit) and 7 (exclusive groups).
"""

from __future__ import annotations

from railgun.broker.protocol.groups.dead_letters import DeadLetters
from railgun.broker.protocol.groups.messages import (
    BadCreditError,
    Command,
    HandedOver,
    Joined,
    Member,
    MemberExistsError,
    Missed,
    NotMemberError,
)
from railgun.broker.protocol.groups.parts import Party


class Members(DeadLetters):
    """The part of a group that manages its members."""

    __slots__ = ()

    def join(self, member: Member, now: int) -> list[Command]:
        """Add a consumer as a member without credit. Return `Joined`, then what the member has to know.

        Raises `NotMemberError` for an empty name, and `MemberExistsError` if the name is taken.
        """
        if not member:
            raise NotMemberError("a member needs a name")
        if member in self.members:
            raise MemberExistsError(f"{member!r} is a member already: it has to leave first")
        self.look_at_clock(now)
        commands: list[Command] = [Missed(first, end) for first, end, _ in self.unreported]
        self.unreported.clear()
        self.members[member] = Party(member)
        commands += self._hand_over()
        receives = self.active is None or self.active.name == member
        return [Joined(member, self.floor, self.why, receives), *commands]

    def leave(self, member: Member, graceful: bool, now: int) -> list[Command]:
        """Remove a member and release its messages at once. `graceful` False: it died, and its deliveries failed."""
        party = self._depart(member, now)
        reason = None if graceful else f"consumer {member} has gone"
        for first, end, flight in party.flights:
            self.give_back(first, end, flight, reason)
        return [*self._report_missed(), *self._hand_over()]

    def send_away(self, member: Member, now: int) -> list[Command]:
        """Remove a member that did nothing wrong, because its node ends or no longer serves it. Release its messages.

        Raises `NotMemberError`. Return the commands for the members that remain.
        """
        party = self._depart(member, now)
        for first, end, flight in party.flights:
            self.put_back(first, end, self.standing_without_failure(flight))
        return [*self._report_missed(), *self._hand_over()]

    def _depart(self, member: Member, now: int) -> Party:
        """Remove a member from the group, and return its state, with its messages still in flight."""
        party = self.party(member)
        self.look_at_clock(now)
        del self.members[member]
        if self.active is party:
            self.active = None
        return party

    def grant(self, member: Member, credit: int, now: int) -> None:
        """Set how many messages a member may have in flight. Raises `BadCreditError` if `credit` is negative."""
        party = self.party(member)
        if credit < 0:
            raise BadCreditError(f"a credit of {credit} for {member!r}: it must be at least 0")
        self.look_at_clock(now)
        party.credit = credit

    def _hand_over(self) -> list[Command]:
        """Make the member that joined first the active one if no member is active: rule 7."""
        if not self.config.exclusive or self.active is not None or not self.members:
            return []
        self.active = next(iter(self.members.values()))
        self.epoch += 1
        return [HandedOver(self.active.name, self.epoch)]
