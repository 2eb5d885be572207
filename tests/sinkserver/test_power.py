"""Power cuts of a sink and its file, at any step: what was promised is there, and nothing comes twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.sinkserver.power_cuts import Power

from railgun.ingest.errors import SinkError
from railgun.sinkserver import ledger, participant
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.participant import Participant
from railgun.testing.disks import Crash
from railgun.transport.packed_records import pack

FLOWS = ("one", "two")


@contextlib.contextmanager
def powered(root: Path, seed: int) -> Iterator[Power]:
    with pytest.MonkeyPatch.context() as patch:
        yield Power(patch, root, seed)


class Out(FileTarget):
    """The same one after a power cut, though that makes another directory here."""

    def __str__(self) -> str:
        return "out.txt"


class Life:
    """A sink and two flows, from one power cut to the next."""

    def __init__(self, root: Path, draw: Random) -> None:
        self.root, self.draw = root, draw
        self.number = self.snapshot = 0
        self.records: dict[
            str, list[bytes]
        ] = {}  # of each transaction that was ever to be prepared
        self.voted: dict[str, str] = {}  # yes was heard; and the flow
        self.asked: set[str] = set()  # to be committed: its manifest is safe
        self.done: set[str] = set()  # and that was heard

    def open(self) -> None:
        self.target = Out(self.root / "out.txt")
        (self.root / "sink").mkdir(parents=True, exist_ok=True)
        self.part = Participant(self.root / "sink", self.target)
        self.part.open()

    def prepare(self) -> None:
        flow = self.draw.choice(FLOWS)
        txn = f"{self.draw.getrandbits(128):032x}"
        self.records[txn] = [b"%s %d" % (flow.encode(), self.number + n) for n in range(3)]
        self.number += 3
        self.part.begin(txn, flow, "out", 1, 0)
        end = 0
        for record in self.records[txn]:
            end = self.part.data(txn, end, pack([record]))
        self.snapshot += 1
        self.part.prepare(txn, self.snapshot, end, 3)
        self.voted[txn] = flow

    def commit(self) -> None:
        waiting = [txn for txn in self.voted if txn not in self.done]
        if waiting:
            txn = self.draw.choice(waiting)
            flow = self.voted[txn]
            before = list(self.voted)[: list(self.voted).index(txn) + 1]
            self.asked |= {one for one in before if self.voted[one] == flow}  # rule 6
            self.part.commit(txn)
            self.done.add(txn)

    def abort(self) -> None:
        waiting = [txn for txn in self.voted if txn not in self.asked]
        if waiting:
            txn = self.draw.choice(waiting)
            del self.voted[txn]
            self.part.abort(txn)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.draw.choices((self.prepare, self.commit, self.abort), (4, 4, 1))[0]()

    def check(self) -> None:
        """All that was promised can be had, and nothing else is there."""
        seen = (self.root / "out.txt").read_bytes().split(b"\n")[:-1]
        for txn in self.done:
            assert set(self.records[txn]) <= set(seen), "committed, and that was heard"
        for txn in [one for one in self.part.txns if one not in self.voted]:
            self.part.abort(txn)  # its flow has not heard of the vote, or has aborted it
        for txn in self.asked:
            self.part.commit(txn)
        seen = (self.root / "out.txt").read_bytes().split(b"\n")[:-1]
        assert len(seen) == len(set(seen)), "twice"
        assert set(seen) == {record for txn in self.asked for record in self.records[txn]}
        for flow in FLOWS:
            assert (mine := [one for one in seen if one.startswith(flow.encode())]) == sorted(
                mine, key=lambda one: int(one.split()[1])
            ), "in order"
        self.done |= self.asked
        for txn in self.voted:
            if txn not in self.asked:
                assert self.part.txns[txn].state == "prepared"
                assert not self.part.txns[txn].damaged


def test_a_power_cut_at_any_step_loses_nothing_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_REWRITE_LINES", 12)
    monkeypatch.setattr(participant, "REMEMBERED_TRANSACTIONS", 12)
    cuts = 0
    for seed in range(12):
        draw = Random(seed)
        life = Life(tmp_path / f"{seed}-0", draw)
        for cut in range(4):
            root = life.root
            root.mkdir(exist_ok=True)
            into = tmp_path / f"{seed}-{cut + 1}"
            with powered(root, draw.getrandbits(32)) as power:
                power.crash_at(draw.randint(0, 150))
                try:
                    life.open()
                    life.check()
                    life.live(30)
                except Crash:
                    cuts += 1
                except (SinkError, AssertionError) as error:
                    raise AssertionError(f"seed {seed}, cut {cut}") from error
                power.cut(into)
            life.part.close()
            life.root = into
    assert cuts > 30
