"""The command `ycore`, as the package `ycore_cli`."""
