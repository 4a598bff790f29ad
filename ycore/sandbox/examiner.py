"""The examiner: a confined process that runs a row's tests against a program, which runs in another such process.

No code of the program's ever runs here, and the program never sees a test: it gets the arguments of one call at a time
and gives back plain data (`remote_calls`). So it cannot end the tests, redefine what they call, or read what they
expect. Results are JSON lines on a descriptor that only this process has. Standard library only.

Every `assert` is a unit: passed when it ran and never failed. The lines are `{"units": how many}`, `{"unit", "passed"}`
where a unit's state changes, then `{"ended": true}` where the tests came to their end; or `{"broken": line}` where the
tests themselves cannot run. `{"state"}` says how the program began, `{"timed_out": true}` that it hung.
"""

import ast
import builtins
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ycore.sandbox.remote_calls import Gone, Handle, Link, NoPlainData, Silent

_ALIASES = {"np": "numpy", "pd": "pandas"}
_RECORD = "__unit_ran__"


class Failed(BaseException):
    """A unit failed, and the rest need not run."""


class Results:
    """Writes each unit's state as it changes."""

    def __init__(self, descriptor: int, *, stop_at_failure: bool) -> None:
        self._descriptor, self._stops = descriptor, stop_at_failure
        self._states: dict[int, bool] = {}

    def write(self, **line: Any) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def record(self, unit: int, passed: bool) -> None:
        if self._states.get(unit, True) and self._states.get(unit) is not passed:
            self._states[unit] = passed
            self.write(unit=unit, passed=passed)
        if not passed and self._stops:
            raise Failed


class Units(ast.NodeTransformer):
    """Wraps every assert of a test so that its outcome is recorded, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant):
            return node  # `assert True` tests nothing, `assert False` marks a place not to reach
        passed, failed = (
            ast.parse(f"{_RECORD}({self.count}, {did})").body[0] for did in (True, False)
        )
        self.count += 1
        handler = ast.ExceptHandler(
            type=ast.Name("Exception", ast.Load()), name=None, body=[failed]
        )
        wrapped = ast.Try(body=[node], handlers=[handler], orelse=[passed], finalbody=[])
        return ast.fix_missing_locations(ast.copy_location(wrapped, node))


def examine(source: int, connection: int, results: int) -> None:
    """Run the tests that the descriptor `source` holds as JSON against the program behind `connection`."""
    with os.fdopen(source, "rb") as file:
        exam = json.loads(file.read())
    sys.set_int_max_str_digits(0)
    link = Link(connection)
    written = Results(results, stop_at_failure=exam["stop_at_failure"])
    try:
        _examine(exam, link, written)
    except Silent:
        written.write(timed_out=True)
    except (Gone, Failed):
        pass


def _examine(exam: Mapping[str, Any], link: Link, results: Results) -> None:
    link.deadline = time.monotonic() + exam["timeout_s"]
    results.write(state="gone")
    state = link.receive()
    results.write(state=str(state.get("state")))
    if state.get("state") != "ready":
        return
    try:
        if exam["calls"]:
            _run_calls(exam, link, results)
        else:
            _run_asserts(exam, link, results)
    except NoPlainData as error:
        results.write(broken=str(error))
    except (Silent, Gone, Failed):
        raise
    except BaseException as error:  # noqa: BLE001 (a test that raises has failed, whatever it raises)
        if not link.num_asked:  # before the program had any part in it
            results.write(broken=f"{type(error).__name__}: {error}"[:300])
        return
    if not link.is_gone:
        results.write(ended=True)


def _run_calls(exam: Mapping[str, Any], link: Link, results: Results) -> None:
    """Arguments and expected values, for one function."""
    results.write(units=len(exam["calls"]))
    function = link.ask("name", exam["entry_point"])
    for unit, (args, expected) in enumerate(exam["calls"]):
        link.deadline = time.monotonic() + exam["timeout_s"]
        try:
            passed = same(function(*args), expected, exam["tolerance"])
        except Exception:  # noqa: BLE001 (the program's, or a value that cannot be compared)
            passed = False
        results.record(unit, passed)


def _run_asserts(exam: Mapping[str, Any], link: Link, results: Results) -> None:
    """Texts of Python, each a test or the definition of `check`."""
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    setup = [ast.parse(text) for text in exam["setup"]]
    tests = [ast.parse(text) for text in exam["tests"]]
    entry_point = exam["entry_point"]
    if exam["given"]:
        _run_given(exam["given"], entry_point, space)
    units = Units()
    wrapped = [units.visit(tree) for tree in tests]
    results.write(units=max(1, units.count))
    space[_RECORD] = results.record
    for tree in setup:
        _bind(tree, space, link)
        exec(compile(tree, "setup", "exec"), space)
    for tree in wrapped:
        link.deadline = time.monotonic() + exam["timeout_s"]
        _bind(tree, space, link)
        exec(compile(tree, "tests", "exec"), space)
    if entry_point:
        link.deadline = time.monotonic() + exam["timeout_s"]
        space["check"](_Timed(link, link.ask("name", entry_point), exam["timeout_s"]))
    if not units.count:
        results.record(0, True)


class _Timed:
    """The function under test, with a time limit for each call."""

    def __init__(self, link: Link, function: Any, timeout_s: float) -> None:
        self._link, self._function, self._timeout_s = link, function, timeout_s

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._link.deadline = time.monotonic() + self._timeout_s
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _run_given(text: str, entry_point: str, space: dict[str, Any]) -> None:
    """What the prompt itself defines, but for the function to write: helpers that tests use come from the row."""
    for ending in ("", "\n    pass\n"):
        try:
            tree = ast.parse(text + ending)
        except SyntaxError:
            continue
        tree.body = [node for node in tree.body if getattr(node, "name", None) != entry_point]
        with suppress(Exception):  # a prompt need not be a program
            exec(compile(tree, "prompt", "exec"), space)
        return


def _bind(tree: ast.AST, space: dict[str, Any], link: Link) -> None:
    """Give the names that a test does not define: of the standard library, else of the program.

    A module is a name that is read from, `math.isclose`, and never called: a program may have a function `bisect`.
    """
    read, defined, called = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    for name in sorted(read - defined - space.keys()):
        if hasattr(builtins, name):
            continue
        module = _ALIASES.get(name, name)
        if name not in called and (name in _ALIASES or name in sys.stdlib_module_names):
            with suppress(ImportError):
                space[name] = importlib.import_module(module)
                continue
        with suppress(
            Exception
        ):  # where the program has none, the test ends with its own NameError
            space[name] = link.ask("name", name)


def same(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether a value is the expected one, which comes from JSON: a tuple is a list, a key is a text."""
    if isinstance(value, Handle):
        return False
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(same(one, other, tolerance) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        named = {str(key): item for key, item in value.items()}
        return named.keys() == expected.keys() and all(
            same(named[key], expected[key], tolerance) for key in named
        )
    return type(value) is type(expected) and bool(value == expected)
