"""The whole run on one page: what may be said, what it means, what is derived from it. Imports no torch."""
