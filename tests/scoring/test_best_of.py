"""Best-of-n: a server's middleware over a scripted app, and the figures of an evaluation (`evaluation/test_held_out`)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ycore.errors import RewardError
from ycore.scoring.best_of import MIDDLEWARE, BestOf, best_of_environment

pytest.importorskip("starlette")

TEXTS = ["it is 7", "no idea", "it is 7 then", "it is 8"]


class ScriptedServer:
    """Answers as vLLM's server does, with as many of the texts as are asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        request = Request(scope, receive)
        if request.url.path == "/health":
            await JSONResponse("well")(scope, receive, send)
            return
        body = await request.json()
        self.asked.append({**body, "key": request.headers.get("authorization")})
        status = 404 if body["model"] == "another" else 200
        chat = request.url.path.endswith("chat/completions")
        prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [""]
        texts = [text for _ in prompts for text in TEXTS[: body.get("n", 1)]]
        choices = [
            {"index": index}
            | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
            for index, text in enumerate(texts)
        ]
        answer = {"choices": choices, "usage": {"completion_tokens": 12}}
        await JSONResponse(answer, status_code=status)(scope, receive, send)


async def _post(
    monkeypatch: pytest.MonkeyPatch, path: str, chooser: str = "similarity", **body: Any
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    for name, value in best_of_environment(4, chooser).items():
        monkeypatch.setenv(name, value)
    scripted = ScriptedServer()
    transport = httpx.ASGITransport(BestOf(scripted))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        assert (await client.get("/health")).json() == "well"
        answer = await client.post(
            path, json={"model": "m", **body}, headers={"Authorization": "Bearer k"}
        )
    return answer.status_code, answer.json(), scripted.asked


def post(*args: Any, **body: Any) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    return asyncio.run(_post(*args, **body))


TURNS = [{"role": "user", "content": "3 + 4?"}]


def test_the_answer_most_like_the_others_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the F1 of words: `it is 7` has 6/7 and 2/3 with two of the others, more than each of them."""
    status, answer, requests = post(monkeypatch, "/v1/chat/completions", messages=TURNS)
    assert status == 200 and answer["usage"] == {"completion_tokens": 12}
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "it is 7"}}
    ]
    assert requests == [{"model": "m", "messages": TURNS, "n": 4, "key": "Bearer k"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_reward_of_ones_own_chooses(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def last(prompts, completions):\n"
        "    texts = [x if isinstance(x, str) else x[-1]['content'] for x in completions]\n"
        "    assert len(set(map(str, prompts))) == 1 and '3 + 4?' in str(prompts[0])\n"
        "    return [None if text == 'no idea' else float(text[6]) for text in texts]\n"
    )
    body = {"messages": TURNS} if "chat" in path else {"prompt": "3 + 4?"}
    _, answer, _ = post(monkeypatch, path, f"{tmp_path}/rewards.py:last", **body)
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and "it is 8" in json.dumps(choice)


def test_each_of_several_prompts_gets_its_best_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def asked(prompts, completions):\n"
        "    return [float('nan') if text == 'no idea' else text.count(prompt)\n"
        "            for prompt, text in zip(prompts, completions)]\n"
    )
    reward = f"{tmp_path}/rewards.py:asked"
    _, answer, _ = post(monkeypatch, "/v1/completions", reward, prompt=["8", "then"])
    assert answer["choices"] == [
        {"index": 0, "text": "it is 8"},
        {"index": 1, "text": "it is 7 then"},
    ]


def test_a_reward_that_fails_is_named_in_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text("def fails(completions):\n    return [1 / 0]\n")
    status, answer, _ = post(
        monkeypatch, "/v1/completions", f"{tmp_path}/rewards.py:fails", prompt="3 + 4?"
    )
    assert status == 500 and "ZeroDivisionError" in answer["error"]["message"]


@pytest.mark.parametrize("more", [{"stream": True}, {"n": 2}])
def test_what_it_cannot_do_is_refused(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer, requests = post(monkeypatch, "/v1/chat/completions", messages=TURNS, **more)
    assert status == 400 and not requests
    assert "best of 4 answers" in answer["error"]["message"]
    assert "leave stream and n out" in answer["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_body_that_is_no_json_object_is_refused(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in best_of_environment(4, "similarity").items():
        monkeypatch.setenv(name, value)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(BestOf(ScriptedServer()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/v1/completions", content=content)

    assert asyncio.run(send()).status_code == 400


def test_the_servers_own_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer, _ = post(
        monkeypatch, "/v1/chat/completions", messages=TURNS, model="another"
    )
    assert status == 404 and len(answer["choices"]) == 4


def test_a_reward_that_needs_more_than_answers_is_refused() -> None:
    needs = "'exact_answer' needs answer, .* prompts and completions alone; take --best-by"
    with pytest.raises(RewardError, match=needs):
        best_of_environment(4, "exact_answer")
    assert f"{BestOf.__module__}.{BestOf.__qualname__}" == MIDDLEWARE
