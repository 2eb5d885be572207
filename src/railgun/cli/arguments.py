"""Kinds of arguments, and options that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

MAX_WAIT_S: Final = 600.0
MAX_SECONDS: Final = 1e10
MAX_DIGITS: Final = 18
MAX_PORT: Final = 65535
FLOW_HELP: Final = "the flow: module:flow, or path/file.py[:flow]"
KEY_HELP: Final = 'the key, as text or JSON: ada, 42, "42", ["a", 1]'


def seconds(text: str) -> float:
    """Parse a positive number of seconds.

    >>> seconds("2.5")
    2.5
    """
    try:
        count = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, not {text!r}") from None
    if not 0 < count < MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected a number of seconds above 0 and below 1e10, not {text}"
        )
    return count


def number(text: str) -> int:
    """Parse a whole number that is not negative."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 on, of at most {MAX_DIGITS} digits, not {text!r}"
        )
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    count = number(text)
    if count < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return count


def worker_count(text: str) -> int:
    """Parse a number of workers."""
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"a flow needs at least one worker, not {count}")
    return count


def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of `kind`, or of the word `none`, which switches a rule off."""
    return lambda text: None if text == "none" else kind(text)


def port(text: str) -> int:
    """Parse a port; 0 lets the system choose one."""
    parsed = number(text)
    if parsed > MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 0 (any) to {MAX_PORT}, not {text}")
    return parsed


def port_or_none(text: str) -> int | str:
    """Parse a port, or the word `none`."""
    return text if text == "none" else port(text)


def not_empty(text: str) -> str:
    """Accept any text but the empty one."""
    if not text:
        raise argparse.ArgumentTypeError(
            "the value is empty: leave the option out, or give a value"
        )
    return text


def wait_seconds(text: str) -> float:
    """Parse how long a command waits: 0 to `MAX_WAIT_S` seconds."""
    wait_s = 0.0 if text == "0" else seconds(text)
    if wait_s > MAX_WAIT_S:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_WAIT_S:.0f} seconds, not {text}")
    return wait_s


def start_position(text: str) -> str | int:
    """Parse where a reader starts: `start`, `end` or an offset."""
    return text if text in ("start", "end") else number(text)


def timestamp(text: str) -> int:
    """Parse an ISO 8601 time; return microseconds since 1970."""
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1e6)
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"expected a time such as 2026-05-17T12:00:00+00:00, not {text!r}"
        ) from None


# ---------------------------------------------------------------- options of several commands


def add_registry(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that look for running jobs."""
    parser.add_argument(
        "--registry", metavar="DIR",
        help="directory in which running jobs are registered (default: ~/.railgun/jobs)",
    )  # fmt: skip


def add_job_name(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the name of a job; `nargs="?"` makes it optional."""
    parser.add_argument("name", metavar="NAME", nargs=nargs, help="name of the job")
    add_registry(parser)


def add_running(parser: argparse.ArgumentParser) -> None:
    """Add the flow, and the options of commands that run one."""
    parser.add_argument("flow", metavar="FLOW", help=FLOW_HELP)
    parser.add_argument(
        "--workers", type=worker_count, default=2, metavar="N",
        help="number of workers at the start (default: 2)",
    )  # fmt: skip
    parser.add_argument("--master", metavar="URL", help="URL of the Spark master (default: local)")
    parser.add_argument("--name", help="name of the job (default: the name of the flow)")
    parser.add_argument(
        "--port", type=port, default=0, metavar="PORT",
        help="port of the job's HTTP API (default: 0, any free port)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="set a Spark property; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--snapshots", metavar="DIR",
        help="directory or URL to keep snapshots in (default: ./railgun-snapshots)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=seconds, metavar="SECONDS", help="time between snapshots (default: 10)"
    )
    parser.add_argument(
        "--keep", type=kept_snapshots, metavar="N", help="number of snapshots to keep (default: 3)"
    )
    add_registry(parser)


def kept_snapshots(text: str) -> int:
    """Parse how many snapshots are kept."""
    count = number(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least one snapshot is kept")
    return count


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that connect to a node."""
    parser.add_argument(
        "--data", metavar="DIR", default="railgun-data",
        help="data directory of a node on this machine (default: railgun-data)",
    )  # fmt: skip
    parser.add_argument(
        "--node", metavar="HOST:PORT[,…]",
        help="address of the node instead; of several, the first that answers is used",
    )  # fmt: skip
    parser.add_argument(
        "--secret-file", metavar="FILE", help="file with the node's secret (default: DIR/secret)"
    )
    parser.add_argument(
        "--certificate", metavar="FILE", help="CA certificate to verify the node with; enables TLS"
    )


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Add the option that answers the question of a destructive command."""
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def add_stream(parser: argparse.ArgumentParser) -> None:
    """Add the name of a stream."""
    parser.add_argument("stream", metavar="STREAM", help="name of the stream")


def add_listen(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add where a program listens for connections."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address to listen on (default: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=port, default=default_port, metavar="PORT",
        help=f"port to listen on; 0: any free port (default: {default_port})",
    )  # fmt: skip
    parser.add_argument("--certificate", metavar="FILE", help="certificate for TLS; needs --key")
    parser.add_argument("--key", metavar="FILE", help="private key of the certificate")
