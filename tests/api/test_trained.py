"""A trained model is found by its run, talked to, described, staged, sent and served."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models.test_hub import write_adapter
from tests.tiny_model import write_tiny_model
from tests.tiny_vision import write_tiny_vision_model
from ycore.api import trained
from ycore.api.trained import ChatSettings
from ycore.engine.commands import engine_environment
from ycore.engine.vllm_plugin import SIGHTED
from ycore.errors import ConfigError, ModelError, RunError, RunFolderError
from ycore.launch.layout import Machine
from ycore.run.reports import is_alive

CONFIG = {
    "algorithm": "grpo", "model": "smollm2-135m", "dataset": "task:addition", "output": "runs/sums", "steps": 40,
    "rewards": [{"reward": "exact_answer", "weight": 1.0}], "lora": {"r": 16}, "engine": {"kind": "vllm"},
}  # fmt: skip
FIGURES = {"pass@1": 0.75, "pass@1/low": 0.6, "pass@1/high": 0.9, "step": 40}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "sums"
    write_tiny_model(folder / "model")
    (folder / "model" / "training_args.bin").write_bytes(b"pickled")
    run_json = {
        "config": CONFIG,
        "command": ["ycore", "grpo", "--recipe", "quickstart"],
        "versions": {"trl": "1.16.0"},
    }
    (folder / "run.json").write_text(json.dumps(run_json))
    ends = {"before": {**FIGURES, "pass@1": 0.25}, "after": FIGURES}
    (folder / "summary.json").write_text(
        json.dumps({"held_out": ends, "reward_first": 0.2, "reward_last": 0.8})
    )
    (folder / "curve.png").write_bytes(b"png")
    return folder


def test_a_run_stands_for_its_model(run: Path) -> None:
    assert trained.trained_model(str(run)) == str(run / "model")
    assert trained.trained_model("smollm2-135m") == "smollm2-135m"
    with pytest.raises(RunFolderError, match="kept no best model; say --keep-best"):
        trained.trained_model(str(run), best=True)
    (run / "best").mkdir()
    assert trained.trained_model(str(run), best=True) == str(run / "best")
    (run / "best").rmdir()
    (run / "run.json").write_text(json.dumps({"config": {"algorithm": "eval"}}))
    with pytest.raises(RunFolderError, match="is an evaluation; name the model"):
        trained.trained_model(str(run), best=True)


def test_a_reward_model_does_not_write(run: Path) -> None:
    config = run / "model" / "config.json"
    changed = json.loads(config.read_text()) | {
        "architectures": ["LlamaForSequenceClassification"]
    }
    config.write_text(json.dumps(changed))
    with pytest.raises(ModelError, match="is a reward model"):
        trained.language_model(str(run))


def test_the_same_turns_have_the_same_answers(run: Path) -> None:
    def answers(seed: int) -> list[str]:
        chat = trained.Chat(run / "model", ChatSettings(6, 1.0, seed, (), {}))
        return [chat.say("2 + 2"), chat.say("and then?")]

    assert answers(0) == answers(0) != answers(1)


def test_a_model_that_sees_is_talked_to(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    chat = trained.Chat(folder, ChatSettings(4, 1.0, 0, (), {}))
    assert isinstance(chat.say("2 + 2"), str)
    assert "vision_config" in chat._model.config.to_dict()


def test_a_run_is_asked_as_it_was_trained(run: Path) -> None:
    few_shot = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    assert trained.turns_before(str(run)) == [] == trained.turns_before("smollm2-135m")
    for text in ("Add.", ""):  # an empty one is a turn too
        (run / "run.json").write_text(
            json.dumps({"config": {**CONFIG, "system_prompt": text, "few_shot": few_shot}})
        )
        assert trained.turns_before(str(run)) == [
            {"role": "system", "content": text},
            *few_shot,
        ]
    assert trained.turns_before(str(run / "model")) == trained.turns_before(str(run))
    assert trained.turns_before(str(run / "checkpoints")) == []
    best = run.rename(run.parent / "best")  # a run of that name
    assert trained.turns_before(str(best)) == trained.turns_before(str(best / "model")) != []
    best.rename(run)
    assert trained.turns_before(str(run), system_prompt="") == few_shot
    assert trained.turns_before(str(run), system_prompt="Be brief.")[0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_a_chat_has_the_template_arguments_of_its_run(run: Path) -> None:
    template = run / "model" / "chat_template.jinja"
    closed = "{% if enable_thinking is defined and not enable_thinking %}closed{% endif %}"
    template.write_text(template.read_text() + closed)
    assert (
        trained.template_arguments(str(run)) == {} == trained.template_arguments("some/model")
    )
    arguments = {"enable_thinking": False}
    stored = {"config": {**CONFIG, "trl": {"chat_template_kwargs": arguments}}}
    (run / "run.json").write_text(json.dumps(stored))
    assert trained.template_arguments(str(run)) == arguments

    settings = ChatSettings(8, 0.0, 0, (), arguments)
    chat = trained.Chat(run / "model", settings)
    rendered = []
    render = chat._tokenizer.apply_chat_template

    def recorded(turns: Any, **options: Any) -> Any:
        inputs = render(turns, **options)
        rendered.append(chat._tokenizer.decode(inputs["input_ids"][0]))
        return inputs

    chat._tokenizer.apply_chat_template = recorded
    chat.say("2 + 2")
    assert rendered[0].endswith("<|assistant|>closed")
    words, _ = trained.serve_command(
        run / "model", name="a", host="h", port=1, template_arguments=arguments
    )
    assert words[words.index("--default-chat-template-kwargs") + 1] == json.dumps(arguments)


@pytest.mark.parametrize(
    "of_folder",
    [{"repetition_penalty": 5.0}, {"no_repeat_ngram_size": 1}, {"min_new_tokens": 8}, {}],
)
def test_a_chat_does_not_sample_by_the_folders_defaults(
    of_folder: dict[str, Any], run: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = run / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **of_folder}))
    chat = trained.Chat(run / "model", ChatSettings(8, 0.0, 0, (), {}))
    answer = chat.say("2 + 2")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    turns = [{"role": "user", "content": "2 + 2"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    written: list[int] = []
    with torch.no_grad():
        while len(written) < 8 and tokenizer.eos_token_id not in written:
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
    assert answer == tokenizer.decode(written, skip_special_tokens=True)


class Recorder(trained.Chat):
    """Answers `a` and keeps what it is asked."""

    def __init__(self, folder: Path, before: Sequence[Any] = ()) -> None:
        super().__init__(folder, ChatSettings(6, 1.0, 5, before, {}))
        self.prompts: list[Any] = []

    def _write(self, prompt: Any, *, seed: int, show: Any) -> str:
        self.prompts.append((list(prompt), seed))
        return "a"


def test_a_conversation_goes_on_from_the_turns_before_it(run: Path, tmp_path: Path) -> None:
    system, answer = (
        {"role": "system", "content": "Add."},
        {"role": "assistant", "content": "a"},
    )
    users = [{"role": "user", "content": text} for text in ("1 + 1", "and then?")]
    chat = Recorder(run / "model", before=[system])
    assert [chat.say(user["content"]) for user in users] == ["a", "a"]
    assert chat.prompts == [([system, users[0]], 7), ([system, users[0], answer, users[1]], 9)]
    untemplated = write_tiny_model(tmp_path / "text", chat=False)
    with pytest.raises(
        ModelError, match="has no chat template, so no system prompt either; leave it out"
    ):
        Recorder(untemplated, before=[system])
    chat = Recorder(untemplated)
    assert chat.say("1") + chat.say("2") == "aa" and chat.prompts == [(["1"], 5), (["2"], 5)]


def test_what_is_shown_while_it_is_written_is_the_answer(run: Path) -> None:
    pieces: list[str] = []
    chat = trained.Chat(run / "model", ChatSettings(60, 1.0, 0, (), {}))
    answer = chat.say("2 + 2", show=pieces.append)
    assert "".join(pieces) == answer
    assert len([words for words in pieces if words]) > 1


def test_a_card_says_what_it_is_and_how_it_was_made(run: Path) -> None:
    card = trained.card(run, repo="me/sums", base="some/model", adapter=False, has_curve=True)
    assert card.startswith("---\nbase_model: some/model\nlibrary_name: transformers\n")
    for part in (
        "# sums",
        "`exact_answer`",
        "(curve.png)",
        "grpo --recipe quickstart",
        "trl 1.16.0",
    ):
        assert part in card
    assert "| pass@1 | 0.250 | 0.750 |" in card
    assert "runs/sums" not in card and "engine" not in card, "what is only about the machine"


def test_the_card_of_the_best_model_has_its_own_figures(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["best"] = {**summary["held_out"]["after"], "step": 8, "pass@1": 0.875}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "best").mkdir()
    (run / "best" / "config.json").write_text("{}")
    with trained.staged(run, best=True, merged=False, repo="me/sums") as folder:
        card = (folder / "README.md").read_text()
    assert "| pass@1 | 0.250 | 0.875 |" in card


def test_a_card_holds_no_folder_of_the_machine(run: Path) -> None:
    recorded = json.loads((run / "run.json").read_text())
    recorded["command"] = [
        *("ycore", "grpo", "--model", "org/model", "--dataset=/home/me/data/train.jsonl"),
        *(
            "--reward",
            "judge:/home/me/strict.yaml",
            "--output",
            "/home/me/my runs/a",
            "~/x.yaml",
        ),
        *("--agent", "http://host/v1"),
    ]
    recorded["config"]["rewards"] = [{"reward": "/home/me/rewards.py:score"}]
    (run / "run.json").write_text(json.dumps(recorded))
    card = trained.card(run, repo="me/sums", base=None, adapter=False, has_curve=False)
    assert "/home" not in card and "my runs" not in card
    assert "`rewards.py:score`" in card
    assert (
        "--model org/model --dataset=train.jsonl --reward judge:strict.yaml --output a" in card
    )
    assert "x.yaml --agent http://host/v1" in card


def test_a_command_to_paste_is_quoted(tmp_path: Path) -> None:
    run = tmp_path / "läufe" / "eins zwei"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"config": {}}')
    with pytest.raises(RunFolderError, match=f"`ycore resume '{run}'` goes on"):
        trained.trained_model(str(run))


def test_a_card_tells_the_system_prompt_to_ask_with(run: Path) -> None:
    (run / "run.json").write_text(
        json.dumps({"config": {**CONFIG, "system_prompt": "Add, please."}})
    )
    card = trained.card(run, repo="me/sums", base=None, adapter=False, has_curve=False)
    assert "\nycore chat me/sums --system-prompt 'Add, please.'\n" in card


def test_a_card_of_a_run_without_held_out_rows_has_its_reward(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"reward_first": 0.2, "reward_last": 0.8}))
    card = trained.card(run, repo="me/sums", base=None, adapter=False, has_curve=False)
    assert "from 0.200 to 0.800" in card and "base_model" not in card


def test_what_is_sent_has_no_pickle_and_the_card(run: Path) -> None:
    (run / "model" / "README.md").write_text("peft's own")
    with trained.staged(run, best=False, merged=False, repo="me/sums") as folder:
        names = dict(trained.sizes(folder))
        assert {"README.md", "curve.png", "model.safetensors", "tokenizer.json"} <= names.keys()
        assert (
            "training_args.bin" not in names
            and "peft's own" not in (folder / "README.md").read_text()
        )
    assert not folder.exists()


def began_with(run: Path, name: str, folder: Path) -> None:
    """Make its model an adapter of the model `name`, which was loaded from `folder`."""
    write_adapter(run / "model", of=write_tiny_model(run.parent / "base"), named=str(folder))
    for left in ("config.json", "model.safetensors"):
        (run / "model" / left).unlink(missing_ok=True)
    (run / "run.json").write_text(json.dumps({"config": {**CONFIG, "model": name}}))
    (run / "engines.json").write_text(json.dumps({"model": str(folder)}))


def test_an_adapter_names_its_base_as_the_hub_does(run: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0123"
    builtin = tmp_path / "cache" / "builtin" / "smollm2-135m"
    whole = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name, loaded, base in (
        ("some/model", snapshot, "some/model"),
        ("smollm2-135m", builtin, whole),
    ):
        began_with(run, name, loaded)
        with trained.staged(run, best=False, merged=False, repo="me/sums") as folder:
            settings = json.loads((folder / "adapter_config.json").read_text())
            assert settings["base_model_name_or_path"] == base and settings["r"] == 4
            head = f"---\nbase_model: {base}\nlibrary_name: peft\n"
            assert (folder / "README.md").read_text().startswith(head)
            texts = [file.read_bytes() for file in folder.iterdir()]
            assert not any(str(tmp_path).encode() in text for text in texts), (
                "a path of this machine"
            )


def test_an_adapter_of_what_the_hub_does_not_have_is_sent_merged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    began_with(run, "models/base", tmp_path / "runs" / "base")
    with (
        pytest.raises(ModelError, match="push the whole model with --format merged"),
        trained.staged(run, best=False, merged=False, repo="me/sums"),
    ):
        pass
    with trained.staged(run, best=False, merged=True, repo="me/sums") as folder:
        card = (folder / "README.md").read_text()
        assert (
            card.startswith("---\nlibrary_name: transformers\n")
            and "`base` trained with" in card
        )
        assert (folder / "config.json").is_file() and not (
            folder / "adapter_config.json"
        ).exists()


def test_a_push_makes_the_repository_and_sends_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Api:
        def create_repo(self, repo: str, **options: Any) -> None:
            calls.append((repo, options))

        def upload_folder(self, **options: Any) -> str:
            calls.append(options["folder_path"])
            return "https://hub/me/sums"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    trained.push(tmp_path, repo="me/sums", private=True, say=calls.append)
    assert calls == [
        ("me/sums", {"private": True, "exist_ok": True}), tmp_path, "pushed to https://hub/me/sums"
    ]  # fmt: skip

    def refused(self: Any, repo: str, **options: Any) -> None:
        raise ValueError("401: not logged in\nmore")

    monkeypatch.setattr(Api, "create_repo", refused)
    with pytest.raises(
        RunError, match="could not push to me/sums: 401: not logged in; log in with"
    ):
        trained.push(tmp_path, repo="me/sums", private=True, say=calls.append)


def test_a_server_listens_where_it_is_told_and_cannot_be_changed(run: Path) -> None:
    words, spec = trained.serve_command(
        run / "model", name="sums", host="127.0.0.1", port=9000, template_arguments={}
    )
    line = " ".join(words)
    assert (
        "--host 127.0.0.1 --port 9000" in line
        and "--served-model-name sums" in line
        and "--uds" not in line
    )
    assert (
        "--max-model-len 512" in line
        and "PolicyWorker" not in line
        and spec.max_model_len == 512
    )


@pytest.mark.parametrize(
    ("devices", "num_sequences", "length"), [((), 8, 4096), (("0",), 256, 32768)]
)
def test_a_server_on_a_gpu_writes_many_answers_and_long_ones(
    devices: tuple[str, ...], num_sequences: int, length: int, run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It wrote eight at once of at most 4096 tokens, as on a CPU."""
    machine = Machine(cores=(0, 1), devices=devices)
    monkeypatch.setattr(trained, "this_machine", lambda: machine)
    config = run / "model" / "config.json"
    settings = json.loads(config.read_text()) | {"max_position_embeddings": 131072}
    config.write_text(json.dumps(settings))
    words, spec = trained.serve_command(
        run / "model", name="sums", host="127.0.0.1", port=9000, template_arguments={}
    )
    assert (spec.max_num_seqs, spec.max_model_len) == (num_sequences, length)
    assert f"--max-model-len {length}" in " ".join(words)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1", "127.0.0.1"])
def test_an_address_that_cannot_be_listened_on_is_refused(host: str) -> None:
    trained.check_address("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host {host} --port {port}.*e.g. --host"):
            trained.check_address(host, port)


def test_a_server_of_a_model_that_sees_reads_pictures(tmp_path: Path) -> None:
    """It reads them by its own chat, and not by the route for the trainer, which no key guards."""
    folder = write_tiny_vision_model(tmp_path)
    words, spec = trained.serve_command(
        folder, name="eyes", host="127.0.0.1", port=9000, template_arguments={}
    )
    assert engine_environment(spec)[SIGHTED] == "1" and "--enable-scale-out" not in words


def test_an_export_never_writes_over_anything(run: Path, tmp_path: Path) -> None:
    trained.export_model(run / "model", tmp_path / "out", form="merged", name="sums")
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (
        tmp_path / "out" / "training_args.bin"
    ).exists()
    with pytest.raises(RunFolderError, match="exists; choose another --output"):
        trained.export_model(run / "model", tmp_path / "out", form="merged", name="sums")


_SERVES = """
import signal, sys
from pathlib import Path
from ycore.api import trained
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup inherit that it is ignored
model, pids = map(Path, sys.argv[1:])
_, spec = trained.serve_command(model, name="sums", host="127.0.0.1", port=9000, template_arguments={})
sys.exit(trained.serve_model(["sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"], spec, environment={}, say=print))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
)
def test_a_server_ends_with_its_command(
    run: Path, tmp_path: Path, number: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    command = subprocess.Popen([sys.executable, "-c", _SERVES, str(run / "model"), str(pids)])
    server: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while not server and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if pids.exists() and len(words := pids.read_text().split()) == 2:
            server = [psutil.Process(int(word)) for word in words]
    command.send_signal(number)
    assert command.wait(60) == (-9 if number == signal.SIGKILL else 0)
    while any(is_alive(process) for process in server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process for process in server if is_alive(process)] == [] and len(server) == 2
