import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.loading import check_reward
from ycore.rewards.reference import before_the_answer, reference_reward

LOGPROBS = st.lists(st.floats(-50, 0), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("<think>3 + 4</think> <answer> 8 </answer>", "<think>3 + 4</think> <answer> "),
        ("so it is \\boxed{8}.", "so it is \\boxed{"),
        ("<think>hm</think>\n\nThe answer is 8.", "<think>hm</think>\n\n"),
        ("<answer>1</answer> no, <answer>2</answer>", "<answer>1</answer> no, <answer>"),
        ("It is 8", "It is 8\nAnswer: "),
        ("", "\nAnswer: "),
    ],
)
def test_where_the_answer_begins(text: str, before: str) -> None:
    assert before_the_answer(text, bridge="\nAnswer: ") == before


def test_by_hand() -> None:
    """Tokens of probability 0.5 and 0.25 after the reasoning, 0.125 and 0.125 without it."""
    reasoned, bare = [math.log(0.5), math.log(0.25)], [math.log(0.125)] * 2
    assert reference_reward(reasoned, None) == pytest.approx(0.375)
    assert reference_reward(reasoned, bare) == pytest.approx(0.25)
    assert reference_reward(bare, reasoned) == 0.0, "reasoning that makes it less likely earns nothing"


@given(LOGPROBS, LOGPROBS)
def test_it_lies_between_0_and_1_and_does_not_mind_the_order_of_tokens(
    reasoned: list[float], bare: list[float]
) -> None:
    value = reference_reward(reasoned, bare)
    assert 0 <= value <= 1
    assert reference_reward(reasoned[::-1], bare[::-1]) == pytest.approx(value)


def test_it_is_checked_before_the_run() -> None:
    check_reward(RewardConfig(reward="reference_probability", args={"debias": False}), ["answer"])
    with pytest.raises(RewardError, match=r"asks for the column 'answer', .* --answer-column"):
        check_reward(RewardConfig(reward="reference_probability"), ["solution"])
    with pytest.raises(RewardError, match="it takes debias, bridge"):
        check_reward(RewardConfig(reward="reference_probability", args={"debiased": True}), ["answer"])
    with pytest.raises(RewardError, match="did you mean 'reference_probability'"):
        check_reward(RewardConfig(reward="reference_probabilty"), ["answer"])
