"""Keep the state of keys in memory, or on disk when it outgrows memory. See docs/design/state.md."""

from __future__ import annotations

from railgun.engine.state.disk import Disk, DiskStore, OnDisk
from railgun.engine.state.errors import StateError
from railgun.engine.state.store import Cut, KeyStore, MemoryStore

__all__ = ["Cut", "Disk", "DiskStore", "KeyStore", "MemoryStore", "OnDisk", "StateError"]
