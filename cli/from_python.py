"""The commands as functions: `from ycore import grpo`. The same settings, checks, processes and folder.

    run = grpo(model="smollm2-135m", dataset="task:addition?digits=1", reward=my_function, steps=40)
    run.metrics[-1]["ycore/reward"], run.model(), run.report()

Keyword arguments are the keys of a run (docs/options.md), and fields of TRL's config by their own names.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ycore.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from ycore.config.schema import AnyConfig

_T = TypeVar("_T")

Reward = str | Callable[..., Sequence[float | None]] | Mapping[str, Any]
"""A name as `--reward` takes it, a function in TRL's shape, or a mapping such as `{"reward": f, "weight": 0.5}`."""

Tool = str | Callable[..., Any]
"""A name as `--tools` takes it, or a function as TRL takes it."""

Env = str | type | Sequence[str | type] | Mapping[str, str | type]
"""A name as `--env` takes it, or a class as TRL's `environment_factory`; several, or several by name."""

Rows = str | Iterable[Mapping[str, Any]]
"""A dataset's name as `--dataset` takes it, or rows: a list of mappings, or a `datasets.Dataset`."""


class Run:
    """A run's folder: its settings, metrics and model. `Run("runs/first")` opens one that is there."""

    def __init__(self, folder: str | Path) -> None:
        """RunFolderError where the folder holds no run."""
        self.folder = Path(folder).expanduser()
        if not (self.folder / "run.json").is_file():
            raise RunFolderError(
                f"{folder} has no run.json, so it is no run's folder; name the run's `output`"
            )

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """A notebook's view: how the run ended, and its last steps, or an evaluation's figures."""
        from ycore_cli.output import figures

        from ycore.view.progress import as_html, steps_as_html

        summary = self.summary
        head = f"{self.folder}: {summary.get('status', 'opened')}"
        if self.config["algorithm"] == "eval" and summary:
            return as_html(head, [["figure", "value"], *figures(summary)])
        return steps_as_html(head, self.metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended, and its figures, as summary.json has them; {} before that."""
        from ycore.run.files import read_json

        file = self.folder / "summary.json"
        return dict(read_json(file)) if file.is_file() else {}

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as run.json has them."""
        from ycore.run.files import read_json
        from ycore.run.paths import RunFolder

        return dict(read_json(RunFolder(self.folder).config)["config"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A mapping for each step, by the names in docs/overview.md."""
        from ycore.run.metrics import read_metrics
        from ycore.run.paths import RunFolder

        return read_metrics(RunFolder(self.folder).metrics)

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Of an evaluation: every completion with its prompt and its rewards."""
        file = self.folder / "completions.jsonl"
        if not file.is_file():
            raise RunFolderError(
                f"{self.folder} has no completions.jsonl, which only an evaluation writes"
            )
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def model(self, *, best: bool = False) -> Any:
        """The trained model as transformers loads it, with peft's adapter around it where there is one.

        Args:
            best: the model that `keep_best` kept.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        from ycore.api.trained import trained_model
        from ycore.config.algorithms import find_algorithm

        scores = find_algorithm(self.config["algorithm"]).trains_reward_model
        loader: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        return loader.from_pretrained(trained_model(str(self.folder), best=best), dtype="auto")

    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        from transformers import AutoTokenizer

        from ycore.api.trained import trained_model

        return AutoTokenizer.from_pretrained(trained_model(str(self.folder)))

    def report(self) -> Path:
        """Write report.html into the folder, and return its path."""
        from ycore.view.page import make_report, write_report
        from ycore.view.record import read_run

        return write_report(make_report([read_run(self.folder)]), self.folder / "report.html")[0]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Evaluations of several models on the same prompts.

    Attributes:
        folder: comparison.json, and differences.jsonl with every prompt, those first on which the models differ most.
        runs: each model's evaluation.
        differences: each model but the first: its figures less the first's, with intervals.
    """

    folder: Path
    runs: Mapping[str, Run]
    differences: Mapping[str, Mapping[str, float]]
    table: Sequence[Sequence[str]] = field(repr=False)

    def _repr_html_(self) -> str:
        from ycore.view.progress import as_html

        return as_html(str(self.folder), self.table)


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
    return _run("grpo", asking(model, dataset, reward, settings), resume=resume)


def rloo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with RLOO; the arguments are those of `grpo`."""
    return _run("rloo", asking(model, dataset, reward, settings), resume=resume)


def ppo(
    *,
    model: str,
    dataset: Rows = "",
    reward: Reward | Sequence[Reward] = (),
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a model on a reward with PPO and a critic; the arguments are those of `grpo`."""
    return _run("ppo", asking(model, dataset, reward, settings), resume=resume)


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
    return _run(
        "distill", asking(model, dataset, reward, {"teacher": teacher, **settings}), resume=resume
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
    return _run("online-dpo", asking(model, dataset, reward, settings), resume=resume)


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
    from ycore_cli.measure import check_models, compared, eval_plan, in_folders, measured

    from ycore.config.resolve import require_rollouts

    models = [model] if isinstance(model, str) else list(model)
    if not isinstance(model, str) and len(models) < 2:
        raise ConfigError(
            f"a comparison takes two models or more; it has {len(models)}; give one by its name alone"
        )
    check_models(models)
    named = {"benchmark": benchmark} if benchmark else {}
    keys = _as_typed("eval", asking(models[0], dataset, reward, named | settings))
    configs = in_folders(
        [require_rollouts(_resolved(keys | {"model": one})) for one in models], keys["output"]
    )
    for config in configs:
        plan = outside_a_loop(
            partial(eval_plan, config, benchmark=benchmark, has_dataset="dataset" in keys)
        )
        tell_warnings(plan, depth=3)
    summaries = measured(configs)
    runs = {config.model: Run(config.output) for config in configs}
    if isinstance(model, str):
        return runs[model]
    result, table = compared(configs, summaries)
    return Comparison(Path(result["output"]), runs, result["differences"], table)


def sft(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Fine-tune a model on given answers; see docs/trainers.md for the columns."""
    return _run("sft", {"model": model, "dataset": dataset, **settings}, resume=resume)


def dpo(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a model on pairs of better and worse answers; see docs/trainers.md for the columns."""
    return _run("dpo", {"model": model, "dataset": dataset, **settings}, resume=resume)


def kto(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a model on answers that are labelled good or bad; see docs/trainers.md for the columns."""
    return _run("kto", {"model": model, "dataset": dataset, **settings}, resume=resume)


def reward_model(*, model: str, dataset: Rows, resume: bool = False, **settings: Any) -> Run:
    """Train a reward model on pairs of better and worse answers; see docs/trainers.md for the columns."""
    return _run("reward", {"model": model, "dataset": dataset, **settings}, resume=resume)


def asking(
    model: str, dataset: Rows, reward: Reward | Sequence[Reward], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a run with rollouts, with what was given of the dataset and the rewards."""
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    rewards = list(cast("Sequence[Reward]", reward)) if several else [reward]
    rows = {} if isinstance(dataset, str) and not dataset else {"dataset": dataset}
    return {"model": model, **rows, **({"rewards": rewards} if rewards else {}), **settings}


def _run(algorithm: str, settings: Mapping[str, Any], *, resume: bool) -> Run:
    from ycore_cli.checks import checked_plan
    from ycore_cli.train import check_checkpoints, run_training

    from ycore.run.claim import Resume

    config = config_of(algorithm, settings, resume=resume)
    how = Resume(step=None, accept_changes=False)
    plan = outside_a_loop(lambda: checked_plan(config, resume=resume, how=how))
    check_checkpoints(config, how, world=plan["ranks"]["world"] if resume else None)
    tell_warnings(plan, depth=4)
    run_training(config, plan, resume=resume, how=how)
    return Run(config.output)


def tell_warnings(plan: Mapping[str, Any], *, depth: int) -> None:
    """Python's own warnings, for the line of the caller that is `depth` calls away."""
    for line in plan["warnings"]:
        warnings.warn(line, stacklevel=depth)


def outside_a_loop(call: Callable[[], _T]) -> _T:
    """What `call` returns. It runs in a thread where this one has an event loop, as a notebook has: only one can be."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def config_of(algorithm: str, settings: Mapping[str, Any], *, resume: bool) -> "AnyConfig":
    """The validated config; rows and functions are written beside the run's folder, and stand in it by their files."""
    return _resolved(_as_typed(algorithm, settings), resume=resume)


def _as_typed(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config, with a folder, and with the files of rows and functions in their places."""
    from ycore_cli.options import unused_folder

    output = Path(settings.get("output") or unused_folder(f"runs/{algorithm}")).expanduser()
    settings = {**settings, "output": str(output)}
    for key in ("dataset", "eval_dataset"):
        if key in settings and not isinstance(settings[key], str | None):
            settings[key] = str(
                _write_rows(settings[key], output.with_name(f"{output.name}.{key}.jsonl"))
            )
    for key, kind in (
        ("rewards", "reward"),
        ("eval_rewards", "reward"),
        ("tools", "tool"),
        ("env", "environment"),
    ):
        if key in settings:
            settings[key] = _names_of(
                settings[key], kind, output.with_name(f"{output.name}.{key}.py").absolute()
            )
    return keys_of(algorithm, settings)


def keys_of(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config; under `trl`, TRL's fields among the settings."""
    from ycore.config.algorithms import find_algorithm
    from ycore.config.trl_fields import fields_of

    row = find_algorithm(algorithm)
    settings = {**settings, "algorithm": algorithm}
    for key, kind in (("engine", "kind"), ("sandbox", "level")):
        if isinstance(settings.get(key), str):
            settings[key] = {kind: settings[key]}
    fields = fields_of(row.trl_config)
    own = {
        key: value
        for key, value in settings.items()
        if key in row.config.model_fields or key not in fields
    }
    trl = {key: value for key, value in settings.items() if key not in own}
    return own | ({"trl": {**own.get("trl", {}), **trl}} if trl else {})


def _resolved(keys: Mapping[str, Any], *, resume: bool = False) -> "AnyConfig":
    """The config of these keys, over those of the run that goes on, or of an evaluation's benchmark."""
    from ycore_cli.options import completed, stored_config

    from ycore.config.recipe_files import load_benchmark
    from ycore.config.resolve import resolve

    base, keys = stored_config(keys["output"]) if resume else {}, dict(keys)
    if keys["algorithm"] == "eval" and "benchmark" in keys:
        base = load_benchmark(keys.pop("benchmark"))["run"]
    config: AnyConfig = completed(resolve(recipe=base, options=keys))
    return config


def _names_of(given: Any, kind: str, file: Path) -> list[Any]:
    """One or several, as the config names them; a mapping's keys are names of environments."""
    from ycore.sandbox.pickled_code import code_references

    if isinstance(given, Mapping):
        named = code_references(list(given.values()), file, kind=kind)
        return [f"{name}={one}" for name, one in zip(given, named, strict=True)]
    several = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
    return code_references(several, file, kind=kind)


def _write_rows(rows: Iterable[Mapping[str, Any]], file: Path) -> Path:
    """The rows as JSONL, in a file that is named by its content too; ConfigError for a row that JSON cannot hold."""
    from ycore.run.files import named_by_content, write_bytes_atomic

    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False))
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"row {number} of the dataset is no mapping of plain values: {problem}"
            ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(line + "\n" for line in lines).encode()
    file = named_by_content(file, data)
    write_bytes_atomic(file, data)
    return file
