"""The pure part of the code reward: which code a completion holds, which tests a row has, what a verdict is worth."""

import base64
import json
import pickle
import time
import zlib
from typing import Any

import pytest

from tests.rewards.test_answers import shared_rows
from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.builtin import settings_of
from ycore.rewards.code import (
    CodeSettings,
    StdioTests,
    UnitTests,
    check_tests,
    code_of,
    program_of,
    row_tests,
    same_output,
)
from ycore.sandbox.program_pool import UnitTestResult
from ycore.types import Prompt

SETTINGS = CodeSettings()
PROMPT = 'import math\n\ndef helper(x):\n    return -x\n\ndef area(r):\n    """The area."""\n'
CHECK = "def check(candidate):\n    assert candidate(0) == 0\n"


def lcb(stdin: str, stdout: str) -> dict[str, str]:
    return {"input": stdin, "output": stdout, "testtype": "functional"}


def packed(value: Any) -> str:
    """LiveCodeBench's private tests: a pickled text of JSON."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


def row(content: Any = "q", **columns: Any) -> Prompt:
    return Prompt(4, content, columns)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\na = 1\n```\nand\n```python\na = 2\n```\nbye", "a = 2\n"),
        ("```python\na = 1\n```\n```sh\nls\n```", "a = 1\n"),
        ("```sh\nls\n```\n```\na = 3\n```", "a = 3\n"),
        ("   ```py\na = 4\n  ```", "a = 4\n"),
        ("```python\nnever closed", "never closed"),
        ("a = 5\n", "a = 5\n"),
        ("So:\n<answer>a = 5</answer>", "a = 5"),
        ("<think>```python\na = 1\n```</think>```python\na = 6\n```", "a = 6\n"),
        ("<think>```python\na = 1\n```", ""),
        ("```python\n```", ""),
        (
            "1. Here:\n\n   ```python\n   def f():\n       return 1\n   ```\n",
            "def f():\n    return 1\n",
        ),
        ("- ```python\n  a = 1\n  ```", "a = 1\n"),
        ("> ```python\n> a = 1\n> ```", "a = 1\n"),
        ("~~~python\na = '```'\n~~~", "a = '```'\n"),
        ("````python\n```\na = 1\n````", "```\na = 1\n"),
        ('```Python title="a.py"\na = 1\n```', "a = 1\n"),
        ("```{.python}\na = 1\n```", "a = 1\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    """\n',
        ),
        ("a = `x` ```not a fence```\n", "a = `x` ```not a fence```\n"),
        ("", ""),
    ],
)
def test_the_last_python_block_counts(text: str, code: str) -> None:
    assert code_of(text) == code
    assert code_of([{"role": "assistant", "content": text}]) == code


def test_extraction_is_linear_in_the_text() -> None:
    began = time.process_time()
    for hostile in ("```" * 300_000, "```\n" * 50_000, "`" * 900_000, "<think>" * 100_000):
        code_of(hostile)
    assert time.process_time() - began < 10.0


HOSTILE = [
    "from __future__ import (\n" * 20_000,
    "class Solution:\n" + "".join(f" def f{n}():\n" for n in range(30_000)),
    "class Solution:\n" + "\n" * 100_000,
    "print" * 100_000,
    "```python\n" + "input(" * 80_000 + "\n```\n```python\nprint()\n```",
    "```python\n" + "def " * 100_000,
    "\n" * 400_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_program_is_made_in_time_that_is_linear_in_the_text(text: str) -> None:
    began = time.process_time()
    for tests in (
        StdioTests((("1\n", "2\n"),)),
        UnitTests(("assert f(g(1)) == 2",)),
        UnitTests((CHECK,), entry_point="area", given=PROMPT),
        UnitTests(entry_point="f", calls=(([1], 2),)),
    ):
        program_of(text, tests)
    assert time.process_time() - began < 4.0


def test_a_block_with_the_function_follows_the_prompts_imports_and_helpers() -> None:
    tests = row_tests(row(PROMPT, test=CHECK, entry_point="area"), SETTINGS)
    assert isinstance(tests, UnitTests) and tests.given == PROMPT
    program = program_of(
        "Sure:\n```python\ndef area(r):\n    return math.pi * helper(r)\n```", tests
    )
    assert program.startswith("import math") and program.count("def area") == 1
    compile(program, "", "exec")


def test_any_other_text_continues_the_prompt_up_to_the_functions_end() -> None:
    tests = row_tests(row(PROMPT, test=CHECK, entry_point="area"), SETTINGS)
    program = program_of(
        "    if r:\n        return 1\n\n    return 2\nprint('done')\n    return 3\n", tests
    )
    assert program == PROMPT + "    if r:\n        return 1\n\n    return 2\n"


def test_a_prompt_in_a_chat_is_found_in_its_block_too() -> None:
    turns = [{"role": "user", "content": f"Complete this:\n```python\n{PROMPT}```"}]
    tests = row_tests(row(turns, test=CHECK, entry_point="area"), SETTINGS)
    assert isinstance(tests, UnitTests) and tests.given == PROMPT


@pytest.mark.parametrize(
    ("columns", "tests"),
    [
        ({"tests": ["assert f(1) == 2"]}, UnitTests(("assert f(1) == 2",))),
        ({"tests": '["assert f(1) == 2"]'}, UnitTests(("assert f(1) == 2",))),
        ({"tests": "assert f(1) == 2\n"}, UnitTests(("assert f(1) == 2\n",))),
        (
            {
                "test_list": ["assert f(1)"],
                "test_imports": ["import math"],
                "test_setup_code": "x = 1",
            },
            UnitTests(("assert f(1)",), ("import math", "x = 1")),
        ),
        ({"tests": [{"input": "1\n", "output": "2\n"}]}, StdioTests((("1\n", "2\n"),))),
        ({"tests": {"inputs": ["1"], "outputs": ["2"]}}, StdioTests((("1", "2"),))),
        (
            {"tests": [{"input": [1, 2], "output": 3}], "entry_point": "f"},
            UnitTests(entry_point="f", calls=(([1, 2], 3),)),
        ),
        (
            {"tests": [{"input": "[1]", "output": "[1]"}], "fn_name": "f"},
            UnitTests(entry_point="f", calls=(([1], [1]),)),
        ),
        (
            {"input_output": json.dumps({"inputs": [[1]], "outputs": [[6]], "fn_name": "g"})},
            UnitTests(entry_point="g", calls=(([1], [6]),), is_wrapped=True),
        ),
        (
            {"input_output": {"inputs": [["1", "2"]], "outputs": ["3"]}},
            StdioTests((("1\n2", "3"),)),
        ),
        (
            {
                "public_test_cases": json.dumps([lcb("[1]\n2", "[3]")]),
                "private_test_cases": packed([lcb("[4]\n5", "6")]),
                "metadata": '{"func_name": "g"}',
            },
            UnitTests(entry_point="g", calls=(([[1], 2], [3]), ([[4], 5], 6))),
        ),
        (
            {
                "public_test_cases": [{"input": "1\n", "output": "2\n", "testtype": "stdin"}],
                "private_test_cases": "[]",
                "metadata": "{}",
            },
            StdioTests((("1\n", "2\n"),)),
        ),
        (  # PrimeIntellect's and DeepCoder's
            {
                "tests": [
                    {"type": "function_call", "fn_name": "g", "input": ["ab"], "output": ["ba"]}
                ]
            },
            UnitTests(entry_point="g", calls=((["ab"], ["ba"]),), is_wrapped=True),
        ),
        (
            {
                "tests": [
                    {"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "2\n"}
                ]
            },
            StdioTests((("1\n", "2\n"),)),
        ),
        (
            {
                "tests": {
                    "language": "python",
                    "test_cases": [{"fn_name": "g", "input": "[1]", "output": "[2]"}],
                }
            },
            UnitTests(entry_point="g", calls=(([1], [2]),), is_wrapped=True),
        ),
        (  # values stay the values that they are
            {"tests": {"inputs": [[6], [1]], "outputs": ["110", "1"], "fn_name": "g"}},
            UnitTests(entry_point="g", calls=(([6], "110"), ([1], "1"))),
        ),
        (
            {"tests": [{"input": ['"ab"'], "output": '"ba"'}], "entry_point": "g"},
            UnitTests(entry_point="g", calls=((['"ab"'], '"ba"'),)),
        ),
        (
            {"tests": json.dumps({"inputs": [[1], 5], "outputs": ["a", None], "fn_name": "g"})},
            UnitTests(entry_point="g", calls=(([1], "a"), ([5], None))),
        ),
    ],
)
def test_shapes_of_tests(columns: dict[str, Any], tests: UnitTests | StdioTests) -> None:
    assert row_tests(row(**columns), SETTINGS) == tests


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"tests": []}, "no tests in tests"),
        ({"tests": None}, "no tests in tests"),
        ({"tests": 4}, "tests is a int, not a list"),
        ({"tests": ["assert ("]}, "a test is no Python"),
        ({"tests": "assert f(1) =="}, "a test is no Python"),
        ({"tests": [{"input": "1"}]}, "test 0 is no text and has no input and output"),
        ({"tests": [{"input": [1], "output": 2}]}, "no column entry_point names the function"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "lists of the same length"),
        ({"tests": CHECK}, "no column entry_point"),
        ({"tests": ["assert f(1)"], "test_setup_code": "import"}, "a test is no Python"),
    ],
)
def test_malformed_tests_are_refused_with_their_row(
    columns: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RewardError, match="row 4, counted from 0") as refused:
        check_tests(
            RewardConfig(reward="code"),
            list(columns),
            [row(tests=["assert f(0)"]), row(**columns)],
        )
    assert problem in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "tests",
    [
        "def test_f():\n    assert f(1) == 1",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 1)",
        "['f(1) == 1' 'f(2) == 2', f]",
        ["def test_f():\n    assert f(1) == 1"],
    ],
)
def test_tests_that_run_nothing_are_refused_for_every_program_would_pass(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"run nothing.*write asserts"):
        row_tests(row(tests=tests), SETTINGS)


def test_tests_that_pandas_wrote_as_pythons_text() -> None:
    asserts = ("assert f(1) == 1", "assert f('a') == 2")
    assert row_tests(row(test_list=repr(list(asserts))), SETTINGS) == UnitTests(asserts)
    pairs = repr({"inputs": ["1\n"], "outputs": ["2\n"]})
    assert row_tests(row(input_output=pairs), SETTINGS) == StdioTests((("1\n", "2\n"),))


@pytest.mark.parametrize(
    "test", [lcb("[1]", "2"), {"type": "function_call", "input": ["ab"], "output": ["ba"]}]
)
def test_calls_without_the_name_of_their_function_are_refused(test: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"call a function.*fn_name"):
        row_tests(row(public_test_cases=json.dumps([test])), SETTINGS)


def test_a_test_may_name_its_function_itself() -> None:
    test = {**lcb("[1]", "2"), "metadata": {"func_name": "total"}}
    assert row_tests(row(tests=json.dumps([test])), SETTINGS) == UnitTests(
        entry_point="total", calls=(([[1]], 2),)
    )


@pytest.mark.parametrize(
    "tests",
    [
        UnitTests(("assert total([1]) == 1",)),
        UnitTests((CHECK,), entry_point="total", given="def total(a):\n"),
    ],
)
def test_asserts_and_checks_reach_methods_of_a_solution(tests: UnitTests) -> None:
    names: dict[str, Any] = {}
    exec(
        program_of("class Solution:\n    def total(self, a):\n        return sum(a)\n", tests),
        names,
    )
    assert names["total"]([1, 2]) == 3


def test_functions_within_methods_and_methods_of_other_classes_are_left_alone() -> None:
    """A depth-first search within the method is how most solutions on trees look."""
    names: dict[str, Any] = {}
    code = (
        "class Node:\n    def find(self):\n        return 1\n\n"
        "class Solution:\n    def total(self, a):\n        def dfs(n):\n            return sum(n)\n"
        "        return dfs(a)\n"
    )
    exec(program_of(code, UnitTests(("assert total([1]) == 1",))), names)
    assert names["total"]([1, 2]) == 3 and not {"find", "dfs"} & set(names)


def test_a_dataset_without_tests_is_refused() -> None:
    with pytest.raises(
        RewardError,
        match=r"needs a column with tests .tests or test_list or test or .*., and the dataset has answer",
    ):
        check_tests(RewardConfig(reward="code"), ["answer"], [])
    with pytest.raises(RewardError, match=r"needs a column with tests .*checks"):
        check_tests(RewardConfig(reward="code", args={"tests": "checks"}), ["tests"], [])


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"credit": "half"}, "credit must be 'all' or 'share'"),
        ({"timeout_s": 0}, "timeout_s must be greater than 0"),
        ({"timeouts": 1}, "no key timeouts"),
    ],
)
def test_wrong_settings_are_one_line(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        settings_of(RewardConfig(reward="code", args=args), CodeSettings)


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(RewardError, match="'no_such_package' is not installed"):
        check_tests(
            RewardConfig(reward="code", args={"packages": ["no_such_package"]}), ["tests"], []
        )


@pytest.mark.parametrize(
    ("units", "ended", "share", "passed"),
    [
        ((True, True), True, 1.0, True),
        ((True, False), True, 0.5, False),
        ((True, None), True, 1.0, True),  # the tests went round the second
        ((True, None), False, 0.5, False),  # the program stopped them
        ((True, True), False, 1.0, False),
        ((None,), True, 0.0, False),
        ((), True, 0.0, False),
    ],
)
def test_what_a_verdict_is_worth(
    units: tuple[bool | None, ...], ended: bool, share: float, passed: bool
) -> None:
    verdict = UnitTestResult("ok", "ready", units=units, ended=ended)
    assert (verdict.share_passed, verdict.passes_all) == (share, passed)


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        (b"1 2\n3\n", "1 2\n3", True),
        (b"1  2 \n3\n\n\n", "1 2\n3\n", True),
        (b"\n3\n", "3", True),
        (b"3", "\n 3\n", True),
        (b"1\r\n2\r\n", "1\n2", True),
        (b"1\n\n2", "1\n2", False),
        (b"1\n2", "1 2", False),
        (b"0.30000000000000004", "0.3", True),
        (b"0.31", "0.3", False),
        (b"3.0", "3", False),
        (b"nan", "0.5", False),
        (b"", "1", False),
        (b"\xff", "1", False),
        (b"9" * 5000, "0.5", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed: bytes, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted, 1e-6) is same


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("unpickled",)


@pytest.mark.parametrize(
    "private",
    [
        base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode(),
        base64.b64encode(zlib.compress(pickle.dumps(["a", "b"]))).decode(),
        base64.b64encode(b"no zlib").decode(),
        "no base64",
        packed({"a": 1}),
    ],
)
def test_private_tests_are_never_unpickled(
    private: str, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"public_test_cases": [lcb("1", "1")], "private_test_cases": private}
    with pytest.raises(ValueError, match="private_test_cases"):
        row_tests(row(**columns, fn_name="f"), SETTINGS)
    assert "unpickled" not in capsys.readouterr().out


def test_the_shared_rows_of_code_are_read_as_their_testers_read_them() -> None:
    for case in ("code-apps-wrapped-output", "code-solution-class"):
        (columns,) = shared_rows(case, "tasks.jsonl")
        tests = row_tests(row(columns.pop("prompt"), **columns), SETTINGS)
        assert isinstance(tests, UnitTests) and tests.entry_point == "total"
        assert tests.is_wrapped is (case == "code-apps-wrapped-output")
        program = program_of("class Solution:\n    def total(self, nums): return 6", tests)
        assert program.endswith("total = Solution().total\n")
