"""The answer that a completion gives, and its comparison with the right one: numbers as numbers, all else as text.

Texts are compared in Unicode's NFC, and words end where UAX 29 says. In scripts that put no space between words a word
may end behind every letter, and in Korean particles may follow one.
"""

import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import regex

from ycore.data.cells import last_boxed
from ycore.types import THINKING, Content, after_thinking

# -- words -------------------------------------------------------------------------------------------------------------
#
# Patterns in triple quotes are verbose, or parts of verbose patterns: white space in them says nothing.

_UNSPACED = r"\p{Han}\p{Hiragana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}"
"""Letters of the scripts that put no space between words."""
_WORD = rf"""(?xV1)
    (?<!\S)[^\s{_UNSPACED}]++(?!\S)                                                # between spaces, other scripts alone
    | (?=[{_UNSPACED}])\X                                                           # a letter with its marks
    | [[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+                                       # other letters between those
"""

_NOT_DENIED = r"""
    (?<!
        [\u4e0d\u6ca1\u975e\u672a\u65e0\u7121]\u662f?                               # Chinese: is not, has not, never
        | (?: \b(?:not|never|nor|except|nicht|pas|(?:all|(?:any|every)\w{3,5})\sbut) | n't ) [\s(] (?:the\s|an?\s)? \W{0,3}
            # not (B), all but the Louvre
    )
"""
_NOT_LISTED = r"""
    (?<!
        (?<!')\b (?: (?:[b-z]|^a)\s | [a-z]\W{0,3} (?: [,/;&|)+*\u3001-] | \s(?:or|and|oder|et|ou)\b ) )
            (?: [^\w:] | (?:or|and|also|maybe|option)\b ){0,4}                          # the c of a c, a/c and (a) or (c)
        | [a-z][\u6216\u548c]                                                       # Chinese: or, and
    )
"""
_UNDENIED = regex.compile("(?xi)" + _NOT_DENIED)
_NOT_SECOND = r"""
    (?<!
        (?: \b(?:or|oder|ou)\s | \u6216 ) (?:the\s|an?\s)? \W?                      # Rome or Paris
        | \b(?: yes(?=\W+(?:or\s|and\s)?no\b) | no(?=\W+(?:or\s|and\s)?yes\b) | true(?=\W+(?:and\s)?false\b)
            | false(?=\W+(?:and\s)?true\b) ) [\s,/|;&]{1,3} (?:and\s)?              # the no of yes, no
        | (?<!\u6848)\u662f(?=\u5426) | \u5bf9(?=\u9519)               # Chinese: yes and no
    )
"""
_NUMERAL = r"[\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343]"
_NOT_IN_FORMULA = r"""
    (?<! [-+/^\d)\]}]\(? | \w[*({] | \}\{ )                                         # the x+1 of 2x+1 and of 3(x+1)
"""
_NOT_IN_LETTER = r"(?! \p{M} | [\u0e33\u0eb3] )"
"""Not before the marks of a letter, nor before its vowel sign in Thai or Lao."""
_WORD_START = rf"""
    (?:
        \b
        | (?<=\p{{Hangul}}) (?!\p{{Hangul}})
        | (?<=\p{{L}}{{2}}[.:])                                                     # answer:paris
    )
    {_NOT_DENIED} {_NOT_IN_LETTER}
    (?<! {_NUMERAL}(?={_NUMERAL}) | \d[:/-](?=\d) )                                 # the 12-25 of 2020-12-25
"""
_WORD_END = rf"""
    (?:
        \b
        | (?=\p{{Hangul}})
        | (?=[.:]\p{{L}}{{2}})
    )
    {_NOT_IN_LETTER} (?! (?<={_NUMERAL}){_NUMERAL} | (?<=\d)[:/-]\d )               # not the 3:30 of 3:30:15
"""
# The b of `the answer is (b), because`, of `option: b.` and of `b is correct`.
_CHOSEN_LETTER = r"""(?x)
    (?|
        (?:answer|option|choice)(?:\sis)? [^\p{L}\d]{0,6} \b(\p{L}) (?:[).:,]|\s(?:because|since)\b)
        | (?:^|(?<!\b\p{L})[,.:;]) \s? (?:(?:so|only|the|answer|option|choice)\s){0,3} \W?\b(\p{L})\W?
            \s?is\s (?:the\s)?(?:correct|right) (?:\s(?:answer|option|choice))? $
    )
"""
# The letters of options, as in `b) paris`.
_MARKED_LETTER = r"(?<![\p{L}\d'.])(\p{L})[).:](?!\S)"
_OPTION = r"\W{0,4}\p{L}[).:]\W*+(?!\p{L}\b)\w"
_ANOTHER_LETTER = r"\b(?:or|and)\s?\W?\p{L}\b"
# The line end between letters of which each has a line.
_BETWEEN_LETTERS = r"(?m)(?<=^[^\p{L}\n]{0,5}\p{L}\W{0,3})\n[^\p{L}]{0,8}(?=\p{L}\W{0,3}$)"
_LONG_RUN_OF_MARKS = r"(\p{M}{30})\p{M}+"
# The spaces in `( 1, 2 )`, and those before a command: `2 \pi`.
_SPACED_SIGN = r"\s?([-+*/^=<>|,(){}\[\]]|(?=\\))\s?"
_CLOSING = (
    " \t\r\n.,;:!?*_`'\")]}$"
    + "\\\u2014"
    + "\u3002\uff0c\u3001\uff01\uff1f\uff1b\uff1a\u300d\u300f\uff09\u3011\u300b\u201d\u2019\u00bb\u2026\u17d4\u0964\u061f"
)
"""Punctuation, quotation marks, closing brackets and marks of Markdown, which may stand behind an answer."""

# -- one form for each of the many in which LaTeX and Unicode write a number -------------------------------------------

# Signs of full width, Arabic signs and what has no width.
_CHARACTERS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\uff0b\uff0e\uff05\uff04\uff0f\u2044\u066b\u066a\u2019\uffe5",
    "-------+.%$//.%'\u00a5",
    "\u200b\u200e\u200f\ufeff",
)
_SYMBOLS = str.maketrans({"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt "})
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_GROUP = "\u2009"
"""Stands for every separator of thousands but comma and dot."""
# Those of 1\,234, 1{,}234, 1~234, 1'234 and 1_234, and Unicode's apostrophes and spaces.
_SEPARATOR = (
    r"(?:\\[,;: ]\s?|\{\\[,;:]\}|[~'_\u2019\u02bc\u066c\u00a0\u2000-\u200a\u202f\u205f])"
)
# The same and `{,}` where whole groups of digits follow, as in India also of two: 12{,}34{,}567.
_SEPARATOR_OF_GROUPS = rf"""(?x)
    (?<=\d) (?:{_SEPARATOR}|\{{,\}})
    (?= (?: \d\d\d? (?:{_SEPARATOR}|\{{,\}}) ){{0,12}} \d{{3}} (?!\d) )
"""
# Chinese, Japanese and Korean numbers of several parts: 3\u4e075\u5343, 3\u4e075000 and 1\u51042000\u4e07.
_IN_TEN_THOUSANDS = r"""(?x)
    (?<![\d.,])
    (?:
        (?: (?P<part>\d{1,4})(?P<scale>[\u4e07\u842c\ub9cc\u4ebf\u5104\uc5b5])\s? ){1,2}
            (?: (?P<part>\d)(?P<scale>[\u5343\ucc9c]) | (?P<part>\d{4})(?P<scale>) )
        | (?P<part>\d{1,4})(?P<scale>[\u4ebf\u5104\uc5b5])\s?(?P<part>\d{1,4})(?P<scale>[\u4e07\u842c\ub9cc])
    )
    (?![\d\u4e07\u842c\ub9cc])
"""
_ARGUMENT = r"\s?(?|\{\s*([^{}]{1,60}?)\s*\}|(\d))"
"""An argument of a command, in braces or a digit alone: both of `\\frac{1}{2}` and of `\\frac12`."""

_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "lakh": 100_000,
    "million": 1_000_000,
    "crore": 10_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
    **dict.fromkeys("\u5343\ucc9c", 1000),
    **dict.fromkeys("\u4e07\u842c\ub9cc", 10_000),
    **dict.fromkeys("\u4ebf\u5104\uc5b5", 100_000_000),
}


def _sum_of_parts(match: Any) -> str:
    """Add up the parts of a match of `_IN_TEN_THOUSANDS`, each with its scale."""
    parts = zip(match.captures("part"), match.captures("scale"), strict=True)
    return str(sum(int(part) * _SCALES.get(scale, 1) for part, scale in parts))


def _repeating(match: Any) -> str:
    """Return a decimal whose last digits repeat for ever as a fraction."""
    whole, decimals, repeated = match.groups()
    top = int(whole + decimals + repeated) - int(whole + decimals)
    return rf"\frac{{{top}}}{{{10 ** len(decimals) * (10 ** len(repeated) - 1)}}}"


def _fraction_text(match: Any) -> str:
    """Write a fraction with a slash, behind the digit before it: `2 1/2`, or `(x+1)/2` where one is a formula."""
    before, top, bottom = match.groups()
    is_plain = regex.fullmatch(r"-?[\d.,]+", top) and regex.fullmatch(r"[\d.,]+", bottom)
    space = " " if before else ""
    return f"{before}{space}{top}/{bottom}" if is_plain else f"{before}({top})/{bottom}"


def _vulgar_fraction(match: Any) -> str:
    """Write a fraction that is one character as LaTeX does."""
    return r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044"))


# Patterns, each with what takes its place, in the order in which they are replaced.
# What changes the look alone.
_STYLES: dict[str, Any] = {
    r"""(?x)                                                                        # spaces of a width of their own
        \\(?:
            [hm]space\*? \s? \{[^{}]{0,20}\}                                        # \hspace{1cm}
            | h?phantom \s? \{,?\} | (?:thin|med|thick)space (?![A-Za-z]) \s?
            | [hm]?(?:kern|skip) \s? [\d.]{1,5} \s? (?:pt|em|ex|mu) \s?             # \kern3pt
        )
    """: r"\\,",
    r"""(?x)
        \\(?:text)?color \s? \{[^{}]{0,20}\}
        | \\(?:boldsymbol|bm|pmb|underline|num|rm|bf|it|sf|tt|[lL]arge|LARGE|[hH]uge|pounds|euro) (?![A-Za-z]) \s?
        | <[|\uff5c][\w\u2581]{1,30}[|\uff5c]> | </s> | <(?:eos|end_of_turn)>           # <|im_end|>
        | </? (?:b|i|u|p|em|strong|code|mark|br) \s? /?>                            # <b>, </b>, <br />
        | \p{Extended_Pictographic} \ufe0f?
    """: "",
    "[\uff08\uff09\uff21-\uff3a\uff41-\uff5a]": lambda match: chr(
        ord(match[0]) - 0xFEE0
    ),  # of full width
    "[\u00bc-\u00be\u2150-\u215e]": _vulgar_fraction,
    r"\\varnothing|\u2205": r"\\emptyset ",
    r"(?<=(?<![\d},])\d{1,20})\{,\}(?=(?:\d\d?|\d{4,})(?![\d{]))": ".",  # 3{,}5, but not 1{,}234
    # Repeating decimals: 0.1\overline{6}
    r"\b(\d{1,9})\.(\d{0,9})\\(?:overline|bar|dot)\s?\{(\d{1,9})\}": _repeating,
}
_SPELLINGS = _STYLES | {
    r"\\[()\[\]]": " ",  # the delimiters of a formula
    _IN_TEN_THOUSANDS: _sum_of_parts,
    r"\\(?:text|math(?:rm|ord|punct|bin)|mbox)\s?\{,\}": ",",
    r"\^\s?\{\\text\{o\}\}|\\degree(?![A-Za-z])": "\u00b0",
    r"""(?x)
        \\(?: text[a-z]{0,6} | math(?:rm|bf|it|sf|tt|normal) | [hm]box | emph | operatorname )
            \s? \{\s*([^{}]*)\}                                                     # 5\text{ km}
        | (?<=\d(?:\s|~|\\.){0,2}) \{(\p{L}+)\}                                     # 5\,{km}
    """: r" \1\2",
    r"""(?x)
        \{ \s? ([-+,.:]|\\times|\\cdot) \s? \}                                      # {-}5, 10{:}30
        | \\([%$])
        | \{(10)\}(?=\^)                                                            # {10}^3
        | \\! | \\(?:left|right)(?:\.|(?![A-Za-z]))
        | \\(?:displaystyle|approx|sim)(?![A-Za-z])
        | \\text[a-z]{0,6}(?=\{)
    """: r"\1\2\3",
    r"(?<![\p{L}\d])_+|_+(?![\p{L}\d])": " ",  # _Paris_
    r"\^\s?(?:\\circ|\{\s?\\circ\s?\})": "\u00b0",
    r"(?<=\d)\uff0c(?=\d)": ",",
    rf"(?<=\d)(?:{_SEPARATOR}|\s(?=000(?!\d)))(?=\d)": _GROUP,  # 1\,234, 12 000
    rf"(\d?)\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}": _fraction_text,
    "(?<=[0-9])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+": lambda match: (
        "^" + match[0].translate(_SUPERSCRIPTS)
    ),
    r"\\[,;: ]|~|\\(?:q?quad|enspace)(?![A-Za-z])": " ",
    r"(?<=\d)\s?\*\*\s?(?=[-\d])": "^",  # 2**10
    r"(?i)(?<!\d\s?)\b(?:minus|negative)\s(?=[\d.])": "-",
    r"(?<=\d)\s*degrees?\b": "\u00b0",
    # cm^2 and cm^{3}, with their own characters.
    r"(?<=\s\p{L}{1,4}(?:/\p{L})?)\^\{?([23])\}?(?!\d)": lambda match: chr(
        0xB0 + int(match[1])
    ),
    r"(\u00b0) ?(?=[CFK]\b)|( )[ \t]+": r"\1\2",  # 20° C
}
_COMPILED = {pattern: regex.compile(pattern) for pattern in _SPELLINGS}

# -- numbers, in texts of this form ------------------------------------------------------------------------------------

_INTEGER = rf"""
    (?:
        \d{{1,3}} (?: (?:,\d{{3}})+ | (?:[{_GROUP}]\d{{3}})+ )                      # 1,234,567
        | \d{{1,2}} (?:[,{_GROUP}]\d{{2}}){{1,12}} [,{_GROUP}]\d{{3}}               # 12,34,567, as in India
        | [1-9]\d{{0,2}} (?:\.\d{{3}}){{2,}}                                        # 1.234.567
        | [1-9]\d{{0,2}} (?:\.\d{{3}})+ (?=,\d{{1,2}}(?![\d,]))                     # the 1.234 of 1.234,56
        | \d++
    )
    (?!\d)
"""
_DECIMAL = rf"""
    {_INTEGER} (?: (?<=[{_GROUP}.]\d{{3}}),\d++(?!,\d) | \.\d++ )?+                 # 1.234,56 and 1,234.56
"""
_SPACELESS = rf"{_UNSPACED}\p{{Hangul}}"
# A sign belongs to its number only where nothing precedes it that could be subtracted from: `10-7` holds 10 and 7.
_SIGN = rf"""
    (?:
        (?<![[\w.)\]}}%\u00b0]--[{_SPACELESS}]]) (?<!\d\$)
        (?P<sign>[-+]) (?=\p{{Sc}}?\s?[\d.])
    )?+
"""
# Digits are no number of their own behind a letter or `±`, in an exponent, an index, a root or a denominator.
_START = rf"""
    (?<![[\p{{L}}\d_^/\u221a\u00b1\u2213]--[{_SPACELESS}]])
    (?<!\d\.) (?<!\^[-+{{]) (?<!\\sqrt\s?\{{?)
"""
_NUMBER = rf"""(?xV1)
    {_SIGN} (?:\p{{Sc}}\s?(?P<sign>[-+])?+)?+                                       # -$5, $-5
    (?:
        (?P<chain>                                                                  # no number: 3.11.2, 5/12/2024, 10:30
            {_START} (?![1-9]\d{{0,2}}(?:\.\d{{3}}){{2,}}(?![.\d]))
            \d++ (?: (?:[.]\d++){{2,}}+ | (?:/\d++){{2,}}+ | (?:-\d++){{2,}}+ | (?::\d++)++ )
        )
        | (?: {_START} (?P<whole>\d{{1,9}}) \s (?=\d{{1,9}}/\d) )?+                 # the 2 of 2 1/2
        (?P<top> {_START}{_DECIMAL} | (?<!\w)\.\d++ ) (?: / (?P<bottom>{_DECIMAL}) )?+
        (?:
            [eE] (?P<power_of_ten>[-+]?\d{{1,3}}) (?!\d)
            | \s? (?:\\times|\\cdot|[\u00d7\u00b7*x]) \s? 10                         # 1.2 \times 10^3
                \^\{{?+ (?P<power_of_ten>[-+]?\d{{1,3}}) \}}?+ (?!\d)
            | \^\{{?+ (?P<power>[-+]?\d{{1,3}}) \}}?+ (?!\d)                        # 2^10
        )?+
        (?! \^ | \s?(?:\\sqrt|\\pm|\u00b1|\\?pi\b|[\u03c0\u221a]) )
        (?P<percent> \s?(?:%|per\s?cent\b) )?+
    )
"""
_UNIT = r"(?V1)\s{0,2}((?:[\p{L}\u00b0\u00b5[\p{Sc}--$]][^\s\d]*\s?){1,3})?"
_CURRENCY = r"(?V1)^[^\p{L}]*?([\p{Sc}--$])"
"""The currency before a number, or behind it; a dollar may be a delimiter of LaTeX's."""
_VARIABLE = regex.compile(r"\s?(?:[eik]|[abcnpqrxyz]{1,3})(?![\p{L}.])")
"""Variables behind a number, which are no unit of it: those of `5i` and `3 xy`."""
_FORMULA_SIGN = regex.compile(r"[\\^_<>+*/|!\[\]-]|\p{Sm}")
# What stands around a whole number in `x = 5`, in `- 5` and in `1 / 2`.
_NUMBER_LAYOUT = r"^\p{L}\s?=\s?|^([-+])\s|\s?(/)\s?"

# At the end of a text `1 234` is 1234 and `3,5` is 3.5, and no part of a formula or of alternatives is the answer.
_LAST_IN_PARTS = r"""(?x)
    (?<![\d.,]|\d\s) (?: [1-9]\d?(?:\ \d{3}){1,4} | [1-9]\d\d\ \d{3} ) (?=(?:\.\d+)?\D*\Z)      # 1 234
    | (?<![\d.,]) \d+,(?: \d\d? | \d{4,} | (?<=\b0,)\d{3} ) (?=\D*\Z)               # 3,5 and 0,125, but not 1,234
"""
_ENDS_FORMULA = r"""(?x)
    \d-[\d.,]+\D*\Z                                                                 # 10-15
    | \bbetween\W{1,4}[\d.,]+\W{1,4}and\W{1,4}[\d.,]+\D*\Z                            # between 5 and 6
    | (?<!\p{L})[iknxyz]\s?[-+]\s?[\d.,]+\D*\Z                                      # x + 3
    | \d(?:[eik]|[abcnpqrxyz]{1,3})(?![\p{L}.])\D*\Z                                # 3x
    | (?: (?<![\p{L}</])\p{L}\s?[<>!\u2260\u2264\u2265]=? | \bmod )\s?[\d.,]+\D*\Z   # x > 3
"""
_ENDS_ALTERNATIVES = r"\d\W{0,3}\sor\s(?:\p{L}+\s|\W?\\boxed)?\W{0,4}[\d.,]+\D*\Z"  # 3 or 5
# Before the last `=` of a box: x = 1, y = 2.
_SEVERAL_EQUATIONS = r"(?s)=.*(?:;|,(?!\d)|\b(?:or|and)\b|\\\\|\\lor\b|\\quad)"
# But not the kilo of kilometres, kilograms and kilowatts in Chinese.
_SCALE = rf"(?i)\s*({'|'.join(_SCALES)})(?![a-z\u7c73\u514b\u74e6])"


class Number(NamedTuple):
    """A number in a text. `20%` has the value 20 and is a share; `unit` are the words behind it in its line."""

    value: Fraction
    text: str
    is_share: bool = False
    unit: str = ""

    @property
    def scale(self) -> int:
        """How many of its units the first word behind the number stands for: a million is 1,000,000."""
        match = regex.match(_SCALE, self.unit)
        return _SCALES[match[1].casefold()] if match else 1

    @property
    def digits(self) -> str:
        """Return its text without spaces, separators of thousands and currencies."""
        return str(regex.sub(rf"[,\s\p{{Sc}}{_GROUP}]", "", self.text))

    def equals(self, right: "Number", tolerance: float = 0.0) -> bool:
        """Whether both are one number, but for `tolerance`: a share of the right one, or a distance where that is below 1.

        20% is 20 and 0.2; 2 million is 2 and 2,000,000, but only the latter as the right one.
        """
        expected = right.value * right.scale
        values = [self.value, self.value * self.scale]
        if self.is_share != right.is_share:
            values.append(self.value / 100 if self.is_share else self.value * 100)
        allowed = Fraction(tolerance) * max(Fraction(1), abs(expected))
        return any(abs(value - expected) <= allowed for value in values)


def completion_text(completion: Content) -> str:
    """Return a plain completion itself, or the text of a chat completion's last message."""
    if isinstance(completion, str):
        return completion
    # Chat templates allow typed parts, and None where a message only calls a tool.
    content: Any = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def answer_text(completion: Content) -> str:
    """Return a completion's answer: the text after the thinking, or the last `<answer>` in it.

    A `<think>` that never ends gives no answer: an empty text.
    """
    after = after_thinking(completion_text(completion))
    # Searched from the end, not by a regular expression: ten thousand unclosed tags must not cost a deadline.
    tagged, closing, _ = after.rpartition("</answer>")
    return (tagged.rpartition("<answer>")[2] if closing else after).strip()


def without_thinking(completion: Content) -> Content:
    """Return the completion from behind `</think>` on, still as text or chat; empty where the thinking never ends."""
    return _with_text(completion, after_thinking(completion_text(completion)).lstrip())


def with_thinking_opened(completion: Content) -> Content:
    """Return the completion with the `<think>` before it that its prompt ends with."""
    return _with_text(completion, THINKING + completion_text(completion))


def _with_text(completion: Content, text: str) -> Content:
    """Return the completion with another text, in its last message where it is a chat."""
    if isinstance(completion, str):
        return text
    return [*completion[:-1], {**completion[-1], "content": text}] if completion else []


def final_answer(text: str) -> str:
    """Return a completion's answer in a form that is equal for equal answers.

    It is the number that it ends with, a formula in a box, or the last line without regard to case and closing punctuation.
    """
    answer = answer_text(text)
    if numbers := last_number(answer):
        return str(numbers[0].value)
    if (box := last_boxed(answer)) is None:
        return _last_line(answer.rpartition(r"\boxed{")[2])
    return " ".join(_plain(box).casefold().split())


def number_of(text: str) -> Number | None:
    """Return the number that the whole text is (`-4`, `1,234`, `$5`, `20%`, `7.`, `\\frac{1}{2}`, `5 km`), or None."""
    text = _plain(text).strip().strip("$").strip().removesuffix(".")
    text = regex.sub(_NUMBER_LAYOUT, r"\1\2", text)
    numbers = list(_read_numbers(text))
    is_whole = len(numbers) == 1 and numbers[0].text + numbers[0].unit == text.strip()
    return numbers[0] if is_whole and not _VARIABLE.match(numbers[0].unit) else None


def numbers_in(text: str) -> list[Number]:
    """Return every number of a text, in order, each whole: no part of a number is one."""
    return list(_read_numbers(_plain(text)))


def last_number(text: str) -> list[Number]:
    """Return the number that a text is or ends with; none where it ends a range or difference (`10-15`).

    None also where it is one of several, or of a formula, in a box.
    """
    text = regex.sub(
        _LAST_IN_PARTS, lambda match: match[0].replace(" ", _GROUP).replace(",", "."), text
    )
    if (whole := number_of(text)) is not None:
        return [whole]
    if offers_two(text):
        return []
    box = last_boxed(text)
    if box is None or numbers_in(text[text.rfind(box) + len(box) :]):
        return [] if regex.search(_ENDS_FORMULA, _plain(text)) else numbers_in(text)[-1:]
    return _last_of_box(box)


def offers_two(text: str) -> bool:
    """Whether a text ends with a choice of two numbers that differ: `3 or 5`, also where each is in a box."""
    if not regex.search(_ENDS_ALTERNATIVES, _plain(text)):
        return False
    numbers = numbers_in(text)[-2:]  # none in `1.2.3 or 1.2.4`
    return any(not number.equals(numbers[0]) for number in numbers)


def _last_of_box(box: str) -> list[Number]:
    """Return the only number in a box, with its unit, or the one that its only equation ends with (`x = 5`)."""
    before, _, last = box.rpartition("=")
    if (whole := number_of(last)) is not None:
        return [] if regex.search(_SEVERAL_EQUATIONS, before) else [whole]
    numbers = numbers_in(box)
    if len(numbers) != 1:
        return []
    rest = _plain(box).replace(numbers[0].text, "")
    is_in_formula = _FORMULA_SIGN.search(rest) or _VARIABLE.match(numbers[0].unit)
    return [] if is_in_formula else numbers


def gives(text: str, gold: str) -> bool:
    """Whether a text ends with the right answer.

    A number: the last of the text (`last_number`) equals it (`7` is `7.0`, `1,234` is `1234`), and has its unit or none
    where it has one. Anything else: the last line that is not empty ends with it, as whole words, without regard to case
    and closing punctuation.
    """
    right = number_of(gold)
    if right is not None:
        return any(_same_quantity(number, right, gold) for number in last_number(text))
    folded = _folded_gold(gold)
    if not folded:  # the answer is punctuation
        return text.strip().endswith(gold)
    is_letter = len(folded) == 1
    return (is_letter and _chooses(last_boxed(text) or text, folded)) or _ends_with(
        text, folded
    )


def _ends_with(text: str, folded: str) -> bool:
    """Whether the last line ends with these words, which nothing there denies, lists or makes part of a formula."""
    box = last_boxed(text)
    text = box or text
    if len(folded) == 1:
        text = regex.sub(_BETWEEN_LETTERS, ", ", text)
    start = _NOT_SECOND if box is None else _NOT_SECOND + r"(?<![,;]\s?)"
    if not folded[1:2].isalnum():
        start += _NOT_LISTED
    if _FORMULA_SIGN.search(folded) or folded[0] == "(":
        start += _NOT_IN_FORMULA
    return _word_search(folded, _last_line(text), start=start, end=r"\Z")


def _chooses(text: str, letter: str) -> bool:
    """Whether the last line says which letter it chooses, or begins with the only one that marks an option (`B) Paris`)."""
    line = _last_line(text)
    if [match[1] for match in regex.finditer(_CHOSEN_LETTER, line)][-1:] == [letter]:
        return True
    if regex.search(_ANOTHER_LETTER, line) or not regex.match(_OPTION, line):
        return False
    return {*regex.findall(_MARKED_LETTER, _plain(text).casefold())} == {letter}


def holds(text: str, gold: str) -> bool:
    """Whether the right answer occurs anywhere in a text: as one of its numbers, or as whole words."""
    right = number_of(gold)
    if right is not None:
        return any(_same_quantity(number, right, gold) for number in numbers_in(text))
    folded = _folded_gold(gold)
    end = _WORD_END + "(?![+#])"  # C is not in C++ or C#
    return _word_search(folded, _folded(text), end=end) if folded else gold in text


def for_math_verify(text: str) -> str:
    """Return a text with delimiters and signs as math-verify reads them: no dollar is money, no number is in parts."""
    text = _composed(text).translate(_CHARACTERS).translate(_SYMBOLS).replace("\\$", "")
    text = _rewritten(text, _STYLES).replace("\\!", "")
    text = regex.sub(_SEPARATOR_OF_GROUPS, "", text)
    if text.count("$") % 2:
        text = regex.sub(r"\$(?=\s?[\d.])", " ", text)  # $5
    return text.strip()


def words_of(text: str) -> list[str]:
    """Return a text's words: as white space parts them, and where a script has no spaces, its letters."""
    return list(regex.findall(_WORD, _composed(text)))


def _same_quantity(number: Number, right: Number, gold: str) -> bool:
    """Whether both are one number, and the unit and currency of the right one are the other's too, or that has none."""
    if not number.equals(right):
        return False
    if currency := regex.search(_CURRENCY, number.text + number.unit):
        has_currency = regex.search(_CURRENCY, gold) or gold.count("$") % 2
        return not has_currency or currency[1] in gold.translate(_CHARACTERS)
    words, unit = (
        _folded(regex.sub(_SCALE, "", quantity.unit, count=1)).split()
        for quantity in (number, right)
    )
    return not words or words[: len(unit)] == unit


def _word_search(folded: str, text: str, *, start: str = "", end: str) -> bool:
    """Whether the text has these words, whole, between what the verbose patterns `start` and `end` ask for."""
    pattern = "(?wxV1)" + start + _WORD_START + regex.escape(folded) + end
    return regex.search(pattern, text) is not None


def _last_line(text: str) -> str:
    """Return the last line that is not empty, as `_folded`, without the mark of a list."""
    num_lines = len(text.rstrip(_CLOSING).splitlines())
    line = text.splitlines()[num_lines - 1] if num_lines else ""
    return _folded(regex.sub(r"^\s*[-*\u2022]\s", "", line))


def _folded_gold(gold: str) -> str:
    """Return a right answer as `_folded`, without quotation marks or brackets around words."""
    folded = _folded(gold).lstrip("\"'\u201c\u2018\u00ab\u300c\u300a")
    return str(regex.sub(r"^\(([\p{L}\s]+)$", r"\1", folded))


def _folded(text: str) -> str:
    """Return a text without case, with one space between words, none around signs, and no closing punctuation."""
    folded = _composed(_plain(text).casefold())
    words = folded.replace(_GROUP, " ").split()
    return str(regex.sub(_SPACED_SIGN, r"\1", " ".join(words))).rstrip(_CLOSING)


def _plain(text: str) -> str:
    """Return a text in NFC, with one form for each of the many in which LaTeX and Unicode write a number."""
    return _rewritten(_composed(text).translate(_CHARACTERS), _SPELLINGS)


def _composed(text: str) -> str:
    """Return a text in NFC; of a run of combining marks the first 30, because their sorting takes quadratic time."""
    return unicodedata.normalize("NFC", regex.sub(_LONG_RUN_OF_MARKS, r"\1", text))


def _rewritten(text: str, rewrites: dict[str, Any]) -> str:
    for pattern, replacement in rewrites.items():
        text = _COMPILED[pattern].sub(replacement, text)
    return text


def _read_numbers(plain: str) -> Iterator[Number]:
    """Yield every number of a `_plain` text, but chains such as dates and versions, and what is denied (`not 6`)."""
    for match in regex.finditer(_NUMBER, plain):
        if match["chain"] or len(match[0]) > 1000 or not _UNDENIED.match(plain, match.start()):
            continue
        if (value := _value(match)) is not None:
            unit = regex.match(_UNIT, plain, pos=match.end())[0].rstrip()
            yield Number(value, match[0].strip(), match["percent"] is not None, unit)


def _value(match: Any) -> Fraction | None:
    """Return the value of a match of `_NUMBER`; None where it is beyond what anybody means (`9^999`), or divides by 0."""
    value = _fraction(match["top"])
    if match["bottom"]:
        bottom = _fraction(match["bottom"])
        if not bottom:
            return None
        value /= bottom
    if match["power"]:
        power = int(match["power"])
        if (power < 0 and not value) or abs(power) > 99 or len(match["top"]) > 20:
            return None
        value **= power
    if match["whole"]:
        value += int(match["whole"])
    if match["power_of_ten"]:
        value *= Fraction(10) ** int(match["power_of_ten"])
    return -value if match["sign"] == "-" else value


def _fraction(digits: str) -> Fraction:
    """Return the number that digits with their separators are."""
    digits = digits.replace(_GROUP, "")
    if regex.fullmatch(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", digits):  # 1,234,567.5
        digits = digits.replace(",", "")
    elif "," in digits or digits.count(".") > 1:  # 1.234,56 or 1.234.567
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(Decimal(digits))
