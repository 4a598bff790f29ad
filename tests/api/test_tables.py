"""How a plan names what it read."""

from pathlib import Path

import datasets
import pytest

import ycore
from tests.tiny_model import write_tiny_model


def test_the_splits_that_were_read_are_named_where_a_dataset_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model")
    rows = datasets.Dataset.from_list([{"prompt": f"{n}?", "answer": f"{n}"} for n in range(8)])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk("several")
    rows.save_to_disk("one")

    def planned(command: str, dataset: str, **settings: object) -> str:
        plan = ycore.dry_run(command, model="model", dataset=dataset, output="run", **settings)
        return " ".join(str(plan).split())

    measured = planned("eval", "several", split="test", reward="exact_answer")
    assert "dataset several, split test: 8 rows" in measured
    assert "dataset one: 8 rows" in planned("eval", "one", reward="exact_answer")
    trained = planned("grpo", "several", eval_dataset="several", reward="exact_answer")
    assert "dataset several, split train: 8 rows" in trained
    assert "held out several, split test: 8 rows" in trained
    given = planned("sft", "several", eval_split="test", columns={"completion": "answer"})
    assert (
        "dataset several, split train: 8 rows to train on, 8 held out of several, split test"
        in given
    )
