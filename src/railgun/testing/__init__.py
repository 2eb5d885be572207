"""Test flows without Spark and without processes: `FlowTester`, simulated disks, a broker in a thread."""

from railgun.testing.flow_tester import FlowTester

__all__ = ["FlowTester"]
