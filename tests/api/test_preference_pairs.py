import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.api.pipeline_run import make_pairs, write_pairs
from ycore.errors import RunError

CHAT = [{"role": "user", "content": "2 + 2?"}]


def row(number: int, text: str, *rewards: float | None, prompt: Any = "ask") -> dict[str, Any]:
    return {"row": number, "prompt": prompt, "completion": text, "rewards": list(rewards)}


def pairs(
    rows: list[dict[str, Any]],
    *,
    compare: Any = "best-worst",
    weights: tuple[float, ...] = (1.0,),
) -> list[Any]:
    made = make_pairs(rows, weights, compare=compare)
    return [
        (pair["chosen"], pair["rejected"], pair["chosen_reward"], pair["rejected_reward"])
        for pair in made
    ]


def test_the_best_and_the_worst_of_each_prompt() -> None:
    rows = [
        row(0, "a", 0.2),
        row(0, "b", 0.9),
        row(0, "c", 0.5),
        row(1, "d", 1.0),
        row(1, "e", 0.0),
    ]
    assert pairs(rows) == [("b", "a", 0.9, 0.2), ("d", "e", 1.0, 0.0)]


def test_every_two_that_differ_and_of_the_same_texts_one() -> None:
    rows = [row(0, "7", 1.0), row(0, "8", 0.0), row(0, "7", 1.0), row(0, "9", 0.0)]
    assert pairs(rows, compare="all") == [("7", "8", 1.0, 0.0), ("7", "9", 1.0, 0.0)]


def test_a_prompt_whose_rewards_are_equal_is_left_out() -> None:
    assert (
        pairs([row(0, "a", 1.0), row(0, "b", 1.0 + 1e-9), row(1, "c", None), row(2, "d", 1.0)])
        == []
    )


def test_weights_and_unscored_completions() -> None:
    rows = [row(0, "a", 1.0, 0.0), row(0, "b", None, 1.0), row(0, "c", None, None)]
    assert pairs(rows, weights=(0.5, 2.0)) == [("b", "a", 2.0, 0.5)]


def test_a_chat_gets_turns() -> None:
    (pair,) = make_pairs(
        [row(0, "4", 1.0, prompt=CHAT), row(0, "5", 0.0, prompt=CHAT)],
        [1.0],
        compare="best-worst",
    )
    assert pair["prompt"] == CHAT
    assert pair["chosen"] == [{"role": "assistant", "content": "4"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "5"}]


@given(
    st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=6),
    st.sampled_from(["best-worst", "all"]),
)
def test_the_chosen_is_always_the_better(rewards: list[float], compare: str) -> None:
    rows = [row(0, str(place), reward) for place, reward in enumerate(rewards)]
    made = pairs(rows, compare=compare)
    assert all(better > worse for _, _, better, worse in made)
    if compare == "best-worst" and made:
        assert made == [(made[0][0], made[0][1], max(rewards), min(rewards))]


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = [row(0, "é", 1.0), row(0, "b", 0.0)]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    to = tmp_path / "pairs.jsonl"
    assert write_pairs(tmp_path, weights=[1.0], compare="best-worst", to=to) == 1
    assert json.loads(to.read_text())["chosen"] == "é"
    with pytest.raises(RunError, match="so there is no pair; raise num_samples"):
        write_pairs(tmp_path, weights=[0.0], compare="best-worst", to=tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
