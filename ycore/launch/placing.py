"""The placement that a run asks for, against the roles and slots that it has, and what it means here.

Not here: what a placement means (`ycore.placement`), and who obeys it (`controller.dispatch`).
"""

from collections.abc import Sequence

from ycore.config.run import RunConfig
from ycore.launch.scorers import ScorerPlan, scoring_models
from ycore.placement.placement import ROLLOUT
from ycore.placement.words import check_placement, in_order, parse_placement
from ycore.roles.rollout import RolloutEngine


def check_run_placement(config: RunConfig, *, num_slots: int | None = None) -> None:
    """ConfigError where it cannot be had; `num_slots` are a controller's, None where they are not known yet."""
    roles = in_order([ROLLOUT, *(model.role for model in scoring_models(config))])
    wanted = parse_placement(config.placement)
    check_placement(wanted, roles=roles, num_slots=sum(wanted.shares) if num_slots is None else num_slots)


def placing_notes(engines: Sequence[RolloutEngine], scorers: Sequence[ScorerPlan]) -> list[str]:
    """How the engines share their slots, in a few words; nothing where there is nothing to share."""
    if any(engine.sleeps for engine in engines):
        return ["asleep while others use the device"]
    if scorers and engines[0].on_cpu:
        return ["none of which sleeps, as vLLM cannot on a CPU: placement moves requests alone"]
    return []
