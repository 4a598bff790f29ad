"""Families of models: a real engine holds every weight that is trained, and computes what the trainer computes."""

import asyncio
import copy
import random
import re
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
from ycore.run.files import RunFolder
from ycore.trl.build import _lora, attention_of
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
TABLE = {
    family: dict(zip(("served", "proved", "trained", "merged"), marks, strict=True))
    for family, *marks in re.findall(
        r"^\| `(\w+)` \| .*? \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE
    )
}
"""The page's marks of each family; it gives the reason for each `no`."""
PROMPT = (9, 8, 7, 30, 31, 32)


class Rounds:
    """Rounds of four completions of the trainer's policy: random tokens, with the plain model's log-probabilities."""

    constraint_weights = None
    trainer: Any

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        scores = tuple((Score(float(index % 2)),) for index in range(4))
        draw = Draw(0, Prompt(row=0, content="prompt"), PROMPT)
        return [Group(draw, tuple(self.written(step)), scores)]

    def written(self, step: int) -> list[Completion]:
        draw = random.Random(step)
        tokens = [tuple(draw.choices(range(6, 90), k=draw.randint(8, 24))) for _ in range(4)]
        model = self.trainer.bare_model
        return [Completion(ids, scores_of(model, ids), "", "length", step) for ids in tokens]


class EngineRounds(Rounds):
    """Rounds of an engine, which gets the trainer's weights before each."""

    def __init__(self, socket: Path, folder: Path) -> None:
        self.socket = socket
        self.folder = folder
        self.shares: list[float] = []

    def written(self, step: int) -> list[Completion]:
        policy = self.trainer.bare_model
        write_weights(policy, self.folder, dtype=torch.float32, version=step)
        return asyncio.run(self._asked(step))

    async def _asked(self, step: int) -> list[Completion]:
        params = SamplingParams(max_tokens=24)
        engine = VllmEngine("rollout-0", self.socket, params, request_timeout_s=120)
        try:
            await engine.load_weights(self.folder, step)
            self.shares.append(engine.verified_share)
            return list(await asyncio.gather(*(engine.complete(PROMPT, n) for n in range(4))))
        finally:
            await engine.close()


def scores_of(model: Any, completion: tuple[int, ...]) -> tuple[float, ...]:
    """Return the log-probability of each token after the prompt."""
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[*PROMPT, *completion]])).logits
    model.train(was_training)
    scores = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return tuple(scores[range(len(completion)), completion].tolist())


def check_training(model: Path, folder: Path, rounds: Rounds, adapters: Any) -> None:
    """Take two steps at a rate at which weights that the writer did not get would show; load what is saved."""
    trainer: Any = small_trainer(
        SeamGRPOTrainer,
        model,
        folder,
        rounds,  # type: ignore[arg-type]
        trainer_args={"peft_config": adapters},
        learning_rate=0.02,
        max_steps=2,
        max_completion_length=24,
        logging_steps=1,
        model_init_kwargs={"dtype": "float32", **attention_of(model)},
    )
    rounds.trainer = trainer
    trainer.train()
    rows = [row for row in trainer.state.log_history if "ycore/logprob_gap" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    gap = max(row["ycore/logprob_gap"] for row in rows)
    print(f"{model.parent.name}: log-probability gap {gap:.1e}")
    assert gap < 0.01, rows
    trainer.write_model(folder / "out", dtype=torch.float32, merge=adapters is not None)
    saved = folder / "out" / ("merged" if adapters else "")
    again = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, **attention_of(saved)
    )
    for completion in rounds.written(2):
        expected = scores_of(again, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=0.01)


def adapters_of(model: Path) -> LoraConfig:
    return _lora(LoraSettings(r=4, alpha=8), "CAUSAL_LM", model)


@pytest.mark.verify
@pytest.mark.parametrize("family", [name for name in TABLE if TABLE[name]["trained"] == "yes"])
def test_a_family_is_trained_and_merged(family: str, tmp_path: Path) -> None:
    """The trainer's forward, packed where it can be, computes what the plain model does."""
    model = write_tiny_family(tmp_path / "model", family)
    check_training(model, tmp_path / "lora", Rounds(), adapters_of(model))
    check_training(model, tmp_path / "full", Rounds(), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_weights_have_the_checkpoints_names_and_values(
    family: str, tmp_path: Path
) -> None:
    """They include what is not trained, as a router's bias: without it a merged model would route by zeros."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_attention_caps_its_logits_where_its_config_does(
    family: str, tmp_path: Path
) -> None:
    """transformers' sdpa leaves Gemma 2's capping out without a word, and vLLM caps."""
    model = write_tiny_family(tmp_path / "model", family)
    eager, chosen = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
        for options in ({"attn_implementation": "eager"}, attention_of(model))
    )
    completion = tuple(range(6, 60))
    assert scores_of(chosen, completion) == pytest.approx(
        scores_of(eager, completion), abs=1e-4
    )


@pytest.mark.verify
@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("family", [name for name in TABLE if "no" not in TABLE[name].values()])
def test_a_family_is_served_synced_proved_trained_and_merged(
    family: str, serve: Any, cpu_engine: Any, tmp_path: Path
) -> None:
    model = write_tiny_family(tmp_path / "model", family)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    # vLLM's faster kernel for latent attention takes bfloat16 alone
    arguments = (("attention_backend", "CPU_MLA"),) if "deepseek" in family else ()
    engine = cpu_engine(folder, model, max_model_len=64, arguments=arguments)
    with serve(folder, [engine]):
        for name, adapters in (("lora", adapters_of(model)), ("full", None)):
            rounds = EngineRounds(engine.socket, tmp_path / f"{name}-weights")
            check_training(model, tmp_path / name, rounds, adapters)
            assert rounds.shares == [1.0, 1.0, 1.0]


def test_the_page_has_a_row_for_each_family_and_a_reason_for_each_no() -> None:
    assert TABLE.keys() == FAMILIES.keys()
    reasons = "".join(line for line in PAGE.splitlines() if line.startswith("- "))
    assert {name for name in TABLE if f"`{name}`" in reasons} == {
        name for name in TABLE if "no" in TABLE[name].values()
    }
