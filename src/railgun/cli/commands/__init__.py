"""The commands of `railgun`, a module each.

A module of a command has `add_arguments(parser)`, and `execute(options, out, registry)`, which returns the exit code. A
command with commands of its own (`stream ls`) has a function of the same signature for each, set as the parser's
default `execute`. Only the module of the command that is carried out is imported: commands on running jobs do not wait
for Spark or the broker to load.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command, as the list in `railgun --help` shows it; its module has its name."""

    name: str
    summary: str


FLOWS: Final = (
    Command("run", "run a flow until it ends or is stopped"),
    Command("backfill", "run a flow over its history as a Spark batch job, then continue live"),
    Command("status", "show a running job, or list all running jobs"),
    Command("scale", "change the number of workers of a running job"),
    Command("pin", "assign a key to a worker, regardless of its hash"),
    Command("stop", "stop a job after a final snapshot"),
    Command("snapshot", "take a snapshot now and wait until it is committed"),
    Command("snapshots", "list the snapshots of a job or of a directory"),
    Command("state", "show the state of a key, or query all state in a snapshot"),
    Command("draw", "draw the graph of a flow"),
    Command("connector", "push files, database tables or webhooks into a flow"),
    Command("sink", "run a sink process that writes results of flows to files or tables"),
)
STREAMS: Final = (
    Command("serve", "run a node, alone or as a member of a cluster"),
    Command("stream", "create, list, change, purge and delete streams"),
    Command("pub", "publish messages"),
    Command("sub", "print the messages of a stream"),
    Command("req", "send a request and print the response"),
    Command("respond", "answer requests"),
    Command("group", "list, explain, reset and delete consumer groups"),
    Command("dlq", "list, show, redrive and purge dead letters"),
    Command("cluster", "show the state of a cluster and manage its nodes"),
    Command("bench", "measure the throughput of a running node"),
)
OTHERS: Final = (Command("completion", "print a shell completion script"),)
HEADINGS: Final = {"flows": FLOWS, "streams": STREAMS, "other": OTHERS}
ALL: Final = {command.name: command for group in HEADINGS.values() for command in group}
