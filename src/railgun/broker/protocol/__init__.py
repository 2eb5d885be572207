"""Pure state machines of the broker: no I/O, no clock, no randomness, no asyncio."""
