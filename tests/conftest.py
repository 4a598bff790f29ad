"""What every test can count on."""

import signal

# Tests that run under nohup would hand its ignored SIGHUP on to every process they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
