"""Pure state machines of the engine: no I/O, no clock, no randomness, no asyncio.

A machine takes one event and returns the commands its driver has to carry out, in order. Everything a machine needs
from the world (the time, a message, an operator's answer) reaches it as an event.
"""
