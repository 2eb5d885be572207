"""A flow with several sinks in processes of its own, and a sink that kills a process around the calls of another.

`python -m tests.engine.controller.several_sinks DIRECTORY` runs the flow that DIRECTORY/plan.json describes, to its
end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engine.controller import tallies
from tests.engine.controller.tallies import record, tally

from railgun import Files, Flow, Generate, Outside, Settings, StreamSink
from railgun.engine.controller.storekeeper import FinishedError
from railgun.flows.sink import Place, Token, TwoPhaseSink, Writer
from railgun.job import Snapshots, run
from railgun.testing.local_workers import SubprocessLauncher


class Striking(TwoPhaseSink[Any]):
    """Hands everything on to another sink; kills a process before or after one of its calls, by the plan.

    A blow is `{"step", "method", "when", "skip", "victim"}`: the victim dies at the occasion after so many to be
    skipped. Blows come one after the other. What was done is kept in files, for all processes and runs.
    """

    def __init__(self, step: str, sink: TwoPhaseSink[Any], work: Path) -> None:
        self.step, self.sink, self.work = step, sink, work

    def open(self, place: Place) -> Writer[Any]:
        return self.sink.open(place)

    def commit(self, token: Token) -> None:
        self._around("commit", lambda: self.sink.commit(token))

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        raise AssertionError("workers call recover_at")

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> object:
        return self._around("recover", lambda: self.sink.recover_at(place, tokens))

    def _around(self, method: str, call: Callable[[], Any]) -> Any:
        self._strike(method, "before")
        result = call()
        self._strike(method, "after")
        return result

    def _strike(self, method: str, when: str) -> None:
        blows = json.loads((self.work / "plan.json").read_text())["blows"]
        number = next(
            (n for n in range(len(blows)) if not (self.work / f"blow-{n}").exists()), None
        )
        if number is None:
            return
        blow = blows[number]
        if (blow["step"], blow["method"], blow["when"]) != (self.step, method, when):
            return
        for occasion in range(blow["skip"]):
            if _claim(self.work / f"blow-{number}-skipped-{occasion}"):
                return
        if not _claim(self.work / f"blow-{number}"):
            return
        if blow["victim"] == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        pid = int((self.work / f"{blow['victim']}.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        if blow["victim"] == "driver":
            time.sleep(60.0)  # the worker ends with its driver, and does nothing more


def _claim(path: Path) -> bool:
    """Return whether this process is the first to do what the file stands for."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def several(work: Path) -> Flow:
    """Numbered records, counted by key, to the sinks of the plan."""
    plan = json.loads((work / "plan.json").read_text())
    flow = Flow("tallies")
    source = Generate(record, rate=plan["rate"], count=plan["count"], partitions=tallies.PARTS)
    keyed = flow.source(source, name="records").key_by(lambda item: item[0], name="keys")
    lines = keyed.stateful_map(tally, initial=int, name="tally")
    rows = lines.map(
        lambda line: dict(zip(("key", "number", "seen"), line, strict=True)), name="rows"
    )
    for step in plan["sinks"]:
        sink: TwoPhaseSink[Any]
        if step == "files":
            sink = Files(work / "files")
        elif step == "table":
            sink = Outside(data=work / "sink", timeout=60.0)
        else:
            sink = StreamSink(step, data=work / "node")
        rows.sink(Striking(step, sink, work), name=step)
    return flow


def main(work: Path) -> None:
    (work / "driver.pid").write_text(str(os.getpid()))
    plan = json.loads((work / "plan.json").read_text())
    snapshots = Snapshots(str(work / "snapshots"), every=plan["every"], begin=plan.get("begin"))
    try:
        job = run(
            several(work),
            2,
            launcher=SubprocessLauncher(),
            snapshots=snapshots,
            http=False,
            by_value=[tallies],
            settings=Settings(restarts_within=0.01),
            watch=lambda event: print(event.kind, event.text, flush=True),
        )
    except FinishedError as error:
        print(error, flush=True)
        sys.exit("Not all of its output" in str(error))
    job.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
