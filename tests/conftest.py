"""What every test can count on."""

import signal

# Tests that run under nohup, or in the background of a script, would hand their ignored signals on to every process
# that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
