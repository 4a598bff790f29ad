import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ycore.errors import RunFolderError
from ycore.run import files
from ycore.run.claim import is_held
from ycore.run.files import (
    LineFollower,
    RunFolder,
    parse_json,
    read_json,
    read_regular,
    write_json_atomic,
)
from ycore.run.metrics import read_metrics
from ycore.run.resuming import read_round
from ycore.view.activity import read_work


def test_written_values_come_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": [1, None]})
    write_json_atomic(path, {"b": "ü"})
    assert read_json(path) == {"b": "ü"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"kept": True})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"lost": float("nan")})
    assert read_json(path) == {"kept": True}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code = (
        "import sys; from pathlib import Path; from ycore.run.files import write_json_atomic\n"
        "while True: write_json_atomic(Path(sys.argv[1]), {'numbers': list(range(20000))})"
    )
    for moment in range(5):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
        while not path.exists() and writer.poll() is None:
            time.sleep(0.01)
        time.sleep(0.02 * moment)
        writer.kill()
        writer.wait()
        assert len(read_json(path)["numbers"]) == 20000


@pytest.mark.parametrize("content", ["", "{", '{"a": 1'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json is not JSON"):
        read_json(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="so it is no run's folder; name"):
        read_json(tmp_path / "run.json")


def make_strange(path: Path, kind: str) -> Path:
    """Put what is no file at `path`: a FIFO would be waited for, a device read without end."""
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["folder", "FIFO", "device"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = make_strange(tmp_path / "run.json", kind)
    with pytest.raises(ValueError, match=f"it is .*{kind}.* and not a file"):
        read_regular(path, max_bytes=2**20)
    with pytest.raises(RunFolderError, match=r"run\.json is not JSON \(it is a"):
        read_json(path)
    assert LineFollower(path).read() == []


def test_a_file_is_measured_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(20 * 2**30)
    with pytest.raises(ValueError, match="it has 21474836480 bytes, and at most 1000 are read"):
        read_regular(path, max_bytes=1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 200 + "]" * 200, "nested more than 100 levels"),
        ('{"hidden_size": 1' + "0" * 4000 + "}", "an integer beyond"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "integer"),
    ],
)
def test_json_of_strangers_is_bounded(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    assert parse_json(json.dumps({"model_max_length": int(1e30)})) == {
        "model_max_length": int(1e30)
    }


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"a\n" + b"x" * 10)
    follower = LineFollower(path)
    assert follower.read() == [b"a"]
    with path.open("ab") as file:
        file.write(b"y\nb\n")
    assert follower.read() == [b"x" * 10 + b"y", b"b"]


@pytest.mark.parametrize("content", ["null", "[]", '"x"', "5", "[" * 100_000])
def test_a_file_of_a_run_that_holds_no_object_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json.*was not written by ycore"):
        read_json(file)


def test_a_run_that_somebody_else_wrote_is_read_in_bounds(tmp_path: Path) -> None:
    for name in ("run.json", "metrics.jsonl", "round-000001-rank-0.json", "work.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 20 * 2**30)
    with pytest.raises(RunFolderError, match=r"run\.json.*at most"):
        read_json(tmp_path / "run.json")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl.*at most"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="at most"):
        read_round(tmp_path / "round-000001-rank-0.json")
    assert read_work(tmp_path / "work.json") is None


@pytest.mark.parametrize(
    "content",
    [
        "null",
        "[" * 5000,
        '{"words": "x", "total": "a", "done": 1}',
        '{"words": "x", "began": []}',
        '{"words": "x", "count": [1]}',
    ],
)
def test_what_a_process_did_not_publish_is_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text(content)
    assert read_work(tmp_path / "work.json") is None


def test_pipes_in_a_runs_folder_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("work.json", ".lock", "round-000001-rank-0.json"):
        os.mkfifo(tmp_path / name)
    assert not is_held(RunFolder(tmp_path))
    assert read_work(tmp_path / "work.json") is None
    with pytest.raises(RunFolderError, match="it is a FIFO"):
        read_round(tmp_path / "round-000001-rank-0.json")


def test_a_line_without_end_is_left_with_all_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_LINE_BYTES", 100)
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + b"x" * 250 + b"\nb\nhal")
    follower = LineFollower(path)
    assert follower.read() == [b"a", b"?"]
    with path.open("ab") as file:
        file.write(b"f\nc\n")
    assert follower.read() == [b"f", b"c"]
