"""Evaluation on held-out rows, during a run and apart from one; the preflight; models side by side."""
