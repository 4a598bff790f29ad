"""Sizes of a run without rollouts: rows in a step, micro-batches, steps; or the nearest sizes that work. Pure.

One optimizer step takes `batch_size` rows; TRL counts them as per_device_train_batch_size * world size *
gradient_accumulation_steps. A row of preferences is two sequences.

Not here: the batch of the algorithms that generate (`batch`).
"""

import math
from dataclasses import dataclass

from ycore.config.batch import MICRO_BATCH_TOKENS_CPU, MICRO_BATCH_TOKENS_GPU
from ycore.config.tune import TuneConfig
from ycore.errors import ConfigError

DEFAULT_BATCH_SIZE = 8
MAX_LENGTH = 1024
"""TRL's own `max_length`."""

_SEQUENCES_A_ROW = {"sft": 1, "reward": 2, "dpo": 2, "kto": 2}  # kto: the answer, and another's for the KL term
_FEWEST_TOGETHER = {"kto": 2}  # its KL term pairs every prompt with another row's answer


@dataclass(frozen=True, slots=True)
class TuneBatch:
    """What TRL is told, per rank, and what it amounts to."""

    world_size: int
    on_cpu: bool
    batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps: int
    epochs: float
    """Passes over the rows that these steps come to."""

    max_length: int | None
    """Longest sequence in tokens; None cuts nothing."""

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        micro, size = self.gradient_accumulation_steps, self.per_device_train_batch_size
        batches = f"{micro} micro-batch{'es' if micro > 1 else ''} of {size}"
        return f"{self.batch_size} rows a step on {ranks}: {batches}{' each' if self.world_size > 1 else ''}"


def derive_tune_batch(
    config: TuneConfig, *, num_rows: int, world_size: int, on_cpu: bool, context_length: int | None = None
) -> TuneBatch:
    """TRL's batch fields and the number of steps, or a ConfigError that names the nearest sizes that work."""
    size, accumulation = (config.trl.get(name) for name in _FIELDS)
    total = config.batch_size
    if total is None:
        given = size is not None or accumulation is not None
        total = (size or 1) * (accumulation or 1) * world_size if given else _default(num_rows, world_size)
    longest = longest_of(config, context_length)
    micro = _micro_batch(config, total // world_size, longest=longest or context_length or MAX_LENGTH, on_cpu=on_cpu)
    size, accumulation = _split(total, size, accumulation, world_size=world_size, micro_batch=micro)
    fewest = _FEWEST_TOGETHER.get(config.algorithm, 1)
    if size < fewest:
        raise ConfigError(
            f"kto needs {fewest} rows or more in a micro-batch, because it pairs a prompt with another's answer; "
            f"per_device_train_batch_size is {size}; e.g. --batch-size {max(DEFAULT_BATCH_SIZE, fewest * world_size)}"
        )
    if num_rows < total:
        raise ConfigError(
            f"a step takes {total} rows and the dataset has {num_rows} to train on; "
            f"e.g. --batch-size {max(fewest * world_size, num_rows // world_size * world_size)}"
        )
    steps = config.steps or max(1, math.ceil(config.epochs * num_rows / total))
    return TuneBatch(world_size, on_cpu, total, size, accumulation, steps, round(steps * total / num_rows, 2), longest)


def longest_of(config: TuneConfig, context_length: int | None) -> int | None:
    """`max_length`: TRL's 1024, or the model's context where that is shorter; ConfigError for more than the context."""
    asked = config.trl.get("max_length", min(MAX_LENGTH, context_length or MAX_LENGTH))
    if context_length is not None and (asked or 0) > context_length:
        raise ConfigError(
            f"max_length must fit into the model's context of {context_length} tokens; it is {asked}; "
            f"e.g. --max-length {context_length}"
        )
    return asked if asked is None else int(asked)


_FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _default(num_rows: int, world_size: int) -> int:
    """Eight rows, or fewer where there are fewer, in equal parts for the ranks."""
    return max(1, min(DEFAULT_BATCH_SIZE, num_rows) // world_size) * world_size


def _split(
    total: int, size: int | None, accumulation: int | None, *, world_size: int, micro_batch: int
) -> tuple[int, int]:
    """A rank's share as micro-batches: what was given, and for the rest the most that fits in memory."""
    if total % world_size:
        below = total // world_size * world_size
        ways = " or ".join(str(way) for way in (below, below + world_size) if way)
        raise ConfigError(f"batch_size must be a multiple of the {world_size} ranks; it is {total}; e.g. {ways}")
    local = total // world_size
    if size is None and accumulation is None:
        size = micro_batch
    size = size if size is not None else max(1, local // (accumulation or 1))
    accumulation = accumulation if accumulation is not None else max(1, local // size)
    if size * accumulation != local:
        raise ConfigError(
            f"batch_size / ranks must be per_device_train_batch_size * gradient_accumulation_steps; they are {total} / "
            f"{world_size} and {size} * {accumulation}; leave one of the three out, or say --batch-size "
            f"{size * accumulation * world_size}"
        )
    return size, accumulation


def _micro_batch(config: TuneConfig, local: int, *, longest: int, on_cpu: bool) -> int:
    """The most rows that divide a rank's share and stay within the tokens of a micro-batch."""
    budget = MICRO_BATCH_TOKENS_CPU if on_cpu else MICRO_BATCH_TOKENS_GPU
    most = max(_FEWEST_TOGETHER.get(config.algorithm, 1), budget // (longest * _SEQUENCES_A_ROW[config.algorithm]))
    return max((size for size in range(1, local + 1) if local % size == 0 and size <= most), default=1)
