"""KL shapes in TRL's losses: with equal rewards the loss is the penalty alone, held to autograd of its definition."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.trl.grpo import GMPORoundTrainer
from ycore.trl.importance import DIVERGENCES
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

BETA = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class EqualRewards:
    """A RoundSource of one group whose rewards are all equal, so that every advantage is 0."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        completions = tuple(
            Completion((10 + member, 30, 7), None, "", "stop", step) for member in range(4)
        )
        return [Group(Draw(0, Prompt(0, "prompt"), (9, 8)), completions, ((Score(1.0),),) * 4)]


def trainer(
    kind: type[SeamGRPOTrainer], model: Path, output: Path, *, name: str, **trl: Any
) -> SeamGRPOTrainer:
    settings = {"max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "beta": BETA, **trl}
    return small_trainer(
        kind, model, output, EqualRewards(), trainer_args={"divergence": name}, **settings
    )


def moved_away(made: SeamGRPOTrainer) -> SeamGRPOTrainer:
    """The policy, no longer its own reference."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return made


def loss_and_slopes(made: SeamGRPOTrainer, loss: torch.Tensor) -> list[torch.Tensor]:
    return [
        loss.detach(),
        *torch.autograd.grad(loss, list(made.model.parameters()), allow_unused=False),
    ]


@pytest.mark.parametrize("name", list(DIVERGENCES))
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_loss_and_gradient_are_those_of_the_definition(
    name: str, loss_type: str, model: Path, tmp_path: Path
) -> None:
    made = moved_away(trainer(SeamGRPOTrainer, model, tmp_path, name=name, loss_type=loss_type))
    batch = made._generate_and_score_completions([{"prompt": "tick"}] * 4)
    made.current_gradient_accumulation_steps = 1
    got = loss_and_slopes(made, made._compute_loss(made.model, batch))

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    logps, _, _ = made._get_per_token_logps_and_entropies(
        made.model, ids, torch.ones_like(ids), 3
    )
    ratio = torch.exp(logps - logps.detach())
    wanted = BETA * (ratio * DIVERGENCES[name](batch["ref_per_token_logps"] - logps)).mean()
    for ours, theirs in zip(got, loss_and_slopes(made, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
    assert got[0] > 1e-3, "the policy has not moved: nothing was compared"


def test_the_rounds_own_reference_stays_as_it_was(model: Path, tmp_path: Path) -> None:
    """A round that serves several steps must not keep what one forward filled in."""
    made = moved_away(trainer(SeamGRPOTrainer, model, tmp_path, name="js"))
    batch = made._generate_and_score_completions([{"prompt": "tick"}] * 4)
    before = batch["ref_per_token_logps"].clone()
    made.current_gradient_accumulation_steps = 1
    made._compute_loss(made.model, batch)
    assert torch.equal(batch["ref_per_token_logps"], before)


@pytest.mark.parametrize("kind", [SeamGRPOTrainer, GMPORoundTrainer])
def test_training_pulls_the_policy_back_to_its_reference(
    kind: type[SeamGRPOTrainer], model: Path, tmp_path: Path
) -> None:
    made = moved_away(trainer(kind, model, tmp_path, name="forward-kl"))
    made.train()
    first, last = [row["kl"] for row in made.state.log_history if "kl" in row] or [0.0, 0.0]
    assert 0 < last < first
