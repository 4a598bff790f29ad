"""A run's settings: what they may be, where they come from, and what follows from them. Nothing here imports torch."""
