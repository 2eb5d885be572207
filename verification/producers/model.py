"""Producers of a stream, explored: flows that stage and commit, their successors, and a broker that fails at any point.

The machine is that of production (`broker.protocol.producers.registry`); the driver around it is written down here as
its duties say. There are three places that survive: the notes, the staging log and the stream itself. What is given to
one of them is safe later, and a crash (or another master) keeps it or loses it, each place for itself.

A *process* is one epoch of a flow. It begins with the tokens of the snapshot it is loaded from, commits these, and then
takes snapshots of its own: it stages messages, and when they are safe and the snapshot is complete, it commits them. A
process that has a successor goes on until it hears of that; only its snapshots come to nothing. Any answer may be lost:
then it asks again.

Proven of every state that can be reached:

1. A message is in the stream at most once, ever, also after it was trimmed there.
2. When a process hears that a token is committed, its messages are in the stream, or were.
3. Nothing is in the stream but what belongs to a complete snapshot, and was not dropped.
4. A commit is in the stream wholly, and the messages of a process in their order.
5. A token is lost (`LostOutputError`) only if a later process has begun without it.
6. When nothing is left to happen, all that the last process has completed is in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from railgun.broker.protocol.producers.producer import (
    BusyError,
    FencedError,
    GapError,
    LostOutputError,
    NoProducerError,
    Producer,
    SequenceOverError,
)
from railgun.broker.protocol.producers.registry import Producers
from railgun.errors import ProtocolError
from verification.explorer import Exploration, Explorer, Plain
from verification.rescale.model import Violation

NAME: Final = "flow"


class Token(NamedTuple):
    """What a snapshot keeps of what was staged for it."""

    sequence: int
    values: tuple[str, ...]


class Message(NamedTuple):
    """A message in the stream."""

    value: str
    number: int = 0
    """The producer, if a commit of it ends here."""
    commit: int = 0


@dataclass(frozen=True)
class Case:
    """What may happen."""

    loads: tuple[int, ...] = (0, 0)
    """For each process: which snapshot it is loaded from, counted back from the latest one."""
    rounds: tuple[int, ...] = (1, 1)
    """For each process: how many snapshots it takes."""
    pieces: int = 1
    """Messages it stages for each, one by one."""
    crashes: int = 1
    unheard: int = 0
    """Answers that are lost."""
    trims: int = 0


@dataclass(frozen=True)
class Habits:
    """What a driver does; mutants do it wrong."""

    producers: type[Producers] = Producers
    notes_first: bool = True
    """The unit of a commit is appended when its intent is safe."""
    looks: str = "both"
    """What a note with an intent means: by what is in the stream ("both"), or always that it is "done" or "open"."""
    trims_late: bool = True
    """Nothing is trimmed while a note has an intent."""
    waits: bool = True
    """A commit is done when its unit is safe."""
    stages_first: bool = True
    """A piece is answered when it is safe."""
    waits_for_note: bool = True
    """Begin is answered when its note is safe."""


class Process:
    """One epoch of a flow."""

    __slots__ = ("epoch", "number", "open", "round", "sequence", "staged", "step", "tokens")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.step = "new"
        self.tokens: list[Token] = []  # not known to be committed
        self.number = 0
        self.round = 0
        self.sequence = 0
        self.staged = 0
        self.open: tuple[str, ...] = ()


class Broker(Plain):
    """A broker with one stream that one producer writes to, its three places, and how it fails."""

    __slots__ = (
        "commit", "habits", "left", "lines", "notes", "producers", "staging", "stream", "trimmed",
    )  # fmt: skip
    constant: tuple[str, ...] = ("habits",)

    def __init__(self, habits: Habits, left: dict[str, int]) -> None:
        self.habits, self.left = habits, left
        self.notes: dict[str, Any] = {}
        self.staging: list[tuple[int, int, str]] = []  # producer, sequence, value
        self.stream: list[Message] = []
        self.trimmed = 0  # messages of the stream that are gone
        # what is given to the disks, and not safe yet
        self.lines: dict[str, list[Any]] = {"notes": [], "staging": [], "stream": []}
        # what a crash forgets
        self.producers: Producers | None = None
        self.commit = ""  # how far the commit under way is

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Nobody sends anything."""
        raise AssertionError

    def events(self) -> Sequence[str]:
        """What could happen now."""
        found = [f"{what} safe" for what, line in self.lines.items() if line]
        if self.commit == "noted" and self._may_append():
            found.append("append")
        if self.left["crash"] and self.producers is not None:
            kept = [what for what, line in self.lines.items() if line]
            for mask in range(1 << len(kept)):
                some = [what for n, what in enumerate(kept) if mask >> n & 1]
                found.append("crash " + " ".join(some))
        if self.left["trim"] and self.stream and self._may_trim():
            found.append("trim")
        return [*found, *self._asked()]

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Let it happen."""
        what, _, how = event.partition(" ")
        try:
            if what.isdigit():
                self._ask(int(what), how)
            elif how == "safe":
                self._safe(what)
            elif what == "append":
                self._append()
            elif what == "crash":
                self._crash(how.split())
            else:
                self.left["trim"] -= 1
                self.trimmed += len(self.stream)
                self.stream = []
        except (ProtocolError, KeyError, AssertionError) as error:
            raise Violation("the machine says", repr(error)) from error
        return []

    def _asked(self) -> list[str]:
        """What those who write may do now: their number, and what."""
        raise NotImplementedError

    def _ask(self, who: int, what: str) -> None:
        """One of them does it."""
        raise NotImplementedError

    def _noted(self, name: str, note: Any, keep: tuple[int, ...] | None) -> None:
        """A note is safe; `keep`: that with which an epoch begins."""

    def _show(self, values: list[str]) -> None:
        """Messages are safe in the stream."""
        raise NotImplementedError

    @property
    def _end(self) -> int:
        return self.trimmed + len(self.stream)

    def _note(self, producer: Producer, keep: tuple[int, ...] | None = None) -> None:
        self.lines["notes"].append((producer.name, producer.note(), keep))

    def _may_append(self) -> bool:
        return not self.lines["notes"] or not self.habits.notes_first

    def _append(self) -> None:
        assert self.producers is not None
        producer = self.producers.by_name[NAME]
        assert producer.intent is not None
        number, sequences = producer.intent.number, producer.intent.sequences
        if not producer.staged.keys() >= set(sequences):
            raise Violation("dropped", f"{sequences} are dropped while they are committed")
        mine = [(sequence, v) for n, sequence, v in self.staging if n == producer.number]
        values = [v for named in sequences for sequence, v in mine if sequence == named]
        unit = [Message(value) for value in values]
        unit[-1] = Message(values[-1], producer.number, number)
        self.lines["stream"] += unit
        self.commit = "appended"
        if not self.habits.waits:
            self._is_committed()

    def _safe(self, what: str) -> None:
        line = self.lines[what]
        if what == "notes":
            for name, note, keep in line:
                self.notes[name] = note
                if self.producers is not None:
                    self.producers.noted(note["number"], note["reserved"])
                self._noted(name, note, keep)
        elif what == "staging":
            self.staging += line
        else:
            self.stream += line
            self._show([message.value for message in line])
        self.lines[what] = []
        if what == "stream" and self.producers is not None and self.commit == "appended":
            self._is_committed()

    def _is_committed(self) -> None:
        assert self.producers is not None
        producer = self.producers.by_name[NAME]
        assert producer.intent is not None
        self.producers.committed(NAME, producer.intent.number)
        self._note(producer)
        self.commit = ""

    def _may_trim(self) -> bool:
        settled = all(note["intent"] is None for note in self.notes.values())
        return (
            settled and not self.lines["notes"] and not self.commit
        ) or not self.habits.trims_late

    def _crash(self, kept: Sequence[str]) -> None:
        self.left["crash"] -= 1
        for what in kept:
            self._keep(what)
        self.lines = {what: [] for what in self.lines}
        self.producers, self.commit = None, ""

    def _keep(self, what: str) -> None:
        producers, self.producers = self.producers, None  # it hears nothing any more
        self._safe(what)
        self.producers = producers

    def _loaded(self) -> Producers:
        """The machine, after a restart or failover from what is safe."""
        if self.producers is not None:
            return self.producers
        producers = self.producers = self.habits.producers.load(self.notes)
        for offset, (number, sequence, _) in enumerate(self.staging):
            producers.found(number, sequence, 1, 1, offset)
        for producer in producers.by_name.values():
            if producer.intent is None:
                continue
            number = producer.intent.number
            done = any((m.number, m.commit) == (producer.number, number) for m in self.stream)
            if self.habits.looks != "both":
                done = self.habits.looks == "done"
            if done:
                producers.committed(producer.name, number)
            else:
                producers.abandoned(producer.name, number)
            self._note(producer)
        return producers


class World(Broker):
    """A broker, the snapshots of a flow, and its processes."""

    __slots__ = ("case", "committed", "complete", "dropped", "processes", "seen")
    constant: tuple[str, ...] = ("case", "habits")

    def __init__(self, case: Case, habits: Habits) -> None:
        left = {"crash": case.crashes, "unheard": case.unheard, "trim": case.trims}
        super().__init__(habits, left)
        self.case = case
        self.processes = [Process(n + 1) for n in range(len(case.loads))]
        # for the proof
        self.complete: list[tuple[Token, ...]] = []
        self.dropped: set[int] = set()
        self.committed: set[int] = set()
        self.seen: list[str] = []

    def _asked(self) -> list[str]:
        found = []
        for at, process in enumerate(self.processes):
            if process.step in ("over", "fenced"):
                continue
            if process.step == "new":
                if at == 0 or self.processes[at - 1].step != "new":
                    found.append(f"{at} start")
                continue
            if self.lines["notes"] and process.step in ("begin", "open", "commit"):
                continue  # it stands behind what is being written
            found.append(f"{at} {process.step}")
            if self.left["unheard"] and process.step in ("begin", "open", "stage", "commit"):
                found.append(f"{at} {process.step} unheard")
        return found

    def _ask(self, who: int, what: str) -> None:
        process = self.processes[who]
        step, _, how = what.partition(" ")
        unheard = bool(how)
        if unheard:
            self.left["unheard"] -= 1
        if step == "start":
            self._start(process)
        elif step == "complete":
            self._complete(process)
        else:
            try:
                getattr(self, f"_{step}")(process, unheard)
            except FencedError:
                if self._is_last(process):
                    raise Violation("fenced", f"epoch {process.epoch} is the last") from None
                process.step = "fenced"
            except BusyError:
                pass
            except LostOutputError as error:
                lost = [t for t in process.tokens if t.sequence not in self.committed]
                if not all(token.sequence in self.dropped for token in lost):
                    raise Violation("lost output", str(error)) from error
                process.step = "over"
            except (GapError, NoProducerError, SequenceOverError) as error:
                raise Violation("refused", str(error)) from error

    def _is_last(self, process: Process) -> bool:
        return all(one.step == "new" for one in self.processes[process.epoch :])

    def _start(self, process: Process) -> None:
        back = self.case.loads[process.epoch - 1]
        if len(self.complete) > back:
            process.tokens = list(self.complete[-1 - back])
        process.step = "begin"

    def _begin(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        before = producers.by_name.get(NAME)
        before_note = None if before is None else before.note()
        keep = [token.sequence for token in process.tokens]
        producer = producers.begin(NAME, process.epoch, 0, keep)
        if before_note != producer.note():
            self._note(producer, tuple(keep))
        for sequence in producer.staged:
            if sequence not in keep and sequence < producer.since:
                raise Violation("kept", f"sequence {sequence} is staged, and nobody wants it")
        if unheard:
            return
        if self.habits.waits_for_note and before_note != producer.note():
            return  # it asks again, when the note is safe
        process.number = producer.number
        process.step = "commit" if process.tokens else self._next(process)

    def _next(self, process: Process) -> str:
        return "open" if process.round < self.case.rounds[process.epoch - 1] else "over"

    def _open(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        sequence, has_to_note = producers.open(NAME, process.epoch, 0)
        if any(sequence == token.sequence for tokens in self.complete for token in tokens):
            raise Violation("sequence", f"{sequence} is given twice")
        if has_to_note:
            self._note(producers.by_name[NAME])
            return  # it asks again: this one is never used
        if unheard:
            return
        process.round += 1
        process.sequence, process.staged, process.step = sequence, 0, "stage"
        values = range(self.case.pieces)
        process.open = tuple(f"{process.epoch}.{process.round}.{n}" for n in values)

    def _stage(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        at, offset = process.staged, len(self.staging) + len(self.lines["staging"])
        where = process.number, process.epoch, process.sequence
        if producers.staged(*where, at, 1, 1, offset):
            piece = (process.number, process.sequence, process.open[at])
            if any(piece in line for line in (self.staging, self.lines["staging"])):
                raise Violation("staged twice", f"{piece}")
            self.lines["staging"].append(piece)
            if self.habits.stages_first:
                return
        if unheard or (self.lines["staging"] and self.habits.stages_first):
            return
        process.staged += 1
        if process.staged == len(process.open):
            process.step = "complete"

    def _complete(self, process: Process) -> None:
        """The snapshot is complete; unless another process has begun, which keeps it from becoming so."""
        if not self._is_last(process):
            process.step = "commit" if process.tokens else "fenced"
            return
        process.tokens.append(Token(process.sequence, process.open))
        self.complete.append(tuple(process.tokens))
        process.step = "commit"

    def _commit(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        if self.lines["staging"]:
            return  # it is not known whether all that is staged is safe
        counts = {token.sequence: len(token.values) for token in process.tokens}
        intent = producers.commit(NAME, process.epoch, counts, self._end, 0)
        if intent is not None:
            self._note(producers.by_name[NAME])
            self.commit = "noted"
            return
        if unheard:
            return
        for token in process.tokens:
            if any(value not in self.seen for value in token.values):
                raise Violation("silent loss", f"{token} is said to be committed")
        process.tokens = []
        process.step = self._next(process) if self._is_last(process) else "fenced"

    def _noted(self, name: str, note: Any, keep: tuple[int, ...] | None) -> None:
        if keep is not None:  # a process begins without what it does not keep
            known = {token.sequence for tokens in self.complete for token in tokens}
            below = {one for one in known - self.committed if one < note["since"]}
            self.dropped |= below - set(keep)

    def _show(self, values: list[str]) -> None:
        for value in values:
            tokens = [t for tokens in self.complete for t in tokens if value in t.values]
            if value in self.seen:
                raise Violation("twice", f"{value} is in the stream a second time")
            if not tokens:
                raise Violation("never complete", f"{value} belongs to no complete snapshot")
            if tokens[0].sequence in self.dropped:
                raise Violation("dropped", f"{value} was dropped, and is in the stream")
            if any(
                earlier not in values and earlier not in self.seen for earlier in tokens[0].values
            ):
                raise Violation("half", f"{value} is in the stream without the rest of {tokens[0]}")
            epoch = value.split(".")[0]
            if any(one > value for one in self.seen if one.split(".")[0] == epoch):
                raise Violation("order", f"{value} comes after {self.seen}")
            self.seen.append(value)
            self.committed.add(tokens[0].sequence)


def judge(nodes: Sequence[Any]) -> Violation | None:
    """What must hold when nothing is left to happen."""
    world: World = nodes[0]
    last = world.processes[-1]
    if last.step != "over":
        return Violation("stuck", f"the last process is at {last.step!r}")
    for tokens in world.complete:
        for token in tokens:
            if token.sequence not in world.dropped and any(
                v not in world.seen for v in token.values
            ):
                return Violation("silent loss", f"{token} is not in the stream in the end")
    return None


def explore(case: Case, habits: Habits | None = None, limit: int | None = None) -> Exploration:
    """Visit every state of a case."""
    return Explorer([World(case, habits or Habits())], judge).run(limit=limit)


CASES: Final = (
    Case(loads=(0,), rounds=(2,), crashes=2),
    Case(loads=(0, 0), rounds=(1, 1), pieces=2, crashes=1, unheard=1),
    Case(loads=(0, 0), rounds=(1, 1), crashes=2, trims=1),
    Case(loads=(0, 0), rounds=(2, 2), crashes=1),
    Case(loads=(0, 1, 0), rounds=(1, 1, 1), crashes=1),
    Case(loads=(0, 1, 0), rounds=(2, 1, 0), crashes=0),
)
"""What is explored each time."""
LARGE: Final = (
    Case(loads=(0, 0), rounds=(2, 1), pieces=2, crashes=2, unheard=1),
    Case(loads=(0, 0), rounds=(2, 2), crashes=2, trims=1),
    Case(loads=(0, 0, 0), rounds=(1, 1, 1), crashes=2),
    Case(loads=(0, 1, 0), rounds=(2, 2, 1), crashes=1, trims=1),
)
"""And if there is more time."""
