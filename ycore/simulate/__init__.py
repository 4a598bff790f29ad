"""A round as discrete events, over the same placement and sampling functions that a live run calls. Pure.

Order of reading: `workload`, `machine`, `round`, `compare`; `recorded` makes a workload of what a run has recorded.

Not here: the decisions themselves (`placement`, `sampling`), and memory (`planning`).
"""
