"""The question that a judge is asked: the template filled with one answer, a pair, or a whole group.

Whatever a template takes from the dataset or the policy is made harmless first. What the policy wrote also stands
between marks with a random name of this request's own, which it cannot have written.

Text that others wrote, made harmless inside a question: it can end no turn, open no mark and spell no verdict.

Not here: the templates (`template`), what is harmless (`escaping`), and who asks (`controller`).
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ycore.judge.declaration import JsonVerdict, Judge, LabelVerdict, RankingVerdict, ScoreVerdict
from ycore.types import Content, Prompt

# Brackets that a person, or a model, may take for < and >.
_OPENING = "<\uff1c\ufe64\u2039\u27e8\u3008\u300a\u02c2\u1438\u276e\u2329\u00ab"
_CLOSING = ">\uff1e\ufe65\u203a\u27e9\u3009\u300b\u02c3\u1433\u276f\u232a\u00bb"
_PLAIN = str.maketrans(dict.fromkeys(_OPENING, "<") | dict.fromkeys(_CLOSING, ">"))

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
_TAG_LENGTH = 60


def visible(text: str) -> str:
    """Without characters that are not seen: controls, directions, joiners, tags, variation selectors."""
    return "".join(c for c in text if c in "\n\t" or not (unicodedata.category(c) in _UNSEEN or c in _SELECTORS))


_UNSEEN = ("Cc", "Cf", "Cs", "Co")
_SELECTORS = frozenset(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), 0x034F, 0x115F, 0x1160, 0x3164]))


def folded(text: str) -> str:
    """What a text looks like to somebody who does not look closely: one alphabet, one kind of bracket, lower case."""
    plain = unicodedata.normalize("NFKC", visible(text).translate(_PLAIN)).translate(_PLAIN)
    stripped = "".join(c for c in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(c))
    return stripped.casefold().translate(_TWINS)


def harmless(text: str, *, tags: Sequence[str] = (), special_tokens: Sequence[str] = ()) -> str:
    """`text` for a question. `tags` are names that verdicts and marks are written in: `<score>` becomes `(score)`."""
    text = without_special_tokens(visible(text), special_tokens)
    text = _SPECIAL.sub(lambda match: _apart(match[0]), text)
    return _without_tags(text, tags) if tags else text


def without_special_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """What a tokenizer would read as one of these is taken apart."""
    for token in sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True):
        text = text.replace(token, _apart(token))
    return text


def _without_tags(text: str, tags: Sequence[str]) -> str:
    """Brackets around what looks like one of the tags become parentheses."""
    pieces, done = [], 0
    for match in _BRACKETED.finditer(text):
        name = re.sub(r"[\s/\\]", "", folded(match[1]))
        if any(name.startswith(tag) for tag in tags):
            pieces += [text[done : match.start()], "(", match[1], ")" if match[2] else ""]
            done = match.end()
    return "".join([*pieces, text[done:]])


_BRACKETED = re.compile(rf"[{_OPENING}]+([^{_OPENING}{_CLOSING}]{{1,{_TAG_LENGTH}}})([{_CLOSING}]*)")


def _apart(token: str) -> str:
    """The same letters, no longer one token."""
    return token[0] + " " + token[1:]


Question = list[dict[str, str]]
"""Chat turns, as every chat API takes them."""

_MARK = "text-"


@dataclass(frozen=True, slots=True)
class Questioner:
    """Writes a judge's questions. `special_tokens` are those of the judge's own tokenizer, where it is known."""

    judge: Judge
    special_tokens: tuple[str, ...] = ()

    def pointwise(self, prompt: Prompt, completion: str, *, key: str) -> Question:
        """`key` names the request: another key gives other marks, the same key the same question."""
        return self._fill(prompt, {"completion": self._shown(completion, key)})

    def pairwise(self, prompt: Prompt, first: str, second: str, *, key: str) -> Question:
        return self._fill(prompt, {"first": self._shown(first, key), "second": self._shown(second, key)})

    def groupwise(self, prompt: Prompt, completions: Sequence[str], *, key: str) -> Question:
        shown = (f"Answer {number}:\n{self._shown(text, key)}" for number, text in enumerate(completions, start=1))
        return self._fill(prompt, {"completions": "\n\n".join(shown)})

    def _fill(self, prompt: Prompt, written: Mapping[str, str]) -> Question:
        judge = self.judge
        told = {name: self._harmless(as_text(value)) for name, value in prompt.columns.items()}
        values = {
            **dict.fromkeys(judge.columns, ""),  # a row may lack what the others have
            **told,
            "prompt": self._harmless(as_text(prompt.content)),
            "reference": told.get(judge.reference_column, ""),
            "rubric": judge.rubric.strip(),
            "how_to_answer": how_to_answer(judge),
            **written,
        }
        return [{"role": role, "content": text.format_map(values)} for role, text in judge.template]

    def _shown(self, text: str, key: str) -> str:
        text = self._harmless(text)
        if not self.judge.fence:
            return text
        mark = _mark(text, key)
        return f"<{mark}>\n{text}\n</{mark}>"

    def _harmless(self, text: str) -> str:
        return harmless(text, tags=reserved_tags(self.judge), special_tokens=self.special_tokens)


def how_to_answer(judge: Judge) -> str:
    """The sentence that tells a judge the form of its verdict."""
    match judge.verdict:
        case ScoreVerdict() as verdict:
            what = _what_number_means(judge)
            return (
                f"End with a number from {verdict.min:g} to {verdict.max:g}{what}, as <{verdict.tag}>N</{verdict.tag}>."
            )
        case JsonVerdict() as verdict:
            keys = f'"reason" and "{verdict.field}"' if verdict.reason else f'"{verdict.field}"'
            number = f"a number from {verdict.min:g} to {verdict.max:g}{_what_number_means(judge)}"
            return f"Answer with a JSON object with {keys}; {verdict.field} is {number}."
        case LabelVerdict() as verdict:
            *others, last = verdict.labels
            return f"Answer with one word: {', '.join(others)} or {last}."
        case RankingVerdict() as verdict:
            return f"End with the answers' numbers, best first, as <{verdict.tag}>2, 1, ...</{verdict.tag}>."


def reserved_tags(judge: Judge) -> tuple[str, ...]:
    """Names that no text from outside may write in brackets."""
    match judge.verdict:
        case ScoreVerdict(tag=tag) | RankingVerdict(tag=tag):
            return (_MARK, tag)
        case _:
            return (_MARK,)


def as_text(content: Content | Any) -> str:
    """A text as it is; a conversation as its only question, or turn by turn; any other column's value as Python's."""
    if isinstance(content, str):
        return content
    if (
        isinstance(content, list)
        and content
        and all(isinstance(turn, Mapping) and "content" in turn for turn in content)
    ):
        asked = [turn for turn in content if turn.get("role") != "system"]
        if len(asked) == 1:
            return str(asked[0]["content"])
        return "\n".join(f"{turn.get('role')}: {turn['content']}" for turn in asked)
    return "" if content is None else str(content)


def _what_number_means(judge: Judge) -> str:
    if judge.mode != "pairwise":
        return ""
    assert isinstance(judge.verdict, ScoreVerdict | JsonVerdict)
    return f" ({judge.verdict.max:g}: the first answer is better, {judge.verdict.min:g}: the second)"


def _mark(text: str, key: str) -> str:
    """A name that does not stand in the text; it follows from the request's key, so a resumed run asks the same."""
    for number in range(1_000):
        mark = _MARK + hashlib.sha256(f"{key}\0{number}".encode()).hexdigest()[:10]
        if mark not in text:
            return mark
    raise ValueError("no mark is free of this text")  # a thousand 40-bit names in one text
