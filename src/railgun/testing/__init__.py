"""Tools to test flows with, and the proof of the protocols: a public part of Railgun."""

from railgun.testing.flow_tester import FlowTester

__all__ = ["FlowTester"]
