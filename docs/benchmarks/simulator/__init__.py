"""Rounds in virtual time: compare placements with the live run's own decisions, without an engine."""
