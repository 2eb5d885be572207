"""Plan faults from a seed, and apply them to a cluster, in order or overlapping.

Rules:

1. A plan is made before the run starts, from a seed: the same seed gives the same plan. It has rounds of one to three
   blows that overlap, with calm between rounds, and ends before its time is up.
2. Never does more than a minority fail at the same time. A node fails from the blow until it is healed *and* has caught
   up, which the plan cannot know: a blow waits until enough other nodes are well, and is left out if that takes
   too long.
3. A node that is cut off in a minority fails; a node that is slow, or has a wrong clock, does not.
4. A rolling restart, a change of members, a freeze, a master that cannot write and a node that is asked while it is cut
   off have the cluster for themselves, except for harmless faults.
5. At the end everything is healed, whatever happened.
6. Each blow is recorded from its begin until its nodes have caught up (`Blown`), for the checker.

A `pause` stops a process for a moment; a `freeze` does so for longer than any client waits (`FREEZE_S`). An
`unwritable_master` first becomes the master of all streams, and then cannot write. A `minority` is isolated for so long
that it knows of no quorum, and is asked to read and to write before it is healed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, Protocol

from verification.faults.history import Blown, Fault, History

Kind = Literal[
    "kill", "torn_kill", "pause", "freeze", "isolate", "halves", "one_way", "bridge", "slow_links", "clients_cut",
    "slow_disk", "full_disk", "refused_writes", "failed_sync", "clock", "flip", "flip_groups", "cut_tail",
    "remove_stream", "member", "rolling", "unwritable_master", "minority",
]  # fmt: skip
WEIGHTS: Final[Mapping[Kind, int]] = {
    "kill": 6, "torn_kill": 3, "pause": 4, "isolate": 4, "halves": 3, "one_way": 3, "bridge": 2, "slow_links": 2,
    "clients_cut": 2, "slow_disk": 2, "full_disk": 2, "refused_writes": 3, "failed_sync": 2, "clock": 2, "flip": 1,
    "flip_groups": 1, "cut_tail": 1, "remove_stream": 1, "member": 2, "rolling": 1,
    "freeze": 2, "unwritable_master": 2, "minority": 2,
}  # fmt: skip
ALONE: Final[frozenset[Kind]] = frozenset(
    {"kill", "torn_kill", "pause", "clients_cut", "slow_disk", "full_disk", "refused_writes", "failed_sync", "clock",
     "rolling"}
)  # fmt: skip
"""Faults that a single node survives, which has no other node to learn from."""
HARMLESS: Final[frozenset[Kind]] = frozenset({"slow_links", "clients_cut", "slow_disk", "clock"})
EXCLUSIVE: Final[frozenset[Kind]] = frozenset(
    {"rolling", "member", "freeze", "unwritable_master", "minority"}
)
STYLES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "isolate": ("cut", "drop", "hold"),
    "halves": ("cut", "drop", "hold"),
    "one_way": ("cut", "drop", "hold"),
    "bridge": ("cut", "drop"),
    "refused_writes": ("EFBIG", "EDQUOT", "EROFS"),
    "unwritable_master": ("EFBIG", "EDQUOT", "EROFS"),
    "minority": ("cut", "drop"),
}
LASTS: Final = (1.0, 6.0)
FREEZE_S: Final = (12.0, 16.0)
LONGER: Final[Mapping[Kind, tuple[float, float]]] = {
    "freeze": FREEZE_S,
    "unwritable_master": (9.0, 11.0),
    "minority": (10.0, 13.0),  # longer than writes wait for a master
}
CALM_S: Final = (1.5, 4.0)
SETTLE: Final = 60.0
"""Seconds until a healed node must have caught up."""


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault. `victims` fail; `others` are also involved. `amount`: seconds of delay, or of the clock's error."""

    at: float
    seconds: float
    kind: Kind
    victims: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    style: str = ""
    amount: float = 0.0

    @property
    def end(self) -> float:
        """Return when the blow ends."""
        return self.at + self.seconds

    def __str__(self) -> str:
        who = ", ".join(self.victims) + (f" | {', '.join(self.others)}" if self.others else "")
        more = f" {self.style}" * bool(self.style) + f" {self.amount:g}" * bool(self.amount)
        return f"{self.kind}{more} ({who}) for {self.seconds:.1f} s"


def minority(nodes: int) -> int:
    """Return how many of `nodes` may fail at once; a single node may.

    >>> [minority(n) for n in (1, 2, 3, 4, 5)]
    [1, 0, 1, 1, 2]
    """
    return 1 if nodes == 1 else (nodes - 1) // 2


# ---------------------------------------------------------------- the plan


def plan(
    seed: int, names: Sequence[str], seconds: float, kinds: Collection[Kind] | None = None
) -> list[Blow]:
    """Return the blows of a seed, in order."""
    chance = Random(seed)
    possible = [kind for kind in WEIGHTS if len(names) > 1 or kind in ALONE]
    chosen = [kind for kind in possible if kinds is None or kind in kinds]
    blows: list[Blow] = []
    now = chance.uniform(0.5, 1.5)
    while chosen and now + LASTS[0] <= seconds:
        overlapping = _round(chance, names, chosen, now, seconds)
        blows += overlapping
        now = max((blow.end for blow in overlapping), default=now) + chance.uniform(*CALM_S)
    return sorted(blows, key=lambda blow: blow.at)


def _round(
    chance: Random, names: Sequence[str], kinds: Sequence[Kind], now: float, end: float
) -> list[Blow]:
    """Return blows that overlap."""
    blows: list[Blow] = []
    left = minority(len(names))
    free = list(names)
    touched: set[str] = set()
    for _ in range(chance.choice([1, 1, 2, 2, 3])):
        kind = chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind in EXCLUSIVE and any(blow.kind not in HARMLESS for blow in blows):
            continue
        if any(blow.kind in EXCLUSIVE for blow in blows) and kind not in HARMLESS:
            continue
        if any(blow.kind == kind and kind in HARMLESS for blow in blows):
            continue  # the end of the first would heal the second too
        at = now if not blows else now + chance.uniform(0.0, 0.9 * LASTS[0])
        shortest, longest = LONGER.get(kind, LASTS)
        lasts = min(chance.uniform(shortest, longest), end - at)
        if lasts < shortest:
            continue
        blow = _aim(chance, kind, names, free, min(left, len(free)), at, lasts)
        if blow is None:
            continue
        blows.append(blow)
        left -= len(blow.victims)
        touched.update(blow.victims)
        free = [name for name in names if name not in touched]
    return blows


def _aim(
    chance: Random,
    kind: Kind,
    names: Sequence[str],
    free: Sequence[str],
    most: int,
    at: float,
    lasts: float,
) -> Blow | None:
    """Return a blow of `kind` at up to `most` victims among the `free` nodes, or None if that is impossible."""
    style = chance.choice(STYLES[kind]) if kind in STYLES else ""
    if kind in HARMLESS:
        involved = (chance.choice(names),)
        amount = {
            "slow_links": chance.uniform(0.01, 0.3),
            "slow_disk": chance.uniform(0.02, 0.4),
            "clock": chance.choice([-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0]),
        }.get(kind, 0.0)
        return Blow(at, lasts, kind, (), involved, style, round(amount, 3))
    if kind == "rolling":
        return Blow(at, lasts, kind, (), tuple(chance.sample(list(names), len(names))))
    if most < 1 or not free:
        return None
    if kind == "bridge" and len(names) < 3:
        return None
    count = chance.randint(1, most) if kind in ("halves", "bridge") else 1
    victims = tuple(sorted(chance.sample(list(free), count)))
    rest = [name for name in names if name not in victims]
    if kind == "one_way":
        return Blow(at, lasts, kind, victims, (chance.choice(rest),), style)
    if kind == "bridge":
        return Blow(at, lasts, kind, victims, (chance.choice(rest),), style)
    return Blow(at, lasts, kind, victims, (), style)


def blocked(blow: Blow, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the links that a partition closes, each direction by itself.

    >>> list(blocked(Blow(0, 1, "isolate", ("a",)), ["a", "b"]))
    [('a', 'b'), ('b', 'a')]
    >>> list(blocked(Blow(0, 1, "one_way", ("a",), ("b",)), ["a", "b", "c"]))
    [('a', 'b')]
    >>> list(blocked(Blow(0, 1, "bridge", ("a",), ("b",)), ["a", "b", "c"]))
    [('a', 'c'), ('c', 'a')]
    """
    if blow.kind == "one_way":
        yield from ((victim, other) for victim in blow.victims for other in blow.others)
    elif blow.kind in ("isolate", "halves", "bridge", "minority"):
        for name in names:
            if name not in blow.victims and not (blow.kind == "bridge" and name in blow.others):
                for victim in blow.victims:
                    yield victim, name
                    yield name, victim


def longest_hold(blows: Sequence[Blow]) -> float:
    """Return how long, in seconds, data may be under way: while a node is stopped, or a link held or slow."""
    times = [
        blow.seconds for blow in blows if blow.kind in ("pause", "freeze") or blow.style == "hold"
    ]
    times += [3 * blow.amount for blow in blows if blow.kind == "slow_links"]
    return max(times, default=0.0)


# ---------------------------------------------------------------- doing


class Striker(Protocol):
    """What applies blows to a system."""

    async def begin(self, blow: Blow) -> str:
        """Apply `blow`; return notes for people."""
        ...

    async def finish(self, blow: Blow) -> str:
        """Undo `blow`; return notes for people."""
        ...

    async def heal(self) -> None:
        """Undo all blows that may be left."""
        ...


class Admin(Protocol):
    """What a nemesis asks of a cluster."""

    async def remove(self, node: str) -> None:
        """Remove `node` from the members."""
        ...

    async def join(self, node: str) -> None:
        """Add `node` to the members again."""
        ...

    async def lead(self, node: str) -> None:
        """Make `node` the master of all streams."""
        ...

    async def settled(self, nodes: Sequence[str]) -> bool:
        """Return whether `nodes` are up, and have caught up."""
        ...


class Nemesis:
    """Applies the blows of a plan."""

    def __init__(
        self,
        blows: Sequence[Blow],
        names: Sequence[str],
        striker: Striker,
        admin: Admin,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        clients_at: Callable[[Collection[str]], list[str]] = lambda nodes: [],
    ) -> None:
        self.blows, self.names = blows, names
        self.done: list[Blow] = []
        self.left_out: list[Blow] = []
        self.unsettled: list[Blow] = []
        """Blows after which a node did not catch up in time."""
        self.settle = SETTLE
        self._striker, self._admin, self._history, self._clock = striker, admin, history, clock
        self._clients_at = clients_at
        self._failing: list[str] = []
        self._alone = 0
        self._changed = asyncio.Condition()

    @property
    def failing(self) -> list[str]:
        """Return the nodes that are not well, or have not caught up."""
        return sorted(set(self._failing))

    async def run(self) -> None:
        """Apply the whole plan; everything is healed on return."""
        begin = self._clock()
        try:
            async with asyncio.TaskGroup() as tasks:
                for blow in self.blows:
                    tasks.create_task(self._strike(blow, begin))
        finally:
            await self._striker.heal()
            self._tell("healed")

    async def _strike(self, blow: Blow, begin: float) -> None:
        await asyncio.sleep(max(0.0, begin + blow.at - self._clock()))
        if not await self._room(blow):
            self.left_out.append(blow)
            self._tell("left out", str(blow))
            return
        nodes = [*self._whom(blow)] if blow.kind not in HARMLESS else [*blow.others]
        clients = self._clients_at(nodes)
        started = struck = ended = self._clock()
        try:
            try:
                note = await self._striker.begin(blow)
                struck = self._clock()
                self._tell("begin", f"{blow}: {note}")
                await asyncio.sleep(blow.seconds)
            finally:
                ended = self._clock()
                self._tell("end", f"{blow}: {await self._striker.finish(blow)}")
            self.done.append(blow)
            if await self._settled(blow):
                await self._release(blow)
            else:
                self.unsettled.append(blow)  # nodes that have not caught up still count as failing
                self._tell("unsettled", str(blow))
        finally:
            times = (started, struck, ended, self._clock())
            self._history.add(Blown(blow.kind, nodes, *times, clients))

    async def _room(self, blow: Blow) -> bool:
        """Wait until the victims may fail beside the nodes that fail already, up to the length of the blow."""
        if blow.kind in HARMLESS:
            return True
        try:
            async with asyncio.timeout(2 * blow.seconds), self._changed:
                await self._changed.wait_for(lambda: self._fits(blow))
                self._failing += self._whom(blow)
                self._alone += blow.kind in EXCLUSIVE
                return True
        except TimeoutError:
            return False

    def _fits(self, blow: Blow) -> bool:
        together = set(self._failing) | set(blow.victims)
        if self._alone or (blow.kind in EXCLUSIVE and self._failing):
            return False
        same = set(self._failing) & set(blow.victims)
        return not same and len(together) <= minority(len(self.names))

    def _whom(self, blow: Blow) -> Sequence[str]:
        return blow.others if blow.kind == "rolling" else blow.victims

    async def _release(self, blow: Blow) -> None:
        if blow.kind not in HARMLESS:
            async with self._changed:
                for name in self._whom(blow):
                    self._failing.remove(name)
                self._alone -= blow.kind in EXCLUSIVE
                self._changed.notify_all()

    async def _settled(self, blow: Blow) -> bool:
        whom = self._whom(blow)
        if blow.kind in HARMLESS or not whom:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settle):
                while not await self._admin.settled(whom):
                    await asyncio.sleep(0.1)
                return True
        return False

    def _tell(self, what: str, text: str = "") -> None:
        self._history.add(Fault(self._clock(), what, text))
