"""Models that draw, as an algorithm family."""
