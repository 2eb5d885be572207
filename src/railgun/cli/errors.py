"""What goes wrong at the command line, and the exit codes that tell it to scripts."""

from __future__ import annotations

from typing import Any, Final

from railgun.core.errors import RailgunError

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_JOB: Final = 3
NO_FLOW: Final = 4
FINISHED: Final = 5
SNAPSHOTS: Final = 6
NO_NODE: Final = 7
REFUSED: Final = 8
INTERRUPTED: Final = 130

EXIT_CODES: Final = """\
exit codes:
  0    done
  1    the flow failed, the rescale or the snapshot did not come about, no such key, nobody answered, you said no, or a
       stream of a connector cannot go on
  2    a command or a number that makes no sense, or one that needs `--yes`
  3    there is no such job (also for a connector), it has ended, or one of that name (or with these snapshots) runs
       already
  4    the flow cannot be loaded, is not complete, or cannot be sent to workers
  5    the flow has come to its end before, and there is nothing left to do
  6    the snapshots cannot be used: damaged, of another form of the flow, or their disk refuses
  7    there is no node, it has another secret, or is gone; or one has this directory, or the port, already; or a
       connector cannot listen
  8    the node refuses: there is no such stream or group, it differs, has members, or the ID of a message is taken; or
       the flow refuses a connector: another secret or token, no such source
  130  ended at once, by Ctrl-C; what stops in order (a flow, a node, a connector, `sub`, `respond`): by a second one
"""


class CommandError(RailgunError):
    """A command that cannot be carried out; `kind` is for programs, `details` more to show."""

    def __init__(self, code: int, kind: str, message: str, details: str = "", **data: Any) -> None:
        super().__init__(message)
        self.code, self.kind, self.details, self.data = code, kind, details, data
