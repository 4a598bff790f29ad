"""What every test can count on."""

import os
import signal
from pathlib import Path

# Tests that run under nohup, or in the background of a script, would hand their ignored signals on to every process
# that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start find the scripted engine (tests.chaos), wherever they work.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
