"""A cluster's metadata, entry by entry, for tests."""

from __future__ import annotations

from typing import Any

from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.regions import Region


def node(id: str, regions: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    told = {"id": id, "name": f"name-{id}", "host": "127.0.0.1", "port": 1, "cluster_port": 2}
    return told | ({} if regions is None else {"regions": regions}) | more


class Play:
    """Applies commands; the first forms a cluster of these nodes, all in `global` if nothing else is said."""

    def __init__(
        self, *ids: str, regions: dict[str, dict[str, str]] | None = None, **settings: Any
    ) -> None:
        self.metadata = Metadata()
        nodes = [node(id, (regions or {}).get(id)) for id in ids]
        if nodes:
            self.do("form", cluster="c", nodes=nodes, settings=settings)

    def try_(self, what: Any, **fields: Any) -> dict[str, Any]:
        """What comes of a command."""
        return self.metadata.apply(self.metadata.index + 1, {"do": what, **fields})

    def do(self, what: str, **fields: Any) -> dict[str, Any]:
        """What comes of a command that is not refused."""
        result = self.try_(what, **fields)
        assert "error" not in result, result
        return result

    def refused(self, what: Any, **fields: Any) -> str:
        """The code of the error; nothing has changed but the index."""
        before = self.metadata.dump()
        result = self.try_(what, **fields)
        assert self.metadata.dump() == before | {"index": before["index"] + 1}
        code, text = result["error"]["code"], result["error"]["text"]
        assert isinstance(code, str)
        assert 0 < len(text) < 1000
        return code

    def region(self, name: str = "global") -> Region:
        return self.metadata.regions[name]

    def crown(self, master: str, region: str = "global", active: bool = True) -> None:
        """The next epoch, with this master."""
        epoch = self.region(region).epoch + 1
        self.do("master", region=region, master=master, epoch=epoch)
        if active:
            self.activate(region)

    def activate(self, region: str = "global") -> None:
        self.do("active", region=region, epoch=self.region(region).epoch)

    def change(self, what: str, node: str, region: str = "global", active: bool = True) -> None:
        """Promote or demote in the present epoch."""
        self.do(what, region=region, node=node, epoch=self.region(region).epoch)
        if active:
            self.activate(region)
