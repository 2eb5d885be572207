"""`railgun req`: send a request and print the response."""

from __future__ import annotations

import argparse

from railgun.cli.arguments import add_node, add_stream, not_empty, seconds
from railgun.cli.errors import DONE
from railgun.cli.messages import payload_data
from railgun.cli.node import talk
from railgun.cli.output import Output
from railgun.client.client import Client
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Send a request, and print the response."""

    async def work(client: Client) -> int:
        answer = await client.request(
            options.stream,
            options.message,
            topic=options.topic or "",
            timeout=options.timeout,
        )
        out.data(**payload_data(answer))
        out.raw(answer + b"\n")
        return DONE

    return talk(options, work)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the stream, the request and the options."""
    add_stream(parser)
    parser.add_argument("message", metavar="MESSAGE", help="the request")
    parser.add_argument("--topic", type=not_empty, default=None, help="topic of the request")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS",
        help="how long to wait for the response (default: rs_timeout of the node, 30)",
    )  # fmt: skip
    add_node(parser)
