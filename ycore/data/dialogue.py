r"""Conversations written as one text, `\n\nHuman: ... \n\nAssistant: ...`, as the hh-rlhf pairs are; taken apart.

Not here: which column holds one (`examples`), and how a model writes a conversation, which its chat template says.
"""

import re

from ycore.types import Message

_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether `text` begins as one side speaking to an assistant."""
    return re.match(r"\s*Human:", text) is not None and "\n\nAssistant:" in text


def to_messages(text: str) -> list[Message]:
    """The turns, in order, each stripped of the blanks around it; a turn of nothing is kept as an empty one."""
    marks = list(_SPEAKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]
