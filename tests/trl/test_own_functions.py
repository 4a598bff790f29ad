"""Functions of one's own in the trainer: the numbers of the built-in ones, errors with file and line, the resume."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ycore_cli.main import run as ycore

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from tests.trl.test_other_advantages import REWARDS, Fixed, trainer
from ycore.advantages import ESTIMATORS
from ycore.config.learners import GroupConfig
from ycore.config.resolve import resolve
from ycore.errors import ConfigError
from ycore.run.metrics import read_metrics
from ycore.trl.own_functions import OwnFunction, check_own_functions
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.types import Group, Prompt

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


def on_page(definition: str) -> str:
    """Return the page's file that has a definition."""
    texts = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = [text for text in texts if definition in text]
    return text


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Write the file of the page in a folder outside of the repository."""
    path = tmp_path / "mine.py"
    path.write_text(on_page("def rloo"))
    return path


def written(tmp_path: Path, body: str, *, of: str = "group") -> str:
    (tmp_path / "own.py").write_text(f"import torch\n\n\ndef own({of}):\n    {body}\n")
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
    assert_same(trainer(PolicyGradientTrainer, model, tmp_path / "a", advantage=ESTIMATORS[name]),
                trainer(PolicyGradientTrainer, model, tmp_path / "b", functions=functions))  # fmt: skip


def test_the_pages_rloo_is_the_built_in_one_to_the_bit(
    mine: Path, model: Path, tmp_path: Path
) -> None:
    functions = {"advantage": OwnFunction("advantage", f"{mine}:rloo")}
    assert_same(trainer(PolicyGradientTrainer, model, tmp_path / "a", advantage=ESTIMATORS["rloo"]),
                trainer(PolicyGradientTrainer, model, tmp_path / "b", functions=functions))  # fmt: skip


def assert_same(built_in: Any, custom: Any) -> None:
    """Compare advantages, and after two whole steps losses, gradients and weights."""
    batches = [made._generate_and_score_completions(TICKS) for made in (built_in, custom)]
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
    assert built_in.has_gradient == custom.has_gradient
    for made in (built_in, custom):
        made.args.logging_steps = made.state.logging_steps = 1
        made.train()
    for key in ("loss", "grad_norm"):
        values = [[row[key] for row in made.state.log_history if key in row]
                  for made in (built_in, custom)]  # fmt: skip
        assert values[0] == values[1] and len(values[0]) == 2 and any(values[0])
    pairs = zip(built_in.model.parameters(), custom.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_an_advantage_by_token_is_learned_from(mine: Path, model: Path, tmp_path: Path) -> None:
    functions = {"advantage": OwnFunction("advantage", f"{mine}:early")}
    made = trainer(PolicyGradientTrainer, model, tmp_path, functions=functions)
    batch = made._generate_and_score_completions(TICKS)
    rewards = torch.tensor(REWARDS)
    by_completion = ESTIMATORS["rloo"](rewards, ~rewards.isnan()).flatten()
    expected = torch.stack([by_completion, by_completion * 0.99], dim=1)
    torch.testing.assert_close(batch["advantages"], expected)


def test_a_group_has_what_the_page_says(model: Path, tmp_path: Path) -> None:
    body = (
        "assert [group.step, group.prompt.content] in ([0, 'prompt 0'], [0, 'prompt 1'])\n"
        "    assert group.completions[1].token_ids == (10, 12) and group.mask.sum(1).tolist() == [2] * 4\n"
        "    assert group.rewards_by_source['mine'].equal(group.rewards) or group.rewards.isnan().any()\n"
        "    assert group.batch_rewards.shape == (2, 4) and group.mask.shape == (4, 2)\n"
        "    return group.mask.sum(1)"
    )
    functions = {"advantage": OwnFunction("advantage", written(tmp_path, body))}
    batch = trainer(
        PolicyGradientTrainer, model, tmp_path, functions=functions
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


def keeping(tmp_path: Path, body: str) -> dict[str, Any]:
    return {"functions": {"keep": OwnFunction("keep", written(tmp_path, body, of="groups"))}}


def test_what_is_left_out_has_no_advantage_and_counts_nowhere(
    model: Path, tmp_path: Path
) -> None:
    made = trainer(PolicyGradientTrainer, model, tmp_path,
                   **keeping(tmp_path, "return [[0, 1, 2, 1], [1, 1, 1, 1]]"))  # fmt: skip
    made.model.train()
    batch = made._generate_and_score_completions(TICKS)
    rewards = torch.tensor(REWARDS)
    rewards[0, 0] = torch.nan
    expected = ESTIMATORS["group"](rewards, ~rewards.isnan()).flatten()
    expected[2] *= 2
    torch.testing.assert_close(batch["advantages"], expected)
    assert made._metrics["train"]["ycore/kept"] == [7 / 8]


@pytest.mark.parametrize("advantage", ["group", "rloo"])
def test_to_keep_everything_changes_nothing(
    advantage: str, model: Path, tmp_path: Path
) -> None:
    estimator = None if advantage == "group" else ESTIMATORS[advantage]
    keeps = keeping(tmp_path, "return [torch.ones(4) for group in groups]")
    assert_same(trainer(PolicyGradientTrainer, model, tmp_path / "a", advantage=estimator),
                trainer(PolicyGradientTrainer, model, tmp_path / "b", advantage=estimator, **keeps))  # fmt: skip


def test_the_pages_filter_keeps_the_best_and_the_worst(model: Path, tmp_path: Path) -> None:
    (tmp_path / "filters.py").write_text(on_page("def best_and_worst"))
    name = f"{tmp_path / 'filters.py'}:best_and_worst"
    check(keep=name)
    made = trainer(
        PolicyGradientTrainer, model, tmp_path, functions={"keep": OwnFunction("keep", name)}
    )
    advantages = made._generate_and_score_completions(TICKS)["advantages"].view(2, 4)
    assert advantages[1, 0] > 0 and (advantages[1] < 0).sum() == 1, "one of three equal ones"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [[1, 1, 1, 1]]", r"each completion of each group, \(2, 4\); it returned \[\["),
        ("return [[-1, 1, 1, 1]] * 2", "a weight of 0 or more"),
        ("return [[float('nan')] * 4] * 2", "a weight of 0 or more"),
        ("return None", "no numbers: TypeError"),
    ],
)
def test_weights_that_are_none_are_refused_before_the_run(
    body: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(keep=written(tmp_path, body, of="groups"))


LOSSES = """
import torch


def grpo(logprobs, old_logprobs, ref_logprobs, advantages, mask, engine_weights):
    ratio = torch.exp(logprobs - old_logprobs)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * advantages, bounded * advantages) * engine_weights
    gap = ref_logprobs - logprobs
    loss = loss + 0.04 * ((torch.exp(gap) - gap - 1) * ratio)
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(), {}
"""


@pytest.mark.parametrize("use_vllm", [True, False], ids=["engine", "own"])
@pytest.mark.parametrize(("name", "settings"), [
    ("clipped", {"loss_type": "dapo", "num_iterations": 2}),
    ("grpo", {"loss_type": "grpo", "beta": 0.04}),
])  # fmt: skip
def test_a_loss_written_again_is_trls(
    name: str, settings: dict[str, Any], use_vllm: bool, model: Path, tmp_path: Path
) -> None:
    """It is TRL's over several micro-batches and, where clipping shows, over several passes over a round."""
    (tmp_path / "losses.py").write_text(LOSSES if name == "grpo" else on_page("def clipped"))
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                 "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1}  # fmt: skip
    functions = {"loss": OwnFunction("loss", f"{tmp_path / 'losses.py'}:{name}")}
    rounds = Fixed() if use_vllm else WithoutLogprobs()
    histories = []
    for output, trainer_args in (("a", {}), ("b", {"functions": functions})):
        made = small_trainer(
            PolicyGradientTrainer,
            model,
            tmp_path / output,
            rounds,
            trainer_args=trainer_args,
            **settings,
        )
        made.train()
        histories.append([(row["loss"], row["grad_norm"], row["entropy"])
                          for row in made.state.log_history if "loss" in row])  # fmt: skip
        assert ("clipped" in made.state.log_history[0]) == (output == "b" and name == "clipped")
    # With the distance to the reference the gradient's parts are added in another order, and four steps carry it on.
    for own_figures, figures in zip(*histories, strict=True):
        assert own_figures == pytest.approx(figures, rel=1e-5 if name == "grpo" else 0, abs=0)
    assert len(set(histories[0])) == 4


class WithoutLogprobs(Fixed):
    """Rounds that the trainer's own model wrote."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        return [
            replace(
                group, completions=tuple(replace(c, logprobs=None) for c in group.completions)
            )
            for group in super().next_round(step=step, num_groups=num_groups)
        ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return logprobs.sum(1), {}", r"one for each token, \(4, 4\); it returned tensor"),
        ("return logprobs.detach().sum(), {}", "depends on logprobs"),
        ("return logprobs.sum() / 0, {}", "one finite number"),
        ("return logprobs.nothing", r"own\.py:5 raised AttributeError"),
    ],
)
def test_a_loss_that_is_none_is_refused_before_the_run(
    body: str, said: str, tmp_path: Path
) -> None:
    name = written(tmp_path, body, of="logprobs")
    with pytest.raises(ConfigError, match=said):
        check(loss=name)


def test_what_bounds_trls_losses_is_refused_beside_ones_own(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(on_page("def reinforce"))
    name = f"{tmp_path / 'losses.py'}:reinforce"
    check(loss=name)
    check(loss=name, preset="dapo")
    with pytest.raises(ConfigError, match="--trust-region dppo-tv takes the place of the clip"):
        check(loss=name, trust_region="dppo-tv")
    with pytest.raises(
        ConfigError, match=f"calls no functions of your own; leave --loss {name}"
    ):
        options = {"model": "m", "dataset": "d", "output": "o", "teacher": "t", "loss": name}
        resolve(options={"algorithm": "distill", **options})


REWARD = """
def spread(completion_ids, log_metric, log_extra):
    log_metric("mine/longest", max(map(len, completion_ids)))
    log_extra("first", [ids[0] for ids in completion_ids])
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


@pytest.mark.verify
@pytest.mark.slow
def test_a_run_with_files_of_ones_own_and_its_resume(
    mine: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "filters.py").write_text(on_page("def best_and_worst"))
    (tmp_path / "losses.py").write_text(on_page("def clipped"))
    (tmp_path / "rewards.py").write_text(REWARD)
    command = ["grpo", "--model", str(model), "--dataset", "task:addition?digits=1"]
    command += ["--reward", f"{tmp_path}/rewards.py:spread", "--output", str(folder)]
    command += ["--advantage", f"{mine}:early", "--loss", f"{tmp_path}/losses.py:clipped"]
    command += ["--keep", f"{tmp_path}/filters.py:best_and_worst"]
    command += ["--engine", "transformers", "--steps", "2", "--prompts-per-step", "2"]
    command += ["--group-size", "4", "--max-tokens", "8", "--set", "dtype=float32"]
    assert ycore(command) == 0, capfd.readouterr().err
    assert f'"advantage {mine}:early"' in (folder / "identity.json").read_text()
    row = read_metrics(folder / "metrics.jsonl")[-1]
    assert 1 <= row["mine/longest"] <= 8, "from the confined process"
    assert row["ycore/kept"] == 0.5 and row["clipped"] == 0 and row["grad_norm"] > 0
    journal = (folder / "journal" / "round-000001-rank-0.json").read_text()
    assert '"logged": {"mine/longest": ' in journal and '"first": "' in journal
    mine.write_text(mine.read_text().replace("0.99", "0.9"))
    capfd.readouterr()
    again = ["resume", str(folder), "--steps", "3"]
    assert ycore(again) == 2
    refused = capfd.readouterr().err
    assert re.search(r"\(advantage \S+mine\.py:early: .*--accept-changes", refused)
    assert ycore([*again, "--accept-changes"]) == 0


def test_a_loss_is_tried_without_the_reference_that_the_reward_takes(tmp_path: Path) -> None:
    """With `kl_in=reward` a step gives none, and the run would end in its first one."""
    file = tmp_path / "mine.py"
    file.write_text("def loss(logprobs, ref_logprobs):\n    return logprobs - ref_logprobs\n")
    settings = {"loss": f"{file}:loss", "trl": {"beta": 0.1}}
    check(**settings)
    with pytest.raises(ConfigError, match=r"mine.py:2 raised TypeError"):
        check(**settings, advantage="reinforce++", kl_in="reward")
