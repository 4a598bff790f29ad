"""`python -m ycore.rewards.worker`: one process that loads reward functions and calls them when asked.

Not here: deadlines and restarts, which its parent holds (`worker_process`, `pool`). Imports no torch of its own.

First line in: `{"specs": [...], "run_as": "auto" or "same"}`; out: `{"ready": [inputs of each]}` or `{"error": line}`.
Then in: `{"id", "source", "step", "count", "inputs": {parameter: one value per completion}}`; out: `{"id", "values",
"problems"}`, one of each per completion, or `{"id", "failed": line}` where the call gave no such list.
"""

import asyncio
import faulthandler
import importlib
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.answers import without_thinking
from ycore.rewards.builtin import LIBRARIES, Reward
from ycore.rewards.child import Channel, adopt_orphans, drop_root, end_with_parent, python_files
from ycore.rewards.loading import Inputs, call_arguments, inputs_of, load_reward, one_line


class Source(NamedTuple):
    """A loaded reward function and what it asks for."""

    function: Reward
    inputs: Inputs
    strips_thinking: bool = False


def main() -> None:
    channel = Channel()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the launcher asks for stacks so
    end_with_parent()
    adopt_orphans()
    requests = iter(channel)
    try:
        sources = _sources(next(requests))
    except RewardError as error:
        channel.reply({"error": str(error)})
        return
    channel.reply({"ready": [asdict(source.inputs) for source in sources]})
    for request in requests:
        channel.reply({"id": request["id"], **answer(sources[request["source"]], request)})


def _sources(first: dict[str, Any]) -> list[Source]:
    """The rewards of the first line, loaded: with no more rights than they need, from before their first statement."""
    specs = [RewardConfig.model_validate(spec) for spec in first["specs"]]
    if first.get("run_as") == "auto":
        files = [Path(spec.reward.rpartition(":")[0]) for spec in specs if ".py:" in spec.reward]
        told = drop_root(os.environ.get("YCORE_RUN", ""), [*files, *python_files()])
        print(f"reward worker {os.getpid()} {told}", file=sys.stderr, flush=True)
        end_with_parent()  # which the kernel forgets with a change of user
    return [_loaded(spec) for spec in specs]


def answer(source: Source, request: dict[str, Any]) -> dict[str, Any]:
    """Call one reward; whatever it does, short of ending the process, becomes an answer."""
    owner = os.getpid()
    try:
        result: object = source.function(**call_arguments(source.inputs, _shown_to(source, request)))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        values = list(_iterable(result))
        scores = [number(value) for value in values]
    except BaseException as error:  # noqa: BLE001 (a process boundary: sys.exit in a reward is its problem, not ours)
        traceback.print_exc()
        return {"failed": f"raised {one_line(error)}"}
    finally:
        if os.getpid() != owner:  # the reward forked, and this is the child: it must not answer too
            os._exit(0)
    if len(scores) != request["count"]:
        return {"failed": f"wrong length: {len(scores)} values for {request['count']} completions"}
    return {"values": [value for value, _ in scores], "problems": [problem for _, problem in scores]}


def number(value: object) -> tuple[float | None, str | None]:
    """A returned value as a reward and a problem. None and NaN are TRL's "does not apply": no problem."""
    if value is None:
        return None, None
    if not isinstance(value, SupportsFloat):
        return None, f"not a number: {_shown(value)}"
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        return None, f"not a number: {_shown(value)}"
    if math.isinf(reward):
        return None, f"not finite: {reward}"
    return (None, None) if math.isnan(reward) else (reward, None)


def _loaded(spec: RewardConfig) -> Source:
    function = load_reward(spec)
    if spec.reward in LIBRARIES:  # now, so that no call's deadline pays for the import
        importlib.import_module(LIBRARIES[spec.reward].module)
    return Source(function, inputs_of(function), spec.strip_thinking)


def _shown_to(source: Source, request: dict[str, Any]) -> dict[str, Any]:
    """The request as this source may see it: its token ids stay those of the whole completion."""
    inputs = request["inputs"]
    if not source.strips_thinking or "completions" not in inputs:
        return request
    return {**request, "inputs": {**inputs, "completions": [without_thinking(one) for one in inputs["completions"]]}}


def _iterable(result: object) -> Iterable[object]:
    if isinstance(result, str | bytes | dict | set) or not isinstance(result, Iterable):
        raise TypeError(f"a reward returns a list with one number per completion, not {_shown(result)}")
    return result


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _shown(value: object) -> str:
    return f"the {type(value).__name__} {value!r}"[:120]


if __name__ == "__main__":
    main()
