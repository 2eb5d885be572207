"""Clients of a node: asyncio first (`Client`), and a synchronous face (`SyncClient`)."""
