"""What a run leaves on disk, where each thing lies, and when it counts.

Order of reading: `paths`, `prepare`, `summary`; `files`, `private` and `secrets` serve them.

Not here: the processes that write it (`roles`, `launch`), and metrics.jsonl's lines (`telemetry`).
"""
