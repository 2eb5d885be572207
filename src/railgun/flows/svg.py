"""Draw a picture of a flow as SVG, with a layout of its own.

Stages stand in columns, each right of the stages that feed it; the steps of a stage run from top to bottom. Rules that
keep lines off the boxes:

1. Within a stage a step is one row below the lowest step that feeds it. A line that passes a row has a place of its own
   in it.
2. A line to another stage leaves its step downwards, goes right below the step's row, up or down between the columns,
   and comes in from above. If it passes a column, it does so above all stages.
3. Lines that run side by side have a track each.
4. Nodes have their own background and the rest is grey, so the picture reads on light and on dark pages. It needs no
   external font, style or script.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Final
from unicodedata import east_asian_width

from railgun.flows.draw import COLOURS, Edge, Node, Picture

MARGIN: Final = 16.0  # these lengths are in pixels
PADDING: Final = 18.0  # between a stage's frame and its steps
TITLE_HEIGHT: Final = 26.0  # height of a stage's name
STEP_HEIGHT: Final = 44.0  # height of a step
STEP_GAP: Final = 18.0  # between the steps of a row
TRACK_GAP: Final = 7.0  # between lines that run side by side
LINE_MARGIN: Final = 16.0  # between lines and what is beside them
MAX_SHOWN_CHARACTERS: Final = 34  # characters of a name that are shown
_GREY: Final = "#7d8896"
_FONT: Final = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


@dataclass(slots=True)
class Spot:
    """A place in a row of a stage: that of a node, or of a line that passes the row (`node` is -1)."""

    node: int
    width: float
    row: int
    x: float = 0.0  # of the spot's middle
    above: list[Spot] = field(default_factory=list)


@dataclass(slots=True)
class Box:
    """A stage: its rows of spots, and its position."""

    title: str
    rows: list[list[Spot]]
    paths: list[tuple[Edge, list[Spot]]]  # lines within the stage, row by row
    column: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    tops: list[float] = field(default_factory=list)  # y of each row, within the stage
    entries: int = 0  # lines that come in from above
    exits: dict[int, int] = field(default_factory=dict)  # lines that leave below a row


@dataclass(slots=True)
class Lane:
    """A line from a stage to another: its tracks below its row, between columns, above all, and above its end."""

    edge: Edge
    below: int
    left: int
    over: int | None
    right: int
    into: int


def svg(drawn: Picture) -> str:
    """Return the picture as an SVG document."""
    spots: dict[int, Spot] = {}
    boxes = [_box(drawn, stage, spots) for stage in range(len(drawn.stages))]
    crossing = [e for e in drawn.edges if drawn.nodes[e.start].stage != drawn.nodes[e.end].stage]
    _columns(drawn, boxes, crossing)
    lanes, gaps, over_tracks = _lanes(drawn, boxes, spots, crossing)
    for box in boxes:
        _size(box)
    width, height, lefts = _place(boxes, gaps, over_tracks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{_FONT}">',
        f"<title>{_clean(drawn.name)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0.5 8 4 0 7.5z" fill="{_GREY}"/></marker></defs>',
    ]
    for box in boxes:
        parts.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'rx="12" fill="{_GREY}" fill-opacity="0.08" stroke="{_GREY}" stroke-opacity="0.6"/>'
            + _text(box.x + 14, box.y + 18, box.title, 12, _GREY, "start", bold=True)
        )
    labels: list[str] = []
    for box in boxes:
        for edge, path in box.paths:
            parts.append(_inner(box, edge, path, labels))
    for lane in lanes:
        parts.append(_outer(drawn, boxes, spots, lane, lefts, labels))
    for number, node in enumerate(drawn.nodes):
        parts.append(_node(boxes[node.stage], spots[number], node))
    return "\n".join([*parts, *labels, "</svg>"]) + "\n"


# ---------------------------------------------------------------- laying out


def _box(drawn: Picture, stage: int, spots: dict[int, Spot]) -> Box:
    """Return a stage with its rows. Steps are in topological order, so one pass finds every row."""
    numbers = [number for number, node in enumerate(drawn.nodes) if node.stage == stage]
    inner = [e for e in drawn.edges if e.start in numbers and e.end in numbers]
    row: dict[int, int] = {}
    for number in numbers:
        row[number] = max((row[e.start] + 1 for e in inner if e.end == number), default=0)
        spots[number] = Spot(number, _width(drawn.nodes[number]), row[number])
    rows: list[list[Spot]] = [[] for _ in range(max(row.values()) + 1)]
    for number in numbers:
        rows[row[number]].append(spots[number])
    paths = []
    for edge in inner:
        path = [spots[edge.start]]
        for at in range(row[edge.start] + 1, row[edge.end]):
            path.append(Spot(-1, 12.0, at))
            rows[at].append(path[-1])
        path.append(spots[edge.end])
        for upper, lower in pairwise(path):
            lower.above.append(upper)
        paths.append((edge, path))
    box = Box(drawn.stages[stage], rows, paths)
    _spread(box)
    return box


def _spread(box: Box) -> None:
    """Set the x of every spot: near the middle of the spots that feed it, and clear of its neighbours."""
    for spots in box.rows:
        wished = {
            id(s): sum(a.x for a in s.above) / len(s.above) if s.above else 0.0 for s in spots
        }
        spots.sort(key=lambda spot: wished[id(spot)])
        for spot in spots:
            spot.x = wished[id(spot)]
        for left, right in pairwise(spots):
            right.x = max(right.x, left.x + (left.width + right.width) / 2 + STEP_GAP)
        shift = sum(wished[id(s)] - s.x for s in spots) / len(spots)
        for spot in spots:
            spot.x += shift


def _columns(drawn: Picture, boxes: list[Box], crossing: Iterable[Edge]) -> None:
    """Set the column of every stage: right of the stages that feed it, which have lower numbers."""
    before: dict[int, set[int]] = {}
    for edge in crossing:
        before.setdefault(drawn.nodes[edge.end].stage, set()).add(drawn.nodes[edge.start].stage)
    for number, box in enumerate(boxes):
        box.column = max((boxes[b].column + 1 for b in before.get(number, ())), default=0)


def _lanes(
    drawn: Picture, boxes: list[Box], spots: dict[int, Spot], crossing: Iterable[Edge]
) -> tuple[list[Lane], list[int], int]:
    """Return the tracks of lines between stages, and how many there are after each column and above all stages."""
    gaps = [0] * (max(box.column for box in boxes) + 1)
    over_tracks = 0
    lanes = []
    for edge in crossing:
        start, end = boxes[drawn.nodes[edge.start].stage], boxes[drawn.nodes[edge.end].stage]
        row = spots[edge.start].row
        below = start.exits[row] = start.exits.get(row, 0) + 1
        into = end.entries = end.entries + 1
        left = right = gaps[start.column] = gaps[start.column] + 1
        over = None
        if end.column > start.column + 1:
            over = over_tracks = over_tracks + 1
            right = gaps[end.column - 1] = gaps[end.column - 1] + 1
        lanes.append(Lane(edge, below, left, over, right, into))
    return lanes, gaps, over_tracks


def _size(box: Box) -> None:
    """Set the size of a stage, and the positions of its rows."""
    left = min(s.x - s.width / 2 for row in box.rows for s in row)
    right = max(s.x + s.width / 2 for row in box.rows for s in row)
    for row in box.rows:
        for spot in row:
            spot.x += PADDING - left
    titled = 28 + 7.0 * _length(_shown(box.title))
    slack = max(0.0, titled - (right - left + 2 * PADDING)) / 2
    for row in box.rows:
        for spot in row:
            spot.x += slack
    box.width = right - left + 2 * PADDING + 2 * slack
    y = TITLE_HEIGHT + (TRACK_GAP * box.entries + LINE_MARGIN if box.entries else 6.0)
    for at in range(len(box.rows)):
        box.tops.append(y)
        lines = box.exits.get(at, 0)
        last = at == len(box.rows) - 1
        y += STEP_HEIGHT + (PADDING if last else 38.0) + TRACK_GAP * lines
    box.height = y


def _place(boxes: list[Box], gaps: list[int], over_tracks: int) -> tuple[float, float, list[float]]:
    """Place the columns side by side; return the total size, and where the space right of each column begins."""
    top = MARGIN + (over_tracks * TRACK_GAP + LINE_MARGIN if over_tracks else 0.0)
    columns = [[box for box in boxes if box.column == at] for at in range(len(gaps))]
    tall = [sum(b.height for b in column) + STEP_GAP * (len(column) - 1) for column in columns]
    x = MARGIN
    lefts = []
    for at, column in enumerate(columns):
        y = top + (max(tall) - tall[at]) / 2
        width = max(box.width for box in column)
        for box in column:
            box.x, box.y = x + (width - box.width) / 2, y
            y += box.height + STEP_GAP
        x += width
        lefts.append(x)
        x += (gaps[at] + 1) * TRACK_GAP + 2 * LINE_MARGIN if at < len(columns) - 1 else MARGIN
    return x, top + max(tall) + MARGIN, lefts


# ---------------------------------------------------------------- drawing


def _inner(box: Box, edge: Edge, path: list[Spot], labels: list[str]) -> str:
    """Return a line within a stage: curved between rows, straight where it passes one."""
    x, y = box.x + path[0].x, box.y + box.tops[path[0].row] + STEP_HEIGHT
    way = [f"M{x:.1f} {y:.1f}"]
    for spot in path[1:]:
        to_x, to_y = box.x + spot.x, box.y + box.tops[spot.row]
        end = to_y - (2 if spot.node >= 0 else 0)
        middle = (y + to_y) / 2
        way.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {end:.1f}")
        if spot.node < 0:
            way.append(f"V{to_y + STEP_HEIGHT:.1f}")
        x, y = to_x, to_y + STEP_HEIGHT
    if edge.label:
        near = box.x + (path[0].x + 5 * path[1].x) / 6
        labels.append(_pill(near, box.y + box.tops[path[1].row] - 19, edge.label))
    return _line(" ".join(way))


def _outer(
    drawn: Picture,
    boxes: list[Box],
    spots: dict[int, Spot],
    lane: Lane,
    lefts: list[float],
    labels: list[str],
) -> str:
    """Return a line to another stage, along its tracks."""
    start, end = boxes[drawn.nodes[lane.edge.start].stage], boxes[drawn.nodes[lane.edge.end].stage]
    first, last = spots[lane.edge.start], spots[lane.edge.end]
    x, y = start.x + first.x, start.y + start.tops[first.row] + STEP_HEIGHT
    down = y + 4 + TRACK_GAP * lane.below
    left = lefts[start.column] + LINE_MARGIN + TRACK_GAP * lane.left
    right = lefts[end.column - 1] + LINE_MARGIN + TRACK_GAP * lane.right
    into = end.y + TITLE_HEIGHT + TRACK_GAP * lane.into
    to_x, to_y = end.x + last.x, end.y + end.tops[last.row] - 2
    corners = [(x, y), (x, down), (left, down)]
    if lane.over is not None:
        over = MARGIN + TRACK_GAP * (lane.over - 1)
        corners += [(left, over), (right, over)]
    corners += [(right, into), (to_x, into), (to_x, to_y)]
    if lane.edge.label:
        labels.append(_pill(x - 8 + 30 * lane.below, down, lane.edge.label))
    return _line(_rounded(corners))


def _rounded(corners: list[tuple[float, float]], radius: float = 6.0) -> str:
    """Return the path of a line along corners, with the corners rounded."""
    way = [f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"]
    for (ax, ay), (bx, by), (cx, cy) in zip(corners, corners[1:], corners[2:], strict=False):
        before, after = abs(bx - ax) + abs(by - ay), abs(cx - bx) + abs(cy - by)
        cut = min(radius, before / 2, after / 2)
        if cut < 0.1:
            continue
        in_x, in_y = bx - (bx - ax) / before * cut, by - (by - ay) / before * cut
        out_x, out_y = bx + (cx - bx) / after * cut, by + (cy - by) / after * cut
        way.append(f"L{in_x:.1f} {in_y:.1f}Q{bx:.1f} {by:.1f} {out_x:.1f} {out_y:.1f}")
    way.append(f"L{corners[-1][0]:.1f} {corners[-1][1]:.1f}")
    return "".join(way)


def _pill(x: float, y: float, words: str) -> str:
    """Return a label upon a line."""
    fill, line, text = COLOURS["plain"]
    width = 10 + 6.2 * _length(words)
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - 6.5:.1f}" width="{width:.1f}" height="13" rx="6.5" '
        f'fill="{fill}" stroke="{line}" stroke-opacity="0.5"/>' + _text(x, y + 3.5, words, 10, text)
    )


def _line(way: str) -> str:
    return f'<path d="{way}" fill="none" stroke="{_GREY}" stroke-width="1.5" marker-end="url(#arrow)"/>'


def _node(box: Box, spot: Spot, node: Node) -> str:
    """Return a step: sources and sinks with round ends, steps with state as a cylinder, the others as a box."""
    fill, line, text = COLOURS[node.role]
    x, y = box.x + spot.x - spot.width / 2, box.y + box.tops[spot.row]
    paint = f'fill="{fill}" stroke="{line}" stroke-width="1.5"'
    size = f'x="{x:.1f}" y="{y:.1f}" width="{spot.width:.1f}" height="{STEP_HEIGHT:.0f}"'
    if node.role == "state":
        shape = (
            f'<path d="M{x:.1f} {y + 5:.1f}a{spot.width / 2:.1f} 5 0 0 1 {spot.width:.1f} 0v{STEP_HEIGHT - 10:.0f}'
            f'a{spot.width / 2:.1f} 5 0 0 1 {-spot.width:.1f} 0z" {paint}/>'
            f'<path d="M{x:.1f} {y + 5:.1f}a{spot.width / 2:.1f} 5 0 0 0 {spot.width:.1f} 0" '
            f'fill="none" stroke="{line}" stroke-width="1.5"/>'
        )
    else:
        round_by = {"source": STEP_HEIGHT / 2, "sink": STEP_HEIGHT / 2, "key": 10.0}.get(
            node.role, 4.0
        )
        shape = f'<rect {size} rx="{round_by:.0f}" {paint}/>'
    middle = box.x + spot.x
    lower = 4.0 if node.role == "state" else 0.0  # the height of the cylinder's lid
    if node.description:
        words = _text(middle, y + 20 + lower, node.name, 13, text, bold=True)
        words += _text(middle, y + 34 + lower / 2, node.description, 10.5, text)
    else:
        words = _text(middle, y + 27 + lower / 2, node.name, 13, text, bold=True)
    return f"<g><title>{_clean(node.name)}</title>{shape}{words}</g>"


def _text(
    x: float,
    y: float,
    words: str,
    size: float,
    colour: str,
    anchor: str = "middle",
    *,
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}" '
        f'text-anchor="{anchor}"{weight}>{_clean(_shown(words))}</text>'
    )


def _width(node: Node) -> float:
    """Return a width that fits the node's words in any common font."""
    return max(
        72.0, 28 + 7.8 * _length(_shown(node.name)), 28 + 6.2 * _length(_shown(node.description))
    )


def _length(words: str) -> int:
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in words)


def _shown(words: str) -> str:
    return words if len(words) <= MAX_SHOWN_CHARACTERS else words[: MAX_SHOWN_CHARACTERS - 1] + "…"


def _clean(words: str) -> str:
    """Return a text for XML, with unprintable characters replaced."""
    return escape("".join(c if c.isprintable() else "�" for c in words))
