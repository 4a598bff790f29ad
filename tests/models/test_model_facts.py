"""Parameter counts are those of the models themselves, and every way to name a config works."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_model import FAMILIES, write_tiny_family
from ycore.errors import ModelError
from ycore.models.model_facts import (
    KNOWN_CONFIGS,
    facts_of,
    known_config,
    model_config,
    model_facts,
    sighted_family,
)

# As the hub tells them, or as the weights' own shapes add up.
COUNTED = {
    "smollm2-135m": 134_515_008,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_counted_to_the_last(name: str) -> None:
    config = known_config(name)
    assert config is not None
    assert facts_of(config, name=name).num_params == COUNTED[name]


def test_adapters_are_counted_as_peft_counts_them() -> None:
    config = known_config("smollm2-135m")
    assert config is not None
    assert facts_of(config, name="").lora_params(16) == 4_884_480


def test_few_of_a_mixtures_experts_work_on_a_token() -> None:
    facts = model_facts("Qwen3-30B-A3B")
    assert 2.5e9 < facts.linear_params + facts.head_params < 3.4e9 < facts.num_params


def test_a_config_comes_from_a_file_or_a_folder(tmp_path: Path) -> None:
    config = known_config("Qwen3-0.6B")
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_folder, by_file = model_facts(str(tmp_path)), model_facts(str(tmp_path / "config.json"))
    assert by_folder.num_params == by_file.num_params == model_facts("qwen3-0.6b").num_params


def test_a_cached_adapter_of_the_hub_is_read_by_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    adapter, base = (
        tmp_path / f"models--me--{name}" / "snapshots" / "0123" for name in ("lora", "seeing")
    )
    for folder, file, settings in (
        (adapter, "adapter_config.json", {"base_model_name_or_path": "me/seeing"}),
        (base, "config.json", {"model_type": "llava", "vision_config": {}}),
    ):
        folder.mkdir(parents=True)
        (folder / file).write_text(json.dumps(settings))
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text(folder.name)
    assert model_config("me/lora", ask=False) == {"model_type": "llava", "vision_config": {}}
    assert sighted_family("me/lora") == "llava"


def test_an_adapter_that_names_itself_has_no_config(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path)})
    )
    with pytest.raises(ModelError, match=r"config\.json does not exist; give a folder"):
        model_config(str(tmp_path))
    assert sighted_family(str(tmp_path)) is None


def test_a_text_model_inside_another_is_the_one_that_is_counted() -> None:
    config = known_config("Qwen3-0.6B")
    assert facts_of({"text_config": config, "vision_config": {}}, name="x") == facts_of(
        config or {}, name="x"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "sizes in config.json, .* has no num_attention_heads; write it there, or"),
        ("[]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_config_without_sizes_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=said):
        model_facts(str(tmp_path))


def test_an_unknown_model_comes_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        model_facts("smollm2-153m")


def counted_by_transformers(config: Mapping[str, Any]) -> int:
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    settings = AutoConfig.for_model(config["model_type"], **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_any_familys_config_is_read(family: str, tmp_path: Path) -> None:
    """Norms, which are not counted one by one, are a larger share of so small a model."""
    path = write_tiny_family(tmp_path, family) / "config.json"
    config = json.loads(path.read_text())
    assert model_facts(str(path)).num_params == pytest.approx(
        counted_by_transformers(config), rel=0.03
    )


def test_every_known_model_can_be_planned() -> None:
    assert len(KNOWN_CONFIGS) >= 60
    assert all(model_facts(name).num_params > 1e8 for name in KNOWN_CONFIGS)


@pytest.mark.verify
@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_a_known_model_has_as_many_weights_as_transformers_builds(name: str) -> None:
    config = KNOWN_CONFIGS[name]
    counted = facts_of(config, name=name).num_params
    assert counted == pytest.approx(counted_by_transformers(config), rel=1e-3)


def test_what_a_token_leaves_in_the_cache_follows_the_attention() -> None:
    """Latent attention keeps 576 values a layer; every fourth layer of a hybrid has keys and values."""
    assert model_facts("DeepSeek-V3").kv_values == 61 * 576
    assert model_facts("Qwen3-Next-80B-A3B").kv_values == 12 * 2 * 2 * 256


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_lora_rank": 512},
        {"kv_lora_rank": "x", "qk_nope_head_dim": 1, "qk_rope_head_dim": 1, "v_head_dim": 1},
        {"linear_num_value_heads": 4},
        {"num_key_value_heads": "eight"},
        {"head_dim": float("inf")},
        {"num_attention_heads": None},
        {"hidden_size": -576},
    ],
)
def test_sizes_that_cannot_be_read_are_one_line(changed: dict[str, Any]) -> None:
    config = dict(known_config("smollm2-135m") or {}) | changed
    with pytest.raises(ModelError, match=r"mine: .*; write it there, or take") as caught:
        facts_of(config, name="mine")
    assert "\n" not in str(caught.value)
