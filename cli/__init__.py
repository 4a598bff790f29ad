"""The command `ycore`, as the package `ycore_cli`, and its first instruction: hardly anything is imported before it."""

import os
import signal


def start() -> None:
    """The console script. Ctrl-C is one line and exit status 130 from here on, also while the rest is imported."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # and not ignored, as a background job has it
        signal.signal(signal.SIGINT, end_at_once)
    from ycore_cli.main import main

    main()


def end_at_once(number: int, frame: object) -> None:
    """For as long as nothing has begun: an exception in the midst of an import may be lost, or become another one."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)
