"""The reward `code`: a completion's program against its row's tests, run in the sandbox of programs.

This file is the pure part: which code a completion holds, which tests a row has, and what a verdict is worth. The
scorer that runs the programs is `ycore.scoring.code_scorer`. `row_tests` has the shapes of tests.
"""

import ast
import base64
import importlib.util
import json
import math
import pickletools
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import eq
from typing import Annotated, Any, Literal

from markdown_it import MarkdownIt
from pydantic import Field, NonNegativeFloat

from ycore.config.schema import RewardConfig, Strict
from ycore.data.cells import parse_literal
from ycore.errors import RewardError
from ycore.rewards.answers import completion_text
from ycore.rewards.builtin import CODE, settings_of
from ycore.types import Content, JsonObject, Prompt, Record, after_thinking

TEST_COLUMNS = ("tests", "test_list", "test", "input_output", "public_test_cases")
_PRIVATE_COLUMN = "private_test_cases"  # LiveCodeBench's, beside the public ones
_SETUP_COLUMNS = ("test_imports", "test_setup_code")
_NAME_COLUMNS = ("entry_point", "fn_name", "function", "func_name")
_MAX_TIMEOUTS = 10  # a program may take this many times `timeout_s` for all of its tests
_PYTHON = frozenset({"python", "py", "python3"})
_MAX_PRIVATE = 2**28  # bytes of a row's private tests
# The testers of APPS and LiveCodeBench give programs names of these modules without an import.
_GIVEN_IMPORTS = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys, time
from bisect import bisect, bisect_left, bisect_right, insort
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product, zip_longest
from math import ceil, comb, cos, exp, fabs, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, pi, sin, sqrt, tan
from sys import exit, exit as quit
from typing import *
"""
_MARKDOWN = MarkdownIt("zero").enable(["code", "fence", "blockquote", "list"]).disable("inline")

_SOLUTION = r"(?m)^class Solution\b"
_METHOD = r"(?m)^[ \t]+def ([A-Za-z]\w*)"
_FUNCTION = r"(?m)^(?:async )?def (\w+)"
_CALLED = r"\b(\w+)\("
_FUTURE = r"(?m)^from __future__ import (?:\([^)]{0,200}\)|.*)\n?"
_READS_AND_PRINTS = r"(?s)\A(?=.*(?:input[(,)]|stdin|(?:open|read)\(0)).*(?:print|write)"

_LEAVES_FUNCTION = r"(?<=\n)(?=[^\s#)\]}])"  # a line that begins at the margin
_BEGUN_IN_LINE = r"(?<=\w[:>])[ \t]*(?=```(?:python3?|py)[ \t]*\n)"
_CLOSED_IN_LINE = r"```(?:<\S{1,20}>)?\s*\Z"
_INDENTED_FENCE = r"(?m)^(\t[ \t]*|[ \t]{4,})(?=```|~~~)"


class CodeSettings(Strict):
    """Settings of `code`: `args` of the reward."""

    tests: str | None = (
        None  # the column with the tests; None takes the first there is of `TEST_COLUMNS`
    )
    credit: Literal["all", "share"] = (
        "all"  # 1 for a program that passes every test, or the share of those it passes
    )
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0  # of each call or input
    memory_mb: Annotated[int, Field(ge=64)] = 512
    packages: tuple[
        str, ...
    ] = ()  # that programs and tests may import beside the standard library
    tolerance: NonNegativeFloat = 1e-6  # of numbers in outputs and returned values

    @property
    def columns(self) -> Sequence[str]:
        """The columns that may hold the tests."""
        return TEST_COLUMNS if self.tests is None else (self.tests,)


@dataclass(frozen=True)
class UnitTests:
    """Tests that call the program: texts with asserts, or arguments and the values to return (`calls`).

    `entry_point` is the function under test where the row names one. `given` is code that the prompt has already.
    Where `is_wrapped`, the values of `calls` are lists of one, as in APPS, and the value in it is right too.
    """

    tests: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    entry_point: str = ""
    given: str = ""
    calls: tuple[tuple[list[Any], Any], ...] = ()
    is_wrapped: bool = False

    def request(self, settings: CodeSettings) -> JsonObject:
        """Return the tests as the sandbox reads them (`sandbox.unit_tests`)."""
        return {
            **asdict(self),
            "timeout_s": settings.timeout_s,
            "tolerance": settings.tolerance,
            "stop_at_failure": settings.credit == "all",
        }

    def deadline_s(self, settings: CodeSettings) -> float:
        num_asserts = sum(test.count("assert") for test in self.tests)
        return settings.timeout_s * min(_MAX_TIMEOUTS, 1 + max(num_asserts, len(self.calls)))


@dataclass(frozen=True)
class StdioTests:
    """Standard inputs, and what the program must print."""

    pairs: tuple[tuple[str, str], ...]


def check_tests(spec: RewardConfig, columns: Sequence[str], rows: Iterable[Prompt]) -> None:
    """Raise RewardError for a dataset without tests, or for the first row whose tests cannot be read."""
    settings = settings_of(spec, CodeSettings)
    for package in settings.packages:
        if importlib.util.find_spec(package) is None:
            raise RewardError(f"reward {CODE!r}: the package {package!r} is not installed here")
    if not set(settings.columns) & set(columns):
        listed = ", ".join(sorted(columns)) or "no columns"
        raise RewardError(
            f"reward {CODE!r} needs a column with tests ({' or '.join(settings.columns)}), and the dataset has {listed}; "
            "name it with args: {tests: COLUMN}"
        )
    for prompt in rows:
        try:
            row_tests(prompt, settings)
        except ValueError as error:
            raise RewardError(
                f"reward {CODE!r}: row {prompt.row}, counted from 0: {error}; correct or remove the row"
            ) from None


def row_tests(prompt: Prompt, settings: CodeSettings) -> UnitTests | StdioTests:
    """Return a row's tests, which have one of these shapes; ValueError where they have none.

    Asserts: a list of texts (MBPP's `test_list`, with `test_imports` and `test_setup_code`), or one text.
    HumanEval: a text that defines `check(candidate)`, with the column `entry_point`.
    StdioTests: `[{"input": text, "output": text}]` for standard input and output; with `entry_point` and inputs that are no
    texts, lists of arguments and returned values. Also as `{"inputs": [...], "outputs": [...], "fn_name": ...}` (APPS,
    TACO), as LiveCodeBench's public and private test cases, and as a list under `test_cases` (PrimeIntellect).
    """
    columns = prompt.columns
    names = settings.columns
    name = next((name for name in names if columns.get(name) not in (None, "", [], {})), None)
    if name is None:
        raise ValueError(f"no tests in {' or '.join(names)}")
    tests = _from_json(columns[name])
    if name == "public_test_cases" and isinstance(tests, list):
        tests = [*tests, *_private_tests(columns.get(_PRIVATE_COLUMN))]
    if isinstance(tests, Mapping):
        tests = tests.get("test_cases") or _zipped(tests)
    function = _function_named(columns)
    if isinstance(tests, str):
        return _check_exam(prompt, tests, function)
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(
            f"{name} is a {type(tests).__name__}, not a list of asserts or of inputs and outputs"
        )
    if all(isinstance(test, str) for test in tests):
        _require_tests([_require_python(test) for test in tests])
        setup = [_as_setup(columns[key]) for key in _SETUP_COLUMNS if columns.get(key)]
        for text in setup:
            _require_python(text)
        return UnitTests(tuple(tests), tuple(setup))
    return _pairs(tests, _function_named(tests[0]) or function)


def code_of(completion: Content, tests: UnitTests | StdioTests | None = None) -> str:
    """Return the program in a completion: its last Python block, else its last fenced block, else its `<answer>`, else all.

    Of several such blocks, those count that define what `tests` call, or that print: an example may follow the program.
    A block that is not closed goes to the end. Only what follows the thinking counts.
    """
    text = re.sub(_BEGUN_IN_LINE, "\n", after_thinking(completion_text(completion)))
    indented = re.search(_INDENTED_FENCE, text)
    fenced = _blocks(text)
    if not fenced and indented:
        fenced = _blocks(re.sub(f"(?m)^{indented[1]}", "", text[indented.start() :]))
    if fenced:
        wanted = "" if tests is None else _wanted(tests)
        _, body = max(
            reversed(fenced),
            key=lambda block: (
                block[0] in _PYTHON,
                not block[0],
                bool(re.search(wanted, block[1])),
            ),
        )
        return re.split(_CLOSED_IN_LINE, body)[0]
    tagged, closing, _ = text.rpartition("</answer>")
    return tagged.rpartition("<answer>")[2] if closing else text


def program_of(completion: Content, tests: UnitTests | StdioTests) -> str:
    """Return the whole program to run. For rows in HumanEval's shape it begins with what the prompt gives.

    A block that defines the function follows the prompt's imports and helpers; any other text continues the prompt, up
    to the first line that leaves the function's body.
    """
    code = code_of(completion, tests)
    may_be_empty = isinstance(tests, UnitTests) and bool(tests.given)
    if not code.strip() and not may_be_empty:
        return ""
    future = "".join(re.findall(_FUTURE, code))  # must come first of all
    code = re.sub(_FUTURE, "", code if may_be_empty else textwrap.dedent(code))
    imports = future + _GIVEN_IMPORTS
    if isinstance(tests, StdioTests):
        return imports + code
    if tests.calls or re.search(_SOLUTION, code):
        # A function of the same name that is imported here would pass for the program's. Methods of `class Solution`
        # become functions, as APPS and LeetCode call them.
        forget = f"globals().pop({tests.entry_point!r}, None)\n"
        called = [tests.entry_point] if tests.entry_point else re.findall(_METHOD, code)
        methods = "".join(
            f"if hasattr(globals().get('Solution'), {name!r}): {name} = Solution().{name}\n"
            for name in sorted(set(called).difference(re.findall(_FUNCTION, code)))
        )
        return f"{imports}{forget}{code}\n\n{methods}"
    if not tests.given:
        return future + code
    if _defines(code, tests.entry_point):
        start = re.search(_definition(tests.entry_point), tests.given)
        return f"{future}{tests.given[: start.start()] if start else ''}\n{code}"
    # Models, and those who strip their texts, leave out the indentation of the first line.
    code = re.sub(r"\A(?=\S)", "    ", code)
    return future + tests.given + re.split(_LEAVES_FUNCTION, code, maxsplit=1)[0]


def reaches(tests: UnitTests | StdioTests, content: Content) -> bool:
    """Whether a program or its prompt has the name of the function that the tests call, if they call one."""
    if isinstance(tests, StdioTests) or not tests.calls:
        return True
    text = completion_text(content)
    return re.search(rf"\b{re.escape(tests.entry_point)}\b", text) is not None


def same_output(printed: bytes, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same lines of words, without regard to white space at ends.

    Numbers may differ by `tolerance` where the expected one is written with a point.
    """
    texts = (printed.decode(errors="replace"), expected)
    words, expected_words = (re.findall(r"\S+|\n", text.strip()) for text in texts)
    return len(words) == len(expected_words) and all(
        _same_word(*pair, tolerance) for pair in zip(words, expected_words, strict=True)
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    is_inexact = re.search(r"\.|e-", expected) is not None and len(word) <= 40
    with suppress(ValueError):
        return word == expected or (
            is_inexact
            and math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)
        )
    return False


def _wanted(tests: UnitTests | StdioTests) -> str:
    """Return what a program for the tests has: something that they call, or calls that print and, for an input, read."""
    if isinstance(tests, StdioTests):
        return (
            _READS_AND_PRINTS
            if any(stdin.strip() for stdin, _ in tests.pairs)
            else "print|write"
        )
    names = (
        {tests.entry_point}
        if tests.entry_point
        else {*re.findall(_CALLED, "\n".join(tests.tests))}
    )
    called = "|".join(map(re.escape, names))
    return rf"(?m)\b(?:def|class) (?:{called})\b|^(?:{called}) ?="


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the body of each fenced block, as CommonMark reads them; the language of `{.python}` too.

    The indentation of a fence, in a list for example, is no part of its body. A block that is not closed ends with the
    text.
    """
    return [
        (re.split(r"[\s:,{}]", token.info.strip().lstrip("{."))[0].lower(), token.content)
        for token in _MARKDOWN.parse(text)
        if token.type == "fence"
    ]


def _definition(function: str) -> str:
    return rf"(?m)^(?:async )?def {re.escape(function)}\b"


def _defines(code: str, function: str) -> bool:
    return bool(function) and re.search(_definition(function), code) is not None


def _check_exam(prompt: Prompt, text: str, function: str) -> UnitTests:
    tree = _require_python(text)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "check" not in defined:
        _require_tests([tree])
        return UnitTests((text,))
    if not function:
        raise ValueError(
            "its tests define check(candidate), and no column entry_point names the function"
        )
    content = completion_text(prompt.content)
    fenced = _blocks(content)
    prefix = fenced[-1][1] if fenced else content
    program = prefix if _defines(prefix, function) else ""
    return UnitTests((text,), entry_point=function, given=program)


def _function_named(holder: Any) -> str:
    """Return the name of the function that a row or a test says is called; no text where it says none."""
    if not isinstance(holder, Mapping):
        return ""
    names = (str(holder[key]) for key in _NAME_COLUMNS if holder.get(key))
    name = next(names, "").removeprefix("Solution().")  # LeetCode's
    return name or _function_named(_from_json(holder.get("metadata")))


def _pairs(tests: Sequence[Any], function: str) -> UnitTests | StdioTests:
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
            raise ValueError(
                f"test {number} is no text and has no input and output: {str(test)[:80]}"
            )
    # LiveCodeBench's `functional`, PrimeIntellect's `function_call`.
    kinds = " ".join(f"{test.get('testtype')} {test.get('type')}" for test in tests)
    if not function and "function" in kinds:
        raise ValueError(
            "its tests call a function, and neither metadata nor a column fn_name or entry_point names it"
        )
    if not function:
        pairs = [(_joined(test["input"]), _joined(test["output"])) for test in tests]
        if all(isinstance(text, str) for pair in pairs for text in pair):
            return StdioTests(tuple(pairs))
        raise ValueError(
            "its inputs are arguments, and no column entry_point names the function"
        )
    calls = [
        (
            _arguments(test),
            _from_json(test["output"]) if isinstance(test["input"], str) else test["output"],
        )
        for test in tests
    ]
    is_wrapped = "fn_name" in tests[0] and all(
        isinstance(value, list) and len(value) == 1 for _, value in calls
    )
    return UnitTests(entry_point=function, calls=tuple(calls), is_wrapped=is_wrapped)


def _joined(lines: Any) -> Any:
    """Return lines in a list, as APPS has some, as one text."""
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return "\n".join(lines)
    return lines


def _arguments(test: Record) -> list[Any]:
    arguments = _from_json(test["input"])
    texts = str(test["input"]).splitlines()
    lines = [_from_json(text) for text in texts]
    are_values = isinstance(arguments, str) and not any(map(eq, lines, texts))
    if are_values or test.get("testtype") == "functional":  # LiveCodeBench: an argument a line
        return lines
    return arguments if isinstance(arguments, list) else [arguments]


def _private_tests(value: Any) -> list[Any]:
    """Return LiveCodeBench's private tests: JSON, or a pickled text of JSON, packed. Nothing is unpickled."""
    tests = _from_json(value or "[]")
    if isinstance(tests, str):
        try:
            packed = base64.b64decode(tests, validate=True)
            pickled = zlib.decompressobj().decompress(packed, _MAX_PRIVATE)
            texts = [
                value for _, value, _ in pickletools.genops(pickled) if isinstance(value, str)
            ]
        except (ValueError, zlib.error) as error:
            raise ValueError(f"{_PRIVATE_COLUMN} cannot be read: {error}") from None
        if len(texts) != 1:  # an object has the names of its module and class
            raise ValueError(
                f"{_PRIVATE_COLUMN} pickles more than one text; give the tests as JSON"
            )
        tests = _from_json(texts[0])
    if not isinstance(tests, list):
        raise ValueError(f"{_PRIVATE_COLUMN} is no list of tests")
    return tests


def _zipped(tests: Record) -> list[JsonObject]:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or not inputs
        or len(inputs) != len(outputs)
    ):
        raise ValueError("its tests need inputs and outputs, lists of the same length")
    pairs = zip(inputs, outputs, strict=True)
    name = tests.get("fn_name")
    return [{"input": stdin, "output": stdout, "fn_name": name} for stdin, stdout in pairs]


def _from_json(value: Any) -> Any:
    """Return the value that a text holds as JSON or as Python writes it (CSV files, many datasets), else the text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
        with suppress(ValueError, TypeError, RecursionError):  # Python's text of plain data
            return json.loads(json.dumps(parse_literal(value)))
    return value


def _require_tests(trees: Sequence[ast.Module]) -> None:
    """ValueError where the texts only define or name things: nothing would run, and no program would fail."""
    defining = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in (node for tree in trees for node in tree.body):
        is_value = isinstance(node, ast.Expr) and not any(
            isinstance(part, ast.Call) for part in ast.walk(node)
        )
        if not isinstance(node, defining) and not is_value:
            return
    raise ValueError(
        "its tests run nothing, they only define functions or name values; write asserts, or call what they define"
    )


def _as_setup(value: Any) -> str:
    value = _from_json(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _require_python(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"a test is no Python: {error}: {' '.join(text.split())[:80]}"
        ) from None
