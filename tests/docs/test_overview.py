"""The overview sends a newcomer to files and names that are there, and names every room."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "overview.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("row", rows("The way in"), ids=lambda row: row[0])
def test_the_way_in(row: list[str]) -> None:
    _, files, names = row
    paths = [ROOT / name for name in re.findall(r"`([^`]+)`", files)]
    assert paths and all(path.exists() for path in paths)
    text = "\n".join(path.read_text() for path in paths if path.is_file())
    for name in re.findall(r"`([^`]+)`", names):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), (
            f"{name} is in none of {files}"
        )


def test_every_room_is_on_the_page() -> None:
    listed = {name for row in rows("Rooms") for name in re.findall(r"`([^`]+)`", row[0])}
    rooms = {
        path.name
        for path in (ROOT / "ycore").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert listed == rooms - {"__init__.py"} | {"cli", "recipes"}
