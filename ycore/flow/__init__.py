"""Models that draw, by flow matching: how they sample, how likely a step was, and what they learn from rewards."""
