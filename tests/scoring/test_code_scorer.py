"""The code reward with real programs in the sandbox: every shape of tests, what is masked, and HumanEval as a whole."""

import asyncio
import gzip
import json
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ycore.placement.slots import Slots
from ycore.rewards.code import CodeSettings
from ycore.sandbox import Level
from ycore.sandbox.level import level_refusal
from ycore.sandbox.program_pool import ProgramPool
from ycore.scoring.code_scorer import CodeMeter, CodeScorer
from ycore.scoring.scoring import PendingGroup
from ycore.types import Completion, Draw, Prompt, Score

T = TypeVar("T")
HUMANEVAL = (
    Path(__file__).resolve().parents[2].parent
    / "shared"
    / "data"
    / "humaneval"
    / "HumanEval.jsonl.gz"
)


class Room:
    """One pool of programs, and the loop that it belongs to."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.programs = ProgramPool(
            Level.NAMESPACES, at_once=2, log=folder / "log", run_id="test"
        )
        self.meter = CodeMeter()
        self(self.programs.start())

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def scores(
        self,
        texts: list[str],
        content: Any = "q",
        *,
        settings: dict[str, Any] | None = None,
        **columns: Any,
    ) -> list[Score]:
        """Score a group of completions of one row."""
        scorer = CodeScorer(
            "code", CodeSettings(**settings or {}), self.programs, meter=self.meter
        )

        async def written(text: str) -> Completion:
            return Completion((1,), None, text, "stop", 0)

        async def work() -> list[Score]:
            tasks = [asyncio.create_task(written(text)) for text in texts]
            return await scorer.score(
                PendingGroup(Draw(0, Prompt(0, content, columns), (1,)), tasks, 0, Slots(1))
            )

        self.meter.take()
        return self(work())

    def values(self, *texts: str, **more: Any) -> list[float | None]:
        return [score.value for score in self.scores(list(texts), **more)]

    def counted(self) -> dict[str, float]:
        return {
            name.rpartition("/")[2]: value
            for name, value in self.meter.metrics(self.meter.take()).items()
            if value
        }


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    if (answer := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(f"no namespaces here: {answer}")
    made = Room(tmp_path_factory.mktemp("programs"))
    yield made
    made(made.programs.close())
    made.runner.close()


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


RIGHT, HALF = fenced("def f(x):\n    return x + 1"), fenced("def f(x):\n    return 2")


def test_asserts(room: Room) -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    wrong = ["no code", fenced("def f(x:"), fenced("1 / 0"), fenced("def g(x): return x"), ""]
    assert room.values(RIGHT, HALF, *wrong, tests=tests) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    counted = room.counted()
    assert counted.pop("latency_s") > 0
    assert counted == {
        "programs": 7,
        "passed": 1,
        "no_code": 1,
        "compile_errors": 2,
        "run_errors": 1,
    }
    assert room.values(RIGHT, HALF, tests=tests, settings={"credit": "share"}) == [1.0, 0.5]


APPS = {"fn_name": "total", "inputs": [[[1, 2, 3]], [[4]]], "outputs": [[6], [4]]}
SOLUTION = """class Solution:
    def total(self, nums: List[int]) -> Optional[int]:
        return reduce(lambda a, b: a + b, nums)"""


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def total(nums): return sum(nums)", 1.0),
        ("def total(nums): return [sum(nums)]", 1.0),
        (SOLUTION, 1.0),
        ("def total(nums: List[int]) -> int:\n    return Counter(x=sum(nums))['x']", 1.0),
        (
            "from __future__ import annotations\ndef total(nums: List[int]): return sum(nums)",
            1.0,
        ),
        ("def total(nums): return 6", 0.0),
        ("class Solution:\n    def total(self, nums): return 6", 0.0),
        ("class Solution:\n    def sum(self, nums): return sum(nums)", 0.0),
    ],
)
def test_functions_and_solutions_are_called_as_apps_calls_them(
    room: Room, code: str, reward: float
) -> None:
    assert room.values(fenced(code), content="Write total(nums).", tests=APPS) == [reward]


def test_a_value_is_right_where_python_says_it_is_equal(room: Room) -> None:
    """Numbers are compared as by the testers of APPS and LiveCodeBench; a truth value is no number all the same."""
    tests = {"fn_name": "f", "inputs": [[4], [6]], "outputs": [2, 3]}
    halves = ["x / 2", "x // 2", "Fraction(x, 2)", "str(x // 2)", "x / 2 + 0.1"]
    codes = [f"from fractions import Fraction\ndef f(x): return {half}" for half in halves]
    assert room.values(*map(fenced, codes), tests=tests) == [1.0, 1.0, 0.0, 0.0, 0.0]
    tests = {"fn_name": "f", "inputs": [[1], [0]], "outputs": [1, 0]}
    assert room.values(fenced("def f(x): return bool(x)"), tests=tests) == [0.0]
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [2**60 + 1]}
    assert room.values(fenced("def f(x): return float(2**60 + x)"), tests=tests) == [0.0]


def test_wrapped_values_count_only_where_all_are(room: Room) -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 3]]}
    assert room.values(fenced("def f(x): return [x, x + 1][: x]"), tests=tests) == [1.0]
    assert room.values(fenced("def f(x): return x if x == 1 else [2, 3]"), tests=tests) == [0.0]


def test_a_function_that_nobody_named_is_masked_and_one_that_the_prompt_names_is_not(
    room: Room,
) -> None:
    code = fenced("def add_up(nums): return sum(nums)")
    (score,) = room.scores([code], content="Add up the numbers.", tests=APPS)
    assert score.value is None and "row 0" in str(score.problem)
    assert room.counted()["unreachable"] == 1
    assert room.values(code, content="Write total(nums).", tests=APPS) == [0.0]
    assert room.counted()["unreachable"] == 1


def test_an_imported_name_is_not_the_programs(room: Room) -> None:
    tests = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}
    assert room.values(fenced("x = 1  # gcd"), tests=tests) == [0.0]
    assert room.values(fenced("def gcd(a, b): return math.gcd(a, b)"), tests=tests) == [1.0]


def test_a_script_may_use_the_testers_names_too(room: Room) -> None:
    code = fenced("print(sum(map(int, sys.stdin.readline().split())))")
    assert room.values(code, tests=[{"input": "1 2\n", "output": "3\n"}]) == [1.0]


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "sys.exit(0)", "raise SystemExit"])
def test_a_script_may_end_itself(room: Room, end: str) -> None:
    code = fenced(f"print(sum(map(int, input().split())))\n{end}")
    assert room.values(code, tests=[{"input": "1 2\n", "output": "3\n"}]) == [1.0]


def test_leetcodes_check_calls_a_method_of_a_solution(room: Room) -> None:
    test = "def check(candidate):\n    assert candidate(nums=[1, 2, 3]) == 6\n"
    codes = [SOLUTION, "def total(nums): return sum(nums)", SOLUTION.replace("+", "-")]
    rewards = room.values(*map(fenced, codes), test=test, entry_point="Solution().total")
    assert rewards == [1.0, 1.0, 0.0]


def test_calls_with_arguments(room: Room) -> None:
    tests = [
        {"input": [1], "output": 2},
        {"input": [0.5], "output": 1.5},
        {"input": [1.0], "output": 2.0},
    ]
    assert room.values(
        RIGHT, HALF, tests=tests, entry_point="f", settings={"credit": "share"}
    ) == [
        1.0,
        2 / 3,
    ]
    cheats = [
        "class A(float):\n    def __eq__(self, o): return True\ndef f(x): return A(7)",
        "def f(x): return True",
    ]
    assert room.values(
        *map(fenced, cheats), tests=tests, entry_point="f", settings={"credit": "share"}
    ) == [0.0, 0.0]


def test_standard_input_and_output(room: Room) -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
    adds = fenced("print(sum(map(int, input().split())))")
    constant, leaves = fenced("print(3)"), fenced("print(3); import os; os._exit(1)")
    assert room.values(adds, constant, leaves, tests=tests) == [1.0, 0.0, 0.0]
    assert room.values(adds, constant, leaves, tests=tests, settings={"credit": "share"}) == [
        1.0,
        0.5,
        0.0,
    ]
    assert room.values(fenced("def f(:"), tests=tests) == [0.0]
    assert room.counted()["compile_errors"] == 1


def test_a_program_that_hangs_scores_nothing_and_is_counted(room: Room) -> None:
    hangs = fenced("while True: pass")
    assert room.values(hangs, tests=["assert f(1) == 2"], settings={"timeout_s": 0.5}) == [0.0]
    assert room.counted()["timeouts"] == 1
    assert room.values(
        hangs, tests=[{"input": "", "output": ""}], settings={"timeout_s": 0.5}
    ) == [0.0]
    assert room.counted()["timeouts"] == 1


def test_names_that_the_tests_import_are_pythons_own(room: Room) -> None:
    """`math` here is the standard library's, whatever the program makes of it."""
    cheat = fenced(
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0"
    )
    honest = fenced("import math\ndef f(x): return math.sqrt(x)")
    assert room.values(
        cheat, honest, tests=["assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"]
    ) == [0.0, 1.0]


def test_a_helper_of_the_prompt_is_the_rows_own(room: Room) -> None:
    """HumanEval/38 decodes what a helper in the prompt encodes: a program that redefines both must not pass."""
    prompt = "def encode(s):\n    return s[::-1]\n\ndef decode(s):\n    '''Undo encode.'''\n"
    check = "def check(candidate):\n    for word in ('abc', 'defg'):\n        assert candidate(encode(word)) == word\n"
    cheat, honest = (
        fenced("def encode(s): return s\ndef decode(s): return s"),
        "    return s[::-1]\n",
    )
    assert room.values(cheat, honest, content=prompt, test=check, entry_point="decode") == [
        0.0,
        1.0,
    ]


def test_tests_that_cannot_run_mask_the_completion(room: Room) -> None:
    (score,) = room.scores(
        [RIGHT], tests=["assert f(1) == 2"], test_setup_code="import no_such_module"
    )
    assert (
        score.value is None
        and score.problem is not None
        and "the row's tests cannot run" in score.problem
    )


def test_a_sandbox_that_fails_masks_the_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ycore.sandbox.program_pool.server_command", lambda *_, **__: ["/bin/false"]
    )
    programs = ProgramPool(Level.NAMESPACES, at_once=1, log=tmp_path / "log", run_id="test")
    meter = CodeMeter()
    scorer = CodeScorer("code", CodeSettings(), programs, meter=meter)
    prompt, completion = (
        Prompt(0, "q", {"tests": ["assert f(1)"]}),
        Completion((1,), None, RIGHT, "stop", 0),
    )
    score = asyncio.run(scorer.score_program(prompt, completion))
    assert score.value is None and score.problem is not None
    assert meter.metrics(meter.take())["ycore/code/infra_errors"] == 1


def broken(number: int) -> str:
    """Return a body that is wrong, each in another way."""
    return [
        "    return 'no such value'\n",
        "    raise ValueError('no')\n",
        "    return None\n",
        "    import os; os._exit(0)\n",
        "    import sys; sys.exit(0)\n",
        "    return (\n",
        "    class Same:\n        __eq__ = __lt__ = __gt__ = lambda a, b: True\n    return Same()\n",
        "    while True: pass\n" if number % 64 == 7 else "    return object\n",
    ][number % 8]


@pytest.mark.skipif(
    not HUMANEVAL.is_file(), reason=f"the HumanEval problems are not at {HUMANEVAL}"
)
@pytest.mark.verify
def test_humaneval_canonical_solutions_all_pass_and_broken_ones_never(room: Room) -> None:
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    scorer = CodeScorer("code", CodeSettings(timeout_s=5.0), room.programs, meter=room.meter)

    async def score(row: dict[str, Any], body: str) -> float | None:
        prompt = Prompt(
            0, row["prompt"], {"test": row["test"], "entry_point": row["entry_point"]}
        )
        return (
            await scorer.score_program(prompt, Completion((1,), None, body, "stop", 0))
        ).value

    async def all_of(bodies: list[str]) -> list[float | None]:
        return await asyncio.gather(*map(score, rows, bodies))

    assert room(all_of([row["canonical_solution"] for row in rows])).count(1.0) == 164
    assert room(all_of([broken(number) for number in range(164)])).count(0.0) == 164
