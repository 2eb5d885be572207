"""A copy that follows: it takes what the master of an epoch pushes, and says how far it is safe on its disk.

Rules:

1. It hears the session that fenced it last, and nobody else. Its standing, which it gave then, is where the master
   begins: at the last point up to which both copies agree.
2. What the master has not is cut off, but never what is known to be safe.
3. It is labelled with the epoch once it is on disk up to the start of it; from then on it counts. Before that it may be
   longer for what it took, but its label is of an older epoch: nobody takes it for better than one with the label.
4. What does not follow is not taken: it says how it stands, and the master begins there. What is under way from before
   that is not heard (`turn`): it would cut off what was taken and acknowledged since.
5. Readers see what is safe by the master's word, and on this disk; no part of a unit that is not whole here.
6. States of groups come whole first, then change by change, without a gap.
7. A copy that has lost something may have been counted for it in this very epoch. So it gets a label only when it has
   all that the master says is safe, and the states of groups, too, both of after it has told of its loss.
8. It trims what the master does not keep any more, as far as it is on disk.
"""

from __future__ import annotations

from railgun.broker.protocol.replication.messages import (
    Anew,
    Command,
    Cut,
    Has,
    HasGroups,
    Id,
    Label,
    Push,
    PushGroups,
    Safe,
    Say,
    Stands,
    Trim,
    Write,
    WriteGroups,
)
from railgun.broker.protocol.replication.standing import LOST, Copy, Standing


class Replica:
    """The rules of a copy that follows. See `messages` for what its driver has to do.

    >>> replica = Replica(Copy())
    >>> replica.fenced("a", epoch=1, session=7)
    Standing(label=0, first=0, end=0, runs=(), groups=(0, 0))
    >>> replica.pushed(Push(7, 1, base=0, before=0, start=0, safe=0, first=0, runs=((1, 5),)))
    [Write(base=0, runs=((1, 5),)), Label(epoch=1, groups=False)]
    >>> replica.wrote(5)
    [Say(to='a', message=Has(session=7, end=5, labelled=False, first=0))]
    >>> replica.labelled(1)
    [Say(to='a', message=Has(session=7, end=5, labelled=True, first=0))]
    """

    __slots__ = (
        "_asked",
        "_first",
        "_groups",
        "_has_groups",
        "_told",
        "_turn",
        "copy",
        "epoch",
        "master",
        "session",
        "start",
    )

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.master: Id = ""
        self.epoch = 0
        self.session = 0
        self.start: int | None = None  # of the epoch, once it is known
        self._told = 0  # what the master says is safe
        self._first = 0  # what it says is not kept before
        self._turn = 0  # how often it has said how it stands, in this session
        self._asked = False  # whether the label is being written
        self._groups = copy.groups  # on disk
        self._has_groups = False  # whether they have come whole in this session

    def fenced(self, master: Id, epoch: int, session: int) -> Standing:
        """The promise for this epoch is on disk, and so is all that was to be written."""
        self.master, self.epoch, self.session = master, epoch, session
        self._turn = 0
        self._groups = self.copy.groups
        self._forget()
        return self.copy.standing()

    def pushed(self, push: Push) -> list[Command]:
        """The master says something."""
        if (push.session, push.turn) != (self.session, self._turn):
            return []
        copy, commands = self.copy, list[Command]()
        if push.anew:
            copy.anew(push.base)
            commands.append(Anew(push.base))
        elif not self._follows(push):
            return self._stands()
        elif push.base < copy.end:
            copy.cut(push.base)
            commands.append(Cut(push.base))
        if push.runs:
            copy.append(push.base, push.runs)
            commands.append(Write(push.base, push.runs))
        self.start, self._told, self._first = push.start, push.safe, push.first
        return commands + self._look() + ([] if push.runs else self._report())

    def _follows(self, push: Push) -> bool:
        """Whether what is pushed follows what lies before it here."""
        copy, base = self.copy, push.base
        if not copy.first <= base <= copy.end:
            return False
        before = copy.epoch_before(base)
        return before == push.before or not before or not push.before

    def wrote(self, end: int, whole: int | None = None) -> list[Command]:
        """Batches up to `end` are on disk; the last whole unit in them ends at `whole` (None: there, 0: none does)."""
        self.copy.wrote(end, whole)
        commands = self._look()
        return (
            commands if any(isinstance(c, Label) for c in commands) else commands + self._report()
        )

    def has_cut(self, whole: int) -> list[Command]:
        """What was to be cut off is gone; the units that are left are whole up to there."""
        self.copy.whole = whole
        return self._look() + self._report()

    def failed(self) -> list[Command]:
        """Something could not be written: all that was not on disk is not there, and the master may try again."""
        self.copy.cut(self.copy.durable)
        self.copy.groups = self._groups
        self._asked = False
        return self._stands()

    def lost(self) -> list[Command]:
        """The copy is damaged, and is what the driver has made of it; its label is gone."""
        self.copy.label, self._groups = LOST, self.copy.groups
        self._forget()
        return self._stands() if self.session else []

    def _forget(self) -> None:
        """What the master has said is not known any more."""
        self.start, self._told, self._first = None, 0, 0
        self._asked = self._has_groups = False

    def labelled(self, epoch: int) -> list[Command]:
        """The label is on disk."""
        if not self._asked:
            return []
        self.copy.label, self._asked = epoch, False
        return self._report() if epoch == self.epoch else []

    def _look(self) -> list[Command]:
        """What follows from what is on disk now."""
        copy, commands = self.copy, list[Command]()
        if (
            min(self._first, copy.durable) > copy.first
        ):  # what is not on disk may yet fail to get there
            copy.trim(min(self._first, copy.durable))
            commands.append(Trim(copy.first))
        safe = min(self._told, copy.whole)
        if safe > copy.safe:
            copy.safe = safe
            commands.append(Safe(safe))
        reached = self.start is not None and copy.durable >= self.start
        if copy.label == LOST:
            reached = reached and copy.durable >= self._told and self._has_groups
        if reached and copy.label != self.epoch and not self._asked:
            self._asked = True
            commands.append(Label(self.epoch))
        return commands

    def _report(self) -> list[Command]:
        copy = self.copy
        labelled = copy.label == self.epoch
        return [Say(self.master, Has(self.session, copy.durable, labelled, copy.first))]

    def _stands(self) -> list[Command]:
        self._turn += 1
        return [Say(self.master, Stands(self.session, self.copy.standing()))]

    # ------------------------------------------------------------ groups

    def pushed_groups(self, push: PushGroups) -> list[Command]:
        """States of groups, or changes."""
        if (push.session, push.turn) != (self.session, self._turn):
            return []
        if not push.whole and self.copy.groups != (push.epoch, push.number - 1):
            return self._stands()
        self.copy.groups = (push.epoch, push.number)
        return [WriteGroups(push.epoch, push.number, push.whole)]

    def wrote_groups(self, epoch: int, number: int) -> list[Command]:
        """They are on disk."""
        self._groups = epoch, number
        self.copy.groups = max(self.copy.groups, self._groups)
        if epoch != self.epoch:
            return []
        self._has_groups = True
        return [Say(self.master, HasGroups(self.session, epoch, number)), *self._look()]

    def failed_groups(self, at: tuple[int, int]) -> list[Command]:
        """They could not be written: on disk they are as they were there."""
        self.copy.groups = self._groups = at
        return self._stands()
