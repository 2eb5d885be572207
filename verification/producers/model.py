"""Explore producers of a stream: flows that stage and commit, their successors, and a broker that fails at any point.

The state machine is that of production (`broker.protocol.producers.registry`); this module models the driver around it,
by its duties. Three stores survive a crash: the notes, the staging log and the stream itself. What is written to a
store becomes safe later; a crash (or a new master) keeps or loses what is not safe yet, in each store independently.

A *process* is one epoch of a flow. It begins with the tokens of the snapshot it is loaded from, commits these, and then
takes snapshots of its own: it stages messages, and when they are safe and the snapshot is complete, it commits them. It
may drop what it has staged instead. Processes may also be the transactions of one client, which share an epoch. A
process that has a successor goes on until it hears of that; only its snapshots never become complete. Any answer may be
lost: then the process asks again.

Proven of every state that can be reached:

1. A message is in the stream at most once, ever, also after it was trimmed there.
2. When a process hears that a token is committed, its messages are in the stream, or were.
3. Every message in the stream belongs to a complete snapshot, and was not dropped.
4. A commit is in the stream wholly, and the messages of a process are in their order.
5. A token is lost (`LostOutputError`) only if a later process has begun without it, or the producer was forgotten.
6. No sequence is given twice, also if the producer is forgotten and begins anew.
7. Messages that were dropped by their sequence are never staged again once the drop was answered.
8. Staged messages that were copied to the end of the staging log hold nothing back there.
9. When no event is left, all that the last process has completed is in the stream.
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
    """What a snapshot keeps about one staged sequence."""

    sequence: int
    values: tuple[str, ...]


class Piece(NamedTuple):
    """A message in the staging log."""

    number: int
    """The producer."""
    sequence: int
    value: str
    anew: bool = False
    """Whether the piece begins a copy of all that was staged before for the sequence."""


class Message(NamedTuple):
    """A message in the stream."""

    value: str
    number: int = 0
    """The producer, if its commit ends here."""
    commit: int = 0


@dataclass(frozen=True)
class Case:
    """What may happen in an exploration."""

    loads: tuple[int, ...] = (0, 0)
    """For each process: which snapshot it is loaded from, counted back from the latest one."""
    rounds: tuple[int, ...] = (1, 1)
    """For each process: how many snapshots it takes."""
    pieces: int = 1
    """Messages that it stages for each snapshot, one by one."""
    crashes: int = 1
    unheard: int = 0
    """Answers that are lost."""
    trims: int = 0
    forgets: int = 0
    """How often the producer is forgotten."""
    drops: int = 0
    """How often a process drops what it has staged, instead of completing its snapshot."""
    moves: int = 0
    """How often what is staged is copied to the end of the staging log."""
    transactions: bool = False
    """Whether the processes are transactions of one client: all of one epoch, which drops nothing."""


@dataclass(frozen=True)
class Habits:
    """What the driver does; mutants change one of these."""

    producers: type[Producers] = Producers
    notes_first: bool = True
    """The unit of a commit is appended when its intent is safe."""
    looks: str = "both"
    """How to settle an intent: look for its unit in the stream ("both"), or always take it as "done" or "open"."""
    trims_late: bool = True
    """Nothing is trimmed while a note has an intent."""
    waits: bool = True
    """A commit is done when its unit is safe."""
    stages_first: bool = True
    """A piece is answered when it is safe."""
    waits_for_note: bool = True
    """Begin is answered when its note is safe."""
    moves_safely: bool = True
    """What is staged counts as moved when its copy is safe."""
    notes_stream: bool = True
    """The note of the stream is written with that of a producer."""


class Process:
    """One epoch of a flow."""

    __slots__ = ("at", "epoch", "number", "open", "round", "sequence", "staged", "step", "tokens")

    def __init__(self, at: int, epoch: int) -> None:
        self.at, self.epoch = at, epoch
        self.step = "new"
        self.tokens: list[Token] = []  # those not known to be committed
        self.number = 0
        self.round = 0
        self.sequence = 0
        self.staged = 0
        self.open: tuple[str, ...] = ()


class Broker(Plain):
    """A broker with one stream that one producer writes to, its three stores, and its failures."""

    __slots__ = (
        "commit", "gone", "habits", "left", "lines", "moving", "notes", "producers", "staging", "stream",
        "stream_note", "trimmed",
    )  # fmt: skip
    constant: tuple[str, ...] = ("habits",)

    def __init__(self, habits: Habits, left: dict[str, int]) -> None:
        self.habits = habits
        self.left = {"forget": 0, "move": 0, "purge": 0} | left
        self.notes: dict[str, Any] = {}
        self.stream_note: dict[str, int] = {}
        self.staging: list[Piece] = []
        self.gone = 0  # messages that were purged from the staging log
        self.stream: list[Message] = []
        self.trimmed = 0  # messages that were trimmed from the stream
        # Writes that are not safe yet, by store:
        self.lines: dict[str, list[Any]] = {"notes": [], "staging": [], "stream": []}
        # State that a crash loses:
        self.producers: Producers | None = None
        self.commit = ""  # the step of the commit under way
        self.moving: tuple[int, int, int] | None = None  # a copy: producer, sequence, offset

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Do nothing: nodes of this model send no messages."""
        raise AssertionError

    def events(self) -> Sequence[str]:
        """Return the events that could happen now."""
        events = [f"{what} safe" for what, line in self.lines.items() if line]
        if self.commit == "noted" and self._may_append():
            events.append("append")
        if self.left["crash"] and self.producers is not None:
            kept = [what for what, line in self.lines.items() if line]
            for mask in range(1 << len(kept)):
                subset = [what for n, what in enumerate(kept) if mask >> n & 1]
                events.append("crash " + " ".join(subset))
        if self.left["trim"] and self.stream and self._may_trim():
            events.append("trim")
        if self.left["forget"] and self._may_forget():
            events.append("forget")
        if self.left["move"] and self.moving is None and not self.commit and self._oldest():
            events.append("move")
        if self.left["purge"] and not self.lines["notes"] and self._needed_from() > self.gone:
            events.append("purge")
        return [*events, *self._asked()]

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Let `event` happen, and check what follows from it."""
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
            elif what == "forget":
                self._forget()
            elif what == "move":
                self._move()
            elif what == "purge":
                self.left["purge"] -= 1
                needed = self._needed_from()
                self.staging, self.gone = self.staging[needed - self.gone :], needed
            else:
                self.left["trim"] -= 1
                self.trimmed += len(self.stream)
                self.stream = []
        except (ProtocolError, KeyError, AssertionError) as error:
            raise Violation("the machine says", repr(error)) from error
        return []

    def _asked(self) -> list[str]:
        """Return the calls that writers may make now, each as the writer's number and the call."""
        raise NotImplementedError

    def _ask(self, who: int, what: str) -> None:
        """Let writer `who` make a call."""
        raise NotImplementedError

    def _noted(self, name: str, note: Any, keep: tuple[int, ...] | None) -> None:
        """Hear that a note is safe; `keep`: the sequences to keep if an epoch begins with it."""

    def _show(self, values: list[str]) -> None:
        """Hear that messages are safe in the stream."""
        raise NotImplementedError

    @property
    def _end(self) -> int:
        return self.trimmed + len(self.stream)

    def _note(self, producer: Producer, keep: tuple[int, ...] | None = None) -> None:
        assert self.producers is not None
        stream_note = self.producers.stream_note()
        self.lines["notes"].append((producer.name, producer.note(), keep, stream_note))

    def _may_forget(self) -> bool:
        producer = None if self.producers is None else self.producers.by_name.get(NAME)
        idle = not self.lines["notes"] and not self.commit
        return producer is not None and producer.intent is None and idle

    def _forget(self) -> None:
        """Forget the producer, while no commit of it is under way."""
        self.left["forget"] -= 1
        assert self.producers is not None
        self.producers.forget(NAME)
        self.lines["notes"].append((NAME, None, None, self.producers.stream_note()))

    @property
    def _staging_end(self) -> int:
        return self.gone + len(self.staging) + len(self.lines["staging"])

    def _needed_from(self) -> int:
        """Return the first offset of the staging log that is needed, among those that are safe."""
        if self.producers is None:
            return self.gone
        return self.producers.staged_from(self.gone + len(self.staging))

    def _oldest(self) -> tuple[int, int] | None:
        """Return the producer and sequence of what is staged first, or None."""
        producer = None if self.producers is None else self.producers.by_name.get(NAME)
        if producer is None or not producer.staged:
            return None
        first = min(
            producer.staged, key=lambda sequence: (producer.staged[sequence].first, sequence)
        )
        return producer.number, first

    def _pieces(self, number: int, sequence: int, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces that are staged for a sequence: a copy replaces all pieces before it."""
        staged: list[Piece] = []
        for piece in pieces:
            if (piece.number, piece.sequence) == (number, sequence):
                staged = [piece] if piece.anew else [*staged, piece]
        return staged

    def _move(self) -> None:
        """Copy what is staged first to the end of the staging log, after all pieces on their way there."""
        self.left["move"] -= 1
        oldest = self._oldest()
        assert oldest is not None
        pieces = self._pieces(*oldest, [*self.staging, *self.lines["staging"]])
        copies = [piece._replace(anew=not n) for n, piece in enumerate(pieces)]
        self.moving = (*oldest, self._staging_end)
        self.lines["staging"] += copies
        if not self.habits.moves_safely:
            self._moved()

    def _moved(self) -> None:
        assert self.producers is not None
        assert self.moving is not None
        number, sequence, offset = self.moving
        self.moving = None
        self.producers.moved(number, sequence, offset)
        producer = self.producers.numbered(number)
        staged = None if producer is None else producer.staged.get(sequence)
        if staged is not None and staged.first < offset:
            raise Violation("held back", f"sequence {sequence} was copied to {offset}: {staged}")

    def _may_append(self) -> bool:
        return not self.lines["notes"] or not self.habits.notes_first

    def _append(self) -> None:
        assert self.producers is not None
        producer = self.producers.by_name[NAME]
        assert producer.intent is not None
        number, sequences = producer.intent.number, producer.intent.sequences
        if not producer.staged.keys() >= set(sequences):
            raise Violation("dropped", f"{sequences} are dropped while they are committed")
        named = [self._pieces(producer.number, sequence, self.staging) for sequence in sequences]
        values = [piece.value for pieces in named for piece in pieces]
        unit = [Message(value) for value in values]
        unit[-1] = Message(values[-1], producer.number, number)
        self.lines["stream"] += unit
        self.commit = "appended"
        if not self.habits.waits:
            self._is_committed()

    def _safe(self, what: str) -> None:
        line = self.lines[what]
        if what == "notes":
            for name, note, keep, stream_note in line:
                if self.habits.notes_stream:
                    self.stream_note = stream_note
                if note is None:
                    self.notes.pop(name, None)
                else:
                    self.notes[name] = note
                if self.producers is not None and note is not None:
                    self.producers.noted(note["number"], note["reserved"])
                self._noted(name, note, keep)
        elif what == "staging":
            self.staging += line
            if self.moving is not None and self.producers is not None:
                self._moved()
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
        self.producers, self.commit, self.moving = None, "", None

    def _keep(self, what: str) -> None:
        producers, self.producers = self.producers, None  # the state machine hears nothing any more
        self._safe(what)
        self.producers = producers

    def _loaded(self) -> Producers:
        """Return the state machine, after loading it from what is safe if the broker has restarted."""
        if self.producers is not None:
            return self.producers
        producers = self.producers = self.habits.producers.load(self.notes, self.stream_note)
        for offset, piece in enumerate(self.staging, self.gone):
            producers.found(piece.number, piece.sequence, 1, 1, offset, anew=piece.anew)
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

    __slots__ = (
        "case", "committed", "complete", "dropped", "given_up", "processes", "renounced", "seen",
    )  # fmt: skip
    constant: tuple[str, ...] = ("case", "habits")

    def __init__(self, case: Case, habits: Habits) -> None:
        left = {
            "crash": case.crashes, "unheard": case.unheard, "trim": case.trims, "forget": case.forgets,
            "drop": case.drops, "move": case.moves, "purge": case.moves,
        }  # fmt: skip
        super().__init__(habits, left)
        self.case = case
        epochs = [1 if case.transactions else n + 1 for n in range(len(case.loads))]
        self.processes = [Process(at, epoch) for at, epoch in enumerate(epochs)]
        # For the proof:
        self.complete: list[tuple[Token, ...]] = []
        self.dropped: set[int] = set()
        self.given_up: set[int] = set()  # sequences that may be lost, as the producer was forgotten
        self.renounced: set[int] = set()  # sequences whose drop was answered
        self.committed: set[int] = set()
        self.seen: list[str] = []

    def _asked(self) -> list[str]:
        calls = []
        for at, process in enumerate(self.processes):
            if process.step in ("over", "fenced"):
                continue
            if process.step == "new":
                if at == 0 or self.processes[at - 1].step != "new":
                    calls.append(f"{at} start")
                continue
            if self.lines["notes"] and process.step in ("begin", "open", "commit", "drop", "late"):
                continue  # the call waits for the note that is being written
            calls.append(f"{at} {process.step}")
            if process.step == "complete" and self.left["drop"]:
                calls.append(f"{at} drop")
            if self.left["unheard"] and process.step in ("begin", "open", "stage", "commit"):
                calls.append(f"{at} {process.step} unheard")
        return calls

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
                excused = self.dropped | self.given_up
                if not all(token.sequence in excused for token in lost):
                    raise Violation("lost output", str(error)) from error
                process.step = "over"
            except NoProducerError as error:
                if self.left["forget"] == self.case.forgets:
                    raise Violation("refused", str(error)) from error
                process.step = "over"
            except (GapError, SequenceOverError) as error:
                raise Violation("refused", str(error)) from error

    def _is_last(self, process: Process) -> bool:
        return self.case.transactions or all(
            later.step == "new" for later in self.processes[process.at + 1 :]
        )

    def _start(self, process: Process) -> None:
        back = self.case.loads[process.at]
        if len(self.complete) > back and not self.case.transactions:
            process.tokens = list(self.complete[-1 - back])
        process.step = "begin"

    def _begin(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        before = producers.by_name.get(NAME)
        before_note = None if before is None else before.note()
        keep = [token.sequence for token in process.tokens]
        kept = None if self.case.transactions else keep
        producer = producers.begin(NAME, process.epoch, 0, kept)
        if before_note != producer.note():
            self._note(producer, None if kept is None else tuple(kept))
        for sequence in producer.staged:
            if sequence not in keep and sequence < producer.since:
                raise Violation("kept", f"sequence {sequence} is staged, and was not to be kept")
        if unheard:
            return
        if self.habits.waits_for_note and before_note != producer.note():
            return  # the process asks again, when the note is safe
        process.number = producer.number
        process.step = "commit" if process.tokens else self._next(process)

    def _next(self, process: Process) -> str:
        return "open" if process.round < self.case.rounds[process.at] else "over"

    def _open(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        sequence, has_to_note = producers.open(NAME, process.epoch, 0)
        if any(sequence == token.sequence for tokens in self.complete for token in tokens):
            raise Violation("sequence", f"{sequence} is given twice")
        if has_to_note:
            self._note(producers.by_name[NAME])
            return  # the process asks again: this sequence is never used
        if unheard:
            return
        process.round += 1
        process.sequence, process.staged, process.step = sequence, 0, "stage"
        values = range(self.case.pieces)
        process.open = tuple(f"{process.at}.{process.round}.{n}" for n in values)

    def _stage(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        at, offset = process.staged, self._staging_end
        where = process.number, process.epoch, process.sequence
        if producers.staged(*where, at, 1, 1, offset):
            piece = Piece(process.number, process.sequence, process.open[at])
            if any(piece[:3] == one[:3] for one in [*self.staging, *self.lines["staging"]]):
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
        """Complete the snapshot, unless another process has begun, which prevents that."""
        if not self._is_last(process):
            process.step = "commit" if process.tokens else "fenced"
            return
        process.tokens.append(Token(process.sequence, process.open))
        self.complete.append(tuple(process.tokens))
        process.step = "commit"

    def _drop(self, process: Process, unheard: bool) -> None:
        """Drop what was staged; the process hears of it when the note is safe."""
        if process.step == "complete":
            self.left["drop"] -= 1
            process.step = "drop"
        producers = self._loaded()
        before = producers.by_name.get(NAME)
        before_note = None if before is None else before.note()
        producers.drop(NAME, process.epoch, [process.sequence], 0)
        if before_note != producers.by_name[NAME].note():
            self._note(producers.by_name[NAME])
            return  # the process asks again, when the note is safe
        self.renounced.add(process.sequence)
        process.step = "late"

    def _late(self, process: Process, unheard: bool) -> None:
        """Stage a piece of a sequence that was dropped: it must be refused."""
        try:
            self._loaded().staged(
                process.number, process.epoch, process.sequence, 0, 1, 1, self._staging_end
            )
        except SequenceOverError:
            process.step = "commit" if process.tokens else self._next(process)
        else:
            raise Violation(
                "dropped", f"sequence {process.sequence} takes more after it was dropped"
            )

    def _forget(self) -> None:
        super()._forget()
        self.given_up |= {token.sequence for tokens in self.complete for token in tokens}
        self.given_up |= {process.sequence for process in self.processes}

    def _loaded(self) -> Producers:
        producers = super()._loaded()
        producer = producers.by_name.get(NAME)
        if producer is not None and self.renounced & producer.staged.keys():
            raise Violation(
                "dropped", f"{self.renounced} were dropped, and are staged: {producer.staged}"
            )
        return producers

    def _commit(self, process: Process, unheard: bool) -> None:
        producers = self._loaded()
        if self.lines["staging"]:
            return  # staged messages may not be safe yet
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
        if keep is not None:  # a process begins, and drops what it does not keep
            complete = {token.sequence for tokens in self.complete for token in tokens}
            below = {number for number in complete - self.committed if number < note["since"]}
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
    """Check what must hold when no event is left."""
    world: World = nodes[0]
    last = world.processes[-1]
    if last.step != "over":
        return Violation("stuck", f"the last process is at {last.step!r}")
    for tokens in world.complete:
        for token in tokens:
            if token.sequence not in world.dropped | world.given_up and any(
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
    Case(loads=(0, 0), rounds=(1, 1), crashes=1, forgets=1),
    Case(loads=(0, 0), rounds=(1, 1), crashes=1, forgets=1, transactions=True),
    Case(loads=(0, 0), rounds=(1, 1), crashes=1, drops=1, transactions=True),
    Case(loads=(0,), rounds=(2,), pieces=2, crashes=1, drops=1, moves=1),
    Case(loads=(0, 0), rounds=(1, 1), crashes=1, moves=1),
)
"""Cases for every run."""
LARGE: Final = (
    Case(loads=(0, 0), rounds=(2, 1), pieces=2, crashes=2, unheard=1),
    Case(loads=(0, 0), rounds=(2, 2), crashes=2, trims=1),
    Case(loads=(0, 0, 0), rounds=(1, 1, 1), crashes=2),
    Case(loads=(0, 1, 0), rounds=(2, 2, 1), crashes=1, trims=1),
    Case(loads=(0, 0), rounds=(2, 1), crashes=1, unheard=1, forgets=2, transactions=True),
    Case(loads=(0, 0), rounds=(1, 1), pieces=2, crashes=2, drops=1, moves=2),
)
"""Further cases for long runs."""
