"""Games and tasks by name, with the real libraries: the same world for the same seed, and nothing said twice."""

import json
import random
import re
from typing import Any

import pytest

from ycore.errors import UserError
from ycore.rollout.tool_host import ToolHost


def host_of(name: str) -> ToolHost:
    pytest.importorskip(
        "reasoning_gym" if name.startswith("gym:") else "textarena",
        reason="an optional package",
    )
    return ToolHost([], name)


def reset(host: ToolHost, seed: int, **row: Any) -> Any:
    return host.answer({"op": "reset", "row": {"prompt": "p", **row}, "seed": seed})


def step(host: ToolHost, text: str, seed: int = 1) -> Any:
    return host.answer({"op": "step", "text": text, "seed": seed})


def reward(host: ToolHost) -> Any:
    return host.answer({"op": "reward", "seed": 2})


def test_a_game_of_textarena_is_played_to_its_end_and_says_only_what_is_new() -> None:
    host = host_of("textarena:GuessTheNumber-v0")
    assert host.describe(schemas=True) == {
        "tools": [],
        "takes_text": True,
        "pays": True,
        "pays_turns": False,
    }
    said = reset(host, 5)
    assert "Guess The Number" in said
    low, high = 1, 20
    while True:
        assert reward(host) == 0.0
        guess = (low + high) // 2
        answer = step(host, f"I say [{guess}]")
        if answer is None:
            break
        assert "I say" not in answer and "Guess The Number" not in answer and len(answer) < 200
        low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
    assert reward(host) == 1.0
    assert reset(host, 6) == said and reward(host) == 0.0  # a new game


def test_a_games_own_arguments_are_set_by_its_name_and_parts_of_a_win_are_left_out() -> None:
    name = "textarena:GuessTheNumber-v0?max_number=7"
    for host, least in ((host_of(name), 0.1), (host_of(f"{name}&partial=false"), 0.0)):
        assert "between 1 and 7" in reset(host, 5)
        answers = [
            step(host, f"[{guess}]") for guess in (4, 9, 9)
        ]  # the second nonsense ends the game
        assert (
            answers[-1] is None
            and least <= reward(host) < 1
            and (reward(host) > 0) == (least > 0)
        )
    reset(host, 5)
    assert None in [step(host, f"[{guess}]") for guess in range(1, 8)] and reward(host) == 1.0


@pytest.mark.parametrize("name", ["Mastermind-v0", "FrozenLake-v0-random", "Sudoku-v0"])
def test_the_same_seed_is_the_same_game(name: str) -> None:
    host = host_of(f"textarena:{name}")

    def play(seed: int) -> list[Any]:
        said = [reset(host, seed)]
        return [*said, *[step(host, move, seed) for move in ("[1 2 3 4]", "right", "[2 2 5]")]]

    first = play(7)
    reset(host, 8)
    assert play(7) == first


def test_a_task_of_reasoning_gym_may_be_tried_again() -> None:
    host = host_of("gym:chain_sum?min_terms=2&max_terms=2&max_digits=1")
    question = reset(host, 3)
    assert question == reset(host, 3) != reset(host, 4)
    assert reset(host, 3) == question
    right = sum(int(part) for part in re.findall(r"[+-]?\d+", question.replace(" ", "")))
    assert step(host, "It is 900.") == "That is not right. Try again." and reward(host) < 1
    assert step(host, f"It is {right}.") is None and reward(host) == 1.0


def test_the_question_is_the_rows_where_the_dataset_is_of_reasoning_gym() -> None:
    from ycore.data.generated import gym_table

    host = host_of("gym:chain_sum")
    (row,) = gym_table("gym:chain_sum?size=1", split="test", seed=0).rows
    assert reset(host, 1, **row) is None
    assert (
        step(host, str(json.loads(row["gym_entry"])["answer"])) is None and reward(host) == 1.0
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "textarena:GuesTheNumber-v0",
            "TextArena has no game 'GuesTheNumber-v0'; did you mean 'GuessTheNumber-v0'",
        ),
        (
            "textarena:TicTacToe-v0",
            "does not start here with one player: AssertionError: The number of players has to",
        ),
        ("textarena:GuessTheNumber-v0?most=7", "got an unexpected keyword argument 'most'"),
        ("textarena:GuessTheNumber-v0?most", "arguments are written `?name=value&name=value`"),
        ("gym:chain_sm", "did you mean 'chain_sum'"),
        ("gym:chain_sum?min_term=2", "did you mean 'min_terms'"),
    ],
)
def test_an_unknown_game_is_refused_in_one_line(name: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        host_of(name)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(
        UserError, match=r"needs the package textarena: pip install 'ycore\[textarena\]'"
    ):
        ToolHost([], "textarena:GuessTheNumber-v0")
    random.seed()
