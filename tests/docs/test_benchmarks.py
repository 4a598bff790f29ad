"""The benchmark's own arithmetic, and one real run of the script with a tiny model."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def parts() -> Any:
    """The script's modules, found as when it is run: they lie beside it."""
    names = ("bare", "bounded", "contestants", "draw", "methods", "prompts", "report")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in (*names, "benchmark_reward"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_bare_batches_hold_every_sequence_once_and_hardly_any_padding(
    parts: Any, batch_size: int
) -> None:
    draw = random.Random(batch_size)
    lengths = [
        parts.bare.Lengths(draw.randrange(20, 40), draw.randrange(1, 17)) for _ in range(64)
    ]
    batches = parts.bare.cut(lengths, batch_size=batch_size)
    assert sorted(map(_key, lengths)) == sorted(
        _key(item) for batch in batches for item in batch
    )
    assert (
        max(len(batch) for batch in batches)
        == (batch_size if batch_size < 16 else max(map(len, batches)))
        <= batch_size
    )
    assert all(parts.bare.padding(batch) <= parts.bare.MAX_PADDING for batch in batches)


def _key(lengths: Any) -> tuple[int, int]:
    return lengths.prompt, lengths.completion


def test_bare_padding_counts_empty_positions(parts: Any) -> None:
    assert parts.bare.padding([parts.bare.Lengths(6, 4), parts.bare.Lengths(3, 2)]) == 0.25


def test_bare_keeps_the_cast_that_is_faster_and_tries_every_size(parts: Any) -> None:
    tried: list[Any] = []

    def measure(choice: Any) -> float:
        tried.append((choice.batch_size, choice.autocast))
        size: float = choice.batch_size
        return size + (10.0 if choice.autocast else 0.0)

    seconds = parts.bare.choose(measure, (4, 8, 16), autocasts=(True, False))
    assert tried == [(8, True), (8, False), (4, False), (16, False)]
    best = min(seconds, key=lambda choice: seconds[choice])
    assert (best.batch_size, best.autocast) == (4, False)


def test_bare_predicts_every_completion_token_and_no_other(parts: Any) -> None:
    ids, predicts = parts.bare.tensors(
        [parts.bare.Lengths(4, 3), parts.bare.Lengths(2, 2)], vocabulary=9
    )
    assert ids.shape == (2, 7)
    assert predicts.int().tolist() == [[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]]


def test_summary_leaves_out_first_steps_and_scales_bare_by_tokens(parts: Any) -> None:
    trl = [_run(parts, 99.0, 8.0, 12.0), _run(parts, 99.0, 10.0, 10.0)]
    ycore = [_run(parts, 99.0, 4.0, 4.0), _run(parts, 99.0, 5.0, 5.0)]
    bare = {"seconds": [1.0, 2.0, 50.0], "tokens": 200}
    level = parts.report.summarise(trl, ycore, bare)
    assert (level["trl"]["seconds"], level["trl"]["min"], level["trl"]["max"]) == (
        10.0,
        8.0,
        12.0,
    )
    assert (level["ycore"]["seconds"], level["ycore"]["steps_per_hour"]) == (4.5, 800.0)
    assert level["ratio"] == pytest.approx(10 / 4.5)
    assert level["ratio_by_pair"] == [10 / 4, 10 / 5]
    # A step trains for half its seconds on 100 tokens, for which the bare passes take half of their median of 2 s.
    assert level["trainer_over_bare"] == pytest.approx(2.25)


def _run(parts: Any, *seconds: float) -> list[Any]:
    return [
        parts.contestants.Step(
            value, {"round": value / 2, "train": value / 2}, tokens=100.0, mean_completion=7.5
        )
        for value in seconds
    ]


@pytest.mark.parametrize(("trl", "verdict"), [(26.0, "holds >= 1.3"), (25.0, "misses >= 1.3")])
def test_tables_say_whether_the_limits_hold(parts: Any, trl: float, verdict: str) -> None:
    text = parts.report.as_markdown(_results(parts, trl_seconds=trl))
    assert verdict in text
    assert "trainer over bare" in text and "**1.00**, holds <= 1.25" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:4]} == {9}


def _results(parts: Any, *, trl_seconds: float) -> dict[str, Any]:
    choice = {"batch_size": 4, "autocast": True, "padding": 0.01}
    bare = {"seconds": [10.0], "tokens": 100, **choice}
    level = parts.report.summarise(
        [_run(parts, 1.0, trl_seconds)], [_run(parts, 1.0, 20.0)], bare
    )
    settings = {
        "model": "m",
        "dtype": "bfloat16",
        "num_prompts": 8,
        "group_size": 8,
        "repeats": 1,
        "steps": {"16": 2},
    }
    machine = {
        "cores": 2,
        "processor": "p",
        "flags": ["avx2"],
        "memory_gib": 1.0,
        "versions": {"trl": "1.16.0"},
    }
    return {
        "settings": settings,
        "machine": machine,
        "trl_batch_size": {"16": 32},
        "levels": {"16": level},
    }


def test_bars_are_drawn(parts: Any, tmp_path: Path) -> None:
    parts.draw.draw(_results(parts, trl_seconds=26.0), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["additions", "explanations", "stories"])
def test_prompts_are_distinct_and_the_same_for_the_same_seed(
    parts: Any, tmp_path: Path, kind: str
) -> None:
    files = [
        parts.prompts.write_prompts(tmp_path / name, kind=kind, num_prompts=8, seed=seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    first, again, other = (file.read_text() for file in files)
    assert first == again != other
    assert len({json.loads(line)["prompt"][0]["content"] for line in first.splitlines()}) == 8


def test_both_are_told_the_same(parts: Any) -> None:
    settings = parts.contestants.Settings(
        model=Path("m"), prompts=Path("p/train.jsonl"), max_tokens=16, steps=3, num_prompts=8, group_size=4,
        learning_rate=1e-5, seed=7, dtype="bfloat16",
    )  # fmt: skip
    trl = _options(parts.contestants.trl_command(settings, batch_size=16))
    ycore = _options(parts.contestants.ycore_command(settings, engine="auto"))
    assert trl["gradient_accumulation_steps"] == "2"
    same = {"learning_rate", "lr_scheduler_type", "gradient_checkpointing", "report_to", "seed"}
    assert {name: trl[name] for name in same} == {name: ycore[name] for name in same}
    pairs = {
        "model_name_or_path": "model",
        "num_generations": "group_size",
        "max_completion_length": "max_tokens",
    }
    pairs |= {
        "max_steps": "steps",
        "lora_r": "lora.r",
        "lora_alpha": "lora.alpha",
        "dtype": "dtype",
    }
    assert {trl[theirs] for theirs in pairs} == {"m", "4", "16", "3", "32", "bfloat16"}
    assert all(trl[theirs] == ycore[ours] for theirs, ours in pairs.items())


def _options(command: list[str]) -> dict[str, str]:
    words = command[2:]
    pairs = dict(
        zip(
            [word.lstrip("-").replace("-", "_") for word in words[::2]],
            words[1::2],
            strict=True,
        )
    )
    sets = (
        word.partition("=")
        for option, word in zip(words[::2], words[1::2], strict=True)
        if option == "--set"
    )
    return pairs | {key: value for key, _, value in sets}


def test_methods_are_compared_at_the_same_seconds(parts: Any) -> None:
    """Steps of 10 s, of which a quarter of the groups teach nothing, measured before the first and after the last."""
    rows: list[dict[str, float]] = [{"step": 0, "ycore/eval/pass@1": 0.2}]
    rows += [
        {"step": step, "ycore/time/step": 10.0, "frac_reward_zero_std": 0.25}
        for step in range(1, 6)
    ]
    assert parts.methods.of_run(rows, 8) == {}, "a run that was stopped has no figure"
    figures = parts.methods.of_run([*rows, {"step": 5, "ycore/eval/pass@1": 0.75}], 8)
    assert figures == {
        "steps": 5,
        "seconds": 50,
        "taught": 5 * 6.0,
        "before": 0.2,
        "pass@1": 0.75,
    }
    table = parts.methods.as_markdown({"slow": [figures], "fast": [figures | {"pass@1": 0.9}]})
    assert (
        table.splitlines()[2].startswith("| `fast` | 0.200 | 0.900") and "| 5 | 2160 |" in table
    )
    options = parts.methods.parse_arguments(
        ["--methods", "gspo", "--task", "gym", "--budget", "40"]
    )
    words = parts.methods.command(options, "gspo", 3, Path("out"))
    assert words[3:6] == ["grpo", "--recipe", "quickstart"] and words[-3:] == [
        "3",
        "--output",
        "out",
    ]
    assert "gspo" in words and "seconds:40" in words


def test_runs_that_go_on_at_once_have_cores_of_their_own(
    parts: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    cores: dict[str, set[int]] = {}

    def run_one(options: Any, method: str, seed: int, folder: Path) -> dict[str, float]:
        cores[method] = os.sched_getaffinity(0)
        meeting.wait(20)
        return {"pass@1": 1.0}

    lanes = min(2, len(os.sched_getaffinity(0)))
    meeting = threading.Barrier(lanes)
    monkeypatch.setattr(parts.methods, "run_one", run_one)
    names = ["grpo", "gspo"][:lanes]
    words = [
        "--methods",
        ",".join(names),
        "--seeds",
        "1",
        "--lanes",
        str(lanes),
        "--output",
        str(tmp_path),
    ]
    results = list(parts.methods.run_all(parts.methods.parse_arguments(words)))
    assert [method for method, _ in results] == names
    assert set.union(*cores.values()) == os.sched_getaffinity(0)
    assert sum(map(len, cores.values())) == len(os.sched_getaffinity(0))


def test_a_run_that_takes_too_long_is_ended_with_its_children(
    parts: Any, tmp_path: Path
) -> None:
    script = "sleep 600 & echo child $!; wait"
    with pytest.raises(parts.bounded.RunFailed, match=r"still running after 1 s"):
        parts.bounded.run_bounded(
            ["bash", "-c", script],
            folder=tmp_path,
            environment={},
            timeout_s=1.0,
            stop=threading.Event(),
        )
    child = int((tmp_path / "log.txt").read_text().split()[1])
    _assert_gone(child)


def test_a_run_that_fails_tells_the_end_of_its_log(parts: Any, tmp_path: Path) -> None:
    with pytest.raises(parts.bounded.RunFailed, match=r"(?s)exit status 3 .*log\.txt.*no luck"):
        parts.bounded.run_bounded(
            ["bash", "-c", "echo no luck; exit 3"],
            folder=tmp_path,
            environment={},
            timeout_s=20.0,
            stop=threading.Event(),
        )


def test_the_script_stops_what_it_runs_when_it_is_stopped(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    process = subprocess.Popen(_command(tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "trl-0" not in process.stderr.readline():
            assert process.poll() is None
        child = _first_child(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        _assert_gone(child)
    finally:
        process.kill()
        process.communicate()


def _first_child(parent: int) -> int:
    deadline = time.monotonic() + 120
    while not (children := psutil.Process(parent).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid: int = children[0].pid
    return pid


def _assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} was left behind"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.verify
def test_the_script_measures_both_and_the_bare_passes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    done = subprocess.run(
        _command(tmp_path), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| 8 | TRL, micro-batch 8 |" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    runs = {run["name"]: run for run in results["runs"]}
    assert list(runs) == ["trl-0", "ycore-0", "bare"]
    for name in ("trl-0", "ycore-0"):
        assert len(runs[name]["steps"]) == 2
        for step in runs[name]["steps"]:
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        assert min(runs[name]["steps"][-1]["parts"].values()) >= 0
    lengths = [
        _lengths(tmp_path / "out" / f"8-{name}" / "completions.jsonl")
        for name in ("trl-0", "ycore-0")
    ]
    assert (
        lengths[0].keys()
        == lengths[1].keys()
        == {(step, index) for step in (0, 1) for index in (0, 1)}
    )
    assert all(count == 4 for side in lengths for count in side.values())
    bare = results["levels"]["8"]["bare"]
    assert bare["num_sequences"] == 8
    assert bare["tokens"] == runs["ycore-0"]["steps"][-1]["tokens"]
    again = subprocess.run(
        _command(tmp_path), capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 2
    assert "new or empty" in again.stderr


def _lengths(file: Path) -> dict[tuple[int, int], int]:
    """Completions by step and prompt."""
    counts: dict[tuple[int, int], int] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        for index in line["prompt_index"]:
            counts[line["step"], index] = counts.get((line["step"], index), 0) + 1
    return counts


def _command(folder: Path) -> list[str]:
    sizes = "--tokens 8:2 --repeats 1 --prompts 2 --group-size 4 --trl-batch-size 8 --bare-batch-size 4"
    options = f"--model {folder / 'model'} --output {folder / 'out'} --dtype float32 --engine transformers {sizes}"
    assert os.access(BENCHMARKS / "trl_and_ycore.py", os.R_OK)
    return [sys.executable, str(BENCHMARKS / "trl_and_ycore.py"), *options.split()]
