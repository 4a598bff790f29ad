"""The command `ycore`, as the package `ycore_cli`, and its first instruction: hardly anything is imported before it."""

import gc

from ycore.run.interrupt import end_while_importing


def start() -> None:
    """The console script. Ctrl-C is one line and exit status 130 from here on, also while the rest is imported."""
    end_while_importing()
    gc.set_threshold(100_000, 50, 50)  # modules and rows are many objects that live on
    from ycore_cli.main import main

    main()
