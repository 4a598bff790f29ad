import subprocess
import sys
import time
from pathlib import Path

import pytest

from ycore.errors import RunFolderError
from ycore.run.files import read_json, write_json_atomic


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
    with pytest.raises(RunFolderError, match="no such file"):
        read_json(tmp_path / "run.json")
