"""Which groups can teach, how many more to draw, and who trains on which: pure decisions, no process, no torch."""
