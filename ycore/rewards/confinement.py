"""How a worker of rewards is held: its level and limits, and which files it may see (never those of the run).

The working folder and the folders of reward files are shown read-only. In them are hidden: the run's folder and other
runs, every name that begins with a dot, and sockets, because a read-only folder keeps nobody from connecting. The
search is bounded, because the working folder may be a whole home; it takes the shallow ones first.
"""

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings
from ycore.rewards.loading import is_file
from ycore.run.paths import RunFolder
from ycore.sandbox import GIB, Confinement, Limits, View
from ycore.sandbox.level import choose
from ycore.sandbox.namespaces import SCRATCH, python_paths

_MOST_ENTRIES = 20_000  # looked at
_MOST_HIDDEN = 1_000  # a command line of bwrap takes 9000 words
_HARMLESS = frozenset(
    {".gitignore", ".gitattributes", ".gitkeep", ".python-version", ".editorconfig"}
)
_NEVER_WHOLE = (
    Path("/"),
    SCRATCH,
    Path("/home"),
    Path("/var/tmp"),
    Path("/dev/shm"),
    Path("/dev"),
    Path("/etc"),
)
"""Folders of which a reward sees the Python files that lie beside it, and nothing else."""


def confinement_of(
    specs: Sequence[RewardConfig],
    *,
    settings: RewardSettings,
    sandbox: SandboxSettings,
    run_folder: Path | None,
    run_id: str,
) -> Confinement:
    """How a worker of these rewards is held. ConfigError where the level that was asked for cannot be had here."""
    limits = Limits(memory=int(settings.memory_gib * GIB))
    view, level = view_of(specs, run_folder=run_folder), choose(sandbox.level).level
    return Confinement(level, run_id, view, limits, own_user=sandbox.level != "none")


def view_of(specs: Sequence[RewardConfig], *, run_folder: Path | None) -> View:
    """What the process of these rewards may see; of the run's folder its pictures alone, and rewards that lie in it."""
    here = Path.cwd()
    asked = [
        Path(entry)
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isabs(entry)
    ]
    files = [
        Path(spec.reward.rpartition(":")[0]).expanduser().absolute()
        for spec in specs
        if is_file(spec.reward)
    ]
    folders = [
        here,
        *asked,
        *(file.parent for file in files),
        *(file.resolve().parent for file in files),
    ]
    named = [Path(name).expanduser().absolute() for spec in specs for name in spec.sandbox.read]
    shown = [path for folder in dict.fromkeys(folders) for path in _parts(folder)]
    own = None if run_folder is None else run_folder.absolute()
    if run_folder is not None and (pictures := RunFolder(run_folder.absolute()).images).is_dir():
        named.append(pictures)
    kept = (*python_paths(), *files, *named)
    hidden = list(_hidden_in(shown, own, kept))
    if own is not None and any(path.is_relative_to(own) for path in shown):
        shown = [path for path in shown if not path.is_relative_to(own)]
        shown += [file for file in files if file.is_relative_to(own)]
    return View(
        read=tuple(dict.fromkeys([*shown, *named])),
        hidden=tuple(hidden),
        network=any(spec.sandbox.network for spec in specs),
        devices=any(spec.sandbox.gpu for spec in specs),
        working=here if here in shown else None,
    )


def _parts(folder: Path) -> list[Path]:
    """The folder, or the Python files in one that everybody writes to or that holds the whole system."""
    if folder in _NEVER_WHOLE:
        return sorted(folder.glob("*.py"))
    return [folder]


def _hidden_in(
    shown: Iterable[Path], run_folder: Path | None, kept: Collection[Path]
) -> Iterator[Path]:
    """What stays hidden in these folders. `kept` is shown wherever it lies; what only lies around it is not."""
    if run_folder is not None:
        yield run_folder
    waiting = deque(path for path in shown if path.is_dir())
    num_seen = num_hidden = 0
    while waiting and num_seen < _MOST_ENTRIES and num_hidden < _MOST_HIDDEN:
        with suppress(OSError), os.scandir(waiting.popleft()) as entries:
            for entry in entries:
                num_seen += 1
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
