"""State machine of a copy that follows: it takes what the master of an epoch pushes, and reports what is on its disk.

Rules:

1. It handles messages of the last session that fenced it, and no others. The standing that it returned then is where
   the master begins: at the last offset up to which both copies agree.
2. Messages that the master does not have are cut off, but never safe ones.
3. It is labelled with the epoch once it is on disk up to the epoch's start; from then on it counts. Before that it may
   be longer because of what it took, but its label is of an older epoch: it is never judged better than a copy with the
   label.
4. A push that does not follow its copy is not taken: it sends its standing, and the master pushes from there. Pushes
   that were sent before that are ignored (`turn`): they would cut off what was taken and acknowledged since.
5. Readers see messages that the master declared safe and that are on this disk, and no part of a unit that is not whole
   here.
6. States of groups come whole first, then change by change, without a gap.
7. A copy that has lost something may have been counted for it in this very epoch. So it gets a label only when it has
   everything that the master declared safe, and the states of groups, too, both received after it reported its loss.
8. It trims what the master no longer keeps, as far as that is on disk.
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
    """The rules of a copy that follows. `messages` lists the duties of its driver.

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
        "_groups",
        "_has_groups",
        "_label_pending",
        "_master_first",
        "_master_safe",
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
        self.start: int | None = None  # where the epoch begins, once known
        self._master_safe = 0  # messages below are safe, by the master's word
        self._master_first = 0  # the first offset that the master keeps
        self._turn = 0  # how many standings it has sent in this session
        self._label_pending = False  # whether the label is being written
        self._groups = copy.groups  # epoch and number on disk
        self._has_groups = False  # whether whole states of groups have come in this session

    def fenced(self, master: Id, epoch: int, session: int) -> Standing:
        """Begin a session, when the promise for this epoch and all pending writes are on disk. Return the standing."""
        self.master, self.epoch, self.session = master, epoch, session
        self._turn = 0
        self._groups = self.copy.groups
        self._reset_session()
        return self.copy.standing()

    def pushed(self, push: Push) -> list[Command]:
        """Handle a push of the master."""
        if (push.session, push.turn) != (self.session, self._turn):
            return []
        copy, commands = self.copy, list[Command]()
        if push.anew:
            copy.anew(push.base)
            commands.append(Anew(push.base))
        elif not self._follows(push):
            return self._send_standing()
        elif push.base < copy.end:
            copy.cut(push.base)
            commands.append(Cut(push.base))
        if push.runs:
            copy.append(push.base, push.runs)
            commands.append(Write(push.base, push.runs))
        self.start, self._master_safe, self._master_first = push.start, push.safe, push.first
        return commands + self._advance() + ([] if push.runs else self._send_report())

    def _follows(self, push: Push) -> bool:
        """Return whether a push follows the messages before it in this copy."""
        copy, base = self.copy, push.base
        if not copy.first <= base <= copy.end:
            return False
        before = copy.epoch_before(base)
        return before == push.before or not before or not push.before

    def wrote(self, end: int, whole: int | None = None) -> list[Command]:
        """Record that batches up to `end` are on disk; the last whole unit in them ends at `whole`.

        `whole` None: it ends at `end`; 0: no whole unit is in them.
        """
        self.copy.wrote(end, whole)
        commands = self._advance()
        return (
            commands
            if any(isinstance(c, Label) for c in commands)
            else commands + self._send_report()
        )

    def has_cut(self, whole: int) -> list[Command]:
        """Record that a cut is done; the units left are whole up to `whole`."""
        self.copy.whole = whole
        return self._advance() + self._send_report()

    def failed(self) -> list[Command]:
        """Handle a failed write: batches that were not on disk are dropped, and the master may push them again."""
        self.copy.cut(self.copy.durable)
        self.copy.groups = self._groups
        self._label_pending = False
        return self._send_standing()

    def lost(self) -> list[Command]:
        """Handle damage, after the driver has repaired the copy and set its label to LOST."""
        self.copy.label, self._groups = LOST, self.copy.groups
        self._reset_session()
        return self._send_standing() if self.session else []

    def _reset_session(self) -> None:
        """Forget everything that the master of the session has sent."""
        self.start, self._master_safe, self._master_first = None, 0, 0
        self._label_pending = self._has_groups = False

    def labelled(self, epoch: int) -> list[Command]:
        """Record that the label is on disk."""
        if not self._label_pending:
            return []
        self.copy.label, self._label_pending = epoch, False
        return self._send_report() if epoch == self.epoch else []

    def _advance(self) -> list[Command]:
        """Trim, declare messages safe, and write the label, as far as the disk now allows."""
        copy, commands = self.copy, list[Command]()
        first = min(self._master_first, copy.durable)  # a write that is pending may still fail
        if first > copy.first:
            copy.trim(first)
            commands.append(Trim(copy.first))
        safe = min(self._master_safe, copy.whole)
        if safe > copy.safe:
            copy.safe = safe
            commands.append(Safe(safe))
        reached = self.start is not None and copy.durable >= self.start
        if copy.label == LOST:
            reached = reached and copy.durable >= self._master_safe and self._has_groups
        if reached and copy.label != self.epoch and not self._label_pending:
            self._label_pending = True
            commands.append(Label(self.epoch))
        return commands

    def _send_report(self) -> list[Command]:
        copy = self.copy
        labelled = copy.label == self.epoch
        return [Say(self.master, Has(self.session, copy.durable, labelled, copy.first))]

    def _send_standing(self) -> list[Command]:
        self._turn += 1
        return [Say(self.master, Stands(self.session, self.copy.standing()))]

    # ------------------------------------------------------------ groups

    def pushed_groups(self, push: PushGroups) -> list[Command]:
        """Handle states of groups, or changes, from the master."""
        if (push.session, push.turn) != (self.session, self._turn):
            return []
        if not push.whole and self.copy.groups != (push.epoch, push.number - 1):
            return self._send_standing()
        self.copy.groups = (push.epoch, push.number)
        return [WriteGroups(push.epoch, push.number, push.whole)]

    def wrote_groups(self, epoch: int, number: int) -> list[Command]:
        """Record that states or changes of groups are on disk."""
        self._groups = epoch, number
        self.copy.groups = max(self.copy.groups, self._groups)
        if epoch != self.epoch:
            return []
        self._has_groups = True
        return [Say(self.master, HasGroups(self.session, epoch, number)), *self._advance()]

    def failed_groups(self, at: tuple[int, int]) -> list[Command]:
        """Handle a failed write of groups. `at`: the epoch and number of the groups on disk."""
        self.copy.groups = self._groups = at
        return self._send_standing()
