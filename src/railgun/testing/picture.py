"""A live rescale as a picture: who holds which keys while records flow on.

One glance should tell what a page of the design explains: keys change hands a few at a time, and
the records of all others do not wait for them. Plain SVG, written by hand: it needs nothing
installed and opens in any browser, on a light or on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT = 960, 74, 116
PANELS = {"keys": (128, 250), "counted": (424, 90), "waits": (560, 90)}  # top and height of each
HEIGHT = 706
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
  .rescale { fill: #e8a33d; fill-opacity: 0.13 }
  .moving { fill: #e8a33d; fill-opacity: 0.20 }
  .bracket { stroke: #c07d1c; stroke-width: 2; fill: none }
  .travel { fill: #1d2733 }
  .bar { fill: #6b7f99 }
  .longest { stroke: #c2453f; stroke-width: 2; fill: none }
  .median { stroke: #6b7f99; stroke-width: 2; fill: none }
  .snapshot { stroke: #3f8f5f; stroke-width: 1.5; stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12171e; stroke: #2c3642 }
    text { fill: #e6ebf1 }
    .soft { fill: #9fabba }
    .travel { fill: #f2f5f8 }
    .bar { fill: #8d9fb6 }
    .median { stroke: #8d9fb6 }
    .longest { stroke: #ee7f78 }
    .snapshot { stroke: #6cc493 }
    .bracket { stroke: #e8a33d }
  }
"""


@dataclass(slots=True)
class Rescale:
    """One rescale: from when it was asked for until it was over, and when keys were on the move."""

    before: int
    after: int
    begin: int
    end: int = 0
    moving: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Story:
    """What there is to see, by intervals of `every` ticks of simulated time.

    Keys are told at the beginning of each interval and at the end of the last; records and waits
    (the ticks from a record's being read to its being counted) for each interval.
    """

    title: str
    subtitle: str
    every: int
    held: dict[int, list[int]] = field(default_factory=dict)  # by worker
    travel: list[int] = field(default_factory=list)  # between two workers
    counted: list[int] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    rescales: list[Rescale] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)  # when each was whole

    @property
    def duration(self) -> int:
        """How long it took, in ticks."""
        return self.every * len(self.counted)


def draw(story: Story) -> str:
    """The story as an SVG document.

    >>> story = Story("example", "two intervals", every=20, held={0: [3, 4, 4]}, travel=[0, 0, 0],
    ...               counted=[9, 9], median=[2, 2], longest=[4, 5])
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
        *_keys(story),
        *_counted(story),
        *_waits(story),
        *_snapshots(story),
        *_time(story),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def ticks(top: float, most: int = 4) -> list[int]:
    """Round numbers for an axis that reaches to `top`.

    >>> ticks(300), ticks(47), ticks(2400, most=8)
    ([0, 100, 200, 300], [0, 20, 40], [0, 500, 1000, 1500, 2000])
    """
    steps = (size * 10**power for power in range(12) for size in (1, 2, 5))
    return list(range(0, int(top) + 1, next(step for step in steps if top / step < most)))


class Scale:
    """Where values lie in a panel; time is the same in all of them."""

    def __init__(self, story: Story, panel: str, top: float) -> None:
        self.story = story
        self.begin, self.height = PANELS[panel]
        self.top = max(1.0, top)

    def x(self, at: float) -> float:
        """Where a time lies."""
        return LEFT + (WIDTH - LEFT - RIGHT) * at / max(1, self.story.duration)

    def y(self, value: float) -> float:
        """Where a value lies."""
        return self.begin + self.height * (1 - value / self.top)

    def axis(self, heading: str) -> Iterator[str]:
        """The heading, lines at round values, and the values."""
        yield text(LEFT, self.begin - 10, heading, "strong")
        for value in ticks(self.top):
            y = self.y(value)
            kind = "axis" if value == 0 else "grid"
            yield f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            yield text(LEFT - 8, y + 4, f"{value:,}", "soft", "end")

    def points(self, values: Sequence[float], shift: float = 0.0) -> list[str]:
        """Where values lie, one for each interval, `shift` intervals late."""
        return [
            f"{self.x((i + shift) * self.story.every):.1f} {self.y(value):.1f}"
            for i, value in enumerate(values)
        ]


def _rescales(story: Story) -> Iterator[str]:
    """Bands behind all panels, and a bracket that says what is being changed."""
    scale = Scale(story, "keys", 1)
    top = PANELS["keys"][0] - 34
    bottom = sum(PANELS["waits"])
    for rescale in story.rescales:
        for kind, begin, end in (
            ("rescale", rescale.begin, rescale.end),
            ("moving", *rescale.moving),
        ):
            left, right = scale.x(begin), scale.x(end)
            yield (
                f'<rect class="{kind}" x="{left:.1f}" y="{top}" '
                f'width="{right - left:.1f}" height="{bottom - top}"/>'
            )
        left, right = scale.x(rescale.begin), scale.x(rescale.end)
        yield f'<path class="bracket" d="M{left:.1f} {top + 5}V{top}H{right:.1f}V{top + 5}"/>'
        words = f"{rescale.before} → {rescale.after} worker{'s' * (rescale.after > 1)}"
        yield text((left + right) / 2, top - 7, words, "strong", "middle")
        left, right = (scale.x(at) for at in rescale.moving)
        yield text((left + right) / 2, top + 17, "keys move", "soft", "middle")


def _keys(story: Story) -> Iterator[str]:
    """Areas, one on the other: the keys of each worker, and those on their way."""
    layers = [
        (f"worker {worker}", f'fill="{COLOURS[worker % len(COLOURS)]}"', values)
        for worker, values in sorted(story.held.items())
    ]
    layers.append(("on the way", 'class="travel"', story.travel))
    floor = [0] * len(story.travel)
    scale = Scale(story, "keys", max(map(sum, zip(*(n for _, _, n in layers), strict=True))))
    for row, (name, fill, values) in enumerate(layers):
        roof = [low + value for low, value in zip(floor, values, strict=True)]
        outline = scale.points(roof) + scale.points(floor)[::-1]
        yield f'<path {fill} d="M{"L".join(outline)}Z"/>'
        y = scale.y(0) - 12 - 22 * row
        yield f'<rect {fill} x="{LEGEND}" y="{y - 10:.1f}" width="12" height="12" rx="2"/>'
        yield text(LEGEND + 18, y, name, "soft")
        floor = roof
    yield from scale.axis("Keys each worker holds")


def _counted(story: Story) -> Iterator[str]:
    """Bars: the records counted in each interval."""
    scale = Scale(story, "counted", max(story.counted, default=1))
    yield from scale.axis(f"Records counted, every {story.every} ticks")
    width = scale.x(story.every) - scale.x(0) - 1
    for i, value in enumerate(story.counted):
        y = scale.y(value)
        yield (
            f'<rect class="bar" x="{scale.x(i * story.every) + 0.5:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{scale.y(0) - y:.1f}"/>'
        )


def _waits(story: Story) -> Iterator[str]:
    """Lines: how long records waited."""
    scale = Scale(story, "waits", max(story.longest, default=1))
    yield from scale.axis("Ticks from read to counted")
    lines: dict[str, Sequence[float]] = {"median": story.median, "longest": story.longest}
    for row, (name, values) in enumerate(lines.items()):
        yield f'<path class="{name}" d="M{"L".join(scale.points(values, 0.5))}"/>'
        yield from _key(name, scale.y(0) - 12 - 22 * row)


def _snapshots(story: Story) -> Iterator[str]:
    """A dotted line where a snapshot became whole."""
    for panel in ("counted", "waits"):
        scale = Scale(story, panel, 1)
        for at in story.snapshots:
            yield f'<path class="snapshot" d="M{scale.x(at):.1f} {scale.begin}v{scale.height}"/>'
    if story.snapshots:
        yield from _key("snapshot", sum(PANELS["counted"]) - 12)


def _key(name: str, y: float) -> Iterator[str]:
    """What a line means."""
    yield f'<path class="{name}" d="M{LEGEND} {y - 4:.1f}h12"/>'
    yield text(LEGEND + 18, y, name, "soft")


def _time(story: Story) -> Iterable[str]:
    """The axis of time below everything."""
    scale = Scale(story, "waits", 1)
    y = sum(PANELS["waits"]) + 18
    for at in ticks(story.duration, most=8):
        yield text(scale.x(at), y, f"{at:,}", "soft", "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, y + 24, "simulated time (ticks)", "soft", "middle")
