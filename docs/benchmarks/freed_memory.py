r"""What a step of `ycore sft` costs on a CPU, where glibc keeps what a step frees and where it gives it back.

    python docs/benchmarks/freed_memory.py --output runs/freed --dataset harmless-base-test.jsonl.gz --repeats 3

Both sides run the recipe `sft-chat` for a few steps, in turn, with the same seed. Processor time and page faults are
those of all processes of a run, with their start; the machine's other work does not count in them.
"""

import argparse
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from bounded import run_bounded
from machine import describe_machine

from ycore.run.metrics import read_metrics

COMMAND = "import ycore_cli; from ycore.launch import launcher; {change}; ycore_cli.start()"
SIDES = {"gives back": "launcher._KEEP_FREED.clear()", "keeps": "pass"}


def spent() -> resource.struct_rusage:
    """Of all children so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN)


def measured(told: argparse.Namespace, side: str, folder: Path) -> dict[str, Any]:
    """One run of one side."""
    folder.mkdir(parents=True)
    options = ["--recipe", "sft-chat", "--set", f"dataset={told.dataset.resolve()}", "--set", "held_out=0"]
    words = ["sft", *options, "--steps", str(told.steps), "--output", "run"]
    command = [sys.executable, "-c", COMMAND.format(change=SIDES[side]), *words]
    before = spent()
    run_bounded(command, folder=folder, environment={}, timeout_s=told.timeout, stop=threading.Event())
    after = spent()
    output = folder / "run"
    metrics = read_metrics(output / "metrics.jsonl", say=print)
    return {
        "side": side,
        "user_s": after.ru_utime - before.ru_utime,
        "kernel_s": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "peak_bytes": json.loads((output / "memory.json").read_text())["trainer"],
        "step_s": [row["ycore/time/step"] for row in metrics],
        "loss": [row["loss"] for row in metrics],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True, help="hh-rlhf's harmless-base test file")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    told = parser.parse_args()
    order = [side for turn in range(told.repeats) for side in (list(SIDES), list(SIDES)[::-1])[turn % 2]]
    runs = [measured(told, side, told.output / str(number)) for number, side in enumerate(order)]
    result = {"machine": describe_machine(), "runs": runs}
    (told.output / "freed_memory.json").write_text(json.dumps(result, indent=2))
    for run in runs:
        print(json.dumps(run))


if __name__ == "__main__":
    main()
