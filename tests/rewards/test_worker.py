import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy
import pytest

from ycore.rewards.loading import inputs_of
from ycore.rewards.worker import LoadedReward, call_reward, reward_in


def ask(function: Any, **offered: Any) -> dict[str, Any]:
    request = {
        "source": 0,
        "step": 3,
        "count": 2,
        "inputs": {"completions": ["a", "b"], **offered},
    }
    return call_reward(LoadedReward(function, inputs_of(function)), request)


@pytest.mark.parametrize(
    ("value", "reward", "problem"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (numpy.float32(0.5), 0.5, None),
        (Decimal("0.25"), 0.25, None),
        (None, None, None),
        (math.nan, None, None),
        (math.inf, None, "not finite: inf"),
        (10**400, None, "not a number"),
        ("1.0", None, "not a number: the str '1.0'"),
        ([1.0], None, "not a number"),
        (numpy.zeros(2), None, "not a number"),
    ],
)
def test_a_returned_value_is_a_reward_or_nothing_or_a_problem(
    value: object, reward: float | None, problem: str | None
) -> None:
    got, why = reward_in(value)
    assert got == reward
    assert (why or "").startswith(problem or "") and (why is None) == (problem is None)


def test_a_reward_gets_trls_keywords_and_only_what_it_takes() -> None:
    def reward(completions: Any, trainer_state: Any, log_extra: Any, log_metric: Any) -> Any:
        log_extra("shown", completions)
        log_metric("counted", 1.0)
        return [trainer_state.global_step, len(completions)]

    logged = [{"shown": "a", "counted": 1.0}, {"shown": "b"}]
    expected = {"values": [3.0, 2.0], "problems": [None, None], "logged": logged}
    assert ask(reward, answer=["1", "2"]) == expected
    assert ask(lambda completions: [1, 2])["logged"] == [{}, {}]


def test_logged_texts_are_one_for_each_completion() -> None:
    def reward(completions: Any, log_extra: Any) -> Any:
        log_extra("shown", ["only one"])
        return [1.0, 2.0]

    assert "ValueError" in ask(reward)["failed"]


def test_an_array_a_generator_and_an_async_function_are_all_rewards() -> None:
    async def later(completions: Any) -> Any:
        return [1.0, 2.0]

    for reward in (
        lambda completions: numpy.array([1.0, 2.0]),
        lambda completions: iter([1.0, 2.0]),
        later,
    ):
        assert ask(reward)["values"] == [1.0, 2.0]


@pytest.mark.parametrize("result", [None, 1.0, "ab", {"a": 1, "b": 2}])
def test_anything_but_a_list_fails_the_call(result: object) -> None:
    assert ask(lambda completions: result)["failed"].startswith(
        "raised TypeError: a reward returns a list"
    )


def test_a_wrong_length_fails_the_call() -> None:
    assert (
        ask(lambda completions: [1.0])["failed"] == "wrong length: 1 values for 2 completions"
    )


def test_an_exception_is_one_line_and_sys_exit_is_an_exception() -> None:
    def raises(completions: Any) -> Any:
        raise ValueError("two\nlines")

    def leaves(completions: Any) -> Any:
        raise SystemExit(4)

    assert ask(raises)["failed"] == "raised ValueError: two lines"
    assert ask(leaves)["failed"] == "raised SystemExit: 4"


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, ycore.rewards.worker; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_source_that_strips_thinking_sees_what_comes_after_it() -> None:
    seen: list[Any] = []

    def note(completions: list[Any], completion_ids: list[Any]) -> list[float | None]:
        seen.extend([completions, completion_ids])
        return [0.0, 0.0]

    turns = [{"role": "assistant", "content": "<think>hm</think>\n\nyes"}]
    inputs = {"completions": [turns, "<think>never ends"], "completion_ids": [[1, 2, 3], [4]]}
    request = {"source": 0, "step": 0, "count": 2, "inputs": inputs}
    call_reward(LoadedReward(note, inputs_of(note), strips_thinking=True), request)
    assert seen == [[[{"role": "assistant", "content": "yes"}], ""], [[1, 2, 3], [4]]]
    assert turns[0]["content"].startswith("<think>"), "other sources see the whole"


def test_a_reward_of_token_ids_alone_has_no_thinking_to_remove() -> None:
    def count(completion_ids: list[list[int]]) -> list[int]:
        return [len(ids) for ids in completion_ids]

    request = {"source": 0, "step": 0, "count": 2, "inputs": {"completion_ids": [[1, 2], [3]]}}
    source = LoadedReward(count, inputs_of(count), strips_thinking=True)
    assert call_reward(source, request)["values"] == [2, 1]
