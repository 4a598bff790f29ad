"""Rewards, tools and environments that are given as Python objects, by the file in which another process finds them.

A function or class of a module is its file and name. One of a script or a notebook is written to a file of its own,
with what it uses: a process that imported the script would start the script's run again.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.errors import RewardError
from ycore.run.files import named_by_content

_PLAIN = (str, int, float, bool, bytes, type(None))
_WAY_OUT = "write it into a file, with what it uses, and give file.py:name"


def as_named(given: Sequence[Any], file: Path, *, kind: str = "reward") -> list[Any]:
    """Rewards, tools or environments as a config takes them: code by `file.py:name`, all else as it is.

    Args:
        kind: what they are; an `environment` is a class, all else a function.
        file: what is written with the functions of a script or a notebook, if there are any, in a file that has the
            beginning of its sha256 in its name too: what an earlier call wrote stays.

    Raises:
        RewardError: one that no other process can have, and why.
    """
    written: dict[str, str] = {}
    named = [_named(one, kind, file, written) for one in given]
    if not written:
        return named
    lines = sorted(written.values(), key=lambda text: not text.startswith(("import ", "from ")))
    text = f'"""Each {kind}, as the script had it."""\n\n' + "\n".join(lines)
    file = named_by_content(file, text.encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return [_named(one, kind, file, written) for one in given]


def _named(given: Any, kind: str, file: Path, written: dict[str, str]) -> Any:
    if isinstance(given, Mapping):
        return {**given, "reward": _named(given["reward"], kind, file, written)}
    if not callable(given):
        return given
    one = _sendable(given, kind, type if kind == "environment" else types.FunctionType)
    if one.__module__ != "__main__":
        return f"{Path(inspect.getfile(one)).resolve()}:{one.__name__}"
    _write(one, kind, written)
    return f"{file}:{one.__name__}"


def _sendable(one: Callable[..., Any], kind: str, wanted: type) -> Any:
    """The function or class, if its name finds it again at the top of its module."""
    name = getattr(one, "__qualname__", type(one).__name__)
    if not isinstance(one, wanted) or one.__module__ == "builtins":
        plain = "class" if wanted is type else "function"
        raise RewardError(f"the {kind} {name} is a {type(one).__name__} and no plain {plain}; {_WAY_OUT}")
    one = inspect.unwrap(one)  # its source has the decorators
    cells = {} if wanted is type else dict(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True))
    if cells:
        holds = ", ".join(f"{key} (a {type(cell.cell_contents).__name__})" for key, cell in cells.items())
        raise RewardError(f"the {kind} {name} is a closure that holds {holds}; a worker is another process; {_WAY_OUT}")
    if "<" in name or "." in name:
        raise RewardError(f"the {kind} {name} is not at the top of its module, where a worker looks for it; {_WAY_OUT}")
    return one


def _write(one: Any, kind: str, written: dict[str, str]) -> None:
    """Add the source of a function or class of a script after that of everything that it uses, by name."""
    name = one.__name__
    if name in written:
        return
    methods = [value for value in vars(one).values() if isinstance(value, types.FunctionType)]
    around = getattr(methods[0] if methods else one, "__globals__", {})
    try:
        written[name] = source = _source(one, methods)
        used_names = _names(compile(source, name, "exec"))
    except (OSError, TypeError, SyntaxError, StopIteration):
        raise RewardError(f"the source of the {kind} {name} cannot be found; {_WAY_OUT}") from None
    for used in used_names:
        if used not in around or used in written or used == "__name__":
            continue
        value = around[used]
        is_ours = getattr(value, "__module__", "__main__") == "__main__"
        if isinstance(value, types.ModuleType):
            written[used] = f"import {value.__name__} as {used}" if value.__name__ != used else f"import {used}"
        elif isinstance(value, type | types.FunctionType) and is_ours:
            _write(_sendable(value, kind, type if isinstance(value, type) else types.FunctionType), kind, written)
        elif callable(value) and not is_ours and hasattr(value, "__name__"):
            written[used] = f"from {value.__module__} import {value.__name__} as {used}"
        elif _is_plain(value):
            written[used] = f"{used} = {value!r}"
        else:
            raise RewardError(
                f"the {kind} {name} uses {used}, a {type(value).__name__}, which a worker cannot have; {_WAY_OUT}"
            )
    written[name] = written.pop(name)


def _source(one: Any, methods: Sequence[types.FunctionType]) -> str:
    if isinstance(one, types.FunctionType):
        return textwrap.dedent(inspect.getsource(one))
    lines, _ = inspect.findsource(methods[0] if methods else one)  # a class of a notebook is found by its methods alone
    found = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.ClassDef)]
    node = next(node for node in reversed(found) if node.name == one.__name__)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return "".join(lines[first - 1 : node.end_lineno])


def _names(code: types.CodeType) -> list[str]:
    """The names that a piece of code, and what is inside it, may look up around it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
