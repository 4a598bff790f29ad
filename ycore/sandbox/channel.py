"""A confined process' side: its end of the socket to its parent, and how it loads a person's code by its name.

Requests come in and answers go out as a JSON object a line. Only the standard library is imported: any Python runs this.
"""

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ycore.errors import UserError, nearest
from ycore.foreign import foreign_line

Handler = Callable[[Any], dict[str, Any]]
"""Returns the fields of the answer to a request."""


def answer_requests(start: Callable[[Any], tuple[Any, Handler]]) -> None:
    """Answer requests on the socket that the process has as standard input, moved to where no child process gets it.

    Afterwards descriptor 0 is empty, and 1 and 2 are what the process prints, which is no message. On SIGUSR2, by which
    the launcher asks for stacks, it writes them there.

    Args:
        start: gets the first request, and returns what the process is ready with and what answers the others.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    owner = os.getpid()
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(0), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout = sys.stderr

    def reply(request: Any, **answer: Any) -> None:
        if os.getpid() != owner:  # a person's code forked: its child must not answer too
            os._exit(0)
        replies.write(json.dumps({"nonce": request["nonce"], **answer}).encode() + b"\n")
        replies.flush()

    first = json.loads(requests.readline())
    try:
        ready, handle = start(first)
    except (OSError, ValueError) as error:  # a user's mistake too
        return reply(first, error=str(error))
    reply(first, ready=ready)
    for line in requests:
        request = json.loads(line)
        reply(request, **handle(request))


def exception_line(error: BaseException) -> str:
    """Return an exception as `Type: message`, cut to one line of bounded length."""
    return foreign_line(f"{type(error).__name__}: {error}").removesuffix(":")


def names_file(name: str) -> bool:
    """Whether a name is of a function in a file, and not of an installed module or a built-in one."""
    source = name.rpartition(":")[0]
    return source.endswith(".py") or "/" in source


def load_named(name: str, *, kind: str, error: type[UserError]) -> Any:
    """Return what `file.py:name` or `package.module:name` names; `error` says why it cannot be called.

    Modules are found in the working folder, and beside a file.
    """
    label = f"{kind} {name!r}"
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise error(
            f"{label} needs both sides of its colon: file.py:name or package.module:name"
        )
    _add_to_path(Path.cwd())
    path = Path(source).expanduser()
    if names_file(name) and not path.is_file():
        near = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
        raise error(
            f"{label}: no file {path}{near or '; give its path from the working folder'}"
        )
    try:
        # The prefix keeps a file called math.py or types.py from taking the place of another module.
        module = (
            _import_file(path, f"ycore_{kind}_{path.stem}")
            if names_file(name)
            else importlib.import_module(source)
        )
    except (Exception, SystemExit) as problem:  # whatever a person's module raises
        absent = problem.name if isinstance(problem, ModuleNotFoundError) else None
        if absent is None or not f"{source}.".startswith(f"{absent}."):
            raise error(
                f"{label}: importing {source} raised {exception_line(problem)}"
            ) from problem
        folder = Path.cwd()
        files = [*folder.glob("*.py"), *folder.glob("*/*.py")]
        modules = [".".join(file.relative_to(folder).with_suffix("").parts) for file in files]
        near = nearest(source, modules)
        way_out = near or "; it must be installed, or lie under the working folder"
        raise error(f"{label}: no module {absent!r}{way_out}") from problem
    # Not vars(): a module may make its names on demand, as trl.rewards does.
    loaded = getattr(module, attribute, None)
    if not callable(loaded):
        public = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        near = nearest(attribute, public) or f"; it has {', '.join(public[:8]) or 'none'}"
        raise error(f"{label}: {source} has no {attribute!r} to call{near}")
    return loaded


def _import_file(path: Path, module_name: str) -> ModuleType:
    _add_to_path(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file; its name must end in .py")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
