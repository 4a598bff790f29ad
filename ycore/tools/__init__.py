"""Several runs as one: stages in a file, each one's output the next one's input.

Not here: a stage's own run (`launch`).
"""
