"""Groups, draws and completions as JSON, in the journal, in checkpoints and between ranks; nothing is pickled."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ycore.types import Completion, Draw, Finished, Group, Image, Prompt, Score, Turn


def to_bytes(value: Group | Draw | Completion) -> bytes:
    """Encode as UTF-8 JSON. A column's value without a JSON type, a date for example, becomes its text."""
    return json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Return a dataclass's fields. `asdict` would copy token ids one by one, ten times the time of all the rest."""
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
    greedy = value["greedy_scores_R"]
    return Group(
        draw=draw_from_json(value["draw"]),
        completions=tuple(map(completion_from_json, value["completions"])),
        scores_GR=tuple(tuple(map(_score, row)) for row in value["scores_GR"]),
        greedy_scores_R=None if greedy is None else tuple(map(_score, greedy)),
    )


def draw_from_json(value: Mapping[str, Any]) -> Draw:
    prompt = value["prompt"]
    images = tuple(Image(*image) for image in prompt["images"])
    token_ids = tuple(value["token_ids"])
    prompt = {**prompt, "images": images, "tools": tuple(prompt["tools"])}
    return Draw(value["position"], Prompt(**prompt), token_ids)


def _score(value: Mapping[str, Any]) -> Score:
    return Score(value["value"], value["problem"], _optional_tuple(value["logprobs"]))


def _optional_tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def finished_to_json(item: Finished) -> dict[str, Any]:
    return {"group": to_json(item.group), "teaches": item.teaches}


def finished_from_json(value: Mapping[str, Any]) -> Finished:
    return Finished(group_from_json(value["group"]), value["teaches"])


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    earned = value["earned"]
    nested = {
        "token_ids": tuple(value["token_ids"]),
        "logprobs": _optional_tuple(value["logprobs"]),
        "turns": tuple(
            Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in value["turns"]
        ),
        "earned": None if earned is None else _score(earned),
        "prompt_ids": _optional_tuple(value["prompt_ids"]),
        "segments": tuple(map(tuple, value["segments"])),
    }
    return Completion(**{**value, **nested})
