"""Decide which files a person's own code may see in a confined process: never those of a run.

The working folder, the folders of its files and those that Python imports from are shown read-only. In them are hidden:
the run's folder and other runs, every name that begins with a dot, and sockets, because a read-only folder keeps nobody
from connecting. The search is bounded, because the working folder may be a whole home; it takes the shallow ones first.
"""

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ycore.run.files import RunFolder
from ycore.sandbox import GIB, SCRATCH, Confinement, Limits, View
from ycore.sandbox.channel import names_file
from ycore.sandbox.confine import python_paths, source_paths
from ycore.sandbox.level import choose_level, require_sandbox

_MAX_ENTRIES = 20_000  # looked at
_MAX_HIDDEN = 1_000  # a command line of bwrap takes 9000 words
_HARMLESS = frozenset(
    {".gitignore", ".gitattributes", ".gitkeep", ".python-version", ".editorconfig"}
)
_NEVER_WHOLE = (
    Path("/"),
    SCRATCH,
    *(Path(name) for name in ("/home", "/var/tmp", "/dev/shm", "/dev", "/etc")),
)
"""Folders of which code sees the Python files that lie beside it, and nothing else."""


def user_code_confinement(
    names: Sequence[str],
    *,
    read: Sequence[str],
    network: bool,
    gpu: bool,
    level: str,
    memory_gib: float,
    run_folder: Path | None,
    run_id: str,
) -> Confinement:
    """Return the confinement of a worker for functions and classes that a person wrote.

    Args:
        names: `file.py:name` or `module:name` each; the folders of the files are shown.
        read: more files and folders to show.
        level: a setting of the sandbox: `auto` or a level.
        run_folder: hidden but for its images, and for those of the named files that lie in it.

    Raises:
        ConfigError: this machine does not offer the level, or for `auto` none; only ycore's own rewards, which have no
            colon, then run unconfined.
    """
    files = [
        Path(name.rpartition(":")[0]).expanduser().absolute()
        for name in names
        if names_file(name)
    ]
    readable = [Path(name).expanduser().absolute() for name in read]
    working = Path.cwd()
    folders = [
        working,
        *source_paths(),
        *(file.parent for file in files),
        *(file.resolve().parent for file in files),
    ]
    visible = [path for folder in dict.fromkeys(folders) for path in _parts(folder)]
    if run_folder is not None:
        run_folder = run_folder.absolute()
        if (images := RunFolder(run_folder).images).is_dir():
            readable.append(images)
    hidden = list(_hidden_in(visible, run_folder, (*python_paths(), *files, *readable)))
    if run_folder is not None and any(path.is_relative_to(run_folder) for path in visible):
        visible = [path for path in visible if not path.is_relative_to(run_folder)]
        visible += [file for file in files if file.is_relative_to(run_folder)]
    view = View(
        read=tuple(dict.fromkeys([*visible, *readable])),
        hidden=tuple(hidden),
        network=network,
        devices=gpu,
        working=working if working in visible else None,
    )
    choice = choose_level(level)
    if not names or any(":" in name for name in names):
        require_sandbox(choice, "code that is not ycore's own")
    return Confinement(choice.level, run_id, view, Limits(memory=int(memory_gib * GIB)))


def sources_view() -> View:
    """Return the view of a program that imports what this Python imports, and sees nothing else of a person's."""
    visible = [path for folder in source_paths() for path in _parts(folder)]
    return View(read=tuple(visible), hidden=tuple(_hidden_in(visible, None, python_paths())))


def _parts(folder: Path) -> list[Path]:
    """Return the folder, or the Python files in one that everybody writes to or that holds the whole system."""
    return sorted(folder.glob("*.py")) if folder in _NEVER_WHOLE else [folder]


def _hidden_in(
    visible: Iterable[Path], run_folder: Path | None, kept: Collection[Path]
) -> Iterator[Path]:
    """Yield what stays hidden in these folders. `kept` is visible wherever it lies, without what lies around it."""
    if run_folder is not None:
        yield run_folder
    waiting = deque(path for path in visible if path.is_dir())
    num_entries = num_hidden = 0
    while waiting and num_entries < _MAX_ENTRIES and num_hidden < _MAX_HIDDEN:
        with suppress(OSError), os.scandir(waiting.popleft()) as entries:
            for entry in entries:
                num_entries += 1
                path = Path(entry.path)
                if path in kept:
                    continue
                if _is_private(entry):
                    num_hidden += 1
                    yield path
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)


def _is_private(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith("."):
        return entry.name not in _HARMLESS
    if entry.is_dir(follow_symlinks=False):
        return os.path.exists(os.path.join(entry.path, "run.json"))
    return not entry.is_file() and not entry.is_symlink()  # a socket, a pipe
