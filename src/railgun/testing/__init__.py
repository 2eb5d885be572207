"""Tools to test with, a public part of Railgun: the models, the explorer, the simulator, playbooks."""
