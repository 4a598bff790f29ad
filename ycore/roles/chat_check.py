"""Whether a tokenizer's chat template can be its model's own: what it writes, in tokens that the model knows.

Not here: what is made of it (`planning.preflight`).
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from ycore.planning.preflight import TemplateCheck
from ycore.types import Message

_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<\|(?:im_start|im_end)\|>")
_ANSWER = "yes"


def check_template(tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]) -> TemplateCheck:
    """What is wrong with the tokenizer's chat template, on one prompt of the dataset.

    Args:
        messages: a prompt that ends with the user's turn.
        ends: ids of the tokens that end a completion.
    """
    asked = _written(tokenizer, messages, add_generation_prompt=True)
    plain = _written(tokenizer, messages, add_generation_prompt=False)
    problems = [
        *_foreign_markers(tokenizer, asked),
        *_lost_words(messages, asked),
        *(["nothing in it says that the assistant's turn begins"] if asked == plain else []),
        *_unknown_tokens(tokenizer, asked),
    ]
    return TemplateCheck(tuple(problems), _end_of_turn(tokenizer, messages, ends=ends))


def _written(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    )


def _foreign_markers(tokenizer: Any, text: str) -> list[str]:
    """Markers that another family's tokenizer has as one token and this one cuts in pieces."""
    markers = sorted(set(_MARKER.findall(text)))
    pieces = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
    unknown = [marker for marker, ids in pieces.items() if len(ids) != 1 or ids[0] == tokenizer.unk_token_id]
    return [f"it writes {', '.join(unknown)}, which this tokenizer does not have as a token"] if unknown else []


def _lost_words(messages: Sequence[Message], text: str) -> list[str]:
    lost = [turn["role"] for turn in messages if turn["content"].strip() and turn["content"].strip() not in text]
    return [f"what the {lost[-1]} says is not in what it writes"] if lost else []


def _unknown_tokens(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    unknown = sum(token == tokenizer.unk_token_id for token in ids) if tokenizer.unk_token_id is not None else 0
    # A few are a rare letter of the prompt; many are a template of another vocabulary.
    return [f"{unknown} of its {len(ids)} tokens are unknown to the model"] if unknown > 0.2 * len(ids) else []


def _end_of_turn(tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]) -> str | None:
    """The first token after an answer, where it is special and does not end a completion."""
    answered = _written(tokenizer, [*messages, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    _, found, after = answered.rpartition(_ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if found and after else []
    if not ids or ids[0] in ends or ids[0] not in tokenizer.all_special_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(ids[0]))
