"""What a person sees of a run: lines or a live view while it goes on (`progress`), and its report (`page`)."""
