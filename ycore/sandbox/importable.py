"""Decide which paths a confined process reads to import what this Python imports.

`python_paths` are Python, its environment and ycore. `source_paths` are where a person keeps code that this Python
imports from its place: editable installs, `.pth` files, PYTHONPATH, zip archives. Inside, Python reads the same `.pth`
files when it starts, so that its import system finds all that it may read.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

import ycore


def site_packages() -> list[str]:
    """Return where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def python_paths(*, packages: bool = True) -> tuple[Path, ...]:
    """Return the paths that this Python reads to start and, with `packages`, to import what is installed."""
    names = [
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        *sysconfig.get_paths().values(),
        *(site_packages() if packages else []),
        sys.executable,
        os.path.realpath(sys.executable),
        os.path.dirname(ycore.__file__),
    ]
    paths = dict.fromkeys(Path(name).absolute() for name in names if os.path.exists(name))
    return tuple(path for path in paths if not path.is_relative_to("/usr"))


def source_paths() -> tuple[Path, ...]:
    """Return the files and folders outside of `python_paths` that every Python of this environment imports from."""
    of_this_process = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    of_this_process -= set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    entries = [
        entry for entry in sys.path if os.path.isabs(entry) and entry not in of_this_process
    ]
    # A strict editable install of setuptools is a folder of links.
    links = [path for path in map(Path, entries) if path.name.startswith("__editable__")]
    linked = [file.resolve().parent for folder in links for file in folder.rglob("*.*")]
    python = [*python_paths(), Path("/usr")]
    return tuple(
        path
        for path in dict.fromkeys([*map(Path, (*entries, *_mapped_paths())), *linked])
        if path.exists() and not any(path.is_relative_to(folder) for folder in python)
    )


def _mapped_paths() -> Iterator[str]:
    """Yield where the finders of editable installs look: those of setuptools, and of `editables`, which hatch uses."""
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        for path in getattr(module, "MAPPING", {}).values():
            yield from (f"{path}{suffix}" for suffix in ("", *all_suffixes()))
        for folders in getattr(module, "NAMESPACES", {}).values():
            yield from folders
        for file in getattr(finder, "_redirections", {}).values():
            yield file.removesuffix(f"{os.sep}__init__.py")
