"""CGPO: rewards under constraints, by tables worked out by hand, and in the trainers of advantages and of pairs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.advantages import ESTIMATORS
from ycore.config.schema import ConstraintSettings
from ycore.scoring.group_rewards import Constraint, Constraints
from ycore.trl.online_dpo import Trainer as OnlineDPOTrainer
from ycore.trl.online_dpo import best_and_worst, preference_losses
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

NAN = float("nan")
# The example: rewards, and whether all constraints hold; the baseline is 1.5.
REWARDS = torch.tensor([2.0, 3.0, 1.0, 2.5, 0.5], dtype=torch.float64)
KEPT = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
HELD = (Constraint(1, "format", 1.0, 0.1),)


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_the_policy_gradients_rewards() -> None:
    calibration = torch.sigmoid(REWARDS - 1.5)
    close(calibration, [0.622459, 0.817574, 0.377541, 0.731059, 0.268941])
    rewards = calibration * KEPT
    advantages = ESTIMATORS["crpg"](rewards.view(1, 5), torch.ones(1, 5, dtype=torch.bool))[0]
    close(advantages, [0.276247, -0.346212, 0.031329, 0.384847, -0.346212])


def test_the_pair_is_the_best_that_keeps_and_the_worst_that_breaks() -> None:
    best, worst, differ = best_and_worst(REWARDS.view(1, 5), KEPT.view(1, 5))
    assert (best.item(), worst.item(), differ.item()) == (3, 4, True), (
        "not the second, which has the highest reward"
    )


@pytest.mark.parametrize(
    ("kept_G", "pair"),
    [
        ([1, 1, 1, 1, 1], (1, 4)),
        ([0, 0, 0, 0, 0], None),
        ([0, NAN, 1, 0, 0], (2, 4)),
        ([NAN, NAN, 1, NAN, NAN], None),
    ],
)
def test_where_none_breaks_or_all_do(kept_G: list[float], pair: tuple[int, int] | None) -> None:
    best, worst, differ = best_and_worst(REWARDS.view(1, 5), torch.tensor([kept_G]))
    assert differ.item() == (pair is not None) and (
        pair is None or (best.item(), worst.item()) == pair
    )


def test_the_pairs_loss_with_the_likelihood_of_the_best() -> None:
    """With log ratios 1 and -0.5, beta and lambda 0.1, 4 tokens of log-probability -2 in all, it is 0.620957 + 0.05."""
    loss = preference_losses(torch.tensor([1.5]), beta=0.1, kind="dpo") - 0.1 * (-2.0 / 4)
    close(loss, [0.670957])


def test_all_constraints_must_hold_and_unknown_is_not_broken() -> None:
    rows = [[2.0, 1, 0.5], [3.0, 0.9, 1], [1.0, 1, 1], [2.0, None, 0.4], [2.0, None, 1.0]]
    constraints = Constraints([*HELD, Constraint(2, "short", 0.5, 0.1)], ConstraintSettings())
    gated = constraints.compared([*(row[0] for row in rows), None], [*rows, [None, 1, 1]])
    assert gated == [
        pytest.approx(0.5),
        0.0,
        pytest.approx(torch.sigmoid(torch.tensor(-1.0)).item()),
        0.0,
        None,
        None,
    ]


# -- in the trainers ---------------------------------------------------------------------------------------------------

PROMPT = (9, 8, 7)
SCORES = ((2.0, 1.0), (3.0, 0.0), (1.0, 1.0), (2.5, 1.0), (0.5, 0.0), (2.0, None))


class Rounds:
    """One group of six: the example's five, and one whose constraint could not be scored."""

    constraint_weights = (0.75,)

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        completions = [
            Completion(
                tuple(10 + place + 3 * n for n in range(2 + place)), None, "", "stop", step
            )
            for place in range(len(SCORES))
        ]
        draw = Draw(0, Prompt(row=0, content="prompt"), PROMPT)
        return [
            Group(
                draw,
                tuple(completions),
                tuple(tuple(Score(value) for value in row) for row in SCORES),
            )
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def made(
    kind: type[Any], model: Path, output: Path, *, trainer_args: dict[str, Any], **settings: Any
) -> Any:
    sizes = {
        "num_generations": 6,
        "per_device_train_batch_size": 6,
        "reward_weights": [1.0, 0.0],
    }
    trainer_args = {"constraints": Constraints(HELD, ConstraintSettings()), **trainer_args}
    settings = {"scale_rewards": "none", **sizes, **settings}
    return small_trainer(
        kind,
        model,
        output,
        Rounds(),
        rewards=("mine", "format"),
        trainer_args=trainer_args,
        **settings,
    )


def advantages(trainer: Any) -> Tensor:
    per_completion: Tensor = trainer._generate_and_score_completions([{"prompt": "tick"}] * 6)[
        "advantages"
    ]
    return per_completion


MEAN = sum(row[0] for row in SCORES) / 6
GATES = [torch.sigmoid(torch.tensor(row[0] - MEAN)).item() * (row[1] or 0) for row in SCORES]


def test_the_trainer_gates_rewards_before_the_estimator(model: Path, tmp_path: Path) -> None:
    """A completion that breaks the constraint counts in the mean, and one whose constraint is not known does not."""
    gated = advantages(
        made(
            PolicyGradientTrainer,
            model,
            tmp_path,
            trainer_args={"advantage": ESTIMATORS["crpg"]},
        )
    )
    mean = sum(GATES) / 5
    close(gated, [*(gate - mean for gate in GATES[:5]), 0.0])
    plain = advantages(
        made(
            PolicyGradientTrainer,
            model,
            tmp_path,
            trainer_args={"advantage": ESTIMATORS["crpg"], "constraints": None},
        )
    )
    assert plain[1] > 0 > gated[1]


def test_a_broken_constraint_costs_its_weight(model: Path, tmp_path: Path) -> None:
    trainer_args = {
        "advantage": ESTIMATORS["dr-grpo"],
        "constraints": Constraints(HELD, ConstraintSettings(by="lagrangian")),
    }
    totals = [2.0, 3.0 - 0.75, 1.0, 2.5, 0.5 - 0.75]
    mean = sum(totals) / 5
    close(
        advantages(made(PolicyGradientTrainer, model, tmp_path, trainer_args=trainer_args)),
        [*(total - mean for total in totals), 0.0],
    )


def test_the_pair_in_the_trainer(model: Path, tmp_path: Path) -> None:
    """At the start all ratios are 1: the loss is log 2, less lambda times the best one's mean log-probability."""
    trainer = made(
        OnlineDPOTrainer,
        model,
        tmp_path,
        trainer_args={"kind": "dpo", "likelihood": 0.1},
        beta=0.1,
        max_steps=1,
    )
    loss = trainer.training_step(trainer.model, [{"prompt": "tick"}] * 6, None)
    ids = Rounds().next_round(step=0, num_groups=1)[0].completions[3].token_ids
    logits = trainer.bare_model(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[
        0, len(PROMPT) - 1 : -1
    ]
    mean = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).mean()
    assert float(loss) == pytest.approx(0.693147 - 0.1 * mean.item(), abs=1e-5)


def test_what_reaches_a_constraint_exactly_keeps_it_whatever_its_reward(tmp_path: Path) -> None:
    """0.9 is less than 0.9 in float32, and a sigmoid of -100 is 0, which is what breaks a constraint."""

    class FarApart(Rounds):
        def next_round(self, *, step: int, num_groups: int) -> list[Group]:
            (group,) = super().next_round(step=step, num_groups=num_groups)
            scores = [(100.0, 0.9), (-100.0, 0.9), (0.0, 0.8)] * 2
            return [replace(group, scores_GR=tuple(tuple(map(Score, row)) for row in scores))]

    held = Constraints([Constraint(1, "format", 0.9, 0.1)], ConstraintSettings())
    trainer = small_trainer(
        OnlineDPOTrainer,
        write_tiny_model(tmp_path / "model"),
        tmp_path,
        FarApart(),
        rewards=("mine", "format"),
        trainer_args={"kind": "dpo", "constraints": held},
        reward_weights=[1.0, 0.0],
        beta=0.1,
        num_generations=6,
        per_device_train_batch_size=6,
    )
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 6)
    assert batch["kept"].tolist() == [1.0, 1.0, 0.0] * 2
