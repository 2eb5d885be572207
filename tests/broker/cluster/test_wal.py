"""The log of Raft: what was synced is there, whatever happens; what was not is there in part, from its beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from verification.log_disk import LogDisk

from railgun.broker.cluster.wal import DamagedWalError, Recovered, Wal
from railgun.broker.errors import ClosedError, LogFailedError, NoSpaceError, StorageError
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.protocol.raft.messages import Entry, Hard, Members, Snapshot
from railgun.errors import ProtocolError
from railgun.testing.disks import Crash

PATH = "raft/wal"
FIRST = Snapshot(0, 0, Members(("a", "b"), ("ü",)))


@dataclass(frozen=True)
class Model:
    """What should be there: the same rules, with nothing but tuples."""

    hard: Hard | None = None
    snapshot: Snapshot | None = None
    entries: tuple[Entry, ...] = ()

    def steps(
        self, hard: Hard | None, snapshot: Snapshot | None, entries: Sequence[Entry]
    ) -> list[Model]:
        """What is there after each part of a write."""
        if snapshot is not None:
            return [Model(hard or self.hard, snapshot, tuple(entries))]
        made = [replace(self, hard=hard)] if hard not in (None, self.hard) else []
        for entry in entries:
            last = made[-1] if made else self
            before = tuple(e for e in last.entries if e.index < entry.index)
            made.append(replace(last, entries=(*before, entry)))
        return made

    def compacted(self, snapshot: Snapshot) -> Model:
        kept = tuple(e for e in self.entries if e.index > snapshot.index)
        return replace(self, snapshot=snapshot, entries=kept)


def found(recovered: Recovered) -> Model:
    return Model(recovered.hard, recovered.snapshot, recovered.entries)


def opened(disk: Disk) -> tuple[Wal, Model]:
    wal, recovered = Wal.open(disk, "raft")
    return wal, found(recovered)


def begun(disk: Disk) -> Wal:
    wal, model = opened(disk)
    assert model == Model()
    wal.write(None, FIRST, ())
    return wal


def entries(first: int, last: int, term: int = 1) -> list[Entry]:
    return [
        Entry(index, term, b"entry %d of %d" % (index, term)) for index in range(first, last + 1)
    ]


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    wal = begun(disk)
    wal.write(Hard(1, "a"), None, [Entry(1, 1), Entry(2, 1, members=Members(("a",)))])
    wal.sync()
    wal.write(None, None, entries(3, 6))
    wal.write(Hard(2, None), None, entries(5, 5, term=2))
    wal.sync()
    wal.close()
    wal.close()
    with pytest.raises(ClosedError):
        wal.sync()
    expected = Model(
        Hard(2),
        FIRST,
        (Entry(1, 1), Entry(2, 1, members=Members(("a",))), *entries(3, 4), *entries(5, 5, 2)),
    )
    wal, model = opened(disk)
    assert model == expected
    snapshot = Snapshot(3, 1, Members(("a",)), b"all of it")
    wal.compact(snapshot)
    wal.write(None, None, entries(6, 6, 2))
    wal.sync()
    wal.close()
    wal, model = opened(disk)
    assert model == Model(Hard(2), snapshot, (*entries(4, 4), *entries(5, 6, 2)))
    other = Snapshot(9, 3, Members(("b",)), b"of the leader")
    wal.write(Hard(3, "b"), other, entries(10, 11, 3))
    wal.close()
    wal, model = opened(disk)
    assert model == Model(Hard(3, "b"), other, tuple(entries(10, 11, 3)))
    wal.close()


def test_a_log_begins_with_a_snapshot_and_has_no_holes() -> None:
    disk = LogDisk()
    wal, _ = opened(disk)
    with pytest.raises(ProtocolError, match="begins with a snapshot"):
        wal.write(None, None, entries(1, 1))
    wal.close()  # nothing is there yet
    assert disk.list("raft") == []
    wal = begun(disk)
    wal.write(None, None, entries(1, 4))
    with pytest.raises(ProtocolError, match="entry 6 cannot be written after 4"):
        wal.write(None, None, entries(6, 6))
    with pytest.raises(ProtocolError, match="no snapshot of 5"):
        wal.compact(replace(FIRST, index=5))
    wal.compact(replace(FIRST, index=4))
    with pytest.raises(ProtocolError, match="entry 4 cannot be written"):
        wal.write(None, None, entries(4, 5))


def test_a_torn_tail_is_cut_off_and_told() -> None:
    disk = LogDisk()
    wal = begun(disk)
    wal.write(Hard(1, "a"), None, entries(1, 1))
    wal.sync()
    size = wal.size
    wal.write(Hard(2, "b"), None, entries(2, 3))
    whole = disk.content(PATH)
    first = Model(Hard(1, "a"), FIRST, tuple(entries(1, 1)))
    allowed = [first, *first.steps(Hard(2, "b"), None, entries(2, 3))]
    for end in range(size, len(whole)):
        for filling in (b"", bytes(50), b"\xff" * 50):
            disk.replace(PATH, whole[:end] + filling)
            wal, recovered = Wal.open(disk, "raft")
            model = found(recovered)
            assert model in allowed
            assert not filling or "were torn at the end" in recovered.warnings[0]
            at = len(model.entries) + 1
            wal.write(Hard(3), None, entries(at, at, 3))
            wal.sync()
            _, recovered = Wal.open(disk, "raft")
            assert recovered.warnings == []
            assert found(recovered) == model.steps(Hard(3), None, entries(at, at, 3))[-1]


def whole_log(disk: LogDisk) -> tuple[bytes, list[Model]]:
    """A log that was closed: its bytes, and what it may have been on its way."""
    wal, model = begun(disk), Model(None, FIRST)
    models = [model]
    for n in range(1, 4):
        models += models[-1].steps(Hard(n, "a"), None, entries(n, n + 1, n))
        wal.write(Hard(n, "a"), None, entries(n, n + 1, n))
        wal.sync()
    wal.close()
    return disk.content(PATH), models


def check_damaged(disk: LogDisk) -> None:
    before = disk.content(PATH)
    with pytest.raises(DamagedWalError, match="must not come back under its name") as error:
        opened(disk)
    assert error.value.code == "WAL_DAMAGED"
    assert disk.content(PATH) == before
    assert disk.list("raft") == ["wal"]


def test_no_bit_flips_unseen() -> None:
    disk = LogDisk()
    whole, models = whole_log(disk)
    for bit in range(8 * len(whole)):
        disk.replace(PATH, whole)
        disk.flip(PATH, bit)
        if bit < 8 * (len(whole) - 24):
            check_damaged(disk)
        else:  # the last mark of all, behind which there is nothing
            assert opened(disk)[1] == models[-1]


def test_holes_and_missing_pieces_in_the_middle() -> None:
    disk = LogDisk()
    whole, models = whole_log(disk)
    for at in range(0, len(whole) - 40, 3):
        disk.replace(PATH, whole[:at] + bytes(16) + whole[at + 16 :])
        check_damaged(disk)
    # A file that has become shorter is one that has not grown yet, but for what was there from its beginning.
    for end in range(len(whole)):
        disk.replace(PATH, whole[:end])
        try:
            _, model = opened(disk)
        except DamagedWalError:
            assert end < len(disk_of_first()) - 24
        else:
            assert model in models


def disk_of_first() -> bytes:
    disk = LogDisk()
    begun(disk)
    return disk.content(PATH)


def test_a_log_that_was_compacted_is_damaged_wherever_it_is() -> None:
    """Also its last bytes: it was whole when it got its name."""
    disk = LogDisk()
    wal = begun(disk)
    wal.write(Hard(1, "a"), None, entries(1, 3))
    wal.compact(replace(FIRST, index=2, term=1))
    whole = disk.content(PATH)
    for bit in range(8 * (len(whole) - 24)):
        disk.replace(PATH, whole)
        disk.flip(PATH, bit)
        check_damaged(disk)


def test_a_full_disk() -> None:
    disk = LogDisk()
    disk.room = 10
    wal, _ = opened(disk)
    with pytest.raises(NoSpaceError):
        wal.write(None, FIRST, ())
    assert disk.list("raft") == []
    disk.room = None
    wal = begun(disk)
    wal.write(Hard(1, "a"), None, entries(1, 3))
    wal.sync()
    expected = Model(Hard(1, "a"), FIRST, tuple(entries(1, 3)))
    disk.room = disk.used() + 90
    with pytest.raises(NoSpaceError, match="All that was stored can be read"):
        wal.write(Hard(2), None, entries(4, 6))
    with pytest.raises(NoSpaceError):
        wal.compact(Snapshot(2, 1, FIRST.members, bytes(100)))
    assert disk.list("raft") == ["wal"]
    disk.room = None
    wal.write(None, None, entries(4, 4))  # it goes on, if somebody wants that
    wal.sync()
    disk.lose_power()
    assert opened(disk)[1] == expected.steps(None, None, entries(4, 4))[-1]


def test_a_failed_sync_is_the_end_of_it() -> None:
    disk = LogDisk()
    wal = begun(disk)
    wal.write(None, None, entries(1, 1))
    wal.sync()
    wal.write(None, None, entries(2, 2))
    disk.fail_syncs = 1
    with pytest.raises(LogFailedError):
        wal.sync()
    for again in (
        wal.sync,
        lambda: wal.write(None, None, entries(2, 2)),
        lambda: wal.compact(FIRST),
    ):
        with pytest.raises(LogFailedError):
            again()
    disk.lose_power()
    assert opened(disk)[1].entries[:1] == tuple(entries(1, 1))


def test_a_compaction_that_cannot_be_synced_changes_nothing() -> None:
    disk = LogDisk()
    wal = begun(disk)
    wal.write(None, None, entries(1, 3))
    wal.sync()
    disk.fail_syncs = 1
    with pytest.raises(StorageError, match="cannot be compacted"):
        wal.compact(replace(FIRST, index=2, term=1))
    wal.write(None, None, entries(4, 4))
    wal.sync()
    disk.lose_power()
    assert opened(disk)[1] == Model(None, FIRST, tuple(entries(1, 4)))


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_in_a_compaction_leaves_the_old_or_the_new(power: bool) -> None:
    snapshot = Snapshot(3, 1, Members(("a",)), b"state" * 30)
    old = Model(Hard(1, "a"), FIRST, tuple(entries(1, 5)))
    new = old.compacted(snapshot)
    seen = set()
    for step in range(6):
        for seed in range(10):
            disk = LogDisk(seed)
            wal = begun(disk)
            wal.write(Hard(1, "a"), None, entries(1, 5))
            wal.sync()
            disk.crash_at(step)
            done = False
            try:
                wal.compact(snapshot)
                done = True
            except Crash:
                if power:
                    disk.lose_power()
            disk.hook = None
            _, model = opened(disk)
            assert model == new if done else model in (old, new)
            seen.add((done, model == new))
            assert disk.list("raft") == ["wal"]
    assert seen == {(False, False), (False, True), (True, True)}


class Player:
    """Does with a log, by chance, what drivers do; knows what may be there after a crash."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = LogDisk(seed)
        self.possible = [Model()]
        """What may be found: the first is what is for good, the last what was written."""
        self.term = 0

    def play(self, steps: int) -> None:
        wal, model = opened(self.disk)
        assert model in self.possible
        self.possible = [model]
        for _ in range(steps):
            self.step(wal)
        self.disk.hook = None
        wal.close()
        self.possible = self.possible[-1:]

    def step(self, wal: Wal) -> None:
        chance, model = self.chance, self.possible[-1]
        if model.snapshot is None:
            self.possible.append(replace(model, snapshot=FIRST))
            wal.write(None, FIRST, ())
            self.possible = self.possible[-1:]
            return
        base, last = model.snapshot.index, model.snapshot.index + len(model.entries)
        what = chance.random()
        if what < 0.3:
            wal.sync()
            self.possible = self.possible[-1:]
        elif what < 0.37:
            index = chance.randint(base, last)
            snapshot = Snapshot(
                index, self.term, FIRST.members, chance.randbytes(chance.choice([0, 99]))
            )
            self.possible.append(model.compacted(snapshot))
            wal.compact(snapshot)
            self.possible = self.possible[-1:]
        elif what < 0.42:
            self.write(
                wal, Snapshot(last + chance.randint(1, 9), self.term, FIRST.members, b"leader's")
            )
            self.possible = self.possible[-1:]
        else:
            self.write(wal, None)

    def write(self, wal: Wal, snapshot: Snapshot | None) -> None:
        chance, model = self.chance, self.possible[-1]
        hard = None
        if chance.random() < 0.3:
            self.term += 1
            hard = Hard(self.term, chance.choice([None, "a", "bé"]))
        if snapshot is not None:
            first = snapshot.index + 1
        else:
            assert model.snapshot is not None
            first = model.snapshot.index + 1
            last = first + len(model.entries)
            first = last if chance.random() < 0.7 else chance.randint(first, last)
        some = [
            Entry(first + n, self.term, chance.randbytes(chance.choice([0, 3, 80])))
            for n in range(chance.randint(0, 4))
        ]
        self.possible += model.steps(hard, snapshot, some)
        wal.write(hard, snapshot, some)


@pytest.mark.parametrize("block", range(4))
def test_nothing_synced_is_lost_by_power_cuts(block: int) -> None:
    crashes = 0
    for seed in range(block * 200, block * 200 + 200):
        player = Player(seed)
        for _ in range(5):
            player.disk.crash_at(player.chance.randrange(player.chance.choice((6, 60, 200))))
            try:
                player.play(100)
            except Crash:
                crashes += 1
            if player.chance.random() < 0.8:
                player.disk.lose_power()
        player.disk.hook = None
        player.play(0)
    assert crashes > 400


def test_thousands_of_operations_are_what_a_model_says() -> None:
    player = Player(7)
    for _ in range(30):
        player.play(200)
        assert opened(player.disk)[1] == player.possible[-1]


def test_the_file_does_not_grow_for_ever() -> None:
    disk = LogDisk()
    wal = begun(disk)
    sizes = []
    for n in range(1, 400):
        wal.write(Hard(n, "a"), None, entries(n, n))
        wal.sync()
        if n % 20 == 0:
            wal.compact(Snapshot(n - 1, 1, FIRST.members, b"state"))
        sizes.append(wal.size)
    assert max(sizes) < 2000
