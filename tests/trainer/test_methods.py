"""Every preset, estimator and group reward trains: two steps of the tiny model, written by transformers."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from tests.tiny_model import write_tiny_model
from ycore.config.presets import Advantage, presets
from ycore.config.resolve import resolve
from ycore.round.assemble import assemble
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.metrics import read_metrics
from ycore.sandbox import Level
from ycore.sandbox.level import level_refusal
from ycore.trainer.rollout_run import RolloutRun

# The tiny model writes noise: only a reward of its letters tells its completions apart.
SPREAD = """
def spread(completion_ids, **columns):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


SUMS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]


def trained(
    tmp_path: Path,
    model: Path,
    rewards: list[Any],
    *,
    rows: Sequence[Any] = SUMS,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The metrics of a run of two steps, in this process."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = RunFolder(tmp_path / "run")
    for path in (folder.root, folder.logs, folder.checkpoints):
        path.mkdir()
    config = resolve(
        options={
            "model": str(model),
            "dataset": str(tmp_path / "rows.jsonl"),
            "rewards": rewards,
            "output": str(folder.root),
            "prompts_per_step": 2,
            "group_size": 4,
            "max_tokens": 8,
            "steps": 2,
            "dtype": "float32",
            "engine": {"kind": "transformers"},
            "reward_workers": {"workers": 1},
            **settings,
            "trl": {
                "learning_rate": 1e-2,
                "gradient_checkpointing": False,
                **settings.get("trl", {}),
            },
        }
    )
    write_json_atomic(folder.config, {"config": config.model_dump(mode="json")})
    engines = {"kind": "transformers", "engines": [], "model": str(model), "max_model_len": 64}
    write_json_atomic(folder.root / "engines.json", engines)
    run = RolloutRun(assemble(folder.root))
    try:
        run.train()
    finally:
        run.close()
    metrics = read_metrics(folder.metrics)
    assert [row["step"] for row in metrics] == [1, 2]
    return metrics


@pytest.fixture
def spread(tmp_path: Path) -> str:
    (tmp_path / "their_rewards.py").write_text(SPREAD)
    return f"{tmp_path / 'their_rewards.py'}:spread"


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_trains(name: str, spread: str, model: Path, tmp_path: Path) -> None:
    has_critic = "critic" in presets()[name].run
    ppo: dict[str, Any] = (
        {"algorithm": "ppo", "critic": {"warmup_steps": 0}} if has_critic else {}
    )
    metrics = trained(tmp_path, model, [spread], preset=name, **ppo)
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert all(("ycore/critic/loss" in row) == has_critic for row in metrics)
    assert ("rewards/overlong/mean" in metrics[0]) == (name == "dapo")


@pytest.mark.parametrize(
    "name",
    sorted(
        {*get_args(Advantage)}
        - {"group", "dr-grpo", "lite-ppo", "reinforce++-baseline", "turn", "crpg"}
    ),
)
def test_an_estimator_that_no_preset_has_trains(
    name: str, spread: str, model: Path, tmp_path: Path
) -> None:
    assert all(
        row["grad_norm"] > 0 for row in trained(tmp_path, model, [spread], advantage=name)
    )


def test_a_constraint_is_kept_beside_a_reward(spread: str, model: Path, tmp_path: Path) -> None:
    """By CGPO's policy gradient with a KL in the loss; noise of a tiny model is not at most one word."""
    constraint = {"reward": "format", "args": {"pattern": r"\S*"}, "constraint": True}
    settings: dict[str, Any] = {"advantage": "crpg", "trl": {"beta": 0.2}}
    first, second = trained(tmp_path, model, [spread, constraint], **settings)
    assert first["grad_norm"] > 0 and second["grad_norm"] > 0
    assert first["ycore/violations/format"] > 0
    for row in (first, second):
        assert row["ycore/violations/format"] == pytest.approx(1 - row["rewards/format/mean"])


def test_ppo_trains_on_groups_of_one_and_saves_its_critic_beside_the_policy(
    spread: str, model: Path, tmp_path: Path
) -> None:
    """One completion a prompt and a warm-up of one step; its group teaches, although nothing is beside it."""
    sizes = {"prompts_per_step": 4, "group_size": 1, "checkpoint_every": 1}
    first, second = trained(
        tmp_path,
        model,
        [spread],
        algorithm="ppo",
        critic={"warmup_steps": 1},
        **sizes,
        trl={"beta": 0.05},
    )
    assert (
        first["grad_norm"] == 0
        and second["grad_norm"] > 0
        and first["ycore/critic/grad_norm"] > 0
    )
    assert first["ycore/sampling/drawn"] == second["ycore/sampling/drawn"] == 4
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "critic.safetensors").is_file()


@pytest.mark.parametrize("loss", ["dpo", "ipo", "rrhf"])
def test_pairs_of_the_policys_own_completions_train(
    loss: str, spread: str, model: Path, tmp_path: Path
) -> None:
    beta: dict[str, Any] = {"trl": {"beta": 0.0}} if loss == "rrhf" else {}
    metrics = trained(tmp_path, model, [spread], algorithm="online-dpo", loss_from=loss, **beta)
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert [("ycore/pairs/margin" in row) for row in metrics] == [loss != "rrhf"] * 2


@pytest.mark.parametrize("name", ["forward-kl", "js"])
def test_a_divergence_trains(name: str, spread: str, model: Path, tmp_path: Path) -> None:
    first, second = trained(tmp_path, model, [spread], divergence=name, trl={"beta": 0.1})
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 0


def test_similarity_and_the_references_probability_train(model: Path, tmp_path: Path) -> None:
    rewards = [
        "similarity",
        {"reward": "reference_probability", "args": {"debias": False}, "weight": 10.0},
    ]
    metrics = trained(tmp_path, model, rewards)
    assert all(row["grad_norm"] > 0 and row["ycore/masked"] == 0 for row in metrics)
    assert all(0 < row["rewards/reference_probability/mean"] < 1 for row in metrics)


def test_a_code_reward_trains(model: Path, tmp_path: Path) -> None:
    """The prompts leave a comment to write: noise of one line passes, noise that breaks the function does not."""
    if (answer := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(f"no namespaces here: {answer}")
    check = (
        "def check(candidate):\n    assert candidate(1) == {}\n    assert candidate(0) == {}\n"
    )
    rows = [
        {
            "prompt": f"def add(x):\n    return x + {n}  # ",
            "test": check.format(n + 1, n),
            "entry_point": "add",
        }
        for n in range(8)
    ]
    metrics = trained(
        tmp_path, model, [{"reward": "code", "args": {"timeout_s": 30.0}}, "length"], rows=rows
    )
    for row in metrics:
        assert row["ycore/masked"] == row["ycore/code/infra_errors"] == 0
        assert row["ycore/code/programs"] >= 8 and row["ycore/code/latency_s"] > 0
        assert 0 <= row["rewards/code/mean"] <= 1
        failed = sum(
            row[f"ycore/code/{name}"]
            for name in ("compile_errors", "run_errors", "timeouts", "memory")
        )
        assert row["ycore/code/passed"] + failed == row["ycore/code/programs"]
    assert sum(row["ycore/code/passed"] for row in metrics) > 0


def test_adapters_learn_on_a_base_in_4_bits(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    (tmp_path / "spread.py").write_text(SPREAD)
    rows = trained(
        tmp_path, model, [{"reward": f"{tmp_path / 'spread.py'}:spread"}], quantize="4bit"
    )
    assert len(rows) == 2 and all(
        math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows
    )
