"""Runs whose prompts have pictures, at the command line: what works, and one line for what does not."""

import json
from pathlib import Path

import pytest
from PIL import Image as Pillow
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from tests.tiny_vision import write_tiny_vision_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_vision_model(root / "model")
    write_tiny_model(root / "text")
    Pillow.new("RGB", (8, 8), "red").save(root / "red.png")
    row = {"prompt": "Which colour?", "answer": "red"}
    for name, image in {
        "rows": "red.png",
        "missing": "blue.png",
        "url": "https://example.org/red.png",
    }.items():
        (root / f"{name}.jsonl").write_text(json.dumps(row | {"image": image}))
    judge = {
        "model": str(root / "text"),
        "rubric": "Is it red?",
        "verdict": {"kind": "score", "max": 1},
    }
    (root / "blind.yaml").write_text(json.dumps(judge))
    (root / "rewards.py").write_text(
        "def seen(completions, images, **_):\n    return [1.0] * len(images)\n"
    )
    return root


COMMAND = "grpo --model {place}/model --dataset {place}/rows.jsonl --reward exact_answer --output {place}/out --dry-run "


def test_the_plan_says_what_stays_frozen(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run((COMMAND + "--reward {place}/rewards.py:seen").format(place=place).split()) == 0
    words = " ".join(capfd.readouterr().out.split())
    assert "columns answer, images" in words
    assert "the vision tower and its projector stay frozen" in words
    assert run((COMMAND + "--full").format(place=place).split()) == 0
    assert "every weight" in (said := capfd.readouterr().out) and "frozen" not in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("--model {place}/text", "row 0 has a picture, and {place}/text reads text only"),
        (
            "--dataset {place}/missing.jsonl",
            "image of row 0 (line 1) of {place}/missing.jsonl cannot be read",
        ),
        ("--dataset {place}/url.jsonl", "URLs are not fetched"),
        ("--reward rm:{place}/text", "rm:{place}/text reads text only"),
        (
            "--reward judge:{place}/blind.yaml",
            "judge:blind asks {place}/text, which reads text only; name a model that",
        ),
        ("--reward reference_probability", "reads text only"),
        ("--tools python", "tools, an environment or an agent"),
    ],
)
def test_what_cannot_see_is_refused_in_one_line(
    command: str, says: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    option = command.split()[0]
    before, _, after = COMMAND.partition(
        f"{option} "
    )  # what the command says in its place goes
    base = f"{before}{after.partition(' ')[2]} " if after else COMMAND
    assert run((base + command).format(place=place).split()) == 2
    written = capfd.readouterr()
    assert says.format(place=place) in (line := written.err.strip()), written
    assert len(line.splitlines()) == 1


def test_a_judge_that_is_served_here_may_see(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run((COMMAND + "--reward judge:cheerful").format(place=place).split()) == 0
    assert "judge cheerful: the policy's base weights" in " ".join(
        capfd.readouterr().out.split()
    )


@pytest.mark.parametrize("command", ["ppo", "online-dpo"])
def test_other_learners_do_not_see_yet(
    command: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run((command + COMMAND[4:]).format(place=place).split()) == 2
    assert "take ycore grpo or ycore rloo" in capfd.readouterr().err
