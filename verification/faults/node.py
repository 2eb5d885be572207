"""Run a node in a process of its own, with a disk and a clock that follow orders.

    python -m verification.faults.node --config FILE [--shim CONTROL] [--clock CONTROL]

The process reads the same file as `railgun serve`, prints one line of JSON when it listens, and stops in order on
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from railgun.broker.log.disk import NodeDisk
from railgun.broker.server.server import Server, ServerConfig
from railgun.cli.commands.serve import NO_HTTP, read_config
from verification.faults.shim import Control, JumpingClock, ShimDisk


def config_of(file: Path) -> ServerConfig:
    """Return the settings that `railgun serve` would read from `file`."""
    settings: dict[str, Any] = read_config(file)
    if settings.get("http_port", NO_HTTP) == NO_HTTP:
        settings["http_port"] = None
    return ServerConfig(**settings)


async def serve(config: ServerConfig, shim: Path | None, clock: Path | None) -> None:
    """Run a node until SIGTERM."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    disk = None if shim is None else ShimDisk(NodeDisk(config.data), Control(shim))
    now = None if clock is None else JumpingClock(Control(clock))
    server = Server(config, disk, now)
    recovered = await server.start()
    print(json.dumps({"port": server.port, "found": recovered}), flush=True)
    await stopped.wait()
    await server.hand_over()  # as `railgun serve` does
    await server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node with the files that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verification.faults.node")
    parser.add_argument("--config", type=Path, required=True, help="as of railgun serve")
    parser.add_argument("--shim", type=Path, help="file with the faults of the node's disk")
    parser.add_argument("--clock", type=Path, help="file with the error of the node's clock")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(config_of(options.config), options.shim, options.clock))
    return 0


if __name__ == "__main__":
    sys.exit(main())
