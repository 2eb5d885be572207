"""The errors of the core: typed, naming what happened, to which thing, and what to do next."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import ClassVar, Final

_NUMBER: Final = re.compile(r"\[Errno -?\d+\] ?")


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
    """How a command ends that fails with this error."""
    kind: str = ""
    """A name of the error for programs that read the output of commands; if empty, derived from the class's name."""


class KeyTypeError(RailgunError, TypeError):
    """A value that cannot be a key: it has no stable hash that is the same for equal keys."""


class KeyCodeError(RailgunError):
    """A method of a key's class raised, which is the cause of this; `method` is its name, as in "Point.__hash__"."""

    def __init__(self, method: str, raised: str) -> None:
        super().__init__(method, raised)
        self.method, self.raised = method, raised

    def __str__(self) -> str:
        return f"{self.method} of a key raised {self.raised}"


class PlacementError(RailgunError, ValueError):
    """A placement that cannot be: no workers, or an override that points outside of them."""


class ProtocolError(RailgunError):
    """A message or event that the protocol rules out: a bug in a driver or in a peer, never data.

    It is raised before anything changes, so that a wrong message is refused and never half taken.
    """


class LaterVersionError(RailgunError):
    """Data was written by a later version of Railgun, in a form that this version does not know.

    The data is not damaged, and nothing of it is changed: it has to be opened by the later version.
    """

    code: ClassVar[str] = "LATER_VERSION"


class ProcessEnd(BaseException):
    """The process ends at this very point, as far as a simulation is concerned: nothing may catch it and go on."""


def pass_interrupt(error: BaseException) -> None:
    """Raise `error` again if it is a `KeyboardInterrupt`, or the end of a simulated process.

    Code of users may raise anything, and whoever calls it catches `BaseException`: an `asyncio.CancelledError` that an
    event loop swallows would take records with it. A `KeyboardInterrupt` comes from the terminal, not from that code.
    """
    if isinstance(error, KeyboardInterrupt | ProcessEnd):
        raise error


def said(error: BaseException | str) -> str:
    """Return what an error says, to stand within a sentence: without the system's number, and without a full stop.

    `error`: the error, or what it has said.

    >>> said(FileNotFoundError(2, "No such file or directory", "secret"))
    "No such file or directory: 'secret'"
    >>> said(RailgunError("the disk is full. Make room."))
    'the disk is full. Make room'
    >>> f"the copy is damaged: {said('a checksum differs.')}. Look after the disk"
    'the copy is damaged: a checksum differs. Look after the disk'
    """
    return _NUMBER.sub("", str(error)).rstrip(". ")


def represent(value: object) -> str:
    """Return `repr(value)`, or a placeholder if that raises: values and exceptions of users may not be shown."""
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
