"""Families of models: a real engine holds every weight that is trained, and computes what the trainer computes."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import FAMILIES, write_tiny_family
from tests.trl.small_trainer import small_trainer
from ycore.config.schema import LoraSettings
from ycore.engine import SamplingParams
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import engine_weights, write_weights
from ycore.run.paths import RunFolder
from ycore.trl.build import _lora
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

PROMPT = (9, 8, 7, 30, 31, 32)


class Rounds:
    """Four completions of an engine, which gets the trainer's weights before each round."""

    constraint_weights = None

    def __init__(self, socket: Path, folder: Path) -> None:
        self.socket = socket
        self.folder = folder
        self.trainer: Any = None
        self.shares: list[float] = []

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        completions = asyncio.run(self.written(step))
        scores = tuple((Score(float(index % 2)),) for index in range(len(completions)))
        draw = Draw(0, Prompt(row=0, content="prompt"), PROMPT)
        return [Group(draw, tuple(completions), scores)]

    async def written(self, step: int) -> list[Completion]:
        policy = self.trainer.bare_model
        write_weights(policy, self.folder, dtype=torch.float32, version=step)
        params = SamplingParams(max_tokens=24)
        engine = VllmEngine("rollout-0", self.socket, params, request_timeout_s=120)
        try:
            await engine.load_weights(self.folder, step)
            self.shares.append(engine.verified_share)
            return list(await asyncio.gather(*(engine.complete(PROMPT, n) for n in range(4))))
        finally:
            await engine.close()


def trained(model: Path, folder: Path, socket: Path, adapters: LoraConfig | None) -> Rounds:
    """Two steps; the rate is high, so that weights which the engine did not get would show."""
    rounds = Rounds(socket, folder / "weights")
    trainer: Any = small_trainer(
        SeamGRPOTrainer,
        model,
        folder / "trainer",
        rounds,  # type: ignore[arg-type]
        own={"peft_config": adapters},
        learning_rate=0.02,
        max_steps=2,
        max_completion_length=24,
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )
    rounds.trainer = trainer
    trainer.train()
    return rounds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_weights_have_the_checkpoints_names_and_values(
    family: str, tmp_path: Path
) -> None:
    """Also what is not trained, as a router's bias: without it a merged model would route by zeros."""
    model = write_tiny_family(tmp_path / "model", family)
    saved = load_file(model / "model.safetensors")
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, weight in engine_weights(policy, dtype=torch.float32):
        assert torch.equal(weight, saved.pop(name)), name
    assert not saved
    adapted = get_peft_model(policy, _lora(LoraSettings(r=4, alpha=8), "CAUSAL_LM", model))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    merged = copy.deepcopy(adapted).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    for name, weight in engine_weights(adapted, dtype=torch.float32):
        assert torch.allclose(weight, expected.pop(name), atol=1e-5), name
    assert not expected


@pytest.mark.verify
@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_synced_proved_trained_and_merged(
    family: str, serve: Any, cpu_engine: Any, tmp_path: Path
) -> None:
    model = write_tiny_family(tmp_path / "model", family)
    folder = RunFolder(tmp_path / "run")
    engine = cpu_engine(folder, model, max_model_len=64)
    adapters = _lora(LoraSettings(r=4, alpha=8), "CAUSAL_LM", model)
    folder.root.mkdir()
    with serve(folder, [engine]):
        for kind, config in (("lora", adapters), ("full", None)):
            rounds = trained(model, tmp_path / kind, engine.socket, config)
            assert rounds.shares == [1.0, 1.0]
            trainer = rounds.trainer
            rows = [row for row in trainer.state.log_history if "ycore/logprob_gap" in row]
            print(
                kind,
                trainer.packed_by,
                [(row["ycore/logprob_gap"], row["grad_norm"]) for row in rows],
            )
            assert len(rows) == 2 and all(row["ycore/logprob_gap"] < 0.01 for row in rows)
            assert all(row["grad_norm"] > 0 for row in rows)
            trainer.write_model(
                tmp_path / kind / "out", dtype=torch.float32, merge=config is not None
            )
            saved = tmp_path / kind / "out" / ("merged" if config else "")
            again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
            for completion in asyncio.run(rounds.written(2)):
                ids = torch.tensor([[*PROMPT, *completion.token_ids]])
                with torch.no_grad():
                    logits = again(ids).logits[0, len(PROMPT) - 1 : -1]
                expected = logits.log_softmax(-1)[
                    range(len(completion.token_ids)), completion.token_ids
                ]
                gap = (torch.tensor(completion.logprobs) - expected).abs().max()
                print("saved gap", float(gap))
                assert gap < 0.01
