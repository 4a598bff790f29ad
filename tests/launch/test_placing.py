"""A run's placement against the roles and slots it has."""

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.launch.scoring_models import check_run_placement


def config(placement: str) -> RunConfig:
    return RunConfig(
        model="m", dataset="d", rewards=[RewardConfig(reward="exact_answer")], output="o", placement=placement
    )


def test_rollouts_alone_need_no_placement() -> None:
    for placement in ("dynamic", "colocated"):
        check_run_placement(config(placement), num_slots=2)
    with pytest.raises(ConfigError, match="leave --placement out"):
        check_run_placement(config("split:1:1"), num_slots=2)


def test_nonsense_is_refused_before_slots_are_known() -> None:
    with pytest.raises(ConfigError, match="must be colocated"):
        check_run_placement(config("everywhere"))
