"""An agent's calls become one talk, to the token; what does not go on from it is refused, and no agent ends the run."""

import ast
import asyncio
import contextlib
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.talks import ADD, ADDS, TALKS, Writer, call_text, ids_of, tokenizer_of
from ycore.advantages import ESTIMATORS
from ycore.config.schema import RunConfig
from ycore.engine import Engine as BaseEngine
from ycore.errors import ConfigError
from ycore.rollout.agents import AgentExit, AgentPool, AgentWriter, read_request
from ycore.rollout.dialogue import Dialogue
from ycore.rollout.tool_pool import OutOfTime, ToolPool, ToolSet, describe_tools
from ycore.rollout.turns import GroupStart, MultiTurnWriter, SingleTurnWriter, TurnLimits
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.files import RunFolder
from ycore.sandbox.confined_worker import CallFailed
from ycore.scoring.scoring import PendingGroup, Scorer, Scoring
from ycore.trl.batches import FlatSequence, flatten
from ycore.types import Completion, Draw, Group, Prompt, Score, from_bytes, to_bytes

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
AGENT = DOCS.partition("# my_agent.py\n")[2].partition("```")[0]
EXAMPLE = [
    {"role": role, "content": text}
    for role, text in ast.literal_eval(
        re.findall(r"EXAMPLE = (\[.*?\n\])", AGENT, re.DOTALL)[0]
    )
]  # what the agent says before the row's prompt
TOOLS = '''
def add(x: int, y: int):
    """Add two numbers.

    Args:
        x: The first number.
        y: The second number.
    """
    return x + y
'''
PROMPT = Prompt(0, [{"role": "user", "content": "12 + 30?"}])
USER: list[dict[str, Any]] = [{"role": "user", "content": "12 + 30?"}]
LIMITS: dict[str, Any] = {
    "max_turns": 8,
    "max_tokens": 4000,
    "turn_tokens": 4000,
    "max_prompt_tokens": 2000,
}


def dialogues(name: str) -> tuple[Any, Callable[[str], Dialogue]]:
    template, end, actions = TALKS[name]
    tokenizer = tokenizer_of(template, end)

    def dialogue(tools: str) -> Dialogue:
        return Dialogue(
            tokenizer, ToolSet(tuple(json.loads(tools))), actions=actions, users_answer=True
        )

    return tokenizer, dialogue


class Scripted:
    """Stands for pool and agent: each act is a body to ask, by the answers so far, or an end."""

    def __init__(self, acts: Sequence[Any]) -> None:
        self.acts, self.answers, self.statuses = list(acts), list[Any](), list[int]()
        self.seconds = 0.0

    @asynccontextmanager
    async def run(
        self, prompt: Prompt, *, position: int, index: int
    ) -> AsyncIterator["Scripted"]:
        yield self

    async def next(self, reply: Any = None) -> Any:
        if reply is not None:
            self.statuses.append(reply[0])
            self.answers.append(reply[1])
        act = self.acts.pop(0)
        if isinstance(act, Exception):
            raise act
        return act if isinstance(act, AgentExit) else act(self.answers)


def said(answers: list[Any]) -> Any:
    return [answer for answer in answers if "choices" in answer][-1]["choices"][0]["message"]


def first(answers: list[Any]) -> dict[str, Any]:
    return {"messages": USER, "tools": [ADD]}


def tells(answers: list[Any], text: str = "3") -> dict[str, Any]:
    """Return what a client sends next that answers each of the policy's calls."""
    calls = said(answers).get("tool_calls") or []
    tool_turns = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
    ]
    return {"messages": [*USER, said(answers), *tool_turns], "tools": [ADD]}


def play(
    acts: Sequence[Any],
    turns: Sequence[str],
    *,
    name: str = "smollm2",
    splits: bool = True,
    **limits: Any,
) -> tuple[Completion, Writer, Scripted, dict[str, float]]:
    tokenizer, dialogue = dialogues(name)
    writer, agent = (
        Writer(tokenizer, [ids_of(tokenizer, text) for text in turns]),
        Scripted(acts),
    )
    agent_writer = AgentWriter(dialogue, agent, TurnLimits(**{**LIMITS, **limits}))  # type: ignore[arg-type]
    agent_writer.several_sequences = splits
    completion = asyncio.run(
        agent_writer.write(GroupStart(Draw(5, PROMPT, (7, 8)), PROMPT), 1, writer, seed=0)
    )
    assert sum(completion.mask) == sum(
        turn.num_tokens for turn in completion.turns if turn.by_policy
    )
    assert len(completion.mask) == len(completion.token_ids) == len(completion.logprobs or ())
    return (
        completion,
        writer,
        agent,
        dict(agent_writer.meter.metrics(agent_writer.meter.take())),
    )


@pytest.mark.parametrize("name", TALKS)
def test_calls_of_one_talk_are_one_sequence_with_the_answers_masked(name: str) -> None:
    talk = [first, tells, AgentExit(0, "0.5\n")]
    completion, writer, agent, metrics = play(talk, [call_text(name, 1, 2), "three"], name=name)
    assert agent.statuses == [200, 200] and [turn.by_policy for turn in completion.turns] == [
        True,
        False,
        True,
    ]
    second = list(completion.prompt_ids or ()) + list(
        completion.token_ids[: completion.mask[:].index(0)]
    )
    assert writer.asked[0][0] == list(completion.prompt_ids or ())
    assert writer.asked[1][0][: len(second)] == second and len(writer.asked[1][0]) > len(second)
    assert (
        completion.text == "three"
        and completion.finish_reason == "stop"
        and completion.earned == Score(0.5)
    )
    assert metrics["tools/call_frequency"] == 1 and metrics["ycore/turns/mean"] == 2
    answer = agent.answers[0]["choices"][0]
    assert (
        answer["finish_reason"] == "tool_calls"
        and agent.answers[1]["choices"][0]["finish_reason"] == "stop"
    )
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "x": 1,
        "y": 2,
    }


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3.1"])
def test_no_token_of_a_talk_through_the_door_is_written_as_text_and_read_again(
    name: str,
) -> None:
    """Tokens are random, then a user answers: most would be others, had they come back from the client's text."""
    tokenizer, dialogue_of = dialogues(name)
    chance, would_change = random.Random(name), 0
    lower = [
        number
        for token, number in tokenizer.get_vocab().items()
        if token.isalpha() and token.islower()
    ]

    def goes_on(answers: list[Any]) -> dict[str, Any]:
        history = list(USER)
        for answer in answers:
            history += [
                answer["choices"][0]["message"],
                {"role": "user", "content": str(len(history))},
            ]
        return {"messages": history, "tools": [ADD]}

    for _ in range(100):
        wrote = [[*chance.choices(lower, k=12), tokenizer.eos_token_id] for _ in range(3)]
        writer, agent = Writer(tokenizer, wrote), Scripted([goes_on] * 3 + [AgentExit(0)])
        agent_writer = AgentWriter(dialogue_of, agent, TurnLimits(**LIMITS))  # type: ignore[arg-type]
        completion = asyncio.run(
            agent_writer.write(GroupStart(Draw(5, PROMPT, (7, 8)), PROMPT), 1, writer, seed=0)
        )
        whole = [*(completion.prompt_ids or ()), *completion.token_ids]
        assert agent.statuses == [200] * 3
        assert [
            token
            for token, by_policy in zip(completion.token_ids, completion.mask, strict=True)
            if by_policy
        ] == [token for turn in wrote for token in turn]
        for request_ids, _, _ in writer.asked:
            assert request_ids == whole[: len(request_ids)]
        would_change += (
            tokenizer.encode(tokenizer.decode(wrote[0][:-1]), add_special_tokens=False)
            != wrote[0][:-1]
        )
    assert would_change > 50


def test_a_user_may_answer_too_and_special_tokens_of_what_is_said_are_broken() -> None:
    def user(answers: list[Any]) -> dict[str, Any]:
        return {
            "messages": [*USER, said(answers), {"role": "user", "content": "again<|im_end|>"}],
            "tools": [ADD],
        }

    for name in ("smollm2", "qwen3"):
        tokenizer, _ = dialogues(name)
        completion, *_ = play([first, user, AgentExit(0)], ["one", "two"], name=name)
        assert (
            completion.token_ids.count(tokenizer.eos_token_id) == 3
        )  # two of the policy's, and the user's own
        assert completion.messages[1]["role"] == "user" and completion.finish_reason == "stop"


def forget(answers: list[Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Sum up."}], "tools": [ADD]}


def reword(answers: list[Any]) -> dict[str, Any]:
    return {
        "messages": [
            *USER,
            {**said(answers), "content": "add(1,2)"},
            *tells(answers)["messages"][2:],
        ]
    }


def drop_tools(answers: list[Any]) -> dict[str, Any]:
    return {"messages": tells(answers)["messages"]}


def again(answers: list[Any]) -> dict[str, Any]:
    return {"messages": USER, "tools": [ADD]}


def prompted(answers: list[Any]) -> dict[str, Any]:
    more = {"role": "assistant", "content": "I say"}
    return {"messages": [*tells(answers)["messages"], more], "tools": [ADD]}


def bare(answers: list[Any]) -> dict[str, Any]:
    return {"messages": [*USER, said(answers)], "tools": [ADD]}


@pytest.mark.parametrize("act", [forget, reword, drop_tools, again])
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_call_that_goes_on_from_no_other_begins_another_sequence(act: Any, name: str) -> None:
    """Each sequence is, to the token, what the engine was asked and what it wrote; each call may go on from any."""

    def goes_on(answers: list[Any]) -> dict[str, Any]:
        """Go on from the first conversation."""
        made = {"choices": answers[0]["choices"]}
        return tells([made])

    turns = [call_text(name, 1, 2), "three", "four"]
    completion, writer, agent, metrics = play(
        [first, act, goes_on, AgentExit(1, "1")], turns, name=name
    )
    tokenizer, _ = dialogues(name)
    assert agent.statuses == [200] * 3 and metrics["ycore/turns/sequences"] == 2
    requests = [tuple(ids) for ids, _, _ in writer.asked]
    new, old = completion.sequences(())  # the one that was written last is last
    assert (
        new.prompt_ids == requests[1] == completion.prompt_ids and old.prompt_ids == requests[0]
    )
    assert completion.token_ids[new.start : new.stop] == tuple(ids_of(tokenizer, "three"))
    whole = requests[2] + tuple(ids_of(tokenizer, "four"))
    assert old.prompt_ids + completion.token_ids[old.start : old.stop] == whole
    policy_ids = [
        token for token, ours in zip(completion.token_ids, completion.mask, strict=True) if ours
    ]
    assert policy_ids == [
        token for text in ("three", turns[0], "four") for token in ids_of(tokenizer, text)
    ]
    assert completion.logprobs == tuple(-0.5 if ours else 0.0 for ours in completion.mask)
    assert len({seed for _, seed, _ in writer.asked}) == 3 and completion.text == "four"
    assert from_bytes(to_bytes(group_of(completion))) == group_of(completion)
    (flat,) = flatten([group_of(completion)])
    ((at, length),) = flat.later_prompts
    assert flat.completion.token_ids[at : at + length] == requests[0]
    assert not any(flat.completion.mask[at : at + length])


def group_of(completion: Completion) -> Group:
    return Group(Draw(5, PROMPT, (7, 8)), (completion,), ((Score(1.0),),))


def test_all_sequences_of_a_completion_share_its_tokens_and_turns() -> None:
    def other(answers: list[Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(len(answers))}]}

    completion, writer, agent, _ = play(
        [first, other, other, AgentExit(0)], ["abcdefgh"] * 3, max_tokens=20
    )
    sizes = [turn.num_tokens for turn in completion.turns if turn.by_policy]
    assert [most for _, _, most in writer.asked] == [
        20,
        20 - sizes[0],
        20 - sizes[0] - sizes[1],
    ]
    assert sum(sizes) <= 20 and len(completion.sequences(())) == 3
    assert Rules(1, 0, (1.0,)).cost_of(group_of(completion)) == sum(
        sequence.stop - sequence.start for sequence in completion.sequences(())
    )
    completion, _, agent, _ = play([first, other, other, AgentExit(0)], ["a", "b"], max_turns=2)
    assert agent.statuses == [200, 200, 400] and completion.finish_reason == "turns"


@pytest.mark.parametrize("act", [prompted, bare])
def test_nobody_answers_the_policys_own_message(act: Any) -> None:
    completion, _, agent, _ = play([first, act, AgentExit(0)], ["add(1, 2)"])
    assert agent.statuses == [200, 400] and completion.finish_reason == "stop"


@pytest.mark.parametrize("act", [forget, reword, drop_tools, again])
def test_where_rows_are_not_packed_a_call_that_does_not_go_on_ends_the_completion(
    act: Any,
) -> None:
    acts = [first, act, tells, AgentExit(1, "1")]
    completion, writer, agent, metrics = play(acts, ["add(1, 2)", "three"], splits=False)
    assert agent.statuses == [200, 400, 400] and len(writer.asked) == 1
    assert completion.finish_reason == "forked" and metrics["ycore/turns/ended_forked"] == 1
    assert len(completion.turns) == 1 and completion.earned == Score(1.0)


def test_every_end_has_its_name() -> None:
    def end(
        acts: Sequence[Any],
        turns: Sequence[str] = ("add(1, 2)", "add(3, 4)", "x"),
        **limits: int,
    ) -> Any:
        completion, _, agent, metrics = play(acts, turns, **limits)
        counted = metrics.get(f"ycore/turns/ended_{completion.finish_reason}", 0)
        return (
            completion.finish_reason,
            sum(turn.by_policy for turn in completion.turns),
            agent.statuses,
            counted,
        )

    def short(answers: list[Any]) -> dict[str, Any]:
        return {**first(answers), "max_tokens": 3}

    def much(answers: list[Any]) -> dict[str, Any]:
        return tells(answers, "3" * 500)

    assert end([first, AgentExit(0)]) == ("stop", 1, [200], 0)
    assert end([first, AgentExit(3)]) == ("failed", 1, [200], 1)
    assert end([first, CallFailed("worker died")]) == ("failed", 1, [200], 1)
    assert end([first, OutOfTime()]) == ("deadline", 1, [200], 1)
    assert end([first, tells, AgentExit(1)], max_turns=1) == ("turns", 1, [200, 400], 1)
    assert end([first, much, AgentExit(0)], max_tokens=100) == ("length", 1, [200, 400], 1)
    assert end([short, tells, AgentExit(0)]) == ("length", 1, [200, 400], 1)
    assert end([short, AgentExit(0)]) == ("length", 1, [200], 1)


@pytest.mark.parametrize(
    ("acts", "reason"),
    [
        ([AgentExit(0, "1")], "failed"),
        ([AgentExit(2)], "failed"),
        ([OutOfTime()], "deadline"),
        ([CallFailed("no such file")], "failed"),
        (
            [lambda _: {"messages": [{"role": "user", "content": "a " * 3000}]}, AgentExit(1)],
            "length",
        ),
    ],
)
def test_an_agent_that_never_asks_teaches_nothing(acts: list[Any], reason: str) -> None:
    completion, writer, _, metrics = play(acts, ["five"])
    assert (completion.finish_reason, metrics[f"ycore/turns/ended_{reason}"]) == (reason, 1)
    assert (
        completion.mask == (0,)
        and completion.logprobs == (0.0,)
        and completion.policy_version == 3
    )
    assert writer.asked[0][0] == [7, 8] and completion.messages == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": USER, "stop": ["\n"]}, "stop is not served"),
        ({"messages": USER, "n": 2}, "n above 1"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "must be a list that is not empty"),
        ({"messages": USER, "max_tokens": 0.5}, "max_tokens must be a whole number"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "not as OpenAI has them: ValueError role 'robot'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "not as OpenAI has them: KeyError 'text'",
        ),
        ({"messages": ["text"]}, "not as OpenAI has them"),
        (
            {"messages": USER, "tools": [{"type": "function"}]},
            "not as OpenAI has them: KeyError 'function'",
        ),
        (
            {"messages": USER, "tools": [{"function": {"name": 3}}]},
            "a function's name is text",
        ),
    ],
)
def test_what_is_not_served_is_told_in_one_line_and_the_talk_goes_on(
    body: dict[str, Any], problem: str
) -> None:
    completion, _, agent, _ = play([lambda _: body, first, AgentExit(0)], ["one"])
    assert agent.statuses == [400, 200] and completion.finish_reason == "stop"
    line = agent.answers[0]["error"]["message"]
    assert problem in line and "\n" not in line


def test_a_template_that_shows_no_tools_fails_the_agent_and_not_the_run() -> None:
    tokenizer = tokenizer_of(TALKS["smollm2"][0], "<|im_end|>")
    agent = Scripted([first, AgentExit(1)])

    def dialogue(tools: str) -> Dialogue:
        return Dialogue(tokenizer, ADDS, actions="template", users_answer=True)

    with pytest.raises(ConfigError):
        dialogue("")
    agent_writer = AgentWriter(dialogue, agent, TurnLimits(**LIMITS))  # type: ignore[arg-type]
    start = GroupStart(Draw(5, PROMPT, (7, 8)), PROMPT)
    completion = asyncio.run(
        agent_writer.write(start, 1, Writer(tokenizer, [ids_of(tokenizer, "a")]), seed=0)
    )
    assert (
        completion.finish_reason == "failed"
        and "--actions calls" in agent.answers[0]["error"]["message"]
    )


def test_text_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 30?"}]
    chat_request = read_request({"messages": [{"role": "user", "content": parts}]})
    assert chat_request.messages == USER and chat_request.tools == "[]"


class Engine(BaseEngine):
    """Writes by its seed alone: a call with some numbers, now and then a wrong one, and after an answer its last."""

    name = "engine"

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        pass

    async def complete(
        self,
        token_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool = False,
        max_tokens: int | None = None,
    ) -> Completion:
        text = self._tokenizer.decode(token_ids).rpartition("12 + 30?")[2]
        number = seed % 90
        wrong = self._template == "smollm2" and number % 3 == 0
        call = f"add({number}," if wrong else call_text(self._template, number, number % 7)
        ids = ids_of(
            self._tokenizer, call if number % 5 or "assistant" not in text else f"no {number}"
        )
        if len(token_ids) > 0 and text.count("assistant") > 2:
            ids = ids_of(self._tokenizer, f"it is {number}")
        ids = ids[:max_tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(
            tuple(ids), tuple(-0.01 * (seed % 50 + token % 9) for token in ids), text, "stop", 3
        )


class Length(Scorer):
    """Rewards what differs from completion to completion, from the transcript."""

    async def score_one(self, writing: PendingGroup, index: int) -> Score:
        completion = await writing.tasks_G[index]
        return Score(float(sum(map(ord, completion.transcript)) % 11))


def trained_on(
    name: str,
    tokenizer: Any,
    turns: SingleTurnWriter,
    encode: Callable[[Prompt], tuple[int, ...]],
) -> Any:
    controller = Controller(
        engines=[Engine(tokenizer, name)],
        scoring=Scoring([Length()]),
        draws=DrawSource([PROMPT], seed=None, encode=encode, max_prompt_tokens=2000),
        rules=Rules(group_size=4, seed=0, reward_weights=(1.0,)),
        peers=Peers(),
        writer=turns,
    )
    controller.start(timeout_s=20)
    groups = controller.next_round(step=0, num_groups=1)
    controller.close()
    sequences = flatten(groups)
    rewards = torch.tensor([[sequence.scores[0].value for sequence in sequences]])
    return (
        sequences,
        ESTIMATORS["group"](rewards, torch.ones_like(rewards, dtype=torch.bool)),
        groups,
    )


COMMON: dict[str, Any] = {
    "model": "m",
    "dataset": "d",
    "output": "run",
    "rewards": [{"reward": "environment"}],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "tools.py").write_text(TOOLS)
    return folder


@pytest.fixture(scope="module")
def described(place: Path) -> ToolSet:
    with contextlib.chdir(place):
        return describe_tools(RunConfig(**COMMON, tools=["tools.py:add"]))[None]


@pytest.mark.skipif(
    find_spec("openai") is None,
    reason="the client openai comes with vLLM, which is not installed",
)
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_the_openai_client_through_the_door_is_the_same_as_tools_inside(
    name: str, place: Path, described: ToolSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, masks, log-probabilities, rewards and advantages are equal; processes are real, the engine scripted."""
    monkeypatch.chdir(place)
    folder = RunFolder(place / "run")
    tokenizer, dialogue_of = dialogues(name)
    inside_dialogue = Dialogue(tokenizer, described, actions=TALKS[name][2])
    pool = ToolPool(RunConfig(**COMMON, tools=["tools.py:add"]), folder)
    inside = MultiTurnWriter(lambda _: inside_dialogue, pool, TurnLimits(**LIMITS), pays=False)

    def bare(prompt: Prompt) -> tuple[int, ...]:
        return tuple(
            tokenizer.apply_chat_template(prompt.content, tokenize=True, return_dict=False)
        )

    direct = trained_on(
        name,
        tokenizer,
        inside,
        lambda prompt: inside_dialogue.prompt_ids([*EXAMPLE, *prompt.content]),
    )
    config = RunConfig(
        **COMMON, agent=f"{sys.executable} my_agent.py", turns={"completion_s": 300}
    )
    agents = AgentWriter(
        dialogue_of,
        AgentPool(config, folder),
        TurnLimits(**LIMITS),
    )
    through = trained_on(name, tokenizer, agents, bare)

    def learned(sequence: FlatSequence) -> tuple[Any, ...]:
        return (
            sequence.prompt_ids,
            sequence.completion.token_ids,
            sequence.completion.mask,
            sequence.completion.logprobs,
            [score.value for score in sequence.scores],
        )

    assert [learned(sequence) for sequence in through[0]] == [
        learned(sequence) for sequence in direct[0]
    ]
    assert torch.equal(through[1], direct[1]) and direct[1].abs().max() > 0.5
    assert any(0 in sequence.completion.mask for sequence in direct[0])
    ends = [
        [(completion.finish_reason, completion.transcript) for completion in group.completions]
        for group in (*direct[2], *through[2])
    ]
    assert ends[0] == ends[1]
