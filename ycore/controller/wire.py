"""Groups as JSON, for another rank or for a checkpoint: nothing that passes between processes is pickled.

Not here: when one travels (`torch_peers`) or is kept (`state`).
"""

import json
from dataclasses import asdict
from typing import Any

from ycore.types import Completion, Draw, Finished, Group, Prompt, Score


def to_bytes(group: Group) -> bytes:
    """UTF-8 JSON. A column's value that JSON has no word for, a date say, becomes its text: rewards have seen it."""
    return json.dumps(asdict(group), ensure_ascii=False, default=str).encode()


def from_bytes(data: bytes) -> Group:
    """The group that `to_bytes` was given."""
    return group_from_json(json.loads(data))


def group_to_json(group: Group) -> dict[str, Any]:
    """As `to_bytes`, for a file that holds more than the group."""
    told: dict[str, Any] = json.loads(to_bytes(group))
    return told


def finished_to_json(item: Finished) -> dict[str, Any]:
    return {"group": group_to_json(item.group), "teaches": item.teaches}


def finished_from_json(told: dict[str, Any]) -> Finished:
    return Finished(group_from_json(told["group"]), told["teaches"])


def group_from_json(told: dict[str, Any]) -> Group:
    """The group that `group_to_json` was given."""
    draw, greedy = told["draw"], told.get("greedy_scores_R")
    return Group(
        draw=Draw(draw["position"], Prompt(**draw["prompt"]), tuple(draw["token_ids"])),
        completions=tuple(_completion(one) for one in told["completions"]),
        scores_GR=tuple(tuple(Score(**score) for score in row) for row in told["scores_GR"]),
        greedy_scores_R=None if greedy is None else tuple(Score(**score) for score in greedy),
    )


def _completion(told: dict[str, Any]) -> Completion:
    logprobs = told["logprobs"]
    lists = {"token_ids": tuple(told["token_ids"]), "logprobs": None if logprobs is None else tuple(logprobs)}
    return Completion(**{**told, **lists})
