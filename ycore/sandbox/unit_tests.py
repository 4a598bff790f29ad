"""Run a row's tests in a confined process, against a program that runs in another one.

No code of the program ever runs here, and the program never sees a test: it gets the arguments of one call at a time
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
from contextlib import suppress
from typing import Any

from ycore.sandbox.remote_calls import (
    CallClient,
    Gone,
    NoPlainData,
    ProgramConnection,
    Silent,
)
from ycore.types import Record

_ALIASES = {"np": "numpy", "pd": "pandas"}
_RECORD = "__unit_ran__"


class _Failed(BaseException):
    """A unit failed, and the rest need not run."""


class _Results:
    """Writes each unit's state as it changes."""

    def __init__(self, descriptor: int, *, stop_at_failure: bool) -> None:
        self._file = os.fdopen(descriptor, "wb")
        self._stop_at_failure = stop_at_failure
        self._states: dict[int, bool] = {}

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def record(self, unit: int, passed: bool) -> None:
        if self._states.get(unit, True) and self._states.get(unit) is not passed:
            self._states[unit] = passed
            self.write(unit=unit, passed=passed)
        if not passed and self._stop_at_failure:
            raise _Failed


class _Asserts(ast.NodeTransformer):
    """Wraps every assert so that its outcome is recorded, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant):
            return (
                node  # `assert True` tests nothing, `assert False` marks a place not to reach
            )
        passed = ast.parse(f"{_RECORD}({self.count}, True)").body
        failed = ast.parse(f"{_RECORD}({self.count}, False)").body
        self.count += 1
        handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), body=failed)
        wrapped = ast.Try(body=[node], handlers=[handler], orelse=passed, finalbody=[])
        return ast.fix_missing_locations(ast.copy_location(wrapped, node))


class _Names(dict[str, Any]):
    """The globals of tests. A name that they do not define is of the standard library, else of the program.

    A module is a name that is read from, `math.isclose`, and never called: a program may have a function `bisect`.
    """

    def __init__(self, client: CallClient) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._client = client
        self._called = set[str]()

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name not in self._called and (name in _ALIASES or name in sys.stdlib_module_names):
            with suppress(ImportError):
                self[name] = importlib.import_module(_ALIASES.get(name, name))
                return self[name]
        self[name] = self._client.name(name)
        return self[name]

    def run(self, tree: ast.Module) -> None:
        self._called |= {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        exec(compile(tree, "tests", "exec"), self)


def run_unit_tests(source: int, results: int, connection: int) -> None:
    """Run the tests that the descriptor `source` holds as JSON against the program behind `connection`."""
    with os.fdopen(source, "rb") as file:
        tests = json.loads(file.read())
    sys.set_int_max_str_digits(0)
    output = _Results(results, stop_at_failure=tests["stop_at_failure"])
    try:
        _run(tests, ProgramConnection(connection), output)
    except Silent:
        output.write(timed_out=True)
    except (Gone, _Failed):
        pass


def _run(tests: Record, connection: ProgramConnection, results: _Results) -> None:
    results.write(state="gone")
    state = str(connection.receive(tests["timeout_s"]).get("state"))
    results.write(state=state)
    if state != "ready":
        return
    client = CallClient(connection, timeout_s=tests["timeout_s"])
    try:
        if tests["calls"]:
            _run_calls(tests, client, results)
        else:
            _run_asserts(tests, client, results)
    except NoPlainData as error:
        results.write(broken=str(error))
    except (Silent, Gone, _Failed):
        raise
    except BaseException as error:  # noqa: BLE001 (a test that raises has failed, whatever it raises)
        if not client.num_calls:  # before the program had any part in it
            results.write(broken=f"{type(error).__name__}: {error}"[:300])
        return
    if not connection.is_gone:
        results.write(ended=True)


def _run_calls(tests: Record, client: CallClient, results: _Results) -> None:
    """Call one function with arguments, and compare with the expected values."""
    results.write(units=len(tests["calls"]))
    function = client.name(tests["entry_point"])
    for unit, (args, expected) in enumerate(tests["calls"]):
        passed = False
        accepted = [expected, *expected] if tests["is_wrapped"] else [expected]
        with suppress(Exception):  # the program's, or a value that cannot be compared
            value = function(*args)
            passed = any(same_value(value, right, tests["tolerance"]) for right in accepted)
        results.record(unit, passed)


def _run_asserts(tests: Record, client: CallClient, results: _Results) -> None:
    """Run texts of Python, each a test or the definition of `check`."""
    names = _Names(client)
    entry_point = tests["entry_point"]
    setup = [ast.parse(text) for text in tests["setup"]]
    asserts = _Asserts()
    wrapped = [asserts.visit(ast.parse(text)) for text in tests["tests"]]
    results.write(units=max(1, asserts.count))
    _run_prompt(tests["given"], entry_point, names)
    names[_RECORD] = results.record
    for tree in [*setup, *wrapped]:
        names.run(tree)
    if entry_point:
        names["check"](client.name(entry_point))
    if not asserts.count:
        results.record(0, True)


def _run_prompt(text: str, entry_point: str, names: _Names) -> None:
    """Run what the prompt defines, but for the function to write: helpers that tests use come from the row."""
    for ending in ("", "\n    pass\n"):
        with suppress(SyntaxError):
            tree = ast.parse(text + ending)
            tree.body = [
                node for node in tree.body if getattr(node, "name", None) != entry_point
            ]
            with suppress(Exception):  # a prompt need not be a program
                names.run(tree)
            return


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether a value is the expected one, which comes from JSON: a tuple is a list, a key is a text."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return value == expected or (
            isinstance(expected, float)
            and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        )
    if type(value) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(value) == len(expected) and all(
            same_value(*pair, tolerance) for pair in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict):
        value = {str(key): item for key, item in value.items()}
        return value.keys() == expected.keys() and all(
            same_value(value[key], expected[key], tolerance) for key in value
        )
    return bool(value == expected)
