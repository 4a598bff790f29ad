"""The trainer's process of `example_steps.py` with TRL's own head, which on a CPU scores every position."""

import sys

from ycore.trainer import __main__
from ycore.trl import build

build.needs_compact_head = lambda trainer: False

if __name__ == "__main__":
    sys.exit(__main__.main())
