"""Pure state machines: no I/O, no clock, no randomness, no asyncio.

A machine takes one event and returns the commands its driver has to carry out, in order. Whatever a
machine needs from the world (the time, a message, the answer of an operator) reaches it as an event.
"""
