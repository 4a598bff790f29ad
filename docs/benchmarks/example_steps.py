r"""Measure a step of `ycore sft`, `dpo` or `kto` on a CPU, with one thing as it is in ycore and as it was before.

    python docs/benchmarks/example_steps.py --of head --recipe hh-dpo --output runs/head --dataset FILE

`--of memory`: glibc keeps what a step frees, or gives it back. `--of head`: the head scores the answers' tokens, or, as
in TRL, every position. Both sides run a recipe for a few steps, in turn, with the same seed. Processor time and page
faults are those of all processes of a run, with their start; the machine's other work does not count in them.
"""

import argparse
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import yaml
import ycore_recipes
from bounded import run_bounded
from machine import describe_machine
from processor_clock import ProcessorClock

from ycore.run.metrics import read_metrics

COMMAND = "import ycore_cli; from ycore.launch import launcher, processes; {change}; ycore_cli.start()"
WHOLE_HEAD = "launcher.TRAINER = launcher.RunKind('trainer', 'whole_head')"
SIDES = {
    "memory": {"gives back": "processes._KEEP_FREED.clear()", "keeps": "pass"},
    "head": {"every position": WHOLE_HEAD, "answers": "pass"},
}


def spent() -> resource.struct_rusage:
    """Return the usage of all children so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN)


def measure_side(arguments: argparse.Namespace, side: str, folder: Path) -> dict[str, Any]:
    """Run one side once."""
    folder.mkdir(parents=True)
    recipe = yaml.safe_load(
        Path(ycore_recipes.__file__).with_name(f"{arguments.recipe}.yaml").read_text()
    )
    options = [
        "--recipe",
        arguments.recipe,
        "--set",
        f"dataset={arguments.dataset.resolve()}",
        "--set",
        "held_out=0",
    ]
    words = [recipe["algorithm"], *options, "--steps", str(arguments.steps), "--output", "run"]
    command = [sys.executable, "-c", COMMAND.format(change=SIDES[arguments.of][side]), *words]
    path = {
        "PYTHONPATH": str(Path(__file__).parent)
    }  # where the trainer's process finds `whole_head`
    before = spent()
    with ProcessorClock(folder / "run") as clock:
        run_bounded(
            command,
            folder=folder,
            environment=path,
            timeout_s=arguments.timeout,
            stop=threading.Event(),
        )
    after = spent()
    output = folder / "run"
    metrics = read_metrics(output / "metrics.jsonl", say=print)
    return {
        "side": side,
        "user_s": after.ru_utime - before.ru_utime,
        "kernel_s": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "peak_bytes": clock.peaks["trainer"],
        "step_s": [row["ycore/time/step"] for row in metrics],
        "loss": [row["loss"] for row in metrics],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--of", choices=sorted(SIDES), required=True)
    parser.add_argument("--recipe", default="sft-chat", help="sft-chat or hh-dpo")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--dataset", type=Path, required=True, help="hh-rlhf's harmless-base test file"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    arguments = parser.parse_args()
    sides = list(SIDES[arguments.of])
    order = [
        side for turn in range(arguments.repeats) for side in (sides, sides[::-1])[turn % 2]
    ]
    runs = [
        measure_side(arguments, side, arguments.output / str(number))
        for number, side in enumerate(order)
    ]
    result = {"machine": describe_machine(), "runs": runs}
    (arguments.output / "example_steps.json").write_text(json.dumps(result, indent=2))
    for run in runs:
        print(json.dumps(run))


if __name__ == "__main__":
    main()
