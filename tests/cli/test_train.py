"""The commands that train from the table of algorithms: plans and refusals of good and bad lines; `ycore resume`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from ycore.config.resolve import resolve
from ycore.data.prompts import load_prompts
from ycore.launch.layout import Machine
from ycore.run.claim import check_contents, claim, contents_of
from ycore.run.files import RunFolder
from ycore.run.resuming import publish, round_file, staging

PAIRS = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "no"} for n in range(20)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "model")
    write_tiny_model(root / "untemplated", chat=False)
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (root / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    )
    (root / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (root / "empty.jsonl").write_text("")
    (root / "mine.yaml").write_text(
        f"algorithm: dpo\nmodel: {root}/model\ndataset: {root}/pairs.jsonl\nsteps: 3\n"
    )
    return root


def line(place: Path, words: str) -> list[str]:
    method, _, more = words.partition(" ")
    model = "" if "--model " in more else f" --model {place}/model"
    base = f"{method}{model} --output {place}/out --dry-run"
    data = (
        "" if "--dataset" in more or "--recipe" in more else f" --dataset {place}/pairs.jsonl"
    )
    return f"{base}{data} {more}".format(place=place).split()


GOOD: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("reward", ("dataset", "rows"), 18),
    ("reward --held-out 5", ("dataset", "held_out"), 5),
    ("reward --held-out 5 --eval-every 2", ("dataset", "eval_every"), 2),
    ("reward --steps 12 --keep-best accuracy", ("dataset", "eval_every"), 3),
    ("reward --steps 12", ("dataset", "eval_every"), None),
    ("reward --held-out 0", ("dataset", "eval_every"), None),
    ("kto --keep-best rewards/margins", ("config", "keep_best"), "rewards/margins"),
    (
        "sft --set columns.completion=chosen --stop-when no-gain:2",
        ("config", "stop_when"),
        ["no-gain:2"],
    ),
    ("dpo --project sums", ("trl", "project"), "sums"),
    ("dpo --full", ("trl", "learning_rate"), 1e-6),
    ("dpo --loss-type ipo", ("trl", "loss_type"), ["ipo"]),
    ("dpo --loss-type ipo,sft --beta 0.05", ("trl", "loss_type"), ["ipo", "sft"]),
    ("dpo --epochs 2.5 --batch-size 4", ("batch", "steps"), 12),
    ("dpo --steps 7", ("trl", "max_steps"), 7),
    ("dpo --num-train-epochs 2 --per-device-train-batch-size 3", ("batch", "batch_size"), 3),
    ("kto --undesirable-weight 1.5", ("dataset", "rows"), 36),
    ("sft --set columns.completion=chosen --packing --steps 3", ("trl", "packing"), True),
    ("sft --dataset {place}/texts.jsonl", ("dataset", "chat"), False),
    (
        "sft --dataset task:addition?digits=1 --limit 30",
        ("dataset", "columns"),
        ["prompt", "completion"],
    ),
    ("dpo --recipe {place}/mine.yaml", ("trl", "max_steps"), 3),
    ("dpo --set lora.r=4 --merge", ("config", "lora", "r"), 4),
    ("dpo --processes 2 --accelerate zero2", ("ranks", "world"), 2),
]


@pytest.mark.parametrize(
    ("words", "path", "expected"), GOOD, ids=[words for words, _, _ in GOOD]
)
def test_a_good_line_gives_its_plan(
    words: str,
    path: tuple[str | int, ...],
    expected: object,
    place: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([*line(place, words), "--json"]) == 0
    value = json.loads(capfd.readouterr().out)
    for key in path:
        value = value[key]
    assert value == expected
    assert not (place / "out").exists()


def test_the_epochs_of_packed_rows_are_at_least_their_number(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        "sft --set columns.completion=chosen --packing --max-length 64 --batch-size 2 --steps 3"
    )
    assert run(line(place, words)) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "epochs or more" in said and "about 128 tokens a step" in said


def test_the_plan_in_words(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            line(place, "reward --batch-size 6 --max-length 128 --use-cpu --set dtype=bfloat16")
        )
        == 0
    )
    out, err = capfd.readouterr()
    assert err == ""
    assert [text.split()[0] for text in out.splitlines() if text[0] != " "] == [
        "model",
        "dataset",
        "read",
        "asked",
        "better",
        "worse",
        "batch",
        "run",
        "data",
        "time",
        "changed",
        "output",
        "Nothing",
    ]
    out = " ".join(out.split())
    assert "18 rows to train on, 2 held out, chats, columns prompt, chosen, rejected" in out
    assert "3 steps, 1 epoch, of LoRA r=16, bfloat16, learning rate 0.0001, seed 0" in out


@pytest.mark.parametrize(
    ("words", "rows", "said"),
    [
        (
            "sft --set columns.completion=chosen",
            PAIRS[:2],
            "2 of the 2 held-out prompts are also trained on",
        ),
        (
            "dpo",
            [{**PAIRS[0], "chosen": "one"}, {**PAIRS[1], "prompt": " 99?"}],
            "1 of the 2 held-out prompts",
        ),
        ("reward", [{**PAIRS[0], "prompt": "0  +\n1? "}], "1 of the 1 held-out prompts"),
        ("kto", PAIRS[:1], "2 of the 2 held-out prompts"),
        (
            "sft --dataset {place}/texts.jsonl",
            [{"text": "two "}, {"text": "three"}],
            "1 of the 2 held-out rows",
        ),
        ("dpo", [{**PAIRS[0], "prompt": "99?"}], None),
        ("dpo --held-out 0", PAIRS[:1], None),
    ],
)
def test_held_out_rows_that_are_also_trained_on_are_counted_in_a_warning(
    words: str,
    rows: list[dict[str, Any]],
    said: str | None,
    place: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (place / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*line(place, words), "--eval-dataset", f"{place}/held.jsonl"]
    assert run(command) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert ("warning" in out) == (said is not None) and (said or "") in out
    assert run([*command, "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["warnings"]) == (said is not None)


BAD = [
    ("dpo --sync-ref-model", "with adapters that is the base, which stays; say --full"),
    ("dpo --full --sync-ref-model --precompute-ref-log-probs", "leave one of them out"),
    ("sft --dataset {place}/texts.jsonl --padding-free", "say --packing too, or --max-length"),
    (
        "sft --dataset {place}/texts.jsonl --chat-template-path m/other",
        "m/other, and the rows are texts",
    ),
    ("sft", "lacks the columns messages"),
    ("reward --dataset {place}/texts.jsonl", "lacks the columns chosen and rejected"),
    ("reward --dataset {place}/empty.jsonl", "is empty; a run needs at least one row"),
    ("reward --dataset {place}/pair.jsonl", "did you mean 'pairs.jsonl'"),
    ("sft --dataset {place}/chats.jsonl", "no row of"),
    (
        "sft --dataset {place}/chats.jsonl --model {place}/untemplated --completion-only-loss false",
        "no chat template",
    ),
    ("dpo --loss-typ ipo", "no option --loss-typ; did you mean '--loss-type'"),
    ("dpo --group-size 4", "no option --group-size"),
    ("dpo --eval-steps 4", "say `--held-out 200` and `--eval-every`, or `--keep-best loss`"),
    (
        "dpo --keep-best accuracy",
        "(loss, rewards/accuracies, rewards/margins); it is 'accuracy'",
    ),
    ("dpo --held-out 0 --eval-every 4", "--eval-every needs rows to measure on"),
    (
        "dpo --stop-when nothing-to-learn:2",
        "counts groups of completions, and ycore dpo has none",
    ),
    ("dpo --batch-size 0", "batch_size must be greater than 0; it is 0"),
    (
        "dpo --batch-size 64",
        "a step takes 64 rows and the dataset has 18 to train on; e.g. --batch-size 18",
    ),
    ("dpo --batch-size eight", "must be a whole number; it is 'eight'"),
    ("dpo --epochs many", "must be a number; it is 'many'"),
    (
        "dpo --max-length 4096",
        "max_length must fit into the model's context of 512 tokens; it is 4096",
    ),
    ("kto --per-device-train-batch-size 1", "kto needs 2 rows or more in a micro-batch"),
    (
        "dpo --processes 2 --batch-size 5",
        "batch_size must be a multiple of the 2 ranks; it is 5; e.g. 4 or 6",
    ),
    ("dpo --recipe quickstart", "the recipe quickstart is for `ycore grpo`, not dpo"),
    ("sft --recipe {place}/mine.yaml", "is for `ycore dpo`, not sft; say ycore dpo --recipe"),
    ("dpo --split test", "pairs.jsonl is a file, and has no splits; leave --split out"),
    (
        "dpo --dataset {place}/pairs.JSONL --split test",
        "pairs.JSONL is a file, and has no splits; leave --split out",
    ),
    (
        "dpo --eval-split test",
        "pairs.jsonl is a file, and has no splits; leave --eval-split out",
    ),
    ("dpo --epochs inf", "--epochs must be a finite number; it is inf"),
    ("dpo --set columns.chosen=best", "has no column 'best' (columns.chosen)"),
    (
        "reward --processes 2 --accelerate zero3",
        "a reward model is saved whole, and --accelerate zero3 splits it",
    ),
    ("dpo --held-out 20", "20 held-out rows of 20 leave none to train on; lower --held-out"),
    ("dpo --model_name_or_path x", "no option --model_name_or_path; say --model x"),
    ("dpo --lr 1", "no option --lr; say --learning-rate 1"),
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


@pytest.mark.parametrize(("dtype", "status"), [("bfloat16", 2), ("float32", 0)])
def test_kto_in_bfloat16_is_refused_under_fsdp(
    place: Path,
    dtype: str,
    status: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Machine(cores=(0, 1), devices=("0", "1"))
    monkeypatch.setattr("ycore.launch.layout.this_machine", lambda: two)
    words = f"kto --processes 2 --accelerate fsdp2 --set dtype={dtype}"
    assert run(line(place, words)) == status
    if status:
        assert "under FSDP in bfloat16; take --accelerate zero2" in capfd.readouterr().err


def test_rloo_is_a_preset_of_the_group_algorithms(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"grpo --preset rloo --recipe quickstart --model {place}/model --output {place}/out --dry-run --json"
    assert run(words.split()) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["config"]["preset"], plan["config"]["advantage"]) == ("rloo", "rloo")
    assert (plan["trl"]["loss_type"], plan["trl"]["scale_rewards"]) == ("dr_grpo", "none")


# -- going on with a run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("begun")
    write_tiny_model(root / "model")
    (root / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 4)
    return root


@pytest.fixture
def stopped(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was started in `begun` with paths relative to it, and then stopped."""
    monkeypatch.chdir(begun)
    options = {
        "model": "model",
        "dataset": "train.jsonl",
        "rewards": ["exact_answer"],
        "steps": 9,
        "dtype": "bfloat16",  # the command writes what `auto` came to
        "processes": 1,
    }
    config = resolve(
        options={**options, "output": str(tmp_path / "run"), "trl": {"beta": 0.25}}
    )
    claim(RunFolder(tmp_path / "run"), config, resume=False).release()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_resume_needs_nothing_but_the_folder(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even the folder in which the run was started."""
    assert run(["resume", "run", "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["trl"]["max_steps"], plan["trl"]["beta"], plan["output"]) == (
        9,
        0.25,
        str(stopped),
    )


def test_more_steps_are_no_change(stopped: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "resume",
                str(stopped),
                "--steps",
                "20",
                "--save-total-limit",
                "5",
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capfd.readouterr().out)["config"]["steps"] == 20


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--set seed=5", "seed: 0 there, 5 here"),
        ("--beta 0.5", "trl.beta: 0.25 there, 0.5 here"),
        ("--set prompts_per_step=4", "prompts_per_step: 8 there, 4 here"),
        ("--resume-from 3", "no checkpoint of step 3; no checkpoint was saved yet"),
        ("--resume-from later", "--resume-from takes a step or a folder"),
        ("--save-total-limit 1", "save_total_limit must be 2 or more"),
    ],
)
def test_another_run_is_refused_by_name(
    more: str, said: str, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", str(stopped), "--dry-run", *more.split()]) == 2
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1
    if "there," in said:
        assert "--accept-changes" in err
        assert (
            run(["resume", str(stopped), "--dry-run", "--accept-changes", *more.split()]) == 0
        )


@pytest.fixture
def saved(stopped: Path, begun: Path) -> Iterator[RunFolder]:
    """The stopped run with what its trainer has left: identity.json, and checkpoints of steps 2 and 4."""
    folder = RunFolder(stopped)
    config = resolve(
        options={
            "model": "model",
            "dataset": str(begun / "train.jsonl"),
            "rewards": ["exact_answer"],
            "output": str(stopped),
        }
    )
    identity = load_prompts(config, as_chat=True).identity
    check_contents(folder, contents_of(identity, begun / "model", config.code_files))
    for step in (2, 4):
        staged = staging(folder.checkpoints, step) / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        for name in (
            "model.safetensors",
            "trainer_state.json",
            "rng_state.pth",
            "controller-0.json",
        ):
            (staged / name).write_bytes(b"w" * step)
        publish(folder.checkpoints, step, world=1)
    files = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    yield folder
    for path, content in files.items():
        path.write_bytes(content)


def test_a_dry_run_says_from_which_checkpoint_it_goes_on(
    saved: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["resume", str(saved.root), "--dry-run"]
    assert run(words) == 0 and "going on from step 4" in capfd.readouterr().out
    (saved.checkpoints / "checkpoint-4" / "model.safetensors").write_bytes(b"wwwx")
    assert run([*words, "--json"]) == 0
    damaged, begins = json.loads(capfd.readouterr().out)["resume"]
    assert damaged.startswith("checkpoint-4 is damaged (model.safetensors has changed")
    assert begins == "going on from step 2"
    assert [path.name for path in saved.checkpoints.iterdir()].count("checkpoint-4") == 1
    (saved.checkpoints / "checkpoint-2" / "model.safetensors").unlink()
    assert run(words) == 2
    assert "verifies (checkpoint-4: model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "changed"),
    [("dataset", "train.jsonl"), ("model", "model/config.json")],
)
def test_changed_contents_are_refused_before_anything_starts(
    name: str, changed: str, saved: RunFolder, begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = begun / changed
    path.write_text(path.read_text().replace("2", "3", 1))
    words = ["resume", str(saved.root), "--dry-run"]
    assert run(words) == 2
    err = capfd.readouterr().err
    assert f"({name}: " in err and "--accept-changes" in err and err.count("\n") == 1
    assert run([*words, "--accept-changes"]) == 0


def test_a_run_with_checkpoints_and_without_its_identity_is_refused(
    saved: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    saved.identity.unlink()
    words = ["resume", str(saved.root), "--dry-run"]
    assert run(words) == 2
    err = capfd.readouterr().err
    assert "identity.json is missing" in err and "--accept-changes" in err
    assert run([*words, "--accept-changes"]) == 0 and not saved.identity.exists()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--save-total-limit 5 {run}", "save_total_limit", 5),
        ("--save-total-limit=5 {run} --no-log-completions", "log_completions", False),
        ("--log-completions {run}", "log_completions", True),
        ("{run} --log-completions false", "log_completions", False),
    ],
)
def test_trls_options_may_come_before_the_folder(
    words: str, field: str, value: object, stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", *words.format(run=stopped).split(), "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["output"], plan["trl"][field]) == (str(stopped), value)


def test_options_without_a_folder_are_refused_with_what_resume_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", "--learning-rate", "1e-6", str(tmp_path / "nothing")]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "takes the folder of a run before its options" in err
    assert "say ycore resume runs/first --learning-rate ..." in err


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", str(tmp_path / "nothing")]) == 2
    assert "holds no run.json" in capfd.readouterr().err


def test_changes_are_accepted_only_of_a_run_that_goes_on(
    begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = f"grpo --model {begun}/model --dataset {begun}/train.jsonl --reward exact_answer --output {begun}/new"
    assert run([*line.split(), "--dry-run", "--accept-changes"]) == 2
    assert "say --resume too" in capfd.readouterr().err


def test_a_replay_takes_its_settings_from_the_run(
    stopped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replay = [
        "grpo",
        "--replay",
        str(stopped),
        "--learning-rate",
        "1e-3",
        "--dry-run",
        "--json",
    ]
    journal = RunFolder(stopped).journal
    journal.mkdir()

    def refused() -> str:
        assert run(replay) == 2
        return capfd.readouterr().err

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(json.loads((stopped / "run.json").read_text())["directory"]))
        assert "train it with --keep-journal" in refused()
        round_file(journal, 3, 0).write_text("")
        assert "begins at step 3" in refused()
        round_file(journal, 0, 0).write_text("")
        assert run(replay) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["engine"], plan["trl"]["learning_rate"], plan["trl"]["beta"]) == (
        "replay",
        1e-3,
        0.25,
    )
    assert plan["output"] == f"{stopped}-replay"
