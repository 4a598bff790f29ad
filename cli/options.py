"""Declare the options of the commands, once each, and make a run's config of those that were typed.

Options that a command does not declare are fields of TRL's config, by TRL's name with dashes or underscores.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ycore.config.algorithms import Algorithm, AlgorithmEntry, find_entry
from ycore.errors import ConfigError, nearest
from ycore.types import JsonObject, Record

if TYPE_CHECKING:
    from ycore.config.schema import BaseConfig


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """Annotate a parameter of a command as an option; without a default it is None where it was not given."""
    return Annotated[kind | None, typer.Option(*names, help=help, **settings)]


def argument(kind: Any, help: str, metavar: str) -> Any:
    """Annotate a parameter of a command as a word without a name."""
    return Annotated[kind | None, typer.Argument(metavar=metavar, help=help)]


text = partial(option, str)
texts = partial(option, list[str])
file = partial(option, Path)
flag = partial(option, bool)
whole_number = partial(option, int, metavar="N")
fraction = partial(option, float, metavar="X")

OPTIONS = {
    "model": text("Hub id or folder; e.g. smollm2-135m."),
    "output": text("Folder that the run writes; e.g. runs/first [TRL: output_dir]."),
    "recipe": text("Start from a recipe, by name or YAML file; e.g. quickstart."),
    "trust_remote_code": flag(
        "Run Python code that the model brings along [TRL: trust_remote_code].",
        "--trust-remote-code",
    ),
    "set_": texts(
        "Any key, e.g. engine.count=2, rewards.0.weight=0.5.", "--set", metavar="KEY=VALUE"
    ),
    "seed": whole_number("Fixes the data's order and the sampling [0; TRL: seed]."),
    "dry_run": flag("Check everything, show the plan, start nothing.", "--dry-run"),
    "show_rows": whole_number(
        "Rows of the dataset that the plan shows as the model sees them [1].", min=1
    ),
    "json": flag("One JSON object on standard output.", "--json"),
    # Prompts and rewards
    "dataset": text(
        "Hub id, JSONL, CSV or Parquet file, or a task; e.g. task:addition?digits=2."
    ),
    "reward": texts(
        "exact_answer or another built-in, file.py:function, judge:FILE.yaml or rm:MODEL.",
        metavar="NAME",
    ),
    "constraint": texts(
        "A reward that is to be kept instead of raised, and the share of completions that may break it; may be repeated; "
        "e.g. format:0.05.",
        metavar="NAME[:LIMIT]",
    ),
    "teacher": text(
        "Whose probabilities the policy learns: hub id, folder or run; e.g. runs/quickstart.",
        metavar="MODEL",
    ),
    "tools": texts(
        "What the policy may call: file.py:function, python or mcp:COMMAND.", metavar="NAME"
    ),
    "env": texts(
        "What it acts in: file.py:Class, textarena:ID or gym:NAME; see docs/agents.md.",
        metavar="[NAME=]ENV",
    ),
    "env_python": text(
        "Another Python for tools and environment, with packages of its own.", metavar="PATH"
    ),
    "agent": text(
        "A command that talks to the policy as an OpenAI client; see docs/agents.md.",
        metavar="COMMAND",
    ),
    "max_turns": whole_number(
        "Turns of the policy in a completion with tools, an environment or an agent [8]."
    ),
    "actions": text(
        "How it calls tools: template (of its chat template) or calls (in its text).",
        metavar="HOW",
    ),
    "prompt_column": text("Column that holds the question; e.g. question."),
    "answer_column": text("Column with the answer; e.g. solution."),
    "system_prompt": text("System prompt of every chat; e.g. 'Answer with a number.'"),
    "benchmark": text(
        "Dataset, prompt and reward by name: gsm8k, math500, humaneval, ifeval, harmless-base or gym:NAME.",
        metavar="NAME",
    ),
    "limit": whole_number("Rows to take from the dataset; e.g. 200."),
    "split": text("Split of the dataset; e.g. test."),
    # Evaluation during a run
    "eval_every": whole_number("Steps between evaluations [a fifth of the run]."),
    "eval_reward": texts(
        "What scores them, if not the run's rewards; may be repeated; e.g. exact_answer.",
        metavar="NAME",
    ),
    "keep_best": text(
        "Keep the model that was best by this; e.g. pass@1, or loss.", metavar="FIGURE"
    ),
    "stop_when": texts(
        "End early: no-gain:N evaluations, seconds:N, nothing-to-learn:N steps with rollouts; may be repeated; e.g. "
        "no-gain:5.",
        metavar="RULE:N",
    ),
    # Rollouts
    "prompts_per_step": whole_number("Prompts in one optimizer step [8]."),
    "group_size": whole_number("Completions of each prompt [8; TRL: num_generations]."),
    "num_samples": whole_number("Completions of each prompt [4]."),
    "pairs": flag(
        "Score each row's chosen and rejected answer: how often a reward, judge or reward model agrees.",
        "--pairs",
    ),
    "max_tokens": whole_number(
        "Longest completion, in tokens [256; TRL: max_completion_length]."
    ),
    "engine": text("auto, vllm or transformers [auto].", metavar="KIND"),
    "sandbox": text(
        "What confines your reward functions: auto, namespaces, landlock or none [auto]; see docs/sandbox.md.",
        metavar="LEVEL",
    ),
    "dynamic_sampling": flag(
        "Replace groups whose rewards are all equal (the default), or train on all groups.",
        "--dynamic-sampling/--no-dynamic-sampling",
    ),
    "curriculum": text(
        "Draw prompts that teach more often: off, on, or the column with each row's share of right completions.",
        metavar="HOW",
    ),
    "placement": text(
        "How rollouts and judges share the slots: dynamic, colocated or split:3:1 [dynamic]; see docs/placement.md.",
        metavar="HOW",
    ),
    "keep_journal": flag(
        "Keep every round on disk, so that it can be replayed.", "--keep-journal"
    ),
    "replay": text(
        "Train on the rounds of a run with a kept journal, without engines.", metavar="RUN"
    ),
    # The algorithm
    "preset": text("A paper's settings, under your own; e.g. dapo.", metavar="NAME"),
    "advantage": text(
        "How rewards become advantages: rloo, file.py:function, ... [group]; see docs/algorithms.md.",
        metavar="NAME",
    ),
    "keep": text(
        "What is trained on, with what weight, by a function of your own; see docs/own-functions.md.",
        metavar="FILE.py:FUNCTION",
    ),
    "loss": text(
        "A loss of your own in place of TRL's; see docs/own-functions.md.",
        metavar="FILE.py:FUNCTION",
    ),
    "divergence": text(
        "Distance to the reference that --beta weighs: reverse-kl, forward-kl or js [reverse-kl].",
        metavar="NAME",
    ),
    "trust_region": text(
        "What bounds a step: clip, dppo-tv or dppo-kl [clip]; see docs/algorithms.md.",
        metavar="NAME",
    ),
    # Given examples
    "eval_dataset": text("Held-out rows; a hub id or file like --dataset."),
    "eval_split": text("Split of the held-out rows; e.g. test."),
    "held_out": whole_number(
        "Rows kept apart to measure on; by default a tenth, 256 at most; e.g. 200."
    ),
    "batch_size": whole_number("Rows in one optimizer step; e.g. 16 [by the number of rows]."),
    "epochs": fraction(
        "Passes over the rows, where --steps is not given [1.0; TRL: num_train_epochs]."
    ),
    # Training
    "steps": whole_number("Optimizer steps [100; TRL: max_steps]."),
    "lora": flag("Train adapters (the default), or every weight.", "--lora/--full"),
    "quantize": text("Keep the frozen base of a LoRA run in 4 bits: 4bit.", metavar="BITS"),
    "max_staleness": whole_number(
        "Steps by which what is trained on may be stale; above 1 weights change between tokens [0]."
    ),
    "oversample": fraction(
        "Groups in flight for each that is needed; what is not whole goes on in the next round [1.0]."
    ),
    "deterministic": flag("Same command, same run, to the bit; slower.", "--deterministic"),
    "merge": flag("Also save the model with its adapters merged in.", "--merge"),
    "processes": text("Training processes here [auto: one a GPU].", metavar="N"),
    "accelerate": text(
        "How they share the work: ddp, zero1, zero2, zero3, fsdp2, hsdp or an accelerate config; see docs/parallel.md.",
        metavar="NAME|FILE",
    ),
    "hosts": text(
        "Start it from here on these machines, by ssh; e.g. a,b; see docs/several-machines.md.",
        metavar="NAMES",
    ),
    "min_hosts": whole_number(
        "How many of --hosts the run may go on with, where others are lost for good [all of them].",
        min=1,
    ),
    "log_every": whole_number(
        "Steps between tables of completions in trackers [10]; see also TRL's --log-completions."
    ),
    "restarts": whole_number(
        "How often a trainer that dies is started again, and a lost machine waited for [0]."
    ),
    "resume": flag("Go on from the newest whole checkpoint in --output.", "--resume"),
    "resume_from": text(
        "Go on from this checkpoint; 0 is the beginning; e.g. 40.", metavar="STEP|PATH"
    ),
    "accept_changes": flag(
        "Go on even though settings, dataset, model or rewards have changed.",
        "--accept-changes",
    ),
    # Plans, pipelines
    "devices": text("8x80GB, 4xH100, 2xcpu, cpu; this machine if not given.", metavar="NxKIND"),
    "judge": text("A generative judge too; e.g. Qwen3-8B.", metavar="MODEL"),
    "prompt_tokens": whole_number("Tokens of a prompt; the default is 256."),
    "completion_tokens": whole_number(
        "Mean tokens of a completion; --max-tokens if not given."
    ),
}
"""The options of the commands, by the names under which a command gets them."""

Datasets = texts(
    "Hub id, JSONL, CSV or Parquet file, or a task; may be repeated, as a.jsonl:0.7.",
    metavar="NAME[:SHARE]",
)
Models = texts(
    "Hub id or folder; several are measured on the same prompts and compared.", metavar="MODEL"
)
Examples = text("Hub id, or JSONL, CSV or Parquet file, with the columns named above.")
ExampleSteps = whole_number("Optimizer steps, in place of --epochs; e.g. 200 [TRL: max_steps].")
StageSet = texts(
    "Any key of a stage; may be repeated; e.g. sft.steps=50.",
    "--set",
    metavar="STAGE.KEY=VALUE",
)
StageResume = flag("Skip what is finished, go on with what was begun.", "--resume")

Model = OPTIONS["model"]
Output = OPTIONS["output"]
Set = OPTIONS["set_"]
DryRun = OPTIONS["dry_run"]
Json = OPTIONS["json"]

TrustRemoteCode = OPTIONS["trust_remote_code"]
Best = flag("The model that --keep-best kept, not the last one.", "--best")
MaxTokens = whole_number("Longest answer, in tokens; e.g. 256.", min=1)
Seed = whole_number("Fixes the answers; e.g. 0.", min=0)
Ask = texts("Say this and end; may be repeated; e.g. 'Hello.'", metavar="TEXT")
SystemPrompt = text("In place of the run's own; '' for none; e.g. 'Be brief.'")
Form = text("merged, a whole model's folder, or gguf, one file [merged].", "--format")
PushTo = text("Push to this model repository; e.g. me/sums.", metavar="REPO")
Private = flag("Make the repository private, if it is made.", "--private")
Name = argument(str, "A run's folder, the newest if not given, or a model.", "RUN|MODEL")
Temperature = fraction("0 takes the likeliest token; e.g. 0.7.", min=0)
Port = whole_number("Port to listen on; e.g. 8000.", min=1, max=65535)
Target = file("What to write; a new name in the run's folder.", "--output")
Host = text("Address to listen on; the default is this machine only.")
BestOf = whole_number("Answers to write for a request; the best one is sent; e.g. 8.", min=1)
BestBy = text(
    "Chooses the answer, in the server's process; similarity takes the one most like the others.",
    metavar="REWARD",
)
PipelineFile = argument(str, "A YAML file of stages, or a shipped recipe's name.", "FILE|NAME")
ReportedRuns = argument(list[Path], "Folders of runs; the newest if none is given.", "RUN")
Page = file("The page to write; report.html in the first run's folder.")
Recipe = argument(str, "Run this one, a shipped recipe or a YAML file.", "RECIPE")
Band = file("The band to compare with; that of the recipe if not given.", "--band")
SeedRuns = file("Folder of the runs; e.g. runs/reproduce-quickstart.", "--output")
Live = flag("Follow one run in the terminal; Ctrl-C only leaves it.", "--live")
Once = flag("Show one run in the terminal as it is now, and return.", "--once")
Seeds = whole_number("Runs, with the seeds 0, 1, ...; e.g. 3.", min=1)

KEYS = {
    "reward": "rewards", "eval_reward": "eval_rewards", "actions": "turns.actions", "engine": "engine.kind",
    "sandbox": "sandbox.level", "dynamic_sampling": "sampling.dynamic", "curriculum": "sampling.curriculum",
    "max_staleness": "sampling.max_staleness", "oversample": "sampling.oversample", "method": "flow.method",
}  # fmt: skip
"""Options that have another name than the key that they set."""

_WITHOUT_KEY = {
    "recipe", "set_", "dry_run", "show_rows", "resume", "resume_from", "accept_changes", "json",
    "benchmark", "run", "hosts", "min_hosts",
    "devices", "judge", "prompt_tokens", "completion_tokens", "top",
}  # fmt: skip

TRL_FIELDS = {
    "learning_rate": "Peak learning rate",
    "beta": "Weight of the distance to the reference",
    "temperature": "Temperature of the completions",
    "top_p": "Share of the probability that is sampled from",
    "top_k": "Tokens that are sampled from; 0 is all",
    "num_iterations": "Passes over each round of completions",
    "epsilon": "How far a step may move a token's probability",
    "loss_type": "The loss, by TRL's name",
    "scale_rewards": "What advantages are divided by: group, batch or none",
    "max_length": "Longest row, in tokens",
    "lr_scheduler_type": "Course of the learning rate; e.g. cosine",
    "warmup_steps": "Steps in which it rises, or their share of the run below 1",
    "weight_decay": "Weight decay of the optimizer",
    "report_to": "Trackers: wandb, trackio, tensorboard",
}
"""The fields of TRL's that people set most, which are options like ycore's own."""


def trl_options(algorithm: Algorithm) -> JsonObject:
    """Declare the usual fields of the algorithm's config class of TRL, with their defaults in ycore."""
    fields = algorithm.trl_fields
    defaults = algorithm.trl_defaults
    defaults["learning_rate"] = (
        f"{algorithm.lora_learning_rate:g}, with --full {algorithm.learning_rate:g}"
    )
    metavars = {"int": "N", "float": "X"}
    return {
        name: text(
            f"{help} [{defaults[name]}].", metavar=metavars.get(fields[name].kinds[0], "NAME")
        )
        for name, help in TRL_FIELDS.items()
        if name in fields
    }


def takes(names: str, **variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare options of a command to Typer: `names` of `OPTIONS`, and `variants` that other commands declare otherwise.

    A variant that is None leaves its name out.
    """
    options = {"context": typer.Context, **{name: OPTIONS[name] for name in names.split()}}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=option, default=None)
        for name, option in (options | variants).items()
        if option
    ]

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        return command

    return declare


def resolve_config(
    context: typer.Context, *, algorithm: str, resume: bool = False
) -> "BaseConfig":
    """Resolve the config of a command from its recipe or the run in `--output` (`resume`), and its options."""
    from ycore.api.run_settings import complete_config
    from ycore.config.recipe_files import load_benchmark, load_recipe, recipe_name
    from ycore.config.resolve import resolve_any

    options = typed_keys(context, algorithm=algorithm)
    recipe = context.params.get("recipe")
    sets = context.params.get("set_") or ()
    base = load_recipe(recipe, command=algorithm) if recipe else _stored(options, resume=resume)
    if benchmark := context.params.get("benchmark"):
        base |= load_benchmark(benchmark, dataset=options.get("dataset"))["run"]
    if algorithm == "eval":
        base.pop("output", None)  # a recipe's own folder is its training run's
    run_name = recipe_name(recipe) if recipe else None
    return complete_config(
        resolve_any(recipe=base, sets=sets, options=options, run_name=run_name)
    )


def typed_keys(context: typer.Context, *, algorithm: str) -> JsonObject:
    """Collect the keys of a config that were typed, and under `trl` TRL's fields among the other words."""
    keys = config_keys(context.params) | {"algorithm": algorithm}
    if trl := _trl_options(context, find_entry(algorithm)):
        keys["trl"] = trl
    return keys


def config_keys(params: Record) -> JsonObject:
    """Collect the keys of a config that the declared options set; options that were not given set none."""
    from ycore.config.resolve import set_key

    keys: JsonObject = {}
    for name, value in params.items():
        if isinstance(value, tuple | list):
            value = list(value) or None
        if name in _WITHOUT_KEY or value is None:
            continue
        if name == "lora":
            value = {} if value else None
        elif name == "dataset" and isinstance(value, list) and len(value) == 1:
            value = value[0]
        elif name == "curriculum":
            value = {"on": True, "off": False}.get(value, value)
        elif name == "processes" and value.isdecimal():
            value = int(value)
        elif name == "output":
            value = str(Path(value).expanduser())
        set_key(keys, KEYS.get(name, name).split("."), value)
    return keys


def _trl_options(context: typer.Context, entry: AlgorithmEntry) -> JsonObject:
    """Parse undeclared options into values, still as text; a ConfigError says what to type instead of an unknown one."""
    rest = list(context.args)
    fields = entry.trl_fields if rest else {}
    flags = {name for name, field in fields.items() if field.is_flag}
    values = {}
    value: str | bool | None
    while rest:
        token = rest.pop(0)
        option, equals, text = token.partition("=")
        if not option.startswith("-") and "." in option and equals:
            option = f"--{option}"  # as verl writes it
        if not option.startswith("-") or option == "--":
            raise ConfigError(
                f"{token!r} is not an option; a value follows its option, e.g. --steps 100"
            )
        name = option.lstrip("-").replace("-", "_")
        value = text if equals else rest[0] if rest and not rest[0].startswith("--") else None
        if not equals and name not in fields and name.startswith("no_") and name[3:] in flags:
            name, value = name[3:], False
        elif name not in fields or not option.startswith("--"):
            known = list[str]()
            for parameter in context.command.params:
                known += [*parameter.opts, *parameter.secondary_opts]
            known += [field.option for field in fields.values()]
            hint = _words_instead(option, str(value or "VALUE"), known, entry)
            raise ConfigError(f"no option {option}{hint}")
        elif not equals and value is not None:
            rest.pop(0)
        elif value is None and name in flags:
            value = True
        elif value is None:
            raise ConfigError(
                f"{option} needs a value; TRL's default is {fields[name].default!r}"
            )
        if name in values:
            raise ConfigError(f"{option} is given twice, and takes one value; leave one out")
        values[name] = value
    return values


def _words_instead(option: str, value: str, known: Sequence[str], entry: AlgorithmEntry) -> str:
    """Say what to type for another trainer's option, of verl's `actor.optim.lr` by the last words, or the nearest one."""
    from ycore.config.resolve import familiar_words

    parts = option.lstrip("-").replace("_", "-").split(".")
    for name in ("-".join(parts[-2:]), parts[-1]):
        words = familiar_words(f"--{name}", value, entry) or f"--{name} {value}"
        if words.split()[0] in known:
            return f"; say {words}"
    return nearest(option, known, limit=1)


def _stored(options: Record, *, resume: bool) -> JsonObject:
    """Read the settings of the run that is resumed or replayed, so that its folder is enough."""
    from ycore.api.run_settings import stored_settings

    if resume and options.get("output"):
        return stored_settings(options["output"])
    if options.get("replay"):
        run = options["replay"].rstrip("/")
        return stored_settings(run) | {"output": f"{run}-replay", "keep_journal": False}
    return {}
