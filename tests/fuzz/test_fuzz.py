"""Every reader against damaged and made-up input: no exception but ycore's own, bounded time, bounded memory."""

import random
from pathlib import Path

import pytest

from tests.fuzz.harness import attack, inputs
from tests.fuzz.mutations import bit_flips
from tests.fuzz.targets import Target, targets
from ycore.errors import DataError

TARGETS = {target.name: target for target in targets()}


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.filterwarnings("ignore:No artists")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.verify)])
def test_nothing_but_a_refusal_comes_out(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = TARGETS[name]
    outcome = attack(target, inputs(target, seed=0, rounds=round(share * target.rounds)))
    print(
        f"{name}: {outcome.tried} tried, {outcome.refused} refused, slowest {outcome.slowest_s:.2f} s"
    )
    assert outcome.tried >= round(share * target.rounds)
    assert outcome.defects == {}


def test_defects_are_found() -> None:
    def read(data: bytes, place: Path) -> None:
        if data.startswith(b"k"):
            raise KeyError(data)
        if data.startswith(b"m"):
            bytearray(16 << 30)
        if data.startswith(b"r"):
            raise DataError("no")

    outcome = attack(Target("t", [b"x"], read), [b"k", b"m", b"r", b"x", b"k2"])
    assert (outcome.tried, outcome.refused) == (5, 1)
    assert {defect.split()[0] for defect in outcome.defects} == {"KeyError", "MemoryError"}


def test_the_same_seed_draws_the_same() -> None:
    target = TARGETS["jsonl"]
    first = list(inputs(target, seed=3, rounds=50))
    assert (
        first
        == list(inputs(target, seed=3, rounds=50))
        != list(inputs(target, seed=4, rounds=50))
    )
    assert len(set(first)) > 40


def test_every_bit_is_flipped_once() -> None:
    flipped = list(bit_flips(b"ab"))
    assert len(set(flipped)) == 16 and all(
        sum((before ^ after).bit_count() for before, after in zip(b"ab", data, strict=True))
        == 1
        for data in flipped
    )


def test_the_seeds_are_right_themselves() -> None:
    """A target that refuses what it should read would show nothing."""
    for name in (
        "safetensors",
        "recipe",
        "judge-file",
        "run-folder",
        "report-page",
        "pipeline",
        "answer",
        "flow-folder",
    ):
        target = TARGETS[name]
        outcome = attack(target, target.seeds[:1])
        assert (outcome.tried, outcome.refused, outcome.defects) == (1, 0, {}), name
    assert random.Random(0).random() == pytest.approx(0.8444218515250481), (
        "draws do not change from Python to Python"
    )
