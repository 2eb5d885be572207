"""The command line: start flows, and talk to those that run."""
