"""The scorecard: real runs that are killed, stopped and damaged, and whether anything was lost.

Not here: what is put to the test. This room starts ycore from outside, by its command, as a person does.
"""
