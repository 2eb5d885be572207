"""Where the other nodes of a cluster are: static lists, DNS, Consul, etcd, and what third parties add.

Rules:

1. One text chooses: `discovery` in the section `[cluster]` of a node's file. Its scheme is the way, the rest is for it.
2. A package adds a scheme by an entry point of the group `railgun.discovery`: the scheme is its name, and it leads
   to what makes a `Discovery` of a `Place`. Ours cannot be replaced.
3. What was found is a hint, and no membership: who belongs to a cluster is agreed on by its nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from railgun.broker.discovery.consul import Consul
from railgun.broker.discovery.dns import Dns
from railgun.broker.discovery.etcd import Etcd
from railgun.broker.discovery.plugin import (
    Address,
    BadDiscoveryError,
    Discovery,
    DiscoveryError,
    Maker,
    Place,
)
from railgun.broker.discovery.static import Static

__all__ = (
    "Address",
    "BadDiscoveryError",
    "Discovery",
    "DiscoveryError",
    "Maker",
    "Place",
    "discovery_of",
    "schemes",
)

GROUP: Final = "railgun.discovery"
OURS: Final[Mapping[str, Maker]] = {
    "static": Static,
    "dns": Dns,
    "dns+srv": functools.partial(Dns, services=True),
    "consul": Consul,
    "etcd": Etcd,
}


def discovery_of(told: str | Mapping[str, Any]) -> Discovery:
    """The way that a text names, or the section `[cluster]` with it; `BadDiscoveryError` if it is wrong.

    >>> import asyncio
    >>> asyncio.run(discovery_of("static://127.0.0.1:7173").find())
    [('127.0.0.1', 7173)]
    >>> discovery_of({"discovery": "static://127.0.0.1"})
    Traceback (most recent call last):
    railgun.broker.discovery.plugin.BadDiscoveryError: static://127.0.0.1: 127.0.0.1 has no port; …
    """
    text = told if isinstance(told, str) else told.get("discovery")
    if not isinstance(text, str) or not text:
        raise BadDiscoveryError(
            f"discovery is a text, as static://127.0.0.1:7173; there are {_listed()}"
        )
    try:
        place = Place.read(text)
    except BadDiscoveryError as error:
        raise BadDiscoveryError(f"{error}; there are {_listed()}") from None
    maker = OURS.get(place.scheme) or _of_others(place)
    return maker(place)


def schemes() -> list[str]:
    """All there are, ours first."""
    others = {entry.name.lower() for entry in entry_points(group=GROUP)}
    return [*OURS, *sorted(others - set(OURS))]


def _listed() -> str:
    return ", ".join(f"{name}://" for name in schemes())


def _of_others(place: Place) -> Maker:
    for entry in entry_points(group=GROUP):
        if entry.name.lower() == place.scheme:
            return _load(entry)
    raise BadDiscoveryError(f"there is no {place.scheme}://; there are {_listed()}")


def _load(entry: EntryPoint) -> Maker:
    whose = entry.dist.name if entry.dist is not None else "a package"
    try:
        made = entry.load()
    except Exception as error:  # whatever a package does when it is imported
        raise BadDiscoveryError(
            f"{entry.name}:// is {entry.value} of {whose}, and that cannot be imported: {error!r}"
        ) from error
    if not callable(made):
        raise BadDiscoveryError(
            f"{entry.name}:// is {entry.value} of {whose}, and that cannot be called"
        )

    def make(place: Place) -> Discovery:
        discovery: Discovery = made(place)
        return discovery

    return make
