"""Pairs of a group: which they are, their losses against tables worked out by hand, and the trainer's gradient."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.trl.online_dpo import (
    Trainer,
    best_and_worst,
    margins_of,
    preference_losses,
    ranking_losses,
)
from ycore.types import Completion, Draw, Group, Prompt, Score

NAN = float("nan")
PROMPT = (9, 8, 7)
SCORES = ((0.25, 1.0, None, 0.0), (0.5, 0.5, 0.5, 0.5), (0.0, 0.5, 1.0, 0.5))


def test_the_best_and_the_worst_are_the_first_of_their_group() -> None:
    totals = torch.tensor(
        [[0.5, 1.0, NAN, 1.0], [2.0, 2.0, NAN, 2.0], [NAN] * 4, [3.0, 1.0, 1.0, 2.0]]
    )
    best, worst, differ = best_and_worst(totals)
    assert differ.tolist() == [True, False, False, True]
    assert (best[differ].tolist(), worst[differ].tolist()) == ([1, 0], [0, 1])
    margins = margins_of(torch.arange(16.0).view(4, 4) ** 2, totals)
    assert margins.tolist() == [1 - 0, 144 - 169]


@pytest.mark.parametrize(
    ("kind", "margin", "loss", "slope"),
    [
        ("dpo", 1.5, 0.620957, -0.046257),
        ("dpo", 0.0, 0.693147, -0.05),
        ("ipo", 1.5, 12.25, -7.0),
    ],
)
def test_the_loss_of_a_pair(kind: str, margin: float, loss: float, slope: float) -> None:
    """Log ratios 1 and -0.5, beta 0.1; and at the start, where both are 0."""
    margins = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    losses = preference_losses(margins, beta=0.1, kind=kind)
    (gradient,) = torch.autograd.grad(losses.sum(), margins)
    assert (losses.item(), gradient.item()) == (
        pytest.approx(loss, abs=1e-6),
        pytest.approx(slope, abs=1e-6),
    )


def test_the_ranking_of_a_group() -> None:
    """Means -1, -0.5, -2, -3: of the pairs in the wrong order, 0.5 (second over first), 1 (first over third), 1.5."""
    sums, lengths = torch.tensor([[-2.0, -1.0, -4.0, -6.0]] * 2), torch.full((2, 4), 2)
    totals = torch.tensor([[0.5, 0.0, 1.0, NAN], [0.5, 0.5, 0.5, 0.5]])
    assert ranking_losses(sums, lengths, totals).tolist() == pytest.approx(
        [0.5 + 1.0 + 1.5 + 4.0], abs=1e-6
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Rounds:
    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        groups = []
        for number, scores in enumerate(SCORES):
            completions = [
                Completion(
                    tuple(10 + 4 * number + place + 3 * n for n in range(2 + place)),
                    None,
                    "",
                    "stop",
                    step,
                )
                for place in range(4)
            ]
            draw = Draw(number, Prompt(row=number, content=f"prompt {number}"), PROMPT)
            groups.append(
                Group(draw, tuple(completions), tuple((Score(score),) for score in scores))
            )
        return groups


def made(model: Path, output: Path, kind: str, **settings: Any) -> Trainer:
    settings = {
        "beta": 0.0 if kind == "rrhf" else 0.1,
        "gradient_accumulation_steps": 3,
        **settings,
    }
    return small_trainer(
        Trainer,
        model,
        output,
        Rounds(),
        trainer_args={"kind": kind},
        scale_rewards="none",
        **settings,
    )


def log_probability(trainer: Trainer, ids: tuple[int, ...], like: Any = None) -> Tensor:
    whole = torch.tensor([[*PROMPT, *ids]])
    logits = (trainer.bare_model if like is None else like)(input_ids=whole).logits[
        0, len(PROMPT) - 1 : -1
    ]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).sum()


@pytest.mark.parametrize("kind", ["dpo", "ipo", "rrhf"])
def test_the_gradient_is_that_of_the_definition(model: Path, tmp_path: Path, kind: str) -> None:
    """Over three micro-batches of a group each, one of which has no pair; after a change of the policy."""
    trainer = made(model, tmp_path, kind)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.bare_model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    for _ in range(3):
        trainer.training_step(trainer.model, [{"prompt": "tick"}] * 12, None)
    parameters = [
        parameter for parameter in trainer.bare_model.parameters() if parameter.requires_grad
    ]
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in parameters
    ]
    trainer.model.zero_grad()
    total = torch.zeros(())
    for group, scores in zip(Rounds().next_round(step=0, num_groups=3), SCORES, strict=True):
        if len(set(scores)) == 1:
            continue
        ids = [completion.token_ids for completion in group.completions]
        known = [place for place in range(4) if scores[place] is not None]
        best = max(known, key=lambda place: scores[place] or 0)
        worst = min(known, key=lambda place: scores[place] or 0)
        if kind == "rrhf":
            logps = [log_probability(trainer, token_ids) for token_ids in ids]
            total = total - logps[best]
            for i in known:
                for j in known:
                    if (scores[i] or 0) < (scores[j] or 0):
                        total = total + (logps[i] / len(ids[i]) - logps[j] / len(ids[j])).clamp(
                            min=0
                        )
            continue
        ratios = [
            log_probability(trainer, ids[place])
            - log_probability(trainer, ids[place], trainer.ref_model).detach()
            for place in (best, worst)
        ]
        margin = ratios[0] - ratios[1]
        total = total + (
            -torch.nn.functional.logsigmoid(0.1 * margin)
            if kind == "dpo"
            else (margin - 5) ** 2
        )
    (total / 2).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(
            gradient, parameter.grad, atol=2e-5 * max(1, parameter.grad.abs().max())
        )
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients)
    if kind == "dpo":
        accuracies = trainer._metrics["train"]["ycore/pairs/accuracy"]
        assert len(accuracies) == 2 and all(accuracy in (0, 1) for accuracy in accuracies)


def test_at_the_start_the_loss_is_log_two(model: Path, tmp_path: Path) -> None:
    trainer = made(
        model, tmp_path, "dpo", per_device_train_batch_size=12, gradient_accumulation_steps=1
    )
    loss = trainer.training_step(trainer.model, [{"prompt": "tick"}] * 12, None)
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    "setting", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.01}]
)
def test_options_of_another_loss_leave_groups_whole(
    model: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """Losses that depend on who shares a micro-batch have random ones, in which a pair would be of two prompts."""
    trainer = made(model, tmp_path, "dpo", **setting)
    trainer.model.train()
    trainer._prepare_inputs([{"prompt": "tick"}] * 12)
    dealt = [batch["totals"].nan_to_num(-1).tolist() for batch in trainer._buffered_inputs]
    groups = [[-1.0 if score is None else score for score in scores] for scores in SCORES]
    assert sorted(dealt) == sorted(groups)
