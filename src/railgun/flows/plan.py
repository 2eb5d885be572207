"""Compile a flow to stages, and make the operators of a stage.

A stage lies between two distributors: it begins with a source's readers or with `key_by`, and holds every step that
items reach without being keyed again. Rules:

1. A source is a stage: its keys are the parts of the source.
2. Each `key_by` is a port of a stage. Keyed streams that are united share one stage, so both sides of a key live on one
   worker and move together.
3. A step without state belongs to every stage its items come from, and runs in each; a step with state to one.
4. Stages are numbered so that items flow from lower numbers to higher ones: that is the order they are rescaled in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.consumers import Consumers
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.operator import DeadLetter, Operator, Setting
from railgun.engine.operators.reading import Reading
from railgun.engine.operators.receiving import Receiving
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.operators.stateless import Branch, KeyBy
from railgun.engine.operators.ways import Meeting, Ways, mark_parting
from railgun.engine.operators.writing import Writing
from railgun.engine.state.disk import OnDisk
from railgun.engine.state.store import KeyStore
from railgun.flows.errors import FlowError
from railgun.flows.sink import Place, Sink, TwoPhaseSink
from railgun.flows.source import Pushed, Source
from railgun.flows.step import Step
from railgun.transport.rows import RowBatch

if TYPE_CHECKING:
    from railgun.flows.flow import Flow

DEAD: Final = "dead_letters"  # the name of the step that writes dead letters


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its steps in order, the steps that are its ports, and the preceding and following stages."""

    index: int
    name: str
    ports: tuple[Step, ...]
    steps: tuple[Step, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def is_source(self) -> bool:
        """Return whether the stage reads a source."""
        return self.ports[0].kind == "source"


@dataclass(frozen=True, slots=True)
class Plan:
    """A flow as stages, ready to run."""

    flow: str
    stages: tuple[Stage, ...]
    dead_letters: Sink[DeadLetter] | None
    state: OnDisk | None = None
    """The settings for state on disk; None: state is kept in memory."""

    @property
    def stage_of(self) -> dict[str, int]:
        """Return the stage each port leads into, by the name of the port's step."""
        return {port.name: stage.index for stage in self.stages for port in stage.ports}

    @property
    def timed(self) -> bool:
        """Return whether some step may set timers."""
        return any(step.kind == "stateful" for stage in self.stages for step in stage.steps)

    @property
    def sources(self) -> dict[str, Stage]:
        """Return the stages that read, by the names of their sources."""
        return {stage.ports[0].name: stage for stage in self.stages if stage.is_source}

    @property
    def pushed(self) -> dict[str, Pushed[Any]]:
        """Return the sources that outside programs push to, by their steps."""
        sources = {name: stage.ports[0].options["source"] for name, stage in self.sources.items()}
        return {name: source for name, source in sources.items() if isinstance(source, Pushed)}

    @property
    def sinks(self) -> dict[str, Sink[Any]]:
        """Return the sinks by their steps; the sink for dead letters comes last, as `DEAD`."""
        steps = (step for stage in self.stages for step in stage.steps)
        sinks: dict[str, Sink[Any]] = {s.name: s.options["sink"] for s in steps if s.kind == "sink"}
        return sinks if self.dead_letters is None else {**sinks, DEAD: self.dead_letters}

    @property
    def commits_together(self) -> frozenset[str]:
        """Return the steps whose sinks commit the output of all workers by one call."""
        sinks = self.sinks.items()
        return frozenset(
            step for step, sink in sinks if isinstance(sink, TwoPhaseSink) and sink.commits_together
        )

    def with_sources(self, sources: Mapping[str, Source[Any]]) -> Plan:
        """Return the same plan, reading from other sources."""

        def replaced(port: Step) -> Step:
            if port.name not in sources:
                return port
            return replace(port, options={**port.options, "source": sources[port.name]})

        stages = tuple(
            replace(stage, ports=tuple(map(replaced, stage.ports))) for stage in self.stages
        )
        return replace(self, stages=stages)

    def with_sinks(self, sinks: Mapping[str, Sink[Any]]) -> Plan:
        """Return the same plan, writing to other sinks; `DEAD` names the one for dead letters."""

        def replaced(step: Step) -> Step:
            if step.kind != "sink" or step.name not in sinks:
                return step
            return replace(step, options={**step.options, "sink": sinks[step.name]})

        stages = tuple(
            replace(stage, steps=tuple(map(replaced, stage.steps))) for stage in self.stages
        )
        return replace(self, stages=stages, dead_letters=sinks.get(DEAD, self.dead_letters))

    def leading_to(self, sinks: Collection[str]) -> Plan:
        """Return the part of the plan these sinks need. Dead letters need all of it: any step may produce some."""
        if DEAD in sinks:
            return self
        needed: dict[str, Step] = {}
        todo = [step for stage in self.stages for step in stage.steps if step.name in sinks]
        while todo:
            step = todo.pop()
            if step.name not in needed:
                needed[step.name] = step
                todo += step.inputs
        kept = [s for s in self.stages if any(port.name in needed for port in s.ports)]
        number = {stage.index: at for at, stage in enumerate(kept)}
        stages = []
        for stage in kept:
            ports = tuple(port for port in stage.ports if port.name in needed)
            steps = tuple(step for step in stage.steps if step.name in needed)
            before = tuple(number[index] for index in stage.before if index in number)
            after = tuple(number[index] for index in stage.after if index in number)
            index = number[stage.index]
            stages.append(Stage(index, stage.name, ports, steps, before, after))
        return replace(self, stages=tuple(stages))

    @property
    def levels(self) -> tuple[int, ...]:
        """Return how many distributors lie before each stage, on the longest way to it."""
        levels: list[int] = []
        for stage in self.stages:
            levels.append(1 + max((levels[before] for before in stage.before), default=-1))
        return tuple(levels)


def compile_flow(flow: Flow) -> Plan:
    """Return the stages of a flow; raise `FlowError` if it is not complete."""
    steps = list(flow.steps.values())
    _check_complete(flow, steps)
    roots = _Roots()
    inside: dict[str, tuple[Step, ...]] = {}  # step name → the ports whose items reach the step
    for step in steps:
        if step.kind in ("source", "key_by"):
            inside[step.name] = (step,)
            roots.add(step)
        else:
            reached = dict.fromkeys(port for i in step.inputs for port in inside[i.name])
            inside[step.name] = tuple(reached)
            if step.kind == "union" and step.keyed:
                roots.unite(tuple(reached))
    groups = roots.groups()
    edges: set[tuple[int, int]] = set()
    for step in steps:
        if step.kind == "key_by":
            for port in inside[step.inputs[0].name]:
                edges.add((roots.of(port), roots.of(step)))
    _check_no_circle(roots, inside, steps, edges)
    order = _ordered(groups, edges)
    number = {group: index for index, group in enumerate(order)}
    stages = []
    for group in order:
        ports = groups[group]
        own_steps = tuple(
            step
            for step in steps
            if step.kind not in ("source", "key_by")
            and any(roots.of(port) == group for port in inside[step.name])
        )
        stages.append(
            Stage(
                number[group],
                "+".join(port.name for port in ports),
                ports,
                own_steps,
                tuple(sorted(number[a] for a, b in edges if b == group)),
                tuple(sorted(number[b] for a, b in edges if a == group)),
            )
        )
    return Plan(flow.name, tuple(stages), flow.dead_letters, flow.state)


def _check_complete(flow: Flow, steps: Sequence[Step]) -> None:
    used = {i.name for step in steps for i in step.inputs}
    for step in steps:
        if step.kind == "sink" or step.name in used:
            continue
        raise FlowError(
            f"{step.where}: the stream that comes out of {step.name!r} leads nowhere: give it a sink"
        )
    if not any(step.kind == "source" for step in steps):
        raise FlowError(f"flow {flow.name!r} has no source")
    names: set[str] = set()
    for step in steps:
        source = step.options.get("source")
        if isinstance(source, Pushed):
            if source.name in names:
                raise FlowError(
                    f"{step.where}: programs find a source by its name, and there are two {source} in this flow"
                )
            names.add(source.name)


class _Roots:
    """Groups of ports that belong to one stage: a union-find in the order the ports were added."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.number: dict[str, int] = {}
        self.ports: list[Step] = []

    def add(self, port: Step) -> None:
        self.number[port.name] = len(self.ports)
        self.parent[len(self.ports)] = len(self.ports)
        self.ports.append(port)

    def of(self, port: Step) -> int:
        number = self.number[port.name]
        while self.parent[number] != number:
            number = self.parent[number]
        return number

    def unite(self, ports: Sequence[Step]) -> None:
        lowest = min(map(self.of, ports))
        for port in ports:
            self.parent[self.of(port)] = lowest

    def groups(self) -> dict[int, tuple[Step, ...]]:
        groups: dict[int, list[Step]] = {}
        for port in self.ports:
            groups.setdefault(self.of(port), []).append(port)
        return {group: tuple(ports) for group, ports in groups.items()}


def _check_no_circle(
    roots: _Roots,
    inside: dict[str, tuple[Step, ...]],
    steps: Sequence[Step],
    edges: set[tuple[int, int]],
) -> None:
    """Raise `FlowError` for a union that leads a stage back to itself; no other step can."""
    for union in steps:
        if union.kind != "union" or not union.keyed:
            continue
        start = roots.of(inside[union.name][0])
        reached: set[int] = set()
        todo = [b for a, b in edges if a == start]
        while todo:
            group = todo.pop()
            if group not in reached:
                reached.add(group)
                todo += [b for a, b in edges if a == group]
        if start in reached:
            raise FlowError(
                f"{union.where}: {union.name!r} unites keyed streams of which one leads to the other, so items "
                "would have to flow backwards; unite them before key_by"
            )


def _ordered(groups: dict[int, tuple[Step, ...]], edges: set[tuple[int, int]]) -> list[int]:
    """Return the groups so that every edge leads onwards; sources first, then in the order they were written."""
    remaining = dict(groups)
    order: list[int] = []
    while remaining:
        ready = [g for g in remaining if not any(b == g and a in remaining for a, b in edges)]
        sources = [g for g in ready if groups[g][0].kind == "source"]
        chosen = min(sources or ready)
        order.append(chosen)
        del remaining[chosen]
    return order


# ---------------------------------------------------------------- a stage on a worker


@dataclass(slots=True)
class Operators:
    """The operators of one stage on one worker."""

    heads: tuple[Operator, ...]
    keyed: tuple[Keyed, ...]
    reading: Reading | None
    writing: tuple[Writing, ...]
    outlets: tuple[KeyBy, ...]
    errors: dict[str, int]
    consumers: tuple[Consumers, ...]
    """The places where several steps follow one stream."""
    unites: bool
    """Whether streams are united in the stage."""


def build(
    plan: Plan,
    stage: Stage,
    place: Place,
    deliver: Callable[[int, RowBatch], None],
    now: int,
    dead_letter: Callable[[DeadLetter], None] | None = None,
    store: Callable[[str], KeyStore] | None = None,
) -> Operators:
    """Make the operators of a stage; `deliver(stage, batch)` takes batches keyed for another stage.

    `store` makes the stores of steps whose state is not kept in memory.
    """
    errors: dict[str, int] = {}

    def setting(step: Step) -> Setting:
        upgrades = step.options.get("upgrades", ())
        # The parts of a source are few, and hold open readers: they stay in memory.
        step_store = None if step.kind == "source" else store
        return Setting(step.name, step.on_error, dead_letter, errors, step_store, upgrades)

    operators_by_name: dict[str, Operator] = {}
    ways = Ways()
    for port in stage.ports:
        if port.kind == "source":
            source, clock = port.options["source"], port.options["clock"]
            kind = Receiving if isinstance(source, Pushed) else Reading
            operators_by_name[port.name] = kind(setting(port), source, clock, now)
        else:
            # Before it is united with others, a stream has one side, whatever port of the stage it enters by.
            operators_by_name[port.name] = Side(setting(port), 0)
    for step in stage.steps:
        operator = _operator(step, setting(step), place, operators_by_name, ways)
        operators_by_name[step.name] = operator
        if step.kind == "union" and step.keyed:
            for side, before in enumerate(step.inputs):
                entry = Side(setting(step), side)
                entry.outs.append(operator)
                operators_by_name[before.name].outs.append(entry)
        elif step.kind != "way":
            for before in step.inputs:
                if before.name in operators_by_name:
                    operators_by_name[before.name].outs.append(operator)
    stateful = any(isinstance(operator, StatefulSteps) for operator in operators_by_name.values())
    for operator in operators_by_name.values():
        if isinstance(operator, Meeting):
            operator.keeps_ports = stateful  # no other step uses the port
    outlets = []
    for after in stage.after:
        ports = [
            (at, port)
            for at, port in enumerate(plan.stages[after].ports)
            if port.inputs[0].name in operators_by_name
        ]
        onward: Callable[[RowBatch], None] = partial(deliver, after)
        meeting = Meeting(setting(ports[0][1]), ways, deliver=onward)
        for at, port in ports:
            options: dict[str, Any] = port.options
            outlet = KeyBy(setting(port), options["key"], options["value"], at, onward)
            operators_by_name[port.inputs[0].name].outs.append(outlet)
            outlets.append(outlet)
            if len(ports) > 1:
                outlet.outs, outlet.deliver = [meeting], meeting.push
                ways.before.append(outlet.flush)
                ways.release.append(outlet.flush)
        if len(ports) > 1:
            ways.release.append(meeting.release)
    mark_parting([*operators_by_name.values(), *outlets], ways)
    operators = list(operators_by_name.values())
    for operator in operators:
        if len(operator.outs) > 1:
            operator.consumers = Consumers(operator.step, operator.outs)
            operator.consumers.numbered = operator.parting is not None
    heads = tuple(operators_by_name[port.name] for port in stage.ports)
    reading = heads[0] if isinstance(heads[0], Reading) else None
    return Operators(
        heads,
        tuple(operator for operator in operators if isinstance(operator, Keyed)),
        reading,
        tuple(operator for operator in operators if isinstance(operator, Writing)),
        tuple(outlets),
        errors,
        tuple(op.consumers for op in operators if op.consumers is not None),
        any(isinstance(operator, Meeting) for operator in operators),
    )


def _operator(
    step: Step, setting: Setting, place: Place, operators_by_name: dict[str, Operator], ways: Ways
) -> Operator:
    if step.kind == "union":
        meeting = Meeting(setting, ways)
        ways.release.append(meeting.release)
        return meeting
    if step.kind == "way":
        branch = operators_by_name[step.inputs[0].name]
        assert isinstance(branch, Branch)
        return branch.yes if step.options["way"] == "yes" else branch.no
    if step.kind == "sink":
        return Writing(setting, step.options["sink"], replace(place, step=step.name))
    assert step.make is not None
    return step.make(setting)


class Side(Operator):
    """The entry of one of several united streams: it marks the items with their side."""

    def __init__(self, setting: Setting, side: int) -> None:
        super().__init__(setting)
        self.side = side

    def push(self, batch: RowBatch) -> None:
        """Mark the batch with its side."""
        side = batch.with_values(batch.values)
        side.port = self.side
        self.emit(side)
