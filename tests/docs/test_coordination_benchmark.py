"""The benchmark of coordination, for real and small; and that the others beside it can be loaded at all."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def test_one_and_two_controllers_play_a_round(tmp_path: Path) -> None:
    script, output = BENCHMARKS / "coordination.py", tmp_path / "out"
    sizes = [
        "--controllers",
        "1",
        "2",
        "--rounds",
        "1",
        "--payload-mb",
        "0.01",
        "--timeout",
        "60",
    ]
    command = [sys.executable, str(script), *sizes, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Machine: " in done.stdout
    results = json.loads((output / "results.json").read_text())
    parallel, central = results["parallel"], results["central"]
    assert [(row["controllers"], row["engines"]) for row in parallel] == [(1, 1), (2, 2)]
    assert [(row["controllers"], row["engines"]) for row in central] == [(1, 1), (1, 2)]
    through = [row["bytes_busiest"] for row in central]
    assert through[1] == 2 * through[0] > 0, (
        "a central controller carries what every engine gets"
    )
    assert all(row["cpu_s_busiest"] >= row["cpu_s_mean"] > 0 for row in (*parallel, *central))
    assert (output / "coordination.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_script_can_be_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that a script takes from ycore are still there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    try:
        importlib.import_module(name)
    finally:
        for other in {path.stem for path in BENCHMARKS.glob("*.py")} - known:
            sys.modules.pop(other, None)
