"""What can go wrong with a stream on disk. Each error has a `code`, which travels to clients."""

from __future__ import annotations

import errno
from typing import ClassVar, Final

from railgun.core.errors import RailgunError

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What systems call a disk without room."""


class StorageError(RailgunError):
    """Something on disk could not be written or read."""

    code: ClassVar[str] = "STORAGE"


class NoSpaceError(StorageError):
    """The disk is full: nothing was stored, and what is stored can be read. It may be tried again."""

    code = "NO_SPACE"


class LogFailedError(StorageError):
    """A write or a sync has failed: this log takes nothing more. What was not acknowledged may be stored or not."""

    code = "LOG_FAILED"


class DamagedLogError(StorageError):
    """Bytes that were stored for good are not what they were. Nothing was changed; `offset` is the first one lost."""

    code = "LOG_DAMAGED"

    def __init__(self, told: str, offset: int) -> None:
        super().__init__(told)
        self.offset = offset


class OrderError(StorageError):
    """A batch that does not follow the last one of the log: nothing of it was stored."""

    code = "OUT_OF_ORDER"


class TrimmedError(StorageError):
    """An offset below the first one that is still kept, which is `first`."""

    code = "TRIMMED"

    def __init__(self, told: str, first: int) -> None:
        super().__init__(told)
        self.first = first


class BeyondEndError(StorageError):
    """An offset that no message has yet; the next one will get `end`."""

    code = "BEYOND_END"

    def __init__(self, told: str, end: int) -> None:
        super().__init__(told)
        self.end = end


class ClosedError(StorageError):
    """It was closed, and takes nothing more."""

    code = "CLOSED"
