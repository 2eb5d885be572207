"""A cluster of real processes, treated badly, and what its clients saw of it, checked.

```text
history.py    what clients record          checker.py log_rules.py delivery_rules.py producer_rules.py fault_rules.py
                                           anomalies.py   which of it must never be
proxy.py      links that are cut, slow or deaf      shim.py    a disk that forgets, is full, fails; a clock that jumps
node.py       a node on both of these               damage.py  what becomes of files of a node that is down
nemesis.py    which faults, when: drawn from a seed          blows.py   how they are done
workload.py   clients                      flows.py  producers: flows and transactions
nodes.py   processes, their files, their addresses
run.py        all of it together           python -m verification.faults check FILE   looks at a history again
```
"""
