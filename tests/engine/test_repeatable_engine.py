"""A real vLLM in bfloat16 that must repeat itself: its answers do not depend on what else is in the batch."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
PROMPTS = [
    [first + place for place in range(length)]
    for first, length in ((5, 3), (7, 9), (11, 34), (6, 40))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers as wide as SmolLM2-135M's: for small ones, every number of rows takes the same kernel."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    config = AutoConfig.from_pretrained(folder)
    wide = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config.update(wide | {"head_dim": 64, "num_hidden_layers": 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def socket(
    model: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[Path]:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    engine = cpu_engine(folder, model, dtype="bfloat16", deterministic=True, max_num_seqs=64)
    with serve(folder, [engine]):
        yield engine.socket


def ask(socket: Path, gaps_s: list[float]) -> list[Completion]:
    """One completion each, of the prompts in turn, each asked so long after the one before."""

    async def work() -> list[Completion]:
        engine = VllmEngine(
            "rollout-0", socket, SamplingParams(max_tokens=24), request_timeout_s=60
        )
        requests = []
        for number, gap in enumerate(gaps_s):
            await asyncio.sleep(gap)
            requests.append(
                asyncio.create_task(engine.complete(PROMPTS[number % len(PROMPTS)], number))
            )
        answers = await asyncio.gather(*requests)
        await engine.close()
        return answers

    return asyncio.run(asyncio.wait_for(work(), 250))


def test_answers_do_not_depend_on_what_else_is_in_the_batch(socket: Path) -> None:
    together = ask(socket, [0.0] * 60)
    source = random.Random(0)
    for gaps_s in (
        [0.0] * 3,
        [0.4] * 12,
        [source.choice((0.0, 0.0, 0.0, 0.02, 0.1)) for _ in together],
    ):
        for number, (completion, other) in enumerate(
            zip(ask(socket, gaps_s), together, strict=False)
        ):
            assert completion.token_ids == other.token_ids, number
            assert completion.logprobs == other.logprobs, number
