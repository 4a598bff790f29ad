"""A real vLLM that drafts, in float32: greedy tokens and sampled distributions are those of the model alone."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from ycore.engine import SamplingParams
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmEngine
from ycore.run.files import RunFolder
from ycore.types import Completion

pytestmark = [
    pytest.mark.engine,
    pytest.mark.verify,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]
PROMPTS = [[9, 8, 7, 5] * 4, [30, 31, 32, 33] * 4, [50, 51, 52] * 5, [60, 61, 62, 60, 61, 62]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with sharper distributions, so that it repeats itself."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 2.0)
    loaded.save_pretrained(folder)
    return folder


def nearly(model: Path, folder: Path) -> Path:
    """A model with mostly the same predictions, as one trained to draft for it has."""
    shutil.copytree(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def drafting(
    request: Any,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serve: Any,
    cpu_engine: Any,
) -> Iterator[Path]:
    """The socket of an engine that drafts what followed the same words before, or what another model says."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    config: dict[str, Any] = {"method": request.param, "num_speculative_tokens": 4}
    if request.param == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    else:
        config["model"] = str(nearly(model, tmp_path_factory.mktemp("draft") / "model"))
    arguments = (("speculative_config", config), ("disable_log_stats", False))
    engine = cpu_engine(folder, model, arguments=arguments)
    with serve(folder, [engine]):
        yield engine.socket


async def counts_of(engine: VllmEngine) -> tuple[float, float]:
    """Return how many tokens the engine has drafted and accepted so far."""
    text = await engine.request_once("GET", "/metrics", is_json=False)
    drafted, accepted = (
        re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\b.* (\S+)$", text, re.MULTILINE)
        for name in ("draft", "accepted")
    )
    return float(drafted[1]) if drafted else 0.0, float(accepted[1]) if accepted else 0.0


def ask(
    socket: Path, sampling: SamplingParams, times: int, *, greedy: bool
) -> tuple[list[list[Completion]], tuple[float, float]]:
    """Return `times` completions of each prompt, four at once, and how many tokens were drafted and accepted."""

    async def work() -> tuple[list[list[Completion]], tuple[float, float]]:
        engine = VllmEngine("rollout-0", socket, sampling, request_timeout_s=60)
        before = await counts_of(engine)
        limit = asyncio.Semaphore(4)

        async def complete(prompt: list[int], seed: int) -> Completion:
            async with limit:
                return await engine.complete(prompt, seed, greedy=greedy)

        answers = []
        for number, prompt in enumerate(PROMPTS):
            requests = (complete(prompt, 1000 * number + seed) for seed in range(times))
            answers.append(list(await asyncio.gather(*requests)))
        after = await counts_of(engine)
        await engine.close()
        return answers, (after[0] - before[0], after[1] - before[1])

    return asyncio.run(asyncio.wait_for(work(), 250))


def probabilities(
    model: Any, prompt: list[int], written: Completion, temperature: float
) -> torch.Tensor:
    """`[T, V]` of the model itself, at each place of the completion."""
    ids = torch.tensor([[*prompt, *written.token_ids]])
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).softmax(-1)


def test_greedy_tokens_are_those_of_the_model_alone(model: Path, drafting: Path) -> None:
    answers, (drafted, accepted) = ask(drafting, SamplingParams(max_tokens=24), 1, greedy=True)
    assert 0 < accepted <= drafted
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for prompt, (written,) in zip(PROMPTS, answers, strict=True):
        best = probabilities(loaded, prompt, written, 1.0).argmax(-1)
        assert best.tolist() == list(written.token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_sampled_tokens_have_the_distribution_of_the_model_alone(
    model: Path, drafting: Path, temperature: float
) -> None:
    """The places of tokens in the model's own distribution are uniform (Kolmogorov-Smirnov), and their returned
    log-probabilities are the model's."""
    sampling = SamplingParams(max_tokens=16, temperature=temperature)
    answers, (drafted, accepted) = ask(drafting, sampling, 40, greedy=False)
    assert 5 < accepted <= drafted
    loaded, source = (
        AutoModelForCausalLM.from_pretrained(model),
        torch.Generator().manual_seed(0),
    )
    places, gaps = list[float](), list[float]()
    for prompt, written in (
        (prompt, completion)
        for prompt, group in zip(PROMPTS, answers, strict=True)
        for completion in group
    ):
        model_probs = probabilities(loaded, prompt, written, temperature)
        tokens = torch.tensor(written.token_ids).unsqueeze(1)
        chosen = model_probs.gather(1, tokens).squeeze(1)
        below = (model_probs.cumsum(-1).gather(1, tokens)).squeeze(1) - chosen
        places += (
            below + chosen * torch.rand(len(chosen), generator=source, dtype=torch.double)
        ).tolist()
        assert written.logprobs is not None
        gaps += (torch.tensor(written.logprobs) - chosen.log()).abs().tolist()
    assert max(gaps) < 1e-3
    ranked = torch.tensor(places).sort().values
    steps = torch.arange(1, len(ranked) + 1) / len(ranked)
    distance = float((ranked - steps).abs().max())
    print(
        f"{len(ranked)} tokens, {drafted} drafted, {accepted} accepted, distance {distance:.4f}"
    )
    assert distance < 1.95 / len(ranked) ** 0.5  # p = 0.001
