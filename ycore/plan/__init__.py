"""What a run will need and take, before it starts: memory and time of every role in every phase. Pure but for files.

Not here: measuring a run (`telemetry`), and a round's events (`simulate`).
"""
