"""The options of the commands, each declared once, and the way from what was typed to a run's config.

Numbers are declared as text, so that a wrong one is refused in ycore's own words. Options that a command does not
declare are fields of TRL's config, by TRL's name with dashes or underscores.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

import typer

from ycore.errors import ConfigError, nearest

if TYPE_CHECKING:
    from ycore.config.schema import AnyConfig

Text: TypeAlias = str | None
Texts: TypeAlias = list[str] | None
Flag: TypeAlias = bool | None


def _option(help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help)


def _number(help: str) -> Any:
    return typer.Option(metavar="N", help=help)


Model = Annotated[Text, _option("Hub id, folder or GGUF file; e.g. Qwen/Qwen2.5-0.5B-Instruct, or smollm2-135m.")]
Output = Annotated[Text, _option("Folder that the run writes; e.g. runs/first.")]
Recipe = Annotated[Text, _option("Start from a recipe, by name or YAML file; e.g. quickstart.")]
TrustRemoteCode = Annotated[Flag, _option("Run Python code that the model brings along.", "--trust-remote-code")]
Set = Annotated[
    Texts,
    _option(
        "Any key of a run or recipe; may be repeated; e.g. engine.count=2, rewards.0.weight=0.5.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
Seed = Annotated[Text, _number("Fixes the data's order and the sampling; e.g. 0.")]
DryRun = Annotated[bool, _option("Check everything, show the plan, start nothing.", "--dry-run")]
Json = Annotated[bool, _option("One JSON object on standard output, the rest on standard error.", "--json")]

# Prompts and rewards
Dataset = Annotated[
    Text,
    _option("Hub id, JSONL, CSV or Parquet file, or a generated task; e.g. openai/gsm8k:main, task:addition?digits=2."),
]
Reward = Annotated[
    Texts,
    _option(
        "Built-in name, file.py:function, judge:FILE.yaml or rm:MODEL; may be repeated; e.g. exact_answer.",
        metavar="NAME",
    ),
]
PromptColumn = Annotated[Text, _option("Column that holds the prompt; e.g. question.")]
AnswerColumn = Annotated[Text, _option("Column that rewards get as `answer`; e.g. solution.")]
SystemPrompt = Annotated[Text, _option("System prompt of every chat; e.g. 'Answer with a number.'")]
Limit = Annotated[Text, _number("Rows to take from the dataset; e.g. 200.")]
Split = Annotated[Text, _option("Split of the dataset; e.g. test.")]

# Rollouts
PromptsPerStep = Annotated[Text, _number("Prompts in one optimizer step; e.g. 8.")]
GroupSize = Annotated[Text, _number("Completions of each prompt; e.g. 8.")]
NumSamples = Annotated[Text, _number("Completions of each prompt; e.g. 4.")]
MaxTokens = Annotated[Text, _number("Longest completion, in tokens; e.g. 256.")]
EngineKind = Annotated[
    Text, _option("What generates the completions: auto, vllm or transformers.", "--engine", metavar="KIND")
]
DynamicSampling = Annotated[
    Flag,
    _option(
        "Replace groups whose rewards are all equal (the default), or train on all groups.",
        "--dynamic-sampling/--no-dynamic-sampling",
    ),
]
Placement = Annotated[
    Text,
    _option(
        "How rollouts and judges share the slots: dynamic, colocated or split:3:1; see docs/placement.md.",
        metavar="HOW",
    ),
]
KeepJournal = Annotated[Flag, _option("Keep every round on disk, so that it can be replayed.", "--keep-journal")]
Replay = Annotated[Text, _option("Train on the rounds of a run with a kept journal, without engines.", metavar="RUN")]

# The algorithm
Preset = Annotated[
    Text, _option("A paper's settings, under your own; e.g. dapo; see docs/algorithms.md.", metavar="NAME")
]
Advantage = Annotated[
    Text, _option("How rewards become advantages; e.g. rloo; see docs/algorithms.md.", metavar="NAME")
]
Divergence = Annotated[
    Text, _option("Distance to the reference that --beta weighs: reverse-kl, forward-kl or js.", metavar="NAME")
]
Preflight = Annotated[
    bool, _option("First check whether this run can learn (ycore preflight); train only if so.", "--preflight")
]

# Given examples
Examples = Annotated[Text, _option("Hub id, or JSONL, CSV or Parquet file, with the columns named above.", "--dataset")]
EvalDataset = Annotated[Text, _option("Held-out rows; a hub id or file like --dataset.")]
EvalSplit = Annotated[Text, _option("Split of the held-out rows; e.g. test.")]
HeldOut = Annotated[Text, _number("Rows kept apart to measure on; by default a tenth, 256 at most; e.g. 200.")]
BatchSize = Annotated[Text, _number("Rows in one optimizer step; e.g. 16.")]
Epochs = Annotated[Text, _number("Passes over the rows, where --steps is not given.")]

# Training
Steps = Annotated[Text, _number("Optimizer steps; e.g. 100.")]
Lora = Annotated[Flag, _option("Train low-rank adapters (the default), or every weight.", "--lora/--full")]
Merge = Annotated[Flag, _option("Also save the model with its adapters merged in.", "--merge")]
Processes = Annotated[Text, _number("Training processes on this machine, one a GPU or an even share of cores; e.g. 2.")]
Accelerate = Annotated[
    Text,
    _option(
        "How they share the work: ddp, zero1, zero2, zero3, fsdp2 or an accelerate config; see docs/parallel.md.",
        metavar="NAME|FILE",
    ),
]
WandbProject = Annotated[Text, _option("Also log to Weights & Biases, in this project; e.g. sums.", metavar="NAME")]
Restarts = Annotated[Text, _number("How often a trainer that dies is started again; 0 by default; e.g. 3.")]
Resume = Annotated[bool, _option("Go on from the newest whole checkpoint in --output.", "--resume")]
ResumeFrom = Annotated[Text, _option("Go on from this checkpoint; 0 is the beginning; e.g. 40.", metavar="STEP|PATH")]
AcceptChanges = Annotated[
    bool, _option("Go on even though settings, dataset, model or rewards have changed.", "--accept-changes")
]

_TEXTS = (
    "model", "dataset", "output", "merge", "system_prompt", "prompt_column", "answer_column", "trust_remote_code",
    "split", "accelerate", "preset", "advantage", "divergence", "placement", "keep_journal", "replay",
    "eval_dataset", "eval_split",
)  # fmt: skip
_NUMBERS = (
    "prompts_per_step", "group_size", "max_tokens", "steps", "seed", "num_samples", "limit", "processes", "restarts",
    "batch_size", "held_out", "epochs",
)  # fmt: skip

# What other trainers call things, for those who come from them.
_FAMILIAR: Mapping[str, str] = {
    "--lr": "--learning-rate",
    "--batch-size": "--prompts-per-step",
    "--epochs": "--steps",
    "--kl-coef": "--beta",
    "--max-new-tokens": "--max-tokens",
    "--max-length": "--max-tokens",
    "--model-name-or-path": "--model",
    "--dataset-name": "--dataset",
    "--dataset-train-split": "--set",
    "--reward-funcs": "--reward",
    "--config": "--recipe",
}


def takes(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the options of a command to Typer, by the names under which the command gets them."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for name, option in options.items():
        default = False if get_args(option)[0] is bool else None
        parameters.append(inspect.Parameter(name, kind, annotation=option, default=default))

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        return command

    return declare


def resolve_config(context: typer.Context, *, algorithm: str, resume: bool = False) -> "AnyConfig":
    """The validated config of a command, from its recipe and its options.

    Args:
        algorithm: a row of `ALGORITHMS`, or `eval`.
        resume: start from the settings of the run in `--output`.
    """
    from ycore.config.recipe_files import load_recipe, recipe_name
    from ycore.config.resolve import resolve

    options = typed_keys(context, algorithm=algorithm) | {"algorithm": algorithm}
    recipe, sets = context.params.get("recipe"), context.params.get("set_") or ()
    base = load_recipe(recipe, command=algorithm) if recipe else _stored(options, resume=resume)
    if algorithm == "eval":
        base.pop("output", None)  # a recipe's own folder is its training run's
    run_name = recipe_name(recipe) if recipe else None
    return with_judges(resolve(recipe=base, sets=sets, options=options, run_name=run_name))


def with_judges(config: "AnyConfig") -> "AnyConfig":
    """The config with the files of its judges read into it."""
    from ycore.config.schema import RunConfig
    from ycore.judge.sources import with_declarations

    return with_declarations(config) if isinstance(config, RunConfig) else config


def typed_keys(context: typer.Context, *, algorithm: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The keys of a config that were typed: the declared options, and under `trl` those of TRL's fields.

    Args:
        arguments: the words that the command does not declare; `context.args` if None.
    """
    from ycore.config.algorithms import find_algorithm

    keys = config_keys(context.params)
    declared = [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]
    words = context.args if arguments is None else arguments
    trl = _trl_options(words, declared=declared, trl_class=find_algorithm(algorithm).trl_config)
    return keys | ({"trl": {**keys.get("trl", {}), **trl}} if trl else {})


def config_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that the declared options set; options that were not given set none."""
    keys = {name: params[name] for name in _TEXTS if params.get(name) is not None}
    keys |= {name: _parse_number(name, params[name]) for name in _NUMBERS if params.get(name) is not None}
    if params.get("reward"):
        keys["rewards"] = list(params["reward"])
    if params.get("wandb_project") is not None:
        keys["trl"] = {"report_to": "wandb", "project": params["wandb_project"]}
    if params.get("engine") is not None:
        keys["engine"] = {"kind": params["engine"]}
    if params.get("dynamic_sampling") is not None:
        keys["sampling"] = {"dynamic": params["dynamic_sampling"]}
    if params.get("lora") is not None:
        keys["lora"] = {} if params["lora"] else None
    if "output" in keys:
        keys["output"] = str(Path(keys["output"]).expanduser())
    return keys


def _trl_options(arguments: Sequence[str], *, declared: Iterable[str], trl_class: str) -> dict[str, Any]:
    """The values of undeclared options, still as text; a ConfigError names the nearest option to an unknown one."""
    from ycore.config.trl_fields import fields_of

    fields = fields_of(trl_class) if arguments else {}
    flags = {name for name, field in fields.items() if field.is_flag}
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        option, equals, text = token.partition("=")
        if not option.startswith("-") or option == "--":
            raise ConfigError(f"{token!r} is not an option; a value follows its option, e.g. --steps 100")
        name = option.lstrip("-").replace("-", "_")
        if not equals and name not in fields and name.startswith("no_") and name[3:] in flags:
            values[name[3:]] = False
        elif name not in fields or not option.startswith("--"):
            known = [*declared, *(field.option for field in fields.values())]
            familiar = _FAMILIAR.get(option)
            near = f"; did you mean {familiar!r}?" if familiar in known else nearest(option, known, limit=1)
            raise ConfigError(f"no option {option}{near}")
        elif equals:
            values[name] = text
        elif rest and not rest[0].startswith("--"):
            values[name] = rest.pop(0)
        elif name in flags:
            values[name] = True
        else:
            raise ConfigError(f"{option} needs a value; TRL's default is {fields[name].default!r}")
    return values


def stored_config(run: str) -> dict[str, Any]:
    """The settings of a run's folder; {} where it holds none. Its secrets are `***`, and must be given again."""
    from ycore.run.claim import held_config
    from ycore.run.paths import RunFolder
    from ycore.run.secrets import without_hub_token

    folder = RunFolder(Path(run).expanduser())
    return without_hub_token(held_config(folder)) if folder.config.is_file() else {}


def unused_folder(output: str) -> str:
    """`output`, or the first unused of `output-2`, `-3`, ..., so that a command can be repeated."""
    names = itertools.chain([output], (f"{output}-{count}" for count in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def _stored(options: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
    """The settings of the run that is resumed or replayed, so that its folder is enough."""
    if resume and options.get("output"):
        return stored_config(options["output"])
    if options.get("replay"):
        run = options["replay"].rstrip("/")
        return stored_config(run) | {"output": f"{run}-replay", "keep_journal": False}
    return {}


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text) if name == "epochs" else int(text)
    except ValueError:
        option, kind = "--" + name.replace("_", "-"), "a number" if name == "epochs" else "a whole number"
        raise ConfigError(f"{option} takes {kind}; it is {text!r}; e.g. {option} 8") from None
