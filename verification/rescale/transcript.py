"""Transcripts: whole scenarios of a few workers as readable text, with what happened recorded below each line.

A line that begins with `>` is something that happens; the lines below it are what the machines did. A test runs all
transcripts again and compares. What can happen:

    > cluster 0 1 2 owners k1=0 k2=1       workers, and the owners of the keys before any rescale
    > stages 2 owners k1=2                  there is a second stage, whose keys are owned so (before the cluster line)
    > slow operators                        operators answer only when told to (before the cluster line)
    > 0 sends k1 k2                         records from worker 0's own upstream
    > 0 rescales 0 1 2 owners k1=2          worker 0 hears of the rescale ("all" for all workers, here and below)
    > 0 moves 1                             leave to move so many keys
    > 0 answers                             a slow operator answers
    > 0 snapshots 1                         the barrier of a snapshot comes from worker 0's own upstream
    > 0 advances 5  /  > 0 ends             its own upstream's frontier
    > 2 departs                             it is to leave
    > deliver 0 1  /  > deliver 0 1 2       the next message (or so many) on the link from 0 to 1
    > run                                   deliver and move until nothing is left to do, in a fixed order
    > where                                 which worker has which key
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from railgun.engine.protocol.frontier import MAX
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import messages as m
from verification.rescale.model import ModelWorker, Violation, counting_worker
from verification.rescale.rows import Item, Rows
from verification.rescale.story import tell


class TranscriptError(Exception):
    """Raised for a line that cannot be understood or carried out."""


class TellingWorker(ModelWorker):
    """A worker that records every command of its distributors."""

    __slots__ = ("write",)
    write: Callable[[str], None]

    def carry_out(self, index: int, command: m.Command) -> None:
        """Record the command, then carry it out."""
        stage = f" stage {index}" if len(self.stages) > 1 else ""
        self.write(f"  {self.worker}{stage}: {tell(command)}")
        super().carry_out(index, command)


class Cluster:
    """The workers of a transcript, the links between them, and the recorded lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.workers: dict[int, TellingWorker] = {}
        self.links: dict[tuple[int, int], deque[tuple[int, m.Message]]] = {}
        self.seqs: dict[tuple[int, int], int] = {}
        self.prompt = True
        self.second: Placement | None = None

    def do(self, line: str) -> list[str]:
        """Carry out one line; return the recorded lines."""
        self.lines = []
        words = line.split()
        try:
            self._do(words)
        except Violation as violation:
            self.lines.append(f"  violation: {violation}")
        except (ValueError, IndexError, KeyError) as error:
            raise TranscriptError(f"cannot carry out {line!r}: {error!r}") from error
        return self.lines

    def _do(self, words: list[str]) -> None:
        match words:
            case ["stages", "2", *rest]:
                self.second = self._placement(rest)
            case ["slow", "operators"]:
                self.prompt = False
            case ["cluster", *rest]:
                self._build(rest)
            case ["deliver", sender, to]:
                self._deliver(int(sender), int(to))
            case ["deliver", sender, to, count]:
                for _ in range(int(count)):
                    self._deliver(int(sender), int(to))
            case ["run"]:
                self._run()
            case ["where"]:
                self._where()
            case [who, *rest]:
                for worker in sorted(self.workers) if who == "all" else [int(who)]:
                    self._act(worker, rest)
            case _:
                raise ValueError("an empty line")

    def _build(self, words: list[str]) -> None:
        members = [int(word) for word in words[: words.index("owners")]]
        owners = self._placement(words[words.index("owners") :])
        placements = [owners] if self.second is None else [owners, self.second]
        for worker in members:
            plain = counting_worker(worker, placements, members, lambda key: key, self.prompt)
            telling = TellingWorker(worker, plain.stages, self.prompt)
            telling.write = self.lines.append
            self.workers[worker] = telling

    def _placement(self, words: list[str]) -> Placement:
        """Parse `0 1 owners k1=0 k2=1`; without workers, take those that own keys (and no others)."""
        at = words.index("owners")
        pairs = [word.removeprefix("k").split("=") for word in words[at + 1 :]]
        keys = {int(key): int(worker) for key, worker in pairs}
        workers = [int(word) for word in words[:at]] or sorted(set(keys.values()))
        return Placement.of(workers, keys=keys)

    def _act(self, worker: int, words: list[str]) -> None:
        model = self.workers[worker]
        model.write = self.lines.append
        match words:
            case ["sends", *keys]:
                items = []
                for word in keys:
                    key = int(word.removeprefix("k"))
                    seq = self.seqs[worker, key] = self.seqs.get((worker, key), 0) + 1
                    items.append(Item(key, worker, seq, MAX - 1))
                model.feed(0, m.Local(Rows(items)))
            case ["rescales", *rest]:
                epoch = model.stages[0].distributor.epoch + 1
                model.feed(0, m.Rescale(epoch, self._placement(rest)))
            case ["moves", count]:
                model.feed(0, m.Move(int(count)))
            case ["answers"]:
                model.answer()
            case ["snapshots", snapshot]:
                model.feed(0, m.StartSnapshot(int(snapshot)))
            case ["advances", value]:
                model.feed(0, m.Advanced(int(value)))
            case ["ends"]:
                model.feed(0, m.Advanced(MAX))
            case ["departs"]:
                model.feed(0, m.Depart())
            case _:
                raise ValueError(" ".join(words))
        self._collect_outbox(model)

    def _collect_outbox(self, model: TellingWorker) -> None:
        for to, stage, message in model.outbox:
            self.links.setdefault((model.worker, to), deque()).append((stage, message))
        model.outbox = []

    def _deliver(self, sender: int, to: int) -> None:
        stage, message = self.links[sender, to].popleft()
        model = self.workers[to]
        model.write = self.lines.append
        self.lines.append(f"  {to} gets {tell(message)} from {sender}")
        model.feed(stage, m.Received(sender, message))
        self._collect_outbox(model)

    def _run(self) -> None:
        busy = True
        while busy:
            busy = False
            for link in sorted(self.links):
                if self.links[link]:
                    self._deliver(*link)
                    busy = True
            for worker, model in sorted(self.workers.items()):
                if model.pending:
                    self._act(worker, ["answers"])
                    busy = True
                elif model.stages[0].distributor.movable:
                    self._act(worker, ["moves", "1000"])
                    busy = True

    def _where(self) -> None:
        for worker, model in sorted(self.workers.items()):
            phase = model.stages[0].distributor.phase.name
            for index, stage in enumerate(model.stages):
                states = stage.operator.states
                held = ", ".join(f"k{key}" for key in sorted(states)) or "nothing"
                name = f" stage {index}" if len(model.stages) > 1 else f", {phase}"
                self.lines.append(f"  {worker}{name}: {held}")


def replay(text: str) -> str:
    """The transcript with what happens now below each line: equal to the text if nothing has changed.

    >>> print(replay("> cluster 0 1 owners k1=1\\n> 0 sends k1\\n> deliver 0 1"))
    > cluster 0 1 owners k1=1
    > 0 sends k1
      0: →1 Data/0 k1#1@0
    > deliver 0 1
      1 gets Data/0 k1#1@0 from 0
      1: process k1#1@0
    """
    cluster = Cluster()
    lines = []
    for line in text.splitlines():
        if line.startswith(">"):
            lines.append(line)
            lines.extend(cluster.do(line.removeprefix(">").split("  #")[0].strip()))
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines)
