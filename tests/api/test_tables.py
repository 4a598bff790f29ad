"""How a plan names what it read."""

from pathlib import Path

import pytest

from ycore.api.tables import _with_split


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("openai/gsm8k", "openai/gsm8k, split test"),
        ("openai/gsm8k:main", "openai/gsm8k:main, split test"),
        ("rows/mine.jsonl", "rows/mine.jsonl"),
        ("task:addition?digits=1", "task:addition?digits=1"),
        ("", "none"),
    ],
)
def test_the_split_is_named_that_is_read_of_a_hub_dataset(
    dataset: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine.jsonl").touch()
    assert _with_split({"dataset": dataset, "split": "test"}) == words
