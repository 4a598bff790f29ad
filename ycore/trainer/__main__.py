"""`python -m ycore.trainer RUN_FOLDER`, one process per rank: train any algorithm as the folder's run.json describes.

It leaves checkpoints, the model, metrics and samples in the run folder.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from ycore.config.algorithms import FAMILIES, find_algorithm, load_reference
from ycore.errors import Interrupted, PeerError, YcoreError
from ycore.run.files import RunFolder, as_run_error, read_json
from ycore.run.interrupt import keep_printing, on_stop
from ycore.run.reports import (
    Rank,
    dump_stacks_on_signal,
    hide_packages,
    is_rank,
    print_error,
    report_end,
    take_place,
    this_rank,
)
from ycore.run.work import publish_work, working


class AlgorithmRun(Protocol):
    """A run in the trainer's process, on one of its ranks."""

    stop: Event

    def train(self) -> None:
        """Take all steps, from the newest checkpoint if there is one; Interrupted where `stop` is set."""

    def save(self) -> None:
        """Save the trained model."""

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last finished step, unless it has one."""

    def close(self) -> None: ...


def open_run(root: Path) -> AlgorithmRun:
    """The run of a folder as the launcher left it."""
    folder = RunFolder(root)
    config = read_json(folder.config)["config"]
    with hide_packages(unused_packages(config, Path(read_json(folder.engines)["model"]))):
        open_folder = _load_algorithm(config["algorithm"])
    return open_folder(root)


def _load_algorithm(algorithm: str) -> Callable[[Path], AlgorithmRun]:
    """Import what a run of the algorithm needs, which takes seconds, and return what opens one."""
    if algorithm in FAMILIES:
        run: Callable[[Path], AlgorithmRun] = load_reference(FAMILIES[algorithm].run)
        return run
    from peft.import_utils import is_bnb_available

    is_bnb_available()  # peft keeps the first answer, also once bitsandbytes is found again
    if find_algorithm(algorithm).learns_from == "examples":
        from ycore.trainer.example_run import ExampleRun

        return ExampleRun
    from ycore.round.assemble import assemble
    from ycore.trainer.rollout_run import RolloutRun

    return lambda root: RolloutRun(assemble(root))


def unused_packages(config: Mapping[str, Any], model: Path) -> list[str]:
    """Packages that transformers and peft import wherever they are installed, and that this run never calls.

    They would add a quarter to the seconds that the imports take.
    """
    settings = model / "config.json"
    may_be_quantized = (
        config.get("quantize")
        or config.get("algorithm") in ("distill", "gold")  # a teacher's config is not read here
        or (settings.is_file() and "quantization_config" in read_json(settings))
        or {"optim", "model_init_kwargs"} & (config.get("trl") or {}).keys()
    )
    return ["scipy", "sklearn"] if may_be_quantized else ["bitsandbytes", "scipy", "sklearn"]


def main() -> int:
    """Exit status: 0 finished, 2 the user's mistake, 130 interrupted, 1 anything else."""
    keep_printing()
    dump_stacks_on_signal()
    folder = RunFolder(Path(sys.argv[1]))
    rank = this_rank()
    keep_to_cores(folder, rank.local)
    return _train_as_rank(folder, rank) if is_rank() else _train(folder, lambda error: None)


def keep_to_cores(folder: RunFolder, local_rank: int) -> None:
    """Keep this process on its share of the cores, where the launcher has divided them."""
    cores = read_json(folder.engines).get("cores")
    if cores and sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores[local_rank])


def _train_as_rank(folder: RunFolder, rank: Rank) -> int:
    """Report the end to ycore's launcher. torchrun sees only failures, for which it ends the other ranks."""
    take_place(folder, rank)
    reported: list[BaseException] = []

    def report(error: BaseException) -> None:
        if not reported:  # the first is the cause
            reported.append(error)
            report_end(folder, rank, *_outcome(error), expected=_is_a_cause(error))

    try:
        code = _train(folder, report)
    except BaseException as error:
        report(error)
        raise
    # In its shutdown Python has no handler, and torchrun would take the end for a failure.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not reported:
        report_end(folder, rank, code)
    return 0 if code == Interrupted.exit_code else code


def _is_a_cause(error: BaseException) -> bool:
    """Whether the error explains the run's end: not if it follows from another rank's end, or is a defect."""
    return isinstance(error, YcoreError) and not isinstance(error, PeerError)


def _outcome(error: BaseException) -> tuple[int, str]:
    """Exit status and message of an error."""
    if isinstance(error, YcoreError):
        return error.exit_code, str(error)
    code = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return code, f"{type(error).__name__}: {error}"[:500]


def _train(folder: RunFolder, report: Callable[[BaseException], None]) -> int:
    """Train, and turn an expected error into one line and an exit status."""
    if this_rank().number == 0:
        publish_work(folder.work)
    gc.disable()  # imports and models stay: a search for cycles takes a fifth of the time, and finds none
    try:
        with working("loading the model"):
            run = open_run(folder.root)
        gc.enable()
        return _train_and_save(run, report)
    except YcoreError as error:
        known = error
    except OSError as error:
        known = as_run_error(error)
    report(known)
    return print_error(known)


def _train_and_save(run: AlgorithmRun, report: Callable[[BaseException], None]) -> int:
    on_stop(lambda: run.stop.set())
    try:
        run.train()
        with working("saving the model"):
            run.save()
    except Interrupted as stopped:
        run.save_checkpoint()
        print(f"interrupted: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except Exception as error:
        report(
            error
        )  # before it closes: then other ranks fail too, with errors that are not the cause
        raise
    finally:
        run.close()
    return 0


if __name__ == "__main__":
    # After all other functions of atexit: extensions of torch report what is left of them.
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    status = main()
    gc.freeze()  # else the interpreter searches all modules and the model for cycles once more
    sys.exit(status)
