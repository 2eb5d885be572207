"""What can be typed: kinds of arguments, and the commands on streams, sinks and connectors."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from datetime import datetime
from typing import Any


def seconds(told: str) -> float:
    """A time."""
    try:
        count = float(told)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number of seconds is expected, not {told!r}") from None
    if not 0 < count < 1e10:
        raise argparse.ArgumentTypeError(
            f"a number of seconds above 0 and below 1e10 is expected, not {told}"
        )
    return count


def number(told: str) -> int:
    """A number from 0 on."""
    if not (told.isascii() and told.isdecimal() and len(told) <= 18):
        raise argparse.ArgumentTypeError(
            f"a whole number from 0 on, of at most 18 digits, is expected, not {told!r}"
        )
    return int(told)


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A number, or `none`: without that rule."""
    return lambda told: None if told == "none" else kind(told)


def _port(told: str) -> int:
    port = number(told)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 (any) to 65535, not {told}")
    return port


def _port_or_none(told: str) -> int | str:
    return told if told == "none" else _port(told)


def _some(told: str) -> int:
    count = number(told)
    if count < 1:
        raise argparse.ArgumentTypeError("at least one is expected")
    return count


def _text(told: str) -> str:
    if not told:
        raise argparse.ArgumentTypeError("it is empty: leave it out, or give it a value")
    return told


def _wait(told: str) -> float:
    wait = 0.0 if told == "0" else seconds(told)
    if wait > 600:
        raise argparse.ArgumentTypeError(f"a call waits for 600 seconds at most, not {told}")
    return wait


def _start(told: str) -> str | int:
    return told if told in ("start", "end") else number(told)


def _moment(told: str) -> int:
    """A moment, as µs of the time of day."""
    try:
        found = datetime.fromisoformat(told)
        return round(found.timestamp() * 1e6)
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"a time is expected, as 2026-05-17T12:00:00+00:00, not {told!r}"
        ) from None


LOADS = ("publish", "consume", "pubsub", "request")


def _loads(told: str) -> tuple[str, ...]:
    asked = {name.strip() for name in told.split(",")}
    unknown = sorted(asked - set(LOADS))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: there are {', '.join(LOADS)}"
        )
    return tuple(name for name in LOADS if name in asked)


def _later(module: str, function: str) -> Callable[..., int]:
    """A command whose module is loaded when it is carried out."""

    def command(*given: Any) -> int:
        return int(getattr(importlib.import_module(module), function)(*given))

    return command


def _mix(parser: Any) -> None:
    """Let options stand between messages, which argparse takes for their end otherwise."""
    plain = parser.parse_known_args

    def parse(given: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = plain
        try:
            return parser.parse_known_intermixed_args(given, namespace)
        finally:
            parser.parse_known_args = parse

    parser.parse_known_args = parse


def add_streams(commands: Any) -> None:
    """`serve`, and everything that talks to a node."""

    def command(
        name: str, function: str, what: str, among: Any = commands, module: str = "streams"
    ) -> Any:
        made = among.add_parser(name, help=what, description=what)
        made.set_defaults(command=_later(f"railgun.cli.{module}", function), registry=None)
        made.add_argument("--json", action="store_true", help="one JSON object a line")
        if module != "serve":
            made.add_argument(
                "--data", metavar="DIR", default="railgun-data",
                help="where the node works, on this machine (railgun-data)",
            )  # fmt: skip
            made.add_argument(
                "--node",
                metavar="HOST:PORT[,…]",
                help="where it listens instead; of several, the first that answers",
            )
            made.add_argument("--secret-file", metavar="FILE", help="its secret (DIR/secret)")
            made.add_argument(
                "--certificate", metavar="FILE", help="what to trust, if it speaks TLS"
            )
        return made

    def destroys(
        name: str, function: str, what: str, among: Any, module: str = "administer"
    ) -> Any:
        made = command(name, function, what, among, module)
        made.add_argument("--yes", action="store_true", help="do not ask whether it is meant")
        return made

    def several(name: str, what: str) -> Any:
        return commands.add_parser(name, help=what, description=what).add_subparsers(
            required=True, metavar="COMMAND"
        )

    made = command("serve", "serve", "run a node until SIGTERM or Ctrl-C", commands, module="serve")
    made.add_argument("--data", metavar="DIR", help="where it works (railgun-data)")
    made.add_argument("--host", metavar="H", help="where it listens (127.0.0.1)")
    made.add_argument("--port", metavar="P", type=_port, help="and on which port (7171; 0: any)")
    made.add_argument(
        "--http-port", metavar="P", type=_port_or_none,
        help="of the HTTP API (7172, or any if --port is 0); none: without it",
    )  # fmt: skip
    made.add_argument("--config", metavar="FILE", help="all of this, in TOML; what is typed wins")

    streams = several("stream", "make streams, and look at them")
    made = command("ensure", "ensure", "make a stream what it is asked to be", streams)
    made.add_argument("name", metavar="NAME")
    absent = argparse.SUPPRESS
    made.add_argument(
        "--ephemeral", dest="kind", action="store_const", const="ephemeral", default=absent,
        help="keeps nothing: for who listens now",
    )  # fmt: skip
    for flag, kind, metavar, what in (
        ("--max-age", _or_none(seconds), "S", "messages are kept for so many seconds, or none"),
        ("--max-bytes", _or_none(number), "N", "so many bytes are kept, or none"),
        ("--id-box", seconds, "S", "IDs are remembered for so many seconds (120)"),
        ("--max-ids", _some, "N", "at most so many IDs are remembered at a time (1000000)"),
        (
            "--max-staged",
            _some,
            "N",
            "at most so many bytes are staged by producers and not committed (8589934592: 8 GiB)",
        ),
        (
            "--dead-distance",
            _or_none(number),
            "N",
            "dead-letter a message that failed once a message more than N offsets later is acknowledged, or after more "
            "than N failures",
        ),
        (
            "--dead-deliveries",
            _or_none(number),
            "N",
            "dead-letter a message that failed N times (nacked, or its consumer died)",
        ),
        (
            "--dead-age",
            _or_none(seconds),
            "S",
            "dead-letter a message that failed S seconds after the first delivery to the group that failed",
        ),
    ):
        made.add_argument(flag, type=kind, metavar=metavar, default=absent, help=what)
    made.add_argument(
        "--duplicates", choices=("ok", "refuse"), default=absent,
        help="what a publisher is told of an ID that is taken (refuse)",
    )  # fmt: skip
    made.add_argument(
        "--region", metavar="REGION", default=absent, help="of a cluster: where it is kept (global)"
    )
    made.add_argument(
        "--mode", choices=("warn", "overwrite", "strict"), default="warn",
        help="if there is one already that differs (warn)",
    )  # fmt: skip
    made = command("ls", "streams", "which streams there are", streams)
    made.add_argument("--all", action="store_true", help="also what flows keep to themselves (_…)")
    made = command("info", "info", "what there is to know of a stream", streams)
    made.add_argument("name", metavar="NAME")
    made = destroys("rm", "remove_stream", "delete a stream with all that is in it", streams)
    made.add_argument("name", metavar="NAME")
    made.add_argument("--dead-letters", action="store_true", help="its dead letters, too")
    made = destroys("purge", "purge_stream", "take messages out of a stream", streams)
    made.add_argument("name", metavar="NAME")
    made.add_argument("--before", type=number, metavar="OFFSET", help="only those before it (all)")
    made = destroys(
        "retime",
        "retime",
        "mend stored times that are ahead, in the directory (--data) of a node that is stopped",
        streams,
    )
    made.add_argument(
        "names", metavar="NAME", nargs="*", help="mend only these streams (default: all)"
    )
    made.add_argument(
        "--latest", type=_moment, metavar="TIME",
        help="later times are set to it, as 2026-05-17T12:00:00+00:00 (now); in a cluster the same on all nodes",
    )  # fmt: skip
    made.add_argument(
        "--may-expire",
        action="store_true",
        help="also if retention (max_age) then deletes messages at once (refused)",
    )

    made = command("pub", "publish", "publish messages, or the lines of stdin")
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("messages", metavar="MESSAGE", nargs="*")
    made.add_argument("--id", help="of the one message: it is stored once")
    made.add_argument("--topic", type=_text, default=None, help="of an ephemeral stream")
    made.add_argument(
        "--acks", choices=("quorum", "master", "all", "none"), default="quorum",
        help="of a cluster: on whose disks it is when that is told (quorum)",
    )  # fmt: skip
    _mix(made)

    made = command("sub", "subscribe", "print messages, a line each")
    made.add_argument("stream", metavar="STREAM")
    made.add_argument(
        "--group", type=_text, default=None, help="share them with its members, and ack them"
    )
    made.add_argument("--exclusive", action="store_true", help="one member at a time, in order")
    made.add_argument(
        "--consumer", type=_text, default=None, metavar="ID",
        help="go on where the consumer with this ID was, and ack what is printed; takes over from another one",
    )  # fmt: skip
    made.add_argument(
        "--start", type=_start, default="start", metavar="start|end|OFFSET",
        help="begin here if the group or consumer has no position yet (default: start); an OFFSET moves it in any case",
    )  # fmt: skip
    made.add_argument("--matcher", metavar="M", help="of topics of an ephemeral stream: a.*, a.#")
    made.add_argument("--count", type=_some, metavar="N", help="end after so many")
    made.add_argument(
        "--follow", action=argparse.BooleanOptionalAction, help="wait for more at the end"
    )

    made = command("req", "request", "ask who listens to an ephemeral stream; prints the answer")
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("message", metavar="MESSAGE")
    made.add_argument("--topic", type=_text, default=None)
    made.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help="wait so long for the answer (what the node is configured to: rs_timeout, 30)",
    )

    made = command("respond", "respond", "answer the requests of an ephemeral stream")
    made.add_argument("stream", metavar="STREAM")
    how = made.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--command", dest="program", metavar="COMMAND",
        help="gets the request on stdin; what it prints is the answer",
    )  # fmt: skip
    how.add_argument("--text", help="the answer")
    made.add_argument(
        "--group", type=_text, default=None, help="each request goes to one of its members"
    )
    made.add_argument("--matcher", metavar="M", help="of topics: a.*, a.#")
    made.add_argument("--count", type=_some, metavar="N", help="end after so many")

    groups = several("group", "the groups of a stream")
    made = command("ls", "groups", "which groups a stream has", groups)
    made.add_argument("stream", metavar="STREAM")
    made = command("explain", "explain", "what a group does, and why it gets nothing", groups)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("group", metavar="GROUP")

    made = command("info", "group_info", "how far a group is", groups)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("group", metavar="GROUP")
    made = destroys("reset", "reset_group", "let a group without members begin anew", groups)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("group", metavar="GROUP")
    made.add_argument("to", type=_start, metavar="start|end|OFFSET")
    made = destroys("rm", "remove_group", "forget a group without members", groups)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("group", metavar="GROUP")

    letters = several("dlq", "the dead letters of a stream")
    redriven = "also those that were redriven"
    made = command("ls", "dead_letters", "which there are, and why", letters)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("--all", action="store_true", help=redriven)
    made = command("show", "show_dead_letters", "print them whole", letters)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("--all", action="store_true", help=redriven)
    made.add_argument("--count", type=_some, metavar="N", help="so many, the oldest (all)")
    made = command(
        "redrive",
        "redrive",
        "deliver them again to the group that gave them up",
        letters,
        "administer",
    )
    made.add_argument("stream", metavar="STREAM")
    made.add_argument(
        "--offset", type=number, action="append", metavar="LETTER", help="only this; repeatable"
    )
    made.add_argument("--count", type=_some, metavar="N", help="at most so many (all)")
    made.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="(600)")
    made = destroys("purge", "purge_letters", "take them away", letters)
    made.add_argument("stream", metavar="STREAM")
    made.add_argument("--before", type=number, metavar="LETTER", help="only those before it (all)")

    _add_cluster(command, destroys, several("cluster", "how a cluster is, and its nodes"))

    loads = several("bench", "measure a node that runs")
    made = command(
        "streams", "measure", "messages and requests a second, by this client", loads, "load"
    )
    made.add_argument("--seconds", type=seconds, default=2.0, metavar="S", help="for each load (2)")
    made.add_argument("--size", type=_some, default=100, metavar="BYTES", help="of a message (100)")
    made.add_argument(
        "--batch", type=_some, default=1000, metavar="N", help="messages published at once (1000)"
    )
    made.add_argument(
        "--tasks", type=_some, default=1000, metavar="N",
        help="that publish one message at a time (1000)",
    )  # fmt: skip
    made.add_argument(
        "--only", type=_loads, default=LOADS, metavar="LOAD,...", help=f"some of {', '.join(LOADS)}"
    )


def _add_cluster(command: Callable[..., Any], destroys: Callable[..., Any], cluster: Any) -> None:
    """`cluster`: what is about all nodes."""
    made = command("status", "status", "whether all is well, and what is not", cluster, "cluster")
    made.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    made.add_argument(
        "--every", type=seconds, default=1.0, metavar="S", help="with --watch, so often (1)"
    )
    made.add_argument("--check", action="store_true", help="exit code 1 if there is an alarm")
    made.add_argument(
        "--wait", type=_wait, metavar="S",
        help="until all nodes answer and all replicas have caught up; exit code 1 if not in time",
    )  # fmt: skip
    command("nodes", "nodes", "which nodes there are, and where", cluster, "cluster")
    made = command("join", "join", "tell a node without a cluster where one is", cluster, "cluster")
    made.add_argument("address", metavar="HOST:PORT", help="for nodes (cluster_port) of a member")
    made.add_argument("--wait", type=_wait, default=10.0, metavar="S", help="for so long (10)")
    made = destroys("remove", "remove", "let a node leave for good", cluster, "cluster")
    made.add_argument("name", metavar="NODE", help="its name, or its id")
    made.add_argument(
        "--wait",
        type=_wait,
        default=60.0,
        metavar="S",
        help="until it is gone (60; 0: do not wait)",
    )
    made = command("keep", "keep", "let a node stay that was to leave", cluster, "cluster")
    made.add_argument("name", metavar="NODE")
    made = command(
        "transfer", "transfer", "let a node be a master, or the leader", cluster, "cluster"
    )
    made.add_argument("name", metavar="NODE")
    made.add_argument("--region", metavar="REGION", help="of which it is to be the master")
    made.add_argument("--leader", action="store_true", help="it is to lead the cluster")
    made = command("settings", "settings", "the settings of the cluster", cluster, "cluster")
    made.add_argument("change", metavar="KEY=VALUE", nargs="*", help="seconds, or none")


def add_sinks(commands: Any) -> None:
    """`sink`: what flows write to, outside of them."""
    what = "run a sink that flows write to (Outside), exactly once, until SIGTERM or Ctrl-C"
    among = commands.add_parser("sink", help=what, description=what).add_subparsers(
        required=True, metavar="COMMAND"
    )
    made = []
    for name, what in (
        ("files", "records as lines of a file that grows"),
        ("table", "JSON records as rows of a table, in SQLite or PostgreSQL"),
    ):
        one = among.add_parser(name, help=what, description=what)
        one.set_defaults(command=_later("railgun.cli.sink", name), registry=None)
        one.add_argument("--json", action="store_true", help="one JSON object a line")
        one.add_argument(
            "--data", metavar="DIR", default="railgun-sink",
            help="where it works, and flows on this machine find it (railgun-sink)",
        )  # fmt: skip
        one.add_argument(
            "--host", metavar="H", default="127.0.0.1", help="where it listens (127.0.0.1)"
        )
        one.add_argument(
            "--port", metavar="P", type=_port, default=7373, help="and on which port (7373; 0: any)"
        )
        one.add_argument("--certificate", metavar="FILE", help="speak TLS with it")
        one.add_argument("--key", metavar="FILE", help="of the certificate")
        made.append(one)
    files, table = made
    files.add_argument("path", metavar="PATH", help="the file, which is made if there is none")
    files.add_argument(
        "--raw", action="store_true", help="bytes as they are, no end of line after each record"
    )
    table.add_argument(
        "url", metavar="URL", help="sqlite:///FILE, or postgresql://USER@HOST/DATABASE"
    )
    table.add_argument("table", metavar="TABLE", help="made of the first records, if there is none")
    for name, function, what in (
        ("list", "list_", "what waits in the directory of a sink that does not run"),
        ("drop", "drop", "give a transaction up: its records are lost, and its flow goes on"),
        ("moved", "moved", "the target has another name now: let the next sink say which"),
    ):
        one = among.add_parser(name, help=what, description=what)
        one.set_defaults(command=_later("railgun.cli.sink_data", function), registry=None)
        one.add_argument("--json", action="store_true", help="one JSON object a line")
        one.add_argument(
            "--data", metavar="DIR", default="railgun-sink", help="where it works (railgun-sink)"
        )
        if name != "list":
            one.add_argument("--yes", action="store_true", help="do not ask")
        if name == "drop":
            one.add_argument("id", metavar="ID", help="of the transaction, as `list` shows it")


def add_connectors(commands: Any) -> None:
    """`connector`: ready-made programs that push into a flow."""
    what = "push files, tables or webhooks into a flow, exactly once"
    group = commands.add_parser("connector", help=what, description=what).add_subparsers(
        required=True, metavar="COMMAND"
    )

    def command(name: str, what: str) -> Any:
        made = group.add_parser(name, help=what, description=what)
        made.set_defaults(command=_later("railgun.cli.connector", name))
        made.add_argument("--json", action="store_true", help="one JSON object a line")
        made.add_argument("--registry", metavar="DIR", help="where jobs are found")
        made.add_argument(
            "flow", metavar="FLOW",
            help="the name of a job; the URL of its HTTP API; or HOST:PORT,... of workers (RAILGUN_SECRET: the secret)",
        )  # fmt: skip
        made.add_argument("--source", metavar="NAME", help="if the flow has several")
        made.add_argument(
            "--token-file", metavar="FILE", help="the job's token, for a URL (or RAILGUN_TOKEN)"
        )
        made.add_argument(
            "--timeout", type=seconds, default=30.0, metavar="S",
            help="wait so long for the flow at the start (30)",
        )  # fmt: skip
        return made

    made = command("tail", "follow a file that grows, or those of a directory: a line, a message")
    made.add_argument("path", metavar="PATH", help="a file, or a directory")
    made.add_argument(
        "--pattern", default="*", metavar="P", help="of files in the directory: *.log, **/*.log (*)"
    )
    made.add_argument("--prefix", default="", metavar="TEXT", help="before the names of streams")
    made.add_argument(
        "--poll", type=seconds, default=0.5, metavar="S", help="between two looks (0.5)"
    )
    made.add_argument(
        "--once", action="store_true", help="end when all that is there now is acknowledged"
    )

    made = command(
        "table", "follow a table of a database by a column that goes up: a row, a message"
    )
    made.add_argument(
        "database",
        metavar="URL",
        help="sqlite:///path (four slashes: from the root), postgresql://…",
    )
    made.add_argument("table", metavar="TABLE", help="its name, or SCHEMA.TABLE")
    made.add_argument(
        "--id", required=True, metavar="COLUMN", help="whole numbers that go up, and are unique"
    )
    made.add_argument("--columns", metavar="A,B,...", help="of the payload (all)")
    made.add_argument("--key", metavar="COLUMN", help="the key of messages")
    made.add_argument("--time", metavar="COLUMN", help="the event time of messages")
    made.add_argument("--stream", metavar="NAME", help="(the name of the table)")
    made.add_argument(
        "--poll", type=seconds, default=1.0, metavar="S", help="between two looks (1)"
    )
    made.add_argument(
        "--batch", type=_some, default=1000, metavar="N", help="rows that are read at once (1000)"
    )
    made.add_argument(
        "--once", action="store_true", help="end when all that is there now is acknowledged"
    )

    made = command("http", "receive webhooks: a POST to /STREAM or /STREAM/ID, a message")
    made.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="where it listens (127.0.0.1)"
    )
    made.add_argument(
        "--port", type=_port, default=7180, metavar="P", help="and on which port (7180; 0: any)"
    )
    made.add_argument("--certificate", metavar="FILE", help="for TLS, with its --key")
    made.add_argument("--key", metavar="FILE", help="of the certificate")
    made.add_argument(
        "--token", metavar="TEXT",
        help="that requests have to bear (better RAILGUN_WEBHOOK_TOKEN: what is typed can be seen)",
    )  # fmt: skip
    made.add_argument(
        "--early", action="store_true",
        help="answer 202 at once, and not 200 when the message is in a snapshot",
    )  # fmt: skip
    made.add_argument(
        "--largest", type=_some, default=512 << 10, metavar="BYTES", help="of a body (524288)"
    )
    made.add_argument(
        "--waiting", type=_some, default=64 << 20, metavar="BYTES",
        help="of messages that wait for the flow (67108864)",
    )  # fmt: skip
    made.add_argument(
        "--patience", type=seconds, default=30.0, metavar="S", help="of a request that waits (30)"
    )
    made.add_argument(
        "--drain", type=seconds, default=10.0, metavar="S", help="for what waits, at the end (10)"
    )
