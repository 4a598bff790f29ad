"""Every Python example of CONTRIBUTING.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
SECTIONS = re.findall(r"^### (.+?)$", PAGE.read_text(), re.MULTILINE)


def examples(section: str) -> list[str]:
    text = PAGE.read_text().partition(f"### {section}\n")[2].partition("\n### ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_examples_run(section: str) -> None:
    codes = examples(section)
    assert codes
    for code in codes:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_files_that_it_names_are_there() -> None:
    paths = re.findall(r"`((?:ycore|tests|docs)/[\w/.]+)`", PAGE.read_text())
    assert len(paths) > 8
    assert [path for path in paths if not (PAGE.parent / path).exists()] == []
