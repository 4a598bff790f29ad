"""`python -m ycore.rewards.worker`: a confined process that loads reward functions and calls them.

JSON lines come on standard input, a socket, and are answered there. The first line is `{"nonce", "specs": [...]}`,
answered by `{"nonce", "ready": [parameters of each]}` or `{"nonce", "error": line}`. Then each `{"nonce", "source",
"step", "count", "inputs": {parameter: one value per completion}}` is answered by `{"nonce", "values", "problems",
"logged"}`, one of each per completion, or by `{"nonce", "failed": line}` where the call gave no such list. Deadlines,
restarts and doubts about what is answered are the parent's (`worker_client`).
"""

import asyncio
import importlib
import inspect
import json
import math
import traceback
from collections.abc import Awaitable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, SupportsFloat

from ycore.config.schema import RewardConfig
from ycore.rewards.answers import with_thinking_opened, without_thinking
from ycore.rewards.builtin import LIBRARIES, READ_ANSWERS, Reward
from ycore.rewards.loading import IN_THINKING, Inputs, inputs_of, load_reward
from ycore.run.files import ImageStore
from ycore.sandbox.channel import Handler, answer_requests, exception_line
from ycore.types import JsonObject, Record, in_blocks

_LONGEST_LOGGED = 300  # characters


class LoadedReward(NamedTuple):
    """A loaded reward function and its parameters."""

    function: Reward
    inputs: Inputs
    strips_thinking: bool = False
    reads_answers: bool = False


def load_rewards(first: Record) -> tuple[list[JsonObject], Handler]:
    """Load the rewards; return the parameters of each, and the function that answers a request."""
    sources = [_load(RewardConfig.model_validate(spec)) for spec in first["specs"]]
    inputs = [asdict(source.inputs) for source in sources]
    return inputs, lambda request: call_reward(sources[request["source"]], request)


def _load(spec: RewardConfig) -> LoadedReward:
    function = load_reward(spec)
    if spec.reward in LIBRARIES:  # now, so that no call's deadline pays for the import
        importlib.import_module(LIBRARIES[spec.reward][0])
    return LoadedReward(
        function, inputs_of(function), spec.strip_thinking, spec.reward in READ_ANSWERS
    )


def call_reward(source: LoadedReward, request: Record) -> JsonObject:
    """Call one reward; whatever it does, short of ending the process, becomes an answer."""
    logged: list[JsonObject] = [{} for _ in range(request["count"])]
    try:
        result: object = source.function(**_arguments(source, request, logged))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if isinstance(result, str | bytes | dict | set) or not isinstance(result, Iterable):
            raise TypeError(
                f"a reward returns a list with one number per completion, not {_described(result)}"
            )
        scores = [reward_in(value) for value in result]
    except BaseException as error:  # noqa: BLE001 (a process boundary: sys.exit in a reward is its problem, not ours)
        traceback.print_exc()
        return {"failed": f"raised {exception_line(error)}"}
    if len(scores) != request["count"]:
        return {
            "failed": f"wrong length: {len(scores)} values for {request['count']} completions"
        }
    values = [value for value, _ in scores]
    problems = [problem for _, problem in scores]
    return {"values": values, "problems": problems, "logged": logged}


def reward_in(value: object) -> tuple[float | None, str | None]:
    """Return a value as a reward and a problem. None and NaN are TRL's "does not apply": no problem."""
    if value is None:
        return None, None
    if not isinstance(value, SupportsFloat):
        return None, f"not a number: {_described(value)}"
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        return None, f"not a number: {_described(value)}"
    if math.isinf(reward):
        return None, f"not finite: {reward}"
    return (None, None) if math.isnan(reward) else (reward, None)


def _arguments(source: LoadedReward, request: Record, logged: list[JsonObject]) -> JsonObject:
    """Return the keyword arguments of one call: those offered inputs that the function takes.

    TRL's `log_metric` and `log_extra` write into `logged`, which has a mapping for each completion.
    """

    def log_extra(column: str, values: Iterable[Any]) -> None:
        for texts, value in zip(logged, values, strict=True):
            texts[column] = str(value)[:_LONGEST_LOGGED]

    def log_metric(name: str, value: float) -> None:
        logged[0][name] = float(value)

    offered = dict(request["inputs"])
    reads_thinking = source.strips_thinking or source.reads_answers
    if reads_thinking and "completions" in offered:
        in_thinking = offered.get(IN_THINKING) or [False] * request["count"]
        completions = [
            with_thinking_opened(text) if is_inside else text
            for text, is_inside in zip(offered["completions"], in_thinking, strict=True)
        ]
        if source.strips_thinking:  # `completion_ids` stay those of the whole completion
            completions = [without_thinking(text) for text in completions]
        offered["completions"] = completions
    if "environments" in offered:
        # In TRL the instances themselves; here they are in other processes.
        states = [json.loads(state or "{}") for state in offered["environments"]]
        offered["environments"] = [SimpleNamespace(**state) for state in states]
    if "images" in offered:
        # In TRL the images themselves; here they are read where they are asked for.
        offered["images"] = [_images(names) for names in offered["images"]]
        if any(isinstance(names, list) for names in request["inputs"]["images"]):
            offered["prompts"] = [in_blocks(prompt) for prompt in offered.get("prompts", ())]
    elif "images" in source.inputs.required:
        offered["images"] = [[] for _ in range(request["count"])]  # of a prompt without any
    offered["trainer_state"] = SimpleNamespace(global_step=request["step"])
    offered["log_extra"] = log_extra
    offered["log_metric"] = log_metric
    return source.inputs.accepted(offered)


def _images(names: str | list[str]) -> Any:
    """Open a prompt's images, or the one that a completion is."""
    if isinstance(names, list):
        return [_images(name) for name in names]
    path = Path(names)
    return ImageStore(path.parent).open(path.name)


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _described(value: object) -> str:
    return f"the {type(value).__name__} {value!r}"[:120]


if __name__ == "__main__":
    answer_requests(load_rewards)
