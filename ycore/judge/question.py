"""The question a judge is asked: the template, filled with one answer, a pair, or a whole group.

Text from the dataset or the policy is sanitized first: it can end no turn, open no mark and spell no verdict. What the
policy wrote also stands between marks with a name that it cannot foresee, different for every request. So is the code
that a written verdict must carry: whatever a judge copies from what it judges is no verdict.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from ycore.judge.declaration import (
    ANSWER_FIELDS,
    JsonVerdict,
    Judge,
    LabelVerdict,
    RankingVerdict,
    ScoreVerdict,
)
from ycore.types import IMAGE_MARK, Content, JsonObject, Prompt, Record, said

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Question = list[JsonObject]  # chat turns, as every chat API takes them
_MARK = "text-"

# Characters that a person, or a model, may take for < and >.
_OPENING = "<\uff1c\ufe64\u2039\u27e8\u3008\u300a\u02c2\u1438\u276e\u2329\u00ab"
_CLOSING = ">\uff1e\ufe65\u203a\u27e9\u3009\u300b\u02c3\u1433\u276f\u232a\u00bb"
_PLAIN = dict.fromkeys(_OPENING, "<") | dict.fromkeys(_CLOSING, ">")

# Cyrillic and Greek letters that look like these Latin ones; compatibility forms are NFKC's.
_TWINS = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0445\u0443\u0456\u0455\u0458\u0501\u0261\u04bb\u0475\u051b\u051d"
    "\u03bf\u03c1\u03b1\u03b5\u03b9\u03bd\u0433\u043a\u0442\u043d\u043c\u0432",
    "aeopcxyisjdghvqwopaeivrktnmb",
)

# Special tokens of the chat formats in use; a local model's own are added to them.
_SPECIAL = re.compile(
    r"<\|[^<>|]{0,60}\|>|<\uff5c[^<>]{0,60}\uff5c>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS)\]|<<?/?SYS>>?"
    r"|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>|</?think(?:ing)?>",
    re.IGNORECASE,
)
# Only where a run of brackets begins: from each of them anew, a long run would cost its length squared.
_BRACKETED = re.compile(
    rf"(?<![{_OPENING}])[{_OPENING}]++([^{_OPENING}{_CLOSING}]{{1,60}})([{_CLOSING}]*+)"
)

_INVISIBLE = ("Cc", "Cf", "Cs", "Co")  # controls, directions, joiners, tags
_SELECTORS = frozenset(
    map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), 0x034F, 0x115F, 0x1160, 0x3164])
)


class Questioner(NamedTuple):
    """Writes a judge's questions. `special_tokens`: those of the judge's tokenizer, where it is known."""

    judge: Judge
    special_tokens: tuple[str, ...] = ()

    def question(self, prompt: Prompt, *completions: str, key: str) -> Question:
        """Return the question about one completion, two, or a group, by the judge's mode.

        Marks and code follow from the request's `key`.
        """
        judge = self.judge
        answers = [self._fenced(text, key) for text in completions]
        if judge.mode == "groupwise":
            numbered_answers = (
                f"Answer {number}:\n{text}" for number, text in enumerate(answers, start=1)
            )
            answers = ["\n\n".join(numbered_answers)]
        columns = {
            name: self._sanitized(as_text(value)) for name, value in prompt.columns.items()
        }
        fields = {
            **dict.fromkeys(judge.columns, ""),  # a row may lack a column that others have
            **columns,
            "prompt": self._sanitized(
                numbered(as_text(prompt.content)) if prompt.images else as_text(prompt.content)
            ),
            "reference": columns.get(judge.reference_column, ""),
            "rubric": judge.rubric.strip(),
            "how_to_answer": _how_to_answer(judge, verdict_code(key)),
            **dict(zip(ANSWER_FIELDS[judge.mode], answers, strict=True)),
        }
        return [
            {"role": role, "content": text.format_map(fields)} for role, text in judge.template
        ]

    def _fenced(self, text: str, key: str) -> str:
        """A completion, between marks that do not occur in it."""
        text = self._sanitized(text)
        if not self.judge.fence:
            return text
        marks = (
            _MARK + hashlib.sha256(f"{key}\0{number}".encode()).hexdigest()[:10]
            for number in count()
        )
        mark = next(mark for mark in marks if mark not in text)
        return f"<{mark}>\n{text}\n</{mark}>"

    def _sanitized(self, text: str) -> str:
        verdict = self.judge.verdict
        tags = (
            (_MARK, verdict.tag)
            if isinstance(verdict, ScoreVerdict | RankingVerdict)
            else (_MARK,)
        )
        return sanitize(text, tags=tags, special_tokens=self.special_tokens)


def verdict_code(key: str) -> str:
    """Six hexadecimal digits that the verdict to the request `key` must carry, and that no completion can know."""
    return hashlib.sha256(f"{key}\0code".encode()).hexdigest()[:6]


def numbered(text: str) -> str:
    """With `[picture 1]` and so on where a picture stands."""
    first, *rest = text.split(IMAGE_MARK)
    return first + "".join(
        f"[picture {number}]{part}" for number, part in enumerate(rest, start=1)
    )


def with_pictures(question: Question, urls: Sequence[str]) -> Question:
    """The question with pictures before its last turn's text, as OpenAI's API takes them."""
    if not urls:
        return question
    *before, last = question
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [
        *before,
        {**last, "content": [*pictures, {"type": "text", "text": last["content"]}]},
    ]


def _how_to_answer(judge: Judge, code: str) -> str:
    match judge.verdict:
        case ScoreVerdict() as verdict:
            tag = f"{verdict.tag}-{code}"
            return f"End with a number {_number_range(judge, verdict)}, as <{tag}>N</{tag}>."
        case JsonVerdict() as verdict:
            keys = f'"{verdict.field}" and "code"'
            keys = f'"reason", {keys}' if verdict.reason else keys
            number = _number_range(judge, verdict)
            return f'Answer with a JSON object with {keys}; {verdict.field} is a number {number}, code is "{code}".'
        case LabelVerdict() as verdict:
            *first, last = verdict.labels
            words = f"{', '.join(first)} or {last}"
            return f'Answer with a JSON object with "code" and "label"; code is "{code}", label is {words}.'
        case RankingVerdict() as verdict:
            tag = f"{verdict.tag}-{code}"
            return f"End with the answers' numbers, best first, as <{tag}>2, 1, ...</{tag}>."


def _number_range(judge: Judge, verdict: ScoreVerdict | JsonVerdict) -> str:
    low = f"{verdict.min:g}"
    high = f"{verdict.max:g}"
    meaning = (
        f" ({high}: the first answer is better, {low}: the second)"
        if judge.mode == "pairwise"
        else ""
    )
    return f"from {low} to {high}{meaning}"


def as_text(content: Content | Any) -> str:
    """Show any value; of a conversation no system turns, and a single turn without its role."""
    if isinstance(content, str):
        return content
    is_list = isinstance(content, list) and bool(content)
    if is_list and all(isinstance(turn, Mapping) and "content" in turn for turn in content):
        turns = [turn for turn in content if turn.get("role") != "system"]
        if len(turns) == 1:
            return _said_in(turns[0])
        return "\n".join(f"{turn.get('role')}: {_said_in(turn)}" for turn in turns)
    return "" if content is None else str(content)


def _said_in(turn: Record) -> str:
    return said(turn) if turn.get("tool_calls") else str(turn["content"])


def sanitize(text: str, *, tags: Sequence[str] = (), special_tokens: Sequence[str] = ()) -> str:
    """Make `text` harmless in a question: no invisible characters, special tokens or tags.

    Args:
        tags: How the names of reserved tags begin; the brackets of `<score>` become parentheses: `(score)`.
        special_tokens: Of the judge's tokenizer; those of common chat formats are broken up in any case.
    """
    text = break_special_tokens("".join(map(_seen, text)), special_tokens)
    text = _SPECIAL.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    pieces = []
    done = 0
    for match in _BRACKETED.finditer(text) if tags else ():
        name = re.sub(r"[\s/\\]", "", fold_lookalikes(match[1]))
        if any(name.startswith(tag) for tag in tags):
            pieces += [text[done : match.start()], "(", match[1], ")" if match[2] else ""]
            done = match.end()
    return "".join([*pieces, text[done:]])


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Every text that this tokenizer would read as one of its special tokens."""
    added = (
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    )
    return tuple({*added, *tokenizer.all_special_tokens})


def break_special_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """Put a space into everything that a tokenizer would read as one of these tokens."""
    for token in sorted(
        (token for token in special_tokens if len(token) > 1), key=len, reverse=True
    ):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def fold_lookalikes(text: str) -> str:
    """Return what a text looks like at a glance: one alphabet, one kind of bracket, lower case, nothing invisible.

    Letter by letter, and not a whole text at once: Unicode's normalization sorts a run of combining marks, whose cost
    grows with the square of its length.
    """
    return "".join(map(_folded, text))


@cache
def _seen(letter: str) -> str:
    hidden = letter not in "\n\t" and (
        unicodedata.category(letter) in _INVISIBLE or letter in _SELECTORS
    )
    return "" if hidden else letter


@cache
def _folded(letter: str) -> str:
    apart = unicodedata.normalize("NFKD", _PLAIN.get(letter, _seen(letter)))
    plain = "".join(_PLAIN.get(part, part) for part in apart if not unicodedata.combining(part))
    return plain.casefold().translate(_TWINS)
