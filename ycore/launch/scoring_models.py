"""The models that a run serves: the policy, judges, reward models and teachers."""

from collections.abc import Sequence
from dataclasses import replace

from ycore.config.schema import RunConfig
from ycore.judge.sources import is_teacher, teacher_of
from ycore.placement.placement import ROLLOUT, check_placement, in_order, parse_placement
from ycore.scoring.scorers import scorer_models
from ycore.scoring.scoring import ServedModel


def served_models(config: RunConfig) -> list[ServedModel]:
    """Return the policy, then every model that scores this run in an engine of ycore's.

    Rewards that use the same model in the same role share its engines. A model with a `base_url` needs none.
    """
    policy = ServedModel(
        ROLLOUT,
        config.model,
        max_model_len=config.engine.max_model_len,
        tensor_parallel=config.engine.tensor_parallel,
    )
    models = {(ROLLOUT, config.model): policy}
    for model in scorer_models(config):
        key = (model.role, model.name)
        models[key] = _merge(models[key], model) if key in models else model
    return list(models.values())


def own_teachers(config: RunConfig) -> list[str]:
    """Return the teachers that every rank of the trainer holds itself."""
    if not config.teaches_exactly:
        return []
    return [teacher_of(spec).model for spec in config.rewards if is_teacher(spec)]


def check_run_placement(
    config: RunConfig, models: Sequence[ServedModel], *, num_slots: int | None = None
) -> None:
    """ConfigError where the models' roles cannot be placed so on `num_slots`, None where these are not known yet."""
    placement = parse_placement(config.placement)
    roles = in_order([model.role for model in models])
    check_placement(
        placement, roles=roles, num_slots=sum(placement.shares) if num_slots is None else num_slots
    )


def _merge(one: ServedModel, other: ServedModel) -> ServedModel:
    lengths = [one.max_model_len, other.max_model_len]
    widths = [width for width in (one.tensor_parallel, other.tensor_parallel) if width != "auto"]
    return replace(
        one,
        sources=one.sources + other.sources,
        max_model_len=None if None in lengths else max(filter(None, lengths)),
        max_new_tokens=max(one.max_new_tokens, other.max_new_tokens),
        tensor_parallel=max(widths, default="auto"),
    )
