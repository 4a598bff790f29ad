"""What a run will need and take, before it starts: memory and seconds of every role in every phase of a step."""
