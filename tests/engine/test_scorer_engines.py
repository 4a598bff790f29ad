"""Two real vLLM servers on CPU, planned as a run plans them: a judge's, and a reward model's, against transformers."""

import asyncio
import json
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.tiny_model import write_tiny_model
from ycore.config.schema import RunConfig
from ycore.engine.judge_engine import QuestionRefused, VllmJudge
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmRewardModel
from ycore.judge.declaration import judge_of
from ycore.judge.question import Questioner, special_tokens
from ycore.judge.verdict import Reply, Unreadable, read_value
from ycore.launch.engines import plan_engines
from ycore.launch.layout import ONE_RANK, Machine, Site
from ycore.run.files import RunFolder
from ycore.scoring.model_scorers import reward_model_encoder
from ycore.types import Prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]
T = TypeVar("T")
LABELS = {"kind": "labels", "labels": {"a": 1.0, "b": 0.0}, "min_mass": 0.001}
PROMPT = Prompt(0, [{"role": "user", "content": "What is 2 + 2?"}])
TEXTS = ["4", "It is four.", "<|end|>4", "I do not know that at all, sorry", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def classifier(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same decoder under a random head of one label."""
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(
            folder
        )
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def config_of(model: Path, classifier: Path) -> RunConfig:
    judge = {"reward": "judge:test", "args": {"verdict": LABELS}}
    rewards: list[Any] = [judge, {"reward": f"rm:{classifier}"}]
    return RunConfig(
        model=str(model),
        dataset="task:addition",
        rewards=rewards,
        output="unused",
        dtype="float32",
    )


@pytest.fixture(scope="module")
def servers(
    model: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any
) -> Iterator[RunFolder]:
    """Start a run's judge and reward model, and yield its folder; its rollout engine is planned and not started."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    site = Site(folder, ONE_RANK, Machine((min(os.sched_getaffinity(0)),), ()))
    config = config_of(model, classifier)
    plans = plan_engines(config, site, fetch=Path).served[1:]
    planned = [engine for plan in plans for engine in plan.engines]
    assert [(engine.name, engine.role) for engine in planned] == [
        ("judge-0", "judge"),
        ("reward-model-0", "reward_model"),
    ]
    with serve(folder, planned):
        yield folder


def judge_engine(folder: RunFolder) -> VllmJudge:
    return VllmJudge("judge-0", folder.socket("judge-0"), request_timeout_s=60)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


@pytest.mark.verify
def test_a_reward_model_gives_transformers_logits(servers: RunFolder, classifier: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(classifier)
    encode = reward_model_encoder(tokenizer)
    inputs = [encode(PROMPT, text) for text in TEXTS]

    async def logits() -> list[float]:
        engine = VllmRewardModel(
            "reward-model-0", servers.socket("reward-model-0"), request_timeout_s=60
        )
        values = await asyncio.gather(*(engine.logit(ids) for ids in inputs))
        await engine.close()
        return list(values)

    ours = run(logits())
    reference = AutoModelForSequenceClassification.from_pretrained(
        classifier, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        theirs = [float(reference(torch.tensor([ids])).logits[0, 0]) for ids in inputs]
    print(f"vLLM {ours}, transformers {theirs}")
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert len(set(theirs)) == len(TEXTS), "texts that cannot be told apart prove nothing"


def has_ended(reply: Reply) -> bool:
    """Whether the enforced JSON is whole, and was not cut off."""
    return reply.text.rstrip().endswith("}")


def test_a_judges_label_probabilities_are_the_models_own(
    servers: RunFolder, model: Path
) -> None:
    """Where the label begins, the enforced form leaves the labels only; their ratio is that of the model.

    The random model writes some code: with that one its label is read, and with any other nothing is.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    judge = judge_of(config_of(model, model).rewards[0]).model_copy(update={"temperature": 1.0})
    question = Questioner(judge, special_tokens(tokenizer)).question(PROMPT, "4", key="1")

    async def ask() -> list[Reply]:
        engine = judge_engine(servers)
        replies = await asyncio.gather(
            *(engine.ask(judge, question, seed=seed) for seed in range(32))
        )
        await engine.close()
        return list(replies)

    def is_plain(reply: Reply) -> bool:
        """Whether it has no escapes, and no special tokens, which a random model writes and the text leaves out."""
        token_text = "".join(token.text for token in reply.tokens or ())
        return has_ended(reply) and "\\" not in reply.text and token_text.startswith(reply.text)

    whole = [reply for reply in run(ask()) if is_plain(reply)]
    assert whole, "at least one of them came to its end"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    prompt_ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=False
    )
    for reply in whole:
        before = reply.text[: reply.text.rindex('"', 0, reply.text.rindex('"')) + 1]
        with torch.inference_mode():
            ids = torch.tensor([prompt_ids + tokenizer.convert_tokens_to_ids(list(before))])
            logits = reference(ids).logits[0, -1]
        expected = float(torch.sigmoid(logits[a] - logits[b]))
        assert read_value(judge, reply, code=json.loads(reply.text)["code"]) == pytest.approx(
            expected, abs=1e-4
        )
        with pytest.raises(Unreadable, match="lacks the code"):
            read_value(judge, reply, code="c0de")


def test_structured_output_holds_a_judge_to_its_json(servers: RunFolder, model: Path) -> None:
    """A random model writes no JSON by itself; and the schema does not write the code for it, so it has no verdict."""
    judge = judge_of(config_of(model, model).rewards[0]).model_copy(
        update={
            "verdict": judge_of(_json_reward(model)).verdict,
            "temperature": 1.0,
            "max_tokens": 80,
        }
    )

    async def ask() -> list[Reply]:
        engine = judge_engine(servers)
        requests = (
            engine.ask(judge, Questioner(judge).question(PROMPT, text, key=text), seed=n)
            for n, text in enumerate(TEXTS)
        )
        replies = await asyncio.gather(*requests)
        await engine.close()
        return replies

    replies = run(ask())
    assert all(reply.text.lstrip().startswith("{") for reply in replies)
    whole = [reply for reply in replies if has_ended(reply)]
    assert whole, "at least one of them came to its end"
    for reply in whole:
        assert 0 <= json.loads(reply.text)["score"] <= 10 and reply.text.index(
            "score"
        ) < reply.text.index("code")
        with pytest.raises(Unreadable, match="lacks the code"):
            read_value(judge, reply, code="c0de")


def test_a_question_that_is_too_long_is_refused_alone(servers: RunFolder, model: Path) -> None:
    judge = judge_of(config_of(model, model).rewards[0])

    async def ask() -> None:
        engine = judge_engine(servers)
        long = Questioner(judge).question(PROMPT, "x" * 2000, key="1")
        with pytest.raises(QuestionRefused, match="refused the question"):
            await engine.ask(judge, long, seed=0)
        short = await engine.ask(
            judge, Questioner(judge).question(PROMPT, "4", key="1"), seed=0
        )
        assert short.tokens
        await engine.close()

    run(ask())


def _json_reward(model: Path) -> Any:
    return (
        config_of(model, model)
        .rewards[0]
        .model_copy(update={"args": {"verdict": {"kind": "json"}}})
    )
