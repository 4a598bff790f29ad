"""ycore's commands as functions: `from ycore import grpo`. The same settings, checks, processes and folder.

    run = grpo(model="smollm2-135m", dataset="task:addition?digits=1", reward=my_function, steps=40)
    run.metrics[-1]["ycore/reward"], run.model(), run.report()

Keyword arguments are the keys of a run (docs/options.md), and fields of TRL's config by their own names.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from ycore.api.evaluations import (
    check_models_differ,
    compare_evaluations,
    evaluation_plan,
    run_evaluations,
    with_folders,
)
from ycore.api.run_settings import (
    Reward,
    Rows,
    config_of,
    outside_event_loop,
    resolve_keys,
    rollout_settings,
    tell_warnings,
    with_files,
)
from ycore.api.running import checked_plan, run_training, training_plan
from ycore.api.runs import Comparison, Planned, Run
from ycore.api.tables import aligned, plan_rows
from ycore.config.resolve import require_rollouts
from ycore.errors import ConfigError
from ycore.run.claim import AS_IT_WAS


def grpo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with GRPO; return when it has finished.

    Args:
        model: a hub id, a folder, a GGUF file, or `smollm2-135m`.
        dataset: a name, or rows with a prompt column; may be left out where `env` asks.
        reward: one or several; may be left out where `env` pays. A function is called in a worker process: its source
            must be in a file or a notebook's cell, and what it uses or holds from around it must be imported, a
            function, or plain data.
        resume: go on with the run in `output`.
        settings: `env=Class` or `env={"name": Class}`, `tools=[function]`, sent like a reward; `steps=100`,
            `engine="transformers"`, `learning_rate=1e-5`, ...

    Raises:
        YcoreError: what the command says in one line.
    """
    return _train("grpo", rollout_settings(model, dataset, reward, settings), resume=resume)


def rloo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with RLOO, a preset of `grpo`; the arguments are those of `grpo`."""
    settings["preset"] = "rloo"
    return _train("grpo", rollout_settings(model, dataset, reward, settings), resume=resume)


def ppo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with PPO and a critic; the arguments are those of `grpo`."""
    return _train("ppo", rollout_settings(model, dataset, reward, settings), resume=resume)


def distill(
    *,
    model: str,
    teacher: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model towards the probabilities that `teacher`, a model or a run's folder, gives to what it writes.

    The other arguments are those of `grpo`; `reward` may be left out.
    """
    return _train(
        "distill",
        rollout_settings(model, dataset, reward, {"teacher": teacher, **settings}),
        resume=resume,
    )


def online_dpo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on its own best and worst completions by reward; the arguments are those of `grpo`."""
    return _train(
        "online-dpo", rollout_settings(model, dataset, reward, settings), resume=resume
    )


@overload
def evaluate(
    *,
    model: str,
    benchmark: str = "",
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    **settings: Any,
) -> Run: ...


@overload
def evaluate(
    *,
    model: list[str] | tuple[str, ...],
    benchmark: str = "",
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    **settings: Any,
) -> Comparison: ...


def evaluate(
    *,
    model: str | Sequence[str],
    benchmark: str = "",
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    **settings: Any,
) -> Run | Comparison:
    """Measure a model: the figures are in `.summary`, the completions in `.completions`. Or compare several.

    Args:
        model: one as `grpo` takes it, or a run's model; or a list, which are asked the same prompts.
        benchmark: `gsm8k`, `math500`, ...: it sets the dataset, the reward and the prompt, and you may set them too.
        dataset: as for `grpo`.
        reward: as for `grpo`.
        settings: as for `grpo`; and `num_samples` completions of each prompt.
    """
    models = [model] if isinstance(model, str) else list(model)
    if not isinstance(model, str) and len(models) < 2:
        raise ConfigError(
            f"a comparison takes two models or more; it has {len(models)}; give one by its name alone"
        )
    check_models_differ(models)
    if benchmark:
        settings["benchmark"] = benchmark
    keys = with_files("eval", rollout_settings(models[0], dataset, reward, settings))
    configs = with_folders(
        [require_rollouts(resolve_keys(keys | {"model": name})) for name in models],
        keys["output"],
    )
    for config in configs:
        plan = outside_event_loop(
            partial(evaluation_plan, config, benchmark=benchmark, has_dataset="dataset" in keys)
        )
        tell_warnings(plan, depth=3)
    summaries = run_evaluations(configs)
    runs = {config.model: Run(config.output) for config in configs}
    if isinstance(model, str):
        return runs[model]
    result, table = compare_evaluations(configs, summaries)
    return Comparison(Path(result["output"]), runs, result["differences"], table)


def sft(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Fine-tune a model on given answers; see docs/trainers.md for the columns."""
    return _train("sft", {"model": model, "dataset": dataset, **settings}, resume=resume)


def dpo(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a model on pairs of better and worse answers; see docs/trainers.md for the columns."""
    return _train("dpo", {"model": model, "dataset": dataset, **settings}, resume=resume)


def kto(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a model on answers that are labelled good or bad; see docs/trainers.md for the columns."""
    return _train("kto", {"model": model, "dataset": dataset, **settings}, resume=resume)


def reward_model(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a reward model on pairs of better and worse answers; see docs/trainers.md for the columns."""
    return _train("reward", {"model": model, "dataset": dataset, **settings}, resume=resume)


def dry_run(
    algorithm: str,
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    **settings: Any,
) -> Planned:
    """Check a run as `--dry-run` does, and start nothing; rows and functions are written into files all the same.

    Args:
        algorithm: the command: `grpo`, `sft`, `online-dpo`, `reward`, `eval`, ...
        model, dataset, reward, settings: those of the command.

    Raises:
        YcoreError: what the command says in one line.
    """
    config = config_of(
        algorithm, rollout_settings(model, dataset, reward, settings), resume=False
    )
    plan = outside_event_loop(lambda: checked_plan(config, trains=algorithm != "eval"))
    return Planned(plan, list(aligned(plan_rows(plan))))


def _train(algorithm: str, settings: Mapping[str, Any], *, resume: bool) -> Run:
    config = config_of(algorithm, settings, resume=resume)
    plan = outside_event_loop(lambda: training_plan(config, resume=resume, how=AS_IT_WAS))
    tell_warnings(plan, depth=4)
    run_training(config, plan, resume=resume, how=AS_IT_WAS)
    return Run(config.output)
