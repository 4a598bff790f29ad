"""`ycore preflight`: a minute or two with the run's own engines, prompts and rewards, and a verdict: will it learn?

`ycore eval`: measure a model on held-out prompts, with the engines and rewards that training uses.

Not here: the measuring (`ycore.trainer.preflight_round`) and the verdict itself (`ycore.plan.preflight_verdict`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig
    from ycore.plan.preflight_verdict import Measurements, Verdict

_BAR = 30
_SHOWN = 100


def preflight(
    context: typer.Context,
    model: o.Model = None,
    dataset: o.Dataset = None,
    reward: o.Reward = None,
    prompt_column: o.PromptColumn = None,
    answer_column: o.AnswerColumn = None,
    system_prompt: o.SystemPrompt = None,
    trust_remote_code: o.TrustRemoteCode = None,
    group_size: o.GroupSize = None,
    max_tokens: o.MaxTokens = None,
    lora: o.Lora = None,
    preset: o.Preset = None,
    engine: o.EngineKind = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    output: o.Output = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Will this run learn? Ask before it starts.

    \b
    Takes the options of `ycore grpo`, asks the run's own engines 16 prompts, scores them,
    and says what would keep it from learning. Exit status 1 where something would.

    \b
    ycore preflight --recipe quickstart
    ycore preflight --model smollm2-135m --dataset train.jsonl --reward rewards.py:score
    """
    from ycore_cli.checks import checked_plan, plan_rows
    from ycore_cli.configuration import resolve_config
    from ycore_cli.output import print_json, print_table, stdout_for_json

    with stdout_for_json(json):
        config = _beside(resolve_config(context, algorithm="grpo"))
        result = checked_plan(config)
        if not dry_run:
            result = fly(config)
    if dry_run:
        if json:
            print_json(result)
        else:
            print_table(plan_rows(result))
            print("Nothing was started; leave out --dry-run to ask.")
        return
    if json:
        print_json(result)
    else:
        for line in lines(result):
            print(line)
    if not result["learns"]:
        raise typer.Exit(1)


def fly(config: "RunConfig") -> dict[str, Any]:
    """Measure and judge a run; the measurements, the verdict, and a few completions, as JSON values."""
    from dataclasses import asdict

    from ycore.launch import preflight as measure
    from ycore.plan.preflight_verdict import from_json, verdict

    summary = measure(config)
    judged = verdict(from_json(summary["preflight"]))
    return {**summary, "output": config.output, **asdict(judged)}


def _beside(config: "RunConfig") -> "RunConfig":
    """The same run in a folder of its own, with as many prompts as a preflight asks."""
    from ycore_cli.configuration import unused_folder

    from ycore.plan.preflight_verdict import NUM_PROMPTS

    folder = unused_folder(f"{config.output}-preflight")
    alone = {"output": folder, "prompts_per_step": NUM_PROMPTS, "processes": 1, "accelerate": None}
    return config.model_copy(update=alone)


def fly_first(config: "RunConfig") -> None:
    """Before a run: tell the verdict on standard error, and end here where it says that the run will not learn."""
    import sys

    from ycore_cli.checks import checked_plan
    from ycore_cli.output import stdout_for_json

    with stdout_for_json(True):
        beside = _beside(config)
        checked_plan(beside)
        result = fly(beside)
    for line in lines(result):
        print(line, file=sys.stderr)
    if not result["learns"]:
        raise typer.Exit(1)


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """What was found, as a person reads it."""
    from ycore.plan.preflight_verdict import from_json, verdict

    measured = from_json(result["preflight"])
    yield from _figures(measured)
    yield ""
    yield from _rewards(measured)
    yield from _samples(result["samples"])
    yield ""
    yield from _verdict(verdict(measured))


def _figures(measured: "Measurements") -> Iterator[str]:
    from ycore_cli.output import number

    lengths = measured.prompts
    size = f"{measured.num_prompts} prompts x {measured.group_size} completions"
    rows = [
        ("asked", f"{size}, {number(measured.mean_tokens)} tokens each on the mean"),
        ("cut off", f"{measured.truncated:.0%} of the completions, at {measured.max_tokens} tokens"),
        ("all equal", f"{measured.equal:.0%} of the groups, which teach nothing"),
        ("time", f"{measured.generate_s:.1f} s to generate, {measured.reward_s:.1f} s more to score"),
    ]
    if lengths is not None:
        rows.append(("prompts", f"{lengths.rows}, the longest of {lengths.longest} tokens; {lengths.room} fit"))
    if measured.judges is not None:
        judges = measured.judges
        rows.append(("judges", f"{judges.calls} verdicts asked for, {judges.unreadable} unreadable"))
    if measured.logprob_gap is not None:
        rows.append(("logprobs", f"engine and trainer differ by {measured.logprob_gap:.4f} a token"))
    if measured.sync_gap is not None and measured.stale_gap is not None:
        rows.append(
            ("sync", f"after changed weights were sent, by {measured.sync_gap:.4f}; from the old ones "
                     f"by {measured.stale_gap:.4f}")
        )  # fmt: skip
    for name, value in rows:
        yield f"{name:<10} {value}"


def _rewards(measured: "Measurements") -> Iterator[str]:
    from ycore.plan.preflight_verdict import histogram

    bins = [bin_ for bin_ in histogram(measured.rewards) if bin_[2]]
    most = max((count for _, _, count in bins), default=1)
    for low, high, count in bins:
        edges = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        yield f"reward {edges:<16} {count:>4} {'#' * max(1, round(_BAR * count / most))}"


def _samples(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if samples:
        yield ""
    for sample in samples:
        text = " ".join(str(sample["completion"]).split())
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
        yield f"{'masked' if sample['reward'] is None else format(sample['reward'], '.2f'):>7}  {shown}"


def _verdict(judged: "Verdict") -> Iterator[str]:
    yield judged.in_words
    for finding in judged.findings[1:]:
        yield f"  also: {finding.what}; {finding.mend}"


def evaluate(
    context: typer.Context,
    model: o.Model = None,
    dataset: o.Dataset = None,
    reward: o.Reward = None,
    split: o.Split = None,
    prompt_column: o.PromptColumn = None,
    answer_column: o.AnswerColumn = None,
    system_prompt: o.SystemPrompt = None,
    trust_remote_code: o.TrustRemoteCode = None,
    num_samples: o.NumSamples = None,
    limit: o.Limit = None,
    max_tokens: o.MaxTokens = None,
    engine: o.EngineKind = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    recipe: o.Recipe = None,
    output: o.Output = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Measure a model: mean reward, pass@1, pass@k.

    \b
    pass@k is the unbiased estimate of arXiv 2107.03374.
    Sampling fields of TRL's GRPOConfig are options too: --temperature 0.7, --top-p 0.95.
    All of them are in docs/options.md.

    \b
    ycore eval --model smollm2-135m --dataset 'task:addition?digits=1' --reward exact_answer
    ycore eval --model runs/first/model --dataset openai/gsm8k:main --split test \\
               --reward math --num-samples 8 --limit 200
    """
    from ycore_cli.checks import checked_plan, plan_rows
    from ycore_cli.configuration import resolve_config, unused_folder
    from ycore_cli.output import print_json, print_table, stdout_for_json

    with stdout_for_json(json):
        config = resolve_config(context, algorithm="eval")
        if output is None:
            config = config.model_copy(update={"output": unused_folder(config.output)})
        result = checked_plan(config)
        if not (json and dry_run):
            print_table(plan_rows(result))
        if not dry_run:
            from ycore.launch import evaluate as measure

            result = measure(config)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        print_table(_rows(result))


def _rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    from ycore_cli.output import number

    return [(key, number(value)) for key, value in result.items() if isinstance(value, int | float | str)]
