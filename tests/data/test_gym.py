"""reasoning-gym's tasks as datasets."""

import json
import subprocess
import sys

import pytest

from ycore.data.generated import gym_table
from ycore.errors import DataError

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


def refused(text: str, *, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        gym_table(text, split=split, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_the_way_out_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'ycore[gym]'" in done.stdout


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("reasoning_gym", reason="the optional package reasoning-gym is not installed")

    def test_entries_can_be_scored_from_the_columns_alone(self) -> None:
        import reasoning_gym

        table = gym_table("gym:chain_sum?size=30&min_terms=2&max_terms=3", split="train", seed=5)
        assert len(table.rows) == 30 and table.columns == ("prompt", "answer", "gym_task", "gym_entry")
        for row in table.rows:
            entry = json.loads(row["gym_entry"])
            assert entry["question"] == row["prompt"] and entry["metadata"]["num_terms"] in (2, 3)
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
        same, again, other = (gym_table("gym:gcd?size=20", split="train", seed=seed).rows for seed in (1, 1, 2))
        assert same == again != other

    def test_entries_that_json_cannot_hold_lose_only_that(self) -> None:
        for task in ("sudoku", "graph_color", "zebra_puzzles", "knights_knaves"):
            for row in gym_table(f"gym:{task}?size=2", split="train", seed=0).rows:
                assert json.loads(row["gym_entry"])["question"] == row["prompt"]

    @pytest.mark.parametrize(
        ("text", "found"),
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
    def test_names_that_mean_nothing(self, text: str, found: str) -> None:
        assert found in refused(text)

    def test_a_split_that_is_not_there(self) -> None:
        assert "has the splits train and test" in refused("gym:chain_sum", split="validation")
