"""The errors of the core: typed, naming what happened, to which thing, and what to do next."""

from __future__ import annotations


class RailgunError(Exception):
    """Every error Railgun raises on purpose is one of these."""


class KeyTypeError(RailgunError, TypeError):
    """A value that cannot be a key: it has no stable hash that is the same for equal keys."""


class PlacementError(RailgunError, ValueError):
    """A placement that cannot be: no workers, or an override that points outside of them."""


class ProtocolError(RailgunError):
    """A message or event that the protocol rules out: a bug in a driver or in a peer, never data.

    It is raised before anything changes, so that a wrong message is refused and never half taken.
    """
