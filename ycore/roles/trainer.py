"""The trainer role: `python -m ycore.roles.trainer RUN_FOLDER`, one process a rank.

Loads the model, waits for the engines, trains, and leaves checkpoints, model, metrics and samples in the run folder.

Not here: starting engines and watching processes (`launch`), and what a step computes (`algorithms`, TRL).
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ycore.errors import Interrupted, UserError, YcoreError


def main() -> int:
    """Exit status: 0 finished, 2 the user's mistake, 130 interrupted, 1 anything else."""
    if len(sys.argv) != 2:
        print("usage: python -m ycore.roles.trainer RUN_FOLDER", file=sys.stderr)
        return 2
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is used knowingly
    try:
        return _train(Path(sys.argv[1]))
    except YcoreError as error:
        prefix = "error" if isinstance(error, UserError) else "failed"
        print(f"{prefix}: {error}", file=sys.stderr)
        return error.exit_code


def _train(root: Path) -> int:
    from ycore.controller.assemble import assemble
    from ycore.roles.training_run import TrainingRun

    run = TrainingRun(assemble(root))

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        run.ask_to_stop()

    previous: list[Any] = [signal.signal(name, ask_to_stop) for name in (signal.SIGINT, signal.SIGTERM)]
    try:
        run.train()
        run.save()
    except Interrupted as stopped:
        run.save_checkpoint()
        print(f"interrupted: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except Exception as error:
        run.tell_others(error)
        raise
    finally:
        run.close()
        for name, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(name, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
