"""`railgun pin`: assign a key to a worker."""

from __future__ import annotations

import argparse
import json
from typing import Any

from railgun.cli.arguments import KEY_HELP, add_job_name, number
from railgun.cli.errors import DONE
from railgun.cli.jobs import find
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Ask the job to move the key to the worker."""
    key = parse_key(options.key)
    taken = find(options.name, registry).post("/pin", key=key, worker=options.worker)
    out.data(accepted=True, key=key, worker=options.worker, status=taken["status"])
    out.line(f"{options.name}: key {key!r} goes to worker {options.worker}")
    return DONE


def parse_key(text: str) -> Any:
    """Parse a typed key: as JSON if it is valid JSON, or else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job, the key and the worker."""
    add_job_name(parser)
    parser.add_argument("key", metavar="KEY", help=KEY_HELP)
    parser.add_argument(
        "worker", type=number, metavar="WORKER", help="number of the worker, from 0"
    )
