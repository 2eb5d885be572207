"""Write metrics in the text format of Prometheus. Label values and help texts are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Labels = tuple[tuple[str, str], ...]


class Text:
    """A text with metrics, one after the other; `common` are labels of all values.

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

    def begin(self, name: str, kind: str, help_text: str) -> None:
        """Begin a metric with this name, kind and help text; its values follow (`add`)."""
        self._name = f"railgun_{name}"
        text = help_text.replace("\\", "\\\\").replace("\n", "\\n")
        self.lines += [f"# HELP {self._name} {text}", f"# TYPE {self._name} {kind}"]

    def counter(self, name: str, help_text: str) -> None:
        """Begin a counter: a metric that never decreases."""
        self.begin(name, "counter", help_text)

    def gauge(self, name: str, help_text: str, value: float) -> None:
        """Write a gauge with a single value."""
        self.begin(name, "gauge", help_text)
        self.add((), value)

    def add(self, labels: Labels, value: float, ending: str = "") -> None:
        """Write a value of the current metric."""
        pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in (*self._common, *labels))
        self.lines.append(f"{self._name}{ending}{f'{{{pairs}}}' if pairs else ''} {value}")

    def histogram(
        self, labels: Labels, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> None:
        """Write a histogram: `counts` are the values up to each bound and, at the end, those above the last."""
        *below, count = accumulate(counts)
        for bound, cumulative in zip(bounds, below, strict=True):
            self.add((*labels, ("le", str(bound))), cumulative, "_bucket")
        self.add((*labels, ("le", "+Inf")), count, "_bucket")
        self.add(labels, total, "_sum")
        self.add(labels, count, "_count")

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
