"""One file per role: how its process starts, and what a controller asks of it."""

RUN_MARKER = "YCORE_RUN"
"""The environment variable that every process of a run carries; its value is `RunFolder.run_id`."""
