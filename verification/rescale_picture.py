"""Draw a live rescale: latency, throughput, and the keys of each worker, while records flow on.

The picture shows at a glance what a page of the design explains: keys move a few at a time, and the records of all
other keys do not wait for them. Plain SVG, written by hand: it needs nothing installed and opens in any browser, on a
light or on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, LEFT, RIGHT = 960, 74, 116
PANELS = {"latency": (128, 200), "rate": (372, 90), "keys": (508, 170)}  # top and height of each
HEIGHT = 736
LEGEND = WIDTH - RIGHT + 14
COLOURS = ("#4477aa", "#5ab4d6", "#c9a227", "#d6616b", "#7a5aa6", "#3f8f5f")

STYLE = """
  .page { fill: #ffffff; stroke: #d5dae1 }
  text { fill: #1d2733; font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
  .title { font-size: 20px; font-weight: 600 }
  .soft { fill: #5a6675; font-size: 12px }
  .strong { font-weight: 600 }
  .grid { stroke: #8793a3; stroke-opacity: 0.3 }
  .axis { stroke: #8793a3 }
  .rescale { fill: #e8a33d; fill-opacity: 0.16 }
  .bracket { stroke: #c07d1c; stroke-width: 2; fill: none }
  .bar { fill: #6b7f99 }
  .longest { stroke: #c2453f; stroke-width: 2; fill: none }
  .p99 { stroke: #d59a2b; stroke-width: 2; fill: none }
  .median { stroke: #4477aa; stroke-width: 2; fill: none }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12171e; stroke: #2c3642 }
    text { fill: #e6ebf1 }
    .soft { fill: #9fabba }
    .bar { fill: #8d9fb6 }
    .median { stroke: #7fb2e5 }
    .longest { stroke: #ee7f78 }
    .bracket { stroke: #e8a33d }
  }
"""


@dataclass(frozen=True, slots=True)
class Rescale:
    """One rescale: from the first moved key to its end, in seconds."""

    before: int
    after: int
    begin: float
    end: float


@dataclass(slots=True)
class Story:
    """The data of a picture, by intervals of `every` seconds.

    Latencies are in milliseconds; the numbers of keys are known at `times`, in seconds.
    """

    title: str
    subtitle: str
    every: float
    median: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)  # by worker
    rescales: list[Rescale] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Return the length of the story in seconds."""
        return max(self.every * len(self.rate), self.times[-1] if self.times else 0.0, self.every)


def draw(story: Story) -> str:
    """The story as an SVG document.

    >>> story = Story("example", "two intervals", every=0.25, median=[2, 2], p99=[3, 4], longest=[4, 5],
    ...               rate=[100, 110], times=[0, 0.25, 0.5], held={0: [3, 4, 4]})
    >>> draw(story).startswith("<svg ")
    True
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(story.title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        text(LEFT, 36, story.title, "title"),
        text(LEFT, 57, story.subtitle, "soft"),
        *_rescales(story),
        *_latency(story),
        *_rate(story),
        *_keys(story),
        *_time(story),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return text at a position."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def ticks(top: float, most: int = 4) -> list[int]:
    """Return round numbers for an axis that reaches to `top`.

    >>> ticks(300), ticks(47), ticks(2400, most=8)
    ([0, 100, 200, 300], [0, 20, 40], [0, 500, 1000, 1500, 2000])
    """
    steps = (size * 10**power for power in range(12) for size in (1, 2, 5))
    return list(range(0, int(top) + 1, next(step for step in steps if top / step < most)))


class Scale:
    """The scale of a panel; time is the same in all panels."""

    def __init__(self, story: Story, panel: str, top: float) -> None:
        self.story = story
        self.begin, self.height = PANELS[panel]
        self.top = max(1.0, top)

    def x(self, at: float) -> float:
        """Return the position of a time."""
        return LEFT + (WIDTH - LEFT - RIGHT) * at / self.story.duration

    def y(self, value: float) -> float:
        """Return the position of a value."""
        return self.begin + self.height * (1 - value / self.top)

    def marks(self) -> Iterable[tuple[float, str]]:
        """Yield the values that get a line, with their labels."""
        return ((value, f"{value:,}") for value in ticks(self.top))

    def axis(self, heading: str) -> Iterator[str]:
        """Yield the heading, lines at round values, and the labels."""
        yield text(LEFT, self.begin - 10, heading, "strong")
        for value, name in self.marks():
            y = self.y(value)
            kind = "axis" if y >= self.begin + self.height - 0.5 else "grid"
            yield f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            yield text(LEFT - 8, y + 4, name, "soft", "end")

    def points(self, times: Sequence[float], values: Sequence[float]) -> list[str]:
        """Return the positions of values."""
        return [
            f"{self.x(at):.1f} {self.y(value):.1f}" for at, value in zip(times, values, strict=True)
        ]


class LogScale(Scale):
    """A scale on which each power of ten takes the same height."""

    def __init__(self, story: Story, panel: str, lowest: float, top: float) -> None:
        super().__init__(story, panel, top)
        self.low = floor(log10(max(lowest, 0.1)))
        self.high = max(self.low + 1, ceil(log10(max(top, 1.0))))

    def y(self, value: float) -> float:
        """Return the position of a value."""
        part = (log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self.begin + self.height * (1 - part)

    def marks(self) -> Iterable[tuple[float, str]]:
        """Yield powers of ten, with their labels."""
        return ((10.0**power, f"{10.0**power:g}") for power in range(self.low, self.high + 1))


def _rescales(story: Story) -> Iterator[str]:
    """Yield bands behind all panels, and a bracket that names the change."""
    scale = Scale(story, "latency", 1)
    top = PANELS["latency"][0] - 34
    bottom = sum(PANELS["keys"])
    for rescale in story.rescales:
        left, right = scale.x(rescale.begin), max(scale.x(rescale.end), scale.x(rescale.begin) + 2)
        yield (
            f'<rect class="rescale" x="{left:.1f}" y="{top}" '
            f'width="{right - left:.1f}" height="{bottom - top}"/>'
        )
        yield f'<path class="bracket" d="M{left:.1f} {top + 5}V{top}H{right:.1f}V{top + 5}"/>'
        words = f"{rescale.before} → {rescale.after} worker{'s' * (rescale.after > 1)}"
        yield text((left + right) / 2, top - 7, words, "strong", "middle")


def _latency(story: Story) -> Iterator[str]:
    """Yield lines: latencies of records."""
    positive = [value for value in story.median if value > 0]
    lowest, top = min(positive, default=1.0), max(story.longest, default=1.0)
    scale = LogScale(story, "latency", lowest, top)
    yield from scale.axis(f"Latency, ms, in every {story.every * 1000:.0f} ms")
    lines = {"median": story.median, "p99": story.p99, "longest": story.longest}
    times = [(i + 0.5) * story.every for i in range(len(story.median))]
    for row, (name, values) in enumerate(lines.items()):
        if values:
            yield f'<path class="{name}" d="M{"L".join(scale.points(times, values))}"/>'
        y = scale.begin + scale.height - 12 - 22 * row
        yield f'<path class="{name}" d="M{LEGEND} {y - 4:.1f}h12"/>'
        yield text(LEGEND + 18, y, name, "soft")


def _rate(story: Story) -> Iterator[str]:
    """Yield bars: records a second."""
    scale = Scale(story, "rate", max(story.rate, default=1))
    yield from scale.axis("Records a second")
    width = max(0.5, scale.x(story.every) - scale.x(0) - 1)
    for i, value in enumerate(story.rate):
        y = scale.y(value)
        yield (
            f'<rect class="bar" x="{scale.x(i * story.every) + 0.5:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{scale.y(0) - y:.1f}"/>'
        )


def _keys(story: Story) -> Iterator[str]:
    """Yield stacked areas: the keys of each worker."""
    layers = sorted(story.held.items())
    sums = [sum(values) for values in zip(*story.held.values(), strict=True)]
    scale = Scale(story, "keys", max(sums, default=1))
    below = [0] * len(story.times)
    for row, (worker, values) in enumerate(layers):
        above = [low + value for low, value in zip(below, values, strict=True)]
        outline = scale.points(story.times, above) + scale.points(story.times, below)[::-1]
        fill = f'fill="{COLOURS[worker % len(COLOURS)]}"'
        yield f'<path {fill} d="M{"L".join(outline)}Z"/>'
        y = scale.y(0) - 12 - 22 * row
        yield f'<rect {fill} x="{LEGEND}" y="{y - 10:.1f}" width="12" height="12" rx="2"/>'
        yield text(LEGEND + 18, y, f"worker {worker}", "soft")
        below = above
    yield from scale.axis("Keys each worker holds")


def _time(story: Story) -> Iterable[str]:
    """Yield the axis of time below everything."""
    scale = Scale(story, "keys", 1)
    y = sum(PANELS["keys"]) + 18
    for at in ticks(story.duration, most=8):
        yield text(scale.x(at), y, f"{at:,}", "soft", "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, y + 24, "seconds", "soft", "middle")
