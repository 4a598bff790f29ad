"""Good command lines through the real command with --dry-run: exit status 0, a plan, nothing written, nothing heavy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from tests.chaos.command_lines import GRPO, command_words
from tests.tiny_model import write_tiny_model
from ycore.api.tables import folded
from ycore.config.resolve import resolve
from ycore.launch.layout import Machine
from ycore.plan.devices import measured_core
from ycore.run.claim import claim
from ycore.run.files import RunFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat model, a text model, two datasets, a reward file and a recipe."""
    root = tmp_path_factory.mktemp("place")
    write_tiny_model(root / "model", chat=True)
    write_tiny_model(root / "untemplated", chat=False)
    rows = [
        json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)})
        for number in range(8)
    ]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n")
    (root / "asked.jsonl").write_text(json.dumps({"ask": "1 + 1 =", "solution": "2"}) + "\n")
    (root / "rewards.py").write_text(
        "def one(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"
    )
    (root / "mine.yaml").write_text(
        f"description: mine\nmodel: {root}/model\nsteps: 7\ntrl:\n  beta: 0.5\n"
    )
    return root


GOOD: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("", ("config", "steps"), 100),
    ("--full", ("trl", "learning_rate"), 1e-6),
    ("--lora --set lora.r=4", ("config", "lora", "r"), 4),
    ("--learning-rate 1e-5", ("trl", "learning_rate"), 1e-5),
    ("--learning_rate=1e-5", ("trl", "learning_rate"), 1e-5),
    ("--group_size 4 --prompts-per-step 3", ("batch", "per_device_train_batch_size"), 4),
    ("--num-generations 4", ("trl", "num_generations"), 4),
    ("--log-completions", ("trl", "log_completions"), True),
    ("--no-log-completions --beta 0.1", ("trl", "log_completions"), False),
    ("--log-completions false --steps 3", ("config", "steps"), 3),
    ("--report-to wandb,tensorboard", ("trl", "report_to"), ["wandb", "tensorboard"]),
    ("--epsilon-high none --delta 4", ("trl", "delta"), 4.0),
    (
        "--reward {place}/rewards.py:one --set rewards.1.weight=0.5",
        ("config", "rewards", 1, "weight"),
        0.5,
    ),
    ("--recipe {place}/mine.yaml", ("trl", "beta"), 0.5),
    ("--recipe quickstart --steps 2", ("trl", "max_steps"), 2),
    ("--engine transformers --set dtype=float32", ("engine",), "transformers"),
    ("--model {place}/untemplated", ("dataset", "chat"), False),
    ("--system-prompt Add.", ("dataset", "chat"), True),
    ("--system_prompt --my_text", ("config", "system_prompt"), "--my_text"),
    (
        "--dataset {place}/asked.jsonl --prompt-column ask --answer-column solution",
        ("dataset", "rows"),
        1,
    ),
    ("--dataset task:addition?digits=1 --max-tokens 16", ("trl", "max_completion_length"), 16),
    ("--trust-remote-code --merge", ("config", "merge"), True),
    (
        "--eval-dataset task:addition?digits=1 --eval-every 5 --keep-best pass@4",
        ("evaluation", "rows"),
        20,
    ),
]


@pytest.mark.parametrize(
    ("more", "path", "expected"), GOOD, ids=[more or "nothing more" for more, _, _ in GOOD]
)
def test_a_good_command_line_gives_its_plan(
    more: str,
    path: tuple[str | int, ...],
    expected: object,
    place: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(command_words("--json " + more, place)) == 0
    value = json.loads(capfd.readouterr().out)
    for key in path:
        value = value[key]
    assert value == expected
    assert not (place / "out").exists()


def test_the_plan_in_words(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = "--prompts-per-step 4 --max-tokens 64 --engine transformers --use-cpu --set dtype=bfloat16"
    assert run(command_words(more, place)) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        "model", "dataset", "read", "asked", "rewards", "batch", "run", "loss", "data", "time", "changed", "engine",
        "output", "Nothing",
    ]  # fmt: skip
    out = " ".join(out.split())
    assert "8 rows of chat prompts" in out
    assert "4 prompts x 8 completions = 32 a step on 1 rank: 1 micro-batch of 32" in out
    assert "100 steps of LoRA r=16, bfloat16, learning rate 2e-05, seed 0" in out
    assert "400 prompts = 50 epochs; at most 2,048 tokens a step, 204,800 in all" in out
    assert "time not forecast: the speed of transformers is not known beforehand" in out
    assert "use_cpu true (default false)" in out


@pytest.mark.parametrize(
    ("option", "is_default"),
    [("save_total_limit 3", 2), ("report_to tensorboard", "none")],
)
def test_a_default_that_the_plan_names_is_the_runs_own(
    option: str, is_default: object, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, value = option.split()
    more = f"--recipe quickstart --{name.replace('_', '-')} {value}"
    assert run(command_words(more, place)) == 0
    assert f"{option} (default {is_default})" in " ".join(capfd.readouterr().out.split())
    assert run(command_words("--recipe quickstart --logging-steps 1", place)) == 0
    assert "logging_steps" not in capfd.readouterr().out


def test_the_plan_says_what_is_not_at_its_default_and_what_is_written(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = (
        "--recipe quickstart --beta 0.04 --temperature 0.7 --set trl.epsilon=0.3 --loss-type dr_grpo"
        " --keep-best reward --eval-dataset task:addition?digits=1 --report-to wandb --merge"
    )
    assert run(command_words(more, place)) == 0
    out = capfd.readouterr().out
    assert "dr_grpo, beta 0.04, temperature 0.7, num_iterations 1" in out
    words = " ".join(out.split())
    assert "epsilon 0.3 (default 0.2)" in words
    assert "lr_scheduler_type constant (default linear)" in words
    for name in ("beta", "loss_type", "learning_rate", "steps"):  # are in other rows
        assert f"{name} " not in out.split("changed")[1].split("engine")[0]
    written = " ".join(out.split("output")[1].split())
    for part in ("model/merged/", "best/", "metrics.jsonl", "every 8 steps", "sent to wandb"):
        assert part in written, written


def test_a_plan_fits_80_columns_and_cuts_nothing_to_paste(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "held_out_rows_of_an_evaluation.jsonl").write_text(
        (place / "train.jsonl").read_text()
    )
    more = (
        "--eval-dataset {place}/held_out_rows_of_an_evaluation.jsonl --eval-reward exact_answer"
    )
    assert run(command_words(more, place)) == 0
    out = capfd.readouterr().out
    assert {"held", "warning"} <= {line.split()[0] for line in out.splitlines()}
    for line in out.splitlines():
        path = line.removeprefix("held out").split()
        assert len(line) <= 80 or len(path) <= 2, "a path stays whole"
    rows = folded(
        [("warning", f"{'word ' * 13}`ycore grpo --dry-run`, and {'x' * 90} ends it")]
    )
    assert list(rows) == [
        ("warning", "word " * 12 + "word"),
        ("", "  `ycore grpo --dry-run`, and"),
        ("", "  " + "x" * 90),
        ("", "  ends it"),
    ]


@pytest.mark.parametrize("passes", [1, 2])
def test_the_plan_forecasts_seconds_epochs_and_tokens(
    passes: int, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", "--recipe", "quickstart", "--num-iterations", str(passes), "--dry-run"]
    words += ["--output", str(place / "out"), "--model", str(place / "model")]
    assert run([*words, "--json"]) == 0
    length = json.loads(capfd.readouterr().out)["length"]
    assert (length["rounds"], length["epochs"]) == (40 // passes, 4 / passes)
    assert length["tokens_per_step"] == 8 * 8 * 16
    assert run([*words, "--set", "sampling.reuse=0.3", "--json"]) == 0
    reused = json.loads(capfd.readouterr().out)["length"]
    rounds = 40 // passes
    assert length["prompts"] == 8 * rounds
    assert reused["prompts"] == 8 * rounds - (rounds - 1) * 2, "2 of 8 come again, but at first"
    assert reused["epochs"] == pytest.approx(reused["prompts"] / 80)
    low, high = length["time"]["run_s"]
    assert 0 < length["time"]["start_s"] < low < high
    assert run(words) == 0
    out = capfd.readouterr().out
    forecast = out.split("time")[1]
    assert "by speeds measured here, now" in " ".join(forecast.split()) and "a step" in forecast
    lines = out.splitlines()
    assert len(lines) < 24 and max(map(len, lines[2:])) <= 80, out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("sdpo --set reward=exact_answe", "did you mean 'exact_answer'"),
        ("sdpo --set reward={place}/rewards.py:two", "has no 'two' to call; it has one"),
        ("gold --teacher-model-name-or-path {place}/none", "{place}/none"),
    ],
)
def test_the_reward_and_the_teacher_of_experimental_trainers_are_checked(
    words: str, problem: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "told.jsonl").write_text('{"prompt": "1 + 1 =", "completion": "2"}\n' * 2)
    words += " --model {place}/model --dataset {place}/told.jsonl --held-out 0 --dry-run"
    words += " --output {place}/out"
    assert run(words.format(place=place).split()) == 2
    assert problem.format(place=place) in capfd.readouterr().err


def test_forecasts_count_the_slots_of_other_machines(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = measured_core()
    monkeypatch.setattr("ycore.api.planning.measured_core", lambda dtype: core)
    other = Machine(tuple(range(8)), ())
    monkeypatch.setattr("ycore.launch.engines.machine_of", lambda host: other)

    def forecast(*sets: str) -> Any:
        words = ["grpo", "--recipe", "quickstart", "--model", f"{place}/model", "--dry-run"]
        words += ["--output", str(place / "out"), "--json", "--set", "engine.count=1"]
        assert run([*words, *(word for key in sets for word in ("--set", key))]) == 0
        return json.loads(capfd.readouterr().out)["length"]["time"]["step_s"][1]

    beside = forecast("engine.hosts=[b]")
    assert beside < forecast()
    apart = forecast("engine.hosts=[b]", "engine.count=0")
    assert beside < apart, "two slots write and not three"
    assert forecast("engine.hosts=[b]", "engine.count=0", "sampling.max_staleness=1") < apart


def test_plans_count_the_slots_of_other_machines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Machine((0,), ("0", "1"), device_bytes=80e9)
    monkeypatch.setattr("ycore.launch.engines.machine_of", lambda host: other)

    def fastest(*sets: str) -> Any:
        words = [
            "plan",
            "--model",
            "Qwen/Qwen2.5-0.5B-Instruct",
            "--devices",
            "2x80GB",
            "--json",
        ]
        assert run([*words, *(word for key in sets for word in ("--set", key))]) == 0
        return json.loads(capfd.readouterr().out)["fits"][0]

    hosts = "engine.hosts=[b]"
    alone, beside, apart = (fastest(*sets) for sets in ([], [hosts], [hosts, "engine.count=0"]))
    slots = [
        (made["strategy"]["slots"], made["strategy"]["away"]) for made in (alone, beside, apart)
    ]
    assert slots == [(2, 0), (2, 2), (0, 2)]
    assert beside["seconds"]["round"] < alone["seconds"]["round"]
    assert "rollout" not in apart["memory"]["train"]
    assert "2 slots on other machines" in apart["strategy"]["in_words"]


def test_the_plan_of_given_examples_has_its_length_too(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "--model", f"{place}/model", "--dataset", f"{place}/train.jsonl"]
    words += ["--epochs", "3", "--batch-size", "2", "--output", str(place / "out"), "--dry-run"]
    assert run([*words, "--json"]) == 0
    length = json.loads(capfd.readouterr().out)["length"]
    assert (length["steps"], length["epochs"]) == (12, 3)
    low, high = length["time"]["run_s"]
    assert 0 < low < high


def test_resume_needs_only_the_folder(
    tmp_path: Path, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "run")
    options = {
        "model": f"{place}/model",
        "dataset": f"{place}/train.jsonl",
        "rewards": ["exact_answer"],
        "steps": 9,
        "dtype": "bfloat16",  # the command writes what `auto` came to
    }
    config = resolve(
        options={**options, "output": output, "trl": {"beta": 0.25, "hub_token": "secret"}}
    )
    claim(RunFolder(Path(output)), config, resume=False).release()
    resume = ["grpo", "--resume", "--output", output, "--dry-run", "--json"]
    assert run([*resume, "--hub-token", "secret"]) == 0
    out, _ = capfd.readouterr()
    plan = json.loads(out)
    assert (plan["trl"]["max_steps"], plan["trl"]["beta"]) == (9, 0.25)
    assert "secret" not in out
    assert run([*resume, "--hub-token", "secret", "--seed", "10"]) == 2
    assert "seed: 0 there, 10 here" in capfd.readouterr().err


def test_eval_checks_the_same_things(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "eval-train-model").mkdir(parents=True)
    line = "eval --model {place}/model --dataset {place}/train.jsonl --reward exact_answer --num-samples 2 --limit 3"
    assert (
        run([*line.format(place=place).split(), "--temperature", "0.7", "--dry-run", "--json"])
        == 0
    )
    plan = json.loads(capfd.readouterr().out)
    assert (
        plan["config"]["algorithm"],
        plan["config"]["num_samples"],
        plan["dataset"]["rows"],
    ) == ("eval", 2, 3)
    assert (plan["config"]["output"], plan["trl"]["temperature"]) == (
        "runs/eval-train-model-2",
        0.7,
    )


def test_eval_of_a_recipe_leaves_the_training_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["eval", "--recipe", "quickstart", "--limit", "5", "--dry-run", "--json"]) == 0
    config = json.loads(capfd.readouterr().out)["config"]
    assert (config["output"], config["max_tokens"]) == ("runs/eval-quickstart", 16)


@pytest.mark.parametrize(
    ("words", "key"),
    [("recipes quickstart --seeds 2", "seeds")],
)
def test_other_dry_runs_print_one_json_object_too(
    words: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*words.split(), "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[key]
    assert list(tmp_path.iterdir()) == []


TOOLS = "grpo --tools ycore_recipes.calculator:add --actions calls"


@pytest.mark.parametrize("command", ["grpo", "preflight", TOOLS])
def test_a_local_dry_run_imports_nothing_heavy(command: str, place: Path) -> None:
    code = (
        "import sys; from ycore_cli.main import run; status = run(sys.argv[1:]); "
        "heavy = ('torch', 'trl', 'vllm', 'transformers', 'datasets', 'httpx', 'rich', 'markdown_it'); "
        "print(status, [name for name in heavy if name in sys.modules])"
    )
    arguments = (GRPO + "--learning-rate 1e-5").format(place=place).split()
    arguments[:1] = command.split()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_rows_that_are_trained_on_and_measured_on_are_counted_in_a_warning(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "held.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{number} + 1 =", "answer": "0"}) + "\n"
            for number in range(6, 12)
        )
    )
    assert run((GRPO + "--eval-dataset {place}/held.jsonl").format(place=place).split()) == 0
    assert "warning   2 of the 6 held-out prompts are also trained on" in capfd.readouterr().out


def test_a_run_in_4_bits_that_saves_adapters_alone_is_warned(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    said = []
    for merge in ("", " --merge"):
        assert run((GRPO + "--quantize 4bit" + merge).format(place=place).split()) == 0
        said.append("adapters alone are another policy" in capfd.readouterr().out)
    assert said == [True, False]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "--eval-dataset {place}/train.jsonl --keep-best pass@3",
            "it is 'pass@3'; did you mean",
        ),
        ("--eval-every 5", "--eval-every needs rows to measure on"),
        ("--eval-dataset {place}/train.jsonl --eval-reward no_such", "no_such"),
        ("--stop-when bored:3", "'bored:3'"),
    ],
)
def test_what_an_evaluation_cannot_be_is_one_line(
    more: str, said: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(command_words(more, place)) == 2
    stderr = capfd.readouterr().err
    assert said in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["logging_steps 5", "logging_strategy no"])
def test_every_step_is_written(
    option: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A row of metrics.jsonl was the mean of several steps, and was summed up and stopped by as one."""
    words = f"--recipe quickstart --{option.replace('_', '-')}"
    assert run(command_words(words, place)) == 2
    err = capfd.readouterr().err
    name, value = option.split()
    assert name in err and value in err and "leave it out" in err
