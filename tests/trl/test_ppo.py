"""PPO's trainer: the critic's tensors, values, both gradients, the warm-up, and what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.config.learners import CriticSettings
from ycore.engine.weights import engine_weights
from ycore.errors import ConfigError, RunError
from ycore.run.claim import model_fingerprint
from ycore.run.files import RunFolder
from ycore.trl.ppo import NAME, VALUES, Trainer, start_from_reward_model
from ycore.trl.returns import whitened
from ycore.types import Completion, Draw, Group, Prompt, Score

PROMPT = (9, 8, 7)
SCORES = (1.0, 0.0, 0.25, None, 0.5, 1.0, 0.0, 0.75)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Rounds:
    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Return eight groups of one, of unequal lengths; every second completion was cut."""
        groups = []
        for place, score in enumerate(SCORES):
            ids = tuple(10 + place + 3 * n for n in range(2 + place % 4))
            completion = Completion(ids, None, "", "length" if place % 2 else "stop", step)
            draw = Draw(place, Prompt(row=place, content=f"prompt {place}"), PROMPT)
            groups.append(Group(draw, (completion,), ((Score(score),),)))
        return groups[:num_groups]


def made(
    model: Path, output: Path, *, lora: bool = True, kl_in: str = "reward", **settings: Any
) -> Trainer:
    """Make a trainer with a critic whose head is not zero, before its first step."""
    of_critic = CriticSettings.model_fields.keys() - {"max_grad_norm"}
    critic_args = {name: settings.pop(name) for name in list(settings) if name in of_critic}
    adapters = (
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    )
    critic = CriticSettings(**{"warmup_steps": 0, **critic_args})
    settings = {
        "loss_type": "dapo",
        "scale_rewards": "none",
        "max_steps": 4,
        "num_generations": 8,
        **settings,
    }
    settings = {"per_device_train_batch_size": 8, **settings}
    trainer_args = {"peft_config": adapters, "critic": critic, "base": model, "kl_in": kl_in}
    trainer = small_trainer(
        Trainer, model, output, Rounds(), trainer_args=trainer_args, alone=True, **settings
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in trainer.critic.trained.items():
            if "head" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return trainer


def step(trainer: Trainer) -> dict[str, Tensor]:
    """Run one round, forward and backward; return the batch that the loss had."""
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 8, None)
    return dict(trainer._buffered_inputs[0])


def places(batch: dict[str, Tensor]) -> list[int]:
    """Say which completion each row is; micro-batches are dealt by length."""
    return [int(first) - 10 for first in batch["completion_ids"][:, 0]]


def scores_of(batch: dict[str, Tensor]) -> Tensor:
    """Return them as (B, 1), 0 where there is none."""
    return torch.tensor([[SCORES[place] or 0.0] for place in places(batch)])


def plain(trainer: Trainer, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities, values (B, T + 1) and the mask by sequence, without packing and without padding."""
    width = batch["completion_ids"].size(1)
    logps, values = torch.zeros(8, width), torch.zeros(8, width + 1)
    for row in range(8):
        completion_ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        ids = torch.cat(
            [batch["prompt_ids"][row][batch["prompt_mask"][row].bool()], completion_ids]
        ).unsqueeze(0)
        start = ids.size(1) - len(completion_ids) - 1
        logits = trainer.bare_model(input_ids=ids).logits[0, start:-1]
        logps[row, : len(completion_ids)] = (
            logits.log_softmax(-1).gather(1, completion_ids.unsqueeze(1)).squeeze(1)
        )
        values[row, : len(completion_ids) + 1] = trainer.critic(input_ids=ids, use_cache=False)[
            VALUES
        ][0, start:]
    return logps, values, batch["value_mask"].bool()


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "every weight"])
def test_both_gradients_are_those_of_the_definition(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    trainer = made(model, tmp_path, lora=lora, lam=0.9, value_clip=0.05)
    batch = step(trainer)
    named = [
        (name, parameter)
        for name, parameter in trainer.bare_model.named_parameters()
        if parameter.requires_grad
    ]
    gradients = {
        name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None
    }
    assert any(name.startswith(NAME) for name in gradients) and any(
        not name.startswith(NAME) for name in gradients
    )
    trainer.bare_model.zero_grad()
    logps, values, mask = plain(trainer, batch)
    values = values[:, :-1]
    policy = -(logps * batch["advantages"])[mask].sum()
    near = batch["old_values"] + (values - batch["old_values"]).clamp(-0.05, 0.05)
    errors = torch.maximum(
        (values - batch["value_targets"]).square(), (near - batch["value_targets"]).square()
    )
    ((policy + errors[mask].sum() / 2) / batch["completion_mask"].sum()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in named:
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-6), name


def test_with_a_head_of_zeros_the_first_step_is_reinforce_over_tokens(
    model: Path, tmp_path: Path
) -> None:
    trainer = made(model, tmp_path)
    torch.nn.init.zeros_(trainer.critic.head.weight)
    torch.nn.init.zeros_(trainer.critic.head.bias)
    batch = step(trainer)
    expected = whitened(
        scores_of(batch).double() * batch["value_mask"],
        batch["value_mask"],
        lambda total: total,
    )
    assert torch.allclose(batch["advantages"].double(), expected, atol=1e-6)


def test_the_kl_is_in_the_reward_and_not_in_the_loss(model: Path, tmp_path: Path) -> None:
    """The reference is the base without adapters; the KL is k1 with both from the trainer's forward."""
    trainer = made(model, tmp_path, beta=0.5, whiten=False)
    with torch.no_grad():
        for name, parameter in trainer.bare_model.named_parameters():
            if "lora_B" in name and not name.startswith(NAME):
                parameter.add_(0.05)
    batch = step(trainer)
    assert "ref_per_token_logps" not in batch and trainer.beta == 0.5
    with torch.no_grad():
        logps, values, mask = plain(trainer, batch)
        with trainer.bare_model.disable_adapter():
            reference, _, _ = plain(trainer, batch)
    log_ratio = (logps - reference) * mask
    assert log_ratio.abs().max() > 1e-3, "the adapters moved the policy"
    positions_to_come = log_ratio.flip(1).cumsum(1).flip(1)
    expected = (scores_of(batch) - 0.5 * positions_to_come - values[:, :-1]) * mask
    assert torch.allclose(batch["advantages"], expected, atol=1e-5)


def test_neither_an_engine_nor_the_saved_policy_gets_the_critic(
    model: Path, tmp_path: Path
) -> None:
    for lora in (True, False):
        trainer = made(model, tmp_path, lora=lora, learning_rate=1e-2)
        policy = trainer.bare_model
        before = dict(engine_weights(policy, dtype=torch.float32))
        assert not any(NAME in name for name in before) and not any(
            NAME in name for name in policy.state_dict()
        )
        critic_ids = {id(parameter) for parameter in trainer.critic.trained.values()}
        shared = [
            parameter
            for parameter in trainer.critic.parameters()
            if id(parameter) not in critic_ids
        ]
        everything = {id(parameter) for parameter in trainer._policy_parameters}
        assert not critic_ids & everything, "nothing that is trained is shared"
        assert bool(shared) == lora and all(
            any(parameter is other for other in policy.parameters()) for parameter in shared
        )
        step(trainer)
        trainer.create_optimizer()
        for parameter in trainer._policy_parameters:
            parameter.grad = None
        trainer.optimizer.step()
        after = dict(engine_weights(policy, dtype=torch.float32))
        assert all(torch.equal(before[name], after[name]) for name in before), (
            "the critic moved, the policy did not"
        )
        if lora:  # the control: the critic's own tree has the same names, and other weights
            trained = {
                name: parameter
                for name, parameter in trainer.critic.backbone.named_parameters()
                if "lora_B" in name
            }
            assert any(weight.abs().max() > 0 for weight in trained.values())
        trainer.write_model(tmp_path / "model", dtype=torch.float32, merge=False)
        assert (tmp_path / "critic" / "critic.safetensors").is_file()
        assert not any(NAME in file.name for file in (tmp_path / "model").iterdir())


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_in_the_warm_up_only_the_critic_moves(
    model: Path, tmp_path: Path, max_grad_norm: float
) -> None:
    trainer = made(
        model,
        tmp_path,
        warmup_steps=1,
        lr_ratio=5.0,
        weight_decay=0.5,
        learning_rate=1e-2,
        max_grad_norm=max_grad_norm,
    )
    trainer.create_optimizer()
    rates = {group["lr"] for group in trainer.optimizer.param_groups if group["params"]}
    assert rates == {1e-2, 5e-2}
    before = [parameter.detach().clone() for parameter in trainer._policy_parameters]
    values = {
        name: parameter.detach().clone() for name, parameter in trainer.critic.trained.items()
    }
    step(trainer)
    norm = trainer._clip_grad_norm(trainer.model) if max_grad_norm else None
    trainer._get_grad_norm(trainer.model, grad_norm=norm)
    trainer.optimizer.step()
    assert all(
        torch.equal(parameter, old)
        for parameter, old in zip(trainer._policy_parameters, before, strict=True)
    )
    assert not any(
        parameter in trainer.optimizer.state for parameter in trainer._policy_parameters
    ), "no moment, and no step count"
    assert any(
        not torch.equal(parameter, values[name])
        for name, parameter in trainer.critic.trained.items()
    )
    # The control: a gradient of zeros lets the weights decay.
    for parameter in trainer._policy_parameters:
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    assert any(
        not torch.equal(parameter, old)
        for parameter, old in zip(trainer._policy_parameters, before, strict=True)
    )


def test_the_critic_draws_no_random_number(model: Path, tmp_path: Path) -> None:
    """Else adding a critic would change everything that is drawn after it."""
    from ycore.trl.ppo import add_critic

    trainer = made(model, tmp_path)
    state = torch.random.get_rng_state()
    add_critic(trainer.bare_model)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_bounded_head_stays_in_its_range(model: Path, tmp_path: Path) -> None:
    trainer = made(model, tmp_path, range=(-1.0, 3.0))
    with torch.no_grad():
        trainer.critic.head.weight.fill_(50.0)
        values = trainer.critic(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False)[VALUES]
        trainer.critic.head.weight.zero_()
        trainer.critic.head.bias.zero_()
        middle = trainer.critic(input_ids=torch.tensor([[1, 2]]), use_cache=False)[VALUES]
    assert (
        bool((values > -1).all())
        and bool((values < 3).all())
        and middle.tolist() == [[1.0, 1.0]]
    )


def test_a_saved_critic_is_read_again_and_a_damaged_one_refused(
    model: Path, tmp_path: Path
) -> None:
    trainer = made(model, tmp_path)
    trainer.critic.save(tmp_path)
    saved = {
        name: parameter.detach().clone() for name, parameter in trainer.critic.trained.items()
    }
    with torch.no_grad():
        for parameter in trainer.critic.trained.values():
            parameter.zero_()
    trainer.critic.load(tmp_path)
    assert all(
        torch.equal(parameter, saved[name])
        for name, parameter in trainer.critic.trained.items()
    )
    (tmp_path / "critic.safetensors").write_bytes(b"x" * 30)
    with pytest.raises(RunError, match="has no whole critic"):
        trainer.critic.load(tmp_path)
    (tmp_path / "critic.safetensors").unlink()
    with pytest.raises(RunError, match="has no whole critic"):
        trainer.critic.load(tmp_path)


def reward_run(
    folder: RunFolder, model: Path, *, r: int = 4, algorithm: str = "reward"
) -> torch.nn.Module:
    """Write what a run of `ycore reward` leaves for a critic; return the reward model, whose adapters are not zero."""
    bare = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    classifier = get_peft_model(
        bare, LoraConfig(r=r, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")
    )
    with torch.no_grad():
        for name, parameter in classifier.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    classifier.save_pretrained(folder.model / "adapter")
    folder.identity.write_text(json.dumps({"model": model_fingerprint(model)}))
    folder.config.write_text(json.dumps({"config": {"algorithm": algorithm}}))
    return classifier.eval()


def test_a_critic_begins_as_a_reward_model(model: Path, tmp_path: Path) -> None:
    """Its value after a completion's last token is the reward model's score of the whole."""
    run = RunFolder(tmp_path / "rm")
    run.model.mkdir(parents=True)
    classifier = reward_run(run, model)
    trainer = made(model, tmp_path / "own")
    ids = torch.tensor([[*PROMPT, 10, 13, 16]])
    with torch.no_grad():
        score = classifier(input_ids=ids).logits.item()
        assert trainer.critic(input_ids=ids, use_cache=False)[VALUES][
            0, -1
        ].item() != pytest.approx(score, abs=1e-2)
        start_from_reward_model(trainer.critic, run.root, base=model)
        assert trainer.critic(input_ids=ids, use_cache=False)[VALUES][
            0, -1
        ].item() == pytest.approx(score, abs=1e-5)


def test_a_reward_model_that_does_not_fit_is_refused_in_one_line(
    model: Path, tmp_path: Path
) -> None:
    trainer, run = made(model, tmp_path / "own"), RunFolder(tmp_path / "rm")
    run.model.mkdir(parents=True)

    def refused(message: str, base: Path = model) -> None:
        with pytest.raises(ConfigError) as caught:
            start_from_reward_model(trainer.critic, run.root, base=base)
        assert message in str(caught.value) and "\n" not in str(caught.value)

    refused("must be the folder of a finished run of `ycore reward`")
    reward_run(run, model, algorithm="grpo")
    refused("must be the folder of a finished run of `ycore reward`")
    reward_run(run, model)
    refused("began with another model", base=write_tiny_model(tmp_path / "other", seed=1))
    reward_run(run, model, r=2)
    refused("has adapters of r 2 and alpha 8, this run's are 4 and 8; say --set lora.r=2")
    (run.model / "adapter" / "adapter_model.safetensors").unlink()
    refused("has no trained weights in")


def test_several_steps_a_round_keep_the_rounds_values(model: Path, tmp_path: Path) -> None:
    trainer = made(model, tmp_path, num_iterations=2, learning_rate=1e-2, whiten=False)
    first = step(trainer)
    trainer.create_optimizer()
    trainer.optimizer.step()
    trainer.state.global_step = 1
    second = step(trainer)
    assert all(
        torch.equal(first[name], second[name])
        for name in ("advantages", "old_values", "value_targets")
    )
    assert trainer.position.micro_batches is None and trainer._step == 2
