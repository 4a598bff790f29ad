r"""Methods side by side: the same task, seeds and seconds of training, and what each then knows of held-out rows.

    python docs/benchmarks/methods.py --output runs/methods --seeds 3 --budget 120
    python docs/benchmarks/methods.py --output runs/methods --task gym --methods grpo,dr-grpo,rloo

Every run is `ycore grpo --recipe quickstart` with the options of its method and `--stop-when seconds:BUDGET`, and is
measured on the task's test rows before its first step and after its last. The seconds are those of steps: start-up and
evaluations do not count. As many runs go on at once as `--lanes` says, each on cores of its own. A run that is finished
is not run again, so the script can be stopped and goes on.

Controls: `default` of `pf-ppo` and `drive`, `ungated` of `g-ra`, `dr-grpo` of `rover`, and `all-groups` of `copo`, `ttrl`,
`grpo-care`, `pacs`, `dph-rl` and `forward-kl`, which all train on groups of equal rewards too.

`trl` is TRL's own `trl grpo`, with the same model, rows, batch and rate. It generates with transformers, stops at the
budget (`trl_budget`), and its model is measured by `ycore eval` on the same rows.
"""

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from bounded import RunFailed, run_bounded
from contestants import Settings, environment, trl_command
from machine import describe_machine
from trl_and_ycore import model_folder

from ycore.api.reproduce import half_width
from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import load_prompts
from ycore.plan.devices import bfloat16_factor, core_flags, format_of
from ycore.run.metrics import read_metrics

YCORE = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
TASKS = {
    "sums": ["--dataset", "task:addition?digits=1", "--eval-dataset", "task:addition?digits=1"],
    "gym": [
        "--dataset",
        "gym:{family}&size=400",
        "--eval-dataset",
        "gym:{family}&size=40",
        "--reward",
        "gym",
    ],
}
_FAMILY = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
REWARDS = {"sums": "exact_answer", "gym": "gym"}
TRL = "trl"
_FILES = Path(__file__).resolve().parents[1] / "methods"
_APART = ["grpo", "--set", "engine.devices=1"]  # the engine has cores of its own
_UNCORRECTED = ["--set", "trl.vllm_importance_sampling_correction=false"]
_ALL_GROUPS = ["grpo", "--no-dynamic-sampling"]
_REFERENCE = ["--set", "trl.beta=1e-6"]
_SECOND = ["--set", "rewards.1.weight=0"]  # measured, for a function to read
_TWO_REWARDS = [
    *("grpo", "--reward", "exact_answer", "--reward", "length"),
    *("--set", "rewards.1.args.target=1", *_SECOND),
]
_LIKELIHOOD = [
    *("--reward", "exact_answer", "--reward", "reference_probability"),
    *("--set", "rewards.1.args.debias=false", *_SECOND),
]
METHODS: dict[str, list[str]] = {
    "default": ["grpo"],
    "grpo": ["grpo", "--preset", "grpo", "--beta", "0"],
    "dr-grpo": ["grpo", "--preset", "dr-grpo"],
    "dapo": ["grpo", "--preset", "dapo"],
    "gspo": ["grpo", "--preset", "gspo"],
    "cispo": ["grpo", "--preset", "cispo"],
    "gmpo": ["grpo", "--preset", "gmpo"],
    "lite-ppo": ["grpo", "--preset", "lite-ppo"],
    "rloo": ["grpo", "--preset", "rloo"],
    "reinforce++": ["grpo", "--advantage", "reinforce++-baseline"],
    "maxrl": ["grpo", "--advantage", "maxrl"],
    "ppo": ["ppo", "--set", "critic.lr_ratio=2", "--set", "critic.warmup_steps=1"],
    "stale-4": ["grpo", "--max-staleness", "4"],
    "reuse": ["grpo", "--set", "sampling.reuse=0.25"],
    "turns": _APART,
    **{f"ahead-{most}": [*_APART, "--max-staleness", most] for most in ("1", "2", "4", "8")},
    "ahead-8-plain": [*_APART, "--max-staleness", "8", *_UNCORRECTED],
    "rounds-8": [*_APART, "--max-staleness", "8", "--deterministic"],
    "rounds-8-plain": [*_APART, "--max-staleness", "8", "--deterministic", *_UNCORRECTED],
    "pf-ppo": ["grpo", "--keep", f"{_FILES}/pf_ppo.py:best_worst"],
    "drive": ["grpo", "--keep", f"{_FILES}/drive.py:hardest"],
    "g-ra": [*_TWO_REWARDS, "--advantage", f"{_FILES}/g_ra.py:gated"],
    "ungated": [*_TWO_REWARDS, "--set", "rewards.1.weight=1"],
    "rover": ["grpo", "--advantage", "dr-grpo", "--loss", f"{_FILES}/rover.py:valued"],
    "all-groups": _ALL_GROUPS,
    "copo": [*_ALL_GROUPS, "--advantage", f"{_FILES}/copo.py:blended"],
    "ttrl": [*_ALL_GROUPS, "--advantage", f"{_FILES}/ttrl.py:majority"],
    "grpo-care": [
        *_ALL_GROUPS,
        *_LIKELIHOOD,
        "--advantage",
        f"{_FILES}/grpo_care.py:consistent",
    ],
    "pacs": [*_ALL_GROUPS, *_REFERENCE, "--loss", f"{_FILES}/pacs.py:supervised"],
    "dph-rl": [*_ALL_GROUPS, *_REFERENCE, "--loss", f"{_FILES}/dph_rl.py:rehearsed"],
    "forward-kl": [*_ALL_GROUPS, "--divergence", "forward-kl", "--set", "trl.beta=0.05"],
    TRL: [],
}
FIGURE = "ycore/eval/pass@1"
_SAMPLES = 8  # of each held-out row
_MICRO_BATCH = 16
_STEPS = 1000  # more than any budget allows
_NEVER = threading.Event()


def command(options: argparse.Namespace, method: str, seed: int, output: Path) -> list[str]:
    """Build the command; the options are the same for every method, but for those that are its own."""
    algorithm, *method_words = METHODS[method]
    task = [word.format(family=options.family) for word in TASKS[options.task]]
    sizes = [
        "--prompts-per-step",
        options.prompts,
        "--group-size",
        options.group,
        "--max-tokens",
        options.tokens,
    ]
    ends = [
        "--steps",
        _STEPS,
        "--eval-every",
        _STEPS,
        "--stop-when",
        f"seconds:{options.budget}",
    ]
    fixed = [
        *ends,
        "--model",
        options.model,
        "--set",
        f"num_samples={_SAMPLES}",
        "--set",
        "trl.beta=0.0",
        "--learning-rate",
        options.learning_rate,
    ]
    words = [
        algorithm,
        "--recipe",
        "quickstart",
        *task,
        *sizes,
        *fixed,
        *method_words,
        "--seed",
        seed,
        "--output",
        output,
    ]
    return [*YCORE, *map(str, words)]


def of_run(rows: Sequence[Mapping[str, Any]], prompts: int) -> dict[str, float]:
    """Return what a run with so many prompts a step knew at its end, and what it had done."""
    steps = [row for row in rows if "ycore/time/step" in row]
    known = [row for row in rows if FIGURE in row]
    if len(known) < 2 or not steps:
        return {}
    return {
        "steps": float(len(steps)),
        "seconds": sum(row["ycore/time/step"] for row in steps),
        "taught": sum(prompts * (1 - row.get("frac_reward_zero_std", 0.0)) for row in steps),
        "before": known[0][FIGURE],
        "pass@1": known[-1][FIGURE],
    }


def run_trl(
    options: argparse.Namespace, seed: int, folder: Path, logs: Path
) -> dict[str, float]:
    """Train with `trl grpo` up to the budget, then measure its model; return the figures that `of_run` returns."""
    task = [word.format(family=options.family) for word in TASKS[options.task]]
    train, held_out = task[1], task[3]
    rows = write_rows(folder / "rows", train, REWARDS[options.task])
    dtype = format_of("auto", has_bfloat16=bfloat16_factor(core_flags()) is not None)
    settings = Settings(
        model_folder(options.model),
        rows,
        options.tokens,
        _STEPS,
        options.prompts,
        options.group,
        options.learning_rate,
        seed,
        dtype,
    )
    words = [
        word if word != "trl_probe.distinct_characters" else "trl_budget.score"
        for word in trl_command(settings, batch_size=_MICRO_BATCH)
    ]
    wishes = {"METHOD_REWARD": REWARDS[options.task], "METHOD_BUDGET_S": str(options.budget)}
    run_bounded(
        [*words, "--beta", "0.0"],
        folder=logs,
        environment=environment() | wishes,
        timeout_s=options.timeout,
        stop=_NEVER,
    )
    sizes = [
        "--split",
        "test",
        "--num-samples",
        _SAMPLES,
        "--max-tokens",
        options.tokens,
        "--reward",
        REWARDS[options.task],
    ]
    known = {}
    for name, model in (("before", options.model), ("pass@1", logs / "run")):
        measured = [
            *YCORE,
            "eval",
            "--model",
            model,
            "--dataset",
            held_out,
            *sizes,
            "--output",
            folder / name,
        ]
        run_bounded(
            [*map(str, measured)],
            folder=logs,
            environment={},
            timeout_s=options.timeout,
            stop=_NEVER,
        )
        known[name] = json.loads((folder / name / "eval.json").read_text())["pass@1"]
    summary = json.loads((logs / "seconds.json").read_text()) | known
    (folder / "summary.json").write_text(json.dumps(summary))
    return summary


def write_rows(folder: Path, dataset: str, reward: str) -> Path:
    """Write the task's training rows to `folder/train.jsonl`, for TRL."""
    config = RunConfig(
        model="none",
        dataset=dataset,
        rewards=[RewardConfig(reward=reward)],
        output="none",
        split="train",
    )
    folder.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(config, as_chat=True).prompts
    lines = (
        json.dumps({"prompt": prompt.content, **prompt.columns}) + "\n" for prompt in prompts
    )
    (folder / "train.jsonl").write_text("".join(lines))
    return folder / "train.jsonl"


def runs_of(options: argparse.Namespace) -> Iterator[tuple[str, int, Path]]:
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for method in options.methods:
            yield method, seed, options.output / f"{options.task}-{method}-{seed}"


def as_markdown(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = [
        "| method | held-out pass@1 before | after the budget | seeds | steps | groups that taught, an hour |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for method, method_runs in sorted(
        runs.items(), key=lambda pair: -fmean(run["pass@1"] for run in pair[1])
    ):
        values = [run["pass@1"] for run in method_runs]
        half = half_width(values)
        interval = f"{fmean(values):.3f}" + ("" if half is None else f" ± {half:.3f}")
        values_by_seed = ", ".join(f"{value:.2f}" for value in values)
        before, steps = (
            fmean(run["before"] for run in method_runs),
            fmean(run["steps"] for run in method_runs),
        )
        hour = fmean(3600 * run["taught"] / max(run["seconds"], 1e-9) for run in method_runs)
        lines.append(
            f"| `{method}` | {before:.3f} | {interval} | {values_by_seed} | {steps:.0f} | {hour:.0f} |"
        )
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="sums")
    add(
        "--family", default=_FAMILY, help="of reasoning-gym, with its arguments, for --task gym"
    )
    add("--methods", default=",".join(METHODS), help="those to run, in this order")
    add(
        "--model",
        default="smollm2-135m",
        help="as `ycore grpo` takes it; it needs a chat template",
    )
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=0)
    add("--budget", type=int, default=120, help="seconds of steps")
    add("--lanes", type=int, default=1, help="runs at once, each on its share of the cores")
    add("--prompts", type=int, default=8, help="of a step")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--tokens", type=int, default=16)
    add("--learning-rate", type=float, default=2e-4)
    add("--timeout", type=float, default=1800.0)
    add("--output", type=Path, default=Path("runs/methods"))
    options = parser.parse_args(arguments)
    options.output, options.methods = options.output.resolve(), options.methods.split(",")
    return options


def run_one(
    options: argparse.Namespace, method: str, seed: int, folder: Path
) -> dict[str, float]:
    """Run a method on a seed; of a run that is finished only read the figures."""
    if not (folder / "summary.json").is_file():
        logs = options.output / f"{folder.name}.log"
        logs.mkdir(exist_ok=True)
        try:
            if method == TRL:
                folder.mkdir(exist_ok=True)
                run_trl(options, seed, folder, logs)
            else:
                words = command(options, method, seed, folder)
                run_bounded(
                    words, folder=logs, environment={}, timeout_s=options.timeout, stop=_NEVER
                )
        except RunFailed as problem:
            print(f"{folder.name}: {problem}", file=sys.stderr)
            return {}
    rows = read_metrics(folder / "metrics.jsonl")
    return (
        of_run(rows, options.prompts)
        if rows
        else json.loads((folder / "summary.json").read_text())
    )


def run_all(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Do each run on a lane: its processes inherit the cores of the thread that starts them."""
    cores, free = sorted(os.sched_getaffinity(0)), queue.SimpleQueue[list[int]]()
    for lane in range(options.lanes):
        free.put(cores[lane :: options.lanes])

    def on_a_lane(method: str, seed: int, folder: Path) -> tuple[str, dict[str, float]]:
        lane_cores = free.get()
        os.sched_setaffinity(0, lane_cores)
        try:
            return method, run_one(options, method, seed, folder)
        finally:
            free.put(lane_cores)

    with ThreadPoolExecutor(options.lanes) as lanes:
        yield from lanes.map(lambda run: on_a_lane(*run), list(runs_of(options)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in ("output", "methods", "timeout")
    }
    results: dict[str, Any] = {"machine": describe_machine(), "settings": settings, "runs": {}}
    for method, figures in run_all(options):
        if figures:
            results["runs"].setdefault(method, []).append(figures)
        (options.output / f"{options.task}.json").write_text(
            json.dumps(results, indent=2) + "\n"
        )
    print(as_markdown(results["runs"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
