"""How messages name the choices people make about snapshots: as arguments of Python, or as flags of the command line.

Errors about choices are raised far below the place where the choice was made. They name it by these functions, in the
words of whoever chose: arguments of `Snapshots(...)`, unless `flags()` is around the call.

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
    """Name choices as flags of the command line, within this block."""
    token = _flags.set(True)
    try:
        yield
    finally:
        _flags.reset(token)


def rename(old: str, new: str) -> str:
    """Name the choice to call a step of the snapshot by another name; `new` may be the placeholder NAME."""
    if _flags.get():
        return f"--rename {old}={new}"
    return f"rename={{{old!r}: {new if new == 'NAME' else repr(new)}}}"


def drop(step: str) -> str:
    """Name the choice to drop the state of a step of the snapshot."""
    return f"--drop-state {step}" if _flags.get() else f"drop={{{step!r}}}"


def drop_either_way(step: str) -> str:
    """Name the choice to drop the state of a step of the snapshot, for both: workers do not know who has chosen.

    >>> drop_either_way("total")
    "--drop-state total (in Python: drop={'total'})"
    """
    return f"--drop-state {step} (in Python: drop={{{step!r}}})"


def _choice(flag: str, argument: str) -> Callable[[], str]:
    return lambda: flag if _flags.get() else argument


FRESH: Final = _choice("--fresh", "fresh=True")
BEGIN: Final = _choice("--from", "begin=...")
ALLOW_OLDER: Final = _choice("--allow-older", "allow_older=True")
RENAME: Final = _choice("--rename", "rename=...")
DROP: Final = _choice("--drop-state", "drop=...")
