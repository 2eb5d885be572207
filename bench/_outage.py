"""What `recovery` asks of everyone: how long nothing new came after a kill, and where the time went.

Everyone has the same state (`keys` keys of about 100 bytes each) and the same load offered, saves it
with the means of the engine, and is killed soon after something was saved: a second, or for Spark at
once. The clock runs from the kill to the first output of a record that was not due before it, for Spark
to that of any micro-batch. Nothing but the standard library is imported here: peers read this in
environments of their own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

KEYS, RATE = 1_000_000, 20_000
EVERY = 10.0  # seconds between two snapshots
AFTER = 1.0  # seconds from a snapshot to the kill
NEW = "first new output"


@dataclass(frozen=True, slots=True)
class Outage:
    """Seconds from a kill to what followed, in order; the last mark is the first new output.

    >>> outage = Outage({"Python is up": 0.5, "Spark is up": 4.0, NEW: 9.0}, "example 1.0")
    >>> Outage.of_line(outage.as_line()).seconds
    9.0
    >>> outage.since("Spark is up")
    5.0
    >>> outage.split()
    {'Python is up': 0.5, 'Spark is up': 3.5, 'first new output': 5.0}
    """

    marks: dict[str, float]
    engine: str

    @property
    def seconds(self) -> float:
        """How long nothing new came."""
        return self.marks[NEW]

    def since(self, mark: str) -> float:
        """The time from a mark to the first new output."""
        return self.seconds - self.marks[mark]

    def split(self) -> dict[str, float]:
        """How long each thing took."""
        before = [0.0, *self.marks.values()]
        return {
            name: at - since for (name, at), since in zip(self.marks.items(), before, strict=False)
        }

    def as_line(self) -> str:
        """The last line that a peer prints."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_line(line: str) -> Outage:
        """What a peer told."""
        return Outage(**json.loads(line))
