"""What can go wrong with a stream, above all on disk. Each error has a `code`, which travels to clients."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import ClassVar, Final

from railgun.errors import LaterVersionError, RailgunError, said

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What systems call no room for more: on the disk, in a quota, in a file."""
REFUSED: Final = FULL | {errno.EROFS}
"""A write with one of these errors has stored nothing that cannot be cut off, and may work later."""


class StorageError(RailgunError):
    """Something on disk could not be written or read."""

    code: ClassVar[str] = "STORAGE"


class NoSpaceError(StorageError):
    """There is no room on the disk, or a limit is reached: nothing was stored. It may be tried again."""

    code = "NO_SPACE"


class BadRequestError(RailgunError):
    """A call that makes no sense: there is none of that name, or not with these arguments."""

    code: ClassVar[str] = "BAD_REQUEST"


class NoStreamError(RailgunError, LookupError):
    """There is no stream of that name."""

    code: ClassVar[str] = "NO_STREAM"


class StreamReplacedError(RailgunError):
    """A position is of a stream that was deleted; another one of its name was made since."""

    code: ClassVar[str] = "STREAM_REPLACED"


class CopyBehindError(RailgunError):
    """This copy of a stream does not have a position yet, or not for certain: it may be tried again."""

    code: ClassVar[str] = "COPY_BEHIND"


class NoGroupError(RailgunError, LookupError):
    """There is no group of that name."""

    code: ClassVar[str] = "NO_GROUP"


class NoMasterError(RailgunError):
    """Nobody can take it now: nothing was done, and it may be tried again.

    `no_quorum`: the node has known no leader for a while, so another try at this node is of no use soon.
    """

    code: ClassVar[str] = "NO_MASTER"

    def __init__(self, text: str, no_quorum: bool = False) -> None:
        super().__init__(text)
        self.no_quorum = no_quorum


class StoppingError(RailgunError):
    """The node is about to end, and has not begun with it: nothing was done. Ask another node, or this one later."""

    code: ClassVar[str] = "STOPPING"


class DeposedError(RailgunError):
    """Who took it is no master any more, and was so before it was safe: it may be stored or not."""

    code: ClassVar[str] = "DEPOSED"


class NotEnoughReplicasError(RailgunError):
    """Too few replicas of a stream can write: nothing was stored, and it may be tried again."""

    code: ClassVar[str] = "NOT_ENOUGH_REPLICAS"


class NotEnoughReplicasAfterAppendError(RailgunError):
    """The master has stored it, and too few replicas can: it may get lost, or be safe when they can write again."""

    code: ClassVar[str] = "NOT_ENOUGH_REPLICAS_AFTER_APPEND"


class PortTakenError(RailgunError):
    """Somebody else listens there."""

    code: ClassVar[str] = "PORT_TAKEN"


class NotPersistentError(RailgunError):
    """An ephemeral stream was asked for what only a persistent one has."""

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
"""What errors of the system mean, and what to do about each."""


def cause_of(error: OSError) -> tuple[str, str]:
    """Return what a disk says in words, and what to do about it; both without a full stop.

    >>> cause_of(OSError(errno.EROFS, "Read-only file system"))[0]
    'the file system is read-only (Read-only file system)'
    """
    why = str(error.strerror or error)
    if error.errno is None or error.errno not in _CAUSES:
        return why, "Look after the disk"
    cause, remedy = _CAUSES[error.errno]
    return f"{cause} ({why})", remedy


def storage_error(error: OSError, what: str) -> StorageError:
    """Return what a disk says as an error with a name; `what` is what could not be done.

    >>> storage_error(OSError(errno.EFBIG, "File too large"), "the stream 'a' cannot be made")
    NoSpaceError("the stream 'a' cannot be made: the file size limit of the node's process is reached (...")
    """
    cause, remedy = cause_of(error)
    kind = NoSpaceError if error.errno in FULL else StorageError
    return kind(f"{what}: {cause}. {remedy}, and try again.")


def refusal(trouble: StorageError) -> StorageError:
    """Return the error for one write that was refused because of a trouble, which is to be its cause (`raise … from`).

    >>> refusal(NoSpaceError("the log cannot be written: the disk is full."))
    NoSpaceError('the log cannot be written: the disk is full. Nothing was stored.')
    """
    return type(trouble)(f"{said(trouble)}. Nothing was stored.")


def trouble_in(error: RailgunError) -> str:
    """Return what an error says of the disk, without what became of the one write that it refused.

    Others may say it of other writes, which are stored elsewhere.
    """
    cause = error.__cause__
    return str(cause if is_refusal(error) and isinstance(cause, StorageError) else error)


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a disk has refused something, and is as it was before: it may work later, and elsewhere."""
    return type(error) in (StorageError, NoSpaceError)


class LogFailedError(StorageError):
    """A write or a sync has failed: this log takes nothing more. What was not acknowledged may be stored or not."""

    code = "LOG_FAILED"


class DamagedLogError(StorageError):
    """Bytes that were stored for good are not what they were. Nothing was changed; `offset` is the first one lost."""

    code = "LOG_DAMAGED"

    def __init__(self, told: str, offset: int) -> None:
        super().__init__(told)
        self.offset = offset


def damaged(what: str, offset: int, position: int, problem: str) -> DamagedLogError:
    """The damage of a file of a log: at this byte, where the batch of this offset should be."""
    return DamagedLogError(
        f"{what} is damaged at byte {position}: where offset {offset} should be, there is {problem}. Nothing was "
        f"changed. All before offset {offset} can be read; nothing is appended. Restore the file; the node of a "
        "cluster fetches it from the others.",
        offset,
    )


class LaterFormatError(StorageError, LaterVersionError):
    """A file of a later version of Railgun: it was not opened, and nothing of it was changed."""

    code = "LATER_VERSION"


def later_format(what: str, problem: object) -> LaterFormatError:
    """Return the error for a file of a later version; `what` names the file, `problem` what was found in it."""
    return LaterFormatError(
        f"{what} was written by a later version of Railgun: {problem}. Nothing was changed, and nothing is lost. Start "
        "the version that wrote it, or a later one."
    )


def later_tail(what: str, path: str, position: int, version: bytes) -> LaterFormatError:
    """Return the error for the end of a file that looks torn, and begins with the version of a later Railgun.

    `what` names the file in words, `path` is where it lies, `position` the byte at which that version stands.
    """
    return LaterFormatError(
        f"{what} ends at byte {position} with {version!r}, which a later version of Railgun writes, and which cannot "
        "be read here. Nothing was changed. Start the version that wrote it. If none has ever used this directory, "
        f"these bytes are damaged: keep a copy of the file, cut them off (truncate -s {position} {path}), and start."
    )


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
