"""What answers the policy between its turns: tools and environments, in confined processes."""


class Refused(Exception):
    """What was given is no tool or no environment; the message says why, in one line."""
