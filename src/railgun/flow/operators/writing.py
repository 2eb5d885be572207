"""Writing: where a flow's results leave it."""

from __future__ import annotations

from railgun.flow.operators.operator import Operator, Setting
from railgun.flow.sink import Place, Sink, Writer
from railgun.wire.rows import RowBatch


class Writing(Operator):
    """Hands items to a sink's writer."""

    def __init__(self, setting: Setting, sink: Sink[object], place: Place) -> None:
        super().__init__(setting)
        self.writer: Writer[object] = sink.open(place)
        self.records = 0
        self.dirty = False

    def push(self, batch: RowBatch) -> None:
        """Write the items."""
        self.writer.write(batch.values)
        self.records += len(batch)
        self.dirty = True

    def flush(self) -> None:
        """Let others see what was written."""
        if self.dirty:
            self.dirty = False
            self.writer.flush()
