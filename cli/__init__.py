"""The command `ycore`, as the package `ycore_cli`: one file a command. Not here: anything that another program could
not call from `ycore` itself.
"""
