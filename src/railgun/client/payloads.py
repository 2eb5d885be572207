"""Encode values as payloads (bytes), and decode payloads: JSON, MessagePack and Arrow.

>>> from_json(to_json({"user": "ada", "amount": 7}))
{'user': 'ada', 'amount': 7}
>>> from_msgpack(to_msgpack([1, b"raw", None]))
[1, b'raw', None]
>>> import pyarrow
>>> from_arrow(to_arrow(pyarrow.table({"n": [1, 2]}))).to_pydict()
{'n': [1, 2]}

A value that cannot be encoded and a payload that cannot be decoded raise `PayloadError`, and no other error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from railgun.errors import RailgunError

if TYPE_CHECKING:
    import pyarrow


class PayloadError(RailgunError, ValueError):
    """A value cannot be encoded in this format, or a payload is not in this format."""

    code = "BAD_PAYLOAD"


def to_json(value: Any) -> bytes:
    """Return `value` as JSON without blanks; raise `PayloadError` if JSON cannot express it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"this cannot be JSON: {error}") from error


def from_json(payload: bytes) -> Any:
    """Return the value of a JSON payload; raise `PayloadError` if it is not JSON."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the payload {_start(payload)} is not JSON: {error}") from error


def to_msgpack(value: Any) -> bytes:
    """Return `value` as MessagePack; raise `PayloadError` if MessagePack cannot express it."""
    pack = _msgpack().packb
    try:
        return bytes(pack(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PayloadError(f"this cannot be MessagePack: {error}") from error


def from_msgpack(payload: bytes) -> Any:
    """Return the value of a MessagePack payload; raise `PayloadError` if it is not MessagePack."""
    unpack = _msgpack().unpackb
    try:
        return unpack(payload)
    except Exception as error:  # msgpack raises many kinds
        raise PayloadError(f"the payload {_start(payload)} is not MessagePack: {error}") from error


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise PayloadError("MessagePack is not installed: pip install railgun[msgpack]") from error
    return msgpack


def to_arrow(table: pyarrow.Table | pyarrow.RecordBatch) -> bytes:
    """Return a table or record batch as an Arrow stream with its schema; raise `PayloadError` for other types."""
    import pyarrow

    if not isinstance(table, pyarrow.Table | pyarrow.RecordBatch):
        raise PayloadError(f"this is no table and no record batch of Arrow: {type(table).__name__}")
    out = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write(table)
    return bytes(out.getvalue())


def from_arrow(payload: bytes) -> pyarrow.Table:
    """Return the table of a payload; raise `PayloadError` if it is no Arrow stream."""
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(payload).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise PayloadError(f"the payload {_start(payload)} is no Arrow stream: {error}") from error


def _start(payload: bytes) -> str:
    return repr(payload if len(payload) <= 60 else payload[:57] + b"...")
