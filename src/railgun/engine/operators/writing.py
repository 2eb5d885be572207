"""Writing: where a flow's results leave it."""

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
    """Hands items to a sink's writer, at once: it keeps none itself."""

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
        """Write the items."""
        self.write(batch.values)

    def write(self, items: Sequence[object]) -> None:
        """Write items, at least one."""
        with self.calling("write", items):
            check_done(self.writer.write(items))
        self.records += len(items)
        self.dirty = True

    def flush(self) -> None:
        """Let others see what was written, or if it waits for a snapshot, send it on its way."""
        if self.dirty:
            self.dirty = False
            with self.calling("flush"):
                check_done(self.writer.flush())  # type: ignore[func-returns-value]

    def close(self) -> None:
        """Let go of the writer; what it has not prepared, if it prepares, is thrown away."""
        with self.calling("close"):
            check_done(self.writer.close())  # type: ignore[func-returns-value]

    def calling(self, what: str, items: Sequence[object] = ()) -> SinkCall:
        """Return the context in which a method of the sink or its writer is called; it raises a `SinkError`."""
        return SinkCall(self.step, self.sink, what, items)

    def keys_arrive(self, rescale: int) -> None:
        """Tell the writer that a rescale brings keys of other workers to this one."""
        if isinstance(self.writer, TwoPhaseWriter):
            with self.calling("keys_arrive"):
                check_done(self.writer.keys_arrive(rescale))  # type: ignore[func-returns-value]

    def prepare(self, snapshot: int) -> Token | None:
        """What was written up to now belongs to this snapshot; the token to commit it with, if it needs one."""
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """As `prepare`, in two parts: what has to be done now, and what another thread can do.

        A writer that knows no two phases is flushed instead: what the snapshot says was done has then been done.
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
