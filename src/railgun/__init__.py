"""Railgun: streams and stateful flows in Python, rescaled live, key by key, on Spark."""

import importlib
from typing import TYPE_CHECKING, Any

from railgun.engine.operators.operator import DeadLetter
from railgun.engine.operators.stateful import FORGET, Context, Stateful
from railgun.engine.state.disk import OnDisk
from railgun.errors import RailgunError
from railgun.flows.errors import ConnectorError, FlowError, StepError
from railgun.flows.flow import Flow, KeyedStream, Stream
from railgun.flows.sink import Place, Sink, TwoPhaseSink, TwoPhaseWriter, Writer
from railgun.flows.source import Reader, Source
from railgun.sinks.collect import Collect
from railgun.sinks.files import Files
from railgun.sinks.parquet import Parquet
from railgun.sinks.printing import Print
from railgun.sources.connectors import ConnectorMessage, Connectors
from railgun.sources.directory import Directory
from railgun.sources.generate import Generate
from railgun.sources.items import Items

if TYPE_CHECKING:
    from railgun.client.client import connect
    from railgun.client.sync import connect_sync
    from railgun.engine.batch.errors import BatchError
    from railgun.job import Event, FlowFailedError, Job, Settings, Snapshots, run
    from railgun.sinks.external import Outside
    from railgun.sinks.streams import StreamSink
    from railgun.sources.streams import StreamMessage, Streams
    from railgun.spark.batch import BatchResult, run_batch
    from railgun.spark.initial import State
    from railgun.spark.inputs import DONE, Input
    from railgun.spark.state_table import state_changes, state_table

__all__ = [
    "DONE",
    "FORGET",
    "BatchError",
    "BatchResult",
    "Collect",
    "ConnectorError",
    "ConnectorMessage",
    "Connectors",
    "Context",
    "DeadLetter",
    "Directory",
    "Event",
    "Files",
    "Flow",
    "FlowError",
    "FlowFailedError",
    "Generate",
    "Input",
    "Items",
    "Job",
    "KeyedStream",
    "OnDisk",
    "Outside",
    "Parquet",
    "Place",
    "Print",
    "RailgunError",
    "Reader",
    "Settings",
    "Sink",
    "Snapshots",
    "Source",
    "State",
    "Stateful",
    "StepError",
    "Stream",
    "StreamMessage",
    "StreamSink",
    "Streams",
    "TwoPhaseSink",
    "TwoPhaseWriter",
    "Writer",
    "connect",
    "connect_sync",
    "run",
    "run_batch",
    "state_changes",
    "state_table",
]

__version__ = "0.1.0"
_MODULE_OF = {
    "connect": "railgun.client.client",
    "connect_sync": "railgun.client.sync",
    **dict.fromkeys(("state_changes", "state_table"), "railgun.spark.state_table"),
    "Outside": "railgun.sinks.external",
    "StreamSink": "railgun.sinks.streams",
    **dict.fromkeys(("StreamMessage", "Streams"), "railgun.sources.streams"),
    "BatchError": "railgun.engine.batch.errors",
    **dict.fromkeys(("BatchResult", "run_batch"), "railgun.spark.batch"),
    **dict.fromkeys(("DONE", "Input"), "railgun.spark.inputs"),
    "State": "railgun.spark.initial",
    **dict.fromkeys(
        ("Event", "FlowFailedError", "Job", "Settings", "Snapshots", "run"), "railgun.job"
    ),
}


def __getattr__(name: str) -> Any:
    # Only programs that start flows or connect to nodes need these names: workers, which import this module too, start
    # sooner without them.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'railgun' has no attribute {name!r}")
