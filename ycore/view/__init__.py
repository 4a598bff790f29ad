"""Show a run to a person: lines or a live view while it goes on (`progress`), and its report (`page`)."""
