"""Text that others wrote, made harmless inside a question: it can end no turn, open no mark and spell no verdict.

Three things are taken out of its hands: characters that nobody sees, the model's own special tokens, and tags that a
verdict is written in, also where look-alike characters spell them. A plain text comes through as it is.

Not here: the marks around it (`prompt`), and reading the verdict (`verdict`), which trusts none of this.
"""

import re
import unicodedata
from collections.abc import Sequence

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
