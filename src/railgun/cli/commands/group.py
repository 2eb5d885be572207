"""`railgun group`: list, explain, reset and delete the consumer groups of a stream."""

from __future__ import annotations

import argparse

from railgun.cli import stream_view as view
from railgun.cli.arguments import add_confirmation, add_node, add_stream, start_position
from railgun.cli.errors import DONE
from railgun.cli.node import confirm, talk
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.client.client import Client
from railgun.transport.registry import Registry


def groups(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the consumer groups of a stream."""

    async def work(client: Client) -> int:
        listing = await client.groups(options.stream)
        out.listing("groups", listing, view.groups, f"{options.stream} has no groups")
        return DONE

    return talk(options, work)


def explain(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show what a group is doing, and why it receives nothing."""
    return _show_group(options, out, why=True)


def group_info(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the position, lag and members of a group."""
    return _show_group(options, out, why=False)


def _show_group(options: argparse.Namespace, out: Output, why: bool) -> int:
    async def work(client: Client) -> int:
        group = await client.group(options.stream, options.group)
        out.data(group=group)
        if why:
            out.line(f"{group['code']}: {group['text']}")
        out.show(view.group(group))
        return DONE

    return talk(options, work)


def reset_group(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Move a group to another position, after confirmation."""
    position = options.to if isinstance(options.to, str) else f"offset {options.to}"
    confirm(options, out, f"move the group {options.group} of {options.stream} to {position}")

    async def work(client: Client) -> int:
        position = await client.reset_group(options.stream, options.group, options.to)
        out.data(stream=options.stream, group=options.group, position=position)
        out.line(f"{options.group}: goes on at {position:,}")
        return DONE

    return talk(options, work)


def remove_group(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Delete a group and its position, after confirmation."""
    confirm(options, out, f"delete the group {options.group} of {options.stream}")

    async def work(client: Client) -> int:
        await client.delete_group(options.stream, options.group)
        out.data(stream=options.stream, deleted=options.group)
        out.line(f"{options.group}: deleted")
        return DONE

    return talk(options, work)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `ls`, `info`, `explain`, `reset` and `rm`."""
    commands = Subcommands(parser)
    command = commands.add("ls", groups, "list the consumer groups of a stream")
    add_stream(command)
    add_node(command)
    for name, execute, summary in (
        ("info", group_info, "show the position, lag and members of a group"),
        ("explain", explain, "show what a group is doing, and why it receives nothing"),
    ):
        command = commands.add(name, execute, summary)
        add_stream(command)
        _add_group(command)
        add_node(command)
    command = commands.add("reset", reset_group, "move a group without members to another position")
    add_stream(command)
    _add_group(command)
    command.add_argument(
        "to", type=start_position, metavar="start|end|OFFSET", help="the new position"
    )
    add_confirmation(command)
    add_node(command)
    command = commands.add("rm", remove_group, "delete a group without members")
    add_stream(command)
    _add_group(command)
    add_confirmation(command)
    add_node(command)


def _add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", metavar="GROUP", help="name of the group")
