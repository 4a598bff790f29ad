"""Generated datasets: right answers, disjoint splits, the same rows for the same name, and reasoning-gym's tasks."""

import json
import re
import subprocess
import sys

import pytest

from ycore.data.generated import TASKS, gym_table, task_table
from ycore.errors import DataError


def rows(text: str, *, split: str = "train", seed: int = 0) -> list[tuple[str, str]]:
    return [
        (row["prompt"], row["answer"]) for row in task_table(text, split=split, seed=seed).rows
    ]


def refused(text: str, *, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        rows(text, split=split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("digits", [1, 2, 9])
@pytest.mark.parametrize(
    ("task", "sign"), [("addition", "+"), ("subtraction", "-"), ("multiplication", "*")]
)
def test_arithmetic_is_right(task: str, sign: str, digits: int) -> None:
    for prompt, answer in rows(f"task:{task}?digits={digits}&size=200"):
        match = re.fullmatch(
            rf"What is (\d+) {re.escape(sign)} (\d+)\? Answer with just the number\.", prompt
        )
        assert match is not None
        a, b = int(match[1]), int(match[2])
        assert len(match[1]) == len(match[2]) == digits
        assert int(answer) == {"+": a + b, "-": a - b, "*": a * b}[sign] >= 0


@pytest.mark.parametrize("digits", [1, 3])
def test_comparing_is_right(digits: int) -> None:
    for prompt, answer in rows(f"task:larger?digits={digits}&size=200"):
        match = re.match(r"Is (\d+) larger than (\d+)\? Begin with yes or no", prompt)
        assert match is not None and answer == (
            "yes" if int(match[1]) > int(match[2]) else "no"
        )


def test_one_digit_addition_is_all_there() -> None:
    train, test = (
        rows("task:addition?digits=1&size=2000"),
        rows("task:addition?digits=1&size=2000", split="test"),
    )
    assert (len(train), len(test)) == (80, 20)
    assert len({*train, *test}) == 100


@pytest.mark.parametrize("task", [*TASKS, "addition?digits=9"])
def test_splits_do_not_overlap_whatever_the_seed(task: str) -> None:
    size = "&size=3000" if "?" in task else "?size=3000"
    train = {prompt for seed in range(3) for prompt, _ in rows(f"task:{task}{size}", seed=seed)}
    test = {
        prompt
        for seed in range(3)
        for prompt, _ in rows(f"task:{task}{size}", split="test", seed=seed)
    }
    assert train and test and not train & test


def test_a_sum_and_its_mirror_share_a_split() -> None:
    train = {prompt for prompt, _ in rows("task:addition?size=100")}
    for prompt in train:
        a, b = re.findall(r"\d", prompt)
        assert f"What is {b} + {a}? Answer with just the number." in train


@pytest.mark.parametrize("task", TASKS)
def test_questions_are_distinct(task: str) -> None:
    prompts = [prompt for prompt, _ in rows(f"task:{task}?size=500")]
    assert len(set(prompts)) == len(prompts)


def test_the_seed_decides_the_rows() -> None:
    assert rows("task:addition?digits=4&size=50", seed=3) == rows(
        "task:addition?digits=4&size=50", seed=3
    )
    assert rows("task:addition?digits=4&size=50", seed=3) != rows(
        "task:addition?digits=4&size=50", seed=4
    )


def test_a_smaller_size_is_the_beginning_of_a_larger_one() -> None:
    assert rows("task:addition?digits=3&size=20") == rows("task:addition?digits=3&size=90")[:20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task:adition", "did you mean 'addition'"),
        ("task:", "there are addition, subtraction"),
        ("task:addition?digit=1", "did you mean 'digits'?"),
        ("task:addition?colour=1", "it has digits, size; take one of them"),
        ("task:addition?digits=two", "digits is a whole number from 1 to 9, not 'two'"),
        ("task:addition?digits=0", "digits is a whole number from 1 to 9, not '0'"),
        ("task:addition?digits=-1", "not '-1'"),
        ("task:addition?digits=99999999999999999999", "digits is a whole number from 1 to 9"),
        ("task:addition?digits=", "not ''"),
        ("task:addition?size=0", "size is a whole number from 1 to 1000000"),
        ("task:addition?digits", "arguments are written `?name=value&name=value`"),
        ("task:addition?digits=1&digits=2", "given twice"),
    ],
)
def test_names_that_mean_nothing(text: str, message: str) -> None:
    assert message in refused(text)


def test_a_split_that_is_not_there() -> None:
    assert "has the splits train and test, not 'tset'; did you mean 'test'" in refused(
        "task:addition", split="tset"
    )


WITHOUT = """
import sys
sys.modules["reasoning_gym"] = None
sys.modules["reasoning_gym.factory"] = None
from ycore.data.generated import gym_table
from ycore.errors import DataError
try:
    gym_table("gym:chain_sum", split="train", seed=0)
except DataError as problem:
    print(problem)
"""


def refused_gym(text: str, *, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        gym_table(text, split=split, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_the_way_out_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=240, check=True
    )
    assert "pip install 'ycore[gym]'" in done.stdout


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip(
            "reasoning_gym", reason="the optional package reasoning-gym is not installed"
        )

    def test_entries_can_be_scored_from_the_columns_alone(self) -> None:
        import reasoning_gym

        table = gym_table(
            "gym:chain_sum?size=30&min_terms=2&max_terms=3", split="train", seed=5
        )
        assert len(table.rows) == 30 and table.columns == (
            "prompt",
            "answer",
            "gym_task",
            "gym_entry",
        )
        for row in table.rows:
            entry = json.loads(row["gym_entry"])
            assert entry["question"] == row["prompt"] and entry["metadata"]["num_terms"] in (
                2,
                3,
            )
            score = reasoning_gym.get_score_answer_fn(row["gym_task"])
            assert score(row["answer"], entry) == 1.0
            assert score("no number", entry) < 1.0

    def test_splits_do_not_overlap_whatever_the_seed(self) -> None:
        train, test = (
            {
                row["prompt"]
                for seed in (0, 1)
                for row in gym_table("gym:chain_sum?size=200", split=split, seed=seed).rows
            }
            for split in ("train", "test")
        )
        assert train and test and not train & test

    def test_the_seed_decides_the_rows(self) -> None:
        same, again, other = (
            gym_table("gym:gcd?size=20", split="train", seed=seed).rows for seed in (1, 1, 2)
        )
        assert same == again != other

    def test_entries_that_json_cannot_hold_lose_only_that(self) -> None:
        for task in ("sudoku", "graph_color", "zebra_puzzles", "knights_knaves"):
            for row in gym_table(f"gym:{task}?size=2", split="train", seed=0).rows:
                assert json.loads(row["gym_entry"])["question"] == row["prompt"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("gym:chain_sm", "did you mean 'chain_sum'"),
            ("gym:", "such as chain_sum"),
            ("gym:chain_sum?min_term=2", "did you mean 'min_terms'"),
            ("gym:chain_sum?seed=2", "no argument 'seed'"),
            ("gym:chain_sum?min_terms=-3", "min_terms must be positive"),
            ("gym:chain_sum?min_terms=two", "change that argument"),
            ("gym:chain_sum?size=many", "size is a whole number"),
            ("gym:composite?size=3", "change"),
        ],
    )
    def test_names_that_mean_nothing(self, text: str, message: str) -> None:
        assert message in refused_gym(text)

    def test_a_split_that_is_not_there(self) -> None:
        assert "has the splits train and test" in refused_gym(
            "gym:chain_sum", split="validation"
        )
