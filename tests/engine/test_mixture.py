"""A mixture of experts: its weights have the checkpoint's names, and a real engine holds them after every sync."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import FAMILIES, write_tiny_family
from ycore.config.schema import LoraSettings
from ycore.engine import SamplingParams
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import engine_weights, save_merged, write_weights
from ycore.run.files import RunFolder
from ycore.trl.build import _lora

EXPERTS = ["q_proj", "gate", "gate_proj", "up_proj", "down_proj"]
PROMPT = [9, 8, 7, 30, 31, 32]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def policy(mixture: Path, targets: list[str] | str | None) -> Any:
    """Make a policy that has learned something: every trainable weight moved; None trains every weight."""
    model: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    if targets is not None:
        settings = LoraSettings(r=4, alpha=8, target_modules=targets)
        model = get_peft_model(model, _lora(settings, "CAUSAL_LM", mixture))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def moved(mixture: Path, targets: list[str] | str | None) -> set[str]:
    """Name, by their last parts, the checkpoint's weights of which another policy has other numbers."""
    base = load_file(mixture / "model.safetensors")
    exported = dict(engine_weights(policy(mixture, targets), dtype=torch.float32))
    assert exported.keys() == base.keys()
    names = {name for name, weight in exported.items() if not torch.equal(weight, base[name])}
    return {name.removesuffix(".weight").rpartition(".")[2] for name in names}


def test_names_are_the_checkpoints_and_adapters_take_experts_only_by_name(
    mixture: Path,
) -> None:
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert moved(mixture, "all-linear") == attention
    assert moved(mixture, EXPERTS) == set(EXPERTS)
    norms = {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"}
    ends = {"embed_tokens", "lm_head"}
    assert moved(mixture, None) == attention | set(EXPERTS) | norms | ends


def test_adapters_of_experts_are_merged_as_peft_merges_them(
    mixture: Path, tmp_path: Path
) -> None:
    model = policy(mixture, EXPERTS)
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    merged = load_file(tmp_path / "model.safetensors")
    for name, weight in engine_weights(model, dtype=torch.float32):
        assert torch.allclose(weight, merged[name], atol=1e-6), name


def test_what_is_merged_and_saved_is_the_policy(mixture: Path, tmp_path: Path) -> None:
    model = policy(mixture, EXPERTS)
    save_merged(model, tmp_path, dtype=torch.float32, writes=True)
    saved = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert saved == load_file(mixture / "model.safetensors").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)


@pytest.fixture(scope="module")
def server(
    mixture: Path, tmp_path_factory: pytest.TempPathFactory, serve: Any, cpu_engine: Any
) -> Iterator[Path]:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    engine = cpu_engine(folder, mixture, max_model_len=64)
    with serve(folder, [engine]):
        yield engine.socket


@pytest.mark.verify
@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("targets", [None, EXPERTS, "all-linear"])
def test_an_engine_computes_with_the_experts_that_it_was_sent(
    server: Path, mixture: Path, targets: list[str] | str | None, tmp_path: Path
) -> None:
    model = policy(mixture, targets)

    async def work() -> tuple[float, list[tuple[float, ...]]]:
        engine = VllmEngine(
            "rollout-0", server, SamplingParams(max_tokens=4), request_timeout_s=120
        )
        scores = []
        for version, sent in enumerate((model, policy(mixture, None), model), start=1):
            write_weights(sent, tmp_path, dtype=torch.float32, version=version)
            await engine.load_weights(tmp_path, version)
            assert engine.verified_share == 1.0
            scores.append(await engine.logprobs_of(PROMPT[:2], PROMPT[2:]))
        await engine.close()
        return engine.verified_share, scores

    share, (first, _, last) = asyncio.run(work())
    assert share == 1.0 and first == last
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, 1:-1]
    expected = logits.log_softmax(-1)[range(4), PROMPT[2:]]
    assert torch.allclose(torch.tensor(first), expected, atol=1e-3)


def test_the_gap_that_missing_router_replay_makes(tmp_path: Path, monkeypatch: Any) -> None:
    """A copy of the weights in bfloat16 stands for the engine; the trainer takes its experts, or chooses its own."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 8}
    monkeypatch.setitem(FAMILIES, "qwen3_moe", FAMILIES["qwen3_moe"] | sizes)
    model = write_tiny_family(tmp_path, "qwen3_moe")
    rows = torch.randint(6, 90, (16, 128), generator=torch.Generator().manual_seed(0))
    experts: list[torch.Tensor] = []

    def record(router: Any, inputs: Any, routing: Any) -> None:
        experts.append(routing[-1])

    def replay(router: Any, inputs: Any, routing: Any) -> Any:
        logits, weights, _ = routing
        chosen = experts.pop(0)
        chances = logits.softmax(-1).gather(-1, chosen)
        return logits, (chances / chances.sum(-1, keepdim=True)).to(weights.dtype), chosen

    def scores(dtype: torch.dtype, hook: Any = None) -> torch.Tensor:
        policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        for name, router in policy.named_modules():
            if hook is not None and name.endswith("mlp.gate"):
                router.register_forward_hook(hook)
        with torch.no_grad():
            logits = policy(rows).logits.float()[:, :-1].log_softmax(-1)
        return logits.gather(-1, rows[:, 1:, None])

    engine = scores(torch.bfloat16, record)
    assert len(experts) == 2, "one layer's experts each"
    without = (scores(torch.float32) - engine).abs()
    replayed = (scores(torch.float32, replay) - engine).abs()
    for name, gap in (("without replay", without), ("with replay", replayed)):
        print(f"log-probability gap {name}: mean {gap.mean():.4f}, at most {gap.max():.3f}")
    assert not experts and without.mean() > 1.5 * replayed.mean()
