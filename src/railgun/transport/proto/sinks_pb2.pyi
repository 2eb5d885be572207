from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Begin(_message.Message):
    __slots__ = ("txn", "flow", "step", "generation", "worker", "alone", "store")
    TXN_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    txn: str
    flow: str
    step: str
    generation: int
    worker: int
    alone: bool
    store: str
    def __init__(self, txn: _Optional[str] = ..., flow: _Optional[str] = ..., step: _Optional[str] = ..., generation: _Optional[int] = ..., worker: _Optional[int] = ..., alone: bool = ..., store: _Optional[str] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("txn", "start")
    TXN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    txn: str
    start: int
    def __init__(self, txn: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("txn", "snapshot", "end", "count")
    TXN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    txn: str
    snapshot: int
    end: int
    count: int
    def __init__(self, txn: _Optional[str] = ..., snapshot: _Optional[int] = ..., end: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("txn",)
    TXN_FIELD_NUMBER: _ClassVar[int]
    txn: str
    def __init__(self, txn: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("txn",)
    TXN_FIELD_NUMBER: _ClassVar[int]
    txn: str
    def __init__(self, txn: _Optional[str] = ...) -> None: ...

class List(_message.Message):
    __slots__ = ("flow", "step", "generation", "store")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    flow: str
    step: str
    generation: int
    store: str
    def __init__(self, flow: _Optional[str] = ..., step: _Optional[str] = ..., generation: _Optional[int] = ..., store: _Optional[str] = ...) -> None: ...

class Have(_message.Message):
    __slots__ = ("txn", "end")
    TXN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    txn: str
    end: int
    def __init__(self, txn: _Optional[str] = ..., end: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("txn", "yes", "code", "text")
    TXN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    txn: str
    yes: bool
    code: str
    text: str
    def __init__(self, txn: _Optional[str] = ..., yes: bool = ..., code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("txn",)
    TXN_FIELD_NUMBER: _ClassVar[int]
    txn: str
    def __init__(self, txn: _Optional[str] = ...) -> None: ...

class Uncommitted(_message.Message):
    __slots__ = ("txn", "generation", "snapshot", "worker", "prepared", "end", "count")
    TXN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    txn: str
    generation: int
    snapshot: int
    worker: int
    prepared: bool
    end: int
    count: int
    def __init__(self, txn: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot: _Optional[int] = ..., worker: _Optional[int] = ..., prepared: bool = ..., end: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("transactions", "store")
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    transactions: _containers.RepeatedCompositeFieldContainer[Uncommitted]
    store: str
    def __init__(self, transactions: _Optional[_Iterable[_Union[Uncommitted, _Mapping]]] = ..., store: _Optional[str] = ...) -> None: ...
