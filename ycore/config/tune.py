"""TuneConfig: the run of a trainer that learns from given examples: `sft`, `reward`, `dpo`, `kto`. No rollouts.

Not here: RunConfig, which is the same page for the algorithms that generate (`run`); TRL's fields, which pass through
`trl`; the sizes that are derived (`tune_batch`); what the dataset's columns must be (`data.examples`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ycore.config.owned import own_value as shared_own_value
from ycore.config.run import LoraSettings, Positive, Strict

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

_REFUSED: Mapping[str, str] = {
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
    return _REFUSED.get(name)


def tune_own_value(name: str, value: Any) -> Any:
    """The value of an alias as the key that owns it takes it; TRL's -1 steps mean that epochs count."""
    if name == "max_steps" and value == -1:
        return None
    return shared_own_value(name, value)
