"""`ycore rloo` says that its gradient is TRL's RLOOTrainer's over max_tokens: held to it, on the same sequences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.tiny_model import write_tiny_model
from ycore.advantages import ESTIMATORS
from ycore.config.presets import presets
from ycore.trl.importance import old_by_completion

GROUPS, GROUP_SIZE, MAX_TOKENS = 2, 4, 6


def built(trainer: Any, config: Any, model: Path, **settings: Any) -> Any:
    arguments = config(
        output_dir=str(model.parent / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        **settings,
    )
    rows = Dataset.from_dict({"prompt": ["one"] * GROUPS})
    made = trainer(model=str(model), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
                   train_dataset=rows)  # fmt: skip
    made.current_gradient_accumulation_steps = 1
    return made


def gradient(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()
    return torch.cat(
        [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.mark.parametrize("moved", [0.0, 0.15], ids=["first step of a round", "later step"])
def test_it_is_trls_gradient_over_max_tokens(model: Path, moved: float) -> None:
    """Also where the policy has moved since the round began, and some completions' ratios are clipped."""
    draw = torch.Generator().manual_seed(0)
    count, lengths = GROUPS * GROUP_SIZE, torch.tensor([1, 6, 3, 4, 2, 5, 6, 3])
    mask = (torch.arange(MAX_TOKENS) < lengths[:, None]).long()
    rewards = torch.rand(GROUPS, GROUP_SIZE, generator=draw)
    advantages = ESTIMATORS["rloo"](
        rewards, torch.ones_like(rewards, dtype=torch.bool)
    ).flatten()
    expected = rewards - (rewards.sum(1, keepdim=True) - rewards) / (GROUP_SIZE - 1)
    assert torch.allclose(advantages, expected.flatten(), atol=1e-6)
    inputs: dict[str, Any] = {
        "prompt_ids": torch.randint(6, 90, (count, 3), generator=draw),
        "prompt_mask": torch.ones(count, 3, dtype=torch.long),
        "completion_ids": torch.randint(6, 90, (count, MAX_TOKENS), generator=draw),
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    rloo = built(RLOOTrainer, RLOOConfig, model, beta=0.0)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], mask], 1)
    with torch.no_grad():
        logps = rloo._get_per_token_logps_and_entropies(rloo.model, ids, attention, MAX_TOKENS)[
            0
        ]
    old = logps + moved * torch.randn(logps.shape, generator=draw)
    theirs = gradient(rloo, {**inputs, "old_logps": (old * mask).sum(1)})
    settings = dict(presets()["rloo"].trl)
    trainer = built(GRPOTrainer, GRPOConfig, model, **settings)
    ours = gradient(
        trainer, {**inputs, "old_per_token_logps": old_by_completion(logps, old, mask)}
    )
    if moved:
        clipped = ((old - logps) * mask).sum(1).abs() > 0.25
        by_token = gradient(trainer, {**inputs, "old_per_token_logps": old})
        assert clipped.any() and not torch.allclose(by_token * MAX_TOKENS, theirs, atol=1e-3)
    assert theirs.abs().max() > 1e-3
    assert torch.allclose(ours * MAX_TOKENS, theirs, atol=1e-6)
