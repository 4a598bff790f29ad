"""Estimators and losses beside GRPO's own, in the trainer: TRL's advantages replaced, GMPO's loss behind the seam."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.advantages import ESTIMATORS
from ycore.config.resolve import resolve
from ycore.errors import ConfigError
from ycore.trl.grpo import GMPORoundTrainer
from ycore.trl.policy_gradient import PolicyGradientTrainer, dataset_estimators
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

NAN = float("nan")
REWARDS = [[0.0, 1.0, 0.5, NAN], [1.0, 0.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Fixed:
    """A RoundSource with two groups, always the same; NaN is a completion that no reward could score."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        return [
            Group(
                Draw(number, Prompt(number, f"prompt {number}"), (9, 8)),
                tuple(
                    Completion((10, 11 + member), (-4.0, -4.0), "", "stop", step)
                    for member in range(4)
                ),
                tuple((Score(None if reward != reward else reward),) for reward in rewards),
            )
            for number, rewards in enumerate(REWARDS)
        ]


def trainer(
    kind: type[SeamGRPOTrainer], model: Path, output: Path, **trainer_args: Any
) -> SeamGRPOTrainer:
    settings = {"per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-2}
    return small_trainer(kind, model, output, Fixed(), trainer_args=trainer_args, **settings)


@pytest.mark.parametrize("name", ["rloo", "reinforce++-baseline", "maxrl"])
def test_the_trainer_learns_from_the_estimators_advantages(
    name: str, model: Path, tmp_path: Path
) -> None:
    made = trainer(SeamGRPOTrainer, model, tmp_path, advantage=ESTIMATORS[name])
    batch = made._generate_and_score_completions([{"prompt": "tick"}] * 8)
    rewards = torch.tensor(REWARDS)
    expected = ESTIMATORS[name](rewards, ~torch.isnan(rewards)).flatten()
    torch.testing.assert_close(batch["advantages"], expected)
    plain = trainer(SeamGRPOTrainer, model, tmp_path)._generate_and_score_completions(
        [{"prompt": "tick"}] * 8
    )
    assert not torch.allclose(batch["advantages"], plain["advantages"])


def test_each_dataset_has_its_own_estimator_among_its_own_groups(
    model: Path, tmp_path: Path
) -> None:
    """A deviation of the whole step is that of the dataset's groups alone."""

    class OfTwoDatasets(Fixed):
        def next_round(self, *, step: int, num_groups: int) -> list[Group]:
            groups = super().next_round(step=step, num_groups=num_groups)
            prompts = [
                replace(group.draw.prompt, dataset=name)
                for group, name in zip(groups, ("sums", "talk"), strict=True)
            ]
            return [
                replace(group, draw=replace(group.draw, prompt=prompt))
                for group, prompt in zip(groups, prompts, strict=True)
            ]

    config = resolve(
        options={
            "algorithm": "grpo",
            "model": "m",
            "output": "o",
            "rewards": ["exact_answer"],
            "dataset": [
                {"dataset": "sums.jsonl", "advantage": "rloo"},
                {"dataset": "talk.jsonl"},
            ],
            "advantage": "reinforce++-baseline",
        }
    )
    estimators = dataset_estimators(config)
    assert estimators == [
        (["sums.jsonl"], ESTIMATORS["rloo"]),
        (["talk.jsonl"], ESTIMATORS["reinforce++-baseline"]),
    ]
    named = [(["sums"], ESTIMATORS["rloo"]), (["talk"], ESTIMATORS["reinforce++-baseline"])]
    made = small_trainer(
        PolicyGradientTrainer,
        model,
        tmp_path,
        OfTwoDatasets(),
        trainer_args={"dataset_advantages": named},
        per_device_train_batch_size=8,
        max_steps=2,
    )
    batch = made._generate_and_score_completions([{"prompt": "tick"}] * 8)
    rewards = torch.tensor(REWARDS)
    expected = [
        estimate(rewards[row : row + 1], ~torch.isnan(rewards[row : row + 1]))
        for row, (_, estimate) in enumerate(named)
    ]
    torch.testing.assert_close(batch["advantages"], torch.cat(expected).flatten().float())
    together = ESTIMATORS["reinforce++-baseline"](rewards, ~torch.isnan(rewards))
    assert not torch.allclose(together[1], expected[1][0]), "the other dataset would count"


@pytest.mark.parametrize(
    ("algorithm", "keys", "way_out"),
    [
        ("grpo", {"advantage": "remax"}, "both are one of group"),
        ("grpo", {"advantage": "group", "part": "reinforce++"}, "both are one of group"),
        ("grpo", {"advantage": "group", "part": "best"}, "both are one of group"),
        ("ppo", {}, "which is for ycore grpo"),
        ("online-dpo", {}, "which is for ycore grpo"),
    ],
)
def test_advantages_by_dataset_that_cannot_be_are_refused(
    algorithm: str, keys: dict[str, Any], way_out: str
) -> None:
    part = keys.pop("part", "rloo")
    options = {
        "algorithm": algorithm,
        "model": "m",
        "output": "o",
        "rewards": ["exact_answer"],
        "dataset": [{"dataset": "a.jsonl", "advantage": part}, {"dataset": "b.jsonl"}],
        **keys,
    }
    with pytest.raises(ConfigError, match=way_out):
        resolve(options=options)


def test_remax_compares_with_each_prompts_own_greedy_completion(
    model: Path, tmp_path: Path
) -> None:
    class WithGreedy(Fixed):
        def next_round(self, *, step: int, num_groups: int) -> list[Group]:
            groups = super().next_round(step=step, num_groups=num_groups)
            return [
                replace(group, greedy_scores_R=(Score(score),))
                for group, score in zip(groups, [1.0, None], strict=True)
            ]

    made = trainer(SeamGRPOTrainer, model, tmp_path, advantage=ESTIMATORS["remax"])
    made.rounds = WithGreedy()
    batch = made._generate_and_score_completions([{"prompt": "tick"}] * 8)
    # the first prompt's greedy completion earned 1; the second's could not be scored: no baseline, nothing learned
    torch.testing.assert_close(
        batch["advantages"], torch.tensor([-1.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    )


def test_gmpo_trains_behind_the_seam(model: Path, tmp_path: Path) -> None:
    made = trainer(GMPORoundTrainer, model, tmp_path)
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    made.train()
    assert made.state.global_step == 2
    assert any(
        (old != new).any() for old, new in zip(before, made.model.parameters(), strict=True)
    )
