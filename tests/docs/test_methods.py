"""The methods of docs/methods: each formula by a table that was computed by hand, each file through its door."""

import ast
import importlib.util
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ycore_cli.main import run

from ycore.config.resolve import resolve
from ycore.trl.own_functions import check_own_functions
from ycore.types import Prompt

METHODS = Path(__file__).resolve().parents[2] / "docs" / "methods"
NAN = float("nan")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"method_{name}", METHODS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group(*sources: list[float], **more: Any) -> Any:
    """A group with the rewards of each source, of which the first is trained on."""
    values = [torch.tensor(source, dtype=torch.float64) for source in sources]
    named = {f"reward_{place}": value for place, value in enumerate(values)}
    return SimpleNamespace(rewards=values[0], rewards_by_source=named, **more)


def written(*texts: str) -> list[Any]:
    return [SimpleNamespace(text=text) for text in texts]


@pytest.mark.parametrize(
    ("function", "rewards", "weights"),
    [
        # Of eight, two at either end: four times 2 make up eight.
        ("best_worst", [0, 1, 2, 3, 4, 5, 6, 7], [2, 2, 0, 0, 0, 0, 2, 2]),
        ("best_of_n", [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 4, 4]),
        # Of three with a reward one at either end; the one without has no part.
        ("best_worst", [0.5, NAN, 0.0, 1.0], [0, 0, 1.5, 1.5]),
    ],
)
def test_pf_ppo(function: str, rewards: list[float], weights: list[float]) -> None:
    (actual,) = getattr(load("pf_ppo"), function)([group(rewards)])
    assert actual.tolist() == weights


@pytest.mark.parametrize(
    ("right", "process", "kept"),
    [
        # Two of each: the right ones with the highest values, the wrong ones with the lowest.
        ([1, 1, 1, 1, 0, 0, 0, 0], [.9, .1, .5, .2, .8, .3, .1, .6], [1, 0, 1, 0, 0, 1, 1, 0]),
        # One right answer: three wrong ones fill up.
        ([1, 0, 0, 0, 0, 0, 0, 0], [.1, .7, .2, .3, .9, .4, .8, .6], [1, 0, 1, 1, 0, 1, 0, 0]),
        ([1, 1, 1, 1], [.4, .3, .2, .1], [1, 1, 0, 0]),
        ([0, 0, 0, 0], [.4, .3, .2, .1], [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_prof(right: list[float], process: list[float], kept: list[float]) -> None:
    (actual,) = load("prof").consistent([group(right, process)])
    assert actual.tolist() == kept


def test_fapo() -> None:
    # Rewards 1, 0 (right, flawed), -1, -1: the mean is -0.25, the deviation sqrt(2.75 / 3).
    advantages = load("fapo").flaw_aware(group([1, 1, 0, 0], [1, 0, 1, 0]))
    deviation = math.sqrt(2.75 / 3) + 1e-4
    expected = [1.25 / deviation, 0.25 / deviation, -0.75 / deviation, -0.75 / deviation]
    assert advantages.tolist() == pytest.approx(expected)
    # Where most are right and sound, the same flawed answer loses.
    assert load("fapo").flaw_aware(group([1, 1, 1, 1], [1, 0, 1, 1]))[1] < 0


def test_g_ra() -> None:
    # The rewards of the way count where the outcome does: 1.5, 1, 0, 0; the mean is 0.625.
    advantages = load("g_ra").gated(group([1, 1, 0, 0], [0.5, 0.0, 0.9, 0.0]))
    deviation = math.sqrt(sum((x - 0.625) ** 2 for x in (1.5, 1, 0, 0)) / 3) + 1e-4
    assert advantages.tolist() == pytest.approx(
        [(x - 0.625) / deviation for x in (1.5, 1, 0, 0)]
    )


@pytest.mark.parametrize(
    ("rewards", "texts", "expected"),
    [
        # One answer, no entropy: the weight is sigmoid(-5), and the rest is the prompt's advantage. Means 0, 0.5, 1: the
        # deviation is 0.5, the prompt is 1 below it.
        (
            [0, 0, 0, 0],
            ["It is 7.", "7", "7", "3 + 4 = 7"],
            [-0.5 / 0.5001 * (1 - 0.0066929)] * 4,
        ),
        # Two of either, one bit: half and half. Locally +-0.5 over sqrt(1 / 3), the prompt is at the mean.
        (
            [1, 1, 0, 0],
            ["8", "8", "7", "7"],
            [0.5 * x * 0.5 / 0.5774503 for x in (1, 1, -1, -1)],
        ),
    ],
)
def test_copo(rewards: list[float], texts: list[str], expected: list[float]) -> None:
    mean_reward = sum(rewards) / 4
    means = [mean_reward, 0.5, 1.0] if mean_reward == 0 else [0.0, mean_reward, 1.0]
    of_all = torch.tensor([[mean] * 4 for mean in means])
    scored = group(rewards, completions=written(*texts), batch_rewards=of_all)
    assert load("copo").blended(scored).tolist() == pytest.approx(expected, rel=1e-5)


def test_ttrl() -> None:
    # Two say 8, one 7, and one nothing: 1, 0, 1, 0 whatever the run's rewards are. The deviation is sqrt(1 / 3).
    texts = written("3 + 5 = 8", "7", "8", "no")
    scored = group([0, 1, 0, 0], completions=texts, mask=torch.ones(4, 1))
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    advantages = load("ttrl").majority(scored).tolist()
    assert advantages == pytest.approx([unit, -unit, unit, -unit])
    silent = group([0, 1], completions=written("no", "none"), mask=torch.ones(2, 1))
    assert load("ttrl").majority(silent).tolist() == [0.0, 0.0]


def test_grpo_care() -> None:
    # Three are right, with 0.95 (capped), 0.4 and 0.6: the mean is 0.65, so the first alone gets the bonus. The likely
    # wrong one gets none. Rewards 1.5, 1, 1, 0: the mean is 0.875.
    advantages = load("grpo_care").consistent(group([1, 1, 1, 0], [0.99, 0.4, 0.6, 0.9]))
    deviation = math.sqrt(sum((x - 0.875) ** 2 for x in (1.5, 1, 1, 0)) / 3) + 1e-4
    assert advantages.tolist() == pytest.approx(
        [(x - 0.875) / deviation for x in (1.5, 1, 1, 0)]
    )
    assert load("grpo_care").consistent(group([0, 0], [0.9, 0.1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("step", "kept"),
    [(0, [1, 1, 1, 1]), (5, [1, 0, 1, 1]), (10, [1, 0, 0, 1]), (99, [1, 0, 0, 1])],
)
def test_drive(step: int, kept: list[float]) -> None:
    # Means 0.25, 1, 0.5 and 0.25: all four, then three of four, then the hardest half.
    rows = ([0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1], [0, NAN, 0, 0.75])
    weights = load("drive").hardest([group([*row], step=step) for row in rows])
    assert [row.tolist() for row in weights] == [[keep] * 4 for keep in kept]


def test_rover() -> None:
    # Values 0, and log-ratios 0.2 and -0.1 in the second row: (0 - 0.5)^2, (0.2 + 0.5)^2, (-0.1 + 0.5)^2.
    logprobs = torch.tensor([[-1.0, -1.0], [-0.8, -1.1]], requires_grad=True)
    old, mask = torch.full((2, 2), -1.0), torch.tensor([[1, 0], [1, 1]])
    loss, metrics = load("rover").valued(logprobs, old, torch.tensor([[0.5], [-0.5]]), mask)
    assert loss.flatten().tolist() == pytest.approx([0.25, 0.25, 0.49, 0.16])
    assert metrics["rover/value"].item() == pytest.approx(0.1 / 3)
    loss.sum().backward()
    assert logprobs.grad is not None
    # Where nothing has moved, -2 times the reward less the mean of its group.
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1.0, -1.0, 1.4, 0.8])


def test_dph_rl() -> None:
    # The first pair is solved: weights exp(ref - log pi) - 1 are 1 and 0. The second is learned: ratio 1, and 1.5 clipped.
    logprobs = torch.log(torch.tensor([[0.25], [0.5], [0.5], [0.75]])).requires_grad_()
    old = ref = torch.full((4, 1), math.log(0.5))
    advantages = torch.tensor([[0.0], [0.0], [-1.0], [1.0]])
    rewards = torch.tensor([1.0, NAN, 0.0, 1.0])
    loss, metrics = load("dph_rl").rehearsed(
        logprobs, old, ref, torch.ones(4, 1), advantages, rewards, 2
    )
    assert loss.flatten().tolist() == pytest.approx([-0.05 * math.log(0.25), 0, 1.0, -1.2])
    assert metrics["dph/solved"].item() == 0.5
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([-0.05, 0.0, 1.0, 0.0])


def test_pacs() -> None:
    # Sums 0.4 and -0.2: the scores are 0.6 and -0.6; the second pair's answer without a reward counts nowhere.
    logprobs = torch.tensor([[0.3, 0.1, 9.0], [-0.2, 0.0, 9.0], [0.5, 0, 0], [0.1, 0, 0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    rewards = torch.tensor([1.0, 0.0, 1.0, NAN])
    loss, metrics = load("pacs").supervised(logprobs, torch.zeros(4, 3), rewards, mask, 2)
    terms = [math.log1p(math.exp(-0.6)), math.log1p(math.exp(-0.6)), math.log1p(math.exp(-0.4))]
    assert loss.item() == pytest.approx(sum(terms) / 3, rel=1e-6)
    assert metrics == {"pacs/accuracy": 1.0}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("keep", "pf_ppo.py:best_worst"),
        ("keep", "pf_ppo.py:best_of_n"),
        ("keep", "prof.py:consistent"),
        ("advantage", "fapo.py:flaw_aware"),
        ("advantage", "g_ra.py:gated"),
        ("advantage", "copo.py:blended"),
        ("advantage", "ttrl.py:majority"),
        ("advantage", "grpo_care.py:consistent"),
        ("keep", "drive.py:hardest"),
        ("loss", "pacs.py:supervised"),
        ("loss", "rover.py:valued"),
        ("loss", "dph_rl.py:rehearsed"),
    ],
)
def test_every_method_passes_its_door(kind: str, name: str) -> None:
    options = {"model": "m", "dataset": "d", "output": "o", "group_size": 4}
    options |= {"rewards": ["exact_answer", "length"], "trl": {"beta": 1e-6}}
    config = resolve(options={**options, kind: f"{METHODS / name}"})
    check_own_functions(config, Prompt(0, "2 + 2?", {"answer": "4"}))


def example(path: Path) -> list[str]:
    """The words of the command in a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None
    (line,) = re.findall(r"^    ycore (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("path", sorted(METHODS.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_of_every_method_starts(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(METHODS.parents[1])
    assert run([*example(path), "--dry-run", "--output", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("path", sorted(METHODS.glob("*.py")), ids=lambda path: path.stem)
def test_the_recipe_of_every_method_is_its_example(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(METHODS.parents[1])
    command, *words = example(path)
    configs = []
    for line in (words, ["--recipe", str(path.with_suffix(".yaml"))]):
        ends = ["--dry-run", "--json", "--output", str(tmp_path / "run")]
        assert run([command, *line, *ends]) == 0
        configs.append(json.loads(capsys.readouterr().out)["config"])
    assert configs[0] == configs[1]


SIDES = (
    *("default", "pf-ppo", "drive", "ungated", "g-ra", "dr-grpo", "rover", "all-groups"),
    *("copo", "ttrl", "grpo-care", "pacs", "dph-rl", "forward-kl"),
)


@pytest.mark.parametrize("side", SIDES)
def test_every_method_can_be_compared(
    side: str, tmp_path: Path, load_script: Callable[[str], Any]
) -> None:
    script = load_script("methods")
    options = script.parse_arguments([])
    words = script.command(options, side, 0, tmp_path / "run")[len(script.YCORE) :]
    assert run([*words, "--dry-run"]) == 0


def test_the_page_lists_every_method() -> None:
    page = (METHODS.parent / "own-functions.md").read_text()
    assert [
        path.name for path in METHODS.glob("*.py") if f"methods/{path.name}" not in page
    ] == []
