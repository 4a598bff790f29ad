"""RLPR's reward in the controller, with the tiny model's own probabilities as transformers gives them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_tiny_model
from ycore.config.schema import RewardConfig
from ycore.engine import SamplingParams
from ycore.engine.transformers_engine import TransformersEngine
from ycore.errors import RewardError
from ycore.placement.slots import Slots
from ycore.rewards.builtin import Reference
from ycore.scoring.model_scorers import ReferenceScorer
from ycore.scoring.scoring import PendingGroup, Policy
from ycore.types import Completion, Draw, Prompt, Score

TEXTS = ["<think>a</think> <answer>9</answer>", "it is 8"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ), AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def scored(
    parts: tuple[Any, Any], *, answer: str = "#### 42", longest: int = 64, **settings: Any
) -> list[Score]:
    model, tokenizer = parts
    engine = TransformersEngine(model, tokenizer, SamplingParams(max_tokens=4))
    scorer = ReferenceScorer(Reference(**settings), Policy([engine], tokenizer, longest))

    async def written(text: str) -> Completion:
        return Completion((1,), None, text, "stop", 0)

    async def work() -> list[Score]:
        tasks = [asyncio.create_task(written(text)) for text in TEXTS]
        draw = Draw(0, Prompt(0, "q", {"answer": answer}), (9, 8))
        return await scorer.score(PendingGroup(draw, tasks, 0, Slots(1)))

    return asyncio.run(work())


def probability(parts: tuple[Any, Any], text: str) -> float:
    """By definition: the mean of the answer's tokens' probabilities, one forward each."""
    model, tokenizer = parts
    context, total, answer = [9, 8, *encode(tokenizer, text)], 0.0, encode(tokenizer, "42")
    for token in answer:
        with torch.no_grad():
            total += model(torch.tensor([context])).logits[0, -1].softmax(-1)[token].item()
        context.append(token)
    return total / len(answer)


def test_the_answer_stands_where_the_completion_had_its_own(parts: tuple[Any, Any]) -> None:
    scores = scored(parts, debias=False)
    wanted = [
        probability(parts, "<think>a</think> <answer>"),
        probability(parts, "it is 8\nAnswer: "),
    ]
    assert [score.value for score in scores] == pytest.approx(wanted, rel=1e-4)


def test_what_the_policy_knew_without_reasoning_is_taken_off(parts: tuple[Any, Any]) -> None:
    bare = probability(parts, "")
    wanted = [
        max(0.0, score.value - bare)
        for score in scored(parts, debias=False)
        if score.value is not None
    ]
    assert [score.value for score in scored(parts)] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_a_row_without_an_answer_is_not_scored(parts: tuple[Any, Any]) -> None:
    assert scored(parts, answer="") == [Score(None), Score(None)]


def test_what_does_not_fit_is_masked_with_its_reason(parts: tuple[Any, Any]) -> None:
    first, second = scored(parts, longest=22)
    assert (
        first.value is None
        and first.problem == "reference_probability: longer than the engine's context"
    )
    assert second.value is not None


def check_rows(columns: tuple[str, ...], **arguments: Any) -> None:
    spec = RewardConfig(reward="reference_probability", args=arguments)
    prompts: Any = SimpleNamespace(columns=columns)
    config: Any = None  # it is not read
    ReferenceScorer.check_rows(spec, config, prompts)


def test_it_is_checked_before_the_run() -> None:
    check_rows(("answer",), debias=False)
    with pytest.raises(RewardError, match=r"needs the column 'answer', .* --answer-column"):
        check_rows(("solution",))
    with pytest.raises(RewardError, match="no key debiased; did you mean 'debias'"):
        check_rows(("answer",), debiased=True)
