"""Distillation: the advantages against tables worked out by hand, their gradient, and the trainer's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from tests.tiny_model import write_tiny_model
from ycore.advantages import ESTIMATORS
from ycore.config.learners import DistillSettings
from ycore.errors import ConfigError
from ycore.trl import distill, forward
from ycore.trl.build import placeholder_rewards
from ycore.trl.distill import Trainer, log_ratios
from ycore.types import Completion, Draw, Group, Prompt, Score

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
TEACHER = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)
REVERSE = [0.085857, -0.101733, 0.053105, -0.037229]
"""The gradient of the reverse KL by the policy's logits, worked out by hand."""
PROMPT = (9, 8, 7)
TASK = (1.0, 0.0, 0.25, 0.5)


def test_the_advantage_of_each_token() -> None:
    """With the trainer's own probabilities of a sequence, and with those of its engine."""
    trainer, engine, teacher = (
        torch.tensor([p]).log() for p in ([0.5, 0.25, 0.8], [0.5, 0.2, 0.8], [0.4, 0.5, 0.9])
    )
    mask = torch.ones(1, 3)
    assert log_ratios(teacher, trainer, mask)[0].tolist() == pytest.approx(
        [-0.223144, 0.693147, 0.117783], abs=1e-6
    )
    assert log_ratios(teacher, engine, mask)[0].tolist() == pytest.approx(
        [-0.223144, 0.916291, 0.117783], abs=1e-6
    )
    assert (log_ratios(trainer, trainer, mask) == 0).all(), "a teacher that is the policy"


def test_what_is_masked_or_not_known_has_no_advantage() -> None:
    teacher = torch.tensor([[-1.0, torch.nan, -torch.inf, -1.0]])
    advantages = log_ratios(teacher, torch.full((1, 4), -2.0), torch.tensor([[1, 1, 1, 0]]))
    assert advantages.tolist() == [[1, 0, 0, 0]]


def gradient(loss: Callable[[Tensor], Tensor]) -> list[float]:
    """By the policy's logits."""
    logits = POLICY.log().requires_grad_(True)
    (slopes,) = torch.autograd.grad(loss(logits.log_softmax(0)), logits)
    return [float(slope) for slope in slopes]


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over every token. The estimate itself as a loss has none, which is why it is an advantage."""
    mask = torch.ones(1, 4)
    advantages = log_ratios(TEACHER.log().unsqueeze(0), POLICY.log().unsqueeze(0), mask)[0]
    assert (POLICY * advantages).sum().item() == pytest.approx(-0.051430, abs=1e-6)
    assert gradient(lambda logps: -(POLICY * advantages * logps).sum()) == pytest.approx(
        REVERSE, abs=1e-6
    )
    by_definition = gradient(lambda logps: (logps.exp() * (logps - TEACHER.log())).sum())
    assert by_definition == pytest.approx(REVERSE, abs=1e-6)
    k1_as_a_loss = gradient(lambda logps: (POLICY * (logps - TEACHER.log())).sum())
    assert k1_as_a_loss == pytest.approx([0, 0, 0, 0], abs=1e-12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Rounds:
    """One group of four; the engine's log-probabilities are flat, and the teacher's differ by `shift` of the place."""

    def __init__(self, shift: Callable[[int, int], float | None]) -> None:
        self.shift = shift

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        completions, scores = [], []
        for place, task in enumerate(TASK):
            ids = tuple(10 + place + 3 * n for n in range(2 + place))
            flat = tuple(-3.0 - 0.5 * n for n in range(len(ids)))
            shifts = [self.shift(place, n) for n in range(len(ids))]
            completions.append(Completion(ids, flat, "", "stop", step))
            taught = tuple(
                logprob + by for logprob, by in zip(flat, shifts, strict=True) if by is not None
            )
            scores.append((Score(0.0, logprobs=taught) if taught else Score(None), Score(task)))
        return [
            Group(
                Draw(0, Prompt(row=0, content="prompt"), PROMPT),
                tuple(completions),
                tuple(scores),
            )
        ]


def made(
    model: Path, output: Path, rounds: Rounds, *, weights: list[float], **trainer_args: Any
) -> Trainer:
    trainer = Trainer(
        model=str(model),
        reward_funcs=placeholder_rewards(["teacher", "task"]),
        args=GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            report_to="none",
            num_generations=4,
            per_device_train_batch_size=4,
            bf16=False,
            gradient_checkpointing=False,
            loss_type="dapo",
            scale_rewards="none",
            reward_weights=weights,
            vllm_importance_sampling_correction=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * 4}),
        processing_class=AutoTokenizer.from_pretrained(model),
        teachers=[0],
        **trainer_args,
    )
    trainer.rounds = rounds
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def step(trainer: Trainer) -> tuple[float, dict[str, Tensor], float]:
    """The loss, the batch, and the largest gradient."""
    loss = trainer.training_step(trainer.model, [{"prompt": "tick"}] * 4, None)
    gradients = [
        parameter.grad
        for parameter in trainer.bare_model.parameters()
        if parameter.grad is not None
    ]
    return (
        float(loss),
        dict(trainer._buffered_inputs[0]),
        max(float(grad.abs().max()) for grad in gradients),
    )


def by_place(batch: dict[str, Tensor]) -> dict[int, list[float]]:
    rows = zip(
        batch["completion_ids"],
        batch["completion_mask"].bool(),
        batch["advantages"],
        strict=True,
    )
    return {int(ids[0]) - 10: advantages[mask].tolist() for ids, mask, advantages in rows}


def test_a_teacher_that_is_the_policy_leaves_no_loss_and_no_gradient(
    model: Path, tmp_path: Path
) -> None:
    trainer = made(model, tmp_path, Rounds(lambda place, n: 0.0), weights=[1.0, 0.0])
    loss, _, largest = step(trainer)
    assert (loss, largest) == (0, 0)
    assert trainer._metrics["train"]["ycore/teacher/kl"] == [0]


def test_teacher_and_task_are_added_by_weight(model: Path, tmp_path: Path) -> None:
    """One completion that the teacher could not score has the task's advantage only."""

    def shift(place: int, n: int) -> float | None:
        return None if place == 3 else 0.1 * (place + 1) - 0.05 * n

    trainer = made(
        model, tmp_path, Rounds(shift), weights=[2.0, 0.5], advantage=ESTIMATORS["rloo"]
    )
    _, batch, largest = step(trainer)
    mean = sum(TASK) / 4
    for place, advantages in by_place(batch).items():
        task = 0.5 * (TASK[place] - mean) * 4 / 3
        expected = [task + 2 * (shift(place, n) or 0) for n in range(2 + place)]
        assert advantages == pytest.approx(expected, abs=1e-6)
    assert largest > 0
    known = [shift(place, n) or 0 for place in range(3) for n in range(2 + place)]
    assert trainer._metrics["train"]["ycore/teacher/kl"] == [
        pytest.approx(-sum(known) / len(known), abs=1e-6)
    ]


def test_the_gradient_is_that_of_the_definition(model: Path, tmp_path: Path) -> None:
    trainer = made(
        model, tmp_path, Rounds(lambda place, n: 0.3 * place - 0.2 * n), weights=[1.0, 0.0]
    )
    _, batch, _ = step(trainer)
    parameters = [
        parameter for parameter in trainer.bare_model.parameters() if parameter.grad is not None
    ]
    gradients = [parameter.grad.clone() for parameter in parameters]
    trainer.model.zero_grad()
    total, count = torch.zeros(()), 0
    for place, advantages in by_place(batch).items():
        completion_ids = torch.tensor([10 + place + 3 * n for n in range(2 + place)])
        ids = torch.cat([torch.tensor(PROMPT), completion_ids]).unsqueeze(0)
        logits = trainer.bare_model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, completion_ids.unsqueeze(1)).squeeze(1)
        total, count = (
            total - (logps * torch.tensor(advantages)).sum(),
            count + len(completion_ids),
        )
    (total / count).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(
            gradient, parameter.grad, atol=1e-6
        )


# -- exact divergences, with the teacher in the trainer ----------------------------------------------------------------

EXACT = [
    DistillSettings(divergence="reverse-kl"),
    DistillSettings(divergence="forward-kl"),
    DistillSettings(divergence="js", beta=0.3),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, whose vocabulary is padded to 8 tokens more, and whose distributions are not flat."""
    folder = write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)
    other = AutoModelForCausalLM.from_pretrained(folder)
    other.resize_token_embeddings(other.config.vocab_size + 8, mean_resizing=False)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    other.save_pretrained(folder)
    return folder


def taught(place: int, n: int) -> float | None:
    """The last completion is not the teacher's to teach."""
    return None if place == 3 else 0.0


def defined(exact: DistillSettings, p: Tensor, q: Tensor) -> Tensor:
    def kl(probs: Tensor, other_probs: Tensor) -> Tensor:
        return (probs * (probs.log() - other_probs.log())).sum(-1)

    middle = exact.beta * q + (1 - exact.beta) * p
    return {
        "reverse-kl": kl(p, q),
        "forward-kl": kl(q, p),
        "js": exact.beta * kl(q, middle) + (1 - exact.beta) * kl(p, middle),
    }[exact.divergence]


@pytest.mark.parametrize("exact", EXACT, ids=lambda exact: exact.divergence)
def test_the_exact_loss_and_gradient_are_those_of_the_definition(
    exact: DistillSettings,
    model: Path,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By autograd on whole logits, sequence by sequence; the trainer has the logits of 3 tokens at a time."""
    rows = []
    tile = forward._logits
    monkeypatch.setattr(forward, "TILE", 3)
    monkeypatch.setattr(
        forward,
        "_logits",
        lambda hidden, *rest: (rows.append(len(hidden)), tile(hidden, *rest))[1],
    )
    trainer = made(
        model, tmp_path, Rounds(taught), weights=[0.5, 0.0], exact=exact, folders=[teacher]
    )
    loss, _, _ = step(trainer)
    assert rows and max(rows) == 3
    parameters = [
        parameter for parameter in trainer.bare_model.parameters() if parameter.grad is not None
    ]
    gradients = [parameter.grad.clone() for parameter in parameters]
    trainer.model.zero_grad()
    other, total, seen = AutoModelForCausalLM.from_pretrained(teacher), torch.zeros(()), []
    for place in range(3):
        completion_ids = torch.tensor([10 + place + 3 * n for n in range(2 + place)])
        ids = torch.cat([torch.tensor(PROMPT), completion_ids]).unsqueeze(0)
        logits = trainer.bare_model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
        theirs = (
            other(input_ids=ids).logits[0, len(PROMPT) - 1 : -1, : logits.size(-1)].detach()
        )
        seen += defined(exact, logits.softmax(-1), theirs.softmax(-1))
    total = (
        0.5 * torch.stack(seen).sum() / (2 + 3 + 4 + 5)
    )  # the tokens of the fourth completion count too
    assert loss == pytest.approx(total.item(), abs=1e-6) and loss > 0.001
    metric = trainer._metrics["train"]["ycore/teacher/divergence"]
    assert metric == [pytest.approx(torch.stack(seen).mean().item(), abs=1e-6)]
    total.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(
            gradient, parameter.grad, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("exact", EXACT, ids=lambda exact: exact.divergence)
def test_an_exact_teacher_that_is_the_policy_leaves_no_loss_and_no_gradient(
    exact: DistillSettings, model: Path, tmp_path: Path
) -> None:
    trainer = made(
        model, tmp_path, Rounds(taught), weights=[1.0, 0.0], exact=exact, folders=[model]
    )
    loss, _, largest = step(trainer)
    assert (loss, largest) == (0, 0)
    assert not any("teacher" in name for name in trainer.model.state_dict())


def test_an_exact_divergence_and_rewards_are_added_by_weight(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    """The gradient of both is the sum of the gradients of each alone."""
    gradients = []
    for weights in ([0.5, 0.0], [0.0, 2.0], [0.5, 2.0]):
        trainer_args = {
            "exact": EXACT[1],
            "folders": [teacher],
            "advantage": ESTIMATORS["rloo"],
        }
        trainer = made(model, tmp_path, Rounds(taught), weights=weights, **trainer_args)
        step(trainer)
        gradients.append(
            torch.cat(
                [
                    parameter.grad.flatten()
                    for parameter in trainer.bare_model.parameters()
                    if parameter.grad is not None
                ]
            )
        )
    alone, rewards, both = gradients
    assert (
        torch.allclose(both, alone + rewards, rtol=0, atol=1e-6)
        and alone.any()
        and rewards.any()
    )


def test_a_teacher_that_caps_its_logits_is_refused(model: Path, tmp_path: Path) -> None:
    capped = AutoModelForCausalLM.from_pretrained(model)
    capped.config.final_logit_softcapping = 30.0
    capped.save_pretrained(tmp_path / "capped")
    with pytest.raises(
        ConfigError, match=r"caps or scales its logits; leave distill\.divergence out"
    ):
        made(
            model,
            tmp_path,
            Rounds(taught),
            weights=[1.0, 0.0],
            exact=EXACT[0],
            folders=[tmp_path / "capped"],
        )


def test_a_teacher_whose_attention_cannot_be_packed_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        distill, "path_of", lambda teacher: None
    )  # for example one with sliding windows
    with pytest.raises(
        ConfigError, match=r"cannot both be packed; leave distill\.divergence out"
    ):
        made(
            model, tmp_path, Rounds(taught), weights=[1.0, 0.0], exact=EXACT[0], folders=[model]
        )
