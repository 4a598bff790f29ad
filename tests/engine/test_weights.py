"""The policy's weights as written for an engine."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from tests.tiny_model import write_tiny_model
from ycore.engine import weights
from ycore.engine.weight_proof import read_manifest, tensor_sums
from ycore.engine.weights import engine_weights, save_merged, write_adapters, write_weights
from ycore.errors import SyncError

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 9,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def policy(checkpoint: Path, *, lora: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A policy that has learned something: every trainable weight moved."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_names_are_the_checkpoints_own(checkpoint: Path, lora: bool) -> None:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = set(file.keys())
    exported = dict(engine_weights(policy(checkpoint, lora=lora), dtype=torch.float32))
    assert set(exported) == names
    assert "lm_head.weight" not in exported  # tied to the embedding, written once


def test_merged_adapters_equal_pefts_own_merge(checkpoint: Path) -> None:
    model = policy(checkpoint, lora=True)
    exported = dict(engine_weights(model, dtype=torch.float32))
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    base = load_file(checkpoint / "model.safetensors")
    for name, weight in exported.items():
        assert (weight - merged[name]).abs().max() <= 1e-6
    moved = [name for name, weight in exported.items() if not torch.equal(weight, base[name])]
    assert len(moved) == 14 and all(
        "proj" in name for name in moved
    )  # seven linear layers in each of two


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_stays_bit_for_bit_after_many_writes(
    checkpoint: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = policy(checkpoint, lora=True, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(10):
        write_weights(model, tmp_path, dtype=dtype)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_model_loaded_from_what_was_written_is_the_policy(
    checkpoint: Path, lora: bool, tmp_path: Path
) -> None:
    model = policy(checkpoint, lora=lora).eval()
    num_bytes = write_weights(model, tmp_path, dtype=torch.float32)
    stored = stored_in(tmp_path)
    assert num_bytes == sum(tensor.numel() * 4 for tensor in stored.values())
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    loaded.load_state_dict(stored, strict=False)
    ids = torch.tensor([[9, 8, 7, 6, 5]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_the_files_hold_every_weight_in_place_of_those_of_the_last_sync(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "QUEUED_BYTES", 10_000)  # less than the largest weight
    write_weights(policy(checkpoint, lora=False), tmp_path, dtype=torch.float32)
    model = policy(checkpoint, lora=True)
    num_bytes = write_weights(model, tmp_path, dtype=torch.bfloat16)
    files = sorted(tmp_path.iterdir())
    assert len(files) == weights.NUM_FILES
    assert max(path.stat().st_size for path in files) < num_bytes / 2, (
        "the threads have about as much each"
    )
    stored, whole = stored_in(tmp_path), dict(engine_weights(model, dtype=torch.bfloat16))
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in whole.items())


def test_a_write_that_is_cut_off_leaves_nothing_to_load(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy(checkpoint, lora=True)
    write_weights(model, tmp_path, dtype=torch.float32, version=1)

    def fail(tensor: torch.Tensor) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "tensor_sums", fail)
    with pytest.raises(OSError, match="No space left"):
        write_weights(model, tmp_path, dtype=torch.float32, version=2)
    for path in tmp_path.iterdir():
        with pytest.raises(SafetensorError):
            load_file(path)
    with pytest.raises(SyncError, match="no weights to send"):
        read_manifest(tmp_path, version=1)


def test_an_adapter_of_the_embedding_is_merged(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=False)
    lora = LoraConfig(
        r=4,
        target_modules=["embed_tokens", "q_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    model: Any = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    exported = dict(engine_weights(model, dtype=torch.float32))
    merged = model.merge_and_unload().state_dict()
    assert exported.keys() == merged.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)


def test_adapters_alone_add_up_to_what_is_merged(checkpoint: Path, tmp_path: Path) -> None:
    """Times the base of the manifest: B has the scale, and both are padded to a rank that vLLM allocates."""
    model = policy(checkpoint, lora=True)
    num_bytes = write_adapters(model, tmp_path, dtype=torch.float32, version=7)
    sent = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in stored_in(tmp_path).items()
    }
    assert num_bytes == sum(tensor.nbytes for tensor in sent.values())
    base = dict(engine_weights(model, dtype=torch.float32, merges=False))
    merged = dict(engine_weights(model, dtype=torch.float32))
    for name, weight in base.items():
        down, up = (
            sent.get(f"{name.removesuffix('weight')}lora_{letter}.weight") for letter in "AB"
        )
        if down is not None and up is not None:
            assert down.size(0) == up.size(1) == 8
            weight = weight + up @ down
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)
    assert len(sent) == 2 * 14
    assert read_manifest(tmp_path, version=7) == {
        name: tensor_sums(tensor) for name, tensor in (base | sent).items()
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    assert config["target_modules"] == sorted({name.split(".")[-3] for name in sent})


def test_what_an_engine_cannot_add_to_its_base_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    lora = {"r": 4, "target_modules": ["embed_tokens"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(**lora))
    with pytest.raises(
        SyncError, match=r"engine.sync=adapter sends .*embed_tokens has another kind"
    ):
        write_adapters(model, tmp_path, dtype=torch.float32, version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_write_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert (
        write_weights(
            policy(checkpoint, lora=True), tmp_path, dtype=torch.float32, writes=False
        )
        == 0
    )
    assert list(tmp_path.iterdir()) == []


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_untied_embeddings_are_both_written(tmp_path: Path, checkpoint: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(checkpoint).config
    config.tie_word_embeddings = False
    exported = dict(
        engine_weights(AutoModelForCausalLM.from_config(config), dtype=torch.float32)
    )
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(exported)


def test_weights_are_written_in_the_engines_dtype(checkpoint: Path, tmp_path: Path) -> None:
    write_weights(policy(checkpoint, lora=True), tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in stored_in(tmp_path).values()} == {torch.bfloat16}


def test_what_is_written_says_its_version_last(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"))
    folder = tmp_path / "weights"
    write_weights(model, folder, dtype=torch.float32, version=4)
    sums = read_manifest(folder, version=4)
    names = {name for name, _ in model.named_parameters()}
    assert sums.keys() == names and sums["model.norm.weight"] == tensor_sums(
        model.model.norm.weight
    )
    with pytest.raises(SyncError, match="stale weights"):
        read_manifest(folder, version=5)
    write_weights(model, folder, dtype=torch.float32)
    with pytest.raises(SyncError, match="no weights to send"):
        read_manifest(folder, version=4)  # it was of the weights before these


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_base_in_4_bits_what_the_trainer_computes_with_is_sent(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """After a forward, which packs the base on some processors. So engines sample from the policy that is trained."""
    pytest.importorskip("bitsandbytes")
    small = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    base: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, quantization_config=small
    )
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    exact = policy(checkpoint, lora=True)
    adapters = {name: value for name, value in exact.state_dict().items() if "lora_" in name}
    assert (
        len(adapters) == 28
        and not model.load_state_dict(adapters, strict=False).unexpected_keys
    )
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits.float()
        save_merged(model, tmp_path, dtype=torch.float32, writes=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert not hasattr(merged.config, "quantization_config")
        gap, unrounded = (
            float((network(input_ids=ids).logits - expected).abs().mean())
            for network in (merged, exact)
        )
    print(f"mean gap of logits {gap:.2g}; with a base that was not rounded {unrounded:.2g}")
    assert gap < 0.005 and unrounded > 4 * gap


def test_a_base_in_4_bits_that_waits_on_the_host_is_unpacked_where_its_scales_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`engine.offload=weights` moves the packed weights alone; bitsandbytes then mixed host and device data."""
    from bitsandbytes import functional

    places: list[tuple[torch.device, torch.device]] = []

    def unpack(data: torch.Tensor, state: Any) -> torch.Tensor:
        places.append((data.device, state.absmax.device))
        return torch.zeros(4, 4)

    monkeypatch.setattr(functional, "dequantize_4bit", unpack)
    packed: Any = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(absmax=torch.empty(1, device="meta"))
    model = torch.nn.Module()
    model.register_parameter("weight", packed)
    assert [name for name, _ in engine_weights(model, dtype=torch.bfloat16)] == ["weight"]
    assert places == [(torch.device("meta"), torch.device("meta"))]
