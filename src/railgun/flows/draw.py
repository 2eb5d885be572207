"""Draw a flow as a picture, from its plan.

The picture shows what runs: the stages of the plan, the steps in each, and the edges between them. Rules:

1. A stage is a box, named after its ports. A `key_by` stands in the stage it opens, for that is where its items go.
2. A step that runs in several stages is drawn in each of them.
3. The two ways of a branch are edges, labelled yes and no.
4. Sources, sinks and steps with state look different from the others.

Mermaid is text that many tools draw; SVG is laid out by `railgun.flows.svg`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from railgun.engine.operators.keyed import Keyed
from railgun.flows.errors import FlowError
from railgun.flows.plan import Plan
from railgun.flows.step import Step

Role = Literal["source", "sink", "key", "state", "plain"]


@dataclass(frozen=True, slots=True)
class Node:
    """A step in a stage, as drawn."""

    stage: int
    name: str
    description: str
    """The kind of the step, and the class of a source or sink."""
    role: Role


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection between two nodes, by their numbers."""

    start: int
    end: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan as nodes and edges, independent of the drawing format."""

    name: str
    stages: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def draw(plan: Plan, form: str) -> str:
    """Return the plan as `"mermaid"` or `"svg"`; raise `FlowError` for any other form.

    >>> from railgun import Flow
    >>> from railgun.sinks.collect import Collect
    >>> from railgun.sources.items import Items
    >>> flow = Flow("words")
    >>> words = flow.source(Items(["b", "a"]), name="words").key_by(str)
    >>> words.reduce(min, name="least").sink(Collect(), name="out")
    >>> print(draw(flow.plan(), "mermaid"))
    flowchart LR
        subgraph stage0["words"]
            n0(["words<br><small>source Items</small>"]):::source
        end
        subgraph stage1["key_by"]
            n1{{"key_by"}}:::key
            n2[("least<br><small>reduce</small>")]:::state
            n3>"out<br><small>sink Collect</small>"]:::sink
        end
        n0 --> n1
        n1 --> n2
        n2 --> n3
        classDef source fill:#cfe3fc,stroke:#2f6fb7,color:#10243a
        classDef sink fill:#cdebd3,stroke:#2f8a4a,color:#0f2d18
        classDef key fill:#e2d9f7,stroke:#7a5bc0,color:#251a42
        classDef state fill:#fde2bd,stroke:#c07a1c,color:#3a2406
        classDef plain fill:#eceff3,stroke:#7b8794,color:#1f2933
    """
    if form == "mermaid":
        return mermaid(picture(plan))
    if form == "svg":
        from railgun.flows.svg import svg

        return svg(picture(plan))
    raise FlowError(f"flow {plan.flow!r} can be drawn as 'mermaid' or 'svg', not as {form!r}")


def picture(plan: Plan) -> Picture:
    """Return the nodes and edges of a plan."""
    nodes: list[Node] = []
    number: dict[tuple[int, str], int] = {}
    for stage in plan.stages:
        for step in (*stage.ports, *stage.steps):
            if step.kind != "way":
                number[stage.index, step.name] = len(nodes)
                nodes.append(Node(stage.index, step.name, _description(step), _role(step)))
    edges: list[Edge] = []
    for stage in plan.stages:
        for step in (*stage.ports, *stage.steps):
            end = number.get((stage.index, step.name))
            if end is None:
                continue
            # Items of a port may come from any stage; those of any other step come from its own.
            origins = range(len(plan.stages)) if step in stage.ports else (stage.index,)
            for before, label in map(_past_way, step.inputs):
                starts = (number.get((origin, before.name)) for origin in origins)
                edges += [Edge(start, end, label) for start in starts if start is not None]
    return Picture(plan.flow, tuple(s.name for s in plan.stages), tuple(nodes), tuple(edges))


def _past_way(step: Step) -> tuple[Step, str]:
    return (step.inputs[0], step.options["way"]) if step.kind == "way" else (step, "")


def _role(step: Step) -> Role:
    if step.kind == "source":
        return "source"
    if step.kind == "sink":
        return "sink"
    if step.kind == "key_by":
        return "key"
    make = step.make.func if isinstance(step.make, partial) else step.make
    return "state" if isinstance(make, type) and issubclass(make, Keyed) else "plain"


def _description(step: Step) -> str:
    endpoint = step.options.get(step.kind) if step.kind in ("source", "sink") else None
    description = step.kind if endpoint is None else f"{step.kind} {type(endpoint).__name__}"
    return "" if description == step.name else description


# ---------------------------------------------------------------- mermaid

COLOURS: Final[dict[Role, tuple[str, str, str]]] = {
    # fill, line, text: nodes have their own background, so they read well on light and on dark pages
    "source": ("#cfe3fc", "#2f6fb7", "#10243a"),
    "sink": ("#cdebd3", "#2f8a4a", "#0f2d18"),
    "key": ("#e2d9f7", "#7a5bc0", "#251a42"),
    "state": ("#fde2bd", "#c07a1c", "#3a2406"),
    "plain": ("#eceff3", "#7b8794", "#1f2933"),
}
_SHAPES: Final[dict[Role, tuple[str, str]]] = {
    "source": ("([", "])"),
    "sink": (">", "]"),
    "key": ("{{", "}}"),
    "state": ("[(", ")]"),
    "plain": ("[", "]"),
}
_CODES: Final = str.maketrans({c: f"#{ord(c)};" for c in '#"&<>`\\[]{}()|'})


def mermaid(drawn: Picture) -> str:
    """Return a picture as Mermaid text."""
    lines = ["flowchart LR"]
    for stage, name in enumerate(drawn.stages):
        lines.append(f'    subgraph stage{stage}["{_quoted(name)}"]')
        for number, node in enumerate(drawn.nodes):
            if node.stage == stage:
                description = (
                    f"<br><small>{_quoted(node.description)}</small>" if node.description else ""
                )
                left, right = _SHAPES[node.role]
                label = f'{left}"{_quoted(node.name)}{description}"{right}'
                lines.append(f"        n{number}{label}:::{node.role}")
        lines.append("    end")
    for edge in drawn.edges:
        label = f"|{edge.label}|" if edge.label else ""
        lines.append(f"    n{edge.start} -->{label} n{edge.end}")
    for role, (fill, line, text) in COLOURS.items():
        lines.append(f"    classDef {role} fill:{fill},stroke:{line},color:{text}")
    return "\n".join(lines)


def _quoted(name: str) -> str:
    """Return a name with the characters escaped that Mermaid interprets."""
    return "".join(c if c.isprintable() else "�" for c in name).translate(_CODES)
