"""Constraints in a round: how completions compare, what a group teaches, and the weights over the rounds."""

import json
import math
from pathlib import Path

import pytest

from ycore.config.resolve import resolve
from ycore.config.schema import ConstraintSettings, RunConfig
from ycore.round.journal import reshard_states
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.scoring.group_rewards import Constraint, Constraints, can_teach, compared_rewards
from ycore.scoring.scoring import Scoring
from ycore.types import Completion, Draw, Group, Prompt, Score

FORMAT = Constraint(1, "format", 1.0, 0.1)
SHORT = Constraint(2, "short", 0.5, 0.25)
WEIGHTS = (1.0, 0.0, 0.0)


def group(*scores: tuple[float | None, float | None, float | None]) -> Group:
    completions = tuple(Completion((1, 2), (-1.0, -1.0), "", "stop", 0) for _ in scores)
    scored = tuple(tuple(Score(value) for value in values) for values in scores)
    return Group(Draw(0, Prompt(0, "x"), (9,)), completions, scored)


def test_a_gate_puts_what_breaks_one_below_all_others() -> None:
    constraints = Constraints([FORMAT, SHORT], ConstraintSettings())
    rewards = compared_rewards(
        group((2.0, 1, 0.5), (3.0, 0.9, 1), (1.0, 1, 1), (0.5, 1, 0.4)), WEIGHTS, constraints
    )
    mean = (2.0 + 3.0 + 1.0 + 0.5) / 4
    assert rewards == pytest.approx(
        [1 / (1 + math.exp(mean - 2.0)), 0.0, 1 / (1 + math.exp(mean - 1.0)), 0.0]
    )


def test_what_is_not_known_breaks_nothing_and_teaches_nothing() -> None:
    constraints = Constraints([FORMAT, SHORT], ConstraintSettings())
    rewards = compared_rewards(
        group((2.0, None, 1), (2.0, None, 0), (None, 1, 1), (2.0, 1, 1)), WEIGHTS, constraints
    )
    assert rewards == [None, 0.0, None, 0.5], (
        "the second breaks another constraint; the third has no reward"
    )


@pytest.mark.parametrize(
    ("scores", "teaches"),
    [
        ([(1.0, 1, 1), (1.0, 0, 1)], True),
        ([(1.0, 0, 1), (0.0, 1, 0)], False),
        ([(1.0, 1, 1), (1.0, 1, 1)], False),
        ([(1.0, 1, 1), (0.0, 1, 1)], True),
        ([(1.0, 1, 1), (0.0, None, 1)], False),
    ],
)
def test_a_group_teaches_where_constraints_or_rewards_differ(
    scores: list[tuple[float, float | None, float]], teaches: bool
) -> None:
    assert (
        can_teach(
            group(*scores),
            WEIGHTS,
            constraints=Constraints([FORMAT, SHORT], ConstraintSettings()),
        )
        is teaches
    )


def test_a_weight_grows_above_the_limit_and_falls_below_it() -> None:
    """limit 0.1, rate 2: 3 of 4 broken adds 1.3; 0 of 4 takes 0.2, and never below 0."""
    constraints = Constraints([FORMAT], ConstraintSettings(by="lagrangian", rate=2.0))
    first = constraints.metrics([3, 4])
    assert first == {
        "ycore/violations/format": 0.75,
        "ycore/constraint_weight/format": pytest.approx(1.3),
    }
    assert constraints.metrics([0, 4])["ycore/constraint_weight/format"] == pytest.approx(1.1)
    rewards = compared_rewards(group((2.0, 0, 1), (2.0, 1, 1)), WEIGHTS, constraints)
    assert rewards == [pytest.approx(0.9), 2.0]
    for _ in range(9):
        constraints.metrics([0, 4])
    assert constraints.weights == [0.0]


def test_unknown_ones_are_not_counted() -> None:
    constraints = Constraints([FORMAT, SHORT], ConstraintSettings())
    constraints.count(group((1.0, 0, None), (1.0, 1, 1), (1.0, None, 0)))
    assert list(constraints.take()) == [1, 2, 1, 2] and list(constraints.take()) == [0, 0, 0, 0]
    assert constraints.metrics([0, 0, 1, 2]) == {"ycore/violations/short": 0.5}


def controller() -> Controller:
    return Controller(
        engines=[],
        scoring=Scoring([]),
        draws=DrawSource([], seed=None, encode=lambda prompt: (), max_prompt_tokens=1),
        rules=Rules(
            group_size=2,
            seed=0,
            reward_weights=WEIGHTS,
            constraints=Constraints([FORMAT], ConstraintSettings(by="lagrangian")),
        ),
        peers=Peers(),
    )


def test_the_weights_are_part_of_a_checkpoint_and_of_a_round() -> None:
    made: list[Controller] = [controller(), controller()]
    first, second = made
    for _ in range(3):
        first.count(group((1.0, 0, 1), (1.0, 1, 1)))
        first.meter.end()
        first.hand_over(first.commit(0, []))
    assert first.constraint_weights == [pytest.approx(3 * 0.4)]
    saved = json.loads(json.dumps(first.state()))
    second.restore(saved)
    assert second.rules.constraints is not None
    assert second.rules.constraints.weights == first.constraint_weights
    (again,) = reshard_states([saved, saved], world=1)
    assert again["constraints"] == first.constraint_weights
    for made_controller in made:
        made_controller.close()


def test_a_constraint_is_named_or_marked_and_has_no_weight(tmp_path: Path) -> None:
    recipe = {
        "model": "m",
        "dataset": "d",
        "rewards": ["exact_answer", {"reward": "length", "weight": 0.5}],
    }
    config = resolve(recipe=recipe, options={"constraint": ["length:0.2", "format"]})
    assert isinstance(config, RunConfig)
    assert [
        (reward.reward, reward.weight, reward.constraint, reward.limit)
        for reward in config.rewards
    ] == [
        ("exact_answer", 1.0, False, 0.05),
        ("length", 0.0, True, 0.2),
        ("format", 0.0, True, 0.05),
    ]
    constraints = Constraints.of(config)
    assert constraints is not None and [
        (constraint.source, constraint.name) for constraint in constraints.held
    ] == [
        (1, "length"),
        (2, "format"),
    ]
    assert resolve(recipe=config.model_dump(mode="json")) == config, (
        "a resumed run is the same run"
    )
    assert Constraints.of(config.model_copy(update={"algorithm": "eval"})) is None
    assert math.isclose(constraints.held[1].least, 1.0)
