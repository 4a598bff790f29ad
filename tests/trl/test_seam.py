"""The seam around TRL's numbers asks for rounds, and records the metrics of a step."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import GRPOConfig

from tests.tiny_model import write_tiny_model
from ycore.trl import seam
from ycore.trl.batches import flatten, token_lags
from ycore.trl.build import placeholder_rewards
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

GROUP_SIZE = 4
VOCABULARY = 102
GAP = "ycore/logprob_gap"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model with its embedding, and so its tied head, at zero: every token has the same probability."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(loaded.get_input_embeddings().weight)
    assert loaded.config.vocab_size == VOCABULARY
    loaded.save_pretrained(folder)
    return folder


class Once:
    """A RoundSource that gives these groups."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.asked: list[tuple[int, int]] = []

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        self.asked.append((step, num_groups))
        return self.groups


def group(
    position: int, *, gap: float | None, version: int = 0, rewards: tuple[float | None, ...]
) -> Group:
    """Make a group of unequal lengths, by an engine that was off by `gap` at every token."""
    flat = -math.log(VOCABULARY)
    completions = []
    for member in range(GROUP_SIZE):
        ids = tuple(10 + position + member + n for n in range(member + 2))
        completions.append(
            Completion(
                ids, None if gap is None else (flat + gap,) * len(ids), "", "stop", version
            )
        )
    prompt = Prompt(row=position, content=f"prompt {position}")
    return Group(
        Draw(position, prompt, (9, 8)),
        tuple(completions),
        tuple((Score(value),) for value in rewards),
    )


def trained(model: Path, output: Path, groups: list[Group], **settings: Any) -> SeamGRPOTrainer:
    """Return a trainer after the forward and backward of one round."""
    trainer = SeamGRPOTrainer(
        model=str(model),
        reward_funcs=placeholder_rewards(["mine"]),
        args=GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            report_to="none",
            num_generations=GROUP_SIZE,
            **{
                "bf16": False,
                "gradient_checkpointing": False,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 1,
                **settings,
            },
        ),
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.rounds = Once(groups)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    for _ in range(trainer.args.steps_per_generation * trainer.num_iterations):
        trainer.training_step(trainer.model, [{"prompt": "tick"}] * 8, None)
    return trainer


def metric(trainer: SeamGRPOTrainer, name: str) -> list[float]:
    return list(trainer._metrics["train"].get(name, []))


PLAIN: tuple[float | None, ...] = (0.0, 1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    "settings", [{}, {"num_iterations": 2}], ids=["one step", "two steps a round"]
)
def test_the_gap_is_measured_on_every_round(
    model: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    groups = [group(n, gap=0.5, rewards=PLAIN) for n in range(2)]
    assert metric(trained(model, tmp_path, groups, **settings), GAP) == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    "settings", [{}, {"num_iterations": 2}], ids=["one step", "two steps a round"]
)
def test_groups_left_over_from_an_older_policy_are_not_in_the_gap(
    model: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    groups = [
        group(0, gap=2.0, version=-1, rewards=PLAIN),
        group(1, gap=0.5, version=0, rewards=PLAIN),
    ]
    trainer = trained(model, tmp_path, groups, **settings)
    assert metric(trainer, GAP) == [pytest.approx(0.5)]
    assert metric(trainer, "ycore/stale_gap") == [pytest.approx(2.0)]
    assert metric(trainer, "ycore/staleness") == [0.5]


def test_each_token_lags_behind_by_the_version_that_wrote_it() -> None:
    whole = group(0, gap=0.0, version=7, rewards=PLAIN)
    crossed = whole.completions[2].with_versions([(1, 4), (3, 6), (4, 7)])
    completions = (*whole.completions[:2], crossed, whole.completions[3])
    lags = token_lags(flatten([replace(whole, completions=completions)]), 6, step=7)
    assert lags.tolist() == [[0] * 6, [0] * 6, [3, 1, 1, 0, 0, 0], [0] * 6]


def test_without_engine_logprobs_there_is_no_gap_and_no_correction(
    model: Path, tmp_path: Path
) -> None:
    trainer = trained(model, tmp_path, [group(n, gap=None, rewards=PLAIN) for n in range(2)])
    assert metric(trainer, GAP) == []
    assert not trainer.use_vllm


def test_the_mean_importance_weight_is_over_real_tokens(model: Path, tmp_path: Path) -> None:
    """The engine is twice as sure as the trainer: a real token weighs a half, and padding, at 1, does not count."""
    groups = [group(n, gap=math.log(2), rewards=PLAIN) for n in range(2)]
    trainer = trained(model, tmp_path, groups, vllm_importance_sampling_mode="token_truncate")
    assert metric(trainer, "sampling/importance_sampling_ratio/mean") == [pytest.approx(0.5)]
    assert trainer.vllm_importance_sampling_correction, (
        "the switch is back on after the batch was built"
    )


def test_rewards_are_the_rounds_and_masked_ones_stay_out_of_the_mean(
    model: Path, tmp_path: Path
) -> None:
    groups = [
        group(0, gap=0.0, rewards=(1.0, 0.0, None, 0.5)),
        group(1, gap=0.0, rewards=(None, None, None, None)),
    ]
    trainer = trained(model, tmp_path, groups)
    assert metric(trainer, "reward") == [pytest.approx(0.5)]
    assert metric(trainer, "rewards/mine/mean") == [pytest.approx(0.5)]
    assert trainer.rounds.asked == [(0, 2)]  # type: ignore[attr-defined]


def test_a_reference_whose_head_gives_no_entropies_trains(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and under ZeRO-3, TRL's own heads score; the one that it gives the reference has no entropies."""
    monkeypatch.setattr(seam, "add_compact_head", lambda *_args, **_settings: None)
    trainer = trained(
        model, tmp_path, [group(n, gap=0.0, rewards=PLAIN) for n in range(2)], beta=0.1
    )
    assert trainer.ref_model is not None and trainer.packed_by == "segments"
    assert metric(trainer, "kl") == [pytest.approx(0.0, abs=1e-6)]


def test_the_reference_is_stored_in_the_dtype_it_computes_in(
    model: Path, tmp_path: Path
) -> None:
    trainer = trained(
        model,
        tmp_path,
        [group(n, gap=0.0, rewards=PLAIN) for n in range(2)],
        beta=0.1,
        bf16=True,
    )
    assert {parameter.dtype for parameter in trainer.ref_model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.bare_model.parameters()} == {torch.float32}


def test_gradients_are_the_same_with_checkpointing(model: Path, tmp_path: Path) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        groups = [group(n, gap=0.0, rewards=PLAIN) for n in range(2)]
        trainer = trained(model, tmp_path, groups, gradient_checkpointing=checkpointing)
        return {
            name: parameter.grad for name, parameter in trainer.bare_model.named_parameters()
        }

    with_checkpointing, without = gradients(True), gradients(False)
    for name, expected in without.items():
        torch.testing.assert_close(with_checkpointing[name], expected, rtol=1e-5, atol=1e-7)


def test_a_placeholder_reward_is_never_asked() -> None:
    (reward,) = placeholder_rewards(["mine"])
    with pytest.raises(AssertionError, match="'mine' is earned in the round"):
        reward(completions=["a"])
