from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Call(_message.Message):
    __slots__ = ("request", "name", "arguments")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    name: str
    arguments: str
    def __init__(self, request: _Optional[int] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("request", "result", "code", "text")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    request: int
    result: str
    code: str
    text: str
    def __init__(self, request: _Optional[int] = ..., result: _Optional[str] = ..., code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("region", "epoch", "session")
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    region: str
    epoch: int
    session: int
    def __init__(self, region: _Optional[str] = ..., epoch: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("region", "epoch", "session", "standings", "refused")
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    region: str
    epoch: int
    session: int
    standings: _containers.RepeatedCompositeFieldContainer[Standing]
    refused: bool
    def __init__(self, region: _Optional[str] = ..., epoch: _Optional[int] = ..., session: _Optional[int] = ..., standings: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., refused: bool = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("epoch", "end")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    end: int
    def __init__(self, epoch: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("stream", "label", "first", "end", "runs", "group_epoch", "group_number")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GROUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    stream: int
    label: int
    first: int
    end: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    group_epoch: int
    group_number: int
    def __init__(self, stream: _Optional[int] = ..., label: _Optional[int] = ..., first: _Optional[int] = ..., end: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., group_epoch: _Optional[int] = ..., group_number: _Optional[int] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("stream", "session", "epoch", "base", "before", "start", "safe", "first", "anew", "turn")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    epoch: int
    base: int
    before: int
    start: int
    safe: int
    first: int
    anew: bool
    turn: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., base: _Optional[int] = ..., before: _Optional[int] = ..., start: _Optional[int] = ..., safe: _Optional[int] = ..., first: _Optional[int] = ..., anew: bool = ..., turn: _Optional[int] = ...) -> None: ...

class Has(_message.Message):
    __slots__ = ("stream", "session", "end", "labelled", "first")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LABELLED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    end: int
    labelled: bool
    first: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., end: _Optional[int] = ..., labelled: bool = ..., first: _Optional[int] = ...) -> None: ...

class Stands(_message.Message):
    __slots__ = ("session", "standing")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    session: int
    standing: Standing
    def __init__(self, session: _Optional[int] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("stream", "session", "begin")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    begin: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., begin: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("stream", "session", "base", "end", "trouble")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    base: int
    end: int
    trouble: str
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., base: _Optional[int] = ..., end: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class PushGroups(_message.Message):
    __slots__ = ("stream", "session", "epoch", "number", "whole", "turn")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    epoch: int
    number: int
    whole: bool
    turn: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., whole: bool = ..., turn: _Optional[int] = ...) -> None: ...

class HasGroups(_message.Message):
    __slots__ = ("stream", "session", "epoch", "number")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    epoch: int
    number: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class FetchGroups(_message.Message):
    __slots__ = ("stream", "session")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class FetchedGroups(_message.Message):
    __slots__ = ("stream", "session", "epoch", "number", "trouble")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    session: int
    epoch: int
    number: int
    trouble: str
    def __init__(self, stream: _Optional[int] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class Interest(_message.Message):
    __slots__ = ("whole", "listeners", "gone", "line", "seen", "more")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    whole: bool
    listeners: _containers.RepeatedCompositeFieldContainer[Listener]
    gone: _containers.RepeatedScalarFieldContainer[int]
    line: int
    seen: int
    more: bool
    def __init__(self, whole: bool = ..., listeners: _Optional[_Iterable[_Union[Listener, _Mapping]]] = ..., gone: _Optional[_Iterable[int]] = ..., line: _Optional[int] = ..., seen: _Optional[int] = ..., more: bool = ...) -> None: ...

class Listener(_message.Message):
    __slots__ = ("number", "stream", "matcher", "group", "limit")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    MATCHER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    number: int
    stream: str
    matcher: str
    group: str
    limit: int
    def __init__(self, number: _Optional[int] = ..., stream: _Optional[str] = ..., matcher: _Optional[str] = ..., group: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class Scatter(_message.Message):
    __slots__ = ("stream", "topic", "response", "parts", "line")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    stream: str
    topic: str
    response: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    line: int
    def __init__(self, stream: _Optional[str] = ..., topic: _Optional[str] = ..., response: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., line: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("listener", "first", "end", "lost")
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    listener: int
    first: int
    end: int
    lost: int
    def __init__(self, listener: _Optional[int] = ..., first: _Optional[int] = ..., end: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request", "response", "timeout")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    request: int
    response: str
    timeout: int
    def __init__(self, request: _Optional[int] = ..., response: _Optional[str] = ..., timeout: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request", "ok")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    request: int
    ok: bool
    def __init__(self, request: _Optional[int] = ..., ok: bool = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: str
    def __init__(self, response: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("request", "response", "forwarded")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    request: int
    response: str
    forwarded: bool
    def __init__(self, request: _Optional[int] = ..., response: _Optional[str] = ..., forwarded: bool = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("request", "code", "text")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    request: int
    code: str
    text: str
    def __init__(self, request: _Optional[int] = ..., code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
