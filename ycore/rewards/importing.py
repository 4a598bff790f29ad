"""Importing a person's reward function: `file.py:function` or `package.module:function`.

Not here: what the function is called with (`inputs`). Importing runs the person's code: only in a process of its own.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from ycore.errors import RewardError, nearest
from ycore.rewards.builtin import Reward

_LONGEST_MESSAGE = 300


def import_function(name: str) -> Reward:
    """The function that `name` says; the working folder, and a file's own folder, can be imported from."""
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise RewardError(f"reward {name!r} needs both sides of its colon: file.py:function or package.module:function")
    _import_from(Path.cwd())
    is_file = source.endswith(".py") or "/" in source
    module = _import_file(name, Path(source).expanduser()) if is_file else _import_module(name, source)
    return _function_of(name, module, function)


def one_line(error: BaseException) -> str:
    """An exception as `Type: message`, cut to one line of bounded length."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_LONGEST_MESSAGE] if message else type(error).__name__


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        near = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
        raise RewardError(f"reward {name!r}: no file {path}{near or '; give its path from the working folder'}")
    _import_from(path.resolve().parent)
    # The prefix keeps a file called math.py or types.py from taking the place of another module.
    spec = importlib.util.spec_from_file_location(f"ycore_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r}: importing {path} raised {one_line(error)}") from error
    return module


def _import_module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise RewardError(f"reward {name!r}: importing {source} raised {one_line(error)}") from error
        near = nearest(source, _importable_here()) or "; it must be installed, or lie under the working folder"
        raise RewardError(f"reward {name!r}: no module {error.name!r}{near}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {name!r}: importing {source} raised {one_line(error)}") from error


def _function_of(name: str, module: ModuleType, function: str) -> Reward:
    try:
        found = getattr(module, function)  # not vars(): a module may make its names on demand, as trl.rewards does
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(function, public) or _listed(public)
        raise RewardError(f"reward {name!r}: no function {function!r} there{near}") from None
    if not callable(found):
        raise RewardError(f"reward {name!r}: {function!r} is a {type(found).__name__}; it must be a function")
    reward: Reward = found
    return reward


def _listed(names: list[str]) -> str:
    return f"; it has {', '.join(names[:8])}" if names else "; it has none"


def _importable_here() -> Iterable[str]:
    here = Path.cwd()
    for file in [*here.glob("*.py"), *here.glob("*/*.py")]:
        yield ".".join(file.relative_to(here).with_suffix("").parts)


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
