"""What evaluations cost a run between its steps, and while the trainer computes the next step.

    python docs/benchmarks/eval_while_training.py --output runs/evaluated --repeats 2
    python docs/benchmarks/eval_while_training.py --output runs/evaluated-apart --repeats 2 --apart

Both sides run the recipe `quickstart` for a few steps with an evaluation at every step, in turn, with the same seed.
With `--apart` the trainer has one core and the engines have the others, as where each has devices of its own.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from bounded import run_bounded
from machine import describe_machine

from ycore.run.metrics import read_metrics

SIDES = {"between": [], "beside": ["--eval-while-training"]}
OPTIONS = [
    "--recipe",
    "quickstart",
    "--eval-dataset",
    "task:addition?digits=1",
    "--eval-every",
    "1",
    "--seed",
    "0",
]
_LOOK_S = 0.5


def keep_apart(stop: threading.Event) -> None:
    """Until `stop`: each thread of a trainer on the first core, each of an engine on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    while not stop.wait(_LOOK_S):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(
                psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError
            ):
                words = " ".join(process.cmdline())
                cores = (
                    [first]
                    if "ycore.trainer" in words
                    else others
                    if "vllm" in words.lower()
                    else None
                )
                for thread in process.threads() if cores else ():
                    os.sched_setaffinity(thread.id, cores or ())


def measured(told: argparse.Namespace, side: str, folder: Path) -> dict[str, Any]:
    """One run of one side, without the evaluations before the first step and after the last, which are alike."""
    folder.mkdir(parents=True)
    sizes = ["--steps", str(told.steps), "--set", f"num_samples={told.num_samples}"]
    command = [
        sys.executable,
        "-c",
        "import ycore_cli; ycore_cli.start()",
        "grpo",
        *OPTIONS,
        *sizes,
        *SIDES[side],
    ]
    environment = {"OMP_NUM_THREADS": "1"} if told.apart else {}
    over = threading.Event()
    pinning = threading.Thread(target=keep_apart, args=(over,))
    if told.apart:
        pinning.start()
    try:
        command += ["--output", "run"]
        whole_s = run_bounded(
            command,
            folder=folder,
            environment=environment,
            timeout_s=told.timeout,
            stop=threading.Event(),
        )
    finally:
        over.set()
    rows = read_metrics(folder / "run/metrics.jsonl", say=print)
    steps = [row for row in rows if "loss" in row]
    evaluations = [
        row for row in rows if "ycore/time/eval" in row and 0 < row["step"] < told.steps
    ]
    between_s = total(evaluations, "ycore/time/eval") if side == "between" else 0.0
    return {
        "side": side,
        "steps_and_evaluations_s": total(steps, "ycore/time/step") + between_s,
        "train_s": total(steps, "ycore/time/train"),
        "round_s": total(steps, "ycore/time/round"),
        "waited_s": total(steps, "ycore/time/waited"),
        "eval_s": total(evaluations, "ycore/time/eval"),
        "whole_s": whole_s,
        "loss": [row["loss"] for row in steps],
        "held_out": [row["ycore/eval/reward"] for row in rows if "ycore/eval/reward" in row],
    }


def total(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--num-samples",
        type=int,
        default=8,
        help="completions of each of the 20 held-out prompts",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="the trainer on one core, the engines on the others",
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    told = parser.parse_args()
    order = [
        side
        for turn in range(told.repeats)
        for side in (list(SIDES), list(SIDES)[::-1])[turn % 2]
    ]
    runs = [
        measured(told, side, told.output / str(number)) for number, side in enumerate(order)
    ]
    result = {"machine": describe_machine(), "apart": told.apart, "runs": runs}
    (told.output / "eval_while_training.json").write_text(json.dumps(result, indent=2))
    for run in runs:
        print(json.dumps(run))


if __name__ == "__main__":
    main()
