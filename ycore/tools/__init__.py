"""Commands around runs: the checks of this machine, the self-test, and pipelines of several runs."""
