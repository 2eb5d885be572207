"""What goes wrong at the command line, and the exit codes that tell it to scripts."""

from __future__ import annotations

from typing import Any, Final

from railgun.errors import RailgunError

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
  1    a flow or connector failed, no rescale or snapshot, no such key, no answer, you said no, or a cluster is not well
  2    a command or a number that makes no sense, or one that needs `--yes`
  3    there is no such job, it has ended, or one of that name (or with these snapshots) runs already
  4    the flow cannot be loaded, is not complete, or cannot be sent to workers
  5    the flow has come to its end before, and there is nothing left to do
  6    the snapshots cannot be used: damaged, of another form of the flow, or their disk refuses
  7    there is no node, it has another secret, or is gone; or one (or a sink) has this directory, or the port, already
  8    a node refuses: no such stream, group or node, it differs, has members, an ID is taken; a flow refuses connectors
  130  ended at once, by Ctrl-C; what stops in order (flows, nodes, sinks, connectors, `sub`): by a second one
"""


class CommandError(RailgunError):
    """A command that cannot be carried out; `kind` is for programs, `details` more to show."""

    def __init__(self, code: int, kind: str, message: str, details: str = "", **data: Any) -> None:
        super().__init__(message)
        self.code, self.kind, self.details, self.data = code, kind, details, data
