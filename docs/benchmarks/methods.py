r"""Methods side by side: the same task, seeds and seconds of training, and what each then knows of held-out rows.

    python docs/benchmarks/methods.py --output runs/methods --seeds 3 --budget 90
    python docs/benchmarks/methods.py --output runs/methods --task gym --methods grpo,dr-grpo,rloo

Every run is `ycore grpo --recipe quickstart` with the options of its method, and is measured on the task's test rows
every few steps. A method's figure is that of its budget, on the line between the evaluations before and after it; the
seconds of evaluations do not count. Runs alternate over the methods. A run that is finished is not run again, so the
script can be stopped and goes on.

`trl` is TRL's own `trl grpo`, with the same model, rows, batch and rate. It generates with transformers, stops at the
budget (`trl_budget`), and its model is measured by `ycore eval` on the same rows.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from bounded import RunFailed, run_bounded
from contestants import Settings, environment, trl_command
from machine import busy_share, describe_machine
from trl_and_ycore import model_folder

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import load_prompts
from ycore.run.metrics import read_metrics
from ycore.view.record import half_width

YCORE = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
TASKS = {
    "sums": ["--dataset", "task:addition?digits=1", "--eval-dataset", "task:addition?digits=1"],
    "gym": ["--dataset", "gym:{family}&size=400", "--eval-dataset", "gym:{family}&size=40", "--reward", "gym"],
}
_FAMILY = "chain_sum?min_terms=3&max_terms=3&min_digits=1&max_digits=1"
REWARDS = {"sums": "exact_answer", "gym": "gym"}
TRL = "trl"
METHODS: dict[str, list[str]] = {
    "grpo": ["grpo", "--preset", "grpo", "--beta", "0"],
    "dr-grpo": ["grpo", "--preset", "dr-grpo"],
    "dapo": ["grpo", "--preset", "dapo"],
    "gspo": ["grpo", "--preset", "gspo"],
    "cispo": ["grpo", "--preset", "cispo"],
    "gmpo": ["grpo", "--preset", "gmpo"],
    "lite-ppo": ["grpo", "--preset", "lite-ppo"],
    "rloo": ["rloo"],
    "reinforce++": ["grpo", "--advantage", "reinforce++-baseline"],
    "maxrl": ["grpo", "--advantage", "maxrl"],
    "ppo": ["ppo", "--set", "critic.lr_ratio=5"],
    TRL: [],
}
FIGURE = "ycore/eval/pass@1"
_PROMPTS = 8  # of a step of the quickstart
_SAMPLES = 8  # of each held-out row
_MICRO_BATCH = 16
_NEVER = threading.Event()


def command(told: argparse.Namespace, method: str, seed: int, output: Path) -> list[str]:
    """The same options for every method, but for those that are its own."""
    algorithm, *own = METHODS[method]
    task = [word.format(family=told.family) for word in TASKS[told.task]]
    sizes = ["--steps", told.steps, "--eval-every", told.eval_every, "--max-tokens", told.tokens]
    fixed = [
        "--model",
        told.model,
        "--set",
        f"num_samples={_SAMPLES}",
        "--set",
        "trl.beta=0.0",
        "--learning-rate",
        told.learning_rate,
    ]
    words = [algorithm, "--recipe", "quickstart", *task, *own, *sizes, *fixed, "--seed", seed, "--output", output]
    return [*YCORE, *map(str, words)]


def at_budget(rows: Sequence[Mapping[str, Any]], budget: float) -> dict[str, float]:
    """What was known at the budget, on the line between the evaluations around it, and what was done until then."""
    seconds, found = 0.0, {"steps": 0.0, "seconds": 0.0, "taught": 0.0}
    known: list[tuple[float, float]] = []  # seconds, pass@1
    for row in rows:
        if "ycore/time/step" in row:
            seconds += row["ycore/time/step"]
            if seconds <= budget:
                taught = found["taught"] + _PROMPTS * (1 - row.get("frac_reward_zero_std", 0.0))
                found = {"steps": float(row["step"]), "seconds": seconds, "taught": taught}
        if FIGURE in row:
            known.append((seconds, row[FIGURE]))
    return found | {"pass@1": float(np.interp(budget, *zip(*known, strict=True)))} if known else {}


def run_trl(told: argparse.Namespace, seed: int, folder: Path, logs: Path) -> dict[str, float]:
    """Train with `trl grpo` up to the budget, then measure its model; what `at_budget` tells of ycore's runs."""
    task = [word.format(family=told.family) for word in TASKS[told.task]]
    train, held_out = task[1], task[3]
    rows = write_rows(folder / "rows", train, REWARDS[told.task])
    steps = max(told.steps, int(told.budget))  # the budget ends it
    settings = Settings(
        model_folder(told.model), rows, told.tokens, steps, _PROMPTS, 8, told.learning_rate, seed, "bfloat16"
    )
    words = [
        word if word != "trl_probe.distinct_characters" else "trl_budget.score"
        for word in trl_command(settings, batch_size=_MICRO_BATCH)
    ]
    wishes = {"METHOD_REWARD": REWARDS[told.task], "METHOD_BUDGET_S": str(told.budget)}
    run_bounded(
        [*words, "--beta", "0.0"], folder=logs, environment=environment() | wishes, timeout_s=told.timeout, stop=_NEVER
    )
    sizes = ["--split", "test", "--num-samples", _SAMPLES, "--max-tokens", told.tokens, "--reward", REWARDS[told.task]]
    measured = [*YCORE, "eval", "--model", logs / "run", "--dataset", held_out, *sizes, "--output", folder / "eval"]
    (folder / "measured").mkdir(exist_ok=True)
    run_bounded([*map(str, measured)], folder=folder / "measured", environment={}, timeout_s=told.timeout, stop=_NEVER)
    figures = json.loads((folder / "eval" / "eval.json").read_text())
    found = json.loads((logs / "seconds.json").read_text()) | {"pass@1": figures["pass@1"]}
    (folder / "summary.json").write_text(json.dumps(found))
    return found


def write_rows(folder: Path, dataset: str, reward: str) -> Path:
    """The task's training rows as `folder/train.jsonl`, for TRL."""
    config = RunConfig(
        model="none", dataset=dataset, rewards=[RewardConfig(reward=reward)], output="none", split="train"
    )
    folder.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(config, as_chat=True).prompts
    lines = (json.dumps({"prompt": one.content, **one.columns}) + "\n" for one in prompts)
    (folder / "train.jsonl").write_text("".join(lines))
    return folder / "train.jsonl"


def runs_of(told: argparse.Namespace) -> Iterator[tuple[str, int, Path]]:
    for seed in range(told.seeds):
        for method in told.methods:
            yield method, seed, told.output / f"{told.task}-{method}-{seed}"


def as_markdown(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = ["| method | held-out pass@1 at the budget | seeds | steps | groups that taught, an hour |"]
    lines.append("|---|---|---|---|---|")
    for method, found in sorted(runs.items(), key=lambda pair: -fmean(run["pass@1"] for run in pair[1])):
        values = [run["pass@1"] for run in found]
        half = half_width(values)
        interval = f"{fmean(values):.3f}" + ("" if half is None else f" ± {half:.3f}")
        each = ", ".join(f"{value:.2f}" for value in values)
        steps = fmean(run["steps"] for run in found)
        hour = fmean(3600 * run["taught"] / max(run["seconds"], 1e-9) for run in found)
        lines.append(f"| {method} | {interval} | {each} | {steps:.0f} | {hour:.0f} |")
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="sums")
    add("--family", default=_FAMILY, help="of reasoning-gym, with its arguments, for --task gym")
    add("--methods", default=",".join(METHODS), help="those to run, in this order")
    add("--model", default="smollm2-135m", help="as `ycore grpo` takes it; it needs a chat template")
    add("--seeds", type=int, default=3)
    add("--budget", type=float, default=90.0, help="seconds of training, without evaluations")
    add("--steps", type=int, default=24, help="of each run: enough to use the budget up")
    add("--eval-every", type=int, default=4)
    add("--tokens", type=int, default=16)
    add("--learning-rate", type=float, default=2e-4)
    add("--timeout", type=float, default=1800.0)
    add("--output", type=Path, default=Path("runs/methods"))
    told = parser.parse_args(arguments)
    told.output, told.methods = told.output.resolve(), told.methods.split(",")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    told = parsed(arguments)
    told.output.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(told).items() if name not in ("output", "methods", "timeout")}
    results: dict[str, Any] = {"machine": describe_machine(), "settings": settings, "busy": {}, "runs": {}}
    for method, seed, folder in runs_of(told):
        if not (folder / "summary.json").is_file():
            results["busy"][folder.name] = busy_share()
            logs = told.output / f"{folder.name}.log"
            logs.mkdir(exist_ok=True)
            try:
                if method == TRL:
                    folder.mkdir(exist_ok=True)
                    run_trl(told, seed, folder, logs)
                else:
                    words = command(told, method, seed, folder)
                    run_bounded(words, folder=logs, environment={}, timeout_s=told.timeout, stop=_NEVER)
            except RunFailed as problem:
                print(f"{folder.name}: {problem}", file=sys.stderr)
                continue
        rows = read_metrics(folder / "metrics.jsonl")
        found = at_budget(rows, told.budget) if rows else json.loads((folder / "summary.json").read_text())
        if found:
            results["runs"].setdefault(method, []).append(found)
        (told.output / f"{told.task}.json").write_text(json.dumps(results, indent=2) + "\n")
    print(as_markdown(results["runs"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
