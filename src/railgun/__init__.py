"""Railgun: streams and stateful flows in Python, rescaled live, key by key, on Spark."""

__version__ = "0.1.0"
