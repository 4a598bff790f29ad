"""The visible options, each declared once, and how their values become keys of RunConfig.

Numbers are declared as text, so that a wrong one is refused in ycore's own words.
Not here: TRL's fields, which any command of these takes too (`trl_options`).

Options that the command does not declare: each is a field of TRL's config, by TRL's name with dashes or underscores.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ycore.errors import ConfigError, nearest

Model = Annotated[
    str | None,
    typer.Option(help="Hub id, folder or GGUF file; e.g. Qwen/Qwen2.5-0.5B-Instruct, or smollm2-135m."),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="Hub id, JSONL, CSV or Parquet file, or a generated task; e.g. openai/gsm8k:main, task:addition?digits=2."
    ),
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Built-in name, file.py:function, judge:FILE.yaml or rm:MODEL; may be repeated; e.g. exact_answer.",
    ),
]
PromptColumn = Annotated[str | None, typer.Option(help="Column that holds the prompt; e.g. question.")]
AnswerColumn = Annotated[str | None, typer.Option(help="Column that rewards get as `answer`; e.g. solution.")]
SystemPrompt = Annotated[str | None, typer.Option(help="Said before every prompt; e.g. 'Answer with a number.'")]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option("--trust-remote-code", help="Run Python code that the model brings along."),
]
PromptsPerStep = Annotated[str | None, typer.Option(metavar="N", help="Prompts in one optimizer step; e.g. 8.")]
GroupSize = Annotated[str | None, typer.Option(metavar="N", help="Completions of each prompt; e.g. 8.")]
MaxTokens = Annotated[str | None, typer.Option(metavar="N", help="Longest completion, in tokens; e.g. 256.")]
Steps = Annotated[str | None, typer.Option(metavar="N", help="Optimizer steps; e.g. 100.")]
Lora = Annotated[
    bool | None,
    typer.Option("--lora/--full", help="Train low-rank adapters (the default), or every weight."),
]
EngineKind = Annotated[
    str | None,
    typer.Option("--engine", metavar="KIND", help="What writes the completions: auto, vllm or transformers."),
]
Merge = Annotated[
    bool | None,
    typer.Option("--merge", help="Also save the model with its adapters merged in."),
]
DynamicSampling = Annotated[
    bool | None,
    typer.Option(
        "--dynamic-sampling/--no-dynamic-sampling",
        help="Replace groups whose rewards are all equal (the default), or train on what comes.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A paper's settings, under your own; e.g. dapo; see docs/algorithms.md."),
]
Advantage = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="How rewards become advantages; e.g. rloo; see docs/algorithms.md."),
]
Divergence = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Distance to the reference that --beta weighs: reverse-kl, forward-kl or js."),
]
Restarts = Annotated[
    str | None,
    typer.Option(metavar="N", help="How often a trainer that dies goes on by itself; none unless said; e.g. 3."),
]
Processes = Annotated[
    str | None,
    typer.Option(metavar="N", help="Training processes on this machine, one a GPU or an even share of cores; e.g. 2."),
]
Accelerate = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="How they share the work: ddp, zero1, zero2, zero3, fsdp2 or an accelerate config; see docs/parallel.md.",
    ),
]
WandbProject = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Also tell Weights & Biases, under this project; e.g. sums."),
]
Placement = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="How rollouts and judges share the slots: dynamic, colocated or split:3:1; see docs/placement.md.",
    ),
]
Seed = Annotated[str | None, typer.Option(metavar="N", help="Fixes the data's order and the sampling; e.g. 0.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of a run or recipe; may be repeated; e.g. engine.count=2, rewards.0.weight=0.5.",
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(help="Start from a recipe, by name or YAML file; e.g. quickstart."),
]
Output = Annotated[str | None, typer.Option(help="Folder that the run writes; e.g. runs/first.")]
Preflight = Annotated[
    bool,
    typer.Option("--preflight", help="First ask whether this run will learn (ycore preflight); train only if so."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, start nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --output.")]
ResumeFrom = Annotated[
    str | None,
    typer.Option(metavar="STEP|PATH", help="Go on from this checkpoint; 0 is the beginning; e.g. 40."),
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="Go on although settings, dataset, model or rewards are not what they were."),
]
KeepJournal = Annotated[
    bool | None,
    typer.Option("--keep-journal", help="Keep every round on disk, so that it can be replayed."),
]
Replay = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Train on the rounds of a run with a kept journal, without engines."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on standard output, the rest on standard error."),
]
NumSamples = Annotated[str | None, typer.Option(metavar="N", help="Completions of each prompt; e.g. 4.")]
Limit = Annotated[str | None, typer.Option(metavar="N", help="Rows to take from the dataset; e.g. 200.")]
Split = Annotated[str | None, typer.Option(help="Split of the dataset; e.g. test.")]
Examples = Annotated[
    str | None,
    typer.Option("--dataset", help="Hub id, or JSONL, CSV or Parquet file, with the columns named above."),
]
EvalDataset = Annotated[str | None, typer.Option(help="Held-out rows; a hub id or file like --dataset.")]
EvalSplit = Annotated[str | None, typer.Option(help="Split of the held-out rows; e.g. test.")]
HeldOut = Annotated[
    str | None,
    typer.Option(metavar="N", help="Rows kept apart to measure on; a tenth, 256 at most, unless said; e.g. 200."),
]
BatchSize = Annotated[str | None, typer.Option(metavar="N", help="Rows in one optimizer step; e.g. 16.")]
Epochs = Annotated[str | None, typer.Option(metavar="N", help="Passes over the rows, where --steps is not given.")]

_TEXTS = (
    "model", "dataset", "output", "merge", "system_prompt", "prompt_column", "answer_column", "trust_remote_code",
    "split", "accelerate", "preset", "advantage", "divergence", "placement", "keep_journal", "replay",
    "eval_dataset", "eval_split",
)  # fmt: skip
_NUMBERS = (
    "prompts_per_step", "group_size", "max_tokens", "steps", "seed", "num_samples", "limit", "processes", "restarts",
    "batch_size", "held_out",
)  # fmt: skip


def config_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of RunConfig that the options given say; what was not given is not in it."""
    keys = {name: params[name] for name in _TEXTS if params.get(name) is not None}
    keys |= {name: _whole_number(name, params[name]) for name in _NUMBERS if params.get(name) is not None}
    if params.get("epochs") is not None:
        keys["epochs"] = _number("epochs", params["epochs"])
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


Command = TypeVar("Command", bound=Callable[..., None])


def takes_options_of(other: Callable[..., None], *, without: Sequence[str]) -> Callable[[Command], Command]:
    """Give a command the options of another one: Typer reads them from the signature."""
    signature = inspect.signature(other)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in without]

    def give(command: Command) -> Command:
        command.__dict__["__signature__"] = signature.replace(parameters=kept)
        return command

    return give


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option} takes a whole number; it is {text!r}; e.g. {option} 8") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name} takes a number; it is {text!r}; e.g. --{name} 3") from None


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


def trl_options(arguments: Sequence[str], *, declared: Iterable[str], trl_class: str = "GRPOConfig") -> dict[str, Any]:
    """The values of undeclared options, still as text; a ConfigError names the nearest option to an unknown one."""
    from ycore.config.trl_fields import fields_of

    known = list(declared)
    fields = fields_of(trl_class) if arguments else {}
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        option, equals, text = token.partition("=")
        if not option.startswith("-") or option == "--":
            raise ConfigError(f"{token!r} is not an option; a value follows its option, e.g. --steps 100")
        name = option.lstrip("-").replace("-", "_")
        if not equals and name not in fields and name.startswith("no_") and _is_flag(fields, name[3:]):
            values[name[3:]] = False
        elif name not in fields or not option.startswith("--"):
            raise _unknown(option, [*known, *(field.option for field in fields.values())])
        elif equals:
            values[name] = text
        elif rest and not rest[0].startswith("--"):
            values[name] = rest.pop(0)
        elif _is_flag(fields, name):
            values[name] = True
        else:
            raise ConfigError(f"{option} needs a value; TRL's default is {fields[name].default!r}")
    return values


def _is_flag(fields: Mapping[str, Any], name: str) -> bool:
    return name in fields and bool(fields[name].is_flag)


def _unknown(option: str, known: Iterable[str]) -> ConfigError:
    known = list(known)
    familiar = _FAMILIAR.get(option)
    familiar = familiar if familiar in known else None
    hint = f"; did you mean {familiar!r}?" if familiar else nearest(option, known, limit=1)
    return ConfigError(f"no option {option}{hint}")
