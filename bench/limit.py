"""How fast two Python processes can sum by key and exchange what is not theirs, with no engine at all.

This is the least that any engine has to do whose workers are Python processes: hash a batch of
keys, find their owners, split, encode what belongs to the other process, send it over TCP, read
and decode what the other one sends, and call a Python function for every record. There is no order
of batches to keep, no snapshot, no rescale, no frontier. `throughput` sets our flows against it.

A process writes only what the socket takes at once and reads whatever has come, so two processes
that both have much to write cannot wait for each other. One that is too far ahead with writing
makes no new records until the other has caught up.
"""

from __future__ import annotations

import multiprocessing
import pickle
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection

import numpy as np
from verification.report import Report, options

from bench._workload import CORES, Batch, Rate, add, batches
from railgun.engine.protocol.placement import Placement
from railgun.hashing import hash_keys

SIZES = (5_000, 1_000)  # records in a batch
WARM_UP = 1.0  # seconds
AHEAD = 1 << 20  # bytes not yet written at which a process makes no more
CHUNK = 1 << 18  # bytes read at once
HEADER = struct.Struct("<I")  # the length of what follows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    chosen, console = options("bench limit", (__doc__ or "").partition("\n")[0], argv)
    report = Report("limit")
    for size in SIZES:
        rate = limit(size, seconds=2 if chosen.quick else 5)
        name = f"batches of {size:,}"
        report.check(name, round(rate.records_per_second), "records/s")
        report.check(f"{name}, processor time", round(rate.processor_ns), "ns/record")
        console.print(f"{name}: {rate.records_per_second:,.0f} records/s", style="dim")
    return report.finish(chosen)


def limit(size: int, seconds: float, warm_up: float = WARM_UP) -> Rate:
    """How fast two processes sum, in batches of `size`."""
    context = multiprocessing.get_context("spawn")
    sockets = connected()
    processes = []
    answers: list[Connection] = []
    try:
        for number, link in enumerate(sockets):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_process, args=(number, link, theirs, size, warm_up, seconds), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            answers.append(ours)
        for ours in answers:  # both have made their batches ...
            ours.recv()
        for ours in answers:  # ... and start together
            ours.send(None)
        tallies: list[Tally] = [ours.recv() for ours in answers]
    finally:
        for link in sockets:
            link.close()
        for process in processes:
            process.join(timeout=10)
            process.terminate()
    made, summed = sum(t.made for t in tallies), sum(t.summed for t in tallies)
    if made != summed or sum(t.values for t in tallies) != sum(t.total for t in tallies):
        raise AssertionError(f"{made} records were made and {summed} were summed")
    return Rate(
        sum(tally.rate for tally in tallies),
        sum(t.processor for t in tallies) * 1e9 / sum(t.measured for t in tallies),
        f"no engine, batches of {size:,}",
    )


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
    return one, other


@dataclass(slots=True)
class Tally:
    """What a process tells when it is done."""

    made: int = 0  # records
    values: int = 0  # the sum of theirs
    summed: int = 0  # records
    total: int = 0  # the sum of all keys' sums
    measured: int = 0  # records summed while it was measured
    rate: float = 0.0  # of these, in a second
    processor: float = 0.0  # seconds of processor time for these


@dataclass(slots=True)
class Half:
    """The sums of the keys that belong to one process, and its link to the other."""

    link: socket.socket
    sums: dict[str, int] = field(default_factory=dict)
    summed: int = 0
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    ended: bool = False  # the other one has no more to say

    def sum(self, keys: Sequence[str], values: Sequence[int]) -> None:
        """Add records of ours; the outputs are counted and dropped."""
        sums = self.sums
        out: list[int] = []
        for key, value in zip(keys, values, strict=True):
            sums[key] = total = add(sums.get(key, 0), value)
            out.append(total)
        self.summed += len(out)

    def send(self, keys: Sequence[str], values: Sequence[int]) -> None:
        """Send records of the other one's; what the socket does not take yet is kept."""
        data = pickle.dumps((keys, values), protocol=5)
        self.unsent += HEADER.pack(len(data))
        self.unsent += data
        self.write()

    def write(self) -> None:
        """Write as much as the socket takes."""
        try:
            while self.unsent:
                sent = self.link.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            pass

    def read(self) -> None:
        """Read what has come, and sum all that is complete."""
        try:
            while data := self.link.recv(CHUNK):
                self.unread += data
                if len(data) < CHUNK:
                    break
            else:
                self.ended = True
        except BlockingIOError:
            pass
        at = 0
        with memoryview(self.unread) as view:
            while len(view) >= at + HEADER.size:
                end = at + HEADER.size + HEADER.unpack_from(view, at)[0]
                if end > len(view):
                    break
                self.sum(*pickle.loads(view[at + HEADER.size : end]))
                at = end
        del self.unread[:at]

    def wait(self) -> None:
        """Wait until there is something to read, or room to write what is unsent."""
        select.select([self.link], [self.link] if self.unsent else [], [])
        self.write()
        self.read()


def _process(
    number: int, link: socket.socket, driver: Connection, size: int, warm_up: float, seconds: float
) -> None:
    made = batches(number, size)
    driver.send("ready")
    driver.recv()
    tally = _run(Half(link), made, number, warm_up, seconds)
    driver.send(tally)


def _run(half: Half, made: list[Batch], number: int, warm_up: float, seconds: float) -> Tally:
    placement = Placement.of(range(CORES))
    tally = Tally()
    begin, processor = time.monotonic() + warm_up, 0.0
    begun = -1  # records summed when the measurement began
    for keys, values in cycle(made):
        owners = placement.owners(hash_keys(keys))
        mine = np.flatnonzero(owners == number).tolist()
        other = np.flatnonzero(owners != number).tolist()
        half.send([keys[row] for row in other], [values[row] for row in other])
        half.sum([keys[row] for row in mine], [values[row] for row in mine])
        tally.made += len(keys)
        half.read()
        while len(half.unsent) > AHEAD:
            half.wait()
        now = time.monotonic()
        if begun < 0 and now >= begin:
            begin, begun, processor = now, half.summed, time.process_time()
        elif begun >= 0 and now >= begin + seconds:
            tally.measured = half.summed - begun
            tally.rate = tally.measured / (now - begin)
            tally.processor = time.process_time() - processor
            break
    while half.unsent:
        half.wait()
    half.link.shutdown(socket.SHUT_WR)
    while not half.ended:
        half.wait()
    tally.summed, tally.total = half.summed, sum(half.sums.values())
    rounds, rest = divmod(tally.made // len(made[0][0]), len(made))
    all_values = [sum(values) for _, values in made]
    tally.values = rounds * sum(all_values) + sum(all_values[:rest])
    return tally
