"""Name the options of snapshots in error messages: as Python arguments, or as flags of the command line.

Errors about options are raised far below the place where the option was given. They name the option with these
functions: as an argument of `Snapshots(...)`, or as a flag inside of `with flags()`.

>>> rename("total", "totals"), drop("total"), FRESH()
("rename={'total': 'totals'}", "drop={'total'}", 'fresh=True')
>>> with flags():
...     rename("total", "totals"), drop("total"), FRESH()
('--rename total=totals', '--drop-state total', '--fresh')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_flags: Final[ContextVar[bool]] = ContextVar("railgun_choices_are_flags", default=False)


@contextmanager
def flags() -> Iterator[None]:
    """Name options as flags of the command line, within this block."""
    token = _flags.set(True)
    try:
        yield
    finally:
        _flags.reset(token)


def rename(old: str, new: str) -> str:
    """Return the option that renames a step of the snapshot; `new` may be the placeholder NAME."""
    if _flags.get():
        return f"--rename {old}={new}"
    return f"rename={{{old!r}: {new if new == 'NAME' else repr(new)}}}"


def drop(step: str) -> str:
    """Return the option that drops the state of a step of the snapshot."""
    return f"--drop-state {step}" if _flags.get() else f"drop={{{step!r}}}"


def drop_either_way(step: str) -> str:
    """Name the choice to drop the state of a step both ways: workers do not know how the job was started.

    >>> drop_either_way("total")
    "--drop-state total (in Python: drop={'total'})"
    """
    return f"--drop-state {step} (in Python: drop={{{step!r}}})"


def _option(flag: str, argument: str) -> Callable[[], str]:
    return lambda: flag if _flags.get() else argument


FRESH: Final = _option("--fresh", "fresh=True")
BEGIN: Final = _option("--from", "begin=...")
ALLOW_OLDER: Final = _option("--allow-older", "allow_older=True")
RENAME: Final = _option("--rename", "rename=...")
DROP: Final = _option("--drop-state", "drop=...")
