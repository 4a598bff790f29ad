import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl.trainer.utils import nanstd

from ycore.advantages import ESTIMATORS

NAN = math.nan

# Two groups of four. Group one: rewards 1 0 0 1, mean 0.5, squares 4 * 0.25 = 1, deviation sqrt(1/3) = 0.5773503.
# Group two: 1 0 0 and one masked (its reward is NaN), mean 1/3, squares 4/9 + 1/9 + 1/9 = 2/3, deviation
# sqrt((2/3) / 2) = 0.5773503. The batch: seven rewards, sum 3, mean 3/7, squares 3 * (4/7)^2 + 4 * (3/7)^2 = 84/49,
# deviation sqrt(84/49/6) = 0.5345225. Centred by group: squares 1 + 2/3 over 6, deviation sqrt(5/18) = 0.5270463.
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, NAN, 0.0]])
MASK = torch.tensor([[True, True, True, True], [True, True, False, True]])
GREEDY = torch.tensor([1.0, 0.25])
HAND = {
    "group": [
        [0.8658754, -0.8658754, -0.8658754, 0.8658754],
        [1.1545005, -0.5772503, 0.0, -0.5772503],
    ],
    "dr-grpo": [[0.5, -0.5, -0.5, 0.5], [0.6666667, -0.3333333, 0.0, -0.3333333]],
    "rloo": [[0.6666667, -0.6666667, -0.6666667, 0.6666667], [1.0, -0.5, 0.0, -0.5]],
    "lite-ppo": [
        [0.9352394, -0.9352394, -0.9352394, 0.9352394],
        [1.2469859, -0.6234929, 0.0, -0.6234929],
    ],
    "reinforce++-baseline": [
        [0.9485034, -0.9485034, -0.9485034, 0.9485034],
        [1.2646711, -0.6323356, 0.0, -0.6323356],
    ],
    "remax": [[0.0, -1.0, -1.0, 0.0], [0.75, -0.25, 0.0, -0.25]],
    "maxrl": [[1.0, -1.0, -1.0, 1.0], [2.0, -1.0, 0.0, -1.0]],
    "raft": [[0.5, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0]],
    "crpg": [
        [0.5714286, -0.4285714, -0.4285714, 0.5714286],
        [0.5714286, -0.4285714, 0.0, -0.4285714],
    ],
}
NAMES = sorted(ESTIMATORS)
WITHIN_GROUP = ["dr-grpo", "group", "maxrl", "rloo"]


def run(name: str, rewards: Tensor, mask: Tensor, greedy: Tensor | None = None) -> Tensor:
    estimator = ESTIMATORS[name]
    return estimator(rewards, mask, greedy_P=greedy if estimator.needs_greedy else None)


@pytest.mark.parametrize("name", NAMES)
def test_hand_computed_table(name: str) -> None:
    advantages = run(name, REWARDS, MASK, GREEDY)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(HAND[name]), rtol=0, atol=2e-7)


def test_hand_table_of_unequal_rewards() -> None:
    """Rewards 0.5, 1.5, 4: mean 2, centred -1.5 -0.5 2, squares 2.25 + 0.25 + 4 = 6.5, deviation sqrt(3.25)."""
    rewards, mask = torch.tensor([[0.5, 1.5, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    expected = {
        "group": [-0.8320041, -0.2773347, 1.1093388],  # over 1.8027756 + 1e-4
        "dr-grpo": [-1.5, -0.5, 2.0],
        "rloo": [0.5 - 2.75, 1.5 - 2.25, 4.0 - 1.0],
        "maxrl": [-0.75, -0.25, 1.0],
        "raft": [0.0, 0.0, 1.0],
    }
    for name, row in expected.items():
        torch.testing.assert_close(
            run(name, rewards, mask), torch.tensor([row]), rtol=0, atol=2e-7
        )


def test_batch_deviation_of_rewards_is_not_that_of_centred_rewards() -> None:
    """Groups 0 1 and 10 11: by hand, deviation of rewards sqrt((5.5^2 * 2 + 4.5^2 * 2) / 3) = 5.8022984, of centred
    ones sqrt(4 * 0.25 / 3) = 0.5773503."""
    rewards, mask = torch.tensor([[0.0, 1.0], [10.0, 11.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert run("lite-ppo", rewards, mask)[0, 1].item() == pytest.approx(
        0.5 / (5.8022984 + 1e-4), abs=1e-7
    )
    assert run("reinforce++-baseline", rewards, mask)[0, 1].item() == pytest.approx(
        0.5 / (0.5773503 + 1e-4), abs=1e-6
    )


@pytest.mark.parametrize(
    ("name", "scale"), [("group", "group"), ("lite-ppo", "batch"), ("dr-grpo", "none")]
)
def test_what_trl_knows_too_gives_trls_numbers(name: str, scale: str) -> None:
    """TRL's own deviation, in its formula, on random rewards with some unscorable."""
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(16, 6, generator=draw)
    mask = torch.rand(16, 6, generator=draw) < 0.8
    theirs = torch.where(mask, rewards, NAN)
    advantages = theirs - theirs.nanmean(dim=1, keepdim=True)
    if scale != "none":
        deviation = nanstd(theirs, dim=1, keepdim=True) if scale == "group" else nanstd(theirs)
        advantages = advantages / (deviation + 1e-4)
    torch.testing.assert_close(
        run(name, rewards, mask), torch.nan_to_num(advantages, nan=0.0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6])
def test_no_spread_is_exactly_zero(name: str, shape: tuple[int, int], reward: float) -> None:
    rewards = torch.full(shape, reward)
    advantages = run(name, rewards, torch.ones(shape, dtype=torch.bool), rewards[:, 0])
    assert torch.equal(advantages, torch.zeros(shape))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"remax", "crpg"}))
def test_a_group_without_spread_is_exactly_zero_beside_one_with(name: str) -> None:
    rewards = torch.tensor([[0.3] * 7, [0.1, 0.7, 0.2, 0.9, 0.0, 0.4, 0.6]])
    advantages = run(name, rewards, torch.ones(2, 7, dtype=torch.bool))
    assert torch.equal(advantages[0], torch.zeros(7))
    assert int((advantages[1] != 0).sum()) == (1 if name == "raft" else 7)


@pytest.mark.parametrize("name", NAMES)
def test_one_or_no_completion_left_in_a_group(name: str) -> None:
    rewards = torch.tensor([[5.0, NAN, math.inf], [NAN, NAN, NAN], [1.0, 0.0, 0.5]])
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    advantages = run(name, rewards, mask, torch.tensor([1.0, NAN, 0.5]))
    assert torch.isfinite(advantages).all()
    assert torch.equal(advantages[~mask], torch.zeros(5))
    alone = {"remax": 5.0 - 1.0, "crpg": 5.0 - 6.5 / 4}.get(name, 0.0)
    assert advantages[0, 0].item() == pytest.approx(alone, abs=1e-5)


def test_remax_without_a_greedy_reward_gives_nothing() -> None:
    advantages = run(
        "remax", torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.tensor([NAN, 0.0])
    )
    assert advantages.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_maxrl_needs_a_positive_mean() -> None:
    advantages = run(
        "maxrl", torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    )
    assert torch.equal(advantages, torch.zeros(2, 2))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_expects_the_gradient_of_the_cut_log_likelihood(rate: float, size: int) -> None:
    """Over every outcome of `size` tries at rate p: d/dp of -sum (1-p)^k / k is sum (1-p)^(k-1), k = 1 .. size - 1."""
    total = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        rewards = torch.tensor([outcome])
        advantages = run("maxrl", rewards, torch.ones(1, size, dtype=torch.bool))[0].tolist()
        scores = [
            1 / rate if reward else -1 / (1 - rate) for reward in outcome
        ]  # d log probability / d p
        chance = math.prod(rate if reward else 1 - rate for reward in outcome)
        total += chance * sum(map(math.prod, zip(advantages, scores, strict=True))) / size
    assert total == pytest.approx(sum((1 - rate) ** (k - 1) for k in range(1, size)), rel=1e-5)


# -- properties --------------------------------------------------------------------------------------------------------

rewards_of_a_group = st.lists(
    st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=4, max_size=4
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    num_prompts = draw(st.integers(1, 4))
    rewards = [draw(rewards_of_a_group) for _ in range(num_prompts)]
    mask = [draw(st.lists(st.booleans(), min_size=4, max_size=4)) for _ in range(num_prompts)]
    greedy = draw(
        st.lists(st.integers(0, 8).map(float), min_size=num_prompts, max_size=num_prompts)
    )
    return torch.tensor(rewards), torch.tensor(mask), torch.tensor(greedy)


def close(left: Tensor, right: Tensor, *, atol: float = 1e-5) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(batch=batches(), order=st.permutations(range(4)))
def test_permuting_a_group_permutes_its_advantages(
    name: str, batch: tuple[Tensor, Tensor, Tensor], order: list[int]
) -> None:
    rewards, mask, greedy = batch
    close(
        run(name, rewards[:, order], mask[:, order], greedy),
        run(name, rewards, mask, greedy)[:, order],
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(batch=batches(), junk=st.sampled_from([NAN, math.inf, -1e30, 7.0]))
def test_masked_completions_are_zero_and_change_nothing(
    name: str, batch: tuple[Tensor, Tensor, Tensor], junk: float
) -> None:
    rewards, mask, greedy = batch
    advantages = run(name, rewards, mask, greedy)
    assert torch.isfinite(advantages).all()
    assert torch.equal(advantages[~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(run(name, torch.where(mask, rewards, junk), mask, greedy), advantages)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(batch=batches())
def test_a_masked_completion_is_as_if_never_drawn(
    name: str, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    rewards, _, greedy = batch
    mask = torch.ones_like(rewards, dtype=torch.bool)
    padded = torch.cat([rewards, torch.full_like(rewards[:, :2], NAN)], dim=1)
    padded_mask = torch.cat([mask, torch.zeros_like(mask[:, :2])], dim=1)
    close(run(name, padded, padded_mask, greedy)[:, :4], run(name, rewards, mask, greedy))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"maxrl"}))
@settings(max_examples=30)
@given(batch=batches(), shift=st.sampled_from([-4.0, 0.5, 32.0]))
def test_a_shift_of_all_rewards_changes_nothing(
    name: str, batch: tuple[Tensor, Tensor, Tensor], shift: float
) -> None:
    rewards, mask, greedy = batch
    close(run(name, rewards + shift, mask, greedy + shift), run(name, rewards, mask, greedy))


@pytest.mark.parametrize("name", ["dr-grpo", "group", "reinforce++-baseline", "rloo"])
@settings(max_examples=30)
@given(
    batch=batches(), shifts=st.lists(st.sampled_from([-4.0, 0.0, 32.0]), min_size=4, max_size=4)
)
def test_each_group_may_shift_on_its_own(
    name: str, batch: tuple[Tensor, Tensor, Tensor], shifts: list[float]
) -> None:
    rewards, mask, _ = batch
    moved = rewards + torch.tensor(shifts[: len(rewards)]).unsqueeze(1)
    close(run(name, moved, mask), run(name, rewards, mask))


@pytest.mark.parametrize("name", ["group", "lite-ppo", "maxrl", "reinforce++-baseline"])
@settings(max_examples=30)
@given(batch=batches(), scale=st.sampled_from([0.5, 4.0, 256.0]))
def test_normalised_estimators_do_not_see_the_scale(
    name: str, batch: tuple[Tensor, Tensor, Tensor], scale: float
) -> None:
    """Up to the 1e-4 beside the deviation, which is at least 0.03 here unless it is 0."""
    rewards, mask, _ = batch
    close(run(name, rewards * scale, mask), run(name, rewards, mask), atol=0.02)


@pytest.mark.parametrize("name", ["dr-grpo", "remax", "rloo"])
@settings(max_examples=30)
@given(batch=batches(), scale=st.sampled_from([0.5, -2.0, 256.0]))
def test_other_estimators_scale_with_the_rewards(
    name: str, batch: tuple[Tensor, Tensor, Tensor], scale: float
) -> None:
    rewards, mask, greedy = batch
    close(
        run(name, rewards * scale, mask, greedy * scale),
        run(name, rewards, mask, greedy) * scale,
    )


@pytest.mark.parametrize("name", [*WITHIN_GROUP, "lite-ppo", "reinforce++-baseline"])
@settings(max_examples=30)
@given(batch=batches())
def test_advantages_of_a_group_sum_to_zero(
    name: str, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    rewards, mask, _ = batch
    close(run(name, rewards, mask).sum(dim=1), torch.zeros(len(rewards)), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_other_groups_matter_only_where_the_batch_is_normalised(name: str) -> None:
    """The first group alone, and the same group beside another of other spread."""
    rewards = torch.tensor([[1.0, 0.0, 0.5], [4.0, 0.0, 9.0]])
    mask, greedy = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0.5, 1.0])
    together = run(name, rewards, mask, greedy)[:1]
    alone = run(name, rewards[:1], mask[:1], greedy[:1])
    assert torch.equal(together, alone) != (
        name in {"lite-ppo", "reinforce++-baseline", "crpg"}
    )


# -- the table itself --------------------------------------------------------------------------------------------------


def test_every_estimator_says_where_it_is_from() -> None:
    for name, estimator in ESTIMATORS.items():
        formula, _, source = (estimator.function.__doc__ or "").partition("\n\n")
        assert ("r - " in formula or name == "raft") and source.strip().startswith("arXiv ")


def test_the_names_are_there_without_torch() -> None:
    code = "import sys; from ycore.advantages import ADVANTAGES; print('torch' in sys.modules, *ADVANTAGES)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", *ESTIMATORS, "reinforce++", "turn"]


def test_raft_has_no_best_among_sums_that_differ_by_dust() -> None:
    """0.1 + 0.2 is not 0.3: one completion of an equal group was trained on with the advantage 1."""
    rewards = torch.tensor([[0.5, 0.5 + 1e-7, 0.5], [0.5, 1.0, 1.0 + 1e-7]])
    advantages = ESTIMATORS["raft"](rewards, torch.ones(2, 3, dtype=torch.bool))
    assert advantages.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]]
