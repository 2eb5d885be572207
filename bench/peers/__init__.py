"""Other engines at the work of `_workload`: scripts that run in an environment of their own.

Each prints a `Rate` as its last line; `bench._peers` starts them. `python -m bench.peers.NAME --help`
tells the options. They import nothing but the standard library, their engine and `_workload`.
"""
