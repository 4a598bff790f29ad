"""The tuner role: `python -m ycore.roles.tuner RUN_FOLDER`, one process a rank: a trainer without rollouts.

Not here: the process and its signals (`trainer`, which this is but for what it trains on), and the run (`tuning_run`).
"""

import sys
from pathlib import Path

from ycore.roles.trainer import Run, main


def _open_tuning(root: Path) -> Run:
    from ycore.roles.tuning_run import open_tuning

    return open_tuning(root)


if __name__ == "__main__":
    sys.exit(main(_open_tuning))
