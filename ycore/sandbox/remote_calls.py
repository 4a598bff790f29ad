"""Calls from tests to a program that nobody has read. Each is in a process of its own; a socket connects them.

A JSON object is a request of the tests or its answer. Values cross as plain data: numbers, texts, lists, dictionaries
and the like, rebuilt on the other end. An object that is no plain data stays in the program, and the tests get a
`Handle`, so that its own `__eq__` never meets the tests. Standard library only: it is loaded inside the sandbox.
"""

import builtins
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ycore.types import JsonObject, Record

MAX_BYTES = 8 * 2**20  # of a message
_MAX_DEPTH = 300
_PLAIN_INT = 2**63  # larger ones go as hexadecimal digits, which are read in linear time

_COMPOUND: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: (hex, lambda digits: int(digits, 16)),
    tuple: (list, tuple),
    dict: (lambda value: [[*item] for item in dict.items(value)], lambda items: dict(items)),
    set: (list, set),
    frozenset: (list, frozenset),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
}
"""How a value of each type becomes a list or a text, and a list or a text the value. Subclasses go as these types."""

_TYPES = {kind.__name__: kind for kind in _COMPOUND}
_OBJECT = "object"

_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "__call__": lambda function, *args, **kwargs: function(*args, **kwargs),
    "__getattr__": getattr,
    "__getitem__": operator.getitem,
    "__iter__": list,
    "__next__": next,
    "__len__": len,
    "__bool__": bool,
    "__str__": str,
    "__eq__": lambda value, other: bool(value == other),
}
"""All that tests may do with an object of the program."""


class Silent(BaseException):
    """The other end did not answer in time. No `except Exception` of a test hides it."""


class Gone(BaseException):
    """The other end ended, closed its end, or sent no message."""


class NoPlainData(Exception):
    """A value of the tests that cannot be sent to the program."""


class ProgramError(Exception):
    """An exception of the program of a kind that the tests do not know."""


class ProgramConnection:
    """One end of the socket between tests and program: JSON objects, each with its length before it."""

    def __init__(self, descriptor: int) -> None:
        self.is_gone = False
        self._connection = Connection(descriptor)

    def send(self, message: Record) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large")
        with self._still_there():
            self._connection.send_bytes(data)

    def receive(self, timeout_s: float | None = None) -> JsonObject:
        """Return the next message; Silent where none begins in time, Gone where there is none."""
        with self._still_there():
            if not self._connection.poll(timeout_s):
                raise Silent
            message = json.loads(self._connection.recv_bytes(MAX_BYTES))
            if not isinstance(message, dict):
                raise Gone
        return message

    @contextmanager
    def _still_there(self) -> Iterator[None]:
        """Raise Gone for what goes wrong, and for everything after that."""
        if self.is_gone:
            raise Gone
        self.is_gone = True
        try:
            yield
        except (OSError, EOFError, ValueError, RecursionError):
            raise Gone from None
        self.is_gone = False


class CallClient:
    """The tests' end, which asks the program."""

    def __init__(self, connection: ProgramConnection, *, timeout_s: float) -> None:
        """`timeout_s` limits each call."""
        self.num_calls = 0
        self._connection = connection
        self._timeout_s = timeout_s
        self._handles: dict[int, Handle] = {}

    def name(self, name: str) -> Any:
        """Return what the program calls so; KeyError where it has no such name."""
        return self.ask("name", name)

    def ask(self, operation: str, target: int | str, *args: Any, **kwargs: Any) -> Any:
        """Return the program's answer, or raise the exception that it raised; Silent or Gone for good."""
        self.num_calls += 1
        request = {
            "ask": operation,
            "of": target,
            "args": [self._encode(value) for value in args],
        }
        kwargs = {name: self._encode(value) for name, value in kwargs.items()}
        self._connection.send({**request, "kwargs": kwargs})
        reply = self._connection.receive(self._timeout_s)
        if "raised" in reply:
            raise _exception(reply["raised"])
        value = decode_value(reply.get("value"), self._handle)
        if value is None and operation == "__call__":
            self._change(args, reply.get("changed"))
        return value

    def _handle(self, number: int) -> "Handle":
        return self._handles.setdefault(number, Handle(self, number))

    def _encode(self, value: Any) -> Any:
        return encode_value(value, _number_of_handle)

    def _change(self, args: tuple[Any, ...], changed: Any) -> None:
        """Carry over what a function that returns None did to its arguments.

        Of one that returns a value, the test keeps its arguments as they were: a program that empties its argument and
        returns an empty list must not pass `assert f(x) == sorted(x)`.
        """
        if not isinstance(changed, list) or len(changed) != len(args):
            return
        for arg, encoded in zip(args, changed, strict=True):
            new = decode_value(encoded, self._handle)
            if isinstance(arg, list) and isinstance(new, list):
                arg[:] = new
            elif isinstance(arg, dict | set) and type(new) is type(arg):
                arg.clear()
                arg.update(new)


class Handle:
    """An object of the program. It equals nothing but another object of the program: never a value of the tests."""

    def __init__(self, client: CallClient, number: int) -> None:
        self._client = client
        self._number = number

    def _ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._client.ask(operation, self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("__getattr__", name)

    __call__ = partialmethod(_ask, "__call__")
    __getitem__ = partialmethod(_ask, "__getitem__")
    __next__ = partialmethod(_ask, "__next__")
    __len__ = partialmethod(_ask, "__len__")
    __bool__ = partialmethod(_ask, "__bool__")
    __str__ = partialmethod(_ask, "__str__")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("__iter__"))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Handle) and self._ask("__eq__", other) is True
        )

    def __hash__(self) -> int:
        return hash(self._number)


def serve_calls(connection: ProgramConnection, names: Mapping[str, Any]) -> NoReturn:
    """Answer the tests from the program's process, until they end (Gone). `names` are the program's globals."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def number_of(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)  # kept, so that its id stays its own
        return numbers[id(value)]

    def answer(request: Record) -> JsonObject:
        if request["ask"] == "name":
            return {"value": encode_value(names[request["of"]], number_of)}
        target = objects[request["of"]]
        args = [decode_value(value, objects.__getitem__) for value in request["args"]]
        kwargs = {
            k: decode_value(value, objects.__getitem__)
            for k, value in request["kwargs"].items()
        }
        value = encode_value(_OPERATIONS[request["ask"]](target, *args, **kwargs), number_of)
        if value is not None or request["ask"] != "__call__":
            return {"value": value}
        mutable = [arg if isinstance(arg, list | dict | set) else 0 for arg in args]
        return {"value": None, "changed": [encode_value(arg, number_of) for arg in mutable]}

    while True:
        request = connection.receive()
        try:
            reply = answer(request)
        except BaseException as error:  # noqa: BLE001 (the border of a process: all that it raises is an answer)
            reply = {"raised": [type(error).__name__, str(error)[:2000]]}
        connection.send(reply)


def encode_value(value: Any, number_of: Callable[[Any], int], depth: int = 0) -> Any:
    """Return a value as JSON; `number_of` gives the number of an object that is no plain data, or raises."""
    if depth > _MAX_DEPTH:
        raise ValueError("a value is nested too deeply")
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int) and -_PLAIN_INT < value < _PLAIN_INT:
        return int(value)
    if isinstance(value, list):
        return [encode_value(item, number_of, depth + 1) for item in value]
    for kind, (flatten, _) in _COMPOUND.items():
        if isinstance(value, kind):
            return {kind.__name__: encode_value(flatten(value), number_of, depth + 1)}
    is_numpy = type(value).__module__ == "numpy" and hasattr(value, "item")
    if is_numpy and not getattr(value, "shape", ()):
        return encode_value(value.item(), number_of, depth + 1)
    return {_OBJECT: number_of(value)}


def decode_value(encoded: Any, object_of: Callable[[int], Any]) -> Any:
    """Return the value of `encode_value`; ValueError for anything else."""
    if encoded is None or isinstance(encoded, bool | int | float | str):
        return encoded
    if isinstance(encoded, list):
        return [decode_value(item, object_of) for item in encoded]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise ValueError("no value")
    ((name, content),) = encoded.items()
    if name == _OBJECT:
        return object_of(int(content))
    if name not in _TYPES:
        raise ValueError(f"no value of kind {name}")
    return _COMPOUND[_TYPES[name]][1](decode_value(content, object_of))


def _number_of_handle(value: Any) -> int:
    if isinstance(value, Handle):
        return value._number
    raise NoPlainData(
        f"a test passes a {type(value).__name__} to the program, which is no plain data"
    )


def _exception(raised: Any) -> Exception:
    """Return the built-in exception of that name, else one that no test expects."""
    if not isinstance(raised, list) or len(raised) != 2:
        return ProgramError("no exception")
    name, text = map(str, raised)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like take more than a text
            pass
    return ProgramError(f"{name}: {text}")
