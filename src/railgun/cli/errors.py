"""Errors of commands, and the exit codes by which scripts recognize them."""

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
  1    failed: the flow, connector, rescale, snapshot or request; no such key; the cluster has an alarm; answered no
  2    usage: invalid command or argument, or a destructive command without --yes
  3    no such job, or it has ended; or the name or the snapshot directory is in use by another job
  4    the flow cannot be loaded, is incomplete, or cannot be sent to workers
  5    the flow has already finished
  6    the snapshots cannot be used: damaged, incompatible with the flow, or not readable
  7    no node answers, or its secret differs; or the data directory or the port is in use
  8    refused by the node (no such stream, group or node; other settings; duplicate ID), or by the flow
  130  interrupted by Ctrl-C; what stops in order (flows, nodes, sinks, connectors, `sub`) is interrupted by a second
"""


class CommandError(RailgunError):
    """An error that ends a command.

    `code` is the exit code, `kind` names the error for programs, `details` are shown to people above the message, and
    `data` is added to the error's JSON object.
    """

    def __init__(self, code: int, kind: str, message: str, details: str = "", **data: Any) -> None:
        super().__init__(message)
        self.code, self.kind, self.details, self.data = code, kind, details, data
