"""The house: its size, which room may import which, and what no file may say.

The limits on size push from both sides: the totals against growth and scattering, the smallest file against splitting
what belongs together, the longest function against cramming. Raise one only on purpose, with the reason in the commit.
"""

import ast
import re
import subprocess
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "ycore").rglob("*.py"), *(ROOT / "cli").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])

MOST_LINES = 45_800
MOST_FILES = 248
MOST_FILE_LINES = 450
MOST_FUNCTION_LINES = 60
FEWEST_CODE_LINES = 40
"""Of a file with one importer: a smaller one belongs beside its importer."""

STEP_LINES = 150
"""The algorithm fits on one screen."""

# From the ground up: a room may import the rooms before it, and itself.
ROOMS = [
    *("errors", "types", "run", "sandbox", "config", "models", "data", "rewards", "environments", "judge"),
    *("placement", "engine", "view", "round", "flow", "plan", "trl", "trainer", "launch", "tools", "cli"),
]
HEAVY = {"torch", "transformers", "trl", "vllm", "datasets", "accelerate", "peft", "deepspeed", "matplotlib"}
MAY_BE_HEAVY = {"round", "flow", "trl"}
HEAVY_FILES = {
    "engine/transformers_engine.py",
    "engine/vllm_extension.py",
    "engine/shared_bucket.py",
    "engine/weight_proof.py",
    "engine/weights.py",
    "tools/device_engines.py",
    "tools/device_training.py",
    "trainer/evaluation.py",
    "trainer/saved_state.py",
    "trainer/example_run.py",
    "trainer/flow_run.py",
    "trainer/rollout_run.py",
    "trainer/trackers.py",
    "trainer/training_run.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "ycore":
        parts[0] = f"ycore_{parts[0]}"
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "ycore" else parts[0]


FILES = {name_of(path): path for path in SOURCES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, at any depth of its code; of ours, the file that it reaches."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in inner.values()}
    return frozenset(names)


def imports_at_the_top(path: Path) -> set[str]:
    nodes = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


def num_code_lines(path: Path) -> int:
    """Lines that are neither blank, nor an import, nor the module's docstring."""
    tree, skipped = tree_of(path), set[int]()
    docstring = tree.body[:1] if ast.get_docstring(tree) else []
    for node in [*docstring, *(n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))]:
        skipped |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = path.read_text().splitlines()
    return sum(1 for number, line in enumerate(lines, 1) if line.strip() and number not in skipped)


def test_the_whole_stays_small() -> None:
    num_lines = sum(len(path.read_text().splitlines()) for path in SOURCES)
    assert 40 < len(SOURCES) <= MOST_FILES
    assert num_lines <= MOST_LINES


def test_the_step_fits_on_one_screen() -> None:
    assert len((ROOT / "ycore" / "round" / "step.py").read_text().splitlines()) <= STEP_LINES


def test_no_two_files_share_a_name() -> None:
    counts = Counter(path.name for path in SOURCES if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_small_file_has_one_importer() -> None:
    importers = defaultdict[str, set[Path]](set)
    for path in SOURCES:
        for name in imports(path) & FILES.keys() - {name_of(path)}:
            importers[name].add(path)
    small = [name for name, path in FILES.items() if num_code_lines(path) < FEWEST_CODE_LINES and path.stem[0] != "_"]
    assert [name for name in small if len(importers[name]) == 1] == []


def test_no_files_import_each_other() -> None:
    graph = {name: imports(path) & FILES.keys() - {name} for name, path in FILES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_between_rooms(path: Path) -> None:
    room = room_of(path)
    known = {name.split(".")[1] for name in imports(path) if name.startswith("ycore.")} - {room}
    if room in ("__init__", "recipes"):
        assert not known
        return
    below = set(ROOMS[: ROOMS.index(room)])
    assert known <= below, f"{room} must not know {sorted(known - below)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shape(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "every file opens with what it is"
    assert len(path.read_text().splitlines()) <= MOST_FILE_LINES
    assert path.name != "utils.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines, {MOST_FUNCTION_LINES} at most"


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
