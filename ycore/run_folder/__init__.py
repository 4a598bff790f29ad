"""What a run leaves on disk, where each thing lies, and when it counts."""
