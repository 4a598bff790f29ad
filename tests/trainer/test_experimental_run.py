"""TRL's experimental trainers, for real on the tiny model: each learns, its model loads, and it goes on exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny_model import write_tiny_model
from tests.trainer.test_example_run import (
    PAIRS,
    StopAfter,
    adapter,
    loads,
    losses,
    measured,
    opened,
    same,
    trained,
)
from ycore.api.running import checked_plan
from ycore.config.resolve import resolve
from ycore.errors import ConfigError, Interrupted
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import read_metrics

KEYS: dict[str, dict[str, Any]] = {
    "orpo": {},
    "cpo": {},
    "gold": {"max_completion_length": 4, "lmbda": 0.5, "use_uld_loss": True},
    "sdft": {"max_completion_length": 4, "num_generations": 2},
    "sdpo": {"max_completion_length": 4, "num_generations": 2, "success_reward_threshold": 0.1},
}
REWARD = """
def letters(completions, answer):
    assert all(text.startswith("it is") for text in answer)
    return [sum(map(ord, turns[-1]["content"])) % 2 / 1 for turns in completions]
"""


def write_byte_model(folder: Path, *, merges: list[tuple[str, str]]) -> None:
    """Write the tiny model with a byte-level tokenizer, which GOLD aligns with another one."""
    write_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = tokenizer.all_special_tokens
    pieces = [*special, *sorted(ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        additional_special_tokens=special[3:],
    )
    whole.chat_template = tokenizer.chat_template
    whole.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(whole), mean_resizing=False)
    model.config.eos_token_id = whole.eos_token_id
    model.config.pad_token_id = whole.pad_token_id
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "tiny")
    write_byte_model(root / "bytes", merges=[])
    write_byte_model(root / "teacher", merges=[("i", "t"), ("i", "s")])
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    rows = [
        {"prompt": f"{a} + {b}?", "completion": f"it is {a + b}"}
        for a in range(8)
        for b in range(4)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARD)
    return root


def keys_of(place: Path, method: str, **more: Any) -> dict[str, Any]:
    trl = dict(KEYS[method])
    keys: dict[str, Any] = {"trl": trl, "held_out": 2, **more}
    if method == "gold":
        trl["teacher_model_name_or_path"] = str(place / "teacher")
        keys["model"] = str(place / "bytes")
    if method not in ("orpo", "cpo"):
        keys["dataset"] = str(place / "rows.jsonl")
    if method == "sdpo":
        keys["reward"] = f"{place}/rewards.py:letters"
    return keys


@pytest.mark.parametrize("method", ["orpo", "cpo"])
def test_it_learns_from_pairs_and_its_model_loads(
    method: str, place: Path, tmp_path: Path
) -> None:
    trained(opened(place, tmp_path / "run", method, **keys_of(place, method)))
    seen = losses(tmp_path / "run")
    assert len(seen) == 8 and sum(seen[-3:]) < sum(seen[:3])
    ends = read_json(RunFolder(tmp_path / "run").held_out)["held_out"]
    assert ends["after"]["loss"] < ends["before"]["loss"]
    assert loads(tmp_path / "run", method, place)


@pytest.mark.parametrize(
    "method",
    [
        "gold",
        *(
            pytest.param(name, marks=pytest.mark.verify)
            for name in ("orpo", "cpo", "sdft", "sdpo")
        ),
    ],
)
def test_stopped_and_gone_on_with_is_never_stopped(
    method: str, place: Path, tmp_path: Path
) -> None:
    """Methods that write themselves draw random tokens: a generator that was not restored would show."""
    keys = keys_of(place, method, steps=4, checkpoint_every=2, eval_every=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(opened(place, whole, method, **keys))
    run = opened(place, parts, method, **keys)
    run.trainer.add_callback(StopAfter(run, step=3))
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run.train()
    run.close()
    trained(opened(place, parts, method, **keys))
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4
    assert measured(parts) == measured(whole)
    assert same(adapter(RunFolder(whole).model), adapter(RunFolder(parts).model))


def test_sdpos_reward_scores_what_it_writes(place: Path, tmp_path: Path) -> None:
    trained(opened(place, tmp_path, "sdpo", **keys_of(place, "sdpo", steps=2)))
    rows = read_metrics(RunFolder(tmp_path).metrics)
    means = [
        row["self_distillation/reward_mean"]
        for row in rows
        if "self_distillation/reward_mean" in row
    ]
    assert len(means) == 2 and all(0.0 <= mean <= 1.0 for mean in means) and any(means)


@pytest.mark.parametrize(
    ("method", "keys", "way_out"),
    [
        ("gold", {}, "--teacher-model-name-or-path MODEL"),
        ("sdpo", {}, "--set reward=exact_answer"),
        ("sdft", {"trl": {"use_vllm": True}}, "write by transformers"),
        ("gold", {"trl": {"vllm_mode": "server"}}, "write by transformers"),
        ("sdft", {"trl": {"teacher_model_kind": "ema"}}, "take live or base"),
        ("orpo", {"reward": "exact_answer"}, "reward=exact_answer"),
    ],
)
def test_what_it_needs_is_said_before_it_starts(
    method: str, keys: dict[str, Any], way_out: str
) -> None:
    options = {"algorithm": method, "model": "m", "dataset": "d.jsonl", "output": "o", **keys}
    with pytest.raises(ConfigError, match=way_out):
        resolve(options=options)


@pytest.mark.parametrize(("method", "is_forecast"), [("orpo", True), ("sdft", False)])
def test_the_seconds_of_those_that_write_are_not_forecast(
    method: str, is_forecast: bool, place: Path, tmp_path: Path
) -> None:
    keys = {
        "algorithm": method,
        "model": str(place / "tiny"),
        "dataset": str(place / "pairs.jsonl"),
        "output": str(tmp_path / "run"),
        "lora": None,
        **keys_of(place, method),
    }
    length = checked_plan(resolve(options=keys))["length"]
    assert ("time" in length, length["no_forecast"] is None) == (is_forecast, is_forecast)
