"""Errors of streams, above all those of the disk. Each error has a `code`, which is sent to clients."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import ClassVar, Final

from railgun.errors import LaterVersionError, RailgunError, said

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of system calls that mean "no room for more": on the disk, in a quota, or in a file."""
REFUSED: Final = FULL | {errno.EROFS}
"""A write that fails with one of these errors has stored nothing that cannot be cut off, and may succeed later."""


class StorageError(RailgunError):
    """A file could not be written or read."""

    code: ClassVar[str] = "STORAGE"


class NoSpaceError(StorageError):
    """The disk is full, or a limit is reached: nothing was stored. The write may be tried again."""

    code = "NO_SPACE"


class BadRequestError(RailgunError):
    """A call that is not valid: its name is unknown, or its arguments do not fit."""

    code: ClassVar[str] = "BAD_REQUEST"


class NoStreamError(RailgunError, LookupError):
    """No stream has this name."""

    code: ClassVar[str] = "NO_STREAM"


class StreamReplacedError(RailgunError):
    """A position belongs to a stream that was deleted; another stream was made with the same name since."""

    code: ClassVar[str] = "STREAM_REPLACED"


class CopyBehindError(RailgunError):
    """This copy of a stream does not have a position yet, or not for certain. The request may be tried again."""

    code: ClassVar[str] = "COPY_BEHIND"


class NoGroupError(RailgunError, LookupError):
    """No consumer group has this name."""

    code: ClassVar[str] = "NO_GROUP"


class NoMasterError(RailgunError):
    """No node can take the request now: nothing was done, and it may be tried again.

    `no_quorum`: the node has known no leader for a while, so trying again soon at this node is of no use.
    """

    code: ClassVar[str] = "NO_MASTER"

    def __init__(self, text: str, no_quorum: bool = False) -> None:
        super().__init__(text)
        self.no_quorum = no_quorum


class StoppingError(RailgunError):
    """The node is about to stop, and has not begun the request: nothing was done.

    Try another node, or this one later.
    """

    code: ClassVar[str] = "STOPPING"


class DeposedError(RailgunError):
    """The node that took the request lost mastership before the write was safe: it may be stored or not."""

    code: ClassVar[str] = "DEPOSED"


class NotEnoughReplicasError(RailgunError):
    """Too few replicas of a stream can write: nothing was stored, and the request may be tried again."""

    code: ClassVar[str] = "NOT_ENOUGH_REPLICAS"


class NotEnoughReplicasAfterAppendError(RailgunError):
    """The master has stored the messages, but too few replicas can.

    The messages may get lost, or become safe when the replicas can write again.
    """

    code: ClassVar[str] = "NOT_ENOUGH_REPLICAS_AFTER_APPEND"


class PortTakenError(RailgunError):
    """Another process listens on this port."""

    code: ClassVar[str] = "PORT_TAKEN"


class NotPersistentError(RailgunError):
    """A call that needs a persistent stream was made for an ephemeral one."""

    code: ClassVar[str] = "NOT_PERSISTENT"


_CAUSES: Final[Mapping[int, tuple[str, str]]] = {
    errno.ENOSPC: (
        "the disk is full",
        "Make room on it, or let streams keep less (max age, max bytes)",
    ),
    errno.EDQUOT: (
        "the disk quota of the node's user is used up",
        "Raise the quota, delete other files of that user, or let streams keep less (max age, max bytes)",
    ),
    errno.EFBIG: (
        "the file size limit of the node's process is reached",
        "Raise the limit (ulimit -f, or LimitFSIZE of its systemd unit)",
    ),
    errno.EROFS: (
        "the file system is read-only",
        "Find out why in the system's log, then mount it for writing",
    ),
    errno.EIO: (
        "the disk has failed",
        "See what the system's log says (dmesg), and replace the disk",
    ),
    errno.EACCES: (
        "the node's user has no permission to write there",
        "Give it the directory (chown)",
    ),
    errno.ENOENT: (
        "the file is not at its place",
        "Put back what was there",
    ),
    errno.EMFILE: (
        "the node has too many open files",
        "Raise the limit (ulimit -n, or LimitNOFILE of its systemd unit)",
    ),
}
"""By error number of the system: what the error means, and what to do about it."""


def cause_of(error: OSError) -> tuple[str, str]:
    """Return the meaning of an error of the disk, and what to do about it; both without a full stop.

    >>> cause_of(OSError(errno.EROFS, "Read-only file system"))[0]
    'the file system is read-only (Read-only file system)'
    """
    why = str(error.strerror or error)
    if error.errno is None or error.errno not in _CAUSES:
        return why, "Look after the disk"
    cause, remedy = _CAUSES[error.errno]
    return f"{cause} ({why})", remedy


def storage_error(error: OSError, what: str) -> StorageError:
    """Return the typed error for an error of the disk; `what` says which action failed.

    >>> storage_error(OSError(errno.EFBIG, "File too large"), "the stream 'a' cannot be made")
    NoSpaceError("the stream 'a' cannot be made: the file size limit of the node's process is reached (...")
    """
    cause, remedy = cause_of(error)
    kind = NoSpaceError if error.errno in FULL else StorageError
    return kind(f"{what}: {cause}. {remedy}, and try again.")


def refusal(trouble: StorageError) -> StorageError:
    """Return the error for one write that was refused because of `trouble`. Raise it `from` the trouble.

    >>> refusal(NoSpaceError("the log cannot be written: the disk is full."))
    NoSpaceError('the log cannot be written: the disk is full. Nothing was stored.')
    """
    return type(trouble)(f"{said(trouble)}. Nothing was stored.")


def trouble_in(error: RailgunError) -> str:
    """Return what an error says about the disk, without what became of the one write that was refused.

    The result can be shown to publishers of other messages, which are stored elsewhere.
    """
    cause = error.__cause__
    return str(cause if is_refusal(error) and isinstance(cause, StorageError) else error)


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a disk has refused a write and is unchanged: the write may succeed later, or elsewhere."""
    return type(error) in (StorageError, NoSpaceError)


class LogFailedError(StorageError):
    """A write or a sync has failed: the log takes no more writes. Unacknowledged messages may be stored or not."""

    code = "LOG_FAILED"


class DamagedLogError(StorageError):
    """Bytes that were synced have changed since; `offset` is the first one that cannot be read.

    No file was modified.
    """

    code = "LOG_DAMAGED"

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


def damaged(what: str, offset: int, position: int, problem: str) -> DamagedLogError:
    """Return the error for a damaged file of a log: the batch of `offset` should begin at byte `position`."""
    return DamagedLogError(
        f"{what} is damaged at byte {position}: where offset {offset} should be, there is {problem}. Nothing was "
        f"changed. All before offset {offset} can be read; nothing is appended. Restore the file; the node of a "
        "cluster fetches it from the others.",
        offset,
    )


class LaterFormatError(StorageError, LaterVersionError):
    """A file was written by a later version of Railgun: it was not opened, and not changed."""

    code = "LATER_VERSION"


def later_format(what: str, problem: object) -> LaterFormatError:
    """Return the error for a file of a later version; `what` names the file, `problem` says what was found in it."""
    return LaterFormatError(
        f"{what} was written by a later version of Railgun: {problem}. Nothing was changed, and nothing is lost. Start "
        "the version that wrote it, or a later one."
    )


def later_tail(what: str, path: str, position: int, version: bytes) -> LaterFormatError:
    """Return the error for a file whose end looks torn but begins with the version of a later Railgun.

    `what` names the file in words, `path` is where it lies, `position` is the byte at which that version stands.
    """
    return LaterFormatError(
        f"{what} ends at byte {position} with {version!r}, which a later version of Railgun writes, and which cannot "
        "be read here. Nothing was changed. Start the version that wrote it. If none has ever used this directory, "
        f"these bytes are damaged: keep a copy of the file, cut them off (truncate -s {position} {path}), and start."
    )


class OrderError(StorageError):
    """A batch does not follow the last one of the log: nothing of it was stored."""

    code = "OUT_OF_ORDER"


class TrimmedError(StorageError):
    """An offset is below `first`, the first one that is still kept."""

    code = "TRIMMED"

    def __init__(self, text: str, first: int) -> None:
        super().__init__(text)
        self.first = first


class BeyondEndError(StorageError):
    """An offset has no message yet; the next message gets the offset `end`."""

    code = "BEYOND_END"

    def __init__(self, text: str, end: int) -> None:
        super().__init__(text)
        self.end = end


class ClosedError(StorageError):
    """The log or file was closed, and takes no more writes."""

    code = "CLOSED"
