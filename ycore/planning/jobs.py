"""From a run's settings to the job that is planned: its sizes, and what TRL's fields say of memory and time.

Not here: the settings themselves (`config`).
"""

from typing import Any

from ycore.config.batch import Sizes, plan_batch, problem_of
from ycore.config.run import RunConfig
from ycore.planning.facts import ModelFacts
from ycore.planning.job import Job

PROMPT_TOKENS = 256
"""Taken for a prompt's length where it is not told."""

_LONGEST = 4096
_VERDICT_TOKENS = 128
_YIELD = 1.5
"""Groups drawn for each one kept with dynamic sampling, where nothing was measured (DAPO, arXiv 2503.14476, 3.2)."""


def job_of(
    config: RunConfig,
    policy: ModelFacts,
    *,
    judge: ModelFacts | None = None,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Job:
    """The job of a run; a completion is taken to be as long as it may be unless a mean is told."""
    context = policy.context_length or _LONGEST
    return Job(
        policy=policy,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        prompt_tokens=prompt_tokens or PROMPT_TOKENS,
        completion_tokens=min(completion_tokens or config.max_tokens, config.max_tokens),
        max_tokens=config.max_tokens,
        max_model_len=config.engine.max_model_len or min(context, _LONGEST),
        lora_rank=None if config.lora is None else config.lora.r,
        bytes_per_value=4 if config.dtype == "float32" else 2,
        draws=_YIELD if config.sampling.dynamic else 1.0,
        has_reference=bool(config.trl.get("beta")),
        judge=judge,
        judge_tokens=judge_tokens or _VERDICT_TOKENS,
    )


def micro_batch_of(config: RunConfig, *, ranks: int, on_cpu: bool) -> int:
    """Completions in one forward pass of a rank, as the run would derive them; 1 where its sizes do not work."""
    sizes = Sizes(
        world_size=ranks,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        per_device_train_batch_size=config.trl.get("per_device_train_batch_size"),
        gradient_accumulation_steps=config.trl.get("gradient_accumulation_steps"),
    )
    if problem_of(sizes, on_cpu=on_cpu) is not None:
        return 1
    return plan_batch(sizes, on_cpu=on_cpu).per_device_train_batch_size


def asks_checkpointing(trl: dict[str, Any]) -> bool | None:
    """What the run says of gradient checkpointing; None where it leaves that to the defaults."""
    told = trl.get("gradient_checkpointing")
    return None if told is None else bool(told)
