"""The work of a process that was made and confined for one program: a script, a program that tests call, or its tests.

Nothing that is written here is believed about itself. A script gives its output; a called program gives values, and
the tests that judge them run in another process (`unit_tests`). Standard library only.
"""

import atexit
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal, NoReturn

from ycore.sandbox.remote_calls import Gone, ProgramConnection, serve_calls
from ycore.sandbox.unit_tests import run_unit_tests

ProgramKind = Literal["script", "callee", "tests"]
_FILE_NAME = "program.py"
_COMPILE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


def run_program(kind: ProgramKind, fds: Sequence[int], path: Sequence[str]) -> NoReturn:
    """Run what the first of the descriptors holds, and end the process as that does; modules are found in `path`.

    `fds`: the source; for the two other kinds then the connection between them, and for the tests their results.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_server(path)
    status = 0
    try:
        if kind == "script":
            _run_script(*fds)
        elif kind == "callee":
            _run_callee(*fds)
        else:
            run_unit_tests(*fds)
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:  # noqa: BLE001 (the border of a process)
        traceback.print_exc()
        status = 1
    if kind == "script":
        status = _finish(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(status)


def _run_script(source: int) -> None:
    text = _read(source)
    exec(compile(text, _FILE_NAME, "exec"), _module("__main__", text).__dict__)


def _run_callee(source: int, connection: int) -> None:
    """Run a program once as a module, say how that went, and answer the questions of the tests until they end."""
    text = _read(source)
    names = _module("solution", text).__dict__
    tests = ProgramConnection(connection)
    state = "ready"
    try:
        code = compile(text, _FILE_NAME, "exec")
    except _COMPILE_ERRORS:
        state = "compile_error"
    else:
        try:
            exec(code, names)
        except BaseException:  # noqa: BLE001 (SystemExit at the end of a module too)
            state = "run_error"
    with suppress(Gone):
        tests.send({"state": state})
        if state == "ready":
            serve_calls(tests, names)


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode("utf-8", errors="replace")


def _module(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = _FILE_NAME
    sys.modules[name] = module
    lines = text.splitlines(keepends=True)
    linecache.cache[_FILE_NAME] = (
        len(text),
        None,
        lines,
        _FILE_NAME,
    )  # for tracebacks, inspect
    return module


def _forget_server(path: Sequence[str]) -> None:
    """Give fresh standard streams, and only Python's own modules and the allowed packages to import."""
    sys.argv[:] = [_FILE_NAME]
    sys.path[:] = path
    for name in ("PYTHONPATH", "YCORE_RUN", "PWD"):
        os.environ.pop(name, None)
    for name in [name for name in sys.modules if name == "ycore" or name.startswith("ycore.")]:
        del sys.modules[name]
    stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 (it lasts)
    for name, stream in (("stdin", stdin), ("stdout", _writer(1)), ("stderr", _writer(2))):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _writer(descriptor: int) -> Any:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _finish(status: int) -> int:
    """Do what Python does when a script has ended: wait for its threads, call what it registered."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 (the border of a process)
        traceback.print_exc()
        return status or 1
    return status


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1
