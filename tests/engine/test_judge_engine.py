"""Asking judges: what is sent, what comes back, and which failures are asked again. An address of the test's own."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from ycore.config.schema import RewardConfig
from ycore.engine import judge_engine
from ycore.engine.judge_engine import (
    QuestionRefused,
    RemoteJudge,
    RemoteTeacher,
    VllmJudge,
    backoff_s,
    build_chat_request,
    parse_reply,
    prompt_logprobs,
)
from ycore.engine.server import BadRequest
from ycore.errors import EngineError, RewardError
from ycore.foreign import ForeignRefused
from ycore.judge.declaration import Judge, Teacher, judge_of
from ycore.judge.verdict import Reply, ReplyToken

T = TypeVar("T")
QUESTION = [{"role": "user", "content": "Is it right?"}]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_engine, "TRIES", 4)
    monkeypatch.setattr(judge_engine, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(judge_engine, "LONGEST_WAIT_S", 0.002)


class Unread(httpx.MockTransport):
    """Gives the handler's response as a server does: nothing of it is read yet."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=httpx.ByteStream(response.content),
        )


def make_judge(**declared: Any) -> Judge:
    args = {
        "base_url": "http://judges.test/v1",
        "model": "big",
        "verdict": {"kind": "score"},
        **declared,
    }
    return judge_of(RewardConfig(reward="judge:test", args=args))


def answer(text: str = "<score>7</score>", **choice: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "stop", **choice}],
        "usage": {"total_tokens": 12},
    }


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


def remote(judge: Judge, handle: Callable[[httpx.Request], httpx.Response]) -> RemoteJudge:
    transport = Unread(handle)
    return RemoteJudge("test", judge, request_timeout_s=5, transport=transport)


def ask(judge: Judge, handle: Callable[[httpx.Request], httpx.Response]) -> Reply:
    async def work() -> Reply:
        engine = remote(judge, handle)
        try:
            return await engine.ask(judge, QUESTION, seed=5)
        finally:
            await engine.close()

    return run(work())


def test_an_address_is_asked_as_openai_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=answer())

    reply = ask(make_judge(api_key_env="MY_KEY", max_tokens=9), handle)
    assert (reply.text, reply.num_tokens, reply.tokens) == ("<score>7</score>", 12, None)
    assert str(seen[0].url) == "http://judges.test/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert json.loads(seen[0].content) == {
        "model": "big", "messages": QUESTION, "seed": 5, "temperature": 0.0, "max_tokens": 9,
    }  # fmt: skip


def test_without_its_key_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(RewardError, match=r"MY_KEY \(api_key_env\) is not set"):
        remote(make_judge(api_key_env="MY_KEY"), lambda request: httpx.Response(200))


@pytest.mark.parametrize("status", [429, 500, 503, None])
def test_what_may_pass_is_asked_again(status: int | None) -> None:
    calls = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        if calls == 3:
            return httpx.Response(200, json=answer())
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status)

    assert ask(make_judge(), handle).text == "<score>7</score>"
    assert calls == 3


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_will_not_pass_ends_at_once(status: int) -> None:
    calls = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(status, text="no such\nkey")

    with pytest.raises(
        EngineError, match=f"answered {status}: no such key; check base_url, model and key"
    ):
        ask(make_judge(), handle)
    assert calls == 1


def answers_of(
    handle: Callable[[httpx.Request], httpx.Response], questions: int, *, at_once: bool = False
) -> list[str]:
    """The verdict on each question, or why it has none."""

    async def work() -> list[str]:
        judge = make_judge(concurrency=max(1, questions))
        engine = remote(judge, handle)

        async def verdict(number: int) -> str:
            try:
                return (await engine.ask(judge, QUESTION, seed=number)).text
            except QuestionRefused as refusal:
                return str(refusal)

        try:
            if at_once:
                return await asyncio.gather(*map(verdict, range(questions)))
            return [await verdict(number) for number in range(questions)]
        finally:
            await engine.close()

    return run(work())


@pytest.mark.parametrize(
    ("status", "why"), [(400, "refused the question"), (500, "did not answer")]
)
def test_questions_refused_cost_their_verdicts_and_never_end_the_run(
    status: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = answers_of(lambda request: httpx.Response(status, text="too\nlong"), 40)
    assert seen == [f"the address {why}"] * 40
    assert f"{status}" in capsys.readouterr().out


def test_a_local_judge_that_refuses_each_question_never_ends_the_run() -> None:
    class Refusing(VllmJudge):
        async def request(self, *_: Any, **__: Any) -> Any:
            raise BadRequest("too long")

    async def work() -> None:
        engine = Refusing("judge-0", Path("no.sock"), request_timeout_s=5)
        for _ in range(40):
            with pytest.raises(QuestionRefused, match="the engine refused the question"):
                await engine.ask(make_judge(), QUESTION, seed=0)

    run(work())


def test_while_the_address_is_away_the_run_waits_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = set[str]()
    calls = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        if calls <= 8:
            return httpx.Response(503)
        return httpx.Response(200, json=answer())

    @contextmanager
    def working(words: str) -> Iterator[None]:
        said.add(words)
        yield

    monkeypatch.setattr(judge_engine, "working", working)
    assert answers_of(handle, 1) == ["<score>7</score>"]
    assert said == {"waiting for test: http://judges.test/v1, status 503"}


def test_an_address_that_stays_away_ends_the_run_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge_engine, "PATIENCE_S", 0.05)
    rule = r"test: http://judges.test/v1 has not answered for \d+ s \(status 503\); .*--resume"
    with pytest.raises(EngineError, match=rule):
        answers_of(lambda request: httpx.Response(503), 1)


def test_a_question_that_alone_has_no_answer_costs_its_verdict() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["seed"] == 0:
            return httpx.Response(503)
        return httpx.Response(200, json=answer())

    seen = answers_of(handle, 3, at_once=True)
    assert seen == ["the address did not answer", *["<score>7</score>"] * 2]


def test_a_wait_grows_and_is_no_shorter_than_the_address_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge_engine, "FIRST_WAIT_S", 1)
    monkeypatch.setattr(judge_engine, "LONGEST_WAIT_S", 30)
    assert all(0.5 * 2**attempt <= backoff_s(attempt) <= 2**attempt for attempt in range(5))
    assert backoff_s(0, at_least_s=7) == 7 and backoff_s(9) == backoff_s(0, at_least_s=99) == 30


def test_no_more_are_in_flight_than_the_judge_allows() -> None:
    async def work() -> int:
        now = most = 0

        async def handle(request: httpx.Request) -> httpx.Response:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return httpx.Response(200, json=answer())

        judge = make_judge(concurrency=3)
        engine = RemoteJudge("test", judge, request_timeout_s=5, transport=Unread(handle))
        await asyncio.gather(*(engine.ask(judge, QUESTION, seed=n) for n in range(12)))
        await engine.close()
        return most

    assert run(work()) == 3


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        7,
        "x",
        None,
        {"error": {"message": "no"}},
        {"choices": []},
        {"choices": {}},
        {"choices": [{"message": {}}]},
        {"choices": [7]},
        {"choices": [{"message": "x"}]},
        answer(text=["7"]),  # type: ignore[arg-type]
        answer(text=7),  # type: ignore[arg-type]
        answer(logprobs=[1]),
        answer(logprobs={"content": 7}),
        answer(logprobs={"content": [{"token": 7}]}),
        answer(logprobs={"content": [{"token": "7", "top_logprobs": 7}]}),
        answer(
            logprobs={
                "content": [{"token": "7", "top_logprobs": [{"token": "7", "logprob": "many"}]}]
            }
        ),
        answer(
            logprobs={
                "content": [
                    {"token": "7", "top_logprobs": [{"token": "7", "logprob": 10**400}]}
                ]
            }
        ),
        answer(
            logprobs={
                "content": [
                    {"token": "7", "top_logprobs": [{"token": "7", "logprob": math.nan}]}
                ]
            }
        ),
        {**answer(), "usage": [1]},
    ],
)
def test_an_answer_that_is_no_completion_costs_its_question(body: Any) -> None:
    with pytest.raises(ForeignRefused, match="no chat completion") as problem:
        parse_reply(body)
    assert len(str(problem.value)) < 120
    data = json.dumps(body).encode()
    with pytest.raises(QuestionRefused, match="its answer cannot be read"):
        ask(make_judge(), lambda request: httpx.Response(200, content=data))


@pytest.mark.parametrize("usage", ["many", None, math.nan, math.inf, -5, 10**400, [], True])
def test_an_odd_usage_costs_no_verdict(usage: Any) -> None:
    assert parse_reply({**answer(), "usage": {"total_tokens": usage}}).num_tokens == 0
    assert parse_reply({**answer(), "usage": {"total_tokens": 12.0}}).num_tokens == 12


def test_after_a_right_answer_no_status_ends_the_run() -> None:
    async def work() -> None:
        statuses = iter([200, 404, 301])
        engine = remote(
            make_judge(), lambda request: httpx.Response(next(statuses), json=answer())
        )
        judge = make_judge()
        assert (await engine.ask(judge, QUESTION, seed=0)).text == "<score>7</score>"
        for _ in range(2):
            with pytest.raises(QuestionRefused, match="the address refused the question"):
                await engine.ask(judge, QUESTION, seed=0)
        await engine.close()

    run(work())


def test_labels_ask_for_every_tokens_probabilities() -> None:
    judge = make_judge(verdict={"kind": "labels", "labels": {"yes": 1, "no": 0}})
    body = build_chat_request(judge, QUESTION, model="big", seed=0, again=False)
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (67, True, 20)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["code", "label"] and schema["additionalProperties"] is False
    assert schema["properties"]["code"] == {"type": "string", "maxLength": 20}, (
        "the judge writes the code itself"
    )
    assert schema["properties"]["label"] == {"type": "string", "enum": ["yes", "no"]}
    top = [
        {"token": "yes", "logprob": -0.1},
        {"token": "no", "logprob": -2.0},
        {"token": "yes", "logprob": -9.0},
    ]
    reply = parse_reply(
        answer(
            "yes", logprobs={"content": [{"token": "yes", "top_logprobs": top}, {"token": "!"}]}
        )
    )
    assert reply.tokens == [ReplyToken("yes", {"yes": -0.1, "no": -2.0}), ReplyToken("!", {})]


def test_json_verdicts_go_with_their_schema() -> None:
    judge = make_judge(verdict={"kind": "json", "reason": True, "min": 1, "max": 5})
    body = build_chat_request(judge, QUESTION, model="big", seed=0, again=True)
    schema = body["response_format"]["json_schema"]["schema"]
    assert (
        schema["required"] == ["reason", "score", "code"]
        and schema["additionalProperties"] is False
    )
    assert schema["properties"]["code"] == {"type": "string", "maxLength": 20}, (
        "the judge writes the code, not the schema"
    )
    assert schema["properties"]["score"] == {"type": "number", "minimum": 1.0, "maximum": 5.0}
    assert body["temperature"] == 0.7, "asked again at 0, it would write the same"


def taught(handle: Callable[[httpx.Request], httpx.Response]) -> tuple[float, ...]:
    async def work() -> tuple[float, ...]:
        teacher = Teacher(model="big", base_url="http://teachers.test/v1")
        engine = RemoteTeacher(
            "teacher:big", teacher, request_timeout_s=5, transport=Unread(handle)
        )
        try:
            return await engine.logprobs_of([5, 6], [7, 8])
        finally:
            await engine.close()

    return run(work())


def test_a_teacher_at_an_address_says_how_likely_the_given_tokens_are() -> None:
    requests: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append((request.url.path, json.loads(request.content)))
        logprobs = [
            None,
            {"6": {"logprob": -9}},
            {"7": {"logprob": -1.5}, "4": {"logprob": -0.1}},
            {"8": {"logprob": -2}},
        ]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": logprobs}]})

    assert taught(handle) == (-1.5, -2)
    body = {
        "model": "big",
        "prompt": [5, 6, 7, 8],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    assert requests == [("/v1/completions", body)]


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"prompt_logprobs": None},
        {"prompt_logprobs": [None, {}, {}, {}]},
        *(
            {"prompt_logprobs": [None, {}, {"7": {"logprob": value}}, {"8": {"logprob": -1}}]}
            for value in ("-1", None, True, 5.0, math.inf, 10**400)
        ),
    ],
)
def test_an_address_without_a_prompts_probabilities_is_no_teacher(choice: Any) -> None:
    with pytest.raises(QuestionRefused, match="its answer cannot be read"):
        data = json.dumps({"choices": [choice]}).encode()
        taught(lambda request: httpx.Response(200, content=data))
    with pytest.raises(ForeignRefused, match=r"a prompt's tokens .*is a vLLM server"):
        prompt_logprobs({"choices": [choice]}, [5, 6], [7, 8])
    with pytest.raises(QuestionRefused):
        taught(lambda request: httpx.Response(400, text="too long"))
