"""`ycore preflight`: a minute or two with the run's own engines, prompts and rewards, and a verdict: will it learn?

`ycore eval`: measure a model on held-out prompts, with the engines and rewards that training uses.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import figures, print_json, print_line, print_table, stdout_for_json

from ycore.errors import ConfigError, DataError
from ycore.run.files import write_json_atomic

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig
    from ycore.evaluation.preflight_verdict import Measurements

_SAMPLE_WIDTH = 100


@o.takes({
    "model": o.Model, "dataset": o.Dataset, "reward": o.Reward, "tools": o.Tools, "env": o.Env,
    "env_python": o.EnvPython,
    "agent": o.Agent, "max_turns": o.MaxTurns, "actions": o.Actions, "prompt_column": o.PromptColumn,
    "answer_column": o.AnswerColumn, "system_prompt": o.SystemPrompt, "trust_remote_code": o.TrustRemoteCode,
    "group_size": o.GroupSize, "max_tokens": o.MaxTokens, "lora": o.Lora, "preset": o.Preset, "engine": o.EngineKind,
    "sandbox": o.Sandbox, "seed": o.Seed, "set_": o.Set, "recipe": o.Recipe, "output": o.Output,
    "dry_run": o.DryRun, "json": o.Json,
})  # fmt: skip
def preflight(context: typer.Context, *, dry_run: bool, json: bool, **_: Any) -> None:
    """Will this run learn? Find out before it starts.

    \b
    Takes the options of `ycore grpo`, samples completions of 16 prompts with the run's own engines,
    scores them, and lists what would keep it from learning. Exit status 1 where something would.

    \b
    ycore preflight --recipe quickstart
    ycore preflight --model smollm2-135m --dataset train.jsonl --reward rewards.py:score
    """
    from ycore_cli.checks import checked_plan, plan_rows

    from ycore.config.resolve import require_rollouts

    with stdout_for_json(json):
        config = _in_own_folder(require_rollouts(o.resolve_config(context, algorithm="grpo")))
        result = checked_plan(config, trains=False)
        if not dry_run:
            result = _run_preflight(config)
    if json:
        print_json(result)
    elif dry_run:
        print_table(plan_rows(result))
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        for line in _preflight_lines(result):
            print_line(line)
    if not dry_run and not result["learns"]:
        raise typer.Exit(1)


def fly_first(config: "RunConfig") -> None:
    """Preflight before a training run, with the verdict on standard error; exit with status 1 if it will not learn."""
    from ycore_cli.checks import checked_plan

    with stdout_for_json(True):
        alone = _in_own_folder(config)
        checked_plan(alone, trains=False)
        result = _run_preflight(alone)
    for line in _preflight_lines(result):
        print_line(line, stream=sys.stderr)
    if not result["learns"]:
        raise typer.Exit(1)


@o.takes({
    "model": o.Models, "benchmark": o.Benchmark, "dataset": o.Dataset, "reward": o.Reward,
    "constraint": o.Constraint, "tools": o.Tools,
    "env": o.Env, "env_python": o.EnvPython,
    "agent": o.Agent, "max_turns": o.MaxTurns, "actions": o.Actions, "split": o.Split, "prompt_column": o.PromptColumn,
    "answer_column": o.AnswerColumn, "system_prompt": o.SystemPrompt, "trust_remote_code": o.TrustRemoteCode,
    "num_samples": o.NumSamples, "pairs": o.Pairs, "limit": o.Limit, "max_tokens": o.MaxTokens,
    "engine": o.EngineKind, "seed": o.Seed, "sandbox": o.Sandbox, "set_": o.Set, "recipe": o.Recipe, "output": o.Output,
    "wandb_project": o.WandbProject, "dry_run": o.DryRun, "json": o.Json,
})  # fmt: skip
def evaluate(
    context: typer.Context, *, output: str | None, dry_run: bool, json: bool, **_: Any
) -> None:
    """Measure a model, or several on the same prompts.

    \b
    It tells the mean reward, pass@1 and pass@k, and of several models the differences with their intervals.
    pass@k is the unbiased estimate of arXiv 2107.03374.
    Sampling fields of TRL's GRPOConfig are options too: --temperature 0.7, --top-p 0.95.
    All of them are in docs/options.md.

    \b
    ycore eval --model smollm2-135m --dataset 'task:addition?digits=1' --reward exact_answer
    ycore eval --model runs/first/model --benchmark gsm8k --num-samples 8 --limit 200
    ycore eval --model smollm2-135m --model runs/quickstart/model \\
               --dataset 'task:addition?digits=1' --reward exact_answer
    ycore eval --model smollm2-135m --pairs --dataset pairs.jsonl --reward rm:runs/rm/model
    """
    from ycore_cli.checks import plan_rows

    with stdout_for_json(json):
        configs = _evaluations(context, output)
        own = {
            "benchmark": context.params["benchmark"],
            "has_dataset": context.params["dataset"] is not None,
        }
        result = {config.model: eval_plan(config, **own) for config in configs}
        if not (json and dry_run):
            for plan in result.values():
                print_table(plan_rows(plan))
        if not dry_run:
            result = measured(configs)
    advice = _too_short(configs, result)
    if len(configs) == 1:
        (result,) = result.values()
        lines = figures(result)
    elif not dry_run:
        result, lines = compared(configs, result)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        print_table(lines)
    for line in advice:
        print_line(line, stream=sys.stderr)


def measured(configs: "Sequence[RunConfig]") -> dict[str, Any]:
    """The summary of each evaluation by its model; several are a group in trackers."""
    from ycore.launch.launcher import EVALUATOR, run_worker
    from ycore.run.reports import tracker_group

    several = len(configs) > 1
    with tracker_group(Path(configs[0].output).resolve().parent.name) if several else nullcontext():
        return {config.model: run_worker(EVALUATOR, config) for config in configs}


def _too_short(configs: "Sequence[RunConfig]", summaries: Mapping[str, Any]) -> list[str]:
    """A line for each model of whose completions many are cut off."""
    from ycore.evaluation.preflight_verdict import TRUNCATED_WARNS

    return [
        f"{cut:.0%} of the completions of {config.model} are cut off at {config.max_tokens} tokens; a longer "
        f"--max-tokens would let more of them end, e.g. --max-tokens {4 * config.max_tokens}"
        for config in configs
        if (cut := summaries[config.model].get("cut_off", 0.0)) > TRUNCATED_WARNS
    ]


def _evaluations(context: typer.Context, output: str | None) -> "list[RunConfig]":
    """One config for each model; several have folders of their own in one."""
    from ycore.config.resolve import require_rollouts

    models = context.params["model"] or [None]
    check_models(models)
    configs = []
    for model in models:
        context.params["model"] = model
        configs.append(require_rollouts(o.resolve_config(context, algorithm="eval")))
    return in_folders(configs, output or o.unused_folder(configs[0].output))


def check_models(models: Sequence[str | None]) -> None:
    """ConfigError where one is named twice."""
    if len(set(models)) < len(models):
        raise ConfigError(
            f"the models to compare must differ; they are {', '.join(map(str, models))}; name each once"
        )


def in_folders(configs: "Sequence[RunConfig]", root: str) -> "list[RunConfig]":
    """The evaluation in `root`, or each of several in a folder of its own there; ConfigError for several on pairs."""
    if len(configs) > 1 and configs[0].pairs:
        raise ConfigError(
            "pairs measure who scores, and several models write; give one --model, and several --reward"
        )
    names = (
        [root]
        if len(configs) == 1
        else [f"{root}/model-{count}" for count in range(1, len(configs) + 1)]
    )
    return [
        one.model_copy(update={"output": name}) for one, name in zip(configs, names, strict=True)
    ]


def eval_plan(config: "RunConfig", *, benchmark: str | None, has_dataset: bool) -> dict[str, Any]:
    """What is measured; DataError that says what to fetch where a benchmark's data is out of reach."""
    from ycore_cli.checks import checked_plan

    from ycore.config.recipe_files import load_benchmark

    try:
        plan: dict[str, Any] = checked_plan(config, trains=False)
    except DataError as problem:
        file = None if not benchmark or has_dataset else load_benchmark(benchmark).get("file")
        if file is None:
            raise
        why = str(problem).rpartition("; ")[0] or str(problem)
        raise DataError(f"{why}; fetch {file}, and add --dataset FILE") from None
    return plan


def compared(
    configs: "Sequence[RunConfig]", summaries: Mapping[str, Any]
) -> tuple[dict[str, Any], list[list[str]]]:
    """The finished evaluations compared with the first, as JSON values and as a table; both are written down too."""
    from ycore.evaluation import side_by_side as tool

    root, weights = Path(configs[0].output).parent, [reward.weight for reward in configs[0].rewards]
    answers = {config.model: tool.read_answers(Path(config.output), weights) for config in configs}
    first, *others = answers
    differences = {name: tool.difference(answers[first], answers[name]) for name in others}
    result = {"models": dict(summaries), "differences": differences, "output": str(root)}
    tool.write_differences(answers, root / tool.DIFFERENCES)
    write_json_atomic(root / tool.COMPARISON, result)
    table = tool.table_lines(summaries, differences)
    return result, [*table, ["written", str(root / tool.DIFFERENCES), *[""] * (len(table[0]) - 2)]]


def _in_own_folder(config: "RunConfig") -> "RunConfig":
    """The same run in another folder, in one process, with as many prompts as a preflight takes."""
    from ycore.evaluation.preflight_verdict import NUM_PROMPTS

    folder = o.unused_folder(f"{config.output}-preflight")
    alone = {"output": folder, "prompts_per_step": NUM_PROMPTS, "processes": 1, "accelerate": None}
    return config.model_copy(update=alone)


def _run_preflight(config: "RunConfig") -> dict[str, Any]:
    """The measurements, a few completions and the verdict, as JSON values."""
    from dataclasses import asdict

    from ycore.evaluation.preflight_verdict import from_json, verdict
    from ycore.launch.launcher import PREFLIGHT, run_worker

    summary = run_worker(PREFLIGHT, config)
    return {**summary, "output": config.output, **asdict(verdict(from_json(summary["preflight"])))}


def _preflight_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, the rewards as a histogram, a few completions, the verdict."""
    from ycore.evaluation.preflight_verdict import from_json, histogram

    measured = from_json(result["preflight"])
    for name, value in _measured_rows(measured):
        yield f"{name:<10} {value}"
    yield ""
    bins = [(low, high, count) for low, high, count in histogram(measured.rewards) if count]
    most = max((count for _, _, count in bins), default=1)
    for low, high, count in bins:
        edges = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        yield f"reward {edges:<16} {count:>4} {'#' * max(1, round(30 * count / most))}"
    if result["samples"]:
        yield ""
    for sample in result["samples"]:
        text = " ".join(str(sample["completion"]).split())
        shown = text if len(text) <= _SAMPLE_WIDTH else text[: _SAMPLE_WIDTH - 3] + "..."
        yield f"{'masked' if sample['reward'] is None else format(sample['reward'], '.2f'):>7}  {shown}"
    yield from ["", result["in_words"]]
    yield from (
        f"  also: {finding['what']}; {finding['mend']}" for finding in result["findings"][1:]
    )


def _measured_rows(measured: "Measurements") -> Iterator[tuple[str, str]]:
    size = f"{measured.num_prompts} prompts x {measured.group_size} completions"
    yield "sampled", f"{size}, {measured.mean_tokens:.4g} tokens each on average"
    yield "cut off", f"{measured.truncated:.0%} of the completions, at {measured.max_tokens} tokens"
    yield "all equal", f"{measured.equal:.0%} of the groups, which teach nothing"
    yield (
        "time",
        f"{measured.generate_s:.1f} s to generate, {measured.reward_s:.1f} s more to score",
    )
    if lengths := measured.prompts:
        yield (
            "prompts",
            f"{lengths.rows}, the longest of {lengths.longest} tokens; {lengths.room} fit",
        )
    if judges := measured.judges:
        yield "judges", f"{judges.calls} verdicts, {judges.unreadable} unreadable"
    if measured.logprob_gap is not None:
        yield "logprobs", f"engine and trainer differ by {measured.logprob_gap:.4f} a token"
    if measured.sync_gap is not None and measured.stale_gap is not None:
        synced = f"after changed weights were sent, by {measured.sync_gap:.4f}"
        yield "sync", f"{synced}; from the old ones by {measured.stale_gap:.4f}"
