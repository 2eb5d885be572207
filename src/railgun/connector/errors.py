"""What can go wrong at a sink outside of a flow. `code` is for programs, and goes over the wire."""

from __future__ import annotations

from railgun.core.errors import RailgunError


class SinkError(RailgunError):
    """What was asked of a sink cannot be done."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class LostError(SinkError):
    """What is to be committed is not here, or not whole."""


class MisuseError(SinkError):
    """Whoever asks does not keep to the rules: its session ends."""
