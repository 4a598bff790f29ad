"""Values between a program and its tests: what crosses as data, what stays behind as a number, and nothing else."""

import socket
import struct
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.sandbox.remote_calls import (
    MAX_BYTES,
    CallClient,
    Gone,
    Handle,
    NoPlainData,
    ProgramConnection,
    Silent,
    serve_calls,
)

NUMBERS = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
)
TEXTS = st.text() | st.binary()
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | TEXTS
    | st.decimals(allow_nan=False)
    | st.frozensets(NUMBERS)
    | st.sets(TEXTS),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS | NUMBERS, inner)
    ),
    max_leaves=20,
)


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Loud(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Counting:
    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        self.items.append(item)

    def __len__(self) -> int:
        return len(self.items)


def raises() -> None:
    raise ZeroDivisionError("by hand")


def empties(items: list[int]) -> list[int]:
    items.clear()
    return []


def sorts(items: list[int]) -> None:
    items.sort()


PROGRAM: dict[str, Any] = {
    "same": lambda value: value,
    "always": AlwaysEqual,
    "loud": lambda: Loud(3),
    "make": Counting,
    "raises": raises,
    "leaves": lambda: (_ for _ in ()).throw(SystemExit(0)),
    "empties": empties,
    "sorts": sorts,
    "count": lambda: (number for number in range(3)),
    "point": namedtuple("Point", "x y")(1, 2),
    "counter": Counter("aab"),
    "ordered": OrderedDict(a=1),
    "huge": 7**9000,
}


@pytest.fixture(scope="module")
def tests() -> Iterator[CallClient]:
    """The tests' end; the program answers on a thread."""
    mine, theirs = socket.socketpair()

    def serve() -> None:
        with pytest.raises(Gone):
            serve_calls(ProgramConnection(theirs.detach()), PROGRAM)

    thread = threading.Thread(target=serve)
    thread.start()
    client = client_of(mine)
    yield client
    client._connection._connection.close()
    thread.join(60.0)
    assert not thread.is_alive()


def client_of(end: socket.socket, timeout_s: float = 30.0) -> CallClient:
    return CallClient(ProgramConnection(end.detach()), timeout_s=timeout_s)


@pytest.fixture
def call(tests: CallClient) -> Callable[..., Any]:
    return lambda name, *args: tests.name(name)(*args)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(tests: CallClient, value: Any) -> None:
    returned = tests.name("same")(value)
    assert returned == value and type(returned) is type(value)


@pytest.mark.parametrize(
    "value",
    [Decimal("1.10"), Fraction(1, 3), range(2, 9, 3), b"\x00\xff", float("inf"), "\ud800"],
)
def test_less_common_data_too(call: Callable[..., Any], value: Any) -> None:
    assert call("same", value) == value


def test_an_object_never_equals_a_value_of_the_tests(call: Callable[..., Any]) -> None:
    assert AlwaysEqual() == 5
    result = call("always")
    assert isinstance(result, Handle) and result != 5 and result != 5 and [result] != [5]
    assert call("loud") == 3 and call("loud") != 4


def test_subclasses_of_plain_types_are_these_types(tests: CallClient) -> None:
    assert tests.name("point") == (1, 2)
    assert tests.name("counter") == {"a": 2, "b": 1}
    assert tests.name("ordered") == {"a": 1}
    assert tests.name("huge") == 7**9000


def test_objects_can_be_used(call: Callable[..., Any]) -> None:
    stack = call("make")
    assert len(stack) == 0 and not stack
    stack.push(4)
    assert len(stack) == 1 and stack.items == [4] and bool(stack)
    assert list(call("count")) == [0, 1, 2] and next(call("count")) == 0
    with pytest.raises(AttributeError):
        stack.nothing()


def test_exceptions_cross_with_their_kind(call: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError, match="by hand"):
        call("raises")
    with pytest.raises(Exception, match="SystemExit"):
        call("leaves")


@pytest.mark.parametrize(
    "value", [AlwaysEqual(), lambda value: value, len], ids=["object", "lambda", "built-in"]
)
def test_what_is_no_data_cannot_be_passed(call: Callable[..., Any], value: Any) -> None:
    with pytest.raises(NoPlainData, match=f"a {type(value).__name__}"):
        call("same", value)


def test_an_argument_changes_only_where_the_function_returns_nothing(
    call: Callable[..., Any],
) -> None:
    items = [3, 1, 2]
    assert call("sorts", items) is None and items == [1, 2, 3]
    assert call("empties", items) == [] and items == [1, 2, 3]


@pytest.mark.parametrize(
    "message",
    [b"[]", b"4", b"{", b'{"value": {"exec": "1"}}', b"[" * 100_000, b"\xff"],
)
def test_garbage_is_no_value(message: bytes) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        data = struct.pack("!i", len(message)) + message
        threading.Thread(target=lambda: theirs.sendall(data)).start()
        with pytest.raises((Gone, ValueError)):
            client_of(mine).name("f")


def test_a_message_that_is_too_long_is_not_read() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(struct.pack("!i", MAX_BYTES + 1))
        with pytest.raises(Gone):
            client_of(mine).name("f")


def test_silence_ends_at_the_deadline() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        client = client_of(mine, timeout_s=0.05)
        with pytest.raises(Silent):
            client.name("f")
        with pytest.raises(Gone):
            client.name("f")
