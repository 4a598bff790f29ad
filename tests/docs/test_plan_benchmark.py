"""The benchmark of plans: what its names mean, what it runs, and its clock on a real process."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ycore.models.model_facts import facts_of, model_facts
from ycore.plan.devices import GIB
from ycore.plan.memory import Workload
from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
NAMES = ("plan_and_measured", "processor_clock", "processor_speed", "shaped_models")


@pytest.fixture(scope="module")
def parts() -> Any:
    """The script's modules, found as when it is run: they lie beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in (*NAMES, "bounded", "contestants", "machine", "benchmark_reward"):
        sys.modules.pop(name, None)


def test_a_combinations_name_says_what_is_run(parts: Any) -> None:
    named = parts.plan_and_measured.Combination.named
    assert named("135m-full") == parts.plan_and_measured.Combination("135m", True)
    assert named("30m-lora-2-zero2") == parts.plan_and_measured.Combination(
        "30m", False, 2, "zero2"
    )
    assert named("135m-lora-judge").judged


def test_every_combination_has_a_shape_of_about_its_name(parts: Any) -> None:
    for name in parts.plan_and_measured.COMBINATIONS:
        size = parts.plan_and_measured.Combination.named(name).size
        shape = parts.shaped_models.SHAPES[size]
        config = {field: getattr(shape, field) for field in type(shape).__dataclass_fields__}
        facts = facts_of(
            config | {"vocab_size": 49152, "tie_word_embeddings": True, "head_dim": 64},
            name=size,
        )
        assert facts.num_params == pytest.approx(float(size.removesuffix("m")) * 1e6, rel=0.12)


def test_the_command_of_a_combination(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        parts.plan_and_measured, "shaped", lambda size, folder: folder / f"model-{size}"
    )
    combination = parts.plan_and_measured.Combination.named("135m-full-2-judge")
    words = parts.plan_and_measured.command_of(combination, tmp_path, tmp_path / "run", steps=3)
    assert (
        words[words.index("--processes") + 1] == "2"
        and "--full" in words
        and "--no-dynamic-sampling" in words
    )
    assert f"judge:{tmp_path / 'judge.yaml'}" in words
    assert "model-30m" in (tmp_path / "judge.yaml").read_text()
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 64


def test_a_row_of_the_table(parts: Any) -> None:
    compared = parts.plan_and_measured.PlannedAndMeasured
    rows = [
        compared("memory/trainer", "GiB", 2.2, 2.0),
        compared("time/step", "s", 4.0, 5.0),
    ]
    table_row = parts.plan_and_measured.as_lines("135m-lora", rows)
    assert (
        table_row
        == "| 135m-lora | memory/trainer 2.20 / 2.00 GiB (+10%) | time/step 4.00 / 5.00 s (-20%) |"
    )


def test_a_run_is_compared_with_its_own_lengths_and_by_role(parts: Any) -> None:
    job = Workload(
        model_facts("smollm2-135m"),
        prompts_per_step=4,
        group_size=4,
        prompt_tokens=256,
        max_tokens=64,
    )
    rows = [
        {"step": step, "num_tokens": 16 * 90 * step, "completions/mean_length": 50.0, "ycore/sampling/drawn": 6}
        for step in (1, 2, 3)
    ]  # fmt: skip
    work = parts.plan_and_measured.as_it_was(job, rows)
    assert (work.prompt_tokens, work.completion_tokens, work.draws) == (40, 50, 1.5)
    assert parts.plan_and_measured.as_it_was(job, []) == job
    peaks = {"trainer": 3 * GIB, "rollout-0": 2 * GIB, "rollout-1": 2 * GIB}
    assert parts.plan_and_measured.by_role(peaks) == {"trainer": 3 * GIB, "rollout": 4 * GIB}


def test_a_step_costs_what_was_added_between_the_first_and_the_last(
    parts: Any, tmp_path: Path
) -> None:
    clock = parts.processor_clock.ProcessorClock(tmp_path)
    clock._at_step = {
        1: Counter(trainer=10.0),
        2: Counter(trainer=13.0),
        3: Counter(trainer=16.0, rewards=1.0),
    }
    assert clock.a_step() == {"trainer": 3.0, "rewards": 0.5}
    clock._at_step = {1: Counter(trainer=10.0)}
    assert clock.a_step() == {}


def test_the_clock_reads_a_run_that_goes_on(parts: Any, tmp_path: Path) -> None:
    """A process with the run's mark that works for a while, and a metrics file that grows meanwhile."""
    folder = RunFolder(tmp_path)
    work = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass\ntime.sleep(30)"
    process = subprocess.Popen(
        [sys.executable, "-c", work, "ycore.trainer"],
        env={**os.environ, RUN_MARKER: folder.run_id},
    )
    try:
        time.sleep(1.2)  # until then its command line is not taken for its own
        with parts.processor_clock.ProcessorClock(tmp_path) as clock:
            for step in (1, 2):
                with folder.metrics.open("a") as file:
                    file.write(json.dumps({"step": step}) + "\n")
                deadline = time.monotonic() + 120
                while step not in clock._at_step and time.monotonic() < deadline:
                    time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert set(clock.a_step()) == {"trainer"}
    assert clock._at_step[2]["trainer"] > 0


def test_the_processors_speed_is_measured_on_one_core(parts: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "processor_speed.py")],
        capture_output=True,
        text=True,
        timeout=400,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results[0]["threads"] == 1 and min(results[0].values()) > 0
