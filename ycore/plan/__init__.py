"""Plan a run before it starts: memory and seconds of every role in every phase of a step."""
