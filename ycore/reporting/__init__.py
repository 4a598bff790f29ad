"""A run, looked at afterwards: one page of it, several compared, and the terminal view while it goes.

Not here: what is measured (`telemetry`), and the run itself (`launch`).
"""
