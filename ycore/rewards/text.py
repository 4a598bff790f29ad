"""The text of a completion, and the part of it that is the answer.

Not here: comparing an answer with the right one (`answers`).
"""

from typing import Any

from ycore.types import Content


def text_of(completion: Content) -> str:
    """What was written: a plain completion itself, or the content of a chat completion's last message."""
    if isinstance(completion, str):
        return completion
    return _content_text(completion[-1].get("content")) if completion else ""


def answer_text(completion: Content) -> str:
    """What was given as the answer: after the thinking, and inside the last `<answer>` where there is one.

    A `<think>` that never ends gives no answer: an empty text.
    """
    after = _after_thinking(text_of(completion))
    # Searched from the end, not by a regular expression: ten thousand unclosed tags must not cost a deadline.
    tagged, closing, _ = after.rpartition("</answer>")
    return (tagged.rpartition("<answer>")[2] if closing else after).strip()


def without_thinking(completion: Content) -> Content:
    """The completion as it reads after its thinking, in the shape it had; empty where the thinking never ends."""
    if not isinstance(completion, str):
        said = dict(completion[-1]) if completion else {}
        return [*completion[:-1], {**said, "content": _after_thinking(text_of(completion))}] if completion else []
    return _after_thinking(completion)


def words_of(completion: Content) -> list[str]:
    """The words of a completion: what stands between white space."""
    return text_of(completion).split()


def _after_thinking(text: str) -> str:
    _before, end, after = text.rpartition("</think>")
    return "" if not end and "<think>" in after else after.lstrip() if end else after


def _content_text(content: Any) -> str:
    # Chat templates allow a list of typed parts, and None where a message only calls a tool.
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""
