"""Rescale a running flow: move keyed state between workers chunk by chunk while records flow.

`Distributor` runs the protocol for one stage on one worker; `Coordinator` orders whole rescales and snapshots over all
stages; `messages` defines their events, messages and commands. The rules are in docs/design/rescale.md.
"""

from railgun.engine.protocol.rescale.coordinator import Coordinator
from railgun.engine.protocol.rescale.distributor import Distributor

__all__ = ["Coordinator", "Distributor"]
