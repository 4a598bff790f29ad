"""The planned seconds and bytes of a run's steps: before it starts, and beside what was measured when it has finished."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import YcoreError
from ycore.judge.sources import judge_of
from ycore.launch.device_memory import facts_here
from ycore.launch.engines import slots_of
from ycore.launch.layout import Site, on_machine
from ycore.placement.placement import JUDGE
from ycore.plan.devices import Device, Fleet, measured_core
from ycore.plan.model_facts import ModelFacts, facts_of
from ycore.plan.step_forecast import (
    PlannedAndMeasured,
    as_it_was,
    compare,
    figures_on_cpu,
    forecast_step,
)
from ycore.plan.workload import Strategy, Workload, workload_of
from ycore.run.files import read_json
from ycore.run.metrics import read_metrics
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
    done: int = 0,
    core: Device | None = None,
) -> dict[str, Any] | None:
    """Return what the steps of a run will take, as JSON values; None where the formulas do not count them.

    They count completions of one turn that vLLM writes on the cores of this machine, and one model that scores there.

    Args:
        prompt_tokens: of a mean prompt. A run that goes on has the lengths and draws of its steps so far.
        done: the steps that it has taken.
        core: one core of this machine; by default measured, which takes a tenth of a second.
    """
    config = on_machine(config, site.machine)
    work = _workload_before(config, site, prompt_tokens)
    if work is None:
        return None
    metrics = read_metrics(site.folder.metrics, say=lambda line: None) if done else []
    work = as_it_was(work, metrics)
    strategy = _strategy(config, site, num_slots=len(slots_of(config, site)))
    fleet = _fleet(site, core or measured_core(config.dtype))
    figures = figures_on_cpu(forecast_step(work, strategy, fleet))
    num_groups = work.draws * work.prompts_per_step
    steps_left = max(0, config.steps - done)
    step_s = figures["time/step"]
    words = (
        f"about {step_s:.1f} s a step, {as_duration(step_s * steps_left)} for {steps_left} "
        f"step{'s' * (steps_left != 1)}, with {', '.join(_sizes(work, config.max_tokens, num_groups))}"
    )
    return {
        "figures": {name: round(value, 3) for name, value in figures.items()},
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
        "groups": num_groups,
        "in_words": f"{words}, as so far" if metrics else words,
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
    work = _workload(config, policy, [(scorers[0], facts)], prompt_tokens)
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


def plan_and_measured(
    config: RunConfig,
    site: Site,
    metrics: Sequence[Mapping[str, Any]],
    *,
    before: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return what a finished run took beside its plan, with the run's own lengths; nothing where it has no plan.

    `before`: the figures that `plan_steps` gave before the run.
    """
    files = (site.folder.memory, site.folder.engines)
    if (
        config.algorithm not in _PLANNED_ALGORITHMS
        or site.machine.devices
        or not metrics
        or not all(file.is_file() for file in files)
    ):
        return []
    try:
        rows = compared(config, site, metrics, core=measured_core(config.dtype), before=before)
    except YcoreError:
        return []  # a model that cannot be planned was trained all the same
    return [row.as_json() for row in rows]


def compared(
    config: RunConfig,
    site: Site,
    metrics: Sequence[Mapping[str, Any]],
    *,
    core: Device,
    before: Mapping[str, float] | None = None,
) -> list[PlannedAndMeasured]:
    """Compare plan and measurement of the run in the site's folder; `core` is one core of the machine it ran on."""
    engines = read_json(site.folder.engines)
    policy = facts_of(_model_config(engines), name=config.model)
    scorers = [
        (declared, facts_of(_model_config(scorer), name=declared.name))
        for scorer, declared in zip(
            engines.get("scorers", []), served_models(config)[1:], strict=False
        )
    ]
    return compare(
        _workload(config, policy, scorers),
        _strategy(config, site, num_slots=max(1, len(engines["engines"]))),
        _fleet(site, core),
        peaks=read_json(site.folder.memory),
        metrics=metrics,
        before=before,
    )


def _model_config(engine: Mapping[str, Any]) -> Any:
    return read_json(Path(engine["model"]) / "config.json")


def _workload(
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


def _strategy(config: RunConfig, site: Site, *, num_slots: int) -> Strategy:
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Strategy(
        ranks=site.layout.local,
        slots=num_slots,
        sharding=site.layout.sharding,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
    )


def _fleet(site: Site, core: Device) -> Fleet:
    return Fleet(core, max(len(site.machine.cores), site.layout.local))
