"""`ycore sft | reward | dpo | kto | rloo` on the command line: the plan of good lines, one line for bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from ycore.models.tiny import write_tiny_model

PAIRS = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "no"} for n in range(20)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "model")
    write_tiny_model(root / "untemplated", chat=False)
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (root / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    (root / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (root / "empty.jsonl").write_text("")
    (root / "mine.yaml").write_text(f"algorithm: dpo\nmodel: {root}/model\ndataset: {root}/pairs.jsonl\nsteps: 3\n")
    return root


def line(place: Path, words: str) -> list[str]:
    method, _, more = words.partition(" ")
    base = f"{method} --model {place}/model --output {place}/out --dry-run"
    data = "" if "--dataset" in more or "--recipe" in more else f" --dataset {place}/pairs.jsonl"
    return f"{base}{data} {more}".format(place=place).split()


GOOD: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("reward", ("dataset", "rows"), 18),
    ("reward --held-out 5", ("dataset", "held_out"), 5),
    ("dpo --full", ("trl", "learning_rate"), 1e-6),
    ("dpo --loss-type ipo,sft --beta 0.05", ("trl", "loss_type"), ["ipo", "sft"]),
    ("dpo --epochs 2.5 --batch-size 4", ("batch", "steps"), 12),
    ("dpo --steps 7", ("trl", "max_steps"), 7),
    ("dpo --num-train-epochs 2 --per-device-train-batch-size 3", ("batch", "batch_size"), 3),
    ("kto --undesirable-weight 1.5", ("dataset", "rows"), 36),
    ("sft --set columns.completion=chosen --packing", ("trl", "packing"), True),
    ("sft --dataset {place}/texts.jsonl", ("dataset", "chat"), False),
    ("sft --dataset task:addition?digits=1 --limit 30", ("dataset", "columns"), ["prompt", "completion"]),
    ("dpo --recipe {place}/mine.yaml", ("trl", "max_steps"), 3),
    ("dpo --set lora.r=4 --merge", ("config", "lora", "r"), 4),
    ("dpo --processes 2 --accelerate zero2", ("ranks", "world"), 2),
]


@pytest.mark.parametrize(("words", "path", "expected"), GOOD, ids=[words for words, _, _ in GOOD])
def test_a_good_line_gives_its_plan(
    words: str, path: tuple[str | int, ...], expected: object, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*line(place, words), "--json"]) == 0
    value = json.loads(capfd.readouterr().out)
    for key in path:
        value = value[key]
    assert value == expected
    assert not (place / "out").exists()


def test_the_plan_in_words(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(line(place, "reward --batch-size 6 --max-length 128 --use-cpu")) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert [text.split()[0] for text in out.splitlines()] == ["model", "dataset", "batch", "run", "output", "Nothing"]
    assert "18 rows to train on, 2 held out, chats, columns prompt, chosen, rejected" in out
    assert "3 steps, 1 epochs, of LoRA r=16, bfloat16, learning rate 0.0001, seed 0" in out


BAD = [
    ("sft", "lacks the columns that sft reads"),
    ("reward --dataset {place}/texts.jsonl", "has no column chosen and no rejected"),
    ("reward --dataset {place}/empty.jsonl", "is empty; a run needs at least one row"),
    ("reward --dataset {place}/pair.jsonl", "did you mean 'pairs.jsonl'"),
    ("sft --dataset {place}/chats.jsonl", "no row of"),
    ("sft --dataset {place}/chats.jsonl --model {place}/untemplated --completion-only-loss false", "no chat template"),
    ("dpo --loss-typ ipo", "no option --loss-typ; did you mean '--loss-type'"),
    ("dpo --group-size 4", "no option --group-size"),
    ("dpo --eval-steps 4", "eval_steps is not taken from TRL's fields"),
    ("dpo --batch-size 0", "batch_size must be greater than 0; it is 0"),
    ("dpo --batch-size 64", "a step takes 64 rows and the dataset has 18 to train on; e.g. --batch-size 18"),
    ("dpo --batch-size eight", "--batch-size takes a whole number; it is 'eight'"),
    ("dpo --epochs many", "--epochs takes a number; it is 'many'"),
    ("dpo --max-length 4096", "max_length must fit into the model's context of 512 tokens; it is 4096"),
    ("kto --per-device-train-batch-size 1", "kto needs 2 rows or more in a micro-batch"),
    ("dpo --processes 2 --batch-size 5", "batch_size must be a multiple of the 2 ranks; it is 5; e.g. 4 or 6"),
    ("dpo --recipe quickstart", "the recipe quickstart is for `ycore grpo`, not dpo"),
    ("sft --recipe {place}/mine.yaml", "is for `ycore dpo`, not sft; say ycore dpo --recipe"),
    ("dpo --set columns.chosen=best", "has no column 'best' (columns.chosen)"),
    ("reward --processes 2 --accelerate zero3", "a reward model is saved whole, and --accelerate zero3 splits it"),
    ("dpo --held-out 20", "20 held-out rows of 20 leave none to train on; lower --held-out"),
    ("dpo --lr 1", "no option --lr; did you mean '--learning-rate'?"),
    ("dpo --resume", "--resume needs the folder of a run"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_a_bad_line_ends_with_one_line(
    words: str, message: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(line(place, words)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_rloo_is_a_preset_of_the_group_algorithms(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"rloo --recipe quickstart --model {place}/model --output {place}/out --dry-run --json"
    assert run(words.split()) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["config"]["algorithm"], plan["config"]["advantage"]) == ("rloo", "rloo")
    assert (plan["trl"]["loss_type"], plan["trl"]["scale_rewards"]) == ("dr_grpo", "none")
