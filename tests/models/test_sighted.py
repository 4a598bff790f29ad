"""The small model that sees: made the same twice, and its eyes read digits that they never saw."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from ycore.data.source import read_table
from ycore.errors import ModelError
from ycore.models import sighted
from ycore.models.names import MADE, require_sight, resolve_model, sighted_family


@pytest.fixture
def language(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "language")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_it_is_made_the_same_twice_and_reads_other_digits(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sighted, "STEPS", 120)
    shares: list[float] = []
    align = sighted._align
    monkeypatch.setattr(sighted, "_align", lambda *parts: shares.append(align(*parts)) or 1.0)
    for name in ("first", "second"):
        sighted.make_sighted(language, tmp_path / name)
    one, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
    )
    assert one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )
    assert shares[0] == shares[1] > 0.8
    words = load_file(language / "model.safetensors")["model.embed_tokens.weight"]
    kept = one["language_model.model.embed_tokens.weight"]
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


@pytest.mark.parametrize(("name", "count"), [("see-digit", 1), ("see-and-add", 2)])
def test_questions_about_digits(name: str, count: int) -> None:
    def rows(text: str, split: str = "train", seed: int = 0) -> list[dict[str, object]]:
        return [
            dict(row)
            for row in read_table(f"task:{name}{text}", split=split, seed=seed, limit=None).rows
        ]

    first = rows("?size=40")
    assert len(first) == 40 and {len(row["images"]) for row in first} == {count}  # type: ignore[arg-type]
    assert rows("?size=40") == first != rows("?size=40", seed=1)
    shown = {image for row in rows("?size=200") for image in row["images"]}  # type: ignore[attr-defined]
    assert shown.isdisjoint(
        {image for row in rows("?size=200", "test") for image in row["images"]}
    )  # type: ignore[attr-defined]
    assert [row["images"] for row in rows("?size=40&wrong=1")] != [
        row["images"] for row in first
    ]


def test_the_made_model_is_known_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    for name, base in MADE.items():
        plan = resolve_model(name)
        assert not plan.ready and base in plan.note and sighted_family(name) == "llava"
        require_sight(plan, 0)
