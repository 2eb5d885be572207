"""A test is not wrong because the machine is busy: examples have no deadline of their own."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("snapshots", deadline=None)
settings.load_profile("snapshots")
