"""The visible options, each declared once, and how their values become keys of RunConfig.

Numbers are declared as text, so that a wrong one is refused in ycore's own words.
Not here: TRL's fields, which any command of these takes too (`trl_options`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ycore.errors import ConfigError

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
        help="Built-in name, file.py:function or package.module:function; may be repeated; e.g. exact_answer.",
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, start nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on standard output, the rest on standard error."),
]
NumSamples = Annotated[str | None, typer.Option(metavar="N", help="Completions of each prompt; e.g. 4.")]
Limit = Annotated[str | None, typer.Option(metavar="N", help="Rows to take from the dataset; e.g. 200.")]
Split = Annotated[str | None, typer.Option(help="Split of the dataset; e.g. test.")]

_TEXTS = (
    "model", "dataset", "output", "merge", "system_prompt", "prompt_column", "answer_column", "trust_remote_code",
    "split", "accelerate", "preset", "advantage",
)  # fmt: skip
_NUMBERS = ("prompts_per_step", "group_size", "max_tokens", "steps", "seed", "num_samples", "limit", "processes")


def config_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of RunConfig that the options given say; what was not given is not in it."""
    keys = {name: params[name] for name in _TEXTS if params.get(name) is not None}
    keys |= {name: _whole_number(name, params[name]) for name in _NUMBERS if params.get(name) is not None}
    if params.get("reward"):
        keys["rewards"] = list(params["reward"])
    if params.get("engine") is not None:
        keys["engine"] = {"kind": params["engine"]}
    if params.get("dynamic_sampling") is not None:
        keys["sampling"] = {"dynamic": params["dynamic_sampling"]}
    if params.get("lora") is not None:
        keys["lora"] = {} if params["lora"] else None
    if "output" in keys:
        keys["output"] = str(Path(keys["output"]).expanduser())
    return keys


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{option} takes a whole number; it is {text!r}; e.g. {option} 8") from None
