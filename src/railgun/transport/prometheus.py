"""Figures as text for Prometheus. Values of labels and help texts may be anything: they are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Labels = tuple[tuple[str, str], ...]


class Text:
    """Metric after metric, each begun by what it is; `common` are labels that all values have.

    >>> text = Text((("flow", "words"),))
    >>> text.counter("records_total", "Records that came in")
    >>> text.add((("stage", 'a"b'),), 7)
    >>> print(text, end="")
    # HELP railgun_records_total Records that came in
    # TYPE railgun_records_total counter
    railgun_records_total{flow="words",stage="a\\"b"} 7
    """

    def __init__(self, common: Labels = ()) -> None:
        self.lines: list[str] = []
        self._common = common
        self._name = ""

    def begin(self, name: str, kind: str, what: str) -> None:
        """A metric; its values follow."""
        self._name = f"railgun_{name}"
        told = what.replace("\\", "\\\\").replace("\n", "\\n")
        self.lines += [f"# HELP {self._name} {told}", f"# TYPE {self._name} {kind}"]

    def counter(self, name: str, what: str) -> None:
        """A metric that never falls."""
        self.begin(name, "counter", what)

    def gauge(self, name: str, what: str, value: float) -> None:
        """A metric with one value."""
        self.begin(name, "gauge", what)
        self.add((), value)

    def add(self, labels: Labels, value: float, ending: str = "") -> None:
        """A value of the metric that was begun."""
        told = ",".join(f'{name}="{_escaped(text)}"' for name, text in (*self._common, *labels))
        self.lines.append(f"{self._name}{ending}{f'{{{told}}}' if told else ''} {value}")

    def histogram(
        self, labels: Labels, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> None:
        """How many values were up to each bound, and how many above the last; and their sum."""
        *below, count = accumulate(counts)
        for bound, told in zip(bounds, below, strict=True):
            self.add((*labels, ("le", str(bound))), told, "_bucket")
        self.add((*labels, ("le", "+Inf")), count, "_bucket")
        self.add(labels, total, "_sum")
        self.add(labels, count, "_count")

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
