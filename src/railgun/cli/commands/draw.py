"""`railgun draw`: draw the graph of a flow."""

from __future__ import annotations

import argparse
from pathlib import Path

from railgun.cli.arguments import FLOW_HELP
from railgun.cli.errors import DONE
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Load the flow, and draw its graph."""
    from railgun.cli.loading import load

    flow = load(options.flow).flow
    if options.svg:
        Path(options.svg).write_text(flow.draw("svg"), "utf-8")
        out.data(svg=options.svg)
        out.line(f"{flow.name} is drawn in {options.svg}")
    else:
        picture = flow.draw()
        out.data(mermaid=picture)
        out.line(picture)
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flow and the format."""
    parser.add_argument("flow", metavar="FLOW", help=FLOW_HELP)
    parser.add_argument(
        "--svg", metavar="FILE", help="write an SVG picture to FILE (default: print Mermaid text)"
    )
