"""Right and wrong answers in the ways in which models write them, one kind a test."""

from typing import Any

import pytest

from tests.rewards.test_builtin import score
from ycore.rewards.answers import final_answer
from ycore.rewards.code import (
    CodeSettings,
    StdioTests,
    UnitTests,
    code_of,
    program_of,
    row_tests,
    same_output,
)
from ycore.types import Prompt

NUMERIC = ("exact_answer", "numeric_answer", "math")
ADD = "def add(a, b):\n    return a + b\n"


def boxed(text: str) -> str:
    return rf"So the answer is $\boxed{{{text}}}$."


@pytest.mark.parametrize(
    "written",
    [
        r"\boldsymbol{0.5}",
        r"\bm{0.5}",
        r"\bf{0.5}",
        r"\mathit{0.5}",
        r"\textit{0.5}",
        r"\mathsf{0.5}",
        r"\large 0.5",
        r"\textbf{\frac{1}{2}}",
        r"\left.\frac{1}{2}\right.",
        r"0{.}5",
        r"\color{red}0.5",
        r"\textcolor{red}{0.5}",
        r"\underline{0.5}",
        r"\emph{0.5}",
        r"\text{0.5}",
        r"x = 1/2",
    ],
)
def test_the_look_of_a_number_does_not_change_it(written: str) -> None:
    for name in NUMERIC:
        assert score(name, boxed(written), answer="1/2") == 1.0, name


@pytest.mark.parametrize(
    "written",
    [
        r"1\hspace{1pt}234",
        r"1\kern1pt 234",
        r"1\mkern2mu234",
        r"1\, 234",
        r"1\mathord{,}234",
        r"1\mathpunct{,}234",
        r"1{,}234{.}00",
        r"\num{1,234}",
        "1 234",
    ],
)
def test_thousands_are_not_cut(written: str) -> None:
    for name in NUMERIC:
        assert score(name, boxed(written), answer="1234") == 1.0, name
        assert score(name, boxed(written), answer="234") == 0.0, name


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The total is 1 234.", "1234", 1),
        ("The total is 1 234.", "234", 0),
        ("Es sind 12 345 678 Menschen.", "12345678", 1),
        ("Die Antwort ist 3,5.", "3.5", 1),
        ("Die Antwort ist 3,5.", "5", 0),
        ("Es kostet 3,50 €", "3.5", 1),
        ("0,125", "0.125", 1),
        ("0,125", "125", 0),
        ("It is (1,2)", "2", 0),
        ("3, 4", "4", 1),
        ("It is 5 or 6", "6", 0),
        ("It is 1/2 or 0.5", "0.5", 1),
        ("It is minus 7.", "-7", 1),
        ("It is minus 7.", "7", 0),
        ("10 minus 7", "-7", 0),
    ],
)
def test_a_text_ends_with_a_whole_number(completion: str, answer: str, expected: int) -> None:
    for name in ("exact_answer", "numeric_answer"):
        assert score(name, completion, answer=answer) == expected, name


@pytest.mark.parametrize(
    "written",
    [
        r"3.00 \times 10^8 \, \mathrm{m/s}",
        r"3*10**8",
        r"3\times{10}^{8}",
        r"3{\times}10^8",
    ],
)
def test_powers_of_ten_are_read(written: str) -> None:
    for name in NUMERIC:
        assert score(name, boxed(written), answer="3e8") == 1.0, name
        assert score(name, boxed(written), answer="8") == 0.0, name


@pytest.mark.parametrize(
    "written",
    [
        r"5 \; \text{cm}",
        r"5 \, cm",
        r"5\hspace{2pt}\text{cm}",
        r"5\operatorname{cm}",
        r"5\:\rm{cm}",
        r"5\ {\rm cm}",
        r"5\enspace\text{cm}",
        r"5\quad\text{cm}",
        r"5\,\textup{cm}",
        r"5\,\rm cm",
    ],
)
def test_units_are_read_in_every_look(written: str) -> None:
    for name in ("exact_answer", "math"):
        assert score(name, boxed(written), answer="5 cm") == 1.0, name
    assert score("exact_answer", boxed(written), answer="5 km") == 0.0


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (r"45\degree", "45"),
        (r"45^{\text{o}}", r"45^\circ"),
        (r"45^{\circ}C", r"45^\circ C"),
        (r"45°C", r"45^\circ C"),
        (r"0.\overline{3}", "1/3"),
        (r"1.\overline{6}", "5/3"),
    ],
)
def test_degrees_and_repeating_decimals_are_numbers(written: str, answer: str) -> None:
    for name in ("exact_answer", "math"):
        assert score(name, boxed(written), answer=answer) == 1.0, name


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("x = 5", "x=5", 1),
        (r"\boxed{5}", "x = 5", 1),
        (r"\boxed{x=6, y=7}", "7", 0),
        (r"\boxed{x=6 \text{ or } x=7}", "7", 0),
        (r"\boxed{AB = 3 + 4 = 7}", "7", 1),
        (r"\boxed{5}", "5x", 0),
        (r"\boxed{2}", "2xy", 0),
        ("y = 5x", "5", 0),
        ("The line is y=2x+5", "5", 0),
        (r"\boxed{-x+1}", "x+1", 0),
        (r"\boxed{2(x+1)}", "(x+1)", 0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{3}", 0),
        (r"\boxed{\frac{1}{\sqrt{3}}}", r"\sqrt{3}", 0),
        (r"$\boxed{\sqrt{3}}$ is it.", r"\sqrt{3}", 1),
        ("y = 2x + 1", "2x+1", 1),
        (r"The answer is **\sqrt{3}**.", r"\sqrt{3}", 1),
        ("It is well-known", "well-known", 1),
        ("- [1, 2]", "[1,2]", 1),
    ],
)
def test_no_part_of_a_formula_is_the_answer(
    completion: str, answer: str, expected: int
) -> None:
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\boxed{2yx}", "2xy", 1),
        (r"\boxed{yx}", "xy", 1),
        (r"\boxed{3x^2y}", "3yx^2", 1),
        (r"\boxed{-1 < x < 3}", "(-1,3)", 1),
        (r"\boxed{x \le 3}", r"(-\infty,3]", 1),
        (r"\boxed{x \le 4}", r"(-\infty,3]", 0),
        (r"\boxed{\varnothing}", r"\emptyset", 1),
        ("The answer is (1,2).", "(1,2)", 1),
        ("The answer is (1,2).", "(2,1)", 0),
        ("US$18", "18", 1),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{\text{Bob}}", r"\text{Evelyn}", 0),
        (r"\boxed{5}", "5x", 0),
        (r"\boxed{x=6, y=7}", "7", 0),
    ],
)
def test_formulas_are_equal_as_people_say(completion: str, answer: str, expected: int) -> None:
    assert score("math", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("B", "(B)", 1),
        ("The answer is B.", "(B)", 1),
        ("(C)", "(B)", 0),
        ("Answer: B) Paris", "B", 1),
        ("**Answer: B. Paris**", "B", 1),
        ("A) Rome\nB) Paris\nC) Oslo\nD) Bonn", "D", 0),
        ("Answer: A) Rome, or B) Paris", "B", 0),
        (r"The answer is \boxed{B}, since 3 > 2.", "B", 1),
        ("A, B, C, D", "D", 0),
        ("A, B, C, or D", "D", 0),
        ("(A) (B) (C) (D)", "D", 0),
        ("A/B/C/D", "D", 0),
        ("A or B", "B", 0),
        ("A, B, C", "B, C", 0),
        ("not B", "B", 0),
        ("The answer isn't B", "B", 0),
        ("It is not the Louvre", "Louvre", 0),
        ("yes or no", "no", 0),
        ("Yes/No", "No", 0),
        ("It is not true", "true", 0),
        ("不是北京", "北京", 0),
        ("是的,对", "对", 1),
        ("Hamlet", '"Hamlet"', 1),
        ("红楼梦", "《红楼梦》", 1),
        ("Paris 🎉", "Paris", 1),
        ("<b>Paris</b>", "Paris", 1),
        ("Paris<|im_end|>", "Paris", 1),
        (r"\boxed{Paris} is the capital of France.", "Paris", 1),
        ("It is not Rome but Paris", "Paris", 1),
    ],
)
def test_choices_and_words(completion: str, answer: str, expected: int) -> None:
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("C++ is good", "C", 0),
        ("C# here", "C", 0),
        ("It is C++ here", "C++", 1),
        ("The answer is B since", "(B)", 1),
        ("红楼梦吗", "《红楼梦》", 1),
        ("It's not Paris, but", "Paris", 0),
    ],
)
def test_words_within_a_text(completion: str, answer: str, expected: int) -> None:
    assert score("contains_answer", completion, answer=answer) == expected


def test_a_number_of_any_length_has_a_text() -> None:
    assert final_answer("1" * 100_000) == "1" * 100_000


CALLS = UnitTests(entry_point="add", calls=(([1, 2], 3),))
ASSERTS = UnitTests(("assert add(1, 2) == 3",))


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{ADD}```\nUsage:\n```python\nprint(add(1, 2))\n```",
        f"```python\n{ADD}```\nUsage:\n```python\ndef main():\n    print(add(1, 2))\n\nmain()\n```",
        f"```python\nfrom __future__ import annotations\n{ADD}```",
        f"```python\nfrom __future__ import (\n    annotations,\n)\n{ADD}```",
        f"```python\n{ADD}```\nTests:\n```python\ndef test_it():\n    assert add(1, 2) == 3\n```",
        f"```python\ndef add(a, b):\n    return a - b\n```\nBetter:\n```python\n{ADD}```",
        f"```\n{ADD}```\nOutput:\n```\n3\n```",
        f"```\n{ADD}```\nRun:\n```bash\npython a.py\n```",
        f"<answer>```python\n{ADD}```</answer>",
        f"Here is the code: ```python\n{ADD}```",
        f"```python\n{ADD.rstrip()}```",
        f"```python\n{ADD}```<|im_end|>",
        "Here:\n\n    ```python\n    def add(a, b):\n        return a + b\n    ```",
        "Here:\n    ```python\n    def add(a, b):\n        return a + b\n    ```",
    ],
)
def test_the_program_is_found_beside_its_example(text: str) -> None:
    for tests in (CALLS, ASSERTS):
        names: dict[str, Any] = {}
        exec(program_of(text, tests), names)
        assert names["add"](1, 2) == 3


def test_a_program_that_prints_is_found_before_its_output() -> None:
    text = "```\nprint(3)\n```\nIt gives:\n```\n3\n```"
    assert code_of(text, StdioTests((("", "3"),))) == "print(3)\n"


@pytest.mark.parametrize(
    "example",
    [
        "print(add(1, 2))",
        "n = int(input())",
        "def main():\n    print(add(1, 2))",
        "print('12')",
    ],
)
def test_a_program_that_reads_its_input_is_found_before_an_example(example: str) -> None:
    program = "import sys\na, b = map(int, sys.stdin.readline().split())\nprint(a + b)\n"
    text = f"```python\n{program}```\nFor example:\n```python\n{example}\n```"
    assert code_of(text, StdioTests((("1 2\n", "3\n"),))) == program


def test_a_future_statement_stands_before_what_the_prompt_gives() -> None:
    """A compiler refuses it anywhere else."""
    tests = UnitTests(
        ("",), entry_point="add", given="from typing import List\n\ndef add(a, b):\n"
    )
    program = f"from __future__ import annotations\n\n{ADD.replace('(a,', '(a: NoSuchName,')}"
    names: dict[str, Any] = {}
    exec(program_of(f"```python\n{program}```", tests), names)
    assert names["add"](1, 2) == 3 and "List" in names


def test_an_argument_a_line_is_read_without_a_type() -> None:
    tests = {"inputs": ["1\n[2, 3]"], "outputs": ["3"], "fn_name": "add"}
    read = row_tests(Prompt(0, "q", {"tests": tests}), CodeSettings())
    assert isinstance(read, UnitTests) and read.calls == (([1, [2, 3]], 3),)
    texts = {"inputs": ['"ab"\n"5"'], "outputs": ['"ab5"'], "fn_name": "add"}
    read = row_tests(Prompt(0, "q", {"tests": texts}), CodeSettings())
    assert isinstance(read, UnitTests) and read.calls == ((["ab", "5"], "ab5"),)


def test_the_name_of_a_function_is_no_pattern() -> None:
    tests = UnitTests(entry_point="f(", calls=(([1], 1),))
    assert code_of("```python\na = 1\n```", tests) == "a = 1\n"


@pytest.mark.parametrize("written", ["12 * 12\n144", "Day 3\n144", "1 | 2\n3\n\n144"])
def test_numbers_on_lines_of_their_own_are_no_thousands(written: str) -> None:
    assert [score(name, written, answer="144") for name in NUMERIC] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("B) Paris", "B", 1),
        ("**(B) $12$**", "B", 1),
        ("B. cats or dogs", "B", 1),
        ("The answer is B because Paris is the capital.", "B", 1),
        ("It's B.", "B", 1),
        ("(B) or (C)", "B", 0),
        ("A) Paris or C", "A", 0),
        ("A B C D", "D", 0),
        ("A|B", "B", 0),
        ("A & B", "B", 0),
        ("A\nB", "B", 0),
        ("* A\n\n* B", "B", 0),
        ("A or maybe B", "B", 0),
        ("A\u6216B", "B", 0),
        ("Not (B)", "B", 0),
        ("Neither A nor B", "B", 0),
        ("Part (a): B", "B", 1),
        ("yes, no", "no", 0),
        ("True / False", "False", 0),
        ("No, false.", "false", 1),
        ("\u662f\u5426", "\u5426", 0),
        ("Macbeth or Hamlet", "Hamlet", 0),
        ("\u4e0a\u6d77\u6216\u5317\u4eac", "\u5317\u4eac", 0),
        (r"\boxed{Rome, Paris}", "Paris", 0),
        (r"\boxed{Paris, France}", "Paris, France", 1),
        ("all except Berlin", "Berlin", 0),
        ("Paris\u2014", "Paris", 1),
        ("Paris<\uff5cend\u2581of\u2581sentence\uff5c>", "Paris", 1),
        ("<think>a</think><think>Paris", "Paris", 0),
    ],
)
def test_one_choice_is_made(completion: str, answer: str, expected: int) -> None:
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is not 6.", "6", 0),
        ("It isn't 1,234", "1234", 0),
        ("It isn't 1,234", "234", 0),
        ("\u4e0d\u662f6", "6", 0),
        ("7, not 6", "7", 1),
        ("7, not 6", "6", 0),
        ("5 or maybe 6", "6", 0),
        ("5 or 6", "6", 0),
        ("5\u00b11", "5", 0),
        ("x > 6", "6", 0),
        ("x != 6", "6", 0),
        ("> 6", "6", 1),
        ("6 (mod 7)", "7", 0),
        ("6^x", "6", 0),
        ("6x", "6", 0),
        (r"\boxed{6e}", "6", 0),
        (r"\boxed{\neq 6}", "6", 0),
        (r"\boxed{6\lor 7}", "7", 0),
        (r"\boxed{\text{not } 6}", "6", 0),
        (r"\boxed{1\medspace 234}", "1234", 1),
        (r"\boxed{1\hphantom{,}234}", "1234", 1),
        (r"\boxed{1\phantom{,}234}", "234", 0),
        (r"\boxed{6\,\text{m/s}^2}", "6", 1),
        (r"\boxed{6\hbox{ cm}}", "6", 1),
        (r"\boxed{\sim 6}", "6", 1),
        (r"\boxed{\pounds6}", "6", 1),
        ("2 trillion", "2000000000000", 1),
        ("3 hundred", "300", 1),
    ],
)
def test_a_denied_or_bounded_number_is_no_answer(
    completion: str, answer: str, expected: int
) -> None:
    for name in NUMERIC:
        assert score(name, completion, answer=answer) == expected, name


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\u7b54\u6848\u662f\u5341\u4e94", "\u4e94"),
        ("\u4e8c\u5341\u4e94", "\u4e8c\u5341"),
        ("at 3:30:15", "3:30"),
        ("2020-12-25", "12-25"),
        ("It is not 6", "6"),
        ("neither Paris nor Berlin", "Berlin"),
    ],
)
def test_no_part_of_a_numeral_or_time_is_held(completion: str, answer: str) -> None:
    for name in ("exact_answer", "contains_answer"):
        assert score(name, completion, answer=answer) == 0.0, name


def test_a_formula_that_math_verify_cannot_read_is_compared_as_text() -> None:
    gold = r"\frac{9 \pm \sqrt{77}}{2}"
    assert score("math", boxed(r"\frac{9\pm\sqrt{77}}{2}"), answer=gold) == 1.0
    assert score("math", boxed(r"\frac{9\pm\sqrt{7}}{2}"), answer=gold) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "So:\n\t```python\n\tdef add(a, b):\n\t    return a + b\n\t```",
        "```python\n    def add(a, b):\n        return a + b\n```",
        "    def add(a, b):\n        return a + b\n",
    ],
)
def test_the_margin_of_a_program_may_be_anywhere(text: str) -> None:
    for tests in (CALLS, ASSERTS):
        names: dict[str, Any] = {}
        exec(program_of(text, tests), names)
        assert names["add"](1, 2) == 3


def test_a_continuation_may_have_lost_its_first_indentation() -> None:
    tests = UnitTests(("",), entry_point="add", given="def add(a, b):\n")
    names: dict[str, Any] = {}
    exec(program_of("c = a + b\n    return c\nprint('done')\n", tests), names)
    assert names["add"](1, 2) == 3


def test_a_small_number_may_be_printed_without_an_exponent() -> None:
    assert same_output(b"0.00001", "1e-05\n", 1e-6)
    assert not same_output(b"0.1", "1e-05\n", 1e-6)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("everything but B", "B", 0),
        ("It is anything but Paris", "Paris", 0),
        ("It is nothing but Paris", "Paris", 1),
        (r"\boxed{\textbf{(B)}\ 12}", "B", 1),
        (r"\boxed{\textbf{(B) }12}", "B", 1),
        (r"\boxed{\textbf{(B) }12}", "12", 1),
        ("B is correct.", "B", 1),
        ("Of the four, only option (B) is the correct answer.", "B", 1),
        ("B is not correct.", "B", 0),
        ("A, B is correct.", "B", 0),
        ("A or B is correct.", "B", 0),
        ("\u20ac5", "$5", 0),
        ("5 \u20ac", "$5", 0),
        ("5 \u20ac", "5 euros", 1),
        ("\u20ac5", "5 \u20ac", 1),
        ("$5$", "\u20ac5", 1),
        ("5\u00a2", "5 cents", 1),
        ("\uffe55", "\u00a55", 1),
    ],
)
def test_exceptions_choices_and_currencies(completion: str, answer: str, expected: int) -> None:
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("It lies between 5 and 6.", "6", 0),
        ("It lies between 5 and 6, so 6", "6", 1),
        (r"\boxed{6} or \boxed{7}", "7", 0),
        (r"$\boxed{6}$ or $\boxed{7}$", "7", 0),
        (r"\boxed{0.5} or $\boxed{\frac{1}{2}}$", "1/2", 1),
        ("3\u4e075\u5343", "35000", 1),
        ("3\u4e075\u5343", "5", 0),
        ("1\u51042000\u4e07\u4eba", "120000000", 1),
        (r"\boxed{3{,}5}", "3.5", 1),
        (r"\boxed{3{,}5}", "5", 0),
        ("1,234,567\u2009890", "7", 0),
    ],
)
def test_numbers_in_parts_and_between_others(
    completion: str, answer: str, expected: int
) -> None:
    for name in NUMERIC:
        assert score(name, completion, answer=answer) == expected, name
