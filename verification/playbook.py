"""Playbooks: the events of one machine and its expected answers, step by step."""

from __future__ import annotations

from difflib import ndiff
from typing import Self

from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.distributor import Distributor
from verification.rescale.story import tell


class Playbook:
    """Give events to a distributor, and compare its commands, in words, with the expected ones.

    >>> from railgun.engine.protocol.placement import Placement
    >>> from verification.rescale.rows import Item, Rows
    >>> d = Distributor(0, Placement.of([0, 1], keys={1: 0, 2: 1}))
    >>> batch = Rows([Item(1, 0, 1), Item(2, 0, 1)])
    >>> play = Playbook(d).on(m.Local(batch), "process k1#1@0", "→1 Data/0 k2#1@0")
    """

    def __init__(self, machine: Distributor) -> None:
        self.machine = machine

    def on(self, event: m.Event, *expected: str) -> Self:
        """Assert that `event` leads to exactly the `expected` commands, in this order."""
        answered = [tell(command) for command in self.machine.handle(event)]
        self.machine.validate()
        if answered != list(expected):
            difference = "\n".join(ndiff(list(expected), answered))
            raise AssertionError(f"on {tell(event)}, expected (-) and answered (+):\n{difference}")
        return self

    def gets(self, sender: int, message: m.Message, *expected: str) -> Self:
        """Assert that a message from a peer leads to exactly the `expected` commands."""
        return self.on(m.Received(sender, message), *expected)
