"""Reward functions that are given as Python objects, by the file in which a worker process finds them.

A function of a module is its file and name. One of a script or a notebook is written to a file of its own, with what
it uses: a worker that imported the script would start the script's run again.
"""

import inspect
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.errors import RewardError
from ycore.run.files import named_by_content

_PLAIN = (str, int, float, bool, bytes, type(None))
_WAY_OUT = "write the function into a file, with what it uses, and give file.py:name"


def as_named(rewards: Sequence[Any], file: Path) -> list[Any]:
    """Rewards as a config takes them: functions by `file.py:name`, all else as it is.

    Args:
        file: what is written with the functions of a script or a notebook, if there are any, in a file that has the
            beginning of its sha256 in its name too: what an earlier call wrote stays.

    Raises:
        RewardError: a function that no worker can have, and why.
    """
    written: dict[str, str] = {}
    named = [_named(reward, file, written) for reward in rewards]
    if not written:
        return named
    lines = sorted(written.values(), key=lambda text: not text.startswith(("import ", "from ")))
    text = '"""Reward functions, as the script had them."""\n\n' + "\n".join(lines)
    file = named_by_content(file, text.encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return [_named(reward, file, written) for reward in rewards]


def _named(reward: Any, file: Path, written: dict[str, str]) -> Any:
    if isinstance(reward, Mapping):
        return {**reward, "reward": _named(reward["reward"], file, written)}
    if not callable(reward):
        return reward
    function = _sendable(reward)
    if function.__module__ != "__main__":
        return f"{Path(inspect.getfile(function)).resolve()}:{function.__name__}"
    _write(function, written)
    return f"{file}:{function.__name__}"


def _sendable(function: Callable[..., Any]) -> types.FunctionType:
    """The function, if its name finds it again at the top of its module."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if not isinstance(function, types.FunctionType):
        raise RewardError(f"the reward {name} is a {type(function).__name__} and no plain function; {_WAY_OUT}")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if cells:
        holds = ", ".join(f"{key} (a {type(cell.cell_contents).__name__})" for key, cell in cells.items())
        raise RewardError(f"the reward {name} is a closure that holds {holds}; a worker is another process; {_WAY_OUT}")
    if "<" in name or "." in name:
        raise RewardError(f"the reward {name} is not at the top of its module, where a worker looks for it; {_WAY_OUT}")
    return function


def _write(function: types.FunctionType, written: dict[str, str]) -> None:
    """Add the source of a function of a script, and of everything that it uses, by name."""
    name = function.__name__
    if name in written:
        return
    try:
        written[name] = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise RewardError(f"the source of the reward {name} cannot be found; {_WAY_OUT}") from None
    for used in _names(function.__code__):
        if used not in function.__globals__ or used in written:
            continue
        value = function.__globals__[used]
        if isinstance(value, types.ModuleType):
            written[used] = f"import {value.__name__} as {used}" if value.__name__ != used else f"import {used}"
        elif isinstance(value, types.FunctionType) and value.__module__ == "__main__":
            _write(_sendable(value), written)
        elif callable(value) and getattr(value, "__module__", "__main__") != "__main__" and hasattr(value, "__name__"):
            written[used] = f"from {value.__module__} import {value.__name__} as {used}"
        elif _is_plain(value):
            written[used] = f"{used} = {value!r}"
        else:
            kind = type(value).__name__
            raise RewardError(f"the reward {name} uses {used}, a {kind}, which a worker cannot have; {_WAY_OUT}")


def _names(code: types.CodeType) -> list[str]:
    """The names that a function, and those inside it, may look up around them."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
