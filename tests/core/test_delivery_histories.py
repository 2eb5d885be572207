"""Thousands of random histories of one group, beside a model that knows each offset by itself.

The model does the same by the plainest means: one cell for each offset, and loops over all of them. After each step,
all cells must be where the machine has them, and what would survive a restart must be the same by `save` and by the
changes told. How messages are spread over members is not modelled but judged: by the rules it has to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from railgun.core.delivery import (
    Change,
    Command,
    Deliver,
    DeliveryError,
    Group,
    GroupConfig,
    Joined,
    Missed,
    Recalled,
    Receipt,
    Saved,
    Sought,
    Stale,
)
from railgun.core.delivery.messages import Standing
from railgun.core.delivery.state import Party
from railgun.core.errors import ProtocolError

HISTORIES = 1_600
STEPS = 60
NEW = ("waiting", 0, "", 0, 0)  # as what waits and has never counted as delivered


@dataclass(slots=True)
class Cell:
    """One offset."""

    place: str = "new"  # settled, flight, waiting, delayed, spent, proposed
    count: int = 0
    reason: str = ""
    until: int = 0
    delay: int = 0
    member: str = ""
    delivery: int = 0
    epoch: int = 0
    expires: int | None = None
    end: str = ""  # acked, buried, missed
    rule: str = ""

    def seen(self) -> tuple[Any, ...]:
        """What the machine must know of it."""
        if self.place == "settled":
            return (self.place,)
        if self.place == "new":
            return NEW
        if self.place == "flight":
            return (self.place, self.member, self.delivery, self.epoch, self.expires, self.reason)
        return (self.place, self.count, self.reason, self.until, self.delay)


class Model:
    """The same rules, offset by offset."""

    def __init__(self, config: GroupConfig, start: int, first: int, end: int) -> None:
        self.config = config
        self.first, self.end = first, end
        self.begin = start
        self.cells = {offset: Cell() for offset in range(start, end)}
        self.credit: dict[str, int] = {}
        self.active = ""
        self.epoch = 0
        self.highest = -1
        self.now: int | None = None
        self.untold: set[int] = set()
        self.missed: set[int] = set()

    def clock(self, now: int) -> None:
        back = self.now is None or now < self.now
        self.now = now
        for cell in self.cells.values():
            if back and cell.place == "delayed":
                cell.until = min(cell.until, now + cell.delay)
            if back and cell.place == "flight" and cell.expires is not None:
                assert self.config.ack_wait is not None
                cell.expires = min(cell.expires, now + self.config.ack_wait)

    def flying(self, member: str) -> list[int]:
        return [
            o for o, c in sorted(self.cells.items()) if c.place == "flight" and c.member == member
        ]

    def put(self, offset: int) -> None:
        """Where a message goes that nobody has."""
        cell = self.cells[offset]
        most = self.config.max_deliveries
        if offset < self.first:
            self.miss(offset)
        elif most is not None and cell.count >= most:
            cell.place = "spent"
        elif cell.until and (self.now is None or cell.until > self.now):
            cell.place = "delayed"
        else:
            cell.place = "waiting"

    def miss(self, offset: int) -> None:
        cell = self.cells[offset]
        assert cell.end == ""
        cell.place, cell.end = "settled", "missed"
        self.missed.add(offset)

    def tell(self) -> set[int]:
        told, self.missed = self.missed, set()
        if not self.credit:
            self.untold |= told
        return told

    def back(self, offset: int, reason: str | None, delay: int = 0) -> None:
        """A delivery came to nothing; None: and does not count."""
        cell = self.cells[offset]
        cell.count = cell.delivery if reason is not None else cell.delivery - 1
        cell.reason = cell.reason if reason is None else reason
        cell.until, cell.delay = (0, 0) if not delay else ((self.now or 0) + delay, delay)
        self.put(offset)

    def recall(self, member: str, lowest: int) -> set[int]:
        if not self.config.exclusive:
            return set()
        self.epoch += 1
        above = {offset for offset in self.flying(member) if offset > lowest}
        for offset in above:
            self.back(offset, None)
        return above

    def hand_over(self) -> None:
        if self.config.exclusive and not self.active and self.credit:
            self.active = next(iter(self.credit))
            self.epoch += 1

    def claim(self, member: str, receipts: Sequence[Receipt]) -> tuple[list[int], list[int]]:
        """The offsets that are meant, and those that are stale."""
        meant: list[int] = []
        stale: list[int] = []
        for receipt in receipts:
            for offset in range(receipt.first, receipt.end):
                cell = self.cells.get(offset, Cell())
                said = (member, receipt.delivery, receipt.epoch)
                fits = cell.place == "flight" and (cell.member, cell.delivery, cell.epoch) == said
                (meant if fits and offset not in meant else stale).append(offset)
        return meant, stale

    def letters(self, now: int, stored: Sequence[int]) -> dict[int, str]:
        """All that are due, with their rules."""
        due: dict[int, str] = {}
        config = self.config
        for offset, cell in self.cells.items():
            free = cell.place in {"waiting", "delayed"}
            if cell.place == "spent":
                due[offset] = "max_deliveries"
            elif free and config.distance is not None and self.highest - offset > config.distance:
                due[offset] = "distance"
            elif (
                (free or cell.place == "new")
                and config.max_age is not None
                and now - stored[offset] > config.max_age
            ):
                due[offset] = "max_age"
        return due

    def restart(self) -> None:
        self.credit, self.active, self.now = {}, "", None
        for offset, cell in self.cells.items():
            if cell.place == "flight":
                self.back(offset, cell.reason)
            elif cell.place not in {"settled", "new"}:
                self.put(offset)


def places(group: Group) -> dict[int, tuple[Any, ...]]:
    """Where the machine has each offset from its beginning."""
    found: dict[int, tuple[Any, ...]] = dict.fromkeys(range(group.floor), ("settled",))
    for first, end, _ in group.settled:
        found |= dict.fromkeys(range(first, end), ("settled",))
    for name in ("waiting", "delayed", "spent"):
        for first, end, s in getattr(group, name):
            cell = (name, s.count, s.reason, s.until, s.delay)
            found |= dict.fromkeys(range(first, end), cell)
    for offset, proposal in group.proposed.items():
        s = proposal.standing
        found[offset] = ("proposed", s.count, s.reason, s.until, s.delay)
    for party in group.members.values():
        for first, end, f in party.flights:
            flight = ("flight", party.name, f.delivery, f.epoch, f.expires, f.reason)
            found |= dict.fromkeys(range(first, end), flight)
    found |= dict.fromkeys(range(group.next, group.end), NEW)
    return found


def offsets(commands: Iterable[Command], kind: type) -> list[int]:
    return [o for c in commands if isinstance(c, kind) for o in range(c.first, c.end)]  # type: ignore[union-attr]


class History:
    """One random history of a group and its model."""

    def __init__(self, seed: int, kind: type[Group] = Group) -> None:
        self.random = Random(seed)
        self.kind = kind
        chance = self.random
        self.config = GroupConfig(
            exclusive=chance.random() < 0.4,
            ack_wait=chance.choice([None, 5, 30]),
            distance=chance.choice([None, None, 0, 3, 8]),
            max_deliveries=chance.choice([None, None, 1, 2, 3]),
            max_age=chance.choice([None, None, None, None, 0, 40, 100]),
        )
        self.now = 1000
        self.stored = [1000] * chance.randrange(12)
        first = chance.randint(0, len(self.stored))
        start = chance.randint(first, len(self.stored))
        self.model = Model(self.config, start, first, len(self.stored))
        self.group = kind(self.config, None, start, first, len(self.stored))
        self.log = Saved()  # by the changes alone
        self.names = 0
        self.old: list[tuple[str, Receipt]] = []  # all that was ever delivered
        self.epochs: dict[int, int] = {}  # the highest offset delivered in each, if exclusive
        self.steps: list[str] = []

    def run(self, steps: int) -> None:
        """So many steps; how likely which kind is differs from history to history."""
        doings: list[Callable[[], None]] = [self.append, self.take, self.ack, self.tick, self.nack]
        rare = (self.trim, self.seek, self.restart, self.wrong, self.leave)
        often = (self.join, self.grant, self.progress, self.letters, self.answer)
        for doing in [*doings, self.append, self.take]:
            doings += [doing] * self.random.choice([1, 3, 6])
        for doing in often:
            doings += [doing] * self.random.choice([0, 1, 4])
        for doing in rare:
            doings += [doing] * self.random.choice([0, 1, 2])
        for _ in range(steps):
            doing = self.random.choice(doings)
            if not self.group.members and self.random.random() < 0.5:
                doing = self.join
            self.pass_time()
            self.steps.append(f"{self.now} {doing.__name__}")
            doing()
            self.compare()

    def pass_time(self) -> None:
        chance = self.random.random()
        if chance < 0.04:
            self.now -= self.random.randint(1, 200)
        elif chance < 0.08:
            self.now += self.random.randint(50, 200)
        else:
            self.now += self.random.randint(0, 6)

    def compare(self) -> None:
        group, model = self.group, self.model
        group.validate()
        found = places(group)
        for offset, cell in model.cells.items():
            assert found.pop(offset) == cell.seen(), f"offset {offset}, after {self.steps}"
        assert all(offset < model.begin for offset in found), self.steps
        assert group.epoch == model.epoch
        assert group.highest == model.highest
        times = [c.until for c in model.cells.values() if c.place == "delayed"]
        times += [
            c.expires for c in model.cells.values() if c.place == "flight" and c.expires is not None
        ]
        assert group.deadline() == min(times, default=None)
        if self.random.random() < 0.3:
            self.keep(group.changes())
            assert self.log == group.save()
            assert group.changes() == []

    def keep(self, changes: Sequence[Change]) -> None:
        """Write to the log; had the tail of it been lost, nothing would be skipped."""
        if not any(isinstance(change, Sought) for change in changes):
            torn = self.log.copy()
            for change in changes[: self.random.randint(0, len(changes))]:
                torn.apply(change)
            done = [*range(torn.floor), *(o for f, e, _ in torn.done for o in range(f, e))]
            found = places(self.group)
            assert all(found[offset] == ("settled",) for offset in done)
        for change in changes:
            self.log.apply(change)

    # --- Steps ------------------------------------------------------------------------------------

    def member(self) -> str | None:
        return self.random.choice([*self.group.members]) if self.group.members else None

    def append(self) -> None:
        last = self.stored[-1] if self.stored else 0
        for _ in range(self.random.randint(1, 8)):
            self.stored.append(max(last, self.now))
        end = len(self.stored)
        self.group.appended(end, self.now)
        self.model.clock(self.now)
        for offset in range(self.model.end, end):
            self.model.cells[offset] = Cell()
        self.model.end = end

    def join(self) -> None:
        if len(self.group.members) > 3:
            return
        self.names += 1
        name = f"m{self.names}"
        told = self.group.join(name, self.now)
        self.model.clock(self.now)
        self.model.credit[name] = 0
        self.model.hand_over()
        assert set(offsets(told, Missed)) == self.model.untold
        self.model.untold = set()
        joined = told[0]
        assert isinstance(joined, Joined)
        assert joined.receives == (self.model.active in {"", name})
        open_cells = [o for o, c in self.model.cells.items() if c.place != "settled"]
        assert joined.offset == min(open_cells, default=self.model.end)
        self.give(name, self.random.choice([1, 3, 8, 20]))

    def grant(self) -> None:
        if (name := self.member()) is not None:
            self.give(name, self.random.choice([0, 1, 2, 5, 10]))

    def give(self, name: str, credit: int) -> None:
        self.group.grant(name, credit, self.now)
        self.model.clock(self.now)
        self.model.credit[name] = credit

    def leave(self) -> None:
        if (name := self.member()) is None:
            return
        graceful = self.random.random() < 0.5
        told = self.group.leave(name, graceful, self.now)
        model = self.model
        model.clock(self.now)
        del model.credit[name]
        for offset in model.flying(name):
            model.back(offset, None if graceful else f"consumer {name} has gone")
        if model.active == name:
            model.active = ""
        assert set(offsets(told, Missed)) == model.tell()
        model.hand_over()

    def take(self) -> None:
        model = self.model
        before = {name: len(model.flying(name)) for name in model.credit}
        told = self.group.take(self.now)
        model.clock(self.now)
        wait = self.config.ack_wait
        last: Deliver | None = None
        given: dict[str, int] = {}
        for deliver in told:
            name = deliver.member
            assert name in model.credit
            if self.config.exclusive:
                assert name == model.active
                high = self.epochs.get(deliver.epoch, -1)
                assert high < deliver.first, "an epoch of an exclusive group is in order"
                self.epochs[deliver.epoch] = deliver.end - 1
            if last is not None:
                assert last.end <= deliver.first, "the lowest first"
                apart = last.end < deliver.first or last.member != name
                assert apart or last.delivery != deliver.delivery, "these should be one"
            last = deliver
            given[name] = given.get(name, 0) + deliver.end - deliver.first
            for offset in range(deliver.first, deliver.end):
                cell = model.cells[offset]
                assert cell.place in {"waiting", "new"}
                assert deliver.delivery == cell.count + 1
                assert deliver.epoch == model.epoch
                cell.place, cell.member, cell.until, cell.delay = "flight", name, 0, 0
                cell.delivery, cell.epoch = deliver.delivery, deliver.epoch
                cell.expires = None if wait is None else self.now + wait
            self.old.append((name, deliver.receipt))
        free = {name: model.credit[name] - len(model.flying(name)) for name in model.credit}
        for name in given:
            assert free[name] >= 0, "credit"
            assert before[name] + given[name] == len(model.flying(name))
            if not self.config.exclusive:
                assert all(free[name] >= other - 1 for other in free.values()), "not levelled"
        self.judge_rest(told, free)

    def judge_rest(self, told: Sequence[Deliver], free: dict[str, int]) -> None:
        """What was not delivered could not be, and nothing of it is below what was."""
        rest = [o for o, c in sorted(self.model.cells.items()) if c.place in {"waiting", "new"}]
        if self.config.exclusive:
            held = {"delayed", "spent", "proposed"}
            blocked = [o for o, c in self.model.cells.items() if c.place in held]
            rest = [offset for offset in rest if offset < min(blocked, default=offset + 1)]
            free = {name: n for name, n in free.items() if name == self.model.active}
            assert not told or told[-1].end <= min(blocked, default=told[-1].end)
        assert not rest or all(credit <= 0 for credit in free.values()), "somebody had credit"
        assert not rest or not told or told[-1].end <= rest[0]

    def receipts(self, name: str) -> list[Receipt]:
        """Some of what a member has, some of what it or others had, some nonsense."""
        mine = [r for n, r in self.old[-12:] if n == name or self.random.random() < 0.3]
        cells = self.model.cells
        flying = self.model.flying(name)
        if flying and self.random.random() < 0.8:
            mine = [Receipt(o, o + 2, cells[o].delivery, cells[o].epoch) for o in flying]
            last = cells[flying[-1]]
            mine += [Receipt(flying[0], flying[-1] + 1, last.delivery, last.epoch)] * len(mine)
        chosen: list[Receipt] = []
        for _ in range(self.random.randint(1, 3)):
            if not mine:
                break
            whole = self.random.choice(mine)
            first = self.random.randrange(whole.first, whole.end)
            end = self.random.randint(first + 1, whole.end)
            if self.random.random() < 0.3:
                first, end = whole.first, whole.end
            if self.random.random() < 0.1:
                end += 3
            other = self.random.random()
            delivery = whole.delivery + self.random.choice([-1, 1]) * (other < 0.1)
            epoch = whole.epoch + (0.1 < other < 0.15)
            chosen.append(Receipt(first, end, max(1, delivery), epoch))
        return chosen

    def ack(self) -> None:
        if (name := self.member()) is None:
            return
        receipts = self.receipts(name)
        told = self.group.ack(name, receipts, self.now)
        self.model.clock(self.now)
        meant, stale = self.model.claim(name, receipts)
        assert offsets(told, Stale) == stale
        assert all(command.code == "ACK_STALE" for command in told if isinstance(command, Stale))
        for offset in meant:
            cell = self.model.cells[offset]
            cell.place, cell.end = "settled", "acked"
            self.model.highest = max(self.model.highest, offset)

    def nack(self) -> None:
        if (name := self.member()) is None:
            return
        receipts = self.receipts(name)
        delay = self.random.choice([0, 3, 20, 100])
        reason = self.random.choice(["", "no", "never"])
        told = self.group.nack(name, receipts, delay, reason, self.now)
        model = self.model
        model.clock(self.now)
        meant, stale = model.claim(name, receipts)
        assert offsets(told, Stale) == stale
        for offset in meant:
            model.back(offset, reason, delay)
        recalled = model.recall(name, min(meant)) if meant else set()
        assert set(offsets(told, Recalled)) == recalled
        assert set(offsets(told, Missed)) == model.tell()

    def progress(self) -> None:
        if (name := self.member()) is None:
            return
        receipts = self.receipts(name)
        told = self.group.in_progress(name, receipts, self.now)
        self.model.clock(self.now)
        for receipt in receipts:
            for offset in self.model.claim(name, [receipt])[0]:
                if self.config.ack_wait is not None:
                    self.model.cells[offset].expires = self.now + self.config.ack_wait
        stale = [o for r in receipts for o in self.model.claim(name, [r])[1]]
        assert offsets(told, Stale) == stale

    def tick(self) -> None:
        told = self.group.tick(self.now)
        model = self.model
        model.clock(self.now)
        for cell in model.cells.values():
            if cell.place == "delayed" and cell.until <= self.now:
                cell.place = "waiting"
        recalled: set[int] = set()
        for name in model.credit:
            late = [
                o for o in model.flying(name) if (model.cells[o].expires or 1 << 60) <= self.now
            ]
            for offset in late:
                model.back(offset, "no answer within ack_wait")
            if late:
                recalled |= model.recall(name, min(late))
        assert set(offsets(told, Recalled)) == recalled
        assert set(offsets(told, Missed)) == model.tell()

    def trim(self) -> None:
        model = self.model
        first = min(model.end, model.first + self.random.randint(0, 4))
        told = self.group.trimmed(first, self.now)
        model.clock(self.now)
        model.first = first
        for offset, cell in model.cells.items():
            if offset < first and cell.place not in {"settled", "flight"}:
                model.miss(offset)
        for command in told:
            assert isinstance(command, Missed)
        assert offsets(told, Missed) == sorted(model.tell())

    def seek(self) -> None:
        model = self.model
        if self.random.random() < 0.6:
            return
        name = self.member()
        offset = self.random.randint(model.first, model.end)
        if set(model.credit) - {name}:
            with pytest.raises(DeliveryError) as caught:
                self.group.seek(offset, self.now, name)
            assert caught.value.code == "GROUP_BUSY"
            return
        told = self.group.seek(offset, self.now, name)
        assert set(offsets(told, Recalled)) == set(model.flying(name or ""))
        model.clock(self.now)
        model.begin = offset
        model.cells = {offset: Cell() for offset in range(offset, model.end)}
        model.highest = -1
        model.epoch += 1

    def letters(self) -> None:
        most = self.random.choice([1, 3, 1000, 1000])
        due = self.model.letters(self.now, self.stored)
        told = self.group.letters(self.now, self.stored.__getitem__, most)
        self.model.clock(self.now)
        assert len(told) == min(most, len(due))
        assert len({bury.offset for bury in told}) == len(told)
        for bury in told:
            cell = self.model.cells[bury.offset]
            assert bury.rule == due[bury.offset]
            assert (bury.deliveries, bury.reason) == (cell.count, cell.reason)
            cell.place, cell.rule = "proposed", bury.rule
        if told:  # those that are new below a letter were passed over, never
            new = [o for o, c in self.model.cells.items() if c.place == "new"]
            ages = [b.offset for b in told if b.rule == "max_age"]
            assert not new or not ages or max(ages) < min(new)

    def answer(self) -> None:
        model = self.model
        proposed = [o for o, c in model.cells.items() if c.place == "proposed"]
        offset = self.random.choice([*proposed, self.random.randint(0, model.end)])
        if self.random.random() < 0.6:
            done = self.group.buried(offset, self.now)
            model.clock(self.now)
            if offset in proposed:
                model.cells[offset].place, model.cells[offset].end = "settled", "buried"
        else:
            done = self.group.kept(offset, self.now)
            model.clock(self.now)
            if offset in proposed:
                model.put(offset)
        assert done == (offset in proposed)

    def restart(self) -> None:
        way = self.random.randrange(3)
        self.keep(self.group.changes())
        saved = self.group.save()
        assert self.log == saved
        if way == 0:
            saved = self.log.copy()
        elif way == 1:
            saved = Saved()
            for change in self.log.changes():
                saved.apply(change)
            assert saved == self.log
        model = self.model
        model.restart()
        model.first = min(model.end, model.first + self.random.choice([0, 0, 3]))
        for offset, cell in model.cells.items():
            if offset < model.first and cell.place not in {"settled"}:
                model.miss(offset)
        model.tell()
        self.group = self.kind(self.config, saved, 0, model.first, model.end)

    def wrong(self) -> None:
        """Requests that are refused change nothing; `compare` sees to that."""
        group, now = self.group, self.now
        bad: list[Callable[[], object]] = [
            lambda: group.ack("nobody", [Receipt(0, 1, 1, 0)], now),
            lambda: group.leave("nobody", True, now),
            lambda: group.appended(self.model.end - 1, now),
            lambda: group.trimmed(self.model.end + 1, now),
            lambda: group.seek(self.model.end + 1, now),
        ]
        if (name := self.member()) is not None:
            bad += [
                lambda: group.join(name, now),
                lambda: group.grant(name, -1, now),
                lambda: group.nack(name, [Receipt(0, 1, 1, 0)], -1, "", now),
                lambda: group.ack(name, [Receipt(3, 3, 1, 0)], now),
            ]
        with pytest.raises(DeliveryError):
            self.random.choice(bad)()

    def finish(self) -> None:
        """In the end everything is settled: a patient member acks all, and letters are written."""
        for name in [*self.group.members]:
            self.group.leave(name, True, self.now)
        self.names += 1
        self.group.join("last", self.now)
        self.group.grant("last", 7, self.now)
        for _ in range(400):
            deadline = self.group.deadline()
            if deadline is not None:
                self.now = max(self.now, deadline)
            self.group.tick(self.now)
            for deliver in self.group.take(self.now):
                assert self.group.ack("last", [deliver.receipt], self.now) == []
            for offset in [*self.group.proposed]:
                self.group.buried(offset, self.now)
            for bury in self.group.letters(self.now, self.stored.__getitem__):
                self.group.buried(bury.offset, self.now)
            if self.group.floor == self.group.end:
                break
        self.group.validate()
        assert self.group.floor == self.group.end, str(self.group.explain(self.now))
        assert self.group.explain(self.now).code == "AT_END"


def play(seed: int, kind: type[Group] = Group, steps: int = STEPS) -> None:
    history = History(seed, kind)
    try:
        history.run(steps)
        history.finish()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.simulation
@pytest.mark.parametrize("part", range(4))
def test_histories_are_as_the_model_says(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        play(seed)


# --- Rules changed, each of which the histories must notice -----------------------------------------


class AnyDelivery(Group):
    """An ack counts whatever its delivery number."""

    def _claim(
        self, member: str, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> Any:
        said = [
            replace(receipt, delivery=flights[0][2].delivery) if flights else receipt
            for receipt in receipts
            for flights in [self.party(member).flights.pieces(receipt.first, receipt.end)]
        ]
        return super()._claim(member, said, now, keep=keep)


class AnyEpoch(Group):
    """An ack counts whatever its epoch."""

    def _claim(
        self, member: str, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> Any:
        said = [
            replace(receipt, epoch=flights[0][2].epoch) if flights else receipt
            for receipt in receipts
            for flights in [self.party(member).flights.pieces(receipt.first, receipt.end)]
        ]
        return super()._claim(member, said, now, keep=keep)


class EpochStays(Group):
    """A hand-over does not begin an epoch."""

    def _hand_over(self) -> list[Command]:
        epoch = self.epoch
        told = super()._hand_over()
        self.epoch = epoch
        return told


class GracefulCounts(Group):
    """A graceful leave counts as a delivery."""

    def leave(self, member: str, graceful: bool, now: int) -> list[Command]:
        return super().leave(member, False, now)


class DeadDoNotCount(Group):
    """The deliveries of a dead member do not count."""

    def leave(self, member: str, graceful: bool, now: int) -> list[Command]:
        return super().leave(member, True, now)


class NobodyIsBlocked(Group):
    """An exclusive group goes on while an offset is delayed."""

    def blocked(self) -> int:
        return 1 << 62


class NothingIsRecalled(Group):
    """After a nack in an exclusive group, the member keeps what is above."""

    def _recall(self, party: Party, lowest: int) -> list[Command]:
        self.epoch += self.config.exclusive
        return []


class OneTooMany(Group):
    """Members get one message more than they have credit for."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        given = super()._shares(ready)
        spare = ready - sum(share for _, share in given)
        return [(p, share + (spare > 0 and at == 0)) for at, (p, share) in enumerate(given)]


class FirstTakesAll(Group):
    """Shares are not levelled."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        given = []
        for party, _ in super()._shares(ready):
            share = min(ready, party.free)
            ready -= share
            given.append((party, share))
        return [(party, share) for party, share in given if share]


class DelayUsesCredit(Group):
    """A delayed message is not taken from its member's credit."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        held = self.delayed.total
        return [(p, min(n, max(1, p.free - held))) for p, n in super()._shares(ready)]


class NewFirst(Group):
    """New messages come before redeliveries."""

    def _lowest(self, most: int, below: int) -> tuple[int, int, Standing]:
        if self.next < self.end and not self.config.exclusive:
            first, self.next = self.next, min(self.end, self.next + most)
            return first, self.next, Standing()
        return super()._lowest(most, below)


class SilentTrim(Group):
    """What is missed is skipped without a word."""

    def trimmed(self, first: int, now: int) -> list[Command]:
        super().trimmed(first, now)
        return []


class NobodyTold(Group):
    """What was missed while nobody was there is told to nobody."""

    def join(self, member: str, now: int) -> list[Command]:
        self.untold.clear()
        return super().join(member, now)


class ClockOnlyForward(Group):
    """A clock that goes back is not noticed."""

    def look_at_clock(self, now: int) -> None:
        self.seen = now


class SeekRemembersAcks(Group):
    """After a seek back, what was acked before still counts for the distance."""

    def seek(self, offset: int, now: int, member: str | None = None) -> list[Command]:
        highest = self.highest
        told = super().seek(offset, now, member)
        self.highest = min(highest, offset - 1)
        return told


class LettersTwice(Group):
    """A letter that is proposed is delivered, too."""

    def letters(self, now: int, time_of: Any, most: int = 1000) -> Any:
        told = super().letters(now, time_of, most)
        for offset, proposal in self.proposed.items():
            self.waiting.set(offset, offset + 1, proposal.standing)
        self.proposed.clear()
        return told


class KeptIsLost(Group):
    """A letter that could not be written is given up all the same."""

    def kept(self, offset: int, now: int) -> bool:
        return self.buried(offset, now)


class BuriedCountsAsAcked(Group):
    """A letter moves the highest acked offset."""

    def buried(self, offset: int, now: int) -> bool:
        done = super().buried(offset, now)
        self.highest = max(self.highest, offset) if done else self.highest
        return done


class DeliveriesAreNotSaved(Group):
    """The log does not learn of deliveries."""

    def hand_out(self, party: Party, first: int, end: int, was: Standing, now: int) -> Deliver:
        unsaved = self.unsaved.copy()
        told = super().hand_out(party, first, end, was, now)
        self.unsaved = unsaved
        return told


class ProgressIsIgnored(Group):
    """`in_progress` does not extend anything."""

    def in_progress(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        return self._claim(member, receipts, now, keep=True)[2]


class TimersForget(Group):
    """A message that was extended is taken back at its first deadline."""

    def _expire(self, party: Party, first: int, end: int, now: int) -> int:
        for low, high, flight in party.flights.pieces(first, end):
            party.flights.set(low, high, replace(flight, expires=now))
        return super()._expire(party, first, end, now)


MUTANTS = [
    *(AnyDelivery, AnyEpoch, EpochStays, GracefulCounts, DeadDoNotCount, NobodyIsBlocked),
    *(NothingIsRecalled, OneTooMany, FirstTakesAll, DelayUsesCredit, NewFirst, SilentTrim),
    *(NobodyTold, ClockOnlyForward, SeekRemembersAcks, LettersTwice, KeptIsLost),
    *(BuriedCountsAsAcked, DeliveriesAreNotSaved, ProgressIsIgnored, TimersForget),
]


@pytest.mark.simulation
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_rule_that_is_changed_is_noticed(mutant: type[Group]) -> None:
    caught = (AssertionError, ProtocolError, DeliveryError, AttributeError, ValueError)
    for seed in range(HISTORIES):
        try:
            play(seed, mutant)
        except caught:
            return
    pytest.fail(f"{HISTORIES} histories do not notice: {mutant.__doc__}")
