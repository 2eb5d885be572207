"""Live rescaling: keyed state moves between workers chunk by chunk while records flow.

`Distributor` is the protocol on one worker for one stage; `Coordinator` orders whole rescales and snapshots
over all stages; `messages` is their vocabulary. The rules are in docs/design/rescale.md.
"""

from railgun.engine.protocol.rescale.coordinator import Coordinator
from railgun.engine.protocol.rescale.distributor import Distributor

__all__ = ["Coordinator", "Distributor"]
