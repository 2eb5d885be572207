from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Members(_message.Message):
    __slots__ = ("voters", "learners")
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    voters: _containers.RepeatedScalarFieldContainer[str]
    learners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, voters: _Optional[_Iterable[str]] = ..., learners: _Optional[_Iterable[str]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("index", "term", "data", "members")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    data: bytes
    members: Members
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ..., data: _Optional[bytes] = ..., members: _Optional[_Union[Members, _Mapping]] = ...) -> None: ...

class Hard(_message.Message):
    __slots__ = ("term", "vote")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    term: int
    vote: str
    def __init__(self, term: _Optional[int] = ..., vote: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("index", "term", "members", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    term: int
    members: Members
    data: bytes
    def __init__(self, index: _Optional[int] = ..., term: _Optional[int] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class AskVote(_message.Message):
    __slots__ = ("term", "last_index", "last_term", "pre", "transfer")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LAST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_TERM_FIELD_NUMBER: _ClassVar[int]
    PRE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    term: int
    last_index: int
    last_term: int
    pre: bool
    transfer: bool
    def __init__(self, term: _Optional[int] = ..., last_index: _Optional[int] = ..., last_term: _Optional[int] = ..., pre: bool = ..., transfer: bool = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("term", "granted", "pre")
    TERM_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PRE_FIELD_NUMBER: _ClassVar[int]
    term: int
    granted: bool
    pre: bool
    def __init__(self, term: _Optional[int] = ..., granted: bool = ..., pre: bool = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("term", "prev_index", "prev_term", "entries", "commit", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    PREV_INDEX_FIELD_NUMBER: _ClassVar[int]
    PREV_TERM_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    prev_index: int
    prev_term: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    commit: int
    round: int
    def __init__(self, term: _Optional[int] = ..., prev_index: _Optional[int] = ..., prev_term: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., commit: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Appended(_message.Message):
    __slots__ = ("term", "ok", "index", "round", "hint", "hint_term")
    TERM_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    HINT_TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    ok: bool
    index: int
    round: int
    hint: int
    hint_term: int
    def __init__(self, term: _Optional[int] = ..., ok: bool = ..., index: _Optional[int] = ..., round: _Optional[int] = ..., hint: _Optional[int] = ..., hint_term: _Optional[int] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("term", "snapshot", "offset", "data", "size", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    snapshot: Snapshot
    offset: int
    data: bytes
    size: int
    round: int
    def __init__(self, term: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., size: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Installing(_message.Message):
    __slots__ = ("term", "index", "offset", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    index: int
    offset: int
    round: int
    def __init__(self, term: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Campaign(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class AskRead(_message.Message):
    __slots__ = ("term", "number")
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    term: int
    number: int
    def __init__(self, term: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ReadAt(_message.Message):
    __slots__ = ("term", "number", "index", "known")
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    term: int
    number: int
    index: int
    known: bool
    def __init__(self, term: _Optional[int] = ..., number: _Optional[int] = ..., index: _Optional[int] = ..., known: bool = ...) -> None: ...
