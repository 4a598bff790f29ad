"""A round as discrete events, over the same placement and sampling functions that a live run calls. Pure.

Not here: the decisions themselves (`placement`, `sampling`), and memory (`planning`).
"""
