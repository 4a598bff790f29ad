"""The notebook runs from its first cell to its last, in a real kernel, with a tiny model in the place of its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "first-run.ipynb"
TINY = """model = "model"
settings = {
    "steps": 2, "max_tokens": 4, "output": "runs/notebook", "engine": "transformers", "dtype": "float32",
    "prompts_per_step": 2, "group_size": 2, "reward_workers": {"workers": 1},
}
"""


@pytest.mark.slow
@pytest.mark.verify
def test_every_cell_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip(
        "nbformat", reason="the notebook's packages are not installed"
    )
    client = pytest.importorskip("nbclient", reason="the notebook's packages are not installed")
    write_tiny_model(tmp_path / "model")
    book = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
    settings.source = TINY
    client.NotebookClient(
        book, timeout=800, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = [words(cell) for cell in cells_of(book)]
    assert "step 2/2" in said[2] and "'status': 'finished'" in said[2]
    assert (
        "report.html" in said[3] and (tmp_path / "runs" / "notebook" / "report.html").is_file()
    )
    assert "runs/notebook holds this run, finished" in said[-1]


def cells_of(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def words(cell: Any) -> str:
    parts = [
        output.get("text") or "".join(output.get("data", {}).values())
        for output in cell.outputs
    ]
    return "\n".join(map(str, parts))
