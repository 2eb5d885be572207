"""What goes wrong at the command line, and the exit codes that tell it to scripts."""

from __future__ import annotations

from typing import Any, Final

from railgun.errors import ExitCode, RailgunError

DONE: Final = ExitCode.DONE
FAILED: Final = ExitCode.FAILED
USAGE: Final = ExitCode.USAGE
NO_JOB: Final = ExitCode.NO_JOB
NO_FLOW: Final = ExitCode.NO_FLOW
FINISHED: Final = ExitCode.FINISHED
SNAPSHOTS: Final = ExitCode.SNAPSHOTS
NO_NODE: Final = ExitCode.NO_NODE
REFUSED: Final = ExitCode.REFUSED
INTERRUPTED: Final = ExitCode.INTERRUPTED

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
