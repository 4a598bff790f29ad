"""The planned seconds of a run's steps on the cores of this machine, before it starts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.judge.sources import judge_of
from ycore.launch.device_memory import facts_here
from ycore.launch.engines import slots_of
from ycore.launch.layout import Site, on_machine
from ycore.placement.placement import JUDGE
from ycore.plan.devices import Device, Fleet, measured_core
from ycore.plan.model_facts import ModelFacts
from ycore.plan.planner import forecast_step
from ycore.plan.workload import Strategy, Workload, workload_of
from ycore.run.text import as_duration
from ycore.scoring.scorers import is_rule, served_models
from ycore.scoring.scoring import ServedModel

_LABEL_TOKENS = 16  # a verdict by labels: `{"code": "7f3ab2", "label": "positive"}`
_PLANNED_ALGORITHMS = ("grpo", "rloo", "ppo")


def plan_steps(
    config: RunConfig,
    site: Site,
    *,
    prompt_tokens: int,
    core: Device | None = None,
) -> dict[str, Any] | None:
    """Return what the steps of a run will take, as JSON values; None where the formulas do not count them.

    They count completions of one turn that vLLM writes on the cores of this machine, and one model that scores there.

    Args:
        prompt_tokens: of a mean prompt.
        core: one core of this machine; by default measured, which takes a tenth of a second.
    """
    config = on_machine(config, site.machine)
    work = _workload_before(config, site, prompt_tokens)
    if work is None:
        return None
    strategy = strategy_on_cores(config, site, num_slots=len(slots_of(config, site)))
    seconds = forecast_step(
        work, strategy, cores_of(site, core or measured_core(config.dtype))
    ).seconds
    num_groups = work.draws * work.prompts_per_step
    step_s = seconds["step"]
    words = (
        f"about {step_s:.1f} s a step, {as_duration(step_s * config.steps)} for {config.steps} "
        f"step{'s' * (config.steps != 1)}, with {', '.join(_sizes(work, config.max_tokens, num_groups))}"
    )
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
        "groups": num_groups,
        "in_words": words,
    }


def _sizes(work: Workload, max_tokens: int, num_groups: float) -> list[str]:
    most = " (the most)" if work.completion_tokens == max_tokens else ""
    sizes = [
        f"prompts of {work.prompt_tokens} tokens",
        f"completions of {work.completion_tokens}{most}",
    ]
    if work.judge is not None and work.judge_role == JUDGE:
        sizes.append(f"verdicts of {work.judge_tokens}")
    if num_groups > work.prompts_per_step:
        sizes.append(f"{num_groups:.0f} groups drawn a step")
    return sizes


def _workload_before(config: RunConfig, site: Site, prompt_tokens: int) -> Workload | None:
    """Return a step's work before the run; None where the formulas do not count such a step."""
    policy = facts_here(config.model)
    if policy is None or policy.eyes_params or not _is_counted(config, site):
        return None
    scorers = served_models(config)[1:]
    if not scorers:
        return workload_of(config, policy, prompt_tokens=prompt_tokens)
    facts = facts_here(scorers[0].name)
    if facts is None:
        return None
    work = workload_with(config, policy, [(scorers[0], facts)], prompt_tokens)
    if work.judge_role != JUDGE:
        return work
    judge = judge_of(config.rewards[scorers[0].sources[0]])
    if judge.mode != "pointwise":
        return None
    # The engine reads the judge's own words once.
    tokens = _LABEL_TOKENS if judge.verdict.kind == "labels" else judge.max_tokens
    return replace(work, judge_prompt_tokens=prompt_tokens, judge_tokens=tokens)


def _is_counted(config: RunConfig, site: Site) -> bool:
    """Whether a step only writes a round, scores it by rules and one model at most, and learns from it, on one CPU."""
    scorers = served_models(config)[1:]
    served = {source for scorer in scorers for source in scorer.sources}
    rules = {source for source, reward in enumerate(config.rewards) if is_rule(reward)}
    sampling = config.sampling
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    is_more = (
        config.algorithm not in _PLANNED_ALGORITHMS
        or site.machine.devices
        or site.layout.num_machines > 1
        or config.has_turns
        or config.replay is not None
        or sampling.max_staleness
        or sampling.oversample > 1
        or config.engine.drafts
        or batch.steps_per_round > 1
        or config.trl.get("num_iterations", 1) > 1
        or len(scorers) > 1
        # scored at an address, by the trainer, or by programs that run
        or len(served | rules) < len(config.rewards)
    )
    return not is_more


def workload_with(
    config: RunConfig,
    policy: ModelFacts,
    scorers: Iterable[tuple[ServedModel, ModelFacts]],
    prompt_tokens: int | None = None,
) -> Workload:
    """Return a step's work. Of several models that score, a judge counts before the others."""
    first = min(scorers, key=lambda pair: pair[0].role != JUDGE, default=None)
    if first is None:
        return workload_of(config, policy, prompt_tokens=prompt_tokens)
    scorer, facts = first
    return workload_of(
        config,
        policy,
        prompt_tokens=prompt_tokens,
        judge=facts,
        judge_role=scorer.role,
        judge_tokens=scorer.max_new_tokens or None,
    )


def strategy_on_cores(config: RunConfig, site: Site, *, num_slots: int) -> Strategy:
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Strategy(
        ranks=site.layout.local,
        slots=num_slots,
        sharding=site.layout.sharding,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
    )


def cores_of(site: Site, core: Device) -> Fleet:
    return Fleet(core, max(len(site.machine.cores), site.layout.local))
