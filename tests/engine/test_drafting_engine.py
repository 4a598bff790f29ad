"""A real vLLM that drafts, in float32: greedy tokens and sampled distributions are those of the model alone."""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ycore.engine import Sampling
from ycore.engine.drafts import Drafted
from ycore.engine.vllm_engine import VllmEngine
from ycore.errors import EngineError
from ycore.launch.engines import is_vllm_installed
from ycore.models.tiny import write_tiny_model
from ycore.run.paths import RunFolder
from ycore.types import Completion

pytestmark = [
    pytest.mark.engine,
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


EAGER = """
from ycore.engine.drafts import Lookup

class Eager(Lookup):
    'Drafts in each pass, whether it pays or not, and what came last where nothing is known.'
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self._pace.wants = lambda number: True
        known = self._memory.draft
        self._memory.draft = lambda text, most: known(text, most) or text[-most:]
"""


def nearly(model: Path, folder: Path) -> Path:
    """A model that mostly says the same, as one that was trained to draft for it would."""
    shutil.copytree(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["memory", "model"])
def drafting(
    request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[Path]:
    """The socket of an engine that always drafts: what followed the same words before, or what another model says."""
    module = tmp_path_factory.mktemp("module") / "eager.py"
    module.write_text(EAGER)
    how = {"method": "custom_class", "model": "eager.Eager", "num_speculative_tokens": 4}
    if request.param == "model":
        how |= {"method": "draft_model", "model": str(nearly(model, module.parent / "draft"))}
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    engine = cpu_engine(folder, model, arguments=(("speculative_config", how),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(module.parent))
        patch.setenv(
            "VLLM_CONFIGURE_LOGGING", "1"
        )  # whatever the shell says: the drafter is found in the log below
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        with serve(folder, [engine]):
            assert "Loading drafter model" in folder.log("rollout-0").read_text()
            yield engine.socket


def ask(
    socket: Path, sampling: Sampling, times: int, *, greedy: bool
) -> tuple[list[list[Completion]], Drafted | None]:
    """So many completions of each prompt, a prompt at a time, and what drafts did for them; None of another model's."""

    async def work() -> tuple[list[list[Completion]], Drafted | None]:
        engine = VllmEngine("rollout-0", socket, sampling, request_timeout_s=60, drafts=True)
        with contextlib.suppress(EngineError):
            await engine.take_drafts()
        answers = []
        for number, prompt in enumerate(PROMPTS):
            asked = (
                engine.complete(prompt, 1000 * number + seed, greedy=greedy)
                for seed in range(times)
            )
            answers.append(list(await asyncio.gather(*asked)))
        counts = None
        with contextlib.suppress(EngineError):  # only ycore's own drafter counts
            counts = await engine.take_drafts()
        await engine.close()
        return answers, counts

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
    answers, counts = ask(drafting, Sampling(max_tokens=24), 1, greedy=True)
    assert counts is None or counts.accepted > 0
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
    sampling = Sampling(max_tokens=16, temperature=temperature)
    answers, counts = ask(drafting, sampling, 40, greedy=False)
    assert counts is None or (
        counts.tokens > 1000 and counts.accepted > (5 if temperature == 1 else 100)
    )
    loaded, source = AutoModelForCausalLM.from_pretrained(model), torch.Generator().manual_seed(0)
    places, gaps = list[float](), list[float]()
    for prompt, written in (
        (prompt, one) for prompt, group in zip(PROMPTS, answers, strict=True) for one in group
    ):
        own = probabilities(loaded, prompt, written, temperature)
        tokens = torch.tensor(written.token_ids).unsqueeze(1)
        chosen = own.gather(1, tokens).squeeze(1)
        below = (own.cumsum(-1).gather(1, tokens)).squeeze(1) - chosen
        places += (
            below + chosen * torch.rand(len(chosen), generator=source, dtype=torch.double)
        ).tolist()
        assert written.logprobs is not None
        gaps += (torch.tensor(written.logprobs) - chosen.log()).abs().tolist()
    assert max(gaps) < 1e-3
    ranked = torch.tensor(places).sort().values
    steps = torch.arange(1, len(ranked) + 1) / len(ranked)
    distance = float((ranked - steps).abs().max())
    print(f"{len(ranked)} tokens, {counts}, distance {distance:.4f}")
    assert distance < 1.95 / len(ranked) ** 0.5  # p = 0.001


@pytest.mark.parametrize("drafting", ["memory"], indirect=True)
def test_a_request_of_one_token_checks_no_draft(drafting: Path) -> None:
    _, counts = ask(drafting, Sampling(max_tokens=1), 2, greedy=True)
    assert counts is not None and counts.tokens == 0
