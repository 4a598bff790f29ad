"""How a completion is written: in one turn, or in several with tools and an environment between them.

A completion holds a slot only while an engine writes. While tools or an environment answer, the slot is another's.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ycore.rollout.dialogue import Call, Dialogue
from ycore.rollout.tool_pool import Answer, Episode, OutOfTime, ToolPool
from ycore.run.meter import CountMeter, Meter
from ycore.types import Completion, Draw, Message, Prompt, Score, Turn


class Write(Protocol):
    """Has an engine write after these tokens, on a slot."""

    def __call__(
        self, token_ids: Sequence[int], seed: int, /, *, max_tokens: int | None = None
    ) -> Awaitable[Completion]: ...


@dataclass(frozen=True, slots=True)
class Start:
    """Where the completions of a group start: a prompt, and in it what the environment `said` to the row's `prompt`."""

    draw: Draw
    prompt: Prompt
    said: str | None = None


class OneTurn:
    """Without tools: the policy writes until it stops."""

    meters: Sequence[Meter] = ()
    splits = True
    """Whether a completion may have several sequences, which only packed rows keep apart."""

    async def start(self, draw: Draw) -> Start:
        return Start(draw, draw.prompt)

    async def play(self, start: Start, index: int, write: Write, *, seed: int) -> Completion:
        """One completion of a group, by its index; `seed` is the run's."""
        return await write(start.draw.token_ids, completion_seed(seed, start.draw.position, index))

    def apart(self) -> "OneTurn":
        """The same way of writing, for completions that are not of the run's rounds."""
        return self

    @property
    def waiting(self) -> list[Draw]:
        """Groups that the last round began and did not end; none, unless completions take several rounds."""
        return []

    def ended(self, draw: Draw) -> None:
        """All completions of a group are written and scored."""

    def carry(self, version: int) -> None:
        """The round is over that this version wrote."""

    @property
    def state(self) -> list[dict[str, Any]]:
        """What of it goes on in the next round, as plain JSON values."""
        return []

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take what `state` was."""

    async def close(self) -> None:
        pass


class GivenPairs(OneTurn):
    """Nobody writes: the completions are a row's better answer and then its worse one.

    Args:
        encode: Token ids of a text, without special tokens.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    async def play(self, start: Start, index: int, write: Write, *, seed: int) -> Completion:
        text = str(start.draw.prompt.columns[("chosen", "rejected")[index]])
        return Completion(tuple(self._encode(text)), None, text, "stop", 0)


@dataclass
class TurnMeter(CountMeter):
    """All completions that were written: their turns and calls, and how they ended. `seconds` are those of answers."""

    completions: float = 0
    turns: float = 0
    sequences: float = 0
    tokens: float = 0
    calls: float = 0
    failures: float = 0
    seconds: float = 0
    paid_turns: float = 0
    paid: float = 0
    ended_turns: float = 0
    ended_length: float = 0
    ended_deadline: float = 0
    ended_forked: float = 0
    ended_failed: float = 0

    def count(self, completion: Completion) -> None:
        answers = [turn for turn in completion.turns if not turn.by_policy]
        self.completions += 1
        self.turns += len(completion.turns) - len(answers)
        self.sequences += 1 + sum(turn.begins for turn in answers)
        self.tokens += sum(turn.num_tokens for turn in answers)
        self.calls += sum(turn.calls for turn in answers)
        self.failures += sum(turn.failures for turn in answers)
        self.seconds += sum(turn.seconds for turn in answers)
        paid = [turn.reward for turn in completion.turns if turn.reward is not None]
        self.paid_turns += len(paid)
        self.paid += sum(paid)
        name = f"ended_{completion.finish_reason}"
        if name in self.__dict__:
            setattr(self, name, getattr(self, name) + 1)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """The first two by TRL's names: calls a completion, and failures a call."""
        total = TurnMeter(*sums)
        each = max(1.0, total.completions)
        return {
            "tools/call_frequency": total.calls / each,
            "tools/failure_frequency": total.failures / total.calls if total.calls else 0.0,
            "ycore/turns/mean": total.turns / each,
            "ycore/turns/sequences": total.sequences / each,
            "ycore/turns/masked_tokens": total.tokens / each,
            "ycore/turns/tool_seconds": total.seconds / each,
            **({"ycore/turns/reward": total.paid / total.paid_turns} if total.paid_turns else {}),
            **{
                f"ycore/turns/{name}": value
                for name, value in asdict(total).items()
                if name.startswith("ended_")
            },
        }


class Turns(OneTurn):
    """With tools or an environment: turn by turn, until the policy asks nothing more, or something is used up.

    Args:
        dialogue_of: how the policy talks in a prompt's environment.
        max_turns: turns of the policy. `max_tokens`: of a completion, whoever wrote them. `turn_tokens`: of one turn.
        max_prompt_tokens: a prompt that what the environment said makes longer is not used.
        pays, pays_turns: whether the environment is asked for a reward, at the end and after each turn.
        shows: whether a reward function may look at its attributes.
    """

    def __init__(
        self,
        dialogue_of: Callable[[Prompt], Dialogue],
        pool: ToolPool,
        *,
        max_turns: int,
        max_tokens: int,
        turn_tokens: int | None,
        max_prompt_tokens: int,
        pays: bool,
        pays_turns: bool = False,
        shows: bool = False,
    ) -> None:
        self.meter = TurnMeter()
        self.meters = [self.meter]
        self._dialogue_of, self._pool = dialogue_of, pool
        self._pays, self._pays_turns, self._shows = pays, pays_turns, shows
        self._max_turns, self._max_tokens, self._turn_tokens = (
            max_turns,
            max_tokens,
            turn_tokens or max_tokens,
        )
        self._max_prompt_tokens = max_prompt_tokens

    async def start(self, draw: Draw) -> Start:
        """Reset an environment once, to learn what it says to this prompt."""
        async with Episode(self._pool, draw.prompt, position=draw.position, index=-1) as episode:
            said = await episode.begin()
        if said is None:
            return Start(draw, draw.prompt)
        content = said_after(draw.prompt, said)
        token_ids = self._dialogue_of(draw.prompt).prompt_ids(content)
        if len(token_ids) > self._max_prompt_tokens:
            return Start(
                draw, draw.prompt
            )  # what its environments say is then not what the policy reads
        told = replace(draw, prompt=replace(draw.prompt, content=content), token_ids=token_ids)
        return Start(told, draw.prompt, said)

    async def play(self, start: Start, index: int, write: Write, *, seed: int) -> Completion:
        position, dialogue = start.draw.position, self._dialogue_of(start.prompt)
        async with Episode(self._pool, start.prompt, position=position, index=index) as episode:
            if await episode.begin() != start.said:
                episode.lose(
                    "reset said another thing than the prompt has, or more than fits into it"
                )
            talk = Talk(start.draw.token_ids, self._max_tokens)
            for number in range(self._max_turns):
                turn_seed = completion_seed(seed, position, index, number)
                part = await write(
                    talk.token_ids, turn_seed, max_tokens=min(self._turn_tokens, talk.room)
                )
                message, calls = dialogue.read(part.token_ids, part.text, prefix=talk.token_ids)
                talk.add(part, message)
                if part.finish_reason != "stop":
                    break  # a call that was cut off is not asked
                if not calls and not dialogue.takes_text:
                    break
                is_last = number + 1 == self._max_turns
                place = talk.num_turns
                try:
                    goes_on = await _answer(
                        talk, episode, dialogue, part.text, calls, is_last=is_last
                    )
                    if self._pays_turns:
                        talk.pay(place, await episode.turn_reward())
                except OutOfTime:
                    talk.ended = "deadline"
                    break
                if not goes_on:
                    break
            earned = await episode.reward() if self._pays else None
            world = await episode.attributes() if self._shows else None
        completion = replace(talk.completion(earned), world=world)
        self.meter.count(completion)
        return completion

    async def close(self) -> None:
        await self._pool.close()


async def _answer(
    talk: "Talk",
    episode: Episode,
    dialogue: Dialogue,
    text: str,
    calls: Sequence[Call],
    *,
    is_last: bool,
) -> bool:
    """Ask tools or the environment, and add what they answer; whether the policy has another turn.

    The calls of a last turn are not asked, as in TRL. An environment that takes text gets the last one too.
    """
    began = time.perf_counter()
    answers: list[Answer]
    if dialogue.takes_text:
        answer = await episode.step(text)
        if answer is None:
            return False
        answers = [answer]
    else:
        answers = [] if is_last else [await _asked(episode, call) for call in calls]
    if is_last:
        talk.ended = "turns"
        return False
    messages = dialogue.answers(calls or [Call("step", {})], answers)
    failures = sum(answer.failed for answer in answers)
    turn = Turn(
        False, 0, tuple(messages), len(answers), failures, seconds=time.perf_counter() - began
    )
    return talk.add_answer(turn, dialogue.answer_ids(messages))


async def _asked(episode: Episode, call: Call) -> Answer:
    if call.problem is not None:
        return Answer(str({"error": call.problem}), failed=True)
    return await episode.call(call.name, call.arguments)


def said_after(prompt: Prompt, said: str) -> list[Message]:
    """The prompt with what the environment said at the end of its last message, as in TRL."""
    if isinstance(prompt.content, str):
        return [{"role": "user", "content": prompt.content + said}]
    return [
        *prompt.content[:-1],
        {**prompt.content[-1], "content": prompt.content[-1]["content"] + said},
    ]


class Talk:
    """A completion as it grows, or one sequence of it. `max_tokens`: of all that follows the prompt."""

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self.ended, self.max_tokens = "stop", max_tokens
        self.token_ids: list[int] = list(prompt_ids)
        self._first = len(prompt_ids)
        self._logprobs: list[float] | None = []
        self._turns: list[Turn] = []
        self._text, self._versions = "", list[int]()

    @property
    def room(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - self._first

    def add(self, part: Completion, message: Mapping[str, object]) -> None:
        self.token_ids += part.token_ids
        known = self._logprobs is not None and part.logprobs is not None
        self._logprobs = [*(self._logprobs or ()), *(part.logprobs or ())] if known else None
        self._turns.append(Turn(True, len(part.token_ids), (message,)))
        self._text, self.ended = part.text, part.finish_reason
        self._versions.append(part.policy_version)

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def pay(self, number: int, reward: float | None) -> None:
        """Note what the environment paid for the turn before that many."""
        self._turns[number - 1] = replace(self._turns[number - 1], reward=reward)

    def add_answer(self, turn: Turn, token_ids: Sequence[int]) -> bool:
        """Whether it fits and leaves room for a turn. What does not fit is cut, and counts as said by nobody."""
        fits = len(token_ids) < self.room
        kept = token_ids[: self.room]
        self.token_ids += kept
        if self._logprobs is not None:
            self._logprobs += [0.0] * len(kept)
        self._turns.append(
            replace(turn, num_tokens=len(kept), messages=turn.messages if fits else ())
        )
        if not fits:
            self.ended = "length"
        return fits

    def completion(
        self, earned: Score | None, prompt_ids: tuple[int, ...] | None = None
    ) -> Completion:
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        ids, version = tuple(self.token_ids[self._first :]), min(self._versions)
        return Completion(
            ids, logprobs, self._text, self.ended, version, tuple(self._turns), earned, prompt_ids
        )


def completion_seed(run_seed: int, position: int, index: int, turn: int = 0) -> int:
    """The engine's seed for one completion, below 2**63: unique, and the same whichever engine or attempt answers.

    `position` is that of the prompt in the run's order, `index` that of the completion in its group, and `turn` that of
    the policy's turn in the completion.
    """
    key = f"{run_seed}/{position}/{index}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
