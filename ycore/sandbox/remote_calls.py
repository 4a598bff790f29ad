"""Calls between a program that nobody has read and its tests, each in a process of its own, over a socket.

A line of JSON is a request or its answer. Values cross as plain data: numbers, texts, lists, dictionaries and the like,
rebuilt on the other end. What is no plain data stays where it is and is passed as a number (`Handle`), so that an
object's own `__eq__` never meets the tests. Standard library only: it is loaded inside the sandbox.
"""

import base64
import builtins
import json
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

MAX_LINE = 8 * 2**20  # bytes
_MAX_DEPTH = 200
_PLAIN_INT = 2**63  # larger ones go as hexadecimal digits, which are read in linear time
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)


class Silent(BaseException):
    """The other end did not answer in time. No `except Exception` of a test hides it."""


class Gone(BaseException):
    """The other end ended, or closed its end."""


class NoPlainData(Exception):
    """A value of the tests that cannot be sent to the program."""


class ProgramError(Exception):
    """An exception of the program's of a kind that the tests do not know."""


class Handle:
    """An object of the program's. Tests may call it, read its attributes, iterate over it and ask for its length.

    It equals nothing but another object of the program's: never a value of the tests'.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: "Link", number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self._number, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._link.ask("list", self._number))

    def __next__(self) -> Any:
        return self._link.ask("next", self._number)

    def __len__(self) -> int:
        return int(self._link.ask("length", self._number))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self._number, key)

    def __bool__(self) -> bool:
        return self._link.ask("truth", self._number) is True

    def __str__(self) -> str:
        return str(self._link.ask("text", self._number))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Handle) and self._link.ask("equals", self._number, other) is True
        )

    def __hash__(self) -> int:
        return hash(self._number)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "list": list,
    "next": next,
    "length": len,
    "item": lambda owner, key: owner[key],
    "truth": bool,
    "text": str,
    "equals": lambda one, other: bool(one == other),
}


class Link:
    """One end of the link: it asks, and while it waits for the answer it answers what the other end asks.

    The tests' end exports functions alone, which the other end may call. The program's end exports everything.
    """

    def __init__(
        self, descriptor: int, *, exports_all: bool = False, names: Mapping[str, Any] | None = None
    ) -> None:
        """`names`: what the other end may ask for by name."""
        self.deadline: float | None = (
            None  # of `time.monotonic`, for an answer; None waits for ever
        )
        self.is_gone = False
        self.num_asked = 0
        self._descriptor, self._buffer = descriptor, bytearray()
        self._exports_all, self._names = exports_all, names or {}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, Handle] = {}

    def ask(self, operation: str, of: int | str, *args: Any, **kwargs: Any) -> Any:
        """What the other end answers; the exception that it raised there; Silent or Gone for good."""
        if self.is_gone:
            raise Gone
        self.num_asked += 1
        sent = [self.encode(value) for value in args]
        self.send(
            {
                "ask": operation,
                "of": of,
                "args": sent,
                "kwargs": {k: self.encode(v) for k, v in kwargs.items()},
            }
        )
        while True:
            message = self.receive()
            if "ask" in message:
                self.answer(message)
                continue
            if "raised" in message:
                raise _exception(message["raised"])
            value = self.decode(message.get("value"))
            if value is None and operation == "call":
                self._change(args, message.get("changed"))
            return value

    def answer(self, message: Mapping[str, Any]) -> None:
        """Do what the other end asks for, and send it the value or the exception."""
        try:
            operation, of = message["ask"], message["of"]
            if operation == "name":
                reply: dict[str, Any] = {"value": self.encode(self._names[of])}
            elif self._exports_all or operation == "call":
                args = [self.decode(value) for value in message["args"]]
                kwargs = {name: self.decode(value) for name, value in message["kwargs"].items()}
                value = self.encode(_OPERATIONS[operation](self._objects[of], *args, **kwargs))
                reply = {"value": value}
                if value is None and operation == "call":
                    reply["changed"] = [
                        self.encode(arg) if isinstance(arg, list | dict | set) else 0
                        for arg in args
                    ]
            else:
                raise PermissionError(operation)
        except (Silent, Gone):
            raise
        except BaseException as error:  # noqa: BLE001 (the border of a process: all that the program raises is an answer)
            reply = {"raised": [type(error).__name__, str(error)[:2000]]}
        self.send(reply)

    def send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"a value of {len(line)} bytes is too large")
        try:
            while line:
                if self.deadline is not None:
                    self._wait(writes=True)
                line = line[os.write(self._descriptor, line[:65536]) :]
        except OSError:
            self.is_gone = True
            raise Gone from None

    def receive(self) -> dict[str, Any]:
        """The next message; Silent after the deadline, Gone where there is none, or no message."""
        while (end := self._buffer.find(b"\n")) < 0:
            if self.deadline is not None:
                self._wait()
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                data = b""
            if not data or len(self._buffer) > MAX_LINE:
                self.is_gone = True
                raise Gone
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.is_gone = True
            raise Gone
        return message

    def encode(self, value: Any, depth: int = 0) -> Any:
        """A value as JSON. Subclasses of plain types go as these: what they add is not seen by the other end."""
        if value is None or value is True or value is False:
            return value
        if depth > _MAX_DEPTH:
            raise ValueError("a value is nested too deeply")
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__int__(value)
            return number if -_PLAIN_INT < number < _PLAIN_INT else {"int": hex(number)}
        if isinstance(value, float):
            return float.__float__(value)
        return self._encode_compound(value, depth)

    def _encode_compound(self, value: Any, depth: int) -> Any:
        def all_of(values: Iterable[Any]) -> list[Any]:
            return [self.encode(item, depth + 1) for item in values]

        if isinstance(value, list):
            return all_of(list.__iter__(value))
        if isinstance(value, tuple):
            return {"tuple": all_of(tuple.__iter__(value))}
        if isinstance(value, dict):
            return {"dict": [all_of(pair) for pair in dict.items(value)]}
        if isinstance(value, set):
            return {"set": all_of(set.__iter__(value))}
        if isinstance(value, frozenset):
            return {"frozenset": all_of(frozenset.__iter__(value))}
        if isinstance(value, bytes | bytearray):
            return {type(value).__name__: base64.b64encode(bytes(value)).decode()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if type(value) is range:
            return {"range": all_of((value.start, value.stop, value.step))}
        if type(value) is Decimal or type(value) is Fraction:
            return {type(value).__name__: str(value)}
        if isinstance(value, Handle):
            return {"yours": value._number}
        if (
            type(value).__module__ == "numpy"
            and hasattr(value, "item")
            and not getattr(value, "shape", ())
        ):
            return self.encode(value.item(), depth + 1)
        if self._exports_all or isinstance(value, _FUNCTIONS):
            return {"mine": self._export(value)}
        if isinstance(value, Iterator):
            return {"iterator": all_of(value)}
        raise NoPlainData(
            f"a test passes a {type(value).__name__} to the program, which is no plain data"
        )

    def decode(self, encoded: Any) -> Any:
        """The value of `encode`; ValueError for anything else."""
        if encoded is None or isinstance(encoded, bool | int | float | str):
            return encoded
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict) or len(encoded) != 1:
            raise ValueError("no value")
        ((kind, content),) = encoded.items()
        if kind == "mine":
            return self._handles.setdefault(int(content), Handle(self, int(content)))
        if kind == "yours":
            return self._objects[content]
        if kind not in _DECODED:
            raise ValueError(f"no value of kind {kind}")
        return _DECODED[kind](self.decode(content))

    def _export(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # kept, so that its id stays its own
        return self._numbers[id(value)]

    def _change(self, args: tuple[Any, ...], changed: Any) -> None:
        """Carry over what a function that returns None did to its arguments.

        Of one that returns a value, the test keeps its arguments as they were: a program that empties its argument and
        returns an empty list must not pass `assert f(x) == sorted(x)`.
        """
        if not isinstance(changed, list) or len(changed) != len(args):
            return
        for arg, encoded in zip(args, changed, strict=True):
            if isinstance(arg, list | dict | set):
                new = self.decode(encoded)
                if type(new) is type(arg):
                    arg.clear()
                    arg.extend(new) if isinstance(arg, list) else arg.update(new)

    def _wait(self, *, writes: bool = False) -> None:
        assert self.deadline is not None
        left = self.deadline - time.monotonic()
        ends: list[int] = [self._descriptor]
        ready = select.select([] if writes else ends, ends if writes else [], [], max(0.0, left))
        if not any(ready):
            self.is_gone = True
            raise Silent


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return {key: value for key, value in items}  # noqa: C416 (a pair is checked to be one)


_DECODED: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "tuple": tuple,
    "dict": _pairs,
    "set": set,
    "frozenset": frozenset,
    "bytes": lambda text: base64.b64decode(text),
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "iterator": iter,
    "Decimal": Decimal,
    "Fraction": Fraction,
}


def _exception(raised: Any) -> Exception:
    """The built-in exception of that name, else one that no test expects."""
    if not isinstance(raised, list) or len(raised) != 2:
        return ProgramError("no exception")
    name, text = str(raised[0]), str(raised[1])
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like take more than a text
            pass
    return ProgramError(f"{name}: {text}")
