"""Measure models on held-out prompts, compare several on the same prompts, and tell before a run whether it will learn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ycore.api.run_settings import unused_folder
from ycore.api.running import checked_plan
from ycore.api.tables import aligned, figure_rows
from ycore.config.recipe_files import load_benchmark
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, DataError
from ycore.run.files import tracker_group, write_json_atomic

Results = dict[str, Any]
"""Figures by their names, with the output's folder: an evaluation's, a comparison's or a preflight's."""


def evaluation_plan(
    config: RunConfig, *, benchmark: str | None, has_dataset: bool
) -> dict[str, Any]:
    """Plan an evaluation; DataError that says what to fetch where a benchmark's data is out of reach."""
    try:
        return checked_plan(config, trains=False)
    except DataError as problem:
        file = load_benchmark(benchmark).get("file") if benchmark and not has_dataset else None
        if file is None:
            raise
        raise DataError(
            f"{str(problem).rpartition('; ')[0] or problem}; fetch {file}, and add --dataset FILE"
        ) from None


def run_evaluations(configs: Sequence[RunConfig]) -> dict[str, Results]:
    """Run the evaluations one after another; the summary of each by its model. Trackers get several as one group."""
    from ycore.launch.launcher import EVALUATOR, run_worker

    family = Path(configs[0].output).resolve().parent.name
    with tracker_group(family) if len(configs) > 1 else nullcontext():
        return {config.model: run_worker(EVALUATOR, config) for config in configs}


def with_folders(configs: Sequence[RunConfig], root: str) -> list[RunConfig]:
    """Put one evaluation into `root`, or each of several into a folder of its own there; ConfigError for `pairs`."""
    if len(configs) == 1:
        return [configs[0].model_copy(update={"output": root})]
    models = [config.model for config in configs]
    if len(set(models)) < len(models):
        raise ConfigError(
            f"the models to compare must differ; they are {', '.join(models)}; name each once"
        )
    if configs[0].given_pairs:
        raise ConfigError(
            "pairs measure who scores, and several models write; give one --model, and several --reward"
        )
    return [
        config.model_copy(update={"output": f"{root}/model-{number}"})
        for number, config in enumerate(configs, start=1)
    ]


def compare_evaluations(
    configs: Sequence[RunConfig], summaries: Mapping[str, Results]
) -> tuple[Results, list[list[str]]]:
    """Compare each finished evaluation with the first, as JSON values and as a table; both are written down too."""
    from ycore.evaluation import side_by_side

    root = Path(configs[0].output).parent
    answers = {
        config.model: side_by_side.read_evaluation(
            Path(config.output), config.reward_weights, config.first_reward_of
        )
        for config in configs
    }
    first, *compared = answers
    differences = {
        model: side_by_side.difference(answers[first], answers[model]) for model in compared
    }
    result = {"models": summaries, "differences": differences, "output": str(root)}
    comparison = root / side_by_side.COMPARISON
    write_json_atomic(comparison, result)
    table = side_by_side.table_lines(summaries, differences)
    return result, [*table, ["written", str(comparison), *[""] * (len(table[0]) - 2)]]


def preflight_config(config: RunConfig) -> RunConfig:
    """Return the same run in another folder, in one process, with as many prompts as a preflight takes."""
    from ycore.evaluation.preflight import NUM_PROMPTS

    return config.model_copy(
        update={
            "output": unused_folder(f"{config.output}-preflight"),
            "prompts_per_step": NUM_PROMPTS,
            "processes": 1,
            "accelerate": None,
        }
    )


def run_preflight(config: RunConfig) -> Results:
    """Check and measure; the measurements, a few completions and the verdict, as JSON values."""
    from ycore.launch.launcher import PREFLIGHT, run_worker

    checked_plan(config, trains=False)
    return run_worker(PREFLIGHT, config) | {"output": config.output}


def preflight_lines(result: Results) -> Iterator[str]:
    """Yield what was measured, a few completions from the lowest reward to the highest, the verdict."""
    yield from aligned(figure_rows(result["preflight"]))
    yield ""
    for sample in result["samples"]:
        text = " ".join(str(sample["completion"]).split())
        reward = "masked" if sample["reward"] is None else f"{sample['reward']:.2f}"
        yield f"{reward:>7}  {text[:100]}"
    yield ""
    yield result["in_words"]
    for finding in result["findings"][1:]:
        yield f"  also: {finding['what']}; {finding['mend']}"
