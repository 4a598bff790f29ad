"""ycore's commands as functions: `from ycore import grpo`. The same settings, checks, processes and folder.

    run = grpo(model="smollm2-135m", dataset="task:addition?digits=1", reward=my_function, steps=40)
    run.metrics[-1]["ycore/reward"], run.model(), run.report()

Keyword arguments are the keys of a run (docs/options.md), and fields of TRL's config by their own names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ycore.api.evaluations import evaluation_plan, run_evaluations
from ycore.api.run_settings import (
    Rewards,
    Rows,
    outside_event_loop,
    rollout_settings,
    settings_config,
    tell_warnings,
)
from ycore.api.running import checked_plan, run_training, training_plan
from ycore.api.tables import Planned, aligned, plan_rows
from ycore.api.trained import load_language_model, trained_model
from ycore.config.algorithms import find_algorithm
from ycore.config.resolve import require_rollouts
from ycore.errors import RunFolderError
from ycore.run.claim import AS_IT_WAS
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import read_metrics


class Run:
    """A run's folder: its settings, metrics and model. `Run("runs/first")` opens one that exists."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder; RunFolderError where it holds no run."""
        self.folder = Path(folder).expanduser()
        self._files = RunFolder(self.folder)
        read_json(self._files.config)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended, and its figures, as summary.json has them; {} before that."""
        return read_json(self._files.summary) if self._files.summary.is_file() else {}

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as run.json has them."""
        return dict(read_json(self._files.config)["config"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping a step, by the names in docs/metrics.md."""
        return read_metrics(self._files.metrics)

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Every completion of an evaluation with its prompt and its rewards."""
        file = self.folder / "completions.jsonl"
        if not file.is_file():
            raise RunFolderError(
                f"{self.folder} has no completions.jsonl, which only an evaluation writes"
            )
        with file.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def model(self, *, best: bool = False, trust_remote_code: bool = False) -> Any:
        """Load the trained model with transformers, with peft's adapter around it where there is one.

        Args:
            best: the model that `keep_best` kept.
            trust_remote_code: run Python code that the model brings along.
        """
        from transformers import AutoModelForSequenceClassification

        folder = trained_model(str(self.folder), best=best)
        if not find_algorithm(self.config["algorithm"]).trains_reward_model:
            return load_language_model(
                folder, dtype="auto", trust_remote_code=trust_remote_code
            )
        return AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", trust_remote_code=trust_remote_code
        )

    def tokenizer(self, *, trust_remote_code: bool = False) -> Any:
        """Load the model's tokenizer with transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            trained_model(str(self.folder)), trust_remote_code=trust_remote_code
        )

    def report(self) -> Path:
        """Write report.html into the folder, and return its path."""
        from ycore.view.report import read_run, write_report

        return write_report([read_run(self.folder)], self.folder / "report.html")


def grpo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Rewards = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with GRPO; return when it has finished.

    Args:
        model: a hub id, a folder, or `smollm2-135m`.
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


def ppo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Rewards = (),
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
    reward: Rewards = (),
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
    reward: Rewards = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on its own best and worst completions by reward; the arguments are those of `grpo`."""
    return _train(
        "online-dpo", rollout_settings(model, dataset, reward, settings), resume=resume
    )


def evaluate(
    *,
    model: str,
    benchmark: str = "",
    dataset: Rows = "",
    reward: Rewards = (),
    **settings: Any,
) -> Run:
    """Measure a model: the figures are in `.summary`, the completions in `.completions`.

    Args:
        model: as `grpo` takes it, or a run's model.
        benchmark: `gsm8k`, `math500`, ...: it sets the dataset, the reward and the prompt, and you may set them too.
        dataset: as for `grpo`.
        reward: as for `grpo`.
        settings: as for `grpo`; and `num_samples` completions of each prompt.
    """
    if benchmark:
        settings["benchmark"] = benchmark
    settings = rollout_settings(model, dataset, reward, settings)
    config = require_rollouts(settings_config("eval", settings))
    plan = outside_event_loop(
        lambda: evaluation_plan(config, benchmark=benchmark, has_dataset="dataset" in settings)
    )
    tell_warnings(plan, depth=3)
    run_evaluations([config])
    return Run(config.output)


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
    algorithm: str, *, model: str, dataset: Rows = "", reward: Rewards = (), **settings: Any
) -> Planned:
    """Check a run as `--dry-run` does, and start nothing; rows and functions are written into files all the same.

    Args:
        algorithm: the command: `grpo`, `sft`, `online-dpo`, `reward`, `eval`, ...
        model, dataset, reward, settings: those of the command.

    Raises:
        YcoreError: what the command says in one line.
    """
    config = settings_config(algorithm, rollout_settings(model, dataset, reward, settings))
    plan = outside_event_loop(lambda: checked_plan(config, trains=algorithm != "eval"))
    return Planned(plan, list(aligned(plan_rows(plan))))


def _train(algorithm: str, settings: Mapping[str, Any], *, resume: bool) -> Run:
    config = settings_config(algorithm, settings, resume=resume)
    options = AS_IT_WAS if resume else None
    plan = outside_event_loop(lambda: training_plan(config, resume=options))
    tell_warnings(plan, depth=4)
    run_training(config, plan, resume=options)
    return Run(config.output)
