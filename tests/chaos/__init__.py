"""The scorecard: real runs of ycore that are killed, stopped and damaged from outside, by its command."""
