"""Judges as data: how they are declared, the question they are asked, and the verdict in their reply."""
