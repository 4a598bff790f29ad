"""Trackers receive what metrics.jsonl does, ycore's own numbers too. Real trackers, writing to files."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from ycore.config.resolve import resolve
from ycore.errors import ConfigError
from ycore.run.files import RunFolder
from ycore.view.trackers import TrackerPage, tell_evaluation

YCORE = [sys.executable, "-c", "import sys; from ycore_cli.main import main; sys.exit(main())"]
COMMAND = [*YCORE, "grpo"]
SMALL = {
    "--dataset": "task:addition?digits=1",
    "--reward": "length",
    "--max-tokens": 6,
    "--engine": "transformers",
}


TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("sums")
rows = SQLiteStorage.get_logs("sums", run.name)
told = {"name": run.name}
told["logged"] = sorted({name for row in rows for name in row})
told["steps"] = [row["train/global_step"] for row in rows if "train/reward" in row]
print(json.dumps(told))
"""


def trackio_page(place: Path) -> dict[str, Any]:
    """Return the one page of the project `sums`, read in a process of its own, because trackio keeps its folder."""
    words = [sys.executable, "-c", TRACKIO]
    done = subprocess.run(
        words, env=environment(place), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def environment(place: Path) -> dict[str, str]:
    """Return the environment of trackers that write in `place`."""
    trackers = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(place),
        "TRACKIO_DIR": str(place / "trackio"),
    }
    return {**os.environ, **trackers, "HF_HUB_OFFLINE": "1"}


def run(words: Sequence[Any], place: Path) -> None:
    """Run ycore in `place`."""
    done = subprocess.run(
        [*YCORE, *map(str, words)],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def words_of(options: Mapping[str, Any]) -> list[str]:
    return [str(word) for option, value in options.items() for word in (option, value)]


def records_of(file: Path) -> list[Any]:
    """Return the records of an offline run's file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (
            room := 32768 - at % 32768
        ) < 7:  # a block ends with zeros where no record's header fits
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def history_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows that an offline run of wandb logged."""
    rows = [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records_of(file)
        if record.HasField("history")
    ]
    return [row for row in rows if row]


def settings_of(file: Path) -> dict[str, Any]:
    """Return the config of an offline run of wandb, as its users see it."""
    settings: dict[str, Any] = {}
    for record in records_of(file):
        updates = [*record.run.config.update, *record.config.update]
        settings |= {item.key: json.loads(item.value_json) for item in updates if item.key}
    return settings


@pytest.mark.verify
@pytest.mark.slow
def test_trackers_get_what_their_users_look_for(tmp_path: Path) -> None:
    """Evaluations as `eval/`, tags, job type, settings at the top, completions with rewards and advantages."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = tmp_path / "run"
    sizes = {"--steps": 3, "--prompts-per-step": 2, "--group-size": 2, "--output": output}
    tracked = {
        "--report-to": "wandb,trackio,tensorboard",
        "--project": "sums",
        "--eval-dataset": "task:addition?digits=1&size=8",
        "--eval-every": 3,
        "--log-every": 2,
        "--preset": "rloo",
        "--keep-best": "reward",
    }
    options = {"--model": write_tiny_model(tmp_path / "model")} | SMALL | sizes | tracked
    run(["grpo", *words_of(options)], tmp_path)

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    (after,) = file.parent.glob("files/media/table/ycore/before_and_after_*.table.json")
    assert json.loads(after.read_text())["columns"] == ["prompt", "before", "after"]
    (page_run,) = [record.run for record in records_of(file) if record.HasField("run")][:1]
    assert page_run.job_type == "train" and list(page_run.tags) == ["grpo", "model"]
    rows = history_of(file)
    measured = {row["train/global_step"]: row for row in rows if "eval/pass@1" in row}
    assert set(measured) == {0, 3} and not any("train/ycore/eval" in str(row) for row in rows)
    settings = settings_of(file)
    assert (settings["algorithm"], settings["dataset"]) == ("grpo", "task:addition?digits=1")
    assert {"model", "learning_rate", "beta", "lora_r", "group_size", "seed"} <= set(settings)
    assert settings["rewards"] == "length"
    logged = [row for row in rows if "completions.path" in row]
    assert [row["train/global_step"] for row in logged] == [1, 2, 3]
    path = file.parent / "files" / logged[0]["completions.path"]
    table = json.loads(path.read_text())
    assert table["columns"] == [
        "step",
        "prompt",
        "completion",
        "length",
        "advantage",
        "finish_reason",
        "problem",
        "verdict",
        "logged",
    ]
    assert len(table["data"]) == 4
    for row in table["data"]:
        step, prompt, completion, reward, advantage, reason, *texts = row
        assert step == 1 and isinstance(prompt, str) and isinstance(completion, str)
        assert (
            isinstance(reward, float)
            and isinstance(advantage, float)
            and reason in ("stop", "length")
            and texts == ["", "", ""]
        )
    assert "did not take" not in (output / "logs" / "trainer.log").read_text()

    page = trackio_page(tmp_path)
    assert page["name"] == "run", "one page, named like the folder"
    assert {"train/reward", "eval/pass@1"} <= set(page["logged"])

    events = EventAccumulator(str(next(output.rglob("events.out.tfevents.*")).parent)).Reload()
    assert "eval/pass@1" in events.Tags()["scalars"]


@pytest.mark.slow
@pytest.mark.verify
def test_evaluations_and_runs_on_examples_have_pages_too(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    model = write_tiny_model(tmp_path / "model")
    measured = {
        "--num-samples": 2,
        "--limit": 3,
        "--report-to": "wandb",
        "--project": "sums",
    }
    run(
        [
            "eval",
            *words_of({"--model": model, "--output": tmp_path / "measured"} | SMALL | measured),
        ],
        tmp_path,
    )
    figures = json.loads((tmp_path / "measured" / "eval.json").read_text())
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged = {name: value for row in history_of(file) for name, value in row.items()}
    assert logged["eval/pass@1"] == figures["pass@1"]
    (page_run,) = [record.run for record in records_of(file) if record.HasField("run")][:1]
    assert page_run.job_type == "eval" and "eval" in page_run.tags
    assert settings_of(file)["num_samples"] == 2
    (table,) = tmp_path.glob(
        "wandb/offline-run-*/files/media/table/eval/completions_*.table.json"
    )
    assert len(json.loads(table.read_text())["data"]) == 3 * 2

    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{n} + 2 =", "completion": f"{n + 2}"}) + "\n"
            for n in range(8)
        )
    )
    examples = {
        "--model": model,
        "--dataset": "rows.jsonl",
        "--output": "tuned",
        "--steps": 2,
        "--batch-size": 2,
    }
    run(
        [
            "sft",
            *words_of(
                examples | {"--held-out": 2, "--report-to": "wandb", "--project": "sums"}
            ),
        ],
        tmp_path,
    )
    (tuned,) = tmp_path.glob(
        f"wandb/offline-run-*/run-{RunFolder(tmp_path / 'tuned').run_id}.wandb"
    )
    assert [row["train/global_step"] for row in history_of(tuned) if "train/loss" in row] == [
        1,
        2,
    ]


@pytest.mark.parametrize("names", ["wandb", "all"])
def test_a_tracker_that_fails_at_the_end_costs_its_page_alone(
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def no_network(**_: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(__name__="wandb", init=no_network)
    )
    monkeypatch.setattr(
        "ycore.view.trackers.get_available_reporting_integrations", lambda: ["wandb"]
    )
    for name in ("PROJECT", "RUN_ID", "RESUME", "JOB_TYPE", "TAGS"):
        monkeypatch.setenv(f"WANDB_{name}", "")  # restored afterwards
    folder = RunFolder(tmp_path)
    folder.config.write_text("{}")
    (tmp_path / "completions.jsonl").write_text("")
    options = {
        "algorithm": "eval",
        "model": "m",
        "dataset": "d",
        "rewards": ["length"],
        "output": str(tmp_path),
    }
    tell_evaluation(
        resolve(options=options | {"trl": {"report_to": names}}), folder, {"reward": 1.0}
    )
    assert (
        capfd.readouterr().out
        == "wandb did not take what came last: ConnectionError: nobody answers\n"
    )


@pytest.mark.slow
@pytest.mark.verify
def test_a_resumed_run_goes_on_with_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, output = write_tiny_model(tmp_path / "model"), tmp_path / "run"
    options = {
        "--model": model,
        "--dataset": "task:addition?digits=1",
        "--reward": "length",
        "--output": output,
        "--steps": 2,
        "--prompts-per-step": 2,
        "--group-size": 2,
        "--max-tokens": 6,
        "--engine": "transformers",
        "--report-to": "wandb,tensorboard,trackio",
        "--project": "sums",
    }
    words = [str(word) for option, value in options.items() for word in (option, value)]
    monkeypatch.setenv("WANDB_RUN_GROUP", "family")
    run(["grpo", *words], tmp_path)
    run(["grpo", "--resume", "--output", output, "--steps", 3], tmp_path)
    page = trackio_page(tmp_path)
    assert (page["name"], page["steps"]) == ("run", [1, 2, 3])

    # A second file of the same page, whose id is the folder's.
    files = sorted(
        tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    )
    run_id = RunFolder(output).run_id
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    tables = list(
        tmp_path.glob(
            "wandb/offline-run-*/files/media/table/ycore/before_and_after_*.table.json"
        )
    )
    assert len(tables) == 2
    table = json.loads(tables[0].read_text())
    samples = json.loads((output / "samples.json").read_text())
    assert table["columns"] == ["prompt", "before", "after"] and len(table["data"]) == len(
        samples["before"]
    )

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    wandb_file = files[0]
    content = wandb_file.read_bytes()
    assert b"ycore/time/round" in content and b"frac_reward_zero_std" in content
    assert b"sums" in content and b"ycore/config" in content and b"prompts_per_step" in content

    event_files = tmp_path.rglob("events.out.tfevents.*")
    events = min(event_files, key=lambda path: path.stat().st_mtime)
    scalars = EventAccumulator(str(events)).Reload()
    assert "train/ycore/time/train" in scalars.Tags()["scalars"]
    assert [round(event.value, 4) for event in scalars.Scalars("train/reward")] == [
        round(row["reward"], 4) for row in rows[:2]
    ]


@pytest.mark.parametrize("trl", [{}, {"report_to": "none"}, {"report_to": ["none"]}])
def test_a_run_without_trackers_has_a_page_of_none(tmp_path: Path, trl: dict[str, Any]) -> None:
    config = resolve(
        options={"model": "m", "dataset": "task:addition", "rewards": ["exact_answer"]}
        | {"output": str(tmp_path), "trl": trl}
    )
    handler: Any = SimpleNamespace(callbacks=[])
    TrackerPage(RunFolder(tmp_path), handler, config)


@pytest.mark.parametrize("names", ["trackio", ["tensorboard", "trackio"]])
def test_an_evaluation_refuses_trackers_that_would_get_nothing(names: Any) -> None:
    """It sent them nothing, and did not say so."""
    with pytest.raises(
        ConfigError, match=r"wandb alone, not .*trackio.*; say --report-to wandb"
    ):
        resolve(
            options={"algorithm": "eval", "model": "m", "dataset": "d", "rewards": ["length"]}
            | {"output": "o", "trl": {"report_to": names}}
        )
