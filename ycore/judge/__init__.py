"""Judges as data: what a judge is declared to be, the text it is shown, and how its verdict is read. Pure.

Not here: the engine that a judge runs in (`roles`), and when it is asked (`controller`).
"""
