"""The whole of it: what a dataset's name means, real datasets, and what it costs to look."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import PromptSet, check_dataset, load_prompts
from ycore.errors import DataError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
COLD = """
import sys, time
from ycore.config.schema import RunConfig
from ycore.data.prompts import check_dataset
begin = time.monotonic()
found = check_dataset(RunConfig(model="m", dataset=sys.argv[1], rewards=[{"reward": "r"}], output="o"))
print(len(found.prompts), time.monotonic() - begin, *({"torch", "transformers", "trl", "datasets"} & set(sys.modules)))
"""


def config(dataset: str | Path, **options: Any) -> RunConfig:
    return RunConfig(
        model="m", dataset=str(dataset), rewards=[RewardConfig(reward="exact_answer")], output="o", **options
    )


def load(dataset: str | Path, **options: Any) -> PromptSet:
    return load_prompts(config(dataset, **options))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def real(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"the shared dataset {name} is not on this machine")
    return path


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": None})
    assert [prompt.content for prompt in load(path, limit=2).prompts] == ["a", "b"]
    assert len(load("task:addition", limit=7).prompts) == 7
    assert len(load("task:addition", limit=700_000).prompts) == 80


def test_the_fingerprint_is_the_contents(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    path = write(tmp_path / "d.jsonl", *rows)
    first = load(path).fingerprint
    assert first == load(path).fingerprint == load(write(tmp_path / "other.jsonl", *rows)).fingerprint
    changed = {
        load(write(tmp_path / "1.jsonl", rows[1], rows[0])).fingerprint,
        load(write(tmp_path / "2.jsonl", rows[0])).fingerprint,
        load(write(tmp_path / "3.jsonl", rows[0], {"prompt": "b", "answer": "3"})).fingerprint,
        load(path, system_prompt="be brief").fingerprint,
        load(path, answer_column="prompt").fingerprint,
    }
    assert len(changed) == 5 and first not in changed


def test_the_fingerprint_takes_what_json_cannot(tmp_path: Path) -> None:
    import datetime
    import decimal

    import pyarrow
    import pyarrow.parquet

    row = {"prompt": "a", "when": datetime.date(2020, 1, 1), "cost": decimal.Decimal("1.5"), "raw": b"\xff"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    found = load(tmp_path / "d.parquet")
    assert found.prompts[0].columns["when"] == row["when"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "raw": b"\xfe"}]), tmp_path / "e.parquet")
    assert load(tmp_path / "e.parquet").fingerprint != found.fingerprint


def test_as_chat_and_system_prompt(tmp_path: Path) -> None:
    plain = config("task:addition?size=1")
    assert not load_prompts(plain).is_chat
    assert load_prompts(plain, as_chat=True).is_chat
    briefed = load_prompts(config("task:addition?size=1", system_prompt="Be brief."))
    assert briefed.is_chat and briefed.prompts[0].content[0] == {"role": "system", "content": "Be brief."}
    again = check_dataset(config("task:addition?size=1", system_prompt="Be brief."))
    assert list(briefed.prompts) == list(again.prompts)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tasks:addition?digits=1", "'task:addition?digits=1'"),
        ("taks:addition", "'task:addition'"),
        ("gyms:chain_sum", "'gym:chain_sum'"),
        ("addition?digits=1", "'task:addition?digits=1'"),
        ("addition", "'task:addition'"),
        ("", "--dataset is empty"),
    ],
)
def test_slips_of_the_pen(name: str, meant: str) -> None:
    with pytest.raises(DataError, match=r"no dataset|is empty") as caught:
        load(name)
    assert meant in str(caught.value)


def test_ten_thousand_rows_are_checked_in_two_seconds_without_torch(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + {n}? " * 10, "answer": str(2 * n)} for n in range(10_000)]
    path = write(tmp_path / "d.jsonl", *rows)
    done = subprocess.run(
        [sys.executable, "-c", COLD, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    num_rows, seconds, *loaded = done.stdout.split()
    assert (num_rows, loaded) == ("10000", [])
    assert float(seconds) < 2


def test_gsm8k_works_as_it_is() -> None:
    begin = time.monotonic()
    found = load(real("gsm8k/train.jsonl"))
    assert time.monotonic() - begin < 10
    assert len(found.prompts) == 7473 and found.columns == ("answer",)
    assert all("#### " in prompt.columns["answer"] for prompt in found.prompts)
    assert isinstance(found.prompts[0].content, str) and found.prompts[0].content.startswith("Natalia sold clips")


def test_real_preference_pairs_ask_with_what_is_before_the_last_answer() -> None:
    found = load(real("hh-rlhf/harmless-base-test.jsonl.gz"))
    assert len(found.prompts) == 2312 and found.columns == ("rejected",)
    assert all(prompt.content[-1]["role"] == "user" for prompt in found.prompts)


def test_humaneval_works_as_it_is() -> None:
    found = load(real("humaneval/HumanEval.jsonl.gz"))
    assert len(found.prompts) == 164
    assert set(found.columns) == {"task_id", "canonical_solution", "test", "entry_point"}


def test_a_rank_holds_what_it_draws_and_not_the_dataset(tmp_path: Path) -> None:
    """30 MB of prompts are opened and looked at within a few, and any one of them can be drawn."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for row in range(300):
            file.write(json.dumps({"prompt": f"{row} " + "x" * 100_000, "answer": str(row)}) + "\n")
    tracemalloc.start()
    prompts = load(path).prompts
    drawn = prompts[217]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn.columns == {"answer": "217"} and str(drawn.content).startswith("217 xxx")
    assert len(prompts) == 300 and peak < 3_000_000
