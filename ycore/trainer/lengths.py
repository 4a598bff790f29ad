"""How long completions may be: a handful of them, before the first step, chooses `max_tokens` or says what it cuts off.

Where `max_tokens` was not given, the policy that the run begins with writes one completion to each of 16 prompts, and
goes on with those that are cut off, to twice the length each time, until at most a tenth are. Where it was given, 16
completions are counted. What was found is written into run.json: whoever continues the run takes it from there.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ycore.config.batch import MICRO_BATCH_TOKENS_CPU
from ycore.config.schema import RunConfig
from ycore.engine import Engine
from ycore.engine.vllm_engine import VllmEngine
from ycore.errors import ConfigError, RunError
from ycore.evaluation.evaluator import load_policy, open_engines
from ycore.evaluation.preflight_verdict import TRUNCATED_WARNS
from ycore.rollout.turns import completion_seed
from ycore.round.assemble import Assembly
from ycore.run.files import read_json, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.run.reports import this_rank
from ycore.run.secrets import redact
from ycore.types import Completion

NUM_SAMPLED = 16
JUDGED_FROM = 64
"""A shorter `max_tokens` that was given is for a number or a label, and is not judged."""

_MOST_CUT = 0.1
_MOST_TOKENS = MICRO_BATCH_TOKENS_CPU  # so that one completion is within the plan's micro-batch on every device
_NUM_MEASURED = (
    64  # prompts with the most characters, of which the one with the most tokens is looked for
)
_LOOK_S = 0.2


class Write(Protocol):
    def __call__(
        self, token_ids: Sequence[int], seed: int, /, *, max_tokens: int
    ) -> Awaitable[Completion]: ...


def with_length(parts: Assembly) -> Assembly:
    """The same parts with the `max_tokens` of the run; the first rank decides where it is still open.

    Over several machines the default stays, and nothing is sampled.

    Raises:
        ConfigError: the model does not end its completions.
        RunError: the first rank has not decided in time.
    """
    if not parts.config.sample_max_tokens:
        return parts
    if this_rank().local_world < this_rank().world:  # another machine may have no folder in common
        return replace(parts, config=parts.config.with_max_tokens(parts.config.max_tokens))
    if this_rank().number == 0 and _held(parts.home)["sample_max_tokens"]:
        shares = asyncio.run(_sample(parts))
        chosen, words = choose(shares, parts.config)
        note(parts.home, parts.config.with_max_tokens(chosen), words, shares)
    deadline = time.monotonic() + 2 * parts.config.engine.start_timeout_s
    while _held(parts.home)["sample_max_tokens"]:
        if time.monotonic() > deadline:
            raise RunError(
                "the first rank has not chosen max_tokens in time; see its log, or give --max-tokens"
            )
        time.sleep(_LOOK_S)
    return replace(parts, config=parts.config.with_max_tokens(_held(parts.home)["max_tokens"]))


def choose(shares: Mapping[int, float], config: RunConfig) -> tuple[int, str]:
    """`max_tokens`, and a line about it. `shares`: by length, in order, the share of completions cut off there."""
    tokens, cut = max(shares), shares[max(shares)]
    seen = ", ".join(f"{share:.0%} at {length}" for length, share in shares.items())
    if cut > config.max_truncated:
        raise ConfigError(
            f"{cut:.0%} of {NUM_SAMPLED} sampled completions do not end within {tokens} tokens, and max_truncated is "
            f"{config.max_truncated:g}; take a model that ends its answers, or choose a length with --max-tokens"
        )
    return (
        tokens,
        f"max_tokens is {tokens}: of {NUM_SAMPLED} sampled completions are cut off {seen}",
    )


def judge_cut(num_cut: int, num_sampled: int, config: RunConfig) -> str:
    """A line about the sampled completions that a given `max_tokens` cuts off; ConfigError for too many."""
    cut = num_cut / num_sampled
    words = (
        f"{cut:.0%} of {num_sampled} sampled completions are cut off at {config.max_tokens} tokens"
    )
    if cut > config.max_truncated:
        raise ConfigError(
            f"{words}, and max_truncated is {config.max_truncated:g}; say --max-tokens {4 * config.max_tokens} (with "
            "another --output), leave it out, or go on with --resume --set max_truncated=1"
        )
    return words + (
        "; a longer --max-tokens would lose fewer rewards" if cut >= TRUNCATED_WARNS else ""
    )


def is_judged(parts: Assembly) -> bool:
    """Whether the run's length was given and nothing is known of it yet; turns end in other ways too."""
    config = parts.config
    return (
        config.max_tokens >= JUDGED_FROM
        and not config.has_turns
        and "max_tokens" not in read_json(parts.home.config)
    )


def note(folder: RunFolder, config: RunConfig, words: str, shares: Mapping[int, float]) -> None:
    """Write the length into the settings of run.json, and beside them what was found."""
    found = {"in_words": words, "cut_off": shares}
    settings = {"config": redact(config.model_dump(mode="json")), "max_tokens": found}
    write_json_atomic(folder.config, read_json(folder.config) | settings)


def _held(folder: RunFolder) -> dict[str, Any]:
    return dict(read_json(folder.config)["config"])


async def _sample(parts: Assembly) -> dict[int, float]:
    """By length, the share of a few completions that are cut off there."""
    prompts, config = parts.prompts.prompts, parts.config
    longest = sorted(prompts, key=lambda prompt: len(str(prompt.content)), reverse=True)[
        :_NUM_MEASURED
    ]
    room = parts.started.max_model_len - max(len(parts.encode(prompt)) for prompt in longest)
    rows = random.Random(f"{config.seed}/lengths").sample(
        range(len(prompts)), min(NUM_SAMPLED, len(prompts))
    )
    fitting = [
        ids for row in rows if len(ids := parts.encode(prompts[row])) <= parts.max_prompt_tokens
    ]
    if not fitting:
        parts.draws().draw()  # says which prompt does not fit
    asked = list(itertools.islice(itertools.cycle(fitting), NUM_SAMPLED))
    engines = open_engines(parts, None if parts.started.kind == "vllm" else load_policy(parts))
    sleepers = [
        engine.sleeper for engine in engines if isinstance(engine, VllmEngine) and engine.sleeper
    ]
    try:
        await asyncio.gather(
            *(one.wait_ready(timeout_s=config.engine.start_timeout_s) for one in engines)
        )
        for sleeper in sleepers[:1]:
            await sleeper.wake()
        awake: Sequence[Engine] = engines[:1] if sleepers else engines
        writes = [awake[index % len(awake)].complete for index in range(NUM_SAMPLED)]
        return await grow(
            asked, writes, first=config.max_tokens, most=min(room, _MOST_TOKENS), seed=config.seed
        )
    finally:
        for sleeper in sleepers[:1]:
            await sleeper.sleep()
        await asyncio.gather(*(engine.close() for engine in engines))


async def grow(
    asked: Sequence[tuple[int, ...]], writes: Sequence[Write], *, first: int, most: int, seed: int
) -> dict[int, float]:
    """By length, the share of one completion a prompt that is cut off there: `first`, and twice it while many are.

    The seeds are none of the run's own. A completion goes on from its own tokens, under another seed.
    """
    texts, cut, shares, length = list(asked), set(range(len(asked))), dict[int, float](), first

    async def go_on(index: int, new_tokens: int) -> None:
        part = await writes[index](
            texts[index], completion_seed(seed, -1 - index, length), max_tokens=new_tokens
        )
        texts[index] = (*texts[index], *part.token_ids)
        if part.finish_reason != "length":
            cut.discard(index)

    while True:
        await asyncio.gather(
            *(go_on(index, length - max(shares, default=0)) for index in sorted(cut))
        )
        shares[length] = len(cut) / len(asked)
        if shares[length] <= _MOST_CUT or 2 * length > most:
            return shares
        length *= 2
