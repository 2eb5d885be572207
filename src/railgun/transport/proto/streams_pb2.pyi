from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Acks(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUORUM: _ClassVar[Acks]
    MASTER: _ClassVar[Acks]
    ALL: _ClassVar[Acks]
    NONE: _ClassVar[Acks]

class Start(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BEGINNING: _ClassVar[Start]
    END: _ClassVar[Start]
    OFFSET: _ClassVar[Start]
QUORUM: Acks
MASTER: Acks
ALL: Acks
NONE: Acks
BEGINNING: Start
END: Start
OFFSET: Start

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class GoingAway(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "count", "delivery")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    delivery: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., delivery: _Optional[int] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("request", "stream", "topic", "response", "timeout", "together", "acks", "staging")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    request: int
    stream: str
    topic: str
    response: str
    timeout: int
    together: bool
    acks: Acks
    staging: Staging
    def __init__(self, request: _Optional[int] = ..., stream: _Optional[str] = ..., topic: _Optional[str] = ..., response: _Optional[str] = ..., timeout: _Optional[int] = ..., together: bool = ..., acks: _Optional[_Union[Acks, str]] = ..., staging: _Optional[_Union[Staging, _Mapping]] = ...) -> None: ...

class Staging(_message.Message):
    __slots__ = ("producer", "epoch", "sequence", "at", "identity")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    producer: int
    epoch: int
    sequence: int
    at: int
    identity: str
    def __init__(self, producer: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., at: _Optional[int] = ..., identity: _Optional[str] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("request", "base", "stored", "matched", "refused")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    request: int
    base: int
    stored: int
    matched: int
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    def __init__(self, request: _Optional[int] = ..., base: _Optional[int] = ..., stored: _Optional[int] = ..., matched: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("index", "code", "offset")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    index: int
    code: str
    offset: int
    def __init__(self, index: _Optional[int] = ..., code: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Respond(_message.Message):
    __slots__ = ("request", "response")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    request: int
    response: str
    def __init__(self, request: _Optional[int] = ..., response: _Optional[str] = ...) -> None: ...

class Responded(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("request", "code")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    request: int
    code: str
    def __init__(self, request: _Optional[int] = ..., code: _Optional[str] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("request", "stream", "group", "exclusive", "start", "offset", "credit", "matcher", "has_matcher", "ack_wait", "token", "again", "identity")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    MATCHER_FIELD_NUMBER: _ClassVar[int]
    HAS_MATCHER_FIELD_NUMBER: _ClassVar[int]
    ACK_WAIT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    request: int
    stream: str
    group: str
    exclusive: bool
    start: Start
    offset: int
    credit: int
    matcher: str
    has_matcher: bool
    ack_wait: int
    token: str
    again: bool
    identity: str
    def __init__(self, request: _Optional[int] = ..., stream: _Optional[str] = ..., group: _Optional[str] = ..., exclusive: bool = ..., start: _Optional[_Union[Start, str]] = ..., offset: _Optional[int] = ..., credit: _Optional[int] = ..., matcher: _Optional[str] = ..., has_matcher: bool = ..., ack_wait: _Optional[int] = ..., token: _Optional[str] = ..., again: bool = ..., identity: _Optional[str] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("request", "offset", "why", "persistent", "identity")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    request: int
    offset: int
    why: str
    persistent: bool
    identity: str
    def __init__(self, request: _Optional[int] = ..., offset: _Optional[int] = ..., why: _Optional[str] = ..., persistent: bool = ..., identity: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("credit",)
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    credit: int
    def __init__(self, credit: _Optional[int] = ...) -> None: ...

class Deliver(_message.Message):
    __slots__ = ("ranges", "epoch", "topic", "response")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    epoch: int
    topic: str
    response: str
    def __init__(self, ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., epoch: _Optional[int] = ..., topic: _Optional[str] = ..., response: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("request", "ranges", "epoch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    epoch: int
    def __init__(self, request: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("request", "ranges", "epoch", "delay", "reason", "block")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    request: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    epoch: int
    delay: int
    reason: str
    block: bool
    def __init__(self, request: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., epoch: _Optional[int] = ..., delay: _Optional[int] = ..., reason: _Optional[str] = ..., block: bool = ...) -> None: ...

class InProgress(_message.Message):
    __slots__ = ("request", "ranges", "epoch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    epoch: int
    def __init__(self, request: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Acked(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Unsubscribe(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Unsubscribed(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Missed(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Recalled(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Admin(_message.Message):
    __slots__ = ("request", "call", "arguments")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    call: str
    arguments: str
    def __init__(self, request: _Optional[int] = ..., call: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("request", "result")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    request: int
    result: str
    def __init__(self, request: _Optional[int] = ..., result: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request", "code", "text", "no_quorum")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NO_QUORUM_FIELD_NUMBER: _ClassVar[int]
    request: int
    code: str
    text: str
    no_quorum: bool
    def __init__(self, request: _Optional[int] = ..., code: _Optional[str] = ..., text: _Optional[str] = ..., no_quorum: bool = ...) -> None: ...
