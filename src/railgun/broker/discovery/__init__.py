"""Find the addresses of a cluster's other nodes: static lists, DNS, Consul, etcd, and plugins of third parties.

Rules:

1. One text chooses the way: `discovery` in the section `[cluster]` of a node's settings file. Its scheme names the way,
   and the rest is for that way.
2. A package adds a scheme by an entry point of the group `railgun.discovery`: its name is the scheme, and it loads a
   callable that makes a `Discovery` of a `Place`. Built-in schemes cannot be replaced.
3. Found addresses are hints, not membership: the nodes of a cluster agree on its members.
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

ENTRY_POINT_GROUP: Final = "railgun.discovery"
BUILT_IN_MAKERS: Final[Mapping[str, Maker]] = {
    "static": Static,
    "dns": Dns,
    "dns+srv": functools.partial(Dns, services=True),
    "consul": Consul,
    "etcd": Etcd,
}


def discovery_of(settings: str | Mapping[str, Any]) -> Discovery:
    """Return the discovery that a text names, or the settings of a section `[cluster]`.

    Raise `BadDiscoveryError` if the text is wrong.

    >>> import asyncio
    >>> asyncio.run(discovery_of("static://127.0.0.1:7173").find())
    [('127.0.0.1', 7173)]
    >>> discovery_of({"discovery": "static://127.0.0.1"})
    Traceback (most recent call last):
    railgun.broker.discovery.plugin.BadDiscoveryError: static://127.0.0.1: 127.0.0.1 has no port; …
    """
    text = settings if isinstance(settings, str) else settings.get("discovery")
    if not isinstance(text, str) or not text:
        raise BadDiscoveryError(
            f"discovery is a text, such as static://127.0.0.1:7173; the schemes are {_schemes_text()}"
        )
    try:
        place = Place.read(text)
    except BadDiscoveryError as error:
        raise BadDiscoveryError(f"{error}; the schemes are {_schemes_text()}") from None
    maker = BUILT_IN_MAKERS.get(place.scheme) or _find_plugin(place)
    return maker(place)


def schemes() -> list[str]:
    """Return all schemes, built-in ones first."""
    others = {entry.name.lower() for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return [*BUILT_IN_MAKERS, *sorted(others - set(BUILT_IN_MAKERS))]


def _schemes_text() -> str:
    return ", ".join(f"{name}://" for name in schemes())


def _find_plugin(place: Place) -> Maker:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.lower() == place.scheme:
            return _load(entry)
    raise BadDiscoveryError(
        f"there is no scheme {place.scheme}://; the schemes are {_schemes_text()}"
    )


def _load(entry: EntryPoint) -> Maker:
    package = entry.dist.name if entry.dist is not None else "a package"
    try:
        plugin = entry.load()
    except Exception as error:  # a package may raise anything when it is imported
        raise BadDiscoveryError(
            f"{entry.name}:// is {entry.value} of {package}, and that cannot be imported: {error!r}"
        ) from error
    if not callable(plugin):
        raise BadDiscoveryError(
            f"{entry.name}:// is {entry.value} of {package}, and that cannot be called"
        )

    def make(place: Place) -> Discovery:
        discovery: Discovery = plugin(place)
        return discovery

    return make
