"""The small models of the recipes with digits: made the same twice, and eyes that read digits that they never saw."""

import json
from pathlib import Path

import pytest
import torch
import ycore_docs.digit_models as sighted
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from ycore.errors import ModelError
from ycore.flow.flow_inputs import flow_model
from ycore.models.model_facts import sighted_family
from ycore.models.names import resolve_model


@pytest.fixture
def language(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "language")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.verify
def test_it_is_made_the_same_twice_and_reads_other_digits(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sighted, "STEPS", 120)
    shares: list[float] = []
    align = sighted._align
    monkeypatch.setattr(sighted, "_align", lambda *parts: shares.append(align(*parts)) or 1.0)
    for name in ("first", "second"):
        sighted.make_sighted(language, tmp_path / name)
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
    )
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    assert shares[0] == shares[1] > 0.8
    words = load_file(language / "model.safetensors")["model.embed_tokens.weight"]
    kept = first["language_model.model.embed_tokens.weight"]
    torch.testing.assert_close(kept[: len(words)], words.bfloat16(), atol=0, rtol=0)
    assert (
        resolve_model(str(tmp_path / "first")).has_chat_template
        and sighted_family(str(tmp_path / "first")) == "llava"
    )


def test_eyes_that_do_not_read_are_no_model(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sighted, "STEPS", 1)
    with pytest.raises(ModelError, match="of the digits kept aside"):
        sighted.make_sighted(language, tmp_path / "blind")


def test_the_splits_share_no_digit() -> None:
    (train, _), (test, labels) = sighted.read_digits("train"), sighted.read_digits("test")
    assert (len(train), len(test)) == (1297, 500) and set(labels.tolist()) == set(range(10))
    assert test.max() == 255 and test.shape[1:] == (8, 8)


def test_the_rows_ask_about_pictures_that_are_there(tmp_path: Path) -> None:
    sighted.write_rows(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("train", "test", "wrong")
    }
    images_of = {
        name: {image for row in rows[name] for image in row["images"]} for name in rows
    }
    assert images_of["train"].isdisjoint(images_of["test"])
    assert all(
        (tmp_path / image).is_file() for images in images_of.values() for image in images
    )
    _, digits = sighted.read_digits("test")
    for row in rows["test"]:
        numbers = [int(image.partition("-")[2].removesuffix(".png")) for image in row["images"]]
        assert row["answer"] == str(sum(int(digits[number]) for number in numbers))
    assert [row["answer"] for row in rows["test"]] != [row["answer"] for row in rows["wrong"]]


def test_the_model_that_draws_is_a_flow_model(tmp_path: Path) -> None:
    sighted.make_drawing(tmp_path, steps=2)
    assert flow_model(str(tmp_path)).num_classes == 10
