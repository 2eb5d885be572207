"""Railgun: streams and stateful flows in Python, rescaled live, key by key, on Spark."""

from railgun.connectors import (
    Collect,
    ConnectorError,
    Directory,
    Files,
    Generate,
    Items,
    Print,
)  # fmt: skip
from railgun.core.errors import RailgunError
from railgun.flow.errors import FlowError, StepError
from railgun.flow.flow import Flow, KeyedStream, Stream
from railgun.flow.operators.operator import DeadLetter
from railgun.flow.operators.stateful import FORGET, Context, Stateful
from railgun.flow.sink import Place, Sink, Writer
from railgun.flow.source import Reader, Source

__all__ = [
    "FORGET",
    "Collect",
    "ConnectorError",
    "Context",
    "DeadLetter",
    "Directory",
    "Files",
    "Flow",
    "FlowError",
    "Generate",
    "Items",
    "KeyedStream",
    "Place",
    "Print",
    "RailgunError",
    "Reader",
    "Sink",
    "Source",
    "Stateful",
    "StepError",
    "Stream",
    "Writer",
]
