"""The placement that a run asks for, against the roles and slots that it has.

Not here: what a placement means (`ycore.placement`), and who obeys it (`controller.dispatch`).
"""

from ycore.config.run import RunConfig
from ycore.launch.scorers import scoring_models
from ycore.placement.placement import ROLLOUT
from ycore.placement.words import check_placement, in_order, parse_placement


def check_run_placement(config: RunConfig, *, num_slots: int | None = None) -> None:
    """ConfigError where it cannot be had; `num_slots` are a controller's, None where they are not known yet."""
    roles = in_order([ROLLOUT, *(model.role for model in scoring_models(config))])
    wanted = parse_placement(config.placement)
    check_placement(wanted, roles=roles, num_slots=sum(wanted.shares) if num_slots is None else num_slots)
