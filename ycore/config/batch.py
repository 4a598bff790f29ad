"""Batch arithmetic: from prompts a step and group size to TRL's three batch fields, or to the nearest sizes that work.

Sizes of a run without rollouts: rows in a step, micro-batches, steps; or the nearest sizes that work. Pure.

Not here: how many devices there are (`devices`), and any file or process. Everything here is pure.

What people say is `prompts_per_step` and `group_size`. One optimizer step takes prompts_per_step * group_size
completions; TRL counts them as per_device_train_batch_size * world size * gradient_accumulation_steps. A round of
generation fills per_device_train_batch_size * steps_per_generation completions on every rank, in whole groups.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from ycore.config.schema import RunConfig, TuneConfig
from ycore.errors import ConfigError

MICRO_BATCH_TOKENS_CPU = 2_048
MICRO_BATCH_TOKENS_GPU = 16_384

_SEARCH = 256  # candidates tried below and above a refused number


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was asked for; None is left to ycore. The field names are the keys that people write."""

    world_size: int
    prompts_per_step: int
    group_size: int
    max_tokens: int
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    steps_per_generation: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What TRL is told, per rank, and what it amounts to."""

    world_size: int
    on_cpu: bool
    prompts_per_step: int
    group_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    groups_per_rank: int
    """Groups that each rank generates for one round."""

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that learn from one round of generation, before `num_iterations` repeats them."""
        return self.steps_per_generation // self.gradient_accumulation_steps

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        micro, size = self.gradient_accumulation_steps, self.per_device_train_batch_size
        batches = f"{micro} micro-batch{'es' if micro > 1 else ''} of {size}"
        rounds = "" if self.steps_per_round == 1 else f", {self.steps_per_round} optimizer steps a round"
        total = f"{self.prompts_per_step} prompts x {self.group_size} completions = {self.completions_per_step} a step"
        return f"{total} on {ranks}: {batches}{' each' if self.world_size > 1 else ''}{rounds}"


def derive_batch(config: RunConfig, *, world_size: int, on_cpu: bool) -> BatchPlan:
    """TRL's batch fields for this run, or a ConfigError that names the nearest sizes that work."""
    sizes = Sizes(
        world_size=world_size,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        per_device_train_batch_size=config.trl.get("per_device_train_batch_size"),
        gradient_accumulation_steps=config.trl.get("gradient_accumulation_steps"),
        steps_per_generation=config.trl.get("steps_per_generation"),
    )
    return plan_batch(sizes, on_cpu=on_cpu)


def plan_batch(sizes: Sizes, *, on_cpu: bool) -> BatchPlan:
    """The same for bare sizes."""
    problem = problem_of(sizes, on_cpu=on_cpu)
    if problem is not None:
        ways = "; or ".join(_in_words(sizes, way) for way in neighbours(sizes, on_cpu=on_cpu))
        raise ConfigError(f"{problem}; what works nearest: {ways}")
    size, accumulation, per_generation = _fill(sizes, on_cpu=on_cpu)
    return BatchPlan(
        world_size=sizes.world_size,
        on_cpu=on_cpu,
        prompts_per_step=sizes.prompts_per_step,
        group_size=sizes.group_size,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        groups_per_rank=size * per_generation // sizes.group_size,
    )


def problem_of(sizes: Sizes, *, on_cpu: bool) -> str | None:
    """The rule that these sizes break, with their values, or None."""
    prompts, ranks = sizes.prompts_per_step, sizes.world_size
    if prompts % ranks:
        return f"prompts_per_step must be a multiple of the {ranks} ranks, for whole groups on each; it is {prompts}"
    local = prompts // ranks * sizes.group_size
    size, accumulation, per_generation = _fill(sizes, on_cpu=on_cpu)
    if size * accumulation != local:
        given = f"per_device_train_batch_size * gradient_accumulation_steps is {size} * {accumulation}"
        if sizes.gradient_accumulation_steps is None:
            given = f"per_device_train_batch_size {size} does not divide it"
        elif sizes.per_device_train_batch_size is None:
            given = f"gradient_accumulation_steps {accumulation} does not divide it"
        return f"a step takes {prompts} prompts x {sizes.group_size} completions = {local} a rank, and {given}"
    if per_generation % accumulation:
        return (
            "steps_per_generation must be a multiple of gradient_accumulation_steps, so that a round is whole "
            f"optimizer steps; they are {per_generation} and {accumulation}"
        )
    return None


def neighbours(sizes: Sizes, *, on_cpu: bool) -> list[Sizes]:
    """Accepted sizes near refused ones: one key changed where that is enough, else TRL's keys left to ycore."""
    found: list[Sizes] = []
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "prompts_per_step"):
        found += _nearest(sizes, key, on_cpu=on_cpu)
    found = found or _nearest(sizes, "steps_per_generation", on_cpu=on_cpu)
    if found:
        return found[:3]
    free = replace(sizes, per_device_train_batch_size=None, gradient_accumulation_steps=None, steps_per_generation=None)
    return [free] if problem_of(free, on_cpu=on_cpu) is None else _nearest(free, "prompts_per_step", on_cpu=on_cpu)


def _fill(sizes: Sizes, *, on_cpu: bool) -> tuple[int, int, int]:
    """Micro-batch, accumulation and micro-batches a round; what was given stays, also where it does not fit."""
    local = sizes.prompts_per_step // sizes.world_size * sizes.group_size
    size, accumulation = sizes.per_device_train_batch_size, sizes.gradient_accumulation_steps
    if size is None:
        size = _micro_batch(local, sizes, on_cpu=on_cpu) if accumulation is None else max(1, local // accumulation)
    if accumulation is None:
        accumulation = max(1, local // size)
    return size, accumulation, sizes.steps_per_generation or accumulation


def _micro_batch(local: int, sizes: Sizes, *, on_cpu: bool) -> int:
    """The most completions that divide a rank's share, keep groups whole or cut them evenly, and fit in memory."""
    group, most = sizes.group_size, (MICRO_BATCH_TOKENS_CPU if on_cpu else MICRO_BATCH_TOKENS_GPU) // sizes.max_tokens
    fitting = (size for size in _divisors(local) if size <= most and (size % group == 0 or group % size == 0))
    return max(fitting, default=1)


def _divisors(number: int) -> Iterator[int]:
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            yield small
            yield number // small


def _nearest(sizes: Sizes, key: str, *, on_cpu: bool) -> list[Sizes]:
    """The closest accepted value of one key below and above the one given."""
    value = asdict(sizes)[key]
    if value is None:
        return []
    found = []
    for candidates in _candidates(sizes, key, value):
        options = (replace(sizes, **{key: candidate}) for candidate in candidates)
        accepted = next((option for option in options if problem_of(option, on_cpu=on_cpu) is None), None)
        found += [accepted] if accepted else []
    return found


def _candidates(sizes: Sizes, key: str, value: int) -> tuple[Iterable[int], Iterable[int]]:
    """What a key could be instead, nearest first: below the value given, and above it."""
    local = sizes.prompts_per_step // sizes.world_size * sizes.group_size
    if key in ("per_device_train_batch_size", "gradient_accumulation_steps") and local:
        sorted_divisors = sorted(set(_divisors(local)))
        below = [divisor for divisor in reversed(sorted_divisors) if divisor < value]
        return below, [divisor for divisor in sorted_divisors if divisor > value]
    step = sizes.world_size if key == "prompts_per_step" else 1
    floor = (value - 1) // step * step
    ceiling = floor + step if floor + step > value else floor + 2 * step
    return range(floor, max(0, floor - _SEARCH * step), -step), range(ceiling, ceiling + _SEARCH * step, step)


def _in_words(asked: Sizes, way: Sizes) -> str:
    changes = []
    after = asdict(way)
    for key, before in asdict(asked).items():
        if before != after[key]:
            changes.append(f"no {key}" if after[key] is None else f"{key} {after[key]}")
    return " with ".join(changes)


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
    micro = _rows_at_once(config, total // world_size, longest=longest or context_length or MAX_LENGTH, on_cpu=on_cpu)
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


def _rows_at_once(config: TuneConfig, local: int, *, longest: int, on_cpu: bool) -> int:
    """The most rows that divide a rank's share and stay within the tokens of a micro-batch."""
    budget = MICRO_BATCH_TOKENS_CPU if on_cpu else MICRO_BATCH_TOKENS_GPU
    most = max(_FEWEST_TOGETHER.get(config.algorithm, 1), budget // (longest * _SEQUENCES_A_ROW[config.algorithm]))
    return max((size for size in range(1, local + 1) if local % size == 0 and size <= most), default=1)
