"""Functions of one's own in the trainer: the numbers of the built-in ones, errors with file and line, the resume."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ycore_cli.main import run as ycore

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from tests.tiny_model import write_tiny_model
from tests.trl.test_other_advantages import REWARDS, trainer
from ycore.advantages import ESTIMATORS
from ycore.config.learners import GroupConfig
from ycore.config.resolve import resolve
from ycore.errors import ConfigError
from ycore.trl.grpo import Trainer
from ycore.trl.own_functions import OwnFunction, check_own_functions
from ycore.types import Prompt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-functions.md"
TICKS = [{"prompt": "tick"}] * 8
AGAIN = '''
"""The built-in estimators, written again."""
import torch


def mean(values):
    return values.nansum() / (~values.isnan()).sum().clamp(min=1)


def deviation(values):
    counts = (~values.isnan()).sum()
    squares = (values - mean(values)).square().nansum()
    return (squares / (counts - 1).clamp(min=1)).sqrt()


def group(group):
    return (group.rewards - mean(group.rewards)) / (deviation(group.rewards) + 1e-4)


def dr_grpo(group):
    return group.rewards - mean(group.rewards)


def lite_ppo(group):
    return (group.rewards - mean(group.rewards)) / (deviation(group.batch_rewards) + 1e-4)


def reinforce_plus_plus_baseline(group):
    means = group.batch_rewards.nanmean(dim=1, keepdim=True)
    centred = group.batch_rewards - means
    return (group.rewards - mean(group.rewards)) / (deviation(centred) + 1e-4)


def maxrl(group):
    return (group.rewards - mean(group.rewards)) / mean(group.rewards)


def raft(group):
    best = group.rewards == group.rewards.nan_to_num(-torch.inf).max()
    return best.double() / best.sum()


def crpg(group):
    return group.rewards - mean(group.batch_rewards)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file of the page, in a folder outside of the repository."""
    path = tmp_path / "mine.py"
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path.write_text(text)
    return path


def written(tmp_path: Path, body: str) -> str:
    (tmp_path / "own.py").write_text(f"import torch\n\n\ndef own(group):\n    {body}\n")
    return f"{tmp_path / 'own.py'}:own"


def config_with(**settings: Any) -> GroupConfig:
    options = {"model": "m", "dataset": "d", "rewards": ["exact_answer"], "output": "o"}
    config = resolve(options={**options, "group_size": 4, **settings})
    assert isinstance(config, GroupConfig)
    return config


def check(**settings: Any) -> None:
    check_own_functions(config_with(**settings), Prompt(0, "2 + 2?", {"answer": "4"}))


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"remax", "rloo"}))
def test_an_estimator_written_again_gives_its_advantages_and_losses_to_the_bit(
    name: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    function = name.replace("++", "_plus_plus").replace("-", "_")
    functions = {"advantage": OwnFunction("advantage", f"{tmp_path / 'again.py'}:{function}")}
    assert_same(trainer(Trainer, model, tmp_path / "a", advantage=ESTIMATORS[name]),
                trainer(Trainer, model, tmp_path / "b", functions=functions))  # fmt: skip


def test_the_pages_rloo_is_the_built_in_one_to_the_bit(
    mine: Path, model: Path, tmp_path: Path
) -> None:
    functions = {"advantage": OwnFunction("advantage", f"{mine}:rloo")}
    assert_same(trainer(Trainer, model, tmp_path / "a", advantage=ESTIMATORS["rloo"]),
                trainer(Trainer, model, tmp_path / "b", functions=functions))  # fmt: skip


def assert_same(built_in: Any, own: Any) -> None:
    """The same advantages, and after two whole steps the same losses, gradients and weights."""
    batches = [made._generate_and_score_completions(TICKS) for made in (built_in, own)]
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
    assert built_in.has_gradient == own.has_gradient
    for made in (built_in, own):
        made.args.logging_steps = made.state.logging_steps = 1
        made.train()
    for key in ("loss", "grad_norm"):
        values = [[row[key] for row in made.state.log_history if key in row]
                  for made in (built_in, own)]  # fmt: skip
        assert values[0] == values[1] and len(values[0]) == 2 and any(values[0])
    pairs = zip(built_in.model.parameters(), own.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_an_advantage_by_token_is_learned_from(mine: Path, model: Path, tmp_path: Path) -> None:
    functions = {"advantage": OwnFunction("advantage", f"{mine}:early")}
    made = trainer(Trainer, model, tmp_path, functions=functions)
    batch = made._generate_and_score_completions(TICKS)
    rewards = torch.tensor(REWARDS)
    by_completion = ESTIMATORS["rloo"](rewards, ~rewards.isnan()).flatten()
    expected = torch.stack([by_completion, by_completion * 0.99], dim=1)
    torch.testing.assert_close(batch["advantages"], expected)


def test_a_group_has_what_the_page_says(model: Path, tmp_path: Path) -> None:
    body = (
        "assert [group.step, group.prompt.content] in ([0, 'prompt 0'], [0, 'prompt 1'])\n"
        "    assert group.completions[1].token_ids == (10, 12) and group.lengths.tolist() == [2] * 4\n"
        "    assert group.rewards_by_source['mine'].equal(group.rewards) or group.rewards.isnan().any()\n"
        "    assert group.batch_rewards.shape == (2, 4) and group.mask.shape == (4, 2)\n"
        "    return group.lengths"
    )
    functions = {"advantage": OwnFunction("advantage", written(tmp_path, body))}
    batch = trainer(
        Trainer, model, tmp_path, functions=functions
    )._generate_and_score_completions(TICKS)
    assert batch["advantages"].tolist() == [2, 2, 2, 0, 2, 2, 2, 2], "the fourth has no reward"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return group.rewards[0].nothing", r"own\.py:5 raised AttributeError: .*'nothing'"),
        ("return [1.0]", r"each of the group's 4 completions, .*\(4, 4\); it returned \(1,\)"),
        ("return ['a'] * 4", "no numbers: "),
        ("return group.rewards / 0", "not finite"),
    ],
)
def test_a_function_that_does_not_work_is_refused_before_the_run(
    body: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check(advantage=written(tmp_path, body))
    assert "own.py" in str(refused.value)


def test_losses_that_take_one_a_completion_refuse_advantages_by_token(mine: Path) -> None:
    check(advantage=f"{mine}:early")
    check(advantage=f"{mine}:rloo", preset="gmpo")
    with pytest.raises(ConfigError, match=r"gmpo takes one .*mine\.py:early has one a token"):
        check(advantage=f"{mine}:early", preset="gmpo")


@pytest.mark.parametrize(
    ("algorithm", "advantage", "said"),
    [
        ("grpo", "mine.py", r"file\.py:function; it is 'mine.py'"),
        ("grpo", "package.module:rloo", r"file\.py:function; it is 'package"),
        ("distill", "mine.py:rloo", "--advantage mine.py:rloo"),
    ],
)
def test_other_names_are_refused(algorithm: str, advantage: str, said: str) -> None:
    options = {"model": "m", "dataset": "d", "rewards": ["exact_answer"], "output": "o"}
    with pytest.raises(ConfigError, match=said):
        resolve(options={**options, "algorithm": algorithm, "teacher": "t",
                         "advantage": advantage})  # fmt: skip


@pytest.mark.slow
def test_a_run_with_a_file_of_ones_own_and_its_resume(
    mine: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["grpo", "--model", str(model), "--dataset", "task:addition?digits=1"]
    command += ["--reward", "length", "--advantage", f"{mine}:early", "--output", str(folder)]
    command += ["--engine", "transformers", "--steps", "2", "--prompts-per-step", "2"]
    command += ["--group-size", "4", "--max-tokens", "8", "--set", "dtype=float32"]
    assert ycore(command) == 0, capfd.readouterr().err
    assert f'"advantage {mine}:early"' in (folder / "identity.json").read_text()
    mine.write_text(mine.read_text().replace("0.99", "0.9"))
    capfd.readouterr()
    again = ["resume", str(folder), "--steps", "3"]
    assert ycore(again) == 2
    refused = capfd.readouterr().err
    assert re.search(r"\(advantage \S+mine\.py:early: .*--accept-changes", refused)
    assert ycore([*again, "--accept-changes"]) == 0
