"""From a run's config to the keyword arguments of TRL's config class, and which of TRL's fields ycore sets itself.

Its batch fields follow from the sizes that people say. TRL counts an optimizer step as per_device_train_batch_size *
world size * gradient_accumulation_steps. With rollouts, a step takes prompts_per_step * group_size completions, and a
round of generation fills per_device_train_batch_size * steps_per_generation completions on every rank, in whole groups.
With given examples, a step takes batch_size rows.
"""

import math
from dataclasses import dataclass
from typing import Any

from ycore.config.algorithms import Algorithm
from ycore.config.schema import AnyConfig, RunConfig, TuneConfig, a_fifth
from ycore.config.trl_fields import OWN_DEFAULTS, familiar_options
from ycore.errors import ConfigError
from ycore.run.files import RunFolder

MICRO_BATCH_TOKENS_CPU = 2_048
MICRO_BATCH_TOKENS_GPU = 16_384
DEFAULT_BATCH_SIZE = 8
MAX_LENGTH = 1024  # TRL's own `max_length`

_PER_RANK = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class _Batch:
    """TRL's batch fields, per rank."""

    world_size: int
    on_cpu: bool
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    def _in_words(self, total: str) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        micro_batches = self.gradient_accumulation_steps
        plural = "es" if micro_batches > 1 else ""
        per_rank = " each" if self.world_size > 1 else ""
        size = f"{self.per_device_train_batch_size}{per_rank}"
        return f"{total} a step on {ranks}: {micro_batches} micro-batch{plural} of {size}"


@dataclass(frozen=True)
class BatchPlan(_Batch):
    """The batch of a run with rollouts; `groups_per_rank` are those that each rank generates for one round."""

    prompts_per_step: int
    group_size: int
    steps_per_generation: int
    groups_per_rank: int

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that learn from one round of generation, before `num_iterations` repeats them."""
        return self.steps_per_generation // self.gradient_accumulation_steps

    def num_rounds(self, config: RunConfig) -> int:
        """Rounds of generation in the run."""
        passes = int(config.trl.get("num_iterations", 1))
        return math.ceil(config.steps / (self.steps_per_round * passes))

    def __str__(self) -> str:
        completions = self.prompts_per_step * self.group_size
        words = self._in_words(
            f"{self.prompts_per_step} prompts x {self.group_size} completions = {completions}"
        )
        if self.steps_per_round > 1:
            words += f", {self.steps_per_round} optimizer steps a round"
        return words


@dataclass(frozen=True)
class TuneBatch(_Batch):
    """The batch of a run on given examples, and its length."""

    batch_size: int
    steps: int
    epochs: float  # passes over the rows in these steps
    max_length: int | None  # longest sequence in tokens; None cuts nothing
    completions_per_row: int = 1

    def __str__(self) -> str:
        if self.completions_per_row == 1:
            return self._in_words(f"{self.batch_size} rows")
        num_rows = self.batch_size // self.completions_per_row
        return self._in_words(f"{num_rows} x {self.completions_per_row} completions")


def derive_batch(config: RunConfig, *, world_size: int, on_cpu: bool) -> BatchPlan:
    """Derive TRL's batch fields for a run with rollouts; ConfigError where the sizes do not divide."""
    prompts = config.prompts_per_step
    if prompts % world_size:
        raise ConfigError(
            f"prompts_per_step must be a multiple of the {world_size} ranks, for whole groups on each; it is {prompts}; "
            f"e.g. {_multiples(prompts, world_size)}"
        )
    local = prompts // world_size * config.group_size
    size = micro_batch_sizes(config, world_size=world_size, on_cpu=on_cpu)[0]
    size, accumulation = _split(local, size, config.trl.get("gradient_accumulation_steps"))
    if config.pairs_completions and size % config.group_size:
        raise ConfigError(
            f"per_device_train_batch_size must hold whole groups, whose completions {config.algorithm} compares within one "
            f"micro-batch; it is {size}, and a group {config.group_size}; "
            f"say --per-device-train-batch-size {config.group_size} without --gradient-accumulation-steps"
        )
    if size * accumulation != local:
        raise ConfigError(
            f"per_device_train_batch_size * gradient_accumulation_steps must be the completions of a step on a rank; "
            f"they are {size} * {accumulation} and {prompts} prompts x {config.group_size} / {world_size} = {local}; "
            f"leave one of the two out, or give two whose product is {local}"
        )
    per_generation = config.trl.get("steps_per_generation") or accumulation
    if per_generation % accumulation:
        raise ConfigError(
            f"steps_per_generation must be a multiple of gradient_accumulation_steps, so that a round is whole "
            f"optimizer steps; they are {per_generation} and {accumulation}; e.g. "
            f"{_multiples(per_generation, accumulation)}"
        )
    if size * per_generation * world_size == 1:
        raise ConfigError(
            "a round must be 2 completions or more, as TRL counts them; it is 1 prompt x 1 completion; "
            "e.g. --prompts-per-step 8"
        )
    return BatchPlan(
        world_size=world_size,
        on_cpu=on_cpu,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        prompts_per_step=prompts,
        group_size=config.group_size,
        steps_per_generation=per_generation,
        groups_per_rank=size * per_generation // config.group_size,
    )


def micro_batch_sizes(config: RunConfig, *, world_size: int, on_cpu: bool) -> list[int]:
    """Return the micro-batches that a run may take: its own, or the usual one first and then smaller ones."""
    local = config.prompts_per_step // world_size * config.group_size
    size, accumulation = (config.trl.get(name) for name in _PER_RANK)
    if size is not None or accumulation is not None:
        return [_split(local, size, accumulation)[0]]
    budget = _token_budget(on_cpu) // config.max_tokens
    group = config.group_size
    if config.pairs_completions:
        return [size * group for size in _micro_batches(local // group, budget // group)]
    return _micro_batches(local, budget, group=group)


def derive_tune_batch(
    config: TuneConfig,
    *,
    num_rows: int,
    world_size: int,
    on_cpu: bool,
    context_length: int | None = None,
) -> TuneBatch:
    """TRL's batch fields and the number of steps for a run on given examples; ConfigError where they do not work.

    Args:
        num_rows: rows to train on, without those held out.
        context_length: the model's, in tokens, where it is known.
    """
    algorithm = config.algorithm_row
    completions = _completions_per_row(config)
    num_rows *= completions
    max_length = _max_length(config, context_length)
    size, accumulation = (config.trl.get(name) for name in _PER_RANK)
    total = config.batch_size
    if total is None and size is None and accumulation is None:
        total = max(1, min(DEFAULT_BATCH_SIZE, num_rows) // world_size) * world_size
    elif total is None:
        total = (size or 1) * (accumulation or 1) * world_size
    if size is None and accumulation is None:
        tokens = algorithm.sequences_per_row * (max_length or context_length or MAX_LENGTH)
        most = max(algorithm.min_micro_batch, _token_budget(on_cpu) // tokens)
        size = _micro_batches(total // world_size, most)[0]
    size, accumulation = _split(total // world_size, size, accumulation)
    _check_rows(algorithm, total, size, accumulation, num_rows=num_rows, world_size=world_size)
    if total % completions:
        raise ConfigError(
            f"a step takes whole groups of the {completions} completions of a row (num_generations), and batch_size is "
            f"{total}; e.g. --batch-size {completions * max(1, total // completions)}"
        )
    if config.trl.get("packing") and config.steps is None:
        raise ConfigError(
            f"packing puts several rows into one sequence, and the steps of --epochs {config.epochs:g} are known only "
            f"when rows are tokens; say --steps N, each of which reads {total} sequences of {max_length} tokens"
        )
    steps = config.steps or max(1, math.ceil(config.epochs * num_rows / total))
    return TuneBatch(
        world_size,
        on_cpu,
        size,
        accumulation,
        total,
        steps,
        round(steps * total / num_rows, 2),
        max_length,
        completions,
    )


def _completions_per_row(config: TuneConfig) -> int:
    """Return how many completions the trainer writes for a row; its batch counts them as rows.

    1 where it learns from given answers, and for GOLD, whose batch counts the rows themselves.
    """
    defaults = config.algorithm_row.trl_defaults
    if "num_iterations" not in defaults:
        return 1
    return int((defaults | config.trl)["num_generations"])


def _max_length(config: TuneConfig, context_length: int | None) -> int | None:
    """TRL's `max_length` by default, or the model's context where that is shorter; None for a trainer without one."""
    if "max_length" not in config.algorithm_row.trl_defaults:
        return None
    length = config.trl.get("max_length", min(MAX_LENGTH, context_length or MAX_LENGTH))
    if context_length is not None and (length or 0) > context_length:
        raise ConfigError(
            f"max_length must fit into the model's context of {context_length} tokens; it is {length}; "
            f"e.g. --max-length {context_length}"
        )
    return None if length is None else int(length)


def _check_rows(
    algorithm: Algorithm,
    total: int,
    size: int,
    accumulation: int,
    *,
    num_rows: int,
    world_size: int,
) -> None:
    if total % world_size:
        raise ConfigError(
            f"batch_size must be a multiple of the {world_size} ranks; it is {total}; "
            f"e.g. {_multiples(total, world_size)}"
        )
    if size * accumulation != total // world_size:
        raise ConfigError(
            f"batch_size / ranks must be per_device_train_batch_size * gradient_accumulation_steps; they are {total} / "
            f"{world_size} and {size} * {accumulation}; leave one of the three out, or say --batch-size "
            f"{size * accumulation * world_size}"
        )
    fewest = algorithm.min_micro_batch
    if size < fewest:
        raise ConfigError(
            f"{algorithm.name} needs {fewest} rows or more in a micro-batch, because it pairs a prompt with another's "
            f"answer; per_device_train_batch_size is {size}; "
            f"e.g. --batch-size {max(DEFAULT_BATCH_SIZE, fewest * world_size)}"
        )
    if num_rows < total:
        raise ConfigError(
            f"a step takes {total} rows and the dataset has {num_rows} to train on; "
            f"e.g. --batch-size {max(fewest * world_size, num_rows // world_size * world_size)}"
        )


def _token_budget(on_cpu: bool) -> int:
    return MICRO_BATCH_TOKENS_CPU if on_cpu else MICRO_BATCH_TOKENS_GPU


def _micro_batches(local: int, most: int, *, group: int = 1) -> list[int]:
    """The divisors of a rank's share up to `most` that keep groups whole or cut them evenly, the largest first."""
    return [
        size
        for size in range(max(min(local, most), 1), 0, -1)
        if local % size == 0 and (size % group == 0 or group % size == 0)
    ]


def _split(local: int, size: int | None, accumulation: int | None) -> tuple[int, int]:
    """Micro-batch size and count of a rank's share, one of them given; what was given stays as it is."""
    if size is None:
        size = max(1, local // (accumulation or 1))
    return size, max(1, local // size) if accumulation is None else accumulation


def _multiples(number: int, factor: int) -> str:
    """Name the nearest multiples."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


# -- the arguments -----------------------------------------------------------------------------------------------------


def trl_arguments(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    """Plain JSON values for the config class of the run's trainer; the user's fields win over ycore's defaults.

    Args:
        batch: what `derive_batch` or `derive_tune_batch` made of this config.

    Raises:
        ConfigError: Liger's kernels or flex attention on a CPU.
    """
    if batch.on_cpu and config.trl.get("use_liger_kernel"):
        raise ConfigError(
            "use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out"
        )
    if (
        batch.on_cpu
        and (config.trl.get("model_init_kwargs") or {}).get("attn_implementation")
        == "flex_attention"
    ):
        raise ConfigError(
            "attn_implementation=flex_attention needs a GPU: on a CPU it has no gradients; leave it out"
        )
    return _defaults(config, batch, folder) | config.trl | _owned(config, batch, folder)


_SAVE_S = 3600.0


def _defaults(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    algorithm = config.algorithm_row
    defaults = {
        **OWN_DEFAULTS,
        "learning_rate": algorithm.learning_rate
        if config.lora is None
        else algorithm.lora_learning_rate,
        "run_name": folder.root.resolve().name,  # of a tracker's page; trackio makes up a new one after a resume
    }
    if batch.on_cpu:
        defaults |= {"use_cpu": True, "gradient_checkpointing": False}
    # A rank waits in a collective while another saves a checkpoint of perhaps hundreds of GB: the step's limit is what
    # ends a hang there, and the limit of a round's own exchanges (`collective_timeout_s`) would end a slow save.
    limits = (
        (config.step_timeout_s, config.collective_timeout_s)
        if isinstance(config, RunConfig)
        else (_SAVE_S,)
    )
    defaults["ddp_timeout"] = math.ceil(max(limits))
    if config.deterministic and not batch.on_cpu:
        defaults["full_determinism"] = True
    if isinstance(batch, TuneBatch):
        if batch.max_length is not None:
            defaults["max_length"] = batch.max_length
        # transformers' 8 may not fit; SDPO measures whole groups.
        group = int((algorithm.trl_defaults | config.trl).get("num_generations", 1))
        defaults["per_device_eval_batch_size"] = batch.per_device_train_batch_size * group
    return defaults


def _owned(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    steps = batch.steps if isinstance(batch, TuneBatch) else config.steps
    assert steps is not None
    owned = {
        "output_dir": str(folder.checkpoints),
        "max_steps": steps,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "save_steps": config.checkpoint_every or a_fifth(steps),
        "bf16": config.dtype != "float32",
        "per_device_train_batch_size": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }
    if isinstance(config, RunConfig) and isinstance(batch, BatchPlan):
        owned |= {
            "num_generations": config.group_size,
            "max_completion_length": config.max_tokens,
            "steps_per_generation": batch.steps_per_generation,
            "use_vllm": False,  # TRL's own engines stay off; ycore's backend replaces them after construction
            "remove_unused_columns": False,
            "shuffle_dataset": False,
        }
    return owned


_ALIASES = {
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "save_steps": "checkpoint_every",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "bf16": "dtype",
}


def aliases(algorithm: Algorithm) -> dict[str, str]:
    """TRL's name of a key -> the key of the algorithm's config."""
    return {name: key for name, key in _ALIASES.items() if key in algorithm.config.model_fields}


def alias_value(name: str, value: Any, algorithm: Algorithm) -> Any:
    """The value of an alias in the terms of its key; ConfigError where `save_steps` is a share of the run."""
    if name == "bf16":
        return {True: "bfloat16", False: "float32", None: "auto"}[value]
    if name == "max_steps" and value == -1 and algorithm.learns_from == "examples":
        return None  # epochs count
    if name == "save_steps":
        if value < 1 or value != int(value):
            raise ConfigError(
                f"save_steps is a whole number of steps between checkpoints, at least 1; it is {value}"
            )
        return int(value)
    return value


def refusal(name: str, algorithm: Algorithm) -> str | None:
    """Why a field of TRL's cannot be given, and what to say instead; None where it can."""
    refused = familiar_options()["trl"]
    reasons = refused["any"] | refused[algorithm.learns_from]
    if name.startswith("vllm_") and not name.startswith("vllm_importance_sampling_"):
        reasons = {name: reasons["use_vllm"]} | reasons
    reason: str | None = reasons.get(name)
    return reason
