"""What a run leaves on disk: where each thing lies (`paths`), how it is written, and when it counts."""
