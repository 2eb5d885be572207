"""Who is in a group: members that come, leave, die or are sent away, and which one of an exclusive group receives.

The rules are those of `group.py`: 3 (what counts, and what fails), 4 (credit) and 7 (exclusive groups).
"""

from __future__ import annotations

from railgun.broker.protocol.groups.dead_letters import Letters
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


class Members(Letters):
    """The part of a group that knows its members."""

    __slots__ = ()

    def join(self, member: Member, now: int) -> list[Command]:
        """A consumer comes, without credit: `Joined` first, and what it has to know."""
        if not member:
            raise NotMemberError("a member needs a name")
        if member in self.members:
            raise MemberExistsError(f"{member!r} is a member already: it has to leave first")
        self.look_at_clock(now)
        told: list[Command] = [Missed(first, end) for first, end, _ in self.untold]
        self.untold.clear()
        self.members[member] = Party(member)
        told += self._hand_over()
        receives = self.active is None or self.active.name == member
        return [Joined(member, self.floor, self.why, receives), *told]

    def leave(self, member: Member, graceful: bool, now: int) -> list[Command]:
        """A consumer goes; its messages are released at once."""
        party = self._depart(member, now)
        reason = None if graceful else f"consumer {member} has gone"
        for first, end, flight in party.flights:
            self.give_back(first, end, flight, reason)
        return [*self._tell_missed(), *self._hand_over()]

    def send_away(self, member: Member, now: int) -> list[Command]:
        """Let a member go that did nothing wrong: its node ends, or serves it no more. Its messages are released.

        Raises `NotMemberError`. Return what members are to be told.
        """
        party = self._depart(member, now)
        for first, end, flight in party.flights:
            self.put_back(first, end, self.left_alone(flight))
        return [*self._tell_missed(), *self._hand_over()]

    def _depart(self, member: Member, now: int) -> Party:
        """Take a member out of the group, and return it with what it had."""
        party = self.party(member)
        self.look_at_clock(now)
        del self.members[member]
        if self.active is party:
            self.active = None
        return party

    def grant(self, member: Member, credit: int, now: int) -> None:
        """A member may have so many messages in flight."""
        party = self.party(member)
        if credit < 0:
            raise BadCreditError(f"a credit of {credit} for {member!r}: it must be at least 0")
        self.look_at_clock(now)
        party.credit = credit

    def _hand_over(self) -> list[Command]:
        """Rule 7: who joined first is active, once nobody is."""
        if not self.config.exclusive or self.active is not None or not self.members:
            return []
        self.active = next(iter(self.members.values()))
        self.epoch += 1
        return [HandedOver(self.active.name, self.epoch)]
