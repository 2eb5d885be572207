from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Reason]
    BUSY_RETRY: _ClassVar[Reason]
    REDIRECT: _ClassVar[Reason]
    ROLLING_BACK: _ClassVar[Reason]
OK: Reason
BUSY_RETRY: Reason
REDIRECT: Reason
ROLLING_BACK: Reason

class Welcome(_message.Message):
    __slots__ = ("credits", "largest")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    credits: int
    largest: int
    def __init__(self, credits: _Optional[int] = ..., largest: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "text", "stream", "id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    stream: str
    id: int
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ..., stream: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class NotifyAck(_message.Message):
    __slots__ = ("stream", "granted", "por", "reason", "address")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    POR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    granted: bool
    por: int
    reason: Reason
    address: str
    def __init__(self, stream: _Optional[int] = ..., granted: bool = ..., por: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., address: _Optional[str] = ...) -> None: ...

class Point(_message.Message):
    __slots__ = ("stream", "por")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    POR_FIELD_NUMBER: _ClassVar[int]
    stream: int
    por: int
    def __init__(self, stream: _Optional[int] = ..., por: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("credits", "points")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    points: _containers.RepeatedCompositeFieldContainer[Point]
    def __init__(self, credits: _Optional[int] = ..., points: _Optional[_Iterable[_Union[Point, _Mapping]]] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Notify(_message.Message):
    __slots__ = ("stream", "name", "por")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POR_FIELD_NUMBER: _ClassVar[int]
    stream: int
    name: str
    por: int
    def __init__(self, stream: _Optional[int] = ..., name: _Optional[str] = ..., por: _Optional[int] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: int
    def __init__(self, stream: _Optional[int] = ...) -> None: ...

class Eos(_message.Message):
    __slots__ = ("stream", "last")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    last: int
    def __init__(self, stream: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
