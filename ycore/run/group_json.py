"""Groups, draws and completions as JSON, in the journal, in checkpoints and between ranks; nothing is pickled."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ycore.types import Completion, Draw, Finished, Group, Image, Prompt, Score, Turn


def to_bytes(value: Group | Draw | Completion) -> bytes:
    """UTF-8 JSON. A column's value without a JSON type, a date for example, becomes its text."""
    return json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Not by `asdict`, which copies token ids one by one: ten times the time of all the rest."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def from_bytes(data: bytes) -> Group:
    return group_from_json(json.loads(data))


def to_json(value: Group | Draw | Completion) -> dict[str, Any]:
    """Return plain JSON values, for a file that holds more than one group."""
    plain: dict[str, Any] = json.loads(to_bytes(value))
    return plain


def group_from_json(value: Mapping[str, Any]) -> Group:
    greedy = value.get("greedy_scores_R")
    return Group(
        draw=draw_from_json(value["draw"]),
        completions=tuple(completion_from_json(one) for one in value["completions"]),
        scores_GR=tuple(tuple(_score(score) for score in row) for row in value["scores_GR"]),
        greedy_scores_R=None if greedy is None else tuple(_score(score) for score in greedy),
    )


def draw_from_json(value: Mapping[str, Any]) -> Draw:
    prompt = value["prompt"]
    images = tuple(
        Image(*image) for image in prompt.get("images", ())
    )  # absent from journals of early versions
    return Draw(
        value["position"], Prompt(**{**prompt, "images": images}), tuple(value["token_ids"])
    )


def _score(value: Mapping[str, Any]) -> Score:
    logprobs = value.get("logprobs")  # absent from journals of early versions
    return Score(value["value"], value["problem"], None if logprobs is None else tuple(logprobs))


def finished_to_json(item: Finished) -> dict[str, Any]:
    return {"group": to_json(item.group), "teaches": item.teaches}


def finished_from_json(value: Mapping[str, Any]) -> Finished:
    return Finished(group_from_json(value["group"]), value["teaches"])


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    logprobs, earned, prompt_ids = value["logprobs"], value.get("earned"), value.get("prompt_ids")
    turns = value.get("turns", ())  # absent, as the two before are, from journals of early versions
    nested = {
        "token_ids": tuple(value["token_ids"]),
        "logprobs": None if logprobs is None else tuple(logprobs),
        "turns": tuple(Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in turns),
        "earned": None if earned is None else _score(earned),
        "prompt_ids": None if prompt_ids is None else tuple(prompt_ids),
        "stretches": tuple((end, version) for end, version in value.get("stretches", ())),
    }
    return Completion(**{**value, **nested})
