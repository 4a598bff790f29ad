"""A fault of a model folder is named before anything is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ycore
from tests.tiny_model import write_tiny_model
from ycore.errors import ModelError
from ycore.models.names import require_chat_template, resolve_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def refused(name: str | Path, *, trust_remote_code: bool = False) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(name), trust_remote_code=trust_remote_code)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_folder_is_ready(model: Path) -> None:
    plan = resolve_model(str(model))
    assert (plan.kind, plan.folder, plan.ready) == ("folder", model, True)
    assert (plan.context_length, plan.has_chat_template) == (512, True)
    assert plan.config is not None and plan.config["model_type"] == "llama"
    require_chat_template(plan)


@pytest.mark.parametrize(
    "name", ["./nothing", "../nothing", "~/nothing-here", "/nothing/here", "a/b/c"]
)
def test_a_path_that_is_not_there(name: str) -> None:
    assert f"no such model folder: {name}" in refused(name)


def test_a_mistyped_folder_names_the_nearest(model: Path) -> None:
    assert "did you mean 'model'?" in refused(model.parent / "modle")


def test_an_existing_parent_means_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "no such model folder: runs/x" in refused("runs/x")


def test_a_file_is_not_a_folder(model: Path) -> None:
    assert "is a file" in refused(model / "model.safetensors")


def test_without_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "has no config.json" in refused(model)


def test_config_that_is_not_json(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')
    assert "cannot be read as JSON" in refused(model)


def test_config_that_is_not_an_object(model: Path) -> None:
    (model / "config.json").write_text("[]")
    assert "must hold a JSON object, not list" in refused(model)


def test_without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_the_model(model: Path, name: str) -> None:
    edit(model / name, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    message = refused(model)
    assert name in message and "--trust-remote-code" in message
    assert resolve_model(str(model), trust_remote_code=True).ready


def test_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no weights" in refused(model)


def test_pickled_weights_alone_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickle files only (pytorch_model.bin)" in refused(model, trust_remote_code=True)


def test_weights_cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is not a whole safetensors file (" in refused(model)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"x" * 100, (2).to_bytes(8, "little") + b"[] "]
)
def test_weights_that_are_something_else(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert "is not a whole safetensors file" in refused(model)


def test_a_git_lfs_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    assert "Git LFS pointer" in refused(model)


def test_a_missing_shard_is_named(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00002-of-00002.safetensors" in refused(model)


def test_chat_prompts_need_a_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    plan = resolve_model(str(model))
    assert plan.has_chat_template is False
    with pytest.raises(ModelError, match="has no chat template"):
        require_chat_template(plan)


def test_a_chat_template_in_the_tokenizer_config_counts(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    edit(model / "tokenizer_config.json", chat_template=template)
    assert resolve_model(str(model)).has_chat_template is True


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    assert "--model is empty" in refused(name)


@pytest.mark.parametrize(
    "listed", [-1.5, "x", [None], {"a": None}, {"a": {}}, {"a": "x" * 5000}]
)
def test_an_index_that_is_no_map_of_files(model: Path, listed: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert len(refused(model)) < 1000


def test_an_adapter_that_is_its_own_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    for base in (str(tmp_path), "", "a\0b", None, [["x"]]):
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": base})
        )
        assert "names no base model" in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_part_that_is_no_file(name: str, make: Callable[[Path], None], model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    message = refused(model)
    assert name in message and ("download or save" in message or "give a folder" in message)


def test_a_config_larger_than_the_memory(model: Path) -> None:
    os.truncate(model / "config.json", 20 * 2**30)
    assert (
        "config.json cannot be read" in (message := refused(model)) and "21474836480" in message
    )


def test_a_number_of_4000_digits(model: Path) -> None:
    edit(model / "config.json", hidden_size=10**4000)
    assert "an integer beyond" in refused(model)


def test_an_adapter_that_is_saved_merged_stands_for_what_was_trained(tmp_path: Path) -> None:
    """On a base of 4 bits it is another policy than on the base itself."""
    adapter = tmp_path / "model"
    write_tiny_model(adapter / "merged")
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    settings = {"base_model_name_or_path": "no/base", "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    plan = resolve_model(str(adapter))
    assert (plan.folder, plan.ready) == (adapter / "merged", True)


def test_a_policy_of_quantized_weights_is_refused_and_can_be_measured(
    model: Path, tmp_path: Path
) -> None:
    edit(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    rows = [{"prompt": "1 + 1 =", "answer": "2"}]
    arguments = {"model": str(model), "dataset": rows, "reward": "exact_answer"}
    with pytest.raises(ModelError, match=r"quantized \(gptq\).*with --quantize 4bit"):
        ycore.dry_run("grpo", **arguments, output=str(tmp_path / "run"))
    ycore.dry_run("eval", **arguments, output=str(tmp_path / "measured"))
    ycore.dry_run("grpo", **arguments, engine="transformers", output=str(tmp_path / "run"))
