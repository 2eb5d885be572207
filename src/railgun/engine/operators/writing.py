"""Write a flow's results to its sinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from railgun.engine.operators.calls import SinkCall
from railgun.engine.operators.functions import check_done, check_methods
from railgun.engine.operators.operator import Operator, Setting, shorten
from railgun.flows.sink import Place, Sink, Token, TwoPhaseWriter, Writer
from railgun.transport.rows import RowBatch


class Writing(Operator):
    """Hands items to a sink's writer at once: the operator keeps none itself."""

    def __init__(self, setting: Setting, sink: Sink[Any], place: Place) -> None:
        super().__init__(setting)
        self.sink = sink
        with self.calling("open"):
            self.writer: Writer[object] = sink.open(place)
            if why := check_methods(self.writer, ["write", "flush", "close", "prepare", "cut"]):
                raise TypeError(why)
        self.records = 0
        self.dirty = False

    def push(self, batch: RowBatch) -> None:
        """Write the items of a batch."""
        self.write(batch.values)

    def write(self, items: Sequence[object]) -> None:
        """Write items (at least one)."""
        with self.calling("write", items):
            check_done(self.writer.write(items))
        self.records += len(items)
        self.dirty = True

    def flush(self) -> None:
        """Make written items visible or, if they wait for a snapshot, send them on their way."""
        if self.dirty:
            self.dirty = False
            with self.calling("flush"):
                check_done(self.writer.flush())  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Close the writer; a two-phase writer throws away output it has not prepared."""
        with self.calling("close"):
            check_done(self.writer.close())  # type: ignore[func-returns-value]

    def calling(self, method: str, items: Sequence[object] = ()) -> SinkCall:
        """Return the context in which a method of the sink or its writer is called; it raises a `SinkError`."""
        return SinkCall(self.step, self.sink, method, items)

    def keys_arrive(self, rescale: int) -> None:
        """Tell the writer that a rescale brings keys of other workers to this one."""
        if isinstance(self.writer, TwoPhaseWriter):
            with self.calling("keys_arrive"):
                check_done(self.writer.keys_arrive(rescale))  # type: ignore[func-returns-value]

    def prepare(self, snapshot: int) -> Token | None:
        """Assign all output so far to this snapshot; return the token to commit it with, or None if none is needed."""
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Do `prepare` in two parts: the urgent part now, the rest in the returned function, for another thread.

        A writer without two phases is flushed instead: what the snapshot records as written is then visible.
        """
        if not isinstance(self.writer, TwoPhaseWriter):
            self.flush()
            return lambda: None
        self.dirty = False
        with self.calling("prepare"):
            rest = self.writer.cut(snapshot)
        return lambda: self._token(rest)

    def _token(self, rest: Callable[[], Token | None]) -> Token | None:
        with self.calling("prepare"):
            token = rest()
            try:
                json.dumps(token, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(f"the token {shorten(token)} is not JSON: {error}") from None
        return token
