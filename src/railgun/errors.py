"""Base classes of Railgun's errors, the exit codes of its commands, and helpers that show errors as text."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import ClassVar, Final

_ERRNO_PREFIX: Final = re.compile(r"\[Errno -?\d+\] ?")


class ExitCode(IntEnum):
    """Exit codes of the command line (`railgun --help` explains each)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_JOB = 3
    NO_FLOW = 4
    FINISHED = 5
    SNAPSHOTS = 6
    NO_NODE = 7
    REFUSED = 8
    INTERRUPTED = 130


class RailgunError(Exception):
    """Base class of all errors that Railgun raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    """Exit code of a command that fails with this error."""
    kind: str = ""
    """Name of the error in the JSON output of commands. If empty, it is derived from the class's name."""


class KeyTypeError(RailgunError, TypeError):
    """A value cannot be a key: it has no stable hash that is the same for equal keys"""


class KeyCodeError(RailgunError):
    """A method of a key's class raised an exception, which is this error's `__cause__`.

    `method`: the qualified name of the method, such as "Point.__hash__". `raised`: the exception, as text.
    """

    def __init__(self, method: str, raised: str) -> None:
        super().__init__(method, raised)
        self.method, self.raised = method, raised

    def __str__(self) -> str:
        return f"{self.method} of a key raised {self.raised}"


class PlacementError(RailgunError, ValueError):
    """A placement is invalid: it has no workers, or an override names a worker outside of it."""


class ProtocolError(RailgunError):
    """A message or event violates the protocol: this is a bug in a driver or in a peer, never a fault of the data.

    It is raised before any state changes, so an invalid message is refused as a whole.
    """


class LaterVersionError(RailgunError):
    """Data was written by a later version of Railgun, in a format that this version does not know.

    The data is not damaged and stays unchanged. Open it with the later version.
    """

    code: ClassVar[str] = "LATER_VERSION"


class ProcessEnd(BaseException):
    """A simulated process ends at this point. No code may catch this exception and go on."""


def pass_interrupt(error: BaseException) -> None:
    """Raise `error` again if it is a `KeyboardInterrupt` or the end of a simulated process; else return.

    User code may raise anything, so its callers catch `BaseException`: if an event loop swallowed an
    `asyncio.CancelledError` of user code, records would be lost. A `KeyboardInterrupt` comes from the terminal, not
    from user code, and must end the process.
    """
    if isinstance(error, KeyboardInterrupt | ProcessEnd):
        raise error


def said(error: BaseException | str) -> str:
    """Return the text of `error` for use inside a sentence: without the errno prefix and without a full stop at the
    end.

    `error`: an exception, or its text.

    >>> said(FileNotFoundError(2, "No such file or directory", "secret"))
    "No such file or directory: 'secret'"
    >>> said(RailgunError("the disk is full. Make room."))
    'the disk is full. Make room'
    >>> f"the copy is damaged: {said('a checksum differs.')}. Look after the disk"
    'the copy is damaged: a checksum differs. Look after the disk'
    """
    return _ERRNO_PREFIX.sub("", str(error)).rstrip(". ")


def represent(value: object) -> str:
    """Return `repr(value)`, or a placeholder if `repr` raises: users' values and exceptions may have a broken one."""
    try:
        return repr(value)
    except BaseException as error:
        pass_interrupt(error)
        return f"<{type(value).__name__} that has no repr>"


def shortened(value: object, letters: int = 80) -> str:
    """Return `repr(value)` for a message; of a longer one the beginning, with an ellipsis, and a text in quotes.

    >>> shortened("orders"), shortened("n" * 300, letters=10), shortened([7] * 300, letters=10)
    ("'orders'", "'nnnnnnn...'", '[7, 7, ...')
    """
    if isinstance(value, str):
        return repr(value if len(value) <= letters else f"{value[: letters - 3]}...")
    text = represent(value)
    return text if len(text) <= letters else f"{text[: letters - 3]}..."
