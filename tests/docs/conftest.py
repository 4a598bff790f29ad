"""The benchmarks' scripts as modules, found as when they are run: they lie beside each other."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def load_script() -> Iterator[Callable[[str], Any]]:
    """By its name; after the test's file none of them is left loaded."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} - known:
        sys.modules.pop(name, None)
