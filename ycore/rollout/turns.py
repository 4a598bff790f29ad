"""How a completion is written: in one turn, or in several with tools and an environment between them.

A completion holds a slot only while an engine writes. While tools or an environment answer, the slot is another's.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple, Protocol

from ycore.errors import ConfigError
from ycore.rollout.dialogue import Call, Dialogue
from ycore.rollout.tool_pool import Answer, Episode, OutOfTime, ToolPool
from ycore.run.metrics import CountMeter, Meter
from ycore.types import Completion, Draw, Message, Prompt, Score, Turn, number_from


class Generate(Protocol):
    """Have an engine write after these tokens, on a slot."""

    def __call__(
        self, token_ids: Sequence[int], seed: int, /, *, max_tokens: int | None = None
    ) -> Awaitable[Completion]: ...


class GroupStart(NamedTuple):
    """Where the completions of a group start.

    The prompt of `draw` ends with the environment's first `observation`; `prompt` is the row's own.
    """

    draw: Draw
    prompt: Prompt
    observation: str | None = None


class SingleTurnWriter:
    """Writes the completions of a run, here without tools: the policy writes until it stops. The others derive from it."""

    meters: Sequence[Meter] = ()

    async def start(self, draw: Draw) -> GroupStart:
        """Return where the group of this draw starts."""
        return GroupStart(draw, draw.prompt)

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        """Write a completion of a group, by its index; `seed` is the run's."""
        turn_seed = completion_seed(seed, start.draw.position, index)
        return await generate(start.draw.token_ids, turn_seed)

    async def close(self) -> None:
        pass


@dataclass(eq=False)
class GivenPairWriter(SingleTurnWriter):
    """Nobody writes: the completions are a row's better answer and then its worse one.

    Args:
        encode: returns the token ids of a text, without special tokens.
    """

    encode: Callable[[str], list[int]]

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        text = str(start.draw.prompt.columns[("chosen", "rejected")[index]])
        return Completion(tuple(self.encode(text)), None, text, "stop", 0)


# -- completions by several requests -------------------------------------------------------------------------------------

ABORTED = "abort"
"""The finish reason of a completion that an engine was told to give back as far as it was."""


def joined(
    begun: Completion, rest: Completion, decode: Callable[[Sequence[int]], str]
) -> Completion:
    """Return the completion that earlier versions began and `rest` continues."""
    if not begun.token_ids:
        return rest
    if not rest.token_ids:
        return replace(begun, finish_reason=rest.finish_reason)
    token_ids = (*begun.token_ids, *rest.token_ids)
    whole = replace(
        rest,
        token_ids=token_ids,
        logprobs=(*(begun.logprobs or ()), *(rest.logprobs or ())),
        text=decode(token_ids),
    )
    return whole.with_versions([*begun.versions, whole.versions[-1]])


# -- several turns -----------------------------------------------------------------------------------------------------


class TurnLimits(NamedTuple):
    """Limits of a completion.

    `max_tokens` counts all tokens, whoever wrote them, `turn_tokens` those of a turn of the policy. A prompt that the
    environment's first observation makes longer than `max_prompt_tokens` is not used.
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    max_prompt_tokens: int


@dataclass
class TurnMeter(CountMeter):
    """Turns and calls of all completions, and how these ended. `seconds` are those of tools and environments."""

    completions: float = 0
    turns: float = 0
    sequences: float = 0
    tokens: float = 0
    calls: float = 0
    failures: float = 0
    seconds: float = 0
    rewarded_turns: float = 0
    paid: float = 0
    ended_turns: float = 0
    ended_length: float = 0
    ended_deadline: float = 0
    ended_forked: float = 0
    ended_failed: float = 0

    def count(self, completion: Completion) -> None:
        self.completions += 1
        self.sequences += 1
        for turn in completion.turns:
            if turn.by_policy:
                self.turns += 1
            else:
                self.sequences += turn.starts_new_sequence
                self.tokens += turn.num_tokens
                self.calls += turn.calls
                self.failures += turn.failures
                self.seconds += turn.seconds
        rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
        self.rewarded_turns += len(rewards)
        self.paid += sum(rewards)
        name = f"ended_{completion.finish_reason}"
        if name in self.__dict__:
            setattr(self, name, getattr(self, name) + 1)

    def summary(self) -> Mapping[str, float]:
        """Return the metrics, the first two by TRL's names: calls a completion, and failures a call."""
        completions = max(1.0, self.completions)
        metrics = {
            "tools/call_frequency": self.calls / completions,
            "tools/failure_frequency": self.failures / max(1.0, self.calls),
            "ycore/turns/mean": self.turns / completions,
            "ycore/turns/sequences": self.sequences / completions,
            "ycore/turns/masked_tokens": self.tokens / completions,
            "ycore/turns/tool_seconds": self.seconds / completions,
        }
        if self.rewarded_turns:
            metrics["ycore/turns/reward"] = self.paid / self.rewarded_turns
        for reason in ("turns", "length", "deadline", "forked", "failed"):
            metrics[f"ycore/turns/ended_{reason}"] = getattr(self, f"ended_{reason}")
        return metrics


@dataclass(eq=False)
class MultiTurnWriter(SingleTurnWriter):
    """With tools or an environment: turn by turn, until the policy asks nothing more, or a limit is reached.

    Args:
        dialogue_of: returns how the policy acts in a prompt's environment.
        pays: whether the environment is asked for a reward at the end; `pays_turns`: after each turn.
        reads_state: whether a reward function may look at the environment's attributes.
    """

    dialogue_of: Callable[[Prompt], Dialogue]
    pool: ToolPool
    limits: TurnLimits
    _: KW_ONLY
    pays: bool
    pays_turns: bool = False
    reads_state: bool = False

    def __post_init__(self) -> None:
        self.meter = TurnMeter()
        self.meters = [self.meter]

    async def start(self, draw: Draw) -> GroupStart:
        """Reset an environment once, to learn its first observation for this prompt."""
        async with Episode(self.pool, draw.prompt, position=draw.position, index=-1) as episode:
            observation = await episode.begin()
        if observation is None:
            return GroupStart(draw, draw.prompt)
        content = append_observation(draw.prompt, observation)
        token_ids = self.dialogue_of(draw.prompt).prompt_ids(
            content, draw.prompt.template_arguments
        )
        if len(token_ids) > self.limits.max_prompt_tokens:
            # The completions' environments will say what the policy does not read: these are lost.
            return GroupStart(draw, draw.prompt)
        prompt = replace(draw.prompt, content=content)
        return GroupStart(
            replace(draw, prompt=prompt, token_ids=token_ids), draw.prompt, observation
        )

    async def write(
        self, start: GroupStart, index: int, generate: Generate, *, seed: int
    ) -> Completion:
        position = start.draw.position
        dialogue = self.dialogue_of(start.prompt)
        builder = CompletionBuilder(start.draw.token_ids, self.limits.max_tokens)
        async with Episode(self.pool, start.prompt, position=position, index=index) as episode:
            if await episode.begin() != start.observation:
                episode.lose(
                    "reset said another thing than the prompt has, or more than fits into it"
                )
            for number in range(self.limits.max_turns):
                turn_seed = completion_seed(seed, position, index, number)
                max_tokens = min(self.limits.turn_tokens, builder.num_left)
                part = await generate(builder.token_ids, turn_seed, max_tokens=max_tokens)
                is_last = number + 1 == self.limits.max_turns
                if not await self._turn(builder, episode, dialogue, part, is_last=is_last):
                    break
            earned = await episode.reward() if self.pays else None
            env_state = await episode.attributes() if self.reads_state else None
        completion = replace(builder.completion(earned), env_state=env_state)
        self.meter.count(completion)
        return completion

    async def _turn(
        self,
        builder: "CompletionBuilder",
        episode: Episode,
        dialogue: Dialogue,
        part: Completion,
        *,
        is_last: bool,
    ) -> bool:
        """Add the policy's turn and the answer to it; return whether the policy has another turn.

        A call that was cut off is not asked.
        """
        message, calls = dialogue.parse_turn(
            part.token_ids, part.text, prefix=builder.token_ids
        )
        turn = builder.add_policy_turn(part, message)
        if part.finish_reason != "stop" or not (calls or dialogue.takes_text):
            return False
        try:
            goes_on = await _answer(
                builder, episode, dialogue, part.text, calls, is_last=is_last
            )
            if self.pays_turns:
                builder.set_reward(turn, await episode.turn_reward())
        except OutOfTime:
            builder.finish_reason = "deadline"
            return False
        except ConfigError as problem:
            builder.finish_reason = "failed"
            episode.lose(str(problem))
            return False
        return goes_on

    async def close(self) -> None:
        await self.pool.close()


async def _answer(
    builder: "CompletionBuilder",
    episode: Episode,
    dialogue: Dialogue,
    text: str,
    calls: Sequence[Call],
    *,
    is_last: bool,
) -> bool:
    """Ask tools or the environment, and add what they answer; return whether the policy has another turn.

    The calls of a last turn are not asked, as in TRL. An environment that takes text gets the last one too.
    """
    began = time.perf_counter()
    answers: list[Answer] = []
    if dialogue.takes_text:
        answer = await episode.step(text)
        if answer is None:
            return False
        answers = [answer]
    elif not is_last:
        answers = [await _call(episode, call) for call in calls]
    if is_last:
        builder.finish_reason = "turns"
        return False
    messages = dialogue.answer_messages(calls or [Call("step", {})], answers)
    turn = Turn(
        by_policy=False,
        num_tokens=0,
        messages=tuple(messages),
        calls=len(answers),
        failures=sum(answer.failed for answer in answers),
        seconds=time.perf_counter() - began,
    )
    return builder.add_answer(turn, dialogue.answer_ids(messages))


async def _call(episode: Episode, call: Call) -> Answer:
    if call.problem is not None:
        return Answer(str({"error": call.problem}), failed=True)
    return await episode.call(call.name, call.arguments)


def append_observation(prompt: Prompt, observation: str) -> list[Message]:
    """Return the prompt with the observation at the end of its last message, as in TRL."""
    if isinstance(prompt.content, str):
        return [{"role": "user", "content": prompt.content + observation}]
    *before, last = prompt.content
    return [*before, {**last, "content": last["content"] + observation}]


class CompletionBuilder:
    """A completion as it grows, or a sequence of it. `max_tokens` counts all that follows the prompt."""

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.finish_reason = "stop"
        self.token_ids: list[int] = list(prompt_ids)
        self._prompt_length = len(prompt_ids)
        self._logprobs: list[float] | None = []
        self._turns: list[Turn] = []
        self._versions: list[tuple[int, int]] = []  # (end, version) of what the policy wrote
        self._text = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - self._prompt_length

    @property
    def num_left(self) -> int:
        """The number of tokens that still fit."""
        return self.max_tokens - self.num_tokens

    def add_policy_turn(self, part: Completion, message: Mapping[str, object]) -> int:
        """Append what the policy wrote; return the index of the turn."""
        start = self.num_tokens
        self.token_ids += part.token_ids
        if self._logprobs is None or part.logprobs is None:
            self._logprobs = None
        else:
            self._logprobs += part.logprobs
        self._turns.append(Turn(True, len(part.token_ids), (message,)))
        self._versions += [(start + end, version) for end, version in part.versions]
        self._text = part.text
        self.finish_reason = part.finish_reason
        return len(self._turns) - 1

    def set_reward(self, turn: int, reward: float | None) -> None:
        self._turns[turn] = replace(self._turns[turn], reward=reward)

    def add_answer(self, turn: Turn, token_ids: Sequence[int]) -> bool:
        """Append the answer; return whether it fits and leaves room for a turn.

        An answer that does not fit is cut, and has no messages.
        """
        fits = len(token_ids) < self.num_left
        kept = token_ids[: self.num_left]
        self.token_ids += kept
        if self._logprobs is not None:
            self._logprobs += [0.0] * len(kept)
        messages = turn.messages if fits else ()
        self._turns.append(replace(turn, num_tokens=len(kept), messages=messages))
        if not fits:
            self.finish_reason = "length"
        return fits

    def completion(
        self, earned: Score | None, prompt_ids: tuple[int, ...] | None = None
    ) -> Completion:
        return Completion(
            token_ids=tuple(self.token_ids[self._prompt_length :]),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            text=self._text,
            finish_reason=self.finish_reason,
            policy_version=0,
            turns=tuple(self._turns),
            earned=earned,
            prompt_ids=prompt_ids,
        ).with_versions(self._versions)


def completion_seed(run_seed: int, position: int, index: int, turn: int = 0) -> int:
    """Return the engine's seed, below 2**63: unique, and the same whichever engine or attempt answers.

    Args:
        position: that of the prompt in the run's order.
        index: that of the completion in its group.
        turn: that of the policy's turn in the completion.
    """
    key = f"{run_seed}/{position}/{index}" + (f"/{turn}" if turn else "")
    return number_from(key)
