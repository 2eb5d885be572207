"""Writing: where a flow's results leave it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from railgun.flow.errors import SinkError, may_pass
from railgun.flow.operators.operator import Operator, Setting, shorten, tell
from railgun.flow.sink import Place, Sink, Token, TwoPhaseWriter, Writer
from railgun.wire.rows import RowBatch


class Writing(Operator):
    """Hands items to a sink's writer, at once: it keeps none itself."""

    def __init__(self, setting: Setting, sink: Sink[Any], place: Place) -> None:
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
        self.write(batch.values)

    def write(self, items: Sequence[object]) -> None:
        """Write items, at least one."""
        try:
            self.writer.write(items)
        except Exception as error:
            raise self._failed("write", error, shorten(items[0])) from error
        self.records += len(items)
        self.dirty = True

    def flush(self) -> None:
        """Let others see what was written, or if it waits for a snapshot, send it on its way."""
        if self.dirty:
            self.dirty = False
            try:
                self.writer.flush()
            except Exception as error:
                raise self._failed("flush", error) from error

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
        try:
            rest = self.writer.cut(snapshot)
        except Exception as error:
            raise self._failed("prepare", error) from error
        return lambda: self._token(rest)

    def _token(self, rest: Callable[[], Token | None]) -> Token | None:
        try:
            token = rest()
        except Exception as error:
            raise self._failed("prepare", error) from error
        try:
            json.dumps(token, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            what = TypeError(f"the token {shorten(token)} is not JSON: {error}")
            raise self._failed("prepare", what) from error
        return token

    def _failed(self, what: str, error: Exception, record: str = "") -> SinkError:
        where = f"{type(self.sink).__name__}.{what}"
        failed = SinkError(self.step, where, "", record, tell(error))
        failed.passing = may_pass(error)
        return failed
