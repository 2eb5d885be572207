"""Writing: where a flow's results leave it."""

from __future__ import annotations

from railgun.flow.errors import SinkError
from railgun.flow.operators.operator import Operator, Setting, shorten, tell
from railgun.flow.sink import Place, Sink, Writer
from railgun.wire.rows import RowBatch


class Writing(Operator):
    """Hands items to a sink's writer."""

    def __init__(self, setting: Setting, sink: Sink[object], place: Place) -> None:
        super().__init__(setting)
        self.sink = sink
        try:
            self.writer: Writer[object] = sink.open(place)
        except Exception as error:
            raise self._failed("open", error) from error
        self.records = 0
        self.dirty = False

    def push(self, batch: RowBatch) -> None:
        """Write the items."""
        try:
            self.writer.write(batch.values)
        except Exception as error:
            raise self._failed("write", error, shorten(batch.values[0])) from error
        self.records += len(batch)
        self.dirty = True

    def flush(self) -> None:
        """Let others see what was written."""
        if self.dirty:
            self.dirty = False
            try:
                self.writer.flush()
            except Exception as error:
                raise self._failed("flush", error) from error

    def _failed(self, what: str, error: Exception, record: str = "") -> SinkError:
        return SinkError(self.step, f"{type(self.sink).__name__}.{what}", "", record, tell(error))
