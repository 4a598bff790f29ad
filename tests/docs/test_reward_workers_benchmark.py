"""The benchmark of confined reward workers runs and prints what the page quotes."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "reward_workers.py"


def test_it_prints_a_start_and_a_call_of_each_level() -> None:
    command = [sys.executable, str(SCRIPT), "none", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"none +start [\d.]+ s \(median .*\), call \d+ us \(median \d+ us\)\n", done.stdout
    )
