"""What makes a run another run, and what does not."""

from pathlib import Path

import pytest

from ycore.config.schema import EngineSettings, RewardSettings, RunConfig
from ycore.config.trl_fields import fields_of
from ycore.run.claim import (
    FREE,
    FREE_OF_TRL,
    contents_that_differ,
    files_fingerprint,
    in_words,
    model_fingerprint,
    settings_that_differ,
)


def test_what_may_change_is_what_there_is() -> None:
    names = {*RunConfig.model_fields}
    names |= {f"engine.{name}" for name in EngineSettings.model_fields}
    names |= {f"reward_workers.{name}" for name in RewardSettings.model_fields}
    assert names >= FREE
    assert {*fields_of("GRPOConfig")} >= FREE_OF_TRL


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"seed": 0}, {"seed": 1}, "seed: 0 there, 1 here"),
        ({"trl": {"beta": 0.1}}, {"trl": {}}, "trl.beta: 0.1 there, None here"),
        ({"lora": {"r": 16}}, {"lora": None}, "lora.r: 16 there, None here"),
        ({"rewards": [{"weight": 1}]}, {"rewards": [{"weight": 2}]}, "rewards: [{'weight': 1}] there"),
        ({"steps": 9}, {"steps": 8}, "steps: 9 there, 8 here"),
        ({"steps": 9}, {"steps": 10}, ""),
        ({"engine": {"count": 1}}, {"engine": {"count": 2}}, ""),
        ({"trl": {"report_to": "wandb"}}, {"trl": {}}, ""),
    ],
)
def test_differences_are_named(old: dict[str, object], new: dict[str, object], said: str) -> None:
    told = in_words(settings_that_differ(old, new))
    assert told.startswith(said) if said else told == ""


def test_many_differences_are_counted() -> None:
    found = settings_that_differ({}, dict.fromkeys("abcde", 1))
    assert in_words(found) == "a: None there, 1 here; b: None there, 1 here; c: None there, 1 here; and 2 more"


def test_a_model_is_known_by_its_content(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    (tmp_path / "README.md").write_text("one")
    first = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("two")
    assert model_fingerprint(tmp_path) == first
    weights.write_bytes(bytes(999) + b"x")
    assert model_fingerprint(tmp_path) != first
    (difference,) = contents_that_differ({"model": first}, {"model": model_fingerprint(tmp_path)})
    assert str(difference).startswith("model: '1000 bytes, sha256 ")


def test_a_large_file_is_known_by_blocks_over_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ycore.run.claim._WHOLE_BYTES", 100)
    monkeypatch.setattr("ycore.run.claim._BLOCK_BYTES", 8)
    file = tmp_path / "weights"
    file.write_bytes(bytes(10_000))
    first = files_fingerprint([file])
    for place in (0, 9_999):
        data = bytearray(10_000)
        data[place] = 1
        file.write_bytes(data)
        assert files_fingerprint([file]) != first
