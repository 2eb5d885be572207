"""`./run prove`: check the guarantees of the protocols, on every interleaving and on thousands of schedules.

Eleven parts, each a line or more of the table:

1. the explorer on the production rules: every interleaving of every scenario of each family; no violation;
2. the explorer on the original rules of ICADD: all five holes must be found, with their shortest stories;
3. the mutants: each production rule changed in one place must be caught;
4. the simulator: seeded schedules of whole clusters; no violation;
5. crashes: seeded runs of whole jobs that are saved, lost and restarted; no violation;
6. the mutants of saving and loading: the jobs that crash must catch each;
7. the rules of connectors, every interleaving, and their mutants;
8. Raft: every interleaving of a few nodes, seeded clusters with faults, and its mutants;
9. copies of a stream: every interleaving of a few nodes, seeded worlds with faults, and their mutants;
10. delivery to groups: the mutants of its rules, each of which seeded histories beside a naive model must catch;
11. producers that stage and commit: every interleaving of a broker that fails and of flows that succeed one another, or
    of runs of a query that repeat micro-batches, and their mutants.

There are three sizes. `--quick` takes about a minute on two cores. The default takes a quarter of an hour: all
configurations of the small families, and every n-th of the big ones. `--exhaustive` leaves none out and takes many
hours. Every line of the table says how many configurations of how many were explored.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from railgun.engine.protocol.rescale.coordinator import Coordinator
from verification.groups import mutants as delivery_mutants
from verification.ingest import exploration as ingest_exploration
from verification.ingest import mutants as ingest_mutants
from verification.mutation import Verdict, hunt_seeds, verdict_of
from verification.producers import (
    model as producer_model,
)
from verification.producers import (
    mutants as producer_mutants,
)
from verification.producers import (
    query_model,
    query_mutants,
)
from verification.raft import model as raft_model
from verification.raft import mutants as raft_mutants
from verification.raft import world as raft_world
from verification.replication import (
    model as replication_model,
)
from verification.replication import (
    mutants as replication_mutants,
)
from verification.replication import (
    world as replication_world,
)
from verification.report import Report, options
from verification.rescale.mutants import MUTANTS
from verification.rescale.scenarios import Scenario, configurations, every_script
from verification.rescale.seed_rules import HOLES, seed_explorer, story_of
from verification.rescale.simulator import Plan, shrink, simulate
from verification.rescale.story import story
from verification.snapshots import (
    crashes,
)
from verification.snapshots import (
    driver_mutants as snapshot_mutants,
)
from verification.snapshots import (
    mutants as saving_mutants,
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much a run explores.

    `limit`: the number of states after which the exploration of a scenario is cut short and reported so (a state takes
    about 250 bytes of memory on each core). `hunting`: the number of schedules to check a mutant with. `schedules`,
    `large`: simulated schedules of a small cluster and of a large one. `crashing`: jobs that crash. `worlds`: Raft
    clusters. `copies`: worlds of copies of a stream.
    """

    name: str
    limit: int
    hunting: int
    schedules: int
    large: int
    crashing: int
    worlds: int
    copies: int


QUICK = Size("quick", 3_000_000, 60, 150, 0, 100, 100, 300)
DEFAULT = Size("default", 3_000_000, 400, 2_000, 200, 4_000, 5_000, 10_000)
EXHAUSTIVE = Size("exhaustive", 30_000_000, 400, 10_000, 1_000, 100_000, 100_000, 200_000)
CRASHES_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class Family:
    """Scenarios that are alike. `quick` and `default` runs explore every n-th of them, with the given n (0: none)."""

    name: str
    scenarios: tuple[Scenario, ...]
    quick: int
    default: int

    def chosen(self, size: Size) -> tuple[Scenario, ...]:
        """Return the scenarios to explore."""
        step = {"quick": self.quick, "default": self.default}.get(size.name, 1)
        return self.scenarios[::step] if step else ()


def fence_scenarios(records: int) -> Iterator[Scenario]:
    """Yield scenarios in which a key moves from 0 to 1 while its outputs go to a second stage at worker 2."""
    for scripts in _spread(records, 3):
        yield Scenario((0,), (1,), (0,), (1,), scripts, second=(2,))


def fence_of_two_scenarios(records: int) -> Iterator[Scenario]:
    """Yield such scenarios of two keys, which leave in two chunks."""
    for scripts in every_script(3, 2, records):
        yield Scenario((0,), (1,), (0, 0), (1, 1), scripts, second=(2, 2))


def bystander_scenarios(records: int) -> Iterator[Scenario]:
    """Yield scenarios in which a key moves from 0 to 1; a third worker, not an owner, sends too."""
    for scripts in _spread(records, 3):
        yield Scenario((0,), (1,), (0,), (1,), scripts)


def _spread(records: int, workers: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    if workers == 1:
        yield ((1,) * records,)
        return
    for first in range(records + 1):
        for rest in _spread(records - first, workers - 1):
            yield ((1,) * first, *rest)


def families() -> list[Family]:
    """Return all families of scenarios, the small ones first."""
    two_small = [*configurations(2, 1, 2), *configurations(2, 1, 3), *configurations(2, 2, 2)]
    two = [*two_small, *configurations(2, 2, 3)]
    three_small = list(configurations(3, 1, 2))
    three = [*three_small, *configurations(3, 2, 2), *configurations(3, 1, 3)]
    three_large = list(configurations(3, 2, 3))
    bystander = [s for records in (1, 2, 3) for s in bystander_scenarios(records)]
    small_bystander = [s for records in (1, 2) for s in bystander_scenarios(records)]
    fence = [*fence_scenarios(2), *fence_scenarios(3)]
    fence_of_two = [*fence_of_two_scenarios(2), *fence_of_two_scenarios(3)]

    def family(
        name: str, base: Iterable[Scenario], quick: int, default: int, **changes: bool
    ) -> Family:
        return Family(name, tuple(replace(s, **changes) for s in base), quick, default)  # type: ignore[arg-type]

    return [
        family("2 workers", two, 1, 1),
        family("2 workers, slow operators", two, 4, 1, prompt=False),
        family("2 workers, a snapshot", two, 7, 1, snapshot=True),
        family("2 workers, a snapshot, slow operators", two, 40, 1, snapshot=True, prompt=False),
        family("2 workers, frontiers", two, 13, 1, times=True),
        family("2 workers, frontiers, slow operators", two, 34, 3, times=True, prompt=False),
        family("2 workers, frontiers, keys never move", two, 60, 1, times=True, stuck=True),
        family("2 workers, a snapshot, frontiers", two_small, 34, 3, snapshot=True, times=True),
        family("3 workers, one a bystander", bystander, 4, 1),
        family("3 workers, one a bystander, frontiers", small_bystander, 9, 2, times=True),
        family("3 workers, one a bystander, a snapshot", small_bystander, 0, 3, snapshot=True),
        family("3 workers, output fence", fence, 7, 2),
        family("3 workers, output fence, 2 keys", fence_of_two, 36, 6),
        family("3 workers, output fence, no state", fence, 9, 4, forgets=True),
        family("3 workers, output fence, timers", fence, 16, 3, timers=True),
        family("3 workers, output fence, slow operators", fence, 0, 4, prompt=False),
        family("3 workers", three, 0, 40),
        family("3 workers, a snapshot", three_small, 0, 36, snapshot=True),
        family("3 workers, 2 keys, 3 records", three_large, 0, 213),
        family("3 workers, 2 keys, 3 records, a snapshot", three_large, 0, 1065, snapshot=True),
    ]


# ---------------------------------------------------------------- the parts, one piece of work each


def explore(scenario: Scenario, limit: int) -> tuple[Scenario, int, int, bool, str]:
    """Explore one scenario under the production rules."""
    exploration = scenario.explorer(reduce=True).run(limit=limit)
    story_text = ""
    if exploration.violation is not None:
        story_text = f"{scenario}\n  {exploration.violation}\n" + "\n".join(
            story(exploration.story)
        )
    return scenario, exploration.states, exploration.transitions, exploration.complete, story_text


def explore_of(
    family: int, scenario: Scenario, limit: int
) -> tuple[int, tuple[Scenario, int, int, bool, str]]:
    """Explore one scenario of the family with the number `family`."""
    return family, explore(scenario, limit)


def explore_seed(scenario: Scenario) -> bool:
    """Return whether the original rules break in a scenario."""
    return seed_explorer(scenario).run().violation is not None


def hunt(name: str, seeds: int) -> Verdict:
    """Explore and simulate the mutant of the rescale rules called `name`, with up to `seeds` schedules."""
    kind, look_at = MUTANTS[name]
    if issubclass(kind, Coordinator):
        return hunt_seeds(
            name,
            range(seeds),
            lambda seed: simulate(seed, 0.3, coordinate=kind),
            label="simulator, seed",
        )
    if look_at != "simulator":
        for scenario in hunting_grounds(look_at):
            verdict = verdict_of(name, scenario.explorer(kind).run(limit=400_000))
            if verdict[1]:
                return verdict
    return hunt_seeds(
        name, range(seeds), lambda seed: simulate(seed, 0.3, make=kind), label="simulator, seed"
    )


def hunting_grounds(look_at: str) -> Iterator[Scenario]:
    """Yield scenarios in which a mutant of this kind shows its fault."""
    base = configurations(2, 1, 2)
    if "keys" in look_at:
        base = configurations(2, 2, 3)
    elif "fence" in look_at:
        base = fence_scenarios(2)
    elif "bystander" in look_at:
        base = bystander_scenarios(1)
    for scenario in base:
        yield replace(
            scenario,
            prompt="slow" not in look_at,
            snapshot="snapshot" in look_at,
            times="times" in look_at,
            forgets="forgets" in look_at,
            timers="timers" in look_at,
            stuck="stuck" in look_at,
        )


def explore_ingest(case: ingest_exploration.Case) -> tuple[ingest_exploration.Case, int, str]:
    """Explore a case of connectors, workers and a controller."""
    exploration = ingest_exploration.explore(case)
    story_text = ""
    if exploration.violation is not None:
        story_text = "\n".join([str(case), *ingest_exploration.story_lines(exploration)])
    return case, exploration.states, story_text


def explore_raft(case: raft_model.Case, limit: int) -> tuple[raft_model.Case, int, str]:
    """Explore a case of a few Raft nodes."""
    exploration = raft_model.explore(case, limit=limit)
    story_text = ""
    if exploration.violation is not None:
        story_text = "\n".join(
            [str(case), *raft_model.story_lines(exploration.story), f"  {exploration.violation}"]
        )
    return case, exploration.states, story_text


def run_world(seed: int) -> tuple[Counter[str], str]:
    """Simulate one Raft cluster; return its counts, and the end of the story if it fails."""
    outcome = raft_world.simulate(seed)
    return outcome.tally, "" if outcome.violation is None else outcome.story_end()


def explore_copies(
    case: replication_model.Case, limit: int
) -> tuple[replication_model.Case, int, bool, str]:
    """Explore a case of a few copies of a stream."""
    exploration = replication_model.explore(case, limit=limit)
    story_text = ""
    if exploration.violation is not None:
        lines = replication_model.story_lines(case, exploration.story)
        story_text = "\n".join([str(case), *lines, f"  {exploration.violation}"])
    return case, exploration.states, exploration.complete, story_text


def run_copies(seed: int) -> tuple[Counter[str], str]:
    """Simulate one world of copies; return its counts, and the end of the story if it fails."""
    outcome = replication_world.simulate(seed)
    return outcome.tally, "" if outcome.violation is None else outcome.story_end()


def explore_producers(
    case: producer_model.Case | query_model.Case, limit: int
) -> tuple[producer_model.Case | query_model.Case, int, bool, str]:
    """Explore a case of the producers of a stream."""
    if isinstance(case, query_model.Case):
        exploration = query_model.explore(case, limit=limit)
    else:
        exploration = producer_model.explore(case, limit=limit)
    story_text = ""
    if exploration.violation is not None:
        lines = [f"  {step.event}" for step in exploration.story]
        story_text = "\n".join([str(case), *lines, f"  {exploration.violation}"])
    return case, exploration.states, exploration.complete, story_text


def run_seed(seed: int, size: float) -> tuple[Counter[str], str]:
    """Simulate one schedule; return its counts, and the shortest story if it fails."""
    outcome = simulate(seed, size)
    story_text = "" if outcome.violation is None else shrink(Plan.of(seed, size)).story()
    return outcome.tally(), story_text


def run_crashes(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """Simulate some jobs that crash; return their counts, and the stories of those that fail."""
    tally: Counter[str] = Counter()
    stories = []
    for seed in seeds:
        outcome = crashes.simulate(seed)
        tally += outcome.tally()
        if outcome.violation is not None:
            stories.append(outcome.story())
    return tally, stories


# ---------------------------------------------------------------- the whole


def _of(family: Family, states: int) -> str:
    """Describe the size of a family, and how much of it was explored."""
    return f"of {len(family.scenarios):,} configurations, {states:,} states"


class Prover:
    """Runs the parts on all cores, shows progress, and fills the report."""

    def __init__(self, size: Size, console: Console, cores: int | None = None) -> None:
        self.size = size
        self.console = console
        self.report = Report("prove")
        self.pool = ProcessPoolExecutor(cores or multiprocessing.cpu_count())

    def work(self, what: str, jobs: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        """Do pieces of work on all cores; yield the results as they come."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=len(jobs))
            for done in as_completed([self.pool.submit(job) for job in jobs]):
                progress.advance(task)
                yield done.result()

    def run(self) -> Report:
        """Run all parts, and return the report."""
        began = time.monotonic()
        try:
            self.production()
            self.original()
            self.mutants()
            self.simulations()
            self.crashes()
            self.saving_mutants()
            self.connectors()
            self.raft()
            self.copies()
            self.delivery()
            self.producers()
        finally:
            self.pool.shutdown(cancel_futures=True)
        self.report.check("time", round(time.monotonic() - began, 1), "s")
        return self.report

    def violation(self, story_text: str) -> None:
        """Print a violation with its story."""
        self.console.print(f"[red]violation[/] {story_text}", highlight=False)

    def production(self) -> None:
        """Run part 1: the production rules."""
        explored = total = states = transitions = short = wrong = 0
        every = [(family, family.chosen(self.size)) for family in families()]
        left, seen = [len(chosen) for _, chosen in every], [0] * len(every)
        # The large families come first, so that all cores have work to the end.
        jobs = [
            partial(explore_of, number, scenario, self.size.limit)
            for number in reversed(range(len(every)))
            for scenario in every[number][1]
        ]
        for number, (_, some_states, some_transitions, complete, story_text) in self.work(
            "configurations", jobs
        ):
            left[number] -= 1
            seen[number] += some_states
            transitions += some_transitions
            short += not complete
            if story_text:
                wrong += 1
                self.violation(story_text)
            if not left[number]:
                family, chosen = every[number]
                text = f"{family.name}: {len(chosen):,} {_of(family, seen[number])}"
                self.console.print(text, highlight=False)
        for (family, chosen), some_states in zip(every, seen, strict=True):
            explored += len(chosen)
            total += len(family.scenarios)
            states += some_states
            self.report.check(family.name, len(chosen), _of(family, some_states))
        self.report.check("configurations explored", explored, f"of {total:,} configurations")
        self.report.check("states", states, "states")
        self.report.check("transitions", transitions, "transitions")
        self.cut_short("cut short", short, f"of {explored:,} configurations")
        self.report.check("violations", wrong, "violations", "= 0", wrong == 0)

    def original(self) -> None:
        """Run part 2: the original rules."""
        holes = 0
        for name, hole in HOLES.items():
            exploration = hole.find()
            if exploration.violation is not None:
                holes += 1
                self.console.print(
                    f"[bold]{name}[/] ({hole.scenario}): {exploration.violation}", highlight=False
                )
                for line in story_of(exploration.story):
                    self.console.print(f"    {line}", highlight=False)
        self.report.check("holes found in the original rules", holes, "holes", "= 5", holes == 5)
        sizes = ((2, 1, 2), (2, 1, 3), (2, 2, 2), (2, 2, 3), (3, 1, 2), (3, 1, 3))
        base = [scenario for size in sizes for scenario in configurations(*size)]
        jobs = [partial(explore_seed, scenario) for scenario in base]
        broken = sum(self.work("original rules", jobs))
        self.report.check(
            f"configurations (of {len(base)}) the original rules break in",
            broken,
            "configurations",
            "> 0",
            broken > 0,
        )

    def mutants(self) -> None:
        """Run part 3: the mutants of the rescale rules."""
        self.catch("mutants caught", [partial(hunt, name, self.size.hunting) for name in MUTANTS])

    def saving_mutants(self) -> None:
        """Run part 6: the mutants of saving and loading."""
        jobs = [partial(saving_mutants.hunt, name) for name in saving_mutants.MUTANTS]
        jobs += [partial(snapshot_mutants.hunt, name) for name in snapshot_mutants.MUTANTS]
        self.catch("mutants of saving caught", jobs)

    def connectors(self) -> None:
        """Run part 7: connectors."""
        cases = (
            ingest_exploration.CASES
            if self.size is QUICK
            else ingest_exploration.CASES + ingest_exploration.LARGE
        )
        states = wrong = 0
        for case, some_states, story_text in self.work(
            "connectors", [partial(explore_ingest, case) for case in cases]
        ):
            states += some_states
            self.console.print(f"connectors, {case}: {some_states:,} states", highlight=False)
            if story_text:
                wrong += 1
                self.violation(story_text)
        text = f"cases, {states:,} states"
        self.report.check("connectors explored", len(cases), text)
        self.report.check("violations of connectors", wrong, "violations", "= 0", wrong == 0)
        jobs = [partial(ingest_mutants.hunt, name) for name in ingest_mutants.MUTANTS]
        self.catch("mutants of connectors caught", jobs)

    def raft(self) -> None:
        """Run part 8: Raft."""
        cases = raft_model.CASES if self.size is QUICK else raft_model.CASES + raft_model.LARGE
        states = wrong = 0
        for case, some_states, story_text in self.work(
            "Raft", [partial(explore_raft, case, self.size.limit) for case in cases]
        ):
            states += some_states
            self.console.print(f"Raft, {case}: {some_states:,} states", highlight=False)
            if story_text:
                wrong += 1
                self.violation(story_text)
        self.report.check("Raft explored", len(cases), f"cases, {states:,} states")
        totals: Counter[str] = Counter()
        for tally, story_text in self.work(
            "clusters", [partial(run_world, seed) for seed in range(self.size.worlds)]
        ):
            totals += tally
            if story_text:
                wrong += 1
                self.violation(story_text)
        text = f"clusters, {totals['terms']:,} leaders, {totals['crashes']:,} crashes"
        self.report.check("clusters simulated", totals["runs"], text)
        self.report.check("entries committed", totals["committed"], "entries")
        self.report.check("violations of Raft", wrong, "violations", "= 0", wrong == 0)
        jobs = [partial(raft_mutants.hunt, name) for name in raft_mutants.MUTANTS]
        self.catch("mutants of Raft caught", jobs)

    def copies(self) -> None:
        """Run part 9: copies of a stream."""
        cases: tuple[replication_model.Case, ...] = replication_model.CASES
        if self.size is not QUICK:
            cases += replication_model.LARGE
        states = wrong = short = 0
        for case, some_states, complete, story_text in self.work(
            "copies", [partial(explore_copies, case, self.size.limit) for case in cases]
        ):
            states += some_states
            short += not complete
            cut = "" if complete else ", cut short"
            self.console.print(f"copies, {case}: {some_states:,} states{cut}", highlight=False)
            if story_text:
                wrong += 1
                self.violation(story_text)
        self.report.check("copies explored", len(cases), f"cases, {states:,} states")
        self.cut_short("copies cut short", short, f"of {len(cases)} cases")
        totals: Counter[str] = Counter()
        for tally, story_text in self.work(
            "copies", [partial(run_copies, seed) for seed in range(self.size.copies)]
        ):
            totals += tally
            if story_text:
                wrong += 1
                self.violation(story_text)
        text = f"worlds, {totals['epochs']:,} epochs, {totals['crashes']:,} crashes"
        self.report.check("copies simulated", totals["runs"], text)
        self.report.check("violations of copies", wrong, "violations", "= 0", wrong == 0)
        jobs = [partial(replication_mutants.hunt, name) for name in replication_mutants.MUTANTS]
        self.catch("mutants of copies caught", jobs)

    def delivery(self) -> None:
        """Run part 10: delivery to groups."""
        jobs = [partial(delivery_mutants.hunt, name) for name in delivery_mutants.MUTANTS]
        self.catch("mutants of delivery caught", jobs)

    def producers(self) -> None:
        """Run part 11: producers."""
        cases: tuple[producer_model.Case | query_model.Case, ...]
        cases = producer_model.CASES + query_model.CASES
        if self.size is not QUICK:
            cases += producer_model.LARGE + query_model.LARGE
        states = wrong = short = 0
        for case, some_states, complete, story_text in self.work(
            "producers", [partial(explore_producers, case, self.size.limit) for case in cases]
        ):
            states += some_states
            short += not complete
            self.console.print(f"producers, {case}: {some_states:,} states", highlight=False)
            if story_text:
                wrong += 1
                self.violation(story_text)
        self.report.check("producers explored", len(cases), f"cases, {states:,} states")
        self.cut_short("producers cut short", short, f"of {len(cases)} cases")
        self.report.check("violations of producers", wrong, "violations", "= 0", wrong == 0)
        jobs = [partial(producer_mutants.hunt, name) for name in producer_mutants.MUTANTS]
        jobs += [partial(query_mutants.hunt, name) for name in query_mutants.MUTANTS]
        self.catch("mutants of producers caught", jobs)

    def cut_short(self, called: str, short: int, of: str) -> None:
        """Report how many explorations were cut short; in a quick run none may be."""
        quick = self.size is QUICK
        self.report.check(called, short, of, "= 0" if quick else "", not (quick and short))

    def catch(self, called: str, jobs: Sequence[Callable[[], Any]]) -> None:
        """Hunt mutants; all must be caught."""
        caught = 0
        for name, how, what in self.work("mutants", jobs):
            if how:
                caught += 1
                self.console.print(f"caught: {name} [dim]({how}) {what[:90]}[/]", highlight=False)
            else:
                self.console.print(f"[red]not caught:[/] {name}", highlight=False)
        self.report.check(called, caught, "mutants", f"= {len(jobs)}", caught == len(jobs))

    def simulations(self) -> None:
        """Run part 4: simulated schedules."""
        totals: Counter[str] = Counter()
        small = self.size.schedules
        jobs = [partial(run_seed, seed, 0.3) for seed in range(small)]
        jobs += [partial(run_seed, seed, 1.0) for seed in range(small, small + self.size.large)]
        for tally, story_text in self.work("simulated schedules", jobs):
            totals += tally
            if story_text:
                self.violation(story_text)
        self.report.check("simulated schedules", totals["schedules"], "schedules")
        self.report.check("records", totals["records"], "records")
        self.report.check("rescales", totals["rescales"], "rescales", "> 0", totals["rescales"] > 0)
        self.report.check("keys moved", totals["moved"], "keys", "> 0", totals["moved"] > 0)
        self.report.check(
            "exact snapshots", totals["snapshots"], f"snapshots, {totals['during']:,} in motion"
        )
        self.report.check("crashes and reloads", totals["crashes"], "crashes")
        self.report.check("streams that ended in motion", totals["abrupt"], "streams")
        wrong = totals["violations"]
        self.report.check("schedules with a violation", wrong, "schedules", "= 0", wrong == 0)

    def crashes(self) -> None:
        """Run part 5: jobs that crash."""
        totals: Counter[str] = Counter()
        seeds = range(self.size.crashing)
        batches = [seeds[at : at + CRASHES_AT_ONCE] for at in range(0, len(seeds), CRASHES_AT_ONCE)]
        for tally, stories in self.work(
            "jobs that crash", [partial(run_crashes, s) for s in batches]
        ):
            totals += tally
            for story_text in stories:
                self.violation(story_text)
        self.report.check("jobs that crash", totals["jobs"], f"jobs, {totals['runs']:,} runs")
        kinds = f"snapshots, {totals['increments']:,} of what changed"
        self.report.check("snapshots committed and read", totals["snapshots"], kinds)
        self.report.check("generations loaded and compared", totals["generations"], "generations")
        for what in ("workers lost", "drivers lost", "power lost"):
            self.report.check(what, totals[what], "times", "> 0", totals[what] > 0)
        wrong = totals["violations"]
        self.report.check("jobs with a violation", wrong, "jobs", "= 0", wrong == 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof, and print the report; the exit code is 0 if all checks pass."""
    everything = "explore all configurations; takes many hours"
    chosen, console = options("prove", "The proof of the rescale protocol.", argv, everything)
    size = QUICK if chosen.quick else EXHAUSTIVE if chosen.exhaustive else DEFAULT
    return Prover(size, console).run().finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
