"""Run a cluster of real processes under faults, record what its clients see, and check the records.

```text
history.py    records of clients           checker.py log_rules.py delivery_rules.py producer_rules.py fault_rules.py
anomalies.py  kinds of violations
proxy.py      links that are cut, slow or silent   shim.py  a disk that loses data, is full or fails; a clock that jumps
node.py       a node that uses both        damage.py  damage to the files of a node that is down
nemesis.py    the plan of faults, drawn from a seed          blows.py   applies the faults
workload.py   clients                      flows.py  producers: flows and transactions
nodes.py      processes, their files and addresses
run.py        one whole run                python -m verification.faults check FILE   checks a recorded history again
```
"""
