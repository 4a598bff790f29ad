"""REINFORCE++ and DPPO's trust region inside TRL's loss."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.trl.grpo import ReinforceTrainer
from ycore.trl.importance import effective_share, region_weights
from ycore.trl.policy_gradient import PolicyGradientTrainer, prompt_weights
from ycore.types import Completion, Draw, Group, Prompt, Score

PROMPT = (9, 8, 7)
SCORES = (1.0, 0.0, 0.25, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Rounds:
    """One group of four; the engine's log-probabilities are flat."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        completions = []
        for place in range(4):
            ids = tuple(10 + place + 3 * n for n in range(2 + place))
            flat = tuple(-3.0 - 0.5 * n for n in range(len(ids)))
            completions.append(Completion(ids, flat, "", "stop", step))
        draw = Draw(0, Prompt(row=0, content="prompt"), PROMPT)
        return [Group(draw, tuple(completions), tuple((Score(score),) for score in SCORES))]


def made(
    model: Path,
    output: Path,
    *,
    trainer_args: dict[str, Any],
    kind: type[PolicyGradientTrainer] = PolicyGradientTrainer,
    **settings: Any,
) -> PolicyGradientTrainer:
    return small_trainer(
        kind,
        model,
        output,
        Rounds(),
        trainer_args=trainer_args,
        **{"loss_type": "dapo", **settings},
    )


def logps_of(trainer: PolicyGradientTrainer, batch: dict[str, Any]) -> torch.Tensor:
    logps = torch.zeros(batch["completion_ids"].shape)
    for row in range(len(logps)):
        completion_ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        ids = torch.cat([torch.tensor(PROMPT), completion_ids]).unsqueeze(0)
        logits = trainer.bare_model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
        logps[row, : len(completion_ids)] = (
            logits.log_softmax(-1).gather(1, completion_ids.unsqueeze(1)).squeeze(1)
        )
    return logps


def test_reinforce_plus_plus_whitens_over_tokens(model: Path, tmp_path: Path) -> None:
    """At the start the policy is its reference: the KL is 0, and the advantage that of the score."""
    trainer = made(
        model, tmp_path, trainer_args={"kl_in": "reward"}, kind=ReinforceTrainer, beta=0.1
    )
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
    batch = trainer._buffered_inputs[0]
    tokens = torch.tensor(
        [score for place, score in enumerate(SCORES) for _ in range(2 + place)]
    )
    expected = (tokens - tokens.mean()) / tokens.std()
    advantages = batch["advantages"][batch["completion_mask"].bool()]
    assert sorted(advantages.tolist()) == pytest.approx(sorted(expected.tolist()), abs=1e-5)
    assert trainer._metrics["train"]["kl"] == [pytest.approx(0, abs=1e-6)]


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
@pytest.mark.parametrize("iterations", [1, 2], ids=["one step", "two steps a round"])
def test_the_gradient_under_dppo_is_that_of_its_definition(
    model: Path, tmp_path: Path, name: str, iterations: int
) -> None:
    """Weight times advantage times d log p, anchored at the engine's log-probabilities in every step of the round."""
    trainer = made(
        model,
        tmp_path,
        trainer_args={"trust_region": name},
        num_iterations=iterations,
        learning_rate=1e-1,
    )
    for number in range(iterations):
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
        batch = trainer._buffered_inputs[0]
        parameters = [
            parameter
            for parameter in trainer.bare_model.parameters()
            if parameter.grad is not None
        ]
        gradients = [parameter.grad.clone() for parameter in parameters]
        trainer.model.zero_grad()
        logps, mask = logps_of(trainer, batch), batch["completion_mask"].bool()
        advantages = batch["advantages"].unsqueeze(1)
        weights = region_weights(
            name, logps.detach(), batch["sampling_per_token_logps"], advantages, mask
        )
        assert (weights[mask] > 1).any(), "the engine and the trainer differ"
        (-(weights * advantages * logps)[mask].sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None and torch.allclose(
                gradient, parameter.grad, atol=1e-5
            )
        if number == 0:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.5 * gradient
            trainer.state.global_step += 1
    shares = trainer._metrics["train"]["ycore/effective_share"]
    assert len(shares) == iterations and all(
        0 < share < 1 and math.isfinite(share) for share in shares
    )


def test_the_effective_share_is_told_by_the_lag_of_the_version_that_wrote_the_tokens(
    model: Path, tmp_path: Path
) -> None:
    """The engine is flat, so a token's weight is the trainer's own probability of it, up to a factor by its place."""
    trainer = made(model, tmp_path, trainer_args={"trust_region": "dppo-tv"})
    rounds = trainer.rounds

    class Crossed:
        def next_round(self, *, step: int, num_groups: int) -> list[Group]:
            (group,) = rounds.next_round(step=step, num_groups=num_groups)
            older = [
                completion.with_versions([(1, -2), (len(completion.token_ids), 0)])
                for completion in group.completions
            ]
            return [replace(group, completions=tuple(older))]

    trainer.rounds = Crossed()
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
    batch = trainer._buffered_inputs[0]
    with torch.no_grad():
        gaps = logps_of(trainer, batch) - batch["sampling_per_token_logps"]
    recorded = trainer._metrics["train"]
    shares = {name: values for name, values in recorded.items() if "effective_share/" in name}
    rest = batch["completion_mask"].bool()
    rest[:, 0] = False
    assert shares == {
        "ycore/effective_share/0": [pytest.approx(effective_share(gaps[rest]), rel=1e-4)],
        "ycore/effective_share/2": [pytest.approx(effective_share(gaps[:, 0]), rel=1e-4)],
    }
    assert recorded["ycore/staleness"] == [2.0]
    assert [trainer.rounds.effective_share] == recorded["ycore/effective_share"]


def second_step(
    trainer: PolicyGradientTrainer,
) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """The parameters and their gradients in a round's second step, before which the weights moved."""
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
    trainer.model.zero_grad()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.bare_model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
    parameters = [
        parameter for parameter in trainer.bare_model.parameters() if parameter.grad is not None
    ]
    gradients = [
        parameter.grad.clone() for parameter in parameters if parameter.grad is not None
    ]
    trainer.model.zero_grad()
    return parameters, gradients


def test_two_steps_a_round_clip_whole_completions(model: Path, tmp_path: Path) -> None:
    """The second step's loss is -min(R A, clip(R) A) a completion, R the product of its tokens' ratios; over tokens."""
    trainer_args = {"trust_region": "clip-completion"}
    correction = {"vllm_importance_sampling_correction": False}
    trainer = made(
        model,
        tmp_path,
        trainer_args=trainer_args,
        num_iterations=2,
        loss_type="dr_grpo",
        **correction,
    )
    parameters, gradients = second_step(trainer)
    batch = trainer._buffered_inputs[0]
    ratios = (
        ((logps_of(trainer, batch) - batch["old_per_token_logps"]) * batch["completion_mask"])
        .sum(1)
        .exp()
    )
    assert (ratios > 1.2).any() or (ratios < 0.8).any()
    losses = -torch.minimum(
        ratios * batch["advantages"], ratios.clamp(0.8, 1.2) * batch["advantages"]
    )
    (losses.sum() / 4 / trainer.max_completion_length).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(
            gradient, parameter.grad, atol=1e-6
        )


def decoupled(
    new: torch.Tensor, prox: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """Compute each token's objective (Hilton et al., arXiv 2110.00641), clipped around the proximal policy."""
    ratio = (new - prox).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (prox - behaviour).exp().clamp(max=3.0).detach() * clipped


def test_later_steps_of_a_round_are_decoupled_ppo(model: Path, tmp_path: Path) -> None:
    """The engine sampled, the weights at the round's start are the proximal policy, and the first step moved them."""
    new, prox, behaviour = (
        torch.tensor(pair).log() for pair in ([0.39, 0.45], [0.3, 0.5], [0.25, 0.7])
    )
    by_hand = [
        decoupled(new, prox, behaviour, torch.tensor(sign)).tolist() for sign in (1.0, -1.0)
    ]
    assert by_hand[0] == pytest.approx([1.44, 0.642857], abs=1e-6)
    assert by_hand[1] == pytest.approx([-1.56, -0.642857], abs=1e-6)

    correction = {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 3.0,
    }
    trainer = made(
        model, tmp_path, trainer_args={}, num_iterations=2, learning_rate=1e-1, **correction
    )
    parameters, gradients = second_step(trainer)
    batch = trainer._buffered_inputs[0]
    logps, mask = logps_of(trainer, batch), batch["completion_mask"].bool()
    old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
    assert ((old - sampled)[mask].abs() > 0.1).any() and ((logps - old)[mask].abs() > 0.2).any()
    terms = decoupled(logps, old, sampled, batch["advantages"].unsqueeze(1))
    (-terms[mask].sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(
            gradient, parameter.grad, atol=1e-6
        )


def test_an_average_over_prompts_gives_each_prompt_that_teaches_the_same_weight() -> None:
    """Tokens 2 + 4 of the first prompt, 1 + 1 of the second, and a third with no advantage: of 14 tokens, 2 prompts."""
    lengths = torch.tensor([2, 4, 1, 1, 3, 3])
    mask = (torch.arange(4) < lengths[:, None]).long()
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5], [0.0], [0.0]])
    weights = prompt_weights(advantages, mask, 2, lambda sums: sums)
    assert weights.tolist() == pytest.approx([14 / 2 / 6] * 2 + [14 / 2 / 2] * 2 + [1.0] * 2)
    terms = torch.rand(6, 4, dtype=torch.float64) * mask
    by_prompts = [terms[:2].sum() / 6, terms[2:4].sum() / 2]
    of_both = (terms * weights.unsqueeze(1))[:4].sum() / 14
    assert of_both.item() == pytest.approx(sum(by_prompts).item() / 2)


def test_the_trainer_averages_over_prompts(model: Path, tmp_path: Path) -> None:
    """One prompt: the same loss as over tokens. Two ranks: the sums are over both."""
    over = [
        made(model, tmp_path, trainer_args={"loss_average": name})
        for name in ("tokens", "prompts")
    ]
    losses = [
        float(trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None))
        for trainer in over
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[0] != 0
    two = made(model, tmp_path, trainer_args={"loss_average": "prompts"})
    two._add_up = lambda sums: (
        sums + torch.tensor([20.0, 1.0])
    )  # another rank's prompt of 20 tokens
    batch = two._generate_and_score_completions([{"prompt": "tick"}] * 4)
    alone = over[0]._generate_and_score_completions([{"prompt": "tick"}] * 4)["advantages"]
    tokens = int(batch["completion_mask"].sum())
    assert torch.allclose(batch["advantages"][:, 0], alone * (tokens + 20) / 2 / tokens)
