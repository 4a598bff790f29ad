"""A folder with an adapter is a model too: what a LoRA run leaves can be measured or trained on."""

import json
from pathlib import Path

import pytest

from ycore.errors import ModelError
from ycore.models.fetch import fetch_model
from ycore.models.names import resolve_model
from ycore.models.tiny import write_tiny_model


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    base = write_tiny_model(tmp_path / "base")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_it_is_merged_once(adapter: Path) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    plan = resolve_model(str(adapter))
    assert (plan.kind, plan.ready, plan.has_chat_template) == ("adapter", False, True)
    merged = AutoModelForCausalLM.from_pretrained(fetch_model(plan)).eval()
    apart = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    ids = torch.arange(3, 20).unsqueeze(0)
    torch.testing.assert_close(merged(ids).logits, apart(ids).logits, atol=1e-5, rtol=1e-5)
    assert resolve_model(str(adapter)).ready


def test_without_its_base(adapter: Path) -> None:
    told = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": "./gone"}))
    with pytest.raises(ModelError, match=r"adapter of \./gone, which is not to be had: no such model folder"):
        resolve_model(str(adapter))


def test_without_its_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        resolve_model(str(adapter))
