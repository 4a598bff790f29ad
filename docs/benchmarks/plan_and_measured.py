"""The plan compared with real runs of models of several sizes on this machine.

    python docs/benchmarks/plan_and_measured.py --output runs/plan-and-measured

Each combination is a size (30m, 135m, 360m), what is trained (full, lora), the number of ranks, how they share the
work, and whether a judge scores too. The models (`shaped_models`) have random weights, so every completion is as long
as allowed and the work of a run is known. At the start `processor_speed` measures the processor for a few seconds,
with torch, on one core. The figures are written to `results.json` in the output folder as they are measured, and the
table is printed. `time/step` is wall time. `processor/step` is processor time of the processes over the number of
cores (`processor_clock`); other work on the machine disturbs it less.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

from bounded import RunFailed, Stopped, run_bounded
from contestants import BIN
from machine import busy_share, describe_machine
from processor_clock import ProcessorClock
from processor_speed import Speed
from shaped_models import write_model, write_prompts

from ycore.config.schema import RunConfig
from ycore.config.trl_arguments import derive_batch
from ycore.launch.layout import Site, layout_of, this_machine
from ycore.models.model_facts import ModelFacts, facts_of
from ycore.models.names import cache_dir
from ycore.placement.placement import JUDGE
from ycore.plan.devices import GIB, Device, Fleet, measured_core
from ycore.plan.memory import Strategy, Workload, workload_of
from ycore.plan.planner import forecast_step
from ycore.run.files import RunFolder, read_json
from ycore.run.metrics import read_metrics
from ycore.scoring.scorers import served_models
from ycore.scoring.scoring import ServedModel

COMBINATIONS = (
    "30m-full", "30m-lora", "135m-full", "135m-lora", "360m-full", "360m-lora",
    "135m-full-2", "135m-lora-2", "30m-full-2-zero2", "135m-lora-judge",
)  # fmt: skip

_REWARD = (
    "def spread(completion_ids):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
)
_JUDGE = """model: {model}
rubric: Is the answer right?
verdict: {{kind: score}}
max_tokens: 16
retries: 0
"""
_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True)
class PlannedAndMeasured:
    """A figure of a finished run, and what the formulas say with the run's own lengths and draws."""

    figure: str
    unit: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Return how far the formulas are off, as a share of what was measured."""
        return self.planned / self.measured - 1

    def as_json(self) -> dict[str, Any]:
        figures = {"planned": self.planned, "measured": self.measured, "error": self.error}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        return {"what": self.figure, "unit": self.unit, **rounded}


@dataclass(frozen=True, slots=True)
class Combination:
    """Example: `135m-full-2-zero2`, `135m-lora-judge`."""

    size: str
    full: bool
    ranks: int = 1
    sharding: str | None = None
    judged: bool = False

    @classmethod
    def named(cls, name: str) -> "Combination":
        size, kind, *more = name.split("-")
        ranks = next((int(word) for word in more if word.isdigit()), 1)
        sharding = next((word for word in more if word.startswith("zero")), None)
        return cls(size, kind == "full", ranks, sharding, "judge" in more)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    core, speed = calibrate()
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "core": asdict(speed),
        "busy": busy_share(),
        "runs": [],
    }
    failed = False
    for name in options.combinations:
        try:
            rows = run_one(name, folder, core, steps=options.steps, stop=stop)
        except RunFailed as problem:
            print(f"failed: {name}: {problem}", file=sys.stderr)
            failed = True
            continue
        except Stopped:
            print("interrupted", file=sys.stderr)
            return 130
        results["runs"].append({"name": name, "rows": [row.as_json() for row in rows]})
        (folder / "results.json").write_text(json.dumps(results, indent=2))
        print(as_lines(name, rows), flush=True)
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="plan against measured on this machine")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for models, runs and results.json"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "combinations", nargs="*", default=list(COMBINATIONS), help="e.g. 135m-full-2-zero2"
    )
    return parser.parse_args(arguments)


def calibrate() -> tuple[Device, Speed]:
    """Describe one core to the plan, measured by torch in a process of its own, so that its threads are its own."""
    folder = Path(__file__).resolve().parent
    answer = subprocess.run(
        [sys.executable, str(folder / "processor_speed.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    speed = Speed(**json.loads(answer.stdout.splitlines()[0]))
    device = measured_core()
    core = Device(
        name=device.name, memory_bytes=device.memory_bytes, flops=speed.bfloat16, bandwidth=speed.copy, link=speed.copy / 2,
        source="measured by torch, processor_speed.py", on_cpu=True,
    )  # fmt: skip
    return core, speed


def run_one(
    name: str, folder: Path, core: Device, *, steps: int, stop: threading.Event
) -> list[PlannedAndMeasured]:
    """Run a combination unless its run is there already, and compare."""
    combination, run = Combination.named(name), folder / name / "run"
    if not (run / "summary.json").is_file():
        run.parent.mkdir(exist_ok=True)
        environment = {"HF_HUB_OFFLINE": "1"}
        command = command_of(combination, folder, run, steps=steps)
        with ProcessorClock(run) as clock:
            run_bounded(
                command,
                folder=run.parent,
                environment=environment,
                timeout_s=_TIMEOUT_S,
                stop=stop,
            )
        (run.parent / "processor.json").write_text(json.dumps(clock.a_step()))
        (run.parent / "memory.json").write_text(json.dumps(clock.peaks))
    recorded_config = json.loads((run / "run.json").read_text())["config"]
    config = RunConfig.model_validate(recorded_config)
    home, machine = RunFolder(run), this_machine()
    site = Site(home, layout_of(config, machine), machine)
    rows = compared(config, site, core)
    spent = json.loads((run.parent / "processor.json").read_text())
    planned = next(row.planned for row in rows if row.figure == "time/step")
    return [
        *rows,
        PlannedAndMeasured(
            "processor/step", "s", planned, sum(spent.values()) / len(machine.cores)
        ),
    ]


def workload_with(
    config: RunConfig,
    policy: ModelFacts,
    scorers: Iterable[tuple[ServedModel, ModelFacts]],
    prompt_tokens: int | None = None,
) -> Workload:
    """Return a step's work. Of several models that score, a judge counts before the others."""
    first = min(scorers, key=lambda pair: pair[0].role != JUDGE, default=None)
    if first is None:
        return workload_of(config, policy, prompt_tokens=prompt_tokens)
    scorer, facts = first
    return workload_of(
        config,
        policy,
        prompt_tokens=prompt_tokens,
        scorer=scorer,
        judge=facts,
    )


def strategy_on_cores(config: RunConfig, site: Site, *, num_slots: int) -> Strategy:
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=True)
    return Strategy(
        ranks=site.layout.local,
        slots=num_slots,
        sharding=site.layout.sharding,
        micro_batch=batch.per_device_train_batch_size,
        checkpointing=bool(config.trl.get("gradient_checkpointing")),
    )


def cores_of(site: Site, core: Device) -> Fleet:
    return Fleet(core, max(len(site.machine.cores), site.layout.local))


def compared(config: RunConfig, site: Site, core: Device) -> list[PlannedAndMeasured]:
    """Compare the finished run in the site's folder with its forecast; `core` is one core of this machine."""
    engines, metrics = read_json(site.folder.engines), read_metrics(site.folder.metrics)
    policy = facts_of(_model_config(engines), name=config.model)
    scorers = [
        (declared, facts_of(_model_config(scorer), name=declared.name))
        for scorer, declared in zip(
            engines.get("scorers", []), served_models(config)[1:], strict=False
        )
    ]
    work = as_it_was(workload_with(config, policy, scorers), metrics)
    strategy = strategy_on_cores(config, site, num_slots=max(1, len(engines["engines"])))
    forecast = forecast_step(work, strategy, cores_of(site, core))
    rows = []
    for role, measured in by_role(read_json(site.folder.root.parent / "memory.json")).items():
        if planned := forecast.phases["all at once"].get(role):
            rows.append(
                PlannedAndMeasured(f"memory/{role}", "GiB", planned / GIB, measured / GIB)
            )
    for phase in ("sync", "round", "train", "step"):
        # Nothing is cached or compiled yet in the first step.
        if seconds := _values(metrics[1:] or metrics, f"ycore/time/{phase}"):
            rows.append(
                PlannedAndMeasured(
                    f"time/{phase}", "s", forecast.seconds[phase], median_high(seconds)
                )
            )
    return rows


def _model_config(engine: Mapping[str, Any]) -> Any:
    return read_json(Path(engine["model"]) / "config.json")


def as_it_was(work: Workload, metrics: Sequence[Mapping[str, Any]]) -> Workload:
    """Give the workload the lengths and draws that the run's steps had, which no plan can know."""
    tokens = fmean(_values(metrics, "completions/mean_length") or [0.0])
    drawn = fmean(_values(metrics, "ycore/sampling/drawn") or [0.0])
    totals = _values(metrics, "num_tokens")
    if tokens:
        work = replace(work, completion_tokens=max(1, min(work.max_tokens, round(tokens))))
    if tokens and totals:
        prompt = round(max(totals) / (work.completions * len(totals)) - tokens)
        work = replace(work, prompt_tokens=prompt) if prompt > 0 else work
    return replace(work, draws=drawn / work.prompts_per_step) if drawn else work


def by_role(peaks: Mapping[str, float]) -> dict[str, float]:
    """Add up the engines of a role: `rollout-0` and `rollout-1` are `rollout`."""
    roles: dict[str, float] = {}
    for name, size in peaks.items():
        role, _, number = name.rpartition("-")
        role = role if number.isdigit() else name
        roles[role] = roles.get(role, 0.0) + size
    return roles


def _values(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [row.get(name) for row in metrics]
    return [float(value) for value in values if isinstance(value, int | float)]


def command_of(combination: Combination, folder: Path, run: Path, *, steps: int) -> list[str]:
    """Build the command of `ycore grpo` on the shaped model."""
    model = shaped(combination.size, folder)
    prompts = write_prompts(folder / "prompts.jsonl")
    rewards = folder / "rewards.py"
    rewards.write_text(_REWARD)
    words = [
        str(BIN / "ycore"),
        "grpo",
        "--model",
        str(model),
        "--dataset",
        str(prompts),
        "--output",
        str(run),
    ]
    words += [
        "--reward",
        f"{rewards}:spread",
        "--full" if combination.full else "--lora",
        "--no-dynamic-sampling",
    ]
    words += [
        "--prompts-per-step",
        "4",
        "--group-size",
        "4",
        "--max-tokens",
        "64",
        "--steps",
        str(steps),
    ]
    words += [
        "--processes",
        str(combination.ranks),
        *(["--accelerate", combination.sharding] if combination.sharding else []),
    ]
    words += ["--set", "engine.max_model_len=512", "--set", f"checkpoint_every={steps}"]
    if combination.judged:
        judge = folder / "judge.yaml"
        judge.write_text(_JUDGE.format(model=shaped("30m", folder)))
        words += ["--reward", f"judge:{judge}"]
    return words


def shaped(size: str, folder: Path) -> Path:
    """Return the folder of the random model of this size, made where it is not there yet; its tokenizer is SmolLM2's."""
    model = folder / f"model-{size}"
    if not (model / "tokenizer.json").is_file():
        write_model(size, model, tokenizer=cache_dir() / "builtin" / "smollm2-135m")
    return model


def as_lines(name: str, rows: Sequence[PlannedAndMeasured]) -> str:
    """Write a row of a Markdown table: planned / measured and the error of each figure."""
    cells = [
        f"{row.figure} {row.planned:.2f} / {row.measured:.2f} {row.unit} ({row.error:+.0%})"
        for row in rows
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
