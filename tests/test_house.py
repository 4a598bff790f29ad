"""The house: which room may know which, how big a file may grow, and what no file may say."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "ycore").rglob("*.py"), *(ROOT / "cli").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])

# From the ground up: a room may import the rooms before it, and itself.
ROOMS = [
    *("errors", "types", "run", "config", "models", "data", "rewards", "judge", "placement", "engine", "view", "round"),
    *("plan", "trl", "trainer", "launch", "tools", "cli"),
]
HEAVY = {"torch", "transformers", "trl", "vllm", "datasets", "accelerate", "peft", "deepspeed", "matplotlib"}
MAY_BE_HEAVY = {"round", "trl"}
HEAVY_FILES = {
    "engine/transformers_engine.py",
    "engine/vllm_extension.py",
    "engine/weights.py",
    "trainer/callbacks.py",
    "trainer/saved_state.py",
    "trainer/training_run.py",
    "trainer/tuning_run.py",
}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "ycore" else parts[0]


def imports(path: Path) -> list[str]:
    """Every module that a file names in an import, at any depth of its code."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def imports_at_the_top(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    nodes = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_between_rooms(path: Path) -> None:
    room = room_of(path)
    known = {name.split(".")[1] for name in imports(path) if name.startswith("ycore.")} - {room, "ycore"}
    if room in ("__init__", "recipes"):
        assert not known
        return
    below = set(ROOMS[: ROOMS.index(room)])
    assert known <= below, f"{room} must not know {sorted(known - below)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shape(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "every file opens with what it is"
    assert text.count("\n") <= 350, "a file of more than 350 lines is two files"
    assert path.name != "utils.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines, 60 at most"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_imports_wait(path: Path) -> None:
    """The command line answers at once because nothing on its way imports these at the top of a file."""
    relative = str(path.relative_to(ROOT / "ycore")) if path.is_relative_to(ROOT / "ycore") else path.name
    if room_of(path) in MAY_BE_HEAVY or relative in HEAVY_FILES:
        return
    assert not imports_at_the_top(path) & HEAVY


def test_no_file_names_a_machine() -> None:
    private = re.compile("/" + r"work/|/" + r"root/|/opt/" + r"wheels|pypi\.org/" + "simple")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    ours = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert len(ours) > 40
    offenders = [str(path.relative_to(ROOT)) for path in ours if private.search(path.read_text(errors="ignore"))]
    assert offenders == []
