"""Batch arithmetic: from prompts a step and group size to TRL's three batch fields, or to the nearest sizes that work.

Not here: how many devices there are (`devices`), and any file or process. Everything here is pure.

What people say is `prompts_per_step` and `group_size`. One optimizer step takes prompts_per_step * group_size
completions; TRL counts them as per_device_train_batch_size * world size * gradient_accumulation_steps. A round of
generation fills per_device_train_batch_size * steps_per_generation completions on every rank, in whole groups.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from ycore.config.run import RunConfig
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
