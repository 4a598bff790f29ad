"""TRL's gathers of text: that they are where the seam looks for them, and that only the text stays local."""

import inspect

import pytest
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ycore.trl.seam import texts_stay_local


def test_trl_gathers_texts_by_the_name_that_is_swapped() -> None:
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'self._logs["prompt"].extend(gather_object(prompts))' in source
    assert 'self._logs["completion"].extend(gather_object(completions))' in source
    module = inspect.getsource(grpo_trainer)
    assert source.count("gather_object(") == module.count("gather_object("), (
        "TRL gathers objects elsewhere too"
    )


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record what reaches TRL's own gather."""
    reached: list[list[str]] = []

    def gather_object(items: list[str]) -> list[str]:
        reached.append(items)
        return items * 2

    monkeypatch.setattr(grpo_trainer, "gather_object", gather_object)
    return reached


def test_texts_stay_and_names_are_gathered(gathered: list[list[str]]) -> None:
    before = grpo_trainer.gather_object
    with texts_stay_local(3, logs_completions=False):
        assert grpo_trainer.gather_object(["a", "b", "c"]) == ["a", "b", "c"]
        assert grpo_trainer.gather_object(["column"]) == ["column", "column"]
    assert gathered == [["column"]]
    assert grpo_trainer.gather_object is before


def test_a_table_of_completions_gets_all(gathered: list[list[str]]) -> None:
    with texts_stay_local(3, logs_completions=True):
        assert grpo_trainer.gather_object(["a", "b", "c"]) == ["a", "b", "c"] * 2
    assert gathered == [["a", "b", "c"]]
