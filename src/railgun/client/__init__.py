"""Clients of the broker: for asyncio (`Client`), and for programs without an event loop (`SyncClient`)."""
