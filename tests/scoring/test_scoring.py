"""Scorers over a group that is being written, with judges and reward models that a test scripts (no process)."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from PIL import Image as Pillow

from tests.scripted_teacher import logprob_of, teacher_at
from tests.tiny_model import tiny_tokenizer, write_tiny_model
from ycore.config.learners import DistillConfig, DistillSettings
from ycore.config.schema import RewardConfig
from ycore.engine import Engine
from ycore.engine.judge_engine import QuestionRefused
from ycore.errors import EngineError
from ycore.judge.declaration import Judge, RewardModel, Teacher, judge_of
from ycore.judge.question import Question, Questioner, verdict_code
from ycore.judge.verdict import Reply
from ycore.placement.allocator import Allocator
from ycore.placement.placement import SlotPool
from ycore.placement.slots import Slots
from ycore.rollout.turns import completion_seed
from ycore.round.meters import collect
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.files import ImageStore, RunFolder, png_of
from ycore.scoring.judge_scorer import (
    KEY,
    AgreementScorer,
    JudgeMeter,
    JudgeScorer,
    Questions,
    shows_chosen_first,
)
from ycore.scoring.model_scorers import (
    EnsembleMember,
    RewardModelMeter,
    RewardModelScorer,
    TeacherMeter,
    TeacherScorer,
)
from ycore.scoring.scorers import build_scoring
from ycore.scoring.scoring import PendingGroup, Scorer, Scoring
from ycore.types import IMAGE_MARK, Completion, Draw, Prompt, Score, Turn

T = TypeVar("T")


class ScriptedJudge:
    """A JudgeEngine whose replies a function writes, from the question's last turn; notes what it was asked."""

    def __init__(self, name: str, reply: Callable[[str], str | Reply]) -> None:
        self.name = name
        self.asked: list[tuple[str, int, bool]] = []
        self.closed = False
        self.pictures: list[str] = []
        self._reply = reply

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def ask(
        self, judge: Judge, question: Question, *, seed: int, again: bool = False
    ) -> Reply:
        content = question[-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        self.pictures = (
            []
            if isinstance(content, str)
            else [part["image_url"]["url"] for part in content[:-1]]
        )
        self.asked.append((text, seed, again))
        await asyncio.sleep(0)
        reply = self._reply(text)
        if isinstance(reply, str):  # an honest judge writes the code of its question
            tag = text.rpartition("</")[2].partition(">")[0]
            reply = reply.replace("score>", f"{tag}>").replace("ranking>", f"{tag}>")
        return Reply(reply, num_tokens=3) if isinstance(reply, str) else reply

    async def close(self) -> None:
        self.closed = True


NO_POLICY: Any = None


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


def completion(text: str) -> Completion:
    return Completion(tuple(map(ord, text)), None, text, "stop", 0)


def make_judge(**declared: Any) -> Judge:
    args = {"verdict": {"kind": "score"}, "fence": False, **declared}
    return judge_of(RewardConfig(reward="judge:test", args=args))


def make_scorer(
    judge: Judge, engines: Sequence[ScriptedJudge], meter: JudgeMeter | None = None
) -> JudgeScorer:
    return JudgeScorer("test", Questioner(judge), engines, meter=meter or JudgeMeter(), seed=7)


async def scores_of(
    scorer: Scorer | Scoring,
    texts: Sequence[str],
    *,
    slots: int = 1,
    columns: dict[str, Any] | None = None,
    when: Callable[[str], float] = lambda text: 0.0,
) -> list[Score]:
    async def write(text: str) -> Completion:
        await asyncio.sleep(when(text))
        return completion(text)

    tasks = [asyncio.create_task(write(text)) for text in texts]
    draw = Draw(3, Prompt(0, "What?", columns or {}), (1, 2))
    return await scorer.score(PendingGroup(draw, tasks, 0, Slots(slots)))


def values(scores: Sequence[Score]) -> list[float | None]:
    return [score.value for score in scores]


def by_length(text: str) -> str:
    """The honest judge of these tests: a point for each letter of the answer."""
    return (
        f"<score>{len(text.partition('Answer:')[2].partition('End with')[0].strip())}</score>"
    )


def test_pointwise_scores_are_scaled_to_rewards() -> None:
    engine = ScriptedJudge("judge-0", by_length)
    rows = run(
        scores_of(make_scorer(make_judge(scale=[-1, 1]), [engine]), ["", "abcde", "abcdefghij"])
    )
    assert values(rows) == [-1.0, 0.0, 1.0]


def test_a_score_keeps_what_its_judge_wrote() -> None:
    engine = ScriptedJudge("judge-0", lambda text: "Short and right. <score>8</score>")
    (score,) = run(scores_of(make_scorer(make_judge(), [engine]), ["four"]))
    assert score.value == 0.8 and (score.verdict or "").startswith("Short and right.")
    pairs = make_judge(mode="pairwise", against="reference", reference_column="answer")
    rows = run(scores_of(make_scorer(pairs, [engine]), ["four"], columns={"answer": "4"}))
    assert (rows[0].verdict or "").count("Short and right.") == 2


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("I could say <score>3</score>, no.</think><score>8</score>", 0.8),
        ("I could say <score>3</score>, no.", None),
        ("</think><score>8</score>", 0.8),
    ],
)
def test_a_judge_whose_prompt_opens_the_thinking_is_read_after_it(
    reply: str, value: float | None
) -> None:
    scorer = make_scorer(make_judge(), [ScriptedJudge("judge-0", lambda text: reply)])
    scorer.in_thinking = True
    assert values(run(scores_of(scorer, ["four"]))) == [value]


@pytest.mark.parametrize("kind", ["score", "json"])
@pytest.mark.parametrize("end", ["<|assistant|>", "<|assistant|><think>\n"])
def test_a_judge_thinks_first_where_its_template_says_so(
    kind: str, end: str, tmp_path: Path
) -> None:
    """Structured output begins with the verdict, whatever the template opens."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = f"{{{{ messages[0]['content'] }}}}{end}"
    context: Any = SimpleNamespace(
        names=["judge:test"],
        config=SimpleNamespace(seed=7),
        folder=RunFolder(tmp_path),
        meter=lambda kind: kind(),
        models_of=lambda source: ["the judge"],
        servers=lambda model, kind: [],
        tokenizer=lambda model: tokenizer,
    )
    spec = RewardConfig(reward="judge:test", args={"verdict": {"kind": kind}})
    scorer: Any = JudgeScorer.build(spec, 0, context)
    assert scorer.in_thinking is (kind == "score" and "<think>" in end)


def test_a_judge_sees_the_pictures_of_the_prompt(tmp_path: Path) -> None:
    engine, store = ScriptedJudge("judge-0", by_length), ImageStore(tmp_path)
    image = store.put(png_of(Pillow.new("RGB", (2, 2), "red")), "row 0")
    scorer = JudgeScorer(
        "test", Questioner(make_judge()), [engine], meter=JudgeMeter(), seed=7, images=store
    )
    prompt = Prompt(0, [{"role": "user", "content": f"Is {IMAGE_MARK} red?"}], {}, (image,))

    async def work() -> list[Score]:
        tasks = [asyncio.create_task(asyncio.sleep(0, completion("abcde")))]
        return await scorer.score(PendingGroup(Draw(0, prompt, (1,)), tasks, 0, Slots(1)))

    assert values(run(work())) == [0.5]
    assert engine.pictures == [store.url(image.sha256)]
    assert "Is [picture 1] red?" in engine.asked[0][0] and IMAGE_MARK not in engine.asked[0][0]


def test_a_judge_is_asked_as_each_completion_ends() -> None:
    """The last completion ends only after the first was judged; nothing but that order lets this test end."""
    judged = asyncio.Event()
    engine = ScriptedJudge("judge-0", lambda text: (judged.set(), "<score>1</score>")[1])

    async def work() -> list[Score]:
        async def last() -> Completion:
            await judged.wait()
            return completion("last")

        async def first() -> Completion:
            return completion("first")

        tasks = [asyncio.create_task(first()), asyncio.create_task(last())]
        writing = PendingGroup(Draw(0, Prompt(0, "What?"), (1,)), tasks, 0, Slots(1))
        return await make_scorer(make_judge(), [engine]).score(writing)

    assert values(run(work())) == [0.1, 0.1]
    assert ["first" in text for text, _, _ in engine.asked] == [True, False]


def test_where_slots_are_shared_a_judge_is_asked_once_the_whole_group_is_written() -> None:
    """The short completion's verdict waits for the long one, and both are asked at one moment."""
    allocator = Allocator(
        SlotPool(2, ("rollout", "judge"), {"rollout": 8, "judge": 8}, exclusive=False)
    )
    written: list[str] = []
    seen: list[tuple[str, ...]] = []

    async def write(text: str, seconds: float) -> Completion:
        await asyncio.sleep(seconds)
        written.append(text)
        return completion(text)

    def verdict(text: str) -> str:
        seen.append(tuple(written))
        return "<score>1</score>"

    async def work(mode: str) -> list[Score]:
        allocator.restore(
            {**allocator.state(), "mode": mode, "division": {"rollout": 1, "judge": 1}}
        )
        allocator.begin_round(0.0)
        tasks = [
            asyncio.create_task(write(text, seconds))
            for text, seconds in (("short", 0.0), ("long", 0.05))
        ]
        slots = Slots(2, allocator=allocator)
        writing = PendingGroup(Draw(0, Prompt(0, "What?"), (1,)), tasks, 0, slots)
        async with slots.round():
            engines = [ScriptedJudge(f"judge-{slot}", verdict) for slot in range(2)]
            scores = await make_scorer(make_judge(), engines).score(writing)
        written.clear()
        return scores

    assert values(run(work("held"))) == values(run(work("shared"))) == [0.1, 0.1]
    assert seen == [("short",), ("short", "long"), ("short", "long"), ("short", "long")]


def test_a_round_judges_while_it_still_writes() -> None:
    """The group's second completion is written only once the first was judged."""
    judged = asyncio.Event()
    engine = ScriptedJudge("judge-0", lambda text: (judged.set(), "<score>1</score>")[1])

    class Writer(Engine):
        name = "rollout-0"

        async def wait_ready(self, *, timeout_s: float) -> None:
            pass

        async def complete(
            self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
        ) -> Completion:
            if seed != completion_seed(0, 0, 0):
                await judged.wait()
            return completion(str(seed))

        async def load_weights(self, folder: Path, version: int) -> None:
            pass

        async def close(self) -> None:
            pass

    scoring = Scoring([make_scorer(make_judge(), [engine])])
    rules = Rules(group_size=2, seed=0, reward_weights=(1.0,))
    draw = Draw(0, Prompt(0, "What?"), (1,))
    draws = DrawSource(
        [draw.prompt], seed=None, encode=lambda prompt: (1,), max_prompt_tokens=1
    )
    controller = Controller(
        engines=[Writer()], scoring=scoring, draws=draws, rules=rules, peers=Peers()
    )
    group = run(controller.group(draw, step=0)).group
    assert [score.value for (score,) in group.scores_GR] == [0.1, 0.1]


def test_what_cannot_be_read_is_asked_again_then_masked_and_counted() -> None:
    meter = JudgeMeter()
    engine = ScriptedJudge(
        "judge-0", lambda text: "I would say 7." if "bad" in text else "<score>5</score>"
    )
    scorer = make_scorer(make_judge(retries=2), [engine], meter)
    rows = run(scores_of(scorer, ["good", "bad"]))
    assert values(rows) == [0.5, None]
    assert rows[1].problem == "judge test: no verdict"
    bad = [(seed, again) for text, seed, again in engine.asked if "bad" in text]
    assert [again for _, again in bad] == [False, True, True] and len(
        {seed for seed, _ in bad}
    ) == 3
    metrics = meter.metrics(meter.take())
    assert metrics["ycore/judge/calls"] == 4 and metrics["ycore/judge/parse_failures"] == 3
    assert metrics["ycore/judge/tokens"] == 12 and metrics["ycore/judge/latency_s"] >= 0
    assert set(meter.take()) == {0}, "each step begins anew"


def test_the_same_run_asks_the_same_again() -> None:
    engines = [ScriptedJudge("judge-0", by_length) for _ in range(2)]
    for engine in engines:
        run(scores_of(make_scorer(make_judge(fence=True), [engine]), ["one", "two"]))
    assert engines[0].asked == engines[1].asked


def test_a_refused_question_is_masked_and_a_dead_engine_ends_the_round() -> None:
    class Refusing(ScriptedJudge):
        async def ask(
            self, judge: Judge, question: Question, *, seed: int, again: bool = False
        ) -> Reply:
            raise QuestionRefused("too long")

    class Dead(ScriptedJudge):
        async def ask(
            self, judge: Judge, question: Question, *, seed: int, again: bool = False
        ) -> Reply:
            raise EngineError("judge-0: gone")

    rows = run(scores_of(make_scorer(make_judge(), [Refusing("judge-0", str)]), ["a"]))
    assert rows == [Score(None, problem="judge test: too long")]
    with pytest.raises(EngineError, match="judge-0: gone"):
        run(scores_of(make_scorer(make_judge(), [Dead("judge-0", str)]), ["a", "b"]))


def test_calls_take_turns_over_the_slots() -> None:
    engines = [ScriptedJudge(f"judge-{slot}", by_length) for slot in range(2)]
    run(scores_of(make_scorer(make_judge(), engines), ["a", "b", "c", "d"], slots=2))
    assert [len(engine.asked) for engine in engines] == [2, 2]


def answers_in(text: str) -> tuple[str, str]:
    first, _, second = text.partition("First answer:\n")[2].partition("\n\nSecond answer:\n")
    return first, second.partition("\n\nEnd with")[0]


def longer_is_better(text: str) -> str:
    first, second = answers_in(text)
    return f"<score>{10 if len(first) > len(second) else 0 if len(first) < len(second) else 5}</score>"


def test_siblings_are_compared_in_both_orders() -> None:
    meter = JudgeMeter()
    engine = ScriptedJudge("judge-0", longer_is_better)
    rows = run(
        scores_of(
            make_scorer(make_judge(mode="pairwise", opponents=3), [engine], meter),
            ["aa", "a", "aaa"],
        )
    )
    assert values(rows) == [0.5, 0.0, 1.0]
    assert (
        len(engine.asked) == 6
        and len({frozenset(answers_in(text)) for text, _, _ in engine.asked}) == 3
    )
    assert meter.metrics(meter.take())["ycore/judge/position_bias"] == 0


def test_a_judge_that_follows_the_place_prefers_nobody_and_is_counted() -> None:
    meter = JudgeMeter()
    engine = ScriptedJudge("judge-0", lambda text: "<score>9</score>")
    rows = run(
        scores_of(make_scorer(make_judge(mode="pairwise"), [engine], meter), ["a", "b", "c"])
    )
    assert values(rows) == pytest.approx([0.5, 0.5, 0.5])
    assert meter.metrics(meter.take())["ycore/judge/position_bias"] == 1


def test_a_pair_that_cannot_be_read_costs_that_pair_only() -> None:
    engine = ScriptedJudge(
        "judge-0", lambda text: "hm" if "aaa" in answers_in(text) else longer_is_better(text)
    )
    rows = run(
        scores_of(
            make_scorer(make_judge(mode="pairwise", opponents=3), [engine]), ["aa", "a", "aaa"]
        )
    )
    assert values(rows) == [1.0, 0.0, None]
    assert rows[2].problem == "judge test: no pair was judged"


def test_a_reference_is_the_other_of_each_pair() -> None:
    engine = ScriptedJudge("judge-0", longer_is_better)
    judge = make_judge(mode="pairwise", against="reference")
    assert judge.columns == {"answer"}
    rows = run(scores_of(make_scorer(judge, [engine]), ["aaa", "a"], columns={"answer": "aa"}))
    assert values(rows) == [1.0, 0.0]
    rows = run(scores_of(make_scorer(judge, [engine]), ["aaa"], columns={"answer": None}))
    assert rows == [Score(None, problem="judge test: the row has no reference")]


def test_a_group_is_ranked_in_several_orders() -> None:
    def rank(text: str) -> str:
        answers = [
            part.partition("\n")[2].strip()
            for part in text.partition("End with")[0].split("Answer ")[1:]
        ]
        order = sorted(range(len(answers)), key=lambda index: -len(answers[index]))
        return f"<ranking>{', '.join(str(index + 1) for index in order)}</ranking>"

    engine = ScriptedJudge("judge-0", rank)
    judge = make_judge(mode="groupwise", verdict={"kind": "ranking"}, orders=3, scale=[0, 2])
    rows = run(scores_of(make_scorer(judge, [engine]), ["aa", "a", "aaa"]))
    assert values(rows) == [1.0, 0.0, 2.0]
    assert len({text for text, _, _ in engine.asked}) == 3
    silent = ScriptedJudge("judge-0", lambda text: "")
    assert values(run(scores_of(make_scorer(judge, [silent]), ["a", "b"]))) == [None, None]


def test_sources_keep_the_order_of_the_config() -> None:
    class Fixed:
        def __init__(self, value: float) -> None:
            self._value = value

        async def start(self, *, timeout_s: float) -> None:
            pass

        async def score(self, writing: PendingGroup) -> list[Score]:
            return [Score(self._value)] * len(writing)

        async def close(self) -> None:
            pass

    scoring = Scoring([Fixed(0), Fixed(1), Fixed(2), Fixed(3)])
    assert [[score.value for score in row] for row in run(scores_of(scoring, ["a", "b"]))] == [
        [0, 1, 2, 3]
    ] * 2


def test_metrics_of_all_judges_and_ranks_are_added_up() -> None:
    judges, reward_models = JudgeMeter(), RewardModelMeter()
    scoring = Scoring([], [judges, reward_models])
    judges.calls, judges.seconds, judges.parse_failures = 4, 2.0, 1
    reward_models.calls, reward_models.seconds, reward_models.tokens = 2, 1.0, 30
    metrics = collect(scoring.meters, lambda sums: [2 * value for value in sums])
    assert metrics == {
        "ycore/judge/calls": 8,
        "ycore/judge/parse_failures": 2,
        "ycore/judge/latency_s": 0.5,
        "ycore/judge/tokens": 0,
        "ycore/reward_model/calls": 4,
        "ycore/reward_model/latency_s": 0.5,
        "ycore/reward_model/tokens": 60,
    }
    assert collect([], list) == {}


def test_a_reward_model_scores_each_completion() -> None:
    class Scripted:
        name = "reward-model-0"

        async def wait_ready(self, *, timeout_s: float) -> None:
            pass

        async def logit(self, token_ids: Sequence[int]) -> float:
            return float("nan") if 9 in token_ids else float(sum(token_ids))

        async def close(self) -> None:
            pass

    meter = RewardModelMeter()
    scorer = RewardModelScorer(
        "rm",
        RewardModel(model="x", center=10, multiplier=0.5, clip=(-2, 2)),
        [EnsembleMember([Scripted()], lambda prompt, completion: json.loads(completion), 3)],
        meter=meter,
    )
    rows = run(scores_of(scorer, ["[10, 1]", "[1]", "[90]", "[9]", "[1, 2, 3, 4]"]))
    assert values(rows) == [0.5, -2.0, 2.0, None, None]
    assert rows[4].problem == "reward model rm: longer than its context"
    assert meter.calls == 4 and meter.tokens == 5
    of_two = RewardModelScorer(
        "two",
        RewardModel(model="x+y", combine="lower", k=0.5),
        [
            EnsembleMember([Scripted()], lambda _, text, times=times: [len(text) * times], 9)
            for times in (1, 3)
        ],
        meter=meter,
    )
    assert values(run(scores_of(of_two, ["ab", "abc"]))) == [3.0, None], (
        "logits 2 and 6; the second has a NaN"
    )


def test_a_teacher_at_an_address_needs_no_slot_and_no_probabilities_of_the_policy(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with teacher_at(model) as address:
        spec = RewardConfig(
            reward="teacher:big", args={"base_url": address, "max_model_len": 4}
        )
        config = DistillConfig(
            model="m", dataset="d", output="o", rewards=[spec], algorithm="distill"
        )
        scoring = build_scoring(config, RunFolder(tmp_path), [], policy=NO_POLICY)

        async def work(*token_ids: int) -> list[list[Score]]:
            tasks = [
                asyncio.create_task(
                    asyncio.sleep(0, Completion(token_ids, None, "", "stop", 0))
                )
            ]
            return await scoring.score(
                PendingGroup(Draw(0, Prompt(0, "q", {}), (9,)), tasks, 0, Slots(1))
            )

        logprobs = (logprob_of(5), logprob_of(6))
        assert asyncio.run(work(5, 6)) == [
            [Score(pytest.approx(sum(logprobs) / 2), logprobs=logprobs)]
        ]
        assert asyncio.run(work(5, 6, 7)) == [
            [Score(None, problem="teacher big: longer than its context")]
        ]


def test_a_teacher_in_the_trainer_only_says_which_rows_it_has(tmp_path: Path) -> None:
    spec = RewardConfig(reward="teacher:t", args={"where": {"subject": "sums"}})
    exact = DistillSettings(divergence="js")
    config = DistillConfig(
        model="m", dataset="d", output="o", rewards=[spec], algorithm="distill", distill=exact
    )
    scoring = build_scoring(config, RunFolder(tmp_path), [], policy=NO_POLICY)
    assert scoring.meters == []

    async def work(columns: dict[str, Any]) -> list[list[Score]]:
        tasks = [asyncio.create_task(asyncio.sleep(0, Completion((5,), None, "", "stop", 0)))]
        return await scoring.score(
            PendingGroup(Draw(0, Prompt(0, "q", columns), (9,)), tasks, 0, Slots(1))
        )

    assert asyncio.run(work({"subject": "sums"})) == [[Score(0.0)]]
    assert asyncio.run(work({"subject": "verse"})) == [[Score(None)]]


def test_the_policy_is_asked_what_the_served_judge_is_asked() -> None:
    """The judge's two questions about a pair and the policy's are the same words, but for order, code and marks."""
    judge, engine = (
        make_judge(mode="pairwise", fence=True),
        ScriptedJudge("judge-0", lambda text: "<score>5</score>"),
    )
    pair = {"chosen": "four", "rejected": "five"}
    run(scores_of(make_scorer(judge, [engine]), [*pair.values()], columns=pair))
    judge_questions = {
        re.sub(r"(text|score)-[0-9a-f]+", r"\1-X", text) for text, *_ in engine.asked
    }
    policy_questions = {
        re.sub(r"(text|score)-[0-9a-f]+", r"\1-X", question.content[-1]["content"])
        for seed in range(9)
        for question in Questions([Prompt(0, "What?", pair)], Questioner(judge), seed)
    }
    assert len(judge_questions) == 2 and policy_questions == judge_questions


def test_an_unreadable_verdict_of_the_policy_is_nothing_and_counted() -> None:
    judge = make_judge(mode="pairwise")
    (question,) = Questions(
        [Prompt(0, "What?", {"chosen": "four", "rejected": "five"})], Questioner(judge), 0
    )
    tag, chosen_first = (
        f"score-{verdict_code(question.columns[KEY])}",
        shows_chosen_first(question.columns[KEY]),
    )
    right, wrong = (
        f"So: <{tag}>{number}</{tag}>" for number in ((9, 1) if chosen_first else (1, 9))
    )
    meter = JudgeMeter()
    scorer = AgreementScorer(judge, meter=meter)
    rows = run(
        scores_of(
            scorer, [right, wrong, "four", f"{right} {wrong}"], columns=dict(question.columns)
        )
    )
    assert values(rows) == [1.0, 0.0, 0.0, 0.0]
    assert collect([meter], list)["ycore/judge/parse_failures"] == 2


def test_a_teacher_scores_the_tokens_of_its_own_rows() -> None:
    class Scripted:
        async def logprobs_of(
            self, context_ids: Sequence[int], target_ids: Sequence[int]
        ) -> tuple[float, ...]:
            calls.append((list(context_ids), list(target_ids)))
            return tuple(-1.0 - 0.5 * place for place in range(len(target_ids)))

    calls: list[Any] = []
    ours, theirs = (
        Turn(by_policy=by_policy, num_tokens=1, messages=()) for by_policy in (True, False)
    )
    prompt = Turn(by_policy=False, num_tokens=2, messages=(), starts_new_sequence=True)
    completions = [
        Completion((5, 6), (-2.0, -1.0), "", "stop", 0),
        Completion(
            (5, 6, 7), (-2.0, 0.0, -2.5), "", "stop", 0, (ours, theirs, ours)
        ),  # an environment's token
        Completion((5, 6, 7, 8), (-1.0,) * 4, "", "stop", 0),
        Completion(
            (5, 3, 4, 6), (-2.0, 0.0, 0.0, -2.0), "", "stop", 0, (ours, prompt, ours)
        ),  # two sequences
    ]
    meter = TeacherMeter()

    def scored(columns: dict[str, Any]) -> list[Score]:
        scorer = TeacherScorer(
            "t",
            Teacher(model="x", where={"subject": "sums"}),
            [Scripted()],
            max_model_len=7,
            meter=meter,
        )

        async def work() -> list[Score]:
            tasks = [asyncio.create_task(asyncio.sleep(0, written)) for written in completions]
            draw = Draw(0, Prompt(0, "q", columns), (9, 8, 7))
            return await scorer.score(PendingGroup(draw, tasks, 0, Slots(1)))

        return asyncio.run(work())

    first, second, third, fourth = scored({"subject": "sums"})
    sequences = [([9, 8, 7], [5]), ([3, 4], [6])]
    assert calls == [([9, 8, 7], [5, 6]), ([9, 8, 7], [5, 6, 7]), *sequences]
    assert fourth == Score(pytest.approx(1.0), logprobs=(-1.0, 0.0, 0.0, -1.0))
    assert first == Score(pytest.approx((1.0 - 0.5) / 2), logprobs=(-1.0, -1.5))
    assert second == Score(pytest.approx((1.0 + 0.5) / 2), logprobs=(-1.0, -1.5, -2.0))
    assert third == Score(None, problem="teacher t: longer than its context")
    assert (meter.calls, meter.tokens) == (3, 18)
    assert scored({"subject": "verse"}) == [Score(None)] * 4 and len(calls) == 4
