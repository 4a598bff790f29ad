"""The files of a run: their paths, how they are written so that a kill leaves them whole, and how a run resumes."""
