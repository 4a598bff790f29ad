"""Local files: every kind reads the same, and every malformed one is refused with its place."""

import csv
import gzip
import json
import string
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data import source
from ycore.data.prompts import PromptSet, load_prompts
from ycore.errors import DataError

ROWS = [
    {"prompt": "Two\u2028lines?", "answer": "a"},
    {"prompt": 'A "quoted",\nprompt', "answer": "b"},
]


def load(path: Path | str) -> PromptSet:
    return load_prompts(
        RunConfig(
            model="m",
            dataset=str(path),
            rewards=[RewardConfig(reward="exact_answer")],
            output="o",
        )
    )


def refused(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jsonl(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    name = path.name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ".csv" in name:
        plain = path.with_name("plain.csv")
        with plain.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        data = plain.read_bytes()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    else:
        text = (
            json.dumps(rows, indent=1)
            if ".json" in name and ".jsonl" not in name
            else jsonl(rows)
        )
        path.write_bytes(
            gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        )
    return path


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "json.gz", "csv.gz", "JSONL"]
)
def test_every_kind_of_file_reads_the_same(tmp_path: Path, suffix: str) -> None:
    prompt_set = load(write(tmp_path / f"data.{suffix}"))
    assert [prompt.content for prompt in prompt_set.prompts] == [row["prompt"] for row in ROWS]
    assert [prompt.columns for prompt in prompt_set.prompts] == [
        {"answer": "a"},
        {"answer": "b"},
    ]
    assert [prompt.row for prompt in prompt_set.prompts] == [0, 1]
    assert prompt_set.columns == ("answer",) and not prompt_set.is_chat
    assert prompt_set.identity == load(write(tmp_path / "same.jsonl")).identity


EDIT_AND_READ = """
import sys
from pathlib import Path
from ycore.data import source
path, change = Path(sys.argv[1]), sys.argv[2]
source._IN_MEMORY_BYTES = int(sys.argv[3])
rows = source.file_table(path).rows
path.write_text("" if change == "emptied" else path.read_text().replace("row 2", "now 2"))
try:
    print([row["prompt"] for row in rows])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("suffix", "change"),
    [(suffix, "emptied") for suffix in ("jsonl", "json", "csv", "parquet", "jsonl.gz")]
    + [(suffix, "rewritten") for suffix in ("jsonl", "json", "csv")],
)
def test_rows_stay_what_they_were_when_the_file_is_edited(
    tmp_path: Path, suffix: str, change: str
) -> None:
    """In a process of its own: where a file is mapped, reading what is no longer there ends it with SIGBUS."""
    path = tmp_path / f"data.{suffix}"
    rows = [{"prompt": f"row {number} " + "x" * 5000} for number in range(4)]
    write(path, rows)
    assert edit_and_read(path, change, 2**20) == str([row["prompt"] for row in rows])


@pytest.mark.parametrize(("change", "line"), [("emptied", 1), ("rewritten", 3)])
def test_a_changed_row_of_a_file_too_large_for_memory_is_refused(
    tmp_path: Path, change: str, line: int
) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"row {number}"} for number in range(4)])
    said = f"{path}, line {line}: the file was changed while it was in use; bring back what it was, and resume"
    assert edit_and_read(path, change, 0) == f"DataError: {said}"


def edit_and_read(path: Path, change: str, in_memory_bytes: int) -> str:
    words = [sys.executable, "-c", EDIT_AND_READ, str(path), change, str(in_memory_bytes)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout.strip()


def test_jsonl_under_a_json_suffix(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(jsonl(ROWS))
    assert len(load(tmp_path / "data.json").prompts) == 2


def test_a_byte_order_mark_and_blank_lines_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        '\ufeff\n{"prompt": "a"}\n\n{"prompt": "b"}\n\n', encoding="utf-8"
    )
    assert [prompt.content for prompt in load(tmp_path / "data.jsonl").prompts] == ["a", "b"]


def test_malformed_jsonl_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    assert f"{tmp_path / 'data.jsonl'}, line 3: malformed JSON" in refused(
        tmp_path / "data.jsonl"
    )


@pytest.mark.parametrize(
    ("line", "kind"), [('"text"', "str"), ("[1]", "list"), ("null", "NoneType"), ("7", "int")]
)
def test_a_row_that_is_no_object(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    message = refused(tmp_path / "data.jsonl")
    assert "line 2: a row is a JSON object" in message and f"not {kind}" in message


def test_an_entry_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('[{"prompt": "a"}, 3]')
    assert "entry 1: a row is a JSON object" in refused(tmp_path / "data.json")


def test_json_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "\n")
    assert "line 1: malformed JSON" in refused(tmp_path / "data.jsonl")


def test_text_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert "line 2: not UTF-8" in refused(tmp_path / "data.jsonl")


def test_a_null_prompt_names_row_and_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": null}\n')
    assert f"is null in row 1 (line 3) of {tmp_path / 'data.jsonl'}" in refused(
        tmp_path / "data.jsonl"
    )


def test_a_row_without_the_column_is_a_null_prompt(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"answer": "b"}\n')
    assert "is null in row 1 (line 2)" in refused(tmp_path / "data.jsonl")


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert "is empty" in refused(tmp_path / name)


def test_a_csv_file_of_a_header_alone(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt,answer\n")
    assert "is empty" in refused(tmp_path / "data.csv")


@pytest.mark.parametrize("record", ["only", "one,two,three"])
def test_a_csv_record_of_another_length_names_its_line(tmp_path: Path, record: str) -> None:
    (tmp_path / "data.csv").write_text(f'prompt,answer\n"two\nlines",b\n\n{record}\n')
    message = refused(tmp_path / "data.csv")
    assert "line 5" in message and "for the 2 columns" in message


def test_a_csv_quote_that_never_closes(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('prompt,answer\n"a,b\n')
    assert "line 2: malformed CSV" in refused(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("name", "header"), [("a.tsv", "question\tanswer, short"), ("a.csv", "a, b;question;x")]
)
def test_a_header_may_have_another_separator_in_a_name(
    name: str, header: str, tmp_path: Path
) -> None:
    sign = "\t" if name == "a.tsv" else ";"
    path = tmp_path / name
    path.write_text(f"{header}\n{sign.join('12345'[: header.count(sign) + 1])}\n")
    assert source.file_table(path).columns == tuple(header.split(sign))


def test_the_index_that_pandas_writes_is_a_column(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(",prompt\n0,a\n")
    assert source.file_table(tmp_path / "data.csv").columns == ("Unnamed: 0", "prompt")


@pytest.mark.parametrize("header", ["prompt,prompt", "prompt,"])
def test_csv_columns_that_cannot_be_told_apart(tmp_path: Path, header: str) -> None:
    (tmp_path / "data.csv").write_text(f"{header}\na,b\n")
    assert "distinct column names" in refused(tmp_path / "data.csv")


def test_an_empty_csv_prompt_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt,answer\na,b\n,c\n")
    assert "is empty in row 1 (line 3)" in refused(tmp_path / "data.csv")


@pytest.mark.parametrize("content", [b"", b"PAR1 but no more", b"{}"])
def test_a_file_that_is_not_parquet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.parquet").write_bytes(content)
    assert "cannot be read as Parquet" in refused(tmp_path / "data.parquet")


def test_a_gzip_file_cut_short(tmp_path: Path) -> None:
    whole = gzip.compress(jsonl(ROWS).encode())
    for data in (whole[:-4], whole[:12], b"{}"):
        (tmp_path / "data.jsonl.gz").write_bytes(data)
        assert "cannot be read" in refused(tmp_path / "data.jsonl.gz")


def test_a_gzip_file_that_becomes_a_thousand_times_larger(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (80 << 20)))
    assert path.stat().st_size < 100_000
    assert "holds more than 64 MB" in refused(path) and "unpack it with gunzip" in refused(path)


def test_no_such_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS))
    message = refused(tmp_path / "trian.jsonl")
    assert (
        message.startswith("no such dataset file") and "did you mean 'train.jsonl'?" in message
    )


@pytest.mark.parametrize(
    "name", ["./none", "nowhere/none.csv", "none.parquet", "/a/b/c", "x" * 300 + ".jsonl"]
)
def test_no_such_file(name: str) -> None:
    assert refused(name).startswith("no such dataset file")


def test_a_folder_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS))
    assert "is a folder; name one file in it, such as train.jsonl" in refused(tmp_path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    assert "one of .jsonl, .json, .csv" in refused(tmp_path / "data.xlsx")


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mutated_lines_are_read_or_refused_in_one_line(
    tmp_path: Path, data: st.DataObject
) -> None:
    line = bytearray(
        json.dumps({"prompt": "What is 3 + 4?", "answer": "7", "extra": [1, None]}).encode()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(line) - 1))
        line[place] = data.draw(
            st.integers(0, 255) | st.sampled_from(string.printable.encode())
        )
    path = tmp_path / "data.jsonl"
    path.write_bytes(bytes(line))
    try:
        load(path)
    except DataError as problem:
        assert "\n" not in str(problem)
