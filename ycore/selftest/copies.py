"""A copy of the package to run from, so that what is tested stays the same, and can be changed on purpose.

A `Patch` is a small replacement in one file's text. It must apply exactly once: a defect that is not there cannot be
caught, and a scorecard that says so would be worthless.

Not here: which defects there are (`mutations`).
"""

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ycore.errors import RunError

_PACKAGES = ("ycore", "ycore_cli", "ycore_recipes")

_FLUSHES = '''"""Made by the selftest: says of every file that gets its last name whether it had been flushed."""

from ycore.selftest.flushes import watch_flushes

watch_flushes()
'''


@dataclass(frozen=True, slots=True)
class Edit:
    """`old`, which is found once in `file`, becomes `new`; `file` is relative to the folder of the packages."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A defect by name, and the edits that make it."""

    name: str
    edits: tuple[Edit, ...]

    def apply(self, root: Path) -> None:
        """RunError where an edit's text is not found, or found twice."""
        for edit in self.edits:
            path = root / edit.file
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            count = text.count(edit.old)
            if count != 1:
                raise RunError(f"the patch {self.name!r} does not apply: its text is {count} times in {edit.file}")
            path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def copy_package(folder: Path, patches: Sequence[Patch] = ()) -> Path:
    """Copy the three packages into `folder`, patched; with it in PYTHONPATH, a process imports these."""
    for name in _PACKAGES:
        shutil.copytree(_source(name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text(_FLUSHES, encoding="utf-8")
    for patch in patches:
        patch.apply(folder)
    return folder


def _source(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise RunError(f"the package {name} is not installed; pip install ycore")
    return Path(found.origin).parent
