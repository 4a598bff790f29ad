"""Rewards, tools and environments that are given as Python objects, by the file in which another process finds them.

A function or class of a module is its file and name. One of a script or a notebook is written to a file of its own,
with what it uses: a process that imported the script would start the script's run again. So is a function that no name
finds: one that another function made, with what it holds of that, a lambda, or a partial.
"""

import ast
import functools
import inspect
import itertools
import math
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    code = _Code(kind)
    named = [code.named(one, file) for one in given]
    if not code.texts:
        return named
    lines = sorted(code.texts.values(), key=lambda text: not text.startswith(("import ", "from ")))
    text = f'"""Each {kind}, as the script had it."""\n\n' + "\n".join(lines)
    file = named_by_content(file, text.encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return [code.named(one, file) for one in given]


class _Code:
    """What a file has: `texts` are the sources of functions, classes and values by name, each after what it uses."""

    def __init__(self, kind: str) -> None:
        self.texts: dict[str, str] = {}
        self._kind = kind
        self._values: dict[str, Any] = {}  # what each name stands for
        self._made: dict[int, str] = {}  # the names of what was given and that no name finds
        self._open: list[Any] = []  # functions that are being written, each used by the one before

    def named(self, given: Any, file: Path) -> Any:
        """Code as `file.py:name`, in `file` where it must be written, and all else as it is."""
        if isinstance(given, Mapping):
            return {**given, "reward": self.named(given["reward"], file)}
        if not callable(given):
            return given
        if not (isinstance(given, functools.partial) and self._kind == "reward"):
            one = self._plain(given, type if self._kind == "environment" else types.FunctionType)
            if _is_found(one):
                if one.__module__ != "__main__":
                    return f"{Path(inspect.getfile(one)).resolve()}:{one.__name__}"
                self._add(one)
                return f"{file}:{one.__name__}"
        if id(given) not in self._made:
            made = self._expression("", given, "")
            name = self._made[id(given)] = self._unused(self._name_of(given))
            self._values[name], self.texts[name] = given, f"{name} = {made}"
        return f"{file}:{self._made[id(given)]}"

    def _plain(self, one: Any, wanted: type) -> Any:
        """The function or class beneath its decorators."""
        name = getattr(one, "__qualname__", type(one).__name__)
        if not isinstance(one, wanted) or one.__module__ == "builtins":
            self._refuse(
                f"{name} is a {type(one).__name__} and no plain {'class' if wanted is type else 'function'}"
            )
        if "." in (name if wanted is type else name.rpartition("<locals>.")[2]):
            self._refuse(f"{name} is not at the top of its module, where a worker looks for it")
        return _below(one)

    def _refuse(self, what: str, way_out: str = _WAY_OUT) -> NoReturn:
        raise RewardError(f"the {self._kind} {what}; {way_out}") from None

    def _name_of(self, one: Any) -> str:
        name = str(getattr(one.func if isinstance(one, functools.partial) else one, "__name__", ""))
        return name if name.isidentifier() else self._kind

    def _unused(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(one for one in names if one not in self._values)

    def _is_new(self, name: str, value: Any) -> bool:
        """Whether nothing has the name yet, which the value now has; RewardError where something else has it."""
        if name in self._values and self._values[name] is not value:
            self._refuse(f"code uses two different things called {name}", "rename one")
        is_new = name not in self._values
        self._values[name] = value
        return is_new

    def _add(self, one: Any) -> None:
        """Write a function or class of a script by its name."""
        name = one.__name__
        if not self._is_new(name, one):
            return
        methods = [value for value in vars(one).values() if isinstance(value, types.FunctionType)]
        try:
            text = _source(one, methods)
            code = compile(text, name, "exec")
        except (OSError, TypeError, SyntaxError, StopIteration):
            self._refuse(f"{name} has no source that can be found")
        self._add_used(name, code, methods[0] if methods else one)
        self.texts[name] = text

    def _add_used(self, name: str, code: types.CodeType, one: Any) -> None:
        """Write what the code looks up around a function, in a script or another module."""
        around = getattr(one, "__globals__", {})
        for used in _names(code):
            if used not in around or used == "__name__":
                continue
            value = around[used]
            if one.__module__ == "__main__":
                self._add_value(
                    used,
                    value,
                    f"{name} uses {used}, a {type(value).__name__}, which a worker cannot have",
                )
            elif self._is_new(used, value):
                self.texts[used] = _import_of(used, value) or f"from {one.__module__} import {used}"

    def _add_value(self, name: str, value: Any, problem: str) -> None:
        """Write a value by this name; RewardError with the problem where that cannot be."""
        if _is_ours(value) and getattr(value, "__name__", "") == name and _is_found(_below(value)):
            self._expression(name, value, problem)
        elif self._is_new(name, value):
            self.texts[name] = (
                _import_of(name, value) or f"{name} = {self._expression(name, value, problem)}"
            )

    def _expression(self, name: str, value: Any, problem: str) -> str:
        """What stands for a value in the file; what it needs is written, some of it by this name."""
        if _is_plain(value):
            text = repr(value)
            for used in {"inf", "nan"}.intersection(compile(text, name, "eval").co_names):
                if self._is_new(used, getattr(math, used)):
                    self.texts[used] = f"from math import {used}"
            return text
        if isinstance(value, functools.partial):
            self._add_value("functools", functools, "")
            places = {f"argument_{number}": one for number, one in enumerate(value.args)}
            made = self._held(self._name_of(value), {self._name_of(value): value.func} | places)
            named = self._held(self._name_of(value), value.keywords)
            return f"functools.partial({', '.join([*made.values(), *(f'{key}={one}' for key, one in named.items())])})"
        below = _below(value)
        if isinstance(below, types.FunctionType) and not _is_found(below):
            return self._maker_call(below, is_decorated=below is not value)
        if isinstance(below, type | types.FunctionType) and _is_ours(below):
            self._add(self._plain(below, type if isinstance(below, type) else types.FunctionType))
            return below.__name__
        if _import_of(name, value) is None:
            self._refuse(problem)
        self._add_value(name, value, problem)
        return name

    def _held(self, holder: str, values: Mapping[str, Any]) -> dict[str, str]:
        problem = "{} holds {} (a {}), and a worker is another process"
        return {
            key: self._expression(key, value, problem.format(holder, key, type(value).__name__))
            for key, value in values.items()
        }

    def _maker_call(self, one: types.FunctionType, *, is_decorated: bool) -> str:
        """Write a function that makes this one from what it holds, and call it."""
        if one in self._open:
            self._refuse(f"{one.__qualname__} holds itself by way of {self._open[-1].__qualname__}")
        node, is_lambda = self._node(one), one.__name__ == "<lambda>"
        held = dict(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True))
        values = {key: cell.cell_contents for key, cell in held.items() if not _holds(cell, one)}
        if not is_lambda and not is_decorated:
            node.decorator_list = []  # a decorator holds what it decorates
        values |= _take_defaults(node.args, one)
        self._open.append(one)
        made = self._held(one.__qualname__, values)
        name = self._unused(f"make_{self._name_of(one)}")
        self._values[name] = one
        maker: Any = ast.parse(f"def {name}({', '.join(values)}): pass").body[0]
        maker.body = (
            [ast.Return(node)] if is_lambda else [node, ast.Return(ast.Name(one.__code__.co_name))]
        )
        text = ast.unparse(maker)
        self._add_used(one.__qualname__, compile(text, name, "exec"), one)
        self._open.pop()
        self.texts[name] = text
        return f"{name}({', '.join(f'{key}={value}' for key, value in made.items())})"

    def _node(self, one: types.FunctionType) -> Any:
        """The function's own part of its file."""
        line, is_lambda = one.__code__.co_firstlineno, one.__name__ == "<lambda>"
        try:
            nodes = list(ast.walk(ast.parse("".join(inspect.findsource(one)[0]))))
        except (OSError, TypeError, SyntaxError):
            nodes = []
        wanted = ast.Lambda if is_lambda else ast.FunctionDef
        found = [node for node in nodes if isinstance(node, wanted) and _first_line(node) == line]
        if len(found) > 1:
            self._refuse(
                f"{one.__qualname__} is one of several on line {line}", "write it with def"
            )
        if not found:
            self._refuse(f"{one.__qualname__} has no source that can be found")
        return found[0]


def _first_line(node: Any) -> Any:
    return min(at.lineno for at in [node, *getattr(node, "decorator_list", ())])


def _below(value: Any) -> Any:
    """A function beneath its decorators, with which its source begins."""
    return inspect.unwrap(value) if callable(value) else value


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "__main__") == "__main__"


def _is_found(one: Any) -> bool:
    """Whether a function or class beneath its decorators is what its name stands for at the top of its module."""
    if not isinstance(one, types.FunctionType):
        return isinstance(one, type)
    return one.__qualname__ == one.__name__ and _below(one.__globals__.get(one.__name__)) is one


def _import_of(name: str, value: Any) -> str | None:
    """The line that imports a module, or what another module has by its name; None where that is not what it is."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    is_there = callable(value) and getattr(sys.modules.get(str(module)), str(own), None) is value
    return f"from {module} import {own} as {name}" if is_there and not _is_ours(value) else None


def _holds(cell: types.CellType, one: types.FunctionType) -> bool:
    """Whether a cell has the function itself, or nothing yet."""
    try:
        return _below(cell.cell_contents) is one
    except ValueError:
        return True


def _take_defaults(arguments: ast.arguments, one: types.FunctionType) -> dict[str, Any]:
    """Give the defaults names, and return their values: they were computed where the function was made."""

    def name_of(argument: ast.arg) -> ast.expr:
        return ast.Name(f"default_{argument.arg}")

    places = [*arguments.posonlyargs, *arguments.args]
    arguments.defaults = [
        name_of(place) for place in places[len(places) - len(arguments.defaults) :]
    ]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    arguments.kw_defaults = [default and name_of(argument) for argument, default in keywords]
    parameters = inspect.signature(one, follow_wrapped=False).parameters
    return {
        f"default_{name}": one.default
        for name, one in parameters.items()
        if one.default is not one.empty
    }


def _source(one: Any, methods: Sequence[types.FunctionType]) -> str:
    if isinstance(one, types.FunctionType):
        return textwrap.dedent(inspect.getsource(one))
    lines, _ = inspect.findsource(
        methods[0] if methods else one
    )  # a class of a notebook is found by its methods alone
    found = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.ClassDef)]
    node = next(node for node in reversed(found) if node.name == one.__name__)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return "".join(lines[first - 1 : node.end_lineno])


def _names(code: types.CodeType) -> list[str]:
    """The names that a piece of code, and what is inside it, may look up around it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _is_plain(value: Any) -> bool:
    """Whether its text makes it again: a subclass of these types may have another text."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
