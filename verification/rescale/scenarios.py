"""Small configurations for the explorer: the owners of keys before and after, and the records of each worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any, Protocol

from railgun.engine.protocol.frontier import LAST, MAX
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.distributor import Distributor
from verification.explorer import Explorer
from verification.rescale.model import TIMER, Counts, ModelWorker, Violation, counting_worker, name
from verification.rescale.rows import Item, Rows

STARTED = 1
SAVED = 2
SNAPSHOT = 1


class Judged(Protocol):
    """What the verdict on a scenario needs of one worker at the end."""

    worker: int
    cut: int

    def finished(self) -> bool:
        """Return whether everything that had to happen on this worker has happened."""
        ...

    def waits_for(self) -> str:
        """Describe the point where the worker stopped."""
        ...

    def states(self) -> Sequence[dict[int, Counts]]:
        """Return the state of each stage."""
        ...

    def saved(self) -> Sequence[dict[int, Counts]]:
        """Return the snapshot of each stage."""
        ...

    def frontier(self) -> int:
        """Return the frontier of the worker."""
        ...

    def endings(self) -> Counts:
        """Return how often each key was ended on this worker."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Scenario:
    """Workers 0..n-1; `homes` and `owners` are F and F′ by key (keys are 1, 2, ...).

    `scripts`: the keys of the records from each worker's own upstream, in order. `snapshot`: a snapshot is taken, at
    any moment after all workers have heard of the rescale. `times`: records carry times and upstreams send frontiers.
    `prompt`: the operators answer at once. `second`: owners of the keys of a second stage, which does not move (the
    output fence is at work); records of key k go on with key k. `forgets`: the operators of the first stage keep no
    state. `timers`: they emit once more for each key that is collected. `stuck`: homes never get leave to move their
    keys, so the rescale never ends; time must advance all the same.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    homes: tuple[int, ...]
    owners: tuple[int, ...]
    scripts: tuple[tuple[int, ...], ...]
    snapshot: bool = False
    times: bool = False
    prompt: bool = True
    second: tuple[int, ...] = ()
    forgets: bool = False
    timers: bool = False
    stuck: bool = False

    @property
    def keys(self) -> range:
        """Return the keys, which are their own hashes."""
        return range(1, len(self.homes) + 1)

    def placements(self) -> tuple[Placement, Placement]:
        """Return the placements F and F′."""
        before = Placement.of(self.old, keys=dict(zip(self.keys, self.homes, strict=True)))
        after = Placement.of(self.new, keys=dict(zip(self.keys, self.owners, strict=True)))
        return before, after

    def explorer(self, make: type[Distributor] = Distributor, reduce: bool = False) -> Explorer:
        """Return an explorer of this scenario, for a distributor class."""
        nodes = [Participant(self, worker, make) for worker in range(len(self.scripts))]
        return Explorer(nodes, self.judge, {"snapshot": STARTED}, reduce)

    def __str__(self) -> str:
        moves = ", ".join(
            f"{name(key)}: {home}→{owner}"
            for key, home, owner in zip(self.keys, self.homes, self.owners, strict=True)
        )
        sends = "; ".join(
            f"{worker} sends {' '.join(map(name, script))}"
            for worker, script in enumerate(self.scripts)
            if script
        )
        extras = [word for word in ("snapshot", "times") if getattr(self, word)]
        extras += [] if self.prompt else ["slow operators"]
        extras += ["second stage"] if self.second else []
        extras += [word for word in ("forgets", "timers", "stuck") if getattr(self, word)]
        text = f"{set(self.old)} → {set(self.new)}; {moves}; {sends}"
        return f"{text} [{', '.join(extras)}]" if extras else text

    # ------------------------------------------------------------ judging an end state

    def judge(self, nodes: Sequence[Judged]) -> Violation | None:
        """Check an end state, in which nothing can happen any more."""
        if self.stuck:
            return self._progress(nodes)
        for node in nodes:
            if not node.finished():
                return Violation(
                    "never ends", f"worker {node.worker} waits for ever: {node.waits_for()}"
                )
        full = {key: self._sent(key, [len(script) for script in self.scripts]) for key in self.keys}
        states = [node.states() for node in nodes]
        violation = self._whole("state", states, full)
        if violation is None:
            for node, stages in zip(nodes, states, strict=True):
                for key in stages[0]:
                    if self.owners[key - 1] != node.worker:
                        return Violation("stranded", f"{name(key)} stayed at worker {node.worker}")
        if violation is None and self.snapshot:
            saved = [node.saved() for node in nodes]
            cut = {key: self._sent(key, [node.cut for node in nodes]) for key in self.keys}
            violation = self._whole("snapshot", saved, cut)
        if violation is None and self.times:
            for node in nodes:
                if node.frontier() != MAX:
                    return Violation(
                        "never ends", f"worker {node.worker} did not come to the end of time"
                    )
            for key in self.keys:
                endings = [node.endings().get(key, 0) for node in nodes]
                if sum(endings) != 1:
                    return Violation("ends", f"{name(key)} ended {endings} times at the workers")
        return violation

    def _progress(self, nodes: Sequence[Judged]) -> Violation | None:
        """Check that the frontier has reached all that is left to come: every upstream has ended."""
        for node in nodes:
            if node.frontier() < LAST:
                return Violation(
                    "no progress", f"worker {node.worker} is at {node.frontier()}: all have ended"
                )
        return None

    def _sent(self, key: int, upto: Sequence[int]) -> dict[int, int]:
        """Return how many records of a key each worker sent among its first `upto`."""
        counts = {w: s[: upto[w]].count(key) for w, s in enumerate(self.scripts)}
        return {worker: count for worker, count in counts.items() if count}

    def _whole(
        self,
        what: str,
        states: Sequence[Sequence[dict[int, Counts]]],
        expected: dict[int, dict[int, int]],
    ) -> Violation | None:
        """Check that each key is in exactly one place in every stage, with exactly these records counted."""
        fired: Counts = {}
        for stage in range(len(states[0])):
            for key in self.keys:
                places = [w for w in range(len(states)) if key in states[w][stage]]
                if len(places) > 1:
                    return Violation(f"two in {what}", f"{name(key)} is at workers {places}")
                have = states[places[0]][stage][key] if places else {}
                if stage == 0:
                    fired[key] = have.get(TIMER, 0)
                want = self._wanted(stage, key, expected[key], fired[key])
                if have != want:
                    kind = (
                        f"lost in {what}"
                        if sum(have.values()) < sum(want.values())
                        else f"extra in {what}"
                    )
                    return Violation(
                        kind, f"{name(key)} has {have}, sent were {want}, stage {stage}"
                    )
        return None

    def _wanted(self, stage: int, key: int, sent: dict[int, int], fired: int) -> dict[int, int]:
        """Return the counts of a key in a stage after these records and `fired` timers."""
        if self.forgets:
            return sent if stage == 1 else {}
        if stage == 1:
            return {key: sum(sent.values()) + fired} if sent else {}
        return {**sent, TIMER: fired} if fired else sent


class Participant:
    """One worker of a scenario, as a node of the explorer."""

    __slots__ = ("at", "cut", "heard", "model", "scenario", "seqs", "snapped", "worker")
    constant = ("scenario",)

    def __init__(self, scenario: Scenario, worker: int, make: type[Distributor]) -> None:
        self.scenario = scenario
        self.worker = worker
        self.at = 0
        self.heard = False
        self.snapped = False
        self.cut = 0
        self.seqs: dict[int, int] = {}
        placements = [scenario.placements()[0]]
        members = range(len(scenario.scripts))
        if scenario.second:
            keys = dict(zip(scenario.keys, scenario.second, strict=True))
            placements.append(Placement.of(members, keys=keys))
        self.model: ModelWorker = counting_worker(
            worker,
            placements,
            members,
            _same,
            scenario.prompt,
            scenario.forgets,
            scenario.timers,
            make,
        )

    def events(self) -> list[str]:
        """Return the events that can happen on this worker next, apart from messages."""
        script = self.scenario.scripts[self.worker]
        events = []
        if self.at < len(script):
            events.append("send")
        elif self.at == len(script) and (self.scenario.times or self._leaves()):
            events.append("end")
        if not self.heard:
            events.append("rescale")
        if self.scenario.snapshot and not self.snapped:
            events.append("snapshot")
        if self.model.pending:
            events.append("answer")
        if self.model.stages[0].distributor.movable and not self.scenario.stuck:
            events.append("move")
        return events

    def step(self, event: str) -> list[tuple[int, Any]]:
        """Take an event; return the messages that follow."""
        match event:
            case "send":
                key = self.scenario.scripts[self.worker][self.at]
                self.at += 1
                seq = self.seqs[key] = self.seqs.get(key, 0) + 1
                time = self.at if self.scenario.times else 0
                self.model.feed(0, m.Local(Rows([Item(key, self.worker, seq, time)])))
                if self.scenario.times:
                    self.model.feed(0, m.Advanced(self.at + 1))
            case "end":
                self.at += 1
                self.model.feed(0, m.Advanced(MAX))
            case "rescale":
                self.heard = True
                self.model.feed(0, m.Rescale(1, self.scenario.placements()[1]))
                if self._leaves():
                    self.model.feed(0, m.Depart())
            case "snapshot":
                self.snapped = True
                self.cut = min(self.at, len(self.scenario.scripts[self.worker]))
                self.model.feed(0, m.StartSnapshot(SNAPSHOT))
            case "answer":
                self.model.answer()
            case "move":
                self.model.feed(0, m.Move(1))
        return self._sent()

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        """Take a message from a link; return the messages that follow."""
        stage, content = message
        self.model.feed(stage, m.Received(sender, content))
        return self._sent()

    def _sent(self) -> list[tuple[int, Any]]:
        sent = [(to, (stage, message)) for to, stage, message in self.model.outbox]
        self.model.outbox = []
        self.model.reports = []
        return sent

    def holdings(self) -> int:
        """Return the keys that have state on this worker, one bit for each key and stage."""
        bits = 0
        for index, stage in enumerate(self.model.stages):
            for key in stage.operator.states:
                bits |= 1 << (key + 8 * index)
        return bits

    def flags(self) -> int:
        """Return whether the worker has heard of the rescale."""
        return STARTED * self.heard

    def may_send(self) -> int:
        """Return the workers this worker may still send to: by what it has yet to send, as sender, home and leaver."""
        scenario, distributor = self.scenario, self.model.stages[0].distributor
        everyone = (1 << len(scenario.scripts)) - 1
        rest = scenario.scripts[self.worker][self.at :]
        ends = scenario.times or self._leaves()
        ending = ends and (self.at <= len(scenario.scripts[self.worker]) or not self._gone())
        saved = all(stage.saved for stage in self.model.stages)
        saving = scenario.snapshot and not saved and not distributor.barrier.sent_last
        if not self.heard or ending or saving or (rest and scenario.times) or scenario.second:
            return everyone
        backlog = distributor.barrier.backlog
        if scenario.times and backlog:
            return everyone
        batches = [event.batch for event in backlog if isinstance(event, m.Local)]
        waiting = {item.key for batch in batches if isinstance(batch, Rows) for item in batch.items}
        receivers = 0
        for key in {*rest, *waiting}:
            receivers |= 1 << scenario.homes[key - 1] | 1 << scenario.owners[key - 1]
        migration = distributor.migration
        if migration is not None:
            if distributor.phase.name in ("interrogate", "collect"):
                return everyone
            unswitched = set(migration.old.workers) - migration.switched
            onward = migration.new.workers if distributor.may_forward else ()
            for worker in {*unswitched, *onward}:
                receivers |= 1 << worker
        return receivers & ~(1 << self.worker)

    def _gone(self) -> bool:
        return not self._leaves() or self.model.stages[0].distributor.left

    def _leaves(self) -> bool:
        return self.worker not in self.scenario.new

    def finished(self) -> bool:
        """Return whether everything that had to happen on this worker has happened."""
        distributor = self.model.stages[0].distributor
        return (
            self.model.settled
            and distributor.epoch == 1
            and self.at >= len(self.scenario.scripts[self.worker])
            and distributor.left == self._leaves()
            and (not self.scenario.snapshot or all(s.saved for s in self.model.stages))
        )

    def states(self) -> list[dict[int, Counts]]:
        """Return the state of each stage."""
        return [stage.operator.states for stage in self.model.stages]

    def saved(self) -> list[dict[int, Counts]]:
        """Return the snapshot of each stage."""
        return [stage.saved[SNAPSHOT] for stage in self.model.stages]

    def frontier(self) -> int:
        """Return the frontier of the last stage."""
        frontier: int = self.model.stages[0].operator.frontier
        return frontier

    def endings(self) -> Counts:
        """Return how often each key was ended on this worker."""
        endings: Counts = self.model.stages[0].operator.endings
        return endings

    def waits_for(self) -> str:
        """Describe the point where the worker stopped."""
        distributor = self.model.stages[0].distributor
        snapshot = distributor.barrier.snapshot
        return f"{distributor}" + (f", aligning snapshot {snapshot}" if snapshot else "")


def _same(key: int) -> int:
    return key


# ---------------------------------------------------------------- families of scenarios


def configurations(workers: int, keys: int, records: int) -> Iterator[Scenario]:
    """Yield every scenario of this size, up to renaming workers and keys; at least one key moves."""
    everyone = range(workers)
    seen: set[Any] = set()
    groups = [c for size in range(1, workers + 1) for c in combinations(everyone, size)]
    for old, new in product(groups, groups):
        if set(old) | set(new) != set(everyone):
            continue
        for homes, owners in product(product(old, repeat=keys), product(new, repeat=keys)):
            if homes == owners:
                continue
            for scripts in every_script(workers, keys, records):
                scenario = Scenario(old, new, homes, owners, scripts)
                canonical = _canonical(scenario)
                if canonical not in seen:
                    seen.add(canonical)
                    yield scenario


def every_script(workers: int, keys: int, records: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to spread the records over the workers and keys; every key is used."""
    for who in _compositions(records, workers):
        for choice in product(range(1, keys + 1), repeat=records):
            if set(choice) != set(range(1, keys + 1)):
                continue
            scripts, at = [], 0
            for count in who:
                scripts.append(choice[at : at + count])
                at += count
            yield tuple(scripts)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _canonical(scenario: Scenario) -> Any:
    """Return the smallest of all names for the same scenario."""
    workers, keys = len(scenario.scripts), len(scenario.homes)
    best: Any = None
    for rename in permutations(range(workers)):
        for order in permutations(range(keys)):
            scripts: list[tuple[int, ...]] = [()] * workers
            for worker, script in enumerate(scenario.scripts):
                scripts[rename[worker]] = tuple(order[key - 1] for key in script)
            homes, owners = [0] * keys, [0] * keys
            for key in range(keys):
                homes[order[key]] = rename[scenario.homes[key]]
                owners[order[key]] = rename[scenario.owners[key]]
            named = (
                tuple(sorted(rename[w] for w in scenario.old)),
                tuple(sorted(rename[w] for w in scenario.new)),
                *(tuple(homes), tuple(owners), tuple(scripts)),
            )
            if best is None or named < best:
                best = named
    return best
