"""`railgun serve`: run a node in this process, until SIGTERM or Ctrl-C stops it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import tomllib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from railgun.broker.cluster.config import (
    CLUSTER_PORT,
    ROLES,
    ClusterConfig,
    address_of,
    read_secret,
)
from railgun.broker.discovery import discovery_of
from railgun.broker.protocol.metadata.fields import NAME, REGION
from railgun.broker.protocol.metadata.options import OPTIONS, check_asked
from railgun.broker.server.server import HTTP_PORT, Server, ServerConfig
from railgun.broker.settings import STAGING
from railgun.broker.streams.persistent import Persistent
from railgun.cli.arguments import port, port_or_none
from railgun.cli.errors import DONE, FAILED, NO_NODE, USAGE, CommandError
from railgun.cli.output import Output
from railgun.errors import RailgunError, said
from railgun.transport.registry import Registry

SECTIONS: Final = ("cluster", "node")
KEYS: Final = (
    *("name", "data", "host", "port", "http_port", "certificate", "key", "cluster_port"),
    *("rs_timeout", "advertise", "advertise_client", "regions"),
)
MEMBER_KEYS: Final = ("name", "cluster_port", "advertise", "advertise_client", "regions")
CLUSTER_KEYS: Final = ("secret_file", "discovery", "bootstrap_expect", *OPTIONS)
NO_HTTP: Final = "none"
_CODES: Final = {"NO_TLS": USAGE, "IN_USE": NO_NODE, "PORT_TAKEN": NO_NODE}


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Run a node with the settings of the options and of the file of `--config`."""
    settings = read_config(Path(options.config)) if options.config else {}
    if options.data is not None:
        settings["data"] = Path(options.data)
    typed = {"host": options.host, "port": options.port, "http_port": options.http_port}
    settings |= {name: value for name, value in typed.items() if value is not None}
    http_port = settings.get("http_port", 0 if settings.get("port") == 0 else HTTP_PORT)
    settings["http_port"] = None if http_port == NO_HTTP else http_port
    if ("certificate" in settings) != ("key" in settings):
        raise CommandError(USAGE, "usage", "a certificate and its key belong together: give both")
    try:
        return _run(_serve(ServerConfig(**settings), out))
    except RailgunError as error:
        code = str(getattr(error, "code", "FAILED"))
        kind = code.lower().replace("_", "-")
        raise CommandError(_CODES.get(code, FAILED), kind, str(error)) from error
    except OSError as error:  # of the data directory or the certificate
        raise CommandError(FAILED, "disk", f"the node cannot start: {said(error)}") from error


def _run(node: Coroutine[Any, Any, int]) -> int:
    """Run on the faster event loop, uvloop, if it is installed: a request takes a sixth less time."""
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(node)
    return int(uvloop.run(node))


async def _serve(config: ServerConfig, out: Output) -> int:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    server = Server(config)
    repairs = await server.start()
    try:
        streams_here = [
            stream for name, stream in server.node.streams.items() if not name.endswith(STAGING)
        ]
        persistent = [stream for stream in streams_here if isinstance(stream, Persistent)]
        messages = sum(stream.end - stream.log.first for stream in persistent)
        http = None if server.http is None else server.http.url
        out.data(
            listening={
                "host": config.host,
                "port": server.port,
                "data": str(config.data),
                "http": http,
            },
            recovery={"streams": len(streams_here), "messages": messages, "found": repairs},
        )
        streams = f"{len(streams_here)} stream{'s' * (len(streams_here) != 1)}"
        out.line(
            f"{config.data}: {streams} with {messages:,} message{'s' * (messages != 1)}; "
            + ("all of it is whole" if not repairs else "recovery has found:")
        )
        for line in repairs:
            out.line(f"  {line}", "yellow")
        secured = " with TLS" if config.certificate is not None else ""
        out.line(f"listening on {config.host}:{server.port}{secured}; Ctrl-C stops", "green")
        if http is not None:
            out.line(f"HTTP API at {http}, described by {http}/openapi.json")
        await stopped.wait()
        for number in signals:  # a second signal ends the process at once
            loop.remove_signal_handler(number)
        out.line("stopping" if server.member is None else "handing over, then stopping")
        await server.hand_over()
    except BaseException:
        await server.stop()
        raise
    lost = await server.stop()
    refused = server.node.refused_at_end
    if not lost:
        out.data(stopped=True, **({"refused": refused} if refused else {}))
        if not refused:
            out.line("stopped: everything is on disk")
            return DONE
        out.line(
            "stopped: all that was acknowledged is on disk, and the disk takes no more:", "yellow"
        )
        for line in refused:
            out.line(f"  {line}", "yellow")
        return DONE
    out.data(stopped=True, not_on_disk=lost)
    out.line("stopped, and not everything is on disk:", "red")
    for line in lost:
        out.line(f"  {line}", "red")
    return FAILED


def read_config(file: Path) -> dict[str, Any]:
    """Read the settings of a node from a TOML file; paths in it are relative to its directory.

    Raise `CommandError` for a file that cannot be read, and for unknown or invalid settings.
    """
    try:
        with file.open("rb") as opened:
            config = tomllib.load(opened)
    except OSError as error:
        raise CommandError(
            USAGE, "config", f"{file} cannot be read: {error.strerror or error}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(USAGE, "config", f"{file} is no TOML: {said(error)}") from error
    for name, section in config.items():
        if name not in SECTIONS:
            raise _unknown(file, name, f"there are the sections {' and '.join(SECTIONS)}")
        if not isinstance(section, dict):
            raise CommandError(USAGE, "config", f"{file}: {name} is a section: write [{name}]")
    node: dict[str, Any] = config.get("node", {})
    for name, value in node.items():
        if name not in KEYS:
            raise _unknown(file, f"node.{name}", f"node has {', '.join(KEYS)}")
        fits, expected = _fits(name, value)
        if not fits:
            raise CommandError(USAGE, "config", f"{file}: node.{name} is {expected}, not {value!r}")
        if name in ("data", "certificate", "key"):
            node[name] = file.parent / value
    of_member: dict[str, Any] = {name: node.pop(name) for name in MEMBER_KEYS if name in node}
    if "cluster" in config and "rs_timeout" in node:
        raise _unknown(file, "node.rs_timeout", "write it to [cluster]: all nodes have the same")
    if "cluster" in config:
        node["cluster"] = _cluster(file, config["cluster"], node, of_member)
    elif of_member:
        raise _unknown(file, f"node.{next(iter(of_member))}", "there is no section [cluster]")
    return node


def _fits(name: str, value: Any) -> tuple[bool, str]:
    """Return whether a key of the node may have this value, and which values are expected."""
    if name == "http_port" and value == NO_HTTP:
        return True, ""
    if name in ("port", "http_port", "cluster_port"):
        return type(value) is int and 0 <= value <= 65535, "0 (any) to 65535"
    if name == "regions":
        roles = isinstance(value, dict) and all(role in ROLES for role in value.values())
        fits = roles and bool(value) and all(REGION.fullmatch(region) for region in value)
        return fits, "a table of regions (lower case letters, digits, _ . -), 'master' or 'replica'"
    if name == "name":
        fits = isinstance(value, str) and NAME.fullmatch(value) is not None
        return fits, "letters, digits, _ . -, at most 200"
    if name == "rs_timeout":
        option = OPTIONS[name]
        fits = type(value) in (int, float) and option.least <= value <= option.most
        return fits, f"{option.least:g} to {option.most:g} seconds"
    if name in ("advertise", "advertise_client"):
        return isinstance(value, str) and address_of(value) is not None, "HOST:PORT"
    return isinstance(value, str), "text"


def _cluster(
    file: Path, section: dict[str, Any], node: dict[str, Any], of_member: dict[str, Any]
) -> ClusterConfig:
    """Return the settings of the cluster, and of the node as its member; raise `CommandError` if they are invalid."""
    for name in section:
        if name not in CLUSTER_KEYS:
            raise _unknown(file, f"cluster.{name}", f"cluster has {', '.join(CLUSTER_KEYS)}")

    def wrong(name: str, expected: str) -> CommandError:
        text = f"{file}: cluster.{name} is {expected}, not {section.get(name)!r}"
        return CommandError(USAGE, "config", text)

    if "secret_file" not in section:
        text = (
            f"{file}: cluster.secret_file is missing: the file with the secret that all nodes have"
        )
        raise CommandError(USAGE, "config", text)
    if not isinstance(section["secret_file"], str):
        raise wrong("secret_file", "the file with the cluster's secret")
    if not isinstance(section.get("discovery", ""), str):
        raise wrong("discovery", "text, as static://127.0.0.1:7173")
    expect = section.get("bootstrap_expect", 0)
    if type(expect) is not int or not 0 <= expect <= 7:
        raise wrong("bootstrap_expect", "0 (join) to 7 nodes")
    host = node.get("host", "127.0.0.1")
    if host in ("", "0.0.0.0", "::"):
        for name in ("advertise", "advertise_client"):
            if name not in of_member:
                text = f"{file}: node.{name} is missing: HOST:PORT, for others cannot call {host!r}"
                raise CommandError(USAGE, "config", text)
    name = "secret_file"
    try:
        secret = read_secret(file.parent / section[name])
        name = "discovery"
        if section.get(name):
            discovery_of(section[name])
        settings: dict[str, Any] = {}
        for name in OPTIONS:
            if name in section:
                settings |= check_asked({name: section[name]})
    except RailgunError as error:
        raise CommandError(USAGE, "config", f"{file}: cluster.{name}: {error}") from error
    return ClusterConfig(
        secret,
        of_member.get("name", ""),
        host,
        of_member.get("cluster_port", CLUSTER_PORT),
        address_of(of_member.get("advertise", "")),
        address_of(of_member.get("advertise_client", "")),
        of_member.get("regions", {"global": "master"}),
        section.get("discovery", ""),
        expect,
        settings,
    )


def _unknown(file: Path, key: str, known: str) -> CommandError:
    return CommandError(USAGE, "config", f"{file}: {key} is unknown; {known}", key=key)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the node listens and keeps its data. Without defaults, so that the file of --config counts."""
    parser.add_argument("--data", metavar="DIR", help="data directory (default: railgun-data)")
    parser.add_argument("--host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", metavar="PORT", type=port,
        help="port for clients; 0: any free port (default: 7171)",
    )  # fmt: skip
    parser.add_argument(
        "--http-port", metavar="PORT", type=port_or_none,
        help="port of the HTTP API; none: no HTTP API (default: 7172, or any free port if --port is 0)",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="FILE",
        help="TOML file with settings of the node and its cluster; options override the file",
    )  # fmt: skip
