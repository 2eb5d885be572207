"""Explore a query that writes to a stream: micro-batches with labels, sessions, tasks that run twice.

A query models Spark's streaming driver. A *run* of the query has a session of its own. It takes the micro-batches that
its checkpoint does not list as done, one after the other. Each micro-batch has tasks; a task may have two attempts,
which open a sequence each and stage the same rows. When every task has a finished attempt, the run commits these
attempts, with the number of the micro-batch as the label. Then it writes into the checkpoint that the micro-batch is
done. The other attempt goes on, also much later. A micro-batch without rows is passed over, or left to the range of
labels of the next commit.

A run may have a successor at any time, with the next session. The successor begins with the checkpoint, or with an
older copy of it: so it repeats micro-batches that were committed, with other sequences, and perhaps with rows where
there were none. The old run goes on until it hears of that; a run that died is a run that does nothing until the end.
The broker is that of `producers.model`, and fails in the same ways. Any answer may be lost.

Proven of every state that can be reached:

1. The rows of a label are in the stream at most once, ever, also after they were trimmed there; and all of them, as
   one commit, in the order of the tasks, from the attempts that were committed, and from no others.
2. When a run or attempt hears that a label is done, the label's rows are in the stream, or were trimmed, or the label
   counts as done without rows.
3. A label that counts as done without rows never has rows later. Labels are in the stream in their order.
4. A run commits nothing once its successor has begun; the last run is never refused, and loses nothing.
5. No sequence is given twice.
6. What was staged for a label is dropped when the label is committed, except sequences whose label the broker forgot
   in a crash: the next session drops them, or their age does.
7. When no event is left, all micro-batches of the last run are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from railgun.broker.protocol.producers.producer import (
    BusyError,
    FencedError,
    GapError,
    LabelForgottenError,
    LostOutputError,
    NoProducerError,
    SequenceOverError,
)
from railgun.broker.protocol.producers.registry import Producers
from verification.explorer import Exploration, Explorer
from verification.fork import fork
from verification.producers.model import NAME, Broker, Habits, Piece
from verification.rescale.model import Violation

LATE: Final = 1_000
"""A time (µs) at which all that is staged is too old."""


@dataclass(frozen=True)
class Case:
    """What may happen in an exploration."""

    runs: tuple[tuple[int, ...], ...] = ((1,), (1,))
    """For each run and micro-batch: how many rows each task has."""
    back: tuple[int, ...] = (0, 0)
    """For each run: how many micro-batches its copy of the checkpoint is behind."""
    tasks: int = 1
    attempts: tuple[int, ...] = (1, 1)
    """For each run: the attempts of the first task. Other tasks have one attempt."""
    skips: bool = False
    """A micro-batch without rows is not passed over, but belongs to the labels of the next commit."""
    joins: bool = False
    """Each attempt begins with the session of its run, as processes do that know only the session."""
    plain: bool = False
    """Sequences are opened without a label."""
    crashes: int = 1
    unheard: int = 0
    trims: int = 0


class Asked(NamedTuple):
    """What a run commits: rows in their order, and the first label to count as committed with them."""

    values: tuple[str, ...]
    since: int


class Attempt:
    """One attempt of one task."""

    __slots__ = ("label", "name", "sequence", "staged", "step", "task")

    def __init__(self, label: int, task: int, name: str, step: str) -> None:
        self.label, self.task, self.name, self.step = label, task, name, step
        self.sequence = self.staged = 0


class Run:
    """One run of the query."""

    __slots__ = ("attempts", "epoch", "label", "named", "number", "session", "since", "step")

    def __init__(self, session: str) -> None:
        self.session = session
        self.step = "new"
        self.epoch = self.number = 0
        self.label = self.since = 0
        self.attempts: list[Attempt] = []
        self.named: dict[int, int] = {}
        """The sequences to commit, each with its number of messages."""


class World(Broker):
    """A broker, a checkpoint, and the runs of a query."""

    __slots__ = (
        "asked", "case", "checkpoint", "empty", "given", "here", "passed", "runs", "shown", "turn",
    )  # fmt: skip
    constant: tuple[str, ...] = ("case", "habits")

    def __init__(self, case: Case, habits: Habits) -> None:
        left = {"crash": case.crashes, "unheard": case.unheard, "trim": case.trims}
        super().__init__(habits, left)
        self.case = case
        self.runs = [Run(f"run-{n}") for n in range(len(case.runs))]
        self.checkpoint = 0  # the first micro-batch that is not noted as done
        self.turn = False  # whether a note of beginning or passing over is being written
        # For the proof:
        self.asked: dict[int, list[Asked]] = {}
        self.shown: list[int] = []
        self.empty: set[int] = set()  # labels that a run has asked to pass over
        self.passed: set[int] = set()  # labels that count as done without rows
        self.given: set[int] = set()
        self.here: dict[int, int] = {}  # labels by sequence, of those opened since the last crash

    # ------------------------------------------------------------ what may happen

    def _asked(self) -> list[str]:
        calls: list[str] = []
        for at, run in enumerate(self.runs):
            if run.step == "new":
                if at == 0 or self.runs[at - 1].step != "new":
                    calls.append(f"{at} start")
            elif run.step in ("begin", "pass", "commit"):
                if not self.turn and (run.step != "begin" or self._follows(at)):
                    calls.append(f"{at} {run.step}")
            elif run.step == "check":
                calls.append(f"{at} check")
            for n, attempt in enumerate(run.attempts):
                if attempt.step == "told" and not self._covers(attempt.sequence):
                    continue
                if attempt.step == "join" and self.turn:
                    continue
                if n and run.attempts[n - 1].step in ("join", "open"):
                    continue  # attempts begin one after the other
                if attempt.step not in ("done", "over"):
                    calls.append(f"{at} {attempt.step} {n}")
        if self.left["unheard"]:
            ask = ("begin", "pass", "commit", "open", "stage")
            calls += [f"{call} unheard" for call in calls if call.split()[1] in ask]
        return calls

    def _follows(self, at: int) -> bool:
        """Return whether the session before has begun: sessions are ordered by when they first begin."""
        note = self.notes.get(NAME, {"session": "", "past": []})
        return at == 0 or self.runs[at - 1].session in (note["session"], *note["past"])

    def _covers(self, sequence: int) -> bool:
        return self.producers is not None and sequence < self.producers.by_name[NAME].covered

    def _ask(self, who: int, what: str) -> None:
        words = what.split()
        unheard = words[-1] == "unheard"
        if unheard:
            self.left["unheard"] -= 1
            words.pop()
        run = self.runs[who]
        attempt = run.attempts[int(words[1])] if len(words) > 1 else None
        try:
            if attempt is None:
                getattr(self, f"_{words[0]}")(run, unheard)
            else:
                getattr(self, f"_{words[0]}")(run, attempt, unheard)
        except FencedError:
            if all(one.step == "new" for one in self.runs[who + 1 :]):
                raise Violation("fenced", f"{run.session} is the last") from None
            if attempt is None:
                run.step = "fenced"
            else:
                attempt.step = "over"
        except BusyError:
            pass
        except (SequenceOverError, GapError) as error:
            if attempt is None:
                raise Violation("refused", str(error)) from error
            self._hears_done(attempt.label, str(error))
            attempt.step = "over"
            if attempt.label == run.label and run.step == "tasks":
                run.step, run.since = "check", run.label + 1
        except (LostOutputError, NoProducerError, LabelForgottenError) as error:
            raise Violation("refused", str(error)) from error
        self._prune(run)

    def _prune(self, run: Run) -> None:
        """Forget attempts that do nothing more."""
        if run.step == "fenced":
            run.attempts = [one for one in run.attempts if one.step not in ("done", "over")]
        else:
            run.attempts = [
                one
                for one in run.attempts
                if one.step not in ("done", "over")
                or (one.label == run.label and run.step == "tasks")
            ]

    def _start(self, run: Run, unheard: bool) -> None:
        back = self.case.back[self.runs.index(run)]
        run.label = run.since = max(0, self.checkpoint - back)
        run.step = "begin"

    def _begun(self, run: Run) -> Any:
        """Begin with the session of a run; None: the run asks again when the note is safe."""
        producers = self._loaded()
        before = producers.by_name.get(NAME)
        note_before = None if before is None else before.note()
        producer = producers.begin_session(NAME, run.session, 0, lifetime=LATE // 2)
        if note_before != producer.note():
            self._note(producer)
            self.turn = True
            if self.habits.waits_for_note:
                return None
        return producer

    def _begin(self, run: Run, unheard: bool) -> None:
        producer = self._begun(run)
        if unheard or producer is None:
            return
        if producer.staged:
            raise Violation("kept", f"{producer.staged} is staged, and was to be dropped")
        run.number, run.epoch = producer.number, producer.epoch
        self._take(run)

    def _take(self, run: Run) -> None:
        """Take the next micro-batch."""
        at, batches = self.runs.index(run), self.case.runs[self.runs.index(run)]
        if run.label == len(batches):
            run.step = "over"
        elif batches[run.label]:
            run.step = "tasks"
            first = "join" if self.case.joins else "open"
            for task in range(self.case.tasks):
                for n in range(1 if task else self.case.attempts[at]):
                    run.attempts.append(Attempt(run.label, task, f"{at}.{n}", first))
        else:
            run.step = "check" if self.case.skips else "pass"

    # ------------------------------------------------------------ attempts

    def _join(self, run: Run, attempt: Attempt, unheard: bool) -> None:
        producer = self._begun(run)
        if producer is None:
            raise Violation("session", f"{run.session} begins once more, and something changes")
        if producer.epoch != run.epoch:
            raise Violation("session", f"{run.session} had epoch {run.epoch}: {producer.epoch}")
        attempt.step = "open"

    def _open(self, run: Run, attempt: Attempt, unheard: bool) -> None:
        producers = self._loaded()
        label = None if self.case.plain else attempt.label
        sequence, has_to_note = producers.open(NAME, run.epoch, 0, label)
        if has_to_note:
            self._note(producers.by_name[NAME])
        if label is not None:
            self.here[sequence] = label
        if unheard:
            return
        attempt.sequence, attempt.step = sequence, "told"
        if not has_to_note:
            self._told(run, attempt, False)

    def _told(self, run: Run, attempt: Attempt, unheard: bool) -> None:
        """Tell an attempt its sequence, once a note that covers it is safe."""
        if attempt.sequence in self.given:
            raise Violation("sequence", f"{attempt.sequence} is given twice")
        self.given.add(attempt.sequence)
        attempt.step = "stage"

    def _rows(self, run: Run, attempt: Attempt) -> list[str]:
        rows = self.case.runs[self.runs.index(run)][attempt.label]
        return [f"{attempt.label}.{attempt.task}.{n}@{attempt.name}" for n in range(rows)]

    def _stage(self, run: Run, attempt: Attempt, unheard: bool) -> None:
        producers = self._loaded()
        at, offset = attempt.staged, self._staging_end
        rows = self._rows(run, attempt)
        if producers.staged(run.number, run.epoch, attempt.sequence, at, 1, 1, offset):
            piece = Piece(run.number, attempt.sequence, rows[at])
            if any(piece in line for line in (self.staging, self.lines["staging"])):
                raise Violation("staged twice", f"{piece}")
            producer = producers.by_name[NAME]
            label = self.here.get(attempt.sequence)
            if label in self.shown and not self.commit:
                raise Violation("late", f"{piece} is staged, and its label is committed")
            assert producer.epoch == run.epoch, "an older session stages"
            self.lines["staging"].append(piece)
            if self.habits.stages_first:
                return
        if unheard or (self.lines["staging"] and self.habits.stages_first):
            return
        attempt.staged += 1
        if attempt.staged < len(rows):
            return
        attempt.step = "done"
        if attempt.label != run.label or run.step != "tasks":
            return
        first: dict[int, Attempt] = {}
        for one in run.attempts:
            if one.label == run.label and one.step == "done":
                first.setdefault(one.task, one)
        if len(first) == self.case.tasks:
            winners = [first[task] for task in range(self.case.tasks)]
            run.named = {one.sequence: one.staged for one in winners}
            values = [value for one in winners for value in self._rows(run, one)]
            commit = Asked(tuple(values), run.since)
            self.asked.setdefault(run.label, []).append(commit)
            run.step = "commit"

    # ------------------------------------------------------------ labels

    def _commit(self, run: Run, unheard: bool) -> None:
        producers = self._loaded()
        if self.lines["staging"]:
            return  # staged messages may not be safe yet
        labels = range(run.since, run.label + 1)
        if self.case.skips:
            self.empty |= set(labels[:-1])
        else:
            labels = labels[-1:]
        intent = producers.commit(NAME, run.epoch, run.named, self._end, 0, labels)
        if intent is not None:
            if any(one.epoch for one in self.runs[self.runs.index(run) + 1 :]):
                raise Violation("fenced", f"{run.session} commits, and its successor has begun")
            self._note(producers.by_name[NAME])
            self.commit = "noted"
            return
        kept = producers.by_name[NAME].staged.keys() & run.named.keys()
        if kept and not self.commit:
            raise Violation("kept", f"sequences {kept} are staged, and label {run.label} is done")
        if not unheard:
            self._hears_done(run.label, f"label {run.label} is said to be committed")
            run.named = {}
            run.step, run.since = "check", run.label + 1

    def _pass(self, run: Run, unheard: bool) -> None:
        producers = self._loaded()
        self.empty.add(run.label)
        if producers.pass_over(NAME, run.epoch, range(run.label, run.label + 1), 0):
            self._note(producers.by_name[NAME])
            self.turn = True
            if self.habits.waits_for_note:
                return
        if not unheard:
            self._hears_done(run.label, f"label {run.label} is said to be passed over")
            run.step, run.since = "check", run.label + 1

    def _check(self, run: Run, unheard: bool) -> None:
        """Write into the checkpoint that the micro-batch is done, and take the next one."""
        self.checkpoint = max(self.checkpoint, run.label + 1)
        run.label += 1
        self._take(run)

    def _hears_done(self, label: int, claim: str) -> None:
        if label not in self.shown and label not in self.passed:
            raise Violation("silent loss", f"{claim}, and it is not")

    # ------------------------------------------------------------ the broker

    def _noted(self, name: str, note: Any, keep: tuple[int, ...] | None) -> None:
        self.turn = False
        for label in self.empty - set(self.shown):
            if any(first <= label < end for first, end in note["labels"]):
                self.passed.add(label)

    def _show(self, values: list[str]) -> None:
        label = int(values[0].split(".")[0])
        commits = [commit for commit in self.asked.get(label, ()) if commit.values == tuple(values)]
        if not commits:
            raise Violation("torn", f"{values} is no commit of anybody")
        if label in self.shown:
            raise Violation("twice", f"label {label} is in the stream a second time: {values}")
        if label in self.passed:
            raise Violation("passed", f"label {label} was done with nothing, and has rows")
        if any(later > label for later in self.shown):
            raise Violation("order", f"label {label} comes after {self.shown}")
        self.shown.append(label)
        if self.case.skips:
            self.passed |= set(range(commits[0].since, label)) - set(self.shown)

    def _is_committed(self) -> None:
        assert self.producers is not None
        producer = self.producers.by_name[NAME]
        super()._is_committed()
        for sequence in producer.staged:
            if self.here.get(sequence) in self.shown:
                raise Violation("left", f"sequence {sequence} is staged, and its label is done")

    def _crash(self, kept: Sequence[str]) -> None:
        super()._crash(kept)
        self.turn, self.here = False, {}
        for run in self.runs:
            for attempt in run.attempts:
                if attempt.step == "told":  # the crash lost the answer: ask again
                    attempt.step = "open"


def judge(nodes: Sequence[Any]) -> Violation | None:
    """Check what must hold when no event is left."""
    world: World = fork(nodes[0])
    last, batches = world.runs[-1], world.case.runs[-1]
    if last.step != "over":
        return Violation("stuck", f"the last run is at {last.step!r}")
    for label, rows in enumerate(batches):
        if rows and label not in world.shown and label not in world.passed:
            return Violation("silent loss", f"label {label} is not in the stream in the end")
    producers: Producers = world._loaded()
    if producers.by_name[NAME].intent is not None:
        return Violation("stuck", "a commit is under way for ever")
    producers.drop_stale(LATE)
    for name in producers.expired(LATE):
        producers.forget(name)
    if producers.staged_size or producers.staged_from(99) != 99:
        return Violation("left", f"{producers.staged_size} messages are staged for ever")
    return None


def explore(
    case: Case, habits: Habits | None = None, limit: int | None = None, shortest: bool = False
) -> Exploration:
    """Visit every state of a case; `shortest`: near states first, as mutants may have infinitely many states."""
    return Explorer([World(case, habits or Habits())], judge).run(shortest, limit)


CASES: Final = (
    Case(runs=((1, 1),), back=(0,), crashes=2),
    Case(crashes=2),
    Case(attempts=(2, 1), crashes=0),
    Case(runs=((1, 1),), back=(0,), attempts=(2,), crashes=0),
    Case(plain=True, crashes=1),
    Case(joins=True, crashes=1),
    Case(runs=((1,), (2,)), crashes=1, unheard=1, trims=1),
    Case(runs=((0, 1), (1, 1)), crashes=1),
    Case(runs=((0, 1), (1, 1)), back=(0, 2), skips=True, crashes=1),
)
"""Cases for every run."""
LARGE: Final = (
    Case(attempts=(2, 1), crashes=1),
    Case(runs=((1, 1),), back=(0,), attempts=(2,), crashes=1),
    Case(runs=((1,), (1,)), tasks=2, crashes=1),
    Case(runs=((1, 1), (1, 1)), back=(0, 1), crashes=2, trims=1),
    Case(runs=((0, 1), (1, 1)), joins=True, crashes=1, unheard=1),
    Case(runs=((1,), (1,), (1,)), back=(0, 0, 0), attempts=(1, 1, 1), crashes=1),
)
"""Further cases for long runs."""
