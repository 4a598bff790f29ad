"""The trainer role: `python -m ycore.trainer RUN_FOLDER`, one process a rank.

Loads the model, waits for the engines where the run has any, trains, and leaves checkpoints, model, metrics and samples
in the run folder.

Not here: starting engines and watching processes (`launch`), and what a step computes (`algorithms`, TRL).
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ycore.config.algorithms import find_algorithm
from ycore.errors import Interrupted, PeerError, RunError, YcoreError
from ycore.run.files import is_disk_full, read_json
from ycore.run.paths import RunFolder
from ycore.run.reports import Rank, dump_stacks_on_signal, print_error, report_end, take_place, this_rank, was_launched
from ycore.trl.seam import leave_out_vllm


class Run(Protocol):
    """What this process does: training from rounds (`training_run`), or from given examples (`tuning_run`)."""

    def train(self) -> None: ...

    def save(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def ask_to_stop(self) -> None: ...

    def tell_others(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


def open_run(root: Path) -> Run:
    """The run that the folder's run.json describes."""
    if find_algorithm(read_json(RunFolder(root).config)["config"]["algorithm"]).learns_from == "examples":
        from ycore.trainer.tuning_run import open_tuning

        return open_tuning(root)
    from ycore.round.assemble import assemble
    from ycore.trainer.training_run import TrainingRun

    return TrainingRun(assemble(root))


def main() -> int:
    """Exit status: 0 finished, 2 the user's mistake, 130 interrupted, 1 anything else."""
    if len(sys.argv) != 2:
        print("usage: python -m ycore.trainer RUN_FOLDER", file=sys.stderr)
        return 2
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is used knowingly
    dump_stacks_on_signal()
    leave_out_vllm()
    folder, rank = RunFolder(Path(sys.argv[1])), this_rank()
    if was_launched():
        return _train_as_rank(folder, rank)
    return _train_and_tell(folder, lambda error: None)


def _train_as_rank(folder: RunFolder, rank: Rank) -> int:
    """As above, with the end told to ycore's launcher; torchrun hears of failures only, which end the other ranks."""
    cores = read_json(folder.root / "engines.json").get("cores")
    take_place(folder, rank, cores=cores[rank.local] if cores else None)
    told: list[int] = []

    def tell(error: BaseException) -> None:
        if not told:
            told.append(1)
            report_end(folder, rank, *_how(error), expected=_is_a_cause(error))

    try:
        code = _train_and_tell(folder, tell)
    except BaseException as error:
        tell(error)
        raise
    if not told:
        report_end(folder, rank, code)
    return 0 if code == Interrupted.exit_code else code


def _is_a_cause(error: BaseException) -> bool:
    """Whether the error says why the run ended: not where it follows from another rank's end, or nobody foresaw it."""
    return isinstance(error, YcoreError) and not isinstance(error, PeerError)


def _how(error: BaseException) -> tuple[int, str]:
    """Exit status and message of an error."""
    if isinstance(error, YcoreError):
        return error.exit_code, str(error)
    code = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return code, f"{type(error).__name__}: {error}"[:500]


def _train_and_tell(folder: RunFolder, tell: Callable[[BaseException], None]) -> int:
    try:
        return _train(open_run(folder.root), tell)
    except YcoreError as error:
        known = error
    except OSError as error:
        if not is_disk_full(error):
            raise
        known = RunError(f"no room left on the disk ({error}); make room, and go on with --resume")
    tell(known)
    return print_error(known)


def _train(run: Run, tell: Callable[[BaseException], None]) -> int:
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
        tell(error)  # the launcher first: what the others then fail with is not the cause
        run.tell_others(error)
        raise
    finally:
        run.close()
        for name, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(name, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
