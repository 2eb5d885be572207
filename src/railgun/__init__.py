"""Railgun: streams and stateful flows in Python, rescaled live, key by key, on Spark."""

from typing import TYPE_CHECKING

from railgun.lazy import lazy_names

if TYPE_CHECKING:
    from railgun.client.client import connect
    from railgun.client.sync import connect_sync
    from railgun.engine.batch.errors import BatchError
    from railgun.engine.operators.operator import DeadLetter
    from railgun.engine.operators.stateful import FORGET, Context, Stateful
    from railgun.engine.state.disk import OnDisk
    from railgun.errors import RailgunError
    from railgun.flows.errors import ConnectorError, FlowError, StepError
    from railgun.flows.flow import Flow, KeyedStream, Stream
    from railgun.flows.sink import Place, Sink, TwoPhaseSink, TwoPhaseWriter, Writer
    from railgun.flows.source import Reader, Source
    from railgun.job import Event, FlowFailedError, Job, Settings, Snapshots, run
    from railgun.sinks.collect import Collect
    from railgun.sinks.external import Outside
    from railgun.sinks.files import Files
    from railgun.sinks.parquet import Parquet
    from railgun.sinks.printing import Print
    from railgun.sinks.streams import StreamSink
    from railgun.sources.connectors import ConnectorMessage, Connectors
    from railgun.sources.directory import Directory
    from railgun.sources.generate import Generate
    from railgun.sources.items import Items
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

__getattr__ = lazy_names(
    __name__,
    {
        "railgun.client.client": ("connect",),
        "railgun.client.sync": ("connect_sync",),
        "railgun.engine.batch.errors": ("BatchError",),
        "railgun.engine.operators.operator": ("DeadLetter",),
        "railgun.engine.operators.stateful": (
            "Context",
            "FORGET",
            "Stateful",
        ),
        "railgun.engine.state.disk": ("OnDisk",),
        "railgun.errors": ("RailgunError",),
        "railgun.flows.errors": (
            "ConnectorError",
            "FlowError",
            "StepError",
        ),
        "railgun.flows.flow": (
            "Flow",
            "KeyedStream",
            "Stream",
        ),
        "railgun.flows.sink": (
            "Place",
            "Sink",
            "TwoPhaseSink",
            "TwoPhaseWriter",
            "Writer",
        ),
        "railgun.flows.source": (
            "Reader",
            "Source",
        ),
        "railgun.job": (
            "Event",
            "FlowFailedError",
            "Job",
            "Settings",
            "Snapshots",
            "run",
        ),
        "railgun.sinks.collect": ("Collect",),
        "railgun.sinks.external": ("Outside",),
        "railgun.sinks.files": ("Files",),
        "railgun.sinks.parquet": ("Parquet",),
        "railgun.sinks.printing": ("Print",),
        "railgun.sinks.streams": ("StreamSink",),
        "railgun.sources.connectors": (
            "ConnectorMessage",
            "Connectors",
        ),
        "railgun.sources.directory": ("Directory",),
        "railgun.sources.generate": ("Generate",),
        "railgun.sources.items": ("Items",),
        "railgun.sources.streams": (
            "StreamMessage",
            "Streams",
        ),
        "railgun.spark.batch": (
            "BatchResult",
            "run_batch",
        ),
        "railgun.spark.initial": ("State",),
        "railgun.spark.inputs": (
            "DONE",
            "Input",
        ),
        "railgun.spark.state_table": (
            "state_changes",
            "state_table",
        ),
    },
)
