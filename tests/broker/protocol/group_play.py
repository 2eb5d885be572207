"""One group of a persistent stream for tests of its rules."""

from __future__ import annotations

from collections.abc import Sequence

from railgun.broker.protocol.groups import Group, GroupConfig


def a_group(
    end: int = 10, credit: int = 100, members: Sequence[str] = ("ann",), **config: object
) -> Group:
    """A group at offset 0 of a stream of so many messages, with members that have credit."""
    group = Group(GroupConfig(**config), None, 0, 0, end)  # type: ignore[arg-type]
    for member in members:
        group.join(member, 0)
        group.grant(member, credit, 0)
    return group


def taken(group: Group, now: int = 0) -> list[tuple[str, int, int, int]]:
    """Who gets which, by what delivery number."""
    told = [(d.member, d.first, d.end, d.delivery) for d in group.take(now)]
    group.validate()
    return told


def restarted(group: Group, first: int | None = None, end: int | None = None) -> Group:
    """The group after its node was gone and came back."""
    first = group.first if first is None else first
    return Group(group.config, group.save(), 0, first, group.end if end is None else end)
