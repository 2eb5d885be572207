"""A flow whose sink does what user code should not do when it is closed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from railgun import Collect, Flow, Items, Place, Sink, Writer


def misbehave(how: str) -> None:
    """Do what user code should not do."""
    if how == "raise":
        raise LookupError("no such file")
    if how == "OSError":
        raise OSError("the disk is full")
    if how == "sys.exit":
        sys.exit(3)
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if how == "os._exit":
        os._exit(3)
    while how == "hang":
        time.sleep(0.1)


class Out(Sink[Any]):
    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, place: Place) -> Writer[Any]:
        return OutWriter(self.how, Collect().open(place))


class OutWriter(Writer[Any]):
    def __init__(self, how: str, inner: Any) -> None:
        self.how, self.inner = how, inner

    def write(self, items: Sequence[Any]) -> None:
        self.inner.write(items)

    def close(self) -> None:
        misbehave(self.how)


def flow_to(how: str) -> Flow:
    flow = Flow("closing")
    flow.source(Items(range(20)), name="numbers").sink(Out(how), name="out")
    return flow
