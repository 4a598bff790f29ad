"""RunConfig: everything a run is told, validated, with one owner for every value.

The fields of TRL's config that are ycore's own: some are another spelling of a key, some are refused, with why.

TuneConfig: the run of a trainer that learns from given examples: `sft`, `reward`, `dpo`, `kto`. No rollouts.

Not here: TRL's own fields (they pass through `trl`, checked against its source by `trl_fields`), sizes that are
derived (`batch`), and where values come from (`recipes`, `overrides`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ycore.config.presets import Advantage, Divergence
from ycore.errors import ConfigError

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Count = Annotated[int, Field(gt=0, le=10**6, strict=True)]
"""How many of something that is held at once, so that sizes made of several stay numbers that can be divided up."""


class Strict(BaseModel):
    """Unknown keys are refused, values are frozen once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RewardConfig(Strict):
    """One reward source."""

    reward: str
    """A built-in name, `file.py:function`, `package.module:function`, `judge:FILE.yaml` or `rm:MODEL`."""

    weight: float = 1.0

    args: dict[str, Any] = {}
    """Keyword arguments bound to the function before it is called; keys of a judge or a reward model."""

    strip_thinking: bool = False
    """Show it the completions without what stands before `</think>`."""


class LoraSettings(Strict):
    """Low-rank adapters (arXiv 2106.09685), as peft names them."""

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: str | list[str] = "all-linear"


class EngineSettings(Strict):
    """The rollout engines of one node."""

    kind: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto` is vLLM where it is installed, else transformers inside the trainer, and the run says which."""

    count: Literal["auto"] | Positive = "auto"
    """How many engines; `auto` is one a device, and on CPU one a core, two at most."""

    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; None is the model's own context, 4096 at most."""

    memory_gib: Positive | None = None
    """KV cache of one engine on CPU, in GiB; None derives it from the model and the batch."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of a device's memory that an engine may take beside the trainer; with `sleep`, each role in its turn."""

    sleep: bool = True
    """On a GPU, engines sleep while the trainer trains, and one role of a slot is awake at a time; not on a CPU."""

    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long an engine may take to be ready, and the trainer from then to its first step."""

    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long an engine may take to answer, however often it is asked again."""

    health_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long an engine may be stopped, or leave `/health` unanswered, before it is killed and started again."""

    restarts: Annotated[int, Field(ge=0, strict=True)] = 3
    """How often engines that died are started again in a run, all of them together; then the run fails."""


class SamplingSettings(Strict):
    """Which groups a step trains on (dynamic sampling: DAPO, arXiv 2503.14476)."""

    dynamic: bool = True
    """Replace groups whose rewards are all equal: they have no gradient."""

    max_tries: Positive = 4
    """Groups drawn for each one needed, at most; then the step goes on with what there is."""

    max_age: Annotated[int, Field(ge=0)] = 1
    """Policy versions by which a group left over from an earlier round may lag; 0 drops what is left over."""


class RewardSettings(Strict):
    """The worker processes in which plain reward functions run."""

    workers: Positive = 2
    deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """One call's limit; what does not answer by then is masked and counted."""

    run_as: Literal["auto", "same"] = "auto"
    """`auto` gives up root where ycore runs as root; `same` runs rewards as the user who started the run."""


class RunConfig(Strict):
    """One run, resolved. `run.json` is this object."""

    algorithm: Literal["grpo", "rloo", "eval"] = "grpo"

    model: str
    """A hub id, a local folder, a GGUF file, or the built-in name `smollm2-135m`."""

    dataset: str
    """A hub id (`name` or `name:config`), a JSONL, CSV or Parquet file, `task:NAME?args` or `gym:NAME?args`."""

    rewards: Annotated[list[RewardConfig], Field(min_length=1)]

    output: str
    """The run's folder; it must be new, empty, or the same run's."""

    split: str = "train"
    prompt_column: str | None = None
    """None looks for `prompt`, `messages`, `question`, `problem`, `instruction`, in this order."""

    answer_column: str | None = None
    """Renamed to `answer` for the rewards; None keeps the columns as they are."""

    system_prompt: str | None = None
    trust_remote_code: bool = False

    prompts_per_step: Count = 8
    group_size: Annotated[int, Field(gt=1, le=10**6, strict=True)] = 8
    """Completions of each prompt; TRL's `num_generations`."""

    max_tokens: Positive = 256
    """Longest completion; TRL's `max_completion_length`."""

    steps: Positive = 100
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0

    preset: str | None = None
    """A paper's settings (`config.presets`), under everything that is said otherwise."""

    advantage: Advantage = "group"
    """The advantage estimator; `group` leaves it to TRL's `scale_rewards`."""

    divergence: Divergence = "reverse-kl"
    """The distance to the reference that TRL's `beta` weighs; the others need a `beta` above 0."""

    loss_from: Literal["grpo", "gmpo"] = "grpo"
    """Which of TRL's trainers computes the loss."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What trainer and engine compute in; `auto` is bfloat16. Adapters and full weights are kept in float32."""

    lora: LoraSettings | None = LoraSettings()
    """None trains every weight."""

    merge: bool = False
    """Also save the model with its adapters merged in, under `model/merged`."""

    checkpoint_every: Positive | None = None
    """Steps between checkpoints; None is a fifth of the run."""

    keep_journal: bool = False
    """Keep every round on disk, for `replay`; else those before the oldest checkpoint are dropped."""

    replay: str | None = None
    """The folder of a run whose journal gives the rounds: nothing is generated, and no engine is started."""

    sync_weights: bool = True
    """False freezes the engine at its first weights: a control for tests, never for training."""

    processes: Count = 1
    """Training ranks on this machine, each a controller with its own share of prompts and engines."""

    accelerate: str | None = None
    """`ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, or an accelerate config file; None is `ddp` for several processes."""

    restarts: Annotated[int, Field(ge=0, strict=True)] = 0
    """How often a trainer that died goes on by itself, from the newest checkpoint and the journal."""

    step_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest step, from its beginning to its row of metrics; then every stack is written and the run fails."""

    collective_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long ranks wait for each other in one collective; torch's own default is half an hour on CPU."""

    placement: str = "dynamic"
    """`colocated`, `dynamic`, or `split:3:1` with slots for each role: how rollouts and scorers share the slots."""

    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    reward_workers: RewardSettings = RewardSettings()

    trl: dict[str, Any] = {}
    """Any other field of TRL's config class, by TRL's own name."""

    num_samples: Positive = 4
    """Completions a prompt, for `eval` only."""

    limit: Positive | None = None
    """Rows to take from the dataset; None takes all."""


ALIASES: Mapping[str, str] = {
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
    "max_steps": "steps",
    "output_dir": "output",
    "save_steps": "checkpoint_every",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "bf16": "dtype",
}
"""TRL's spelling -> the key of RunConfig that owns it."""

_DTYPES: Mapping[bool | None, str] = {True: "bfloat16", False: "float32", None: "auto"}

_NO_EVALUATION = "ycore trains without an evaluation loop; measure a model with `ycore eval`"
_DATA_ORDER = "ycore owns the order of the data, by `--seed`"
_ENGINE = "ycore starts, feeds and stops the engines itself; say `--engine vllm` or `--engine transformers`"

_REFUSED: Mapping[str, str] = {
    "generation_batch_size": "say `--prompts-per-step`; a round is prompts_per_step * group_size completions",
    "auto_find_batch_size": "a smaller batch would break groups apart; lower `--prompts-per-step` or `--group-size`",
    "use_vllm": _ENGINE,
    "vllm_gpu_memory_utilization": "say `--set engine.gpu_memory_utilization=0.3`",
    "vllm_max_model_length": "say `--set engine.max_model_len=4096`",
    "fp16": "ycore computes in float32 or bfloat16; say `--set dtype=float32`",
    "reward_weights": "a reward carries its own weight; say `--set rewards.0.weight=0.5`",
    "num_train_epochs": "a run's length is its number of steps; say `--steps`",
    "resume_from_checkpoint": "say `--resume`, which goes on from the run folder's last checkpoint",
    "remove_unused_columns": "rewards read the dataset's columns, so they are always kept",
    "shuffle_dataset": _DATA_ORDER,
    "data_seed": _DATA_ORDER,
    "do_train": "`ycore grpo` trains",
    **dict.fromkeys(("do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_on_start"), _NO_EVALUATION),
    **dict.fromkeys(("load_best_model_at_end", "num_generations_eval"), _NO_EVALUATION),
}


def refusal(name: str) -> str | None:
    """Why a TRL field cannot be given, and what to say instead; None where it can."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name.startswith("vllm_") and not name.startswith("vllm_importance_sampling_"):
        return _ENGINE
    return None


def own_value(name: str, value: Any) -> Any:
    """The value of an alias as the key that owns it takes it."""
    if name == "bf16":
        return _DTYPES[value]
    if name == "save_steps":
        if value < 1 or value != int(value):
            raise ConfigError(f"save_steps is a whole number of steps between checkpoints, at least 1; it is {value}")
        return int(value)
    return value


Method = Literal["sft", "reward", "dpo", "kto"]
METHODS: tuple[Method, ...] = ("sft", "reward", "dpo", "kto")

TRL_CLASS: Mapping[str, str] = {"sft": "SFTConfig", "reward": "RewardConfig", "dpo": "DPOConfig", "kto": "KTOConfig"}


class TuneConfig(Strict):
    """One run, resolved. `run.json` is this object."""

    algorithm: Method

    model: str
    """A hub id, a local folder, a GGUF file, or the built-in name `smollm2-135m`."""

    dataset: str
    """A hub id (`name` or `name:config`), a JSONL, CSV or Parquet file, `task:NAME?args` or `gym:NAME?args`."""

    output: str
    """The run's folder; it must be new, empty, or the same run's."""

    split: str = "train"
    limit: Positive | None = None
    """Rows to take from the dataset; None takes all."""

    columns: dict[str, str] = Field(default={})
    """The dataset's own name of a column that the trainer wants: `{prompt: question, chosen: better}`."""

    eval_dataset: str | None = None
    """Where held-out rows come from; None takes them from `dataset`."""

    eval_split: str | None = None
    """The split of the held-out rows; None is a split of ycore's own making, without prompts in common."""

    held_out: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Rows to measure on, before and after; None is a tenth of the rows, 256 at most; 0 measures nothing."""

    trust_remote_code: bool = False

    batch_size: Positive | None = None
    """Rows (a pair is one) in an optimizer step, over all ranks; None is 8, or what TRL's batch fields come to."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the rows; `steps` wins."""

    steps: Positive | None = None
    """Optimizer steps; None is what `epochs` comes to."""

    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the trainer computes in; `auto` is bfloat16. Adapters and full weights are kept in float32."""

    lora: LoraSettings | None = LoraSettings()
    """None trains every weight."""

    merge: bool = False
    """Also save the model with its adapters merged in. A reward model is always saved whole."""

    checkpoint_every: Positive | None = None
    """Steps between checkpoints; None is a fifth of the run."""

    processes: Positive = 1
    accelerate: str | None = None
    """`ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, or an accelerate config file; None is `ddp` for several processes."""

    trl: dict[str, Any] = Field(default={})
    """Any other field of TRL's config class, by TRL's own name."""


TUNE_ALIASES: Mapping[str, str] = {
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "save_steps": "checkpoint_every",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "bf16": "dtype",
}
"""TRL's spelling -> the key of TuneConfig that owns it."""

_MEASURING = "ycore measures on held-out rows before and after training; say `--held-out 200`"

_TUNE_REFUSED: Mapping[str, str] = {
    "auto_find_batch_size": "a batch that shrinks by itself is another run; lower `--batch-size` or `--max-length`",
    "fp16": "ycore computes in float32 or bfloat16; say `--set dtype=float32`",
    "resume_from_checkpoint": "say `--resume`, which goes on from the run folder's last checkpoint",
    "data_seed": "ycore owns the order of the data, by `--seed`",
    "shuffle_dataset": "rows are always shuffled, by `--seed`",
    "remove_unused_columns": "ycore hands over the columns that the trainer reads, and no other",
    "dataset_text_field": "say `--set columns.text=NAME`",
    "dataset_kwargs": "ycore prepares the rows; TRL only tokenizes them",
    "do_train": "the command trains",
    **dict.fromkeys(("do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_on_start"), _MEASURING),
    **dict.fromkeys(("load_best_model_at_end", "eval_packing"), _MEASURING),
}


def tune_refusal(name: str) -> str | None:
    """Why a TRL field cannot be given, and what to say instead; None where it can."""
    return _TUNE_REFUSED.get(name)


def tune_own_value(name: str, value: Any) -> Any:
    """The value of an alias as the key that owns it takes it; TRL's -1 steps mean that epochs count."""
    if name == "max_steps" and value == -1:
        return None
    return own_value(name, value)
